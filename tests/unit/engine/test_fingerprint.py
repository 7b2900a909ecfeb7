"""Fingerprints are those of a plain reference, and tell an honest row from another."""

import struct

import numpy as np
import pytest

from weft import rng
from weft.engine.fingerprint import EQUAL, MAX_NBYTES, NUM, Distance, bounds_of, distance, fingerprint, parsed
from weft.errors import PayloadError


def rows(num: int, width: int, seed: int = 0) -> np.ndarray:
    return rng.stream(seed, "rows").standard_normal((num, width)).astype(np.float32)


def bf16(number: float) -> int:
    word = struct.unpack("<I", struct.pack("<f", number))[0]
    upper, rest = word >> 16, word & 0xFFFF
    if rest > 0x8000 or (rest == 0x8000 and upper % 2):
        upper += 1
    return upper - 1 if upper & 0x7FFF == 0x7F80 else upper


def reference(row: list[float]) -> bytes:
    """What the first lines of the module say, number by number."""
    bits = [bf16(number) for number in row]
    order = sorted(range(len(row)), key=lambda place: (-(bits[place] & 0x7FFF), place))
    places = sorted(order[:NUM])
    found, before = b"", -1
    for place in places:
        gap, before = place - before - 1, place
        while gap > 0x7F:
            found += bytes([gap % 128 + 128])
            gap //= 128
        found += bytes([gap])
    for place in places:
        found += struct.pack("<H", bits[place])
    return found


def reference_distance(told: list[tuple[int, int]], row: list[float]) -> Distance:
    own = dict(told_by(reference(row), len(row)))
    apart = [abs(value % 128 - own[place] % 128) for place, value in told if own.get(place, 0) >> 7 == value >> 7]
    middle = sorted(apart)
    median = (middle[(len(middle) - 1) // 2] + middle[len(middle) // 2]) / 2
    return Distance(len(told) - len(apart), sum(apart) / len(apart), median)


def told_by(told: bytes, num: int) -> list[tuple[int, int]]:
    places, values = parsed(told, num)
    return list(zip(places.tolist(), values.tolist(), strict=True))


@pytest.mark.parametrize("width", [3, NUM, NUM + 1, 576, 5000, 70_000])
def test_a_fingerprint_is_that_of_the_reference(width: int) -> None:
    for row in rows(3, width):
        row[::7] = row[0]  # ties
        assert fingerprint(row) == reference(row.tolist())
        assert len(fingerprint(row)) <= MAX_NBYTES


def test_numbers_at_the_ends_of_what_fp32_holds_have_fingerprints() -> None:
    row = np.zeros(100, dtype=np.float32)
    row[:4] = np.finfo(np.float32).max, np.finfo(np.float32).min, np.finfo(np.float32).tiny, -0.0
    assert fingerprint(row) == reference(row.tolist())
    assert distance(fingerprint(row), row) == EQUAL


@pytest.mark.parametrize("noise", [3e-3, 1e-2, 0.1])
def test_a_distance_is_that_of_the_reference(noise: float) -> None:
    for one, more in zip(rows(5, 576), rows(5, 576, 1), strict=True):
        other = one + np.float32(noise) * more
        expected = reference_distance(told_by(fingerprint(one), 576), other.tolist())
        assert distance(fingerprint(one), other) == pytest.approx(expected)
        assert expected != EQUAL


def test_a_row_is_far_from_others_and_near_to_itself_with_little_noise() -> None:
    one, other = rows(2, 576)
    assert distance(fingerprint(one), one) == EQUAL
    near = distance(fingerprint(one), one * np.float32(1.001))
    assert near.is_within(Distance(3, 1.0, 1.0))
    assert distance(fingerprint(one), other).off > NUM // 2
    assert distance(fingerprint(one), -one).off == NUM


def test_bounds_are_the_largest_of_honest_runs_and_some_room() -> None:
    assert bounds_of([Distance(1, 0.5, 0.0), Distance(3, 0.25, 1.0)], 1.5) == Distance(5, 0.75, 1.5)


@pytest.mark.parametrize(
    "altered",
    [
        lambda told: told[:-1],
        lambda told: told + b"\0\0",
        lambda told: b"",
        lambda told: told[:-2] + struct.pack("<H", 0x7F80),  # infinite
        lambda told: told[:-2] + struct.pack("<H", 0xFFC0),  # not a number
        lambda told: b"\xff\xff\xff" + told[1:],  # a place beyond any
        lambda told: bytes([told[0] | 0x80, 0]) + told[1:],  # a place in a longer form
        lambda told: b"\xff\x03" + told[1:],  # beyond the row
    ],
)
def test_what_is_no_fingerprint_of_such_a_row_is_refused(altered) -> None:
    row = rows(1, 500)[0]
    with pytest.raises(PayloadError):
        distance(altered(fingerprint(row)), row)
