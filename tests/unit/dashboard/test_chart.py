"""Curves as SVG: round numbers on the axes, every curve inside the frame, nothing that a reader's browser would run."""

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from weft.dashboard.chart import HEIGHT, MAX_POINTS, WIDTH, Curve, chart, thinned, ticks


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 10.0, [0, 2, 4, 6, 8, 10]),
        (1.7, 4.3, [1, 2, 3, 4, 5]),
        (-3.0, 3.0, [-4, -2, 0, 2, 4]),
        (5.0, 5.0, [2, 3, 4, 5, 6, 7, 8]),
        (0.0, 4_505_600.0, [0, 1e6, 2e6, 3e6, 4e6, 5e6]),
    ],
)
def test_axes_have_round_numbers_around_what_is_drawn(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize("span", [1e-9, 1.0, 1e12])
def test_axes_have_a_few_numbers_at_every_scale(span: float) -> None:
    found = ticks(3.0 * span, 4.0 * span)
    assert 3 <= len(found) <= 8
    assert found[0] <= 3.0 * span
    assert found[-1] >= 4.0 * span * (1 - 1e-12)


def test_values_that_differ_in_their_last_bit_have_axes() -> None:
    assert ticks(1.5, math.nextafter(1.5, 2.0)) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.5])
    assert "NaN" not in chart("x", "y", [Curve("a", [(0.0, 1.5), (1.0, math.nextafter(1.5, 2.0))])])


def test_a_picture_is_well_formed_and_inside_its_frame() -> None:
    curves = [Curve("<script>alert(1)</script>", [(0.0, 5.0), (10.0, 1.0)]), Curve("b", [(0.0, 2.0), (10.0, 1.05)])]
    text = chart("Loss & more", "tokens", curves)
    root = ElementTree.fromstring(text)
    assert "<script" not in text
    assert root.attrib["aria-label"].startswith("Loss & more: <script>")
    for path in re.findall(r' d="M([^"]*)" fill', text):
        for point in path.split("L"):
            x, y = map(float, point.split())
            assert 0 <= x <= WIDTH
            assert 0 <= y <= HEIGHT


def test_names_do_not_cover_each_other() -> None:
    text = chart("x", "y", [Curve(name, [(0.0, 0.0), (1.0, 1.0)]) for name in "abc"])
    heights = [float(each) for each in re.findall(r'cy="([^"]*)"', text)]
    assert all(abs(a - b) >= 13.9 for i, a in enumerate(heights) for b in heights[:i])


def test_long_curves_keep_their_end_and_what_is_no_number_is_left_out() -> None:
    points = [(float(n), math.nan if n % 2 else float(n)) for n in range(5001)]
    found = thinned(points)
    assert len(found) <= MAX_POINTS
    assert found[-1] == (5000.0, 5000.0)
    assert all(math.isfinite(y) for _, y in found)
