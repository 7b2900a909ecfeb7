"""A meter: silent on short work, with rate and time left on long, and a last word when it ends or fails."""

import pytest

from unit.hands import Hands
from weft.dashboard import figures
from weft.events import Event, Working
from weft.progress import EVERY_S, RECENT_S, Meter


class Told(list[Working]):
    def emit(self, event: Event) -> None:
        assert isinstance(event, Working)
        self.append(event)


def metered(total: int | None, *works: tuple[float, int], done: int = 0) -> Told:
    """Return what a meter tells of units that each take some seconds."""
    told, clock = Told(), Hands()
    with Meter("reading", "B", told.emit, clock, total, done=done) as meter:
        for seconds, num in works:
            clock.at += seconds
            meter.add(num)
    return told


def test_nothing_is_told_of_what_is_short() -> None:
    assert metered(100, (EVERY_S / 2, 50), (EVERY_S / 4, 50)) == []


def test_rate_and_time_left_follow_from_what_was_done() -> None:
    first, over = metered(1000, (2.0, 200))
    assert (first.done, first.total, first.rate, first.left_s, first.is_over) == (200, 1000, 100.0, 8.0, False)
    assert (over.done, over.is_over) == (200, True)


def test_what_was_there_before_is_counted_and_tells_nothing_of_the_rate() -> None:
    first, *_ = metered(1000, (2.0, 100), done=500)
    assert (first.done, first.rate, first.left_s) == (600, 50.0, 8.0)


def test_the_rate_is_that_of_late() -> None:
    *_, last, _ = metered(10_000, (2.0, 2000), *[(2.0, 20)] * int(RECENT_S))
    assert last.rate == pytest.approx(10.0)


def test_without_a_total_there_is_no_time_left() -> None:
    first, *_ = metered(None, (2.0, 200))
    assert (first.total, first.left_s) == (None, None)


def test_more_than_there_was_to_do_is_all_of_it() -> None:
    first, over = metered(100, (2.0, 130))
    assert (first.done, first.left_s, over.done) == (100, 0.0, 100)


def test_it_is_told_every_two_seconds_at_most() -> None:
    told = metered(1000, *[(0.1, 1)] * 100)
    assert 4 <= len(told) <= 6
    assert [event.is_over for event in told] == [False] * (len(told) - 1) + [True]


def test_work_that_fails_is_over() -> None:
    told, clock = Told(), Hands()
    with pytest.raises(OSError), Meter("reading", "B", told.emit, clock, 10) as meter:  # noqa: PT011, PT012
        clock.at += 3
        meter.add(5)
        raise OSError
    assert told[-1].is_over


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "fetching the state: 45 % of 1.2 GB, 4.1 MB/s, 3:20 left"),
        ({"rate": 0.0, "left_s": None}, "fetching the state: 45 % of 1.2 GB"),
        ({"total": None, "left_s": None}, "fetching the state: 540 MB, 4.1 MB/s"),
        (
            {"what": "evaluating", "unit": "windows", "done": 90, "total": 200, "rate": 3.0, "left_s": 37.0},
            "evaluating: 45 % of 200 windows, 3 windows/s, 0:37 left",
        ),
    ],
)
def test_it_reads_well(changes: dict[str, object], words: str) -> None:
    fields: dict[str, object] = {"what": "fetching the state", "unit": "B", "done": 540_000_000, "total": 1_200_000_000}
    fields |= {"rate": 4.1e6, "left_s": 200.0, "is_over": False}
    assert figures.work(Working(**fields | changes)) == words  # type: ignore[arg-type]
