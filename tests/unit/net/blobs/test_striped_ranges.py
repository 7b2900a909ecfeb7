"""Which range comes next, and when another stream is worth it."""

import pytest

from weft.net.blobs.striped import (
    FIRST_NBYTES,
    LEAST_NBYTES,
    LOOK_S,
    MAX_STREAMS,
    MOST_NBYTES,
    NUM_LOOKS,
    RANGE_S,
    WORTH_S,
    Ranges,
)

MIB = 1 << 20


def test_every_byte_is_asked_for_once_in_order() -> None:
    ranges, at = Ranges(9 * MIB + 5, 0.0), 0
    while (span := ranges.take(1)) is not None:
        assert span[0] == at
        assert 0 < span[1] - span[0] <= FIRST_NBYTES
        at = span[1]
    assert at == 9 * MIB + 5


def test_towards_the_end_ranges_become_shorter_so_that_streams_end_together() -> None:
    ranges, sizes = Ranges(20 * MIB, 0.0), []
    while (span := ranges.take(4)) is not None:
        sizes.append(span[1] - span[0])
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == FIRST_NBYTES
    assert sizes[-1] <= LEAST_NBYTES


def test_the_front_is_what_has_come_without_a_gap() -> None:
    ranges = Ranges(3 * FIRST_NBYTES, 0.0)
    one, two = ranges.take(1), ranges.take(1)
    assert one is not None
    assert two is not None
    ranges.arrived(two)
    assert ranges.front == 0
    ranges.arrived(one)
    assert ranges.front == two[1]
    assert not ranges.is_done


def test_one_stream_has_no_short_ranges_at_the_end() -> None:
    ranges, sizes = Ranges(9 * MIB, 0.0), []
    while (span := ranges.take(1)) is not None:
        sizes.append(span[1] - span[0])
    assert sizes == [FIRST_NBYTES] * 4 + [MIB]


def test_on_a_fast_line_ranges_become_longer_before_the_first_look() -> None:
    ranges, sizes = Ranges(64 * MIB, 0.0), []
    while len(sizes) < 5 and (span := ranges.take(1)) is not None:
        sizes.append(span[1] - span[0])
        ranges.arrived(span, RANGE_S / 10)
    assert sizes == [FIRST_NBYTES, 2 * FIRST_NBYTES, MOST_NBYTES, MOST_NBYTES, MOST_NBYTES]


@pytest.mark.parametrize("took_s", [RANGE_S / 4, 2 * RANGE_S])
def test_on_another_they_stay_as_they_are(took_s: float) -> None:
    ranges = Ranges(64 * MIB, 0.0)
    for _ in range(3):
        span = ranges.take(1)
        assert span is not None
        assert span[1] - span[0] == FIRST_NBYTES
        ranges.arrived(span, took_s)


def test_what_did_not_come_is_asked_for_next() -> None:
    ranges = Ranges(5 * FIRST_NBYTES, 0.0)
    lost = ranges.take(1)
    assert lost is not None
    ranges.take(1)
    ranges.back(lost)
    assert ranges.take(1) == lost


def opened(rate_of_streams: list[float], nbytes: int, seconds: float) -> list[float]:
    """Return when streams were opened after the first one, on a path that carries so much with so many of them."""
    ranges, come, num, now, times = Ranges(nbytes, 0.0), 0.0, 1, 0.0, []
    while now < seconds and come < nbytes:
        now += LOOK_S
        come += rate_of_streams[num - 1] / 8 * LOOK_S
        if ranges.wants_another(num, int(come), now):
            num += 1
            times.append(now)
    return times


def test_each_stream_that_gains_makes_room_for_another_up_to_a_few() -> None:
    assert len(opened([1.5e6, 3e6, 4.5e6, 6e6, 7.5e6], 64 * MIB, 300.0)) == MAX_STREAMS - 1


def test_a_stream_that_gains_little_is_the_last_one() -> None:
    (at,) = opened([20e6, 21e6, 63e6, 84e6], 640 * MIB, 600.0)
    assert at < NUM_LOOKS * LOOK_S


@pytest.mark.parametrize("rate", [0.0, 8 * 16 * MIB / WORTH_S])
def test_what_comes_soon_or_not_at_all_needs_no_help(rate: float) -> None:
    assert opened([rate] * 5, 16 * MIB, 60.0) == []


@pytest.mark.parametrize(("rate", "size"), [(1e5, LEAST_NBYTES), (16e6, 2_000_000), (1e12, MOST_NBYTES)])
def test_a_range_takes_about_a_second(rate: float, size: int) -> None:
    ranges = Ranges(1 << 40, 0.0)
    ranges.wants_another(1, int(rate / 8 * LOOK_S), LOOK_S)
    span = ranges.take(1)
    assert span is not None
    assert span[1] - span[0] == size
