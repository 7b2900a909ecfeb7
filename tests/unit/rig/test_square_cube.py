"""The square-cube law by hand, and the way that it points."""

from dataclasses import replace

import pytest
from benchmarks.rig.square_cube import Setting, compute_s, transfer_s, utilisation

SETTING = Setting(flops_per_s=1e12, bps=1e9, value_nbytes=2.0, num_tokens=1000, seq_len=0, num_trips=2.0)
WIDTHS = (256, 768, 4096, 12_288)


def test_by_hand() -> None:
    # 72 x 1000^2 operations a token, a thousand tokens, 10^12 a second: 72 ms. 2 ways x 10^6 numbers x 2 bytes: 32 ms.
    assert compute_s(1000, SETTING) == pytest.approx(0.072)
    assert transfer_s(1000, SETTING) == pytest.approx(0.032)
    assert utilisation(1000, 0.0, SETTING) == pytest.approx(72 / 104)
    assert utilisation(1000, 0.05, SETTING) == pytest.approx(72 / 204)
    assert compute_s(1000, replace(SETTING, seq_len=500)) == pytest.approx(0.072 + 0.006)


def test_work_grows_by_the_square_and_bytes_by_the_width() -> None:
    assert compute_s(2048, SETTING) == pytest.approx(4 * compute_s(1024, SETTING))
    assert transfer_s(2048, SETTING) == pytest.approx(2 * transfer_s(1024, SETTING))
    ratios = [compute_s(width, SETTING) / transfer_s(width, SETTING) / width for width in WIDTHS]
    assert ratios == pytest.approx([ratios[0]] * len(WIDTHS))


@pytest.mark.parametrize("num_under_way", [1, 8])
@pytest.mark.parametrize("rtt_s", [0.0, 0.01, 0.2])
def test_wider_layers_keep_machines_busier(rtt_s: float, num_under_way: int) -> None:
    setting = replace(SETTING, num_under_way=num_under_way)
    found = [utilisation(width, rtt_s, setting) for width in WIDTHS]
    assert found == sorted(found)
    assert 0 < found[0] < found[-1] <= 1
    assert utilisation(4096, rtt_s + 0.1, setting) <= utilisation(4096, rtt_s, setting)
    assert utilisation(256, rtt_s, replace(setting, value_nbytes=1.0)) > found[0]
    assert utilisation(256, rtt_s, replace(setting, num_layers=3)) > found[0]


def test_what_is_under_way_hides_latency_up_to_the_line_or_the_machine() -> None:
    # c = 72 ms, b = 32 ms, 200 ms of latency: one at a time 72 / 304.
    shares = [utilisation(1000, 0.1, replace(SETTING, num_under_way=num)) for num in (1, 2, 3, 4, 5, 8)]
    assert shares == pytest.approx([72 / 304, 144 / 304, 216 / 304, 288 / 304, 1.0, 1.0])
    thin = replace(SETTING, bps=1e8, num_under_way=100)
    assert utilisation(1000, 0.1, thin) == pytest.approx(0.072 / 0.32)


def test_published_figures_have_the_laws_form() -> None:
    """Two of SWARM's columns give a row's three others: 100 / u = 1 + (b + r) / c."""
    from benchmarks.square_cube import PUBLISHED, RTTS_MS

    for name, (_, shares) in PUBLISHED.items():
        slope = (100 / shares[-1] - 100 / shares[0]) / RTTS_MS[-1]
        for rtt, share in zip(RTTS_MS, shares, strict=True):
            assert 100 / (100 / shares[0] + slope * rtt) == pytest.approx(share, abs=1.0), (name, rtt)
