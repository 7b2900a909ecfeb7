"""What one machine gives at most: hours, a day's bytes over restarts, memory, cores, and who acts on them."""

import asyncio
import mmap
import os
from datetime import UTC
from pathlib import Path

import pytest

from weft.clock import VirtualClock
from weft.config import from_tree
from weft.errors import ConfigError
from weft.events import Event, Notice
from weft.launch.guard import DayCount, Guard
from weft.run.host import chosen_cores, limit_cores, process_nbytes
from weft.run.machine import (
    CapsConfig,
    Moved,
    PeerConfig,
    clock_face,
    is_near,
    is_open,
    minute_of,
    moved_on,
    opens_at,
    span,
)

DAY_S = 86_400.0


def minute(text: str) -> int:
    hours, minutes = text.split(":")
    return int(hours) * 60 + int(minutes)


@pytest.mark.parametrize(
    ("hours", "at", "found"),
    [
        ((), "12:00", True),
        (("22:00-07:00",), "21:59", False),
        (("22:00-07:00",), "22:00", True),
        (("22:00-07:00",), "00:00", True),
        (("22:00-07:00",), "06:59", True),
        (("22:00-07:00",), "07:00", False),
        (("09:00-12:00", "13:00-17:30"), "12:30", False),
        (("09:00-12:00", "13:00-17:30"), "17:29", True),
        (("0:00-24:00",), "13:00", True),
        (("18:00-24:00",), "23:59", True),
        (("18:00-24:00",), "00:00", False),
    ],
)
def test_hours_may_pass_midnight_and_be_several(hours: tuple[str, ...], at: str, found: bool) -> None:
    assert is_open(CapsConfig(hours=hours).hours, minute(at)) is found


@pytest.mark.parametrize("text", ["", "22-7", "22:00", "25:00-07:00", "22:60-07:00", "07:00-07:00", "10:00-24:30", "x"])
def test_what_is_no_range_of_hours_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="22:00-07:00"):
        span(text)
    with pytest.raises(ConfigError, match=r"hours: .* says no times of day, from and to"):
        from_tree({"caps": {"hours": [text]}}, PeerConfig, where="machine.toml")


def test_the_next_opening_is_the_next_of_all_ranges() -> None:
    assert clock_face(opens_at(("22:00-07:00", "12:00-13:00"), minute("08:15"))) == "12:00"
    assert clock_face(opens_at(("22:00-07:00", "12:00-13:00"), minute("13:00"))) == "22:00"
    assert clock_face(opens_at(("05:00-06:00",), minute("23:00"))) == "05:00"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("upload_bps", 10_000, "caps.upload_bps is 10000. Allowed: a number, at least 1000000"),
        ("day_nbytes", "5GB", "caps.day_nbytes is"),
        ("cores", 0, "caps.cores is 0. Allowed: a whole number, at least 1"),
        ("uplod_bps", 1e6, 'Did you mean "upload_bps"?'),
    ],
)
def test_a_cap_that_cannot_be_is_named_with_what_can(field: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_tree({"caps": {field: value}}, PeerConfig, where="machine.toml")
    assert said in str(caught.value)


def test_threads_are_no_more_than_cores() -> None:
    found = [
        PeerConfig(threads=threads, caps=CapsConfig(cores=cores)).num_threads
        for threads, cores in ((0, None), (4, None), (0, 2), (1, 2), (4, 2))
    ]
    assert found == [0, 4, 2, 1, 2]


def test_a_day_counts_over_starts_and_a_new_one_begins_at_nothing(tmp_path: Path) -> None:
    clock, caps = VirtualClock(), CapsConfig(day_nbytes=100_000_000)
    first = DayCount(tmp_path / "moved", caps, clock, UTC)
    first.ration.spend(60_000_000)
    first.look()
    first.keep()
    again = DayCount(tmp_path / "moved", caps, clock, UTC)
    assert again.moved.nbytes == 60_000_000
    assert again.ration.left_nbytes == 40_000_000
    again.require(39_000_000)
    with pytest.raises(ConfigError, match=r"0\.06 GB were moved today and joining takes 0\.041 GB; the cap is 0\.1 GB"):
        again.require(41_000_000)
    again.ration.spend(40_000_000)  # writes it down at once: nothing is left
    with pytest.raises(ConfigError, match="after midnight"):
        DayCount(tmp_path / "moved", caps, clock, UTC).require()
    clock.advance(DAY_S)
    assert again.look()
    assert again.ration.left_nbytes == 100_000_000
    DayCount(tmp_path / "moved", caps, clock, UTC).require()


def test_a_count_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    (tmp_path / "moved").write_text("{")
    assert DayCount(tmp_path / "moved", CapsConfig(day_nbytes=10**9), VirtualClock(), UTC).moved.nbytes == 0
    assert moved_on("2026-11-21", Moved(day="2026-11-20", nbytes=5), 3) == Moved(day="2026-11-21", nbytes=3)
    assert [is_near(Moved(day="", nbytes=nbytes), 100) for nbytes in (89, 90)] == [False, True]


def test_processes_that_count_in_one_file_share_the_day(tmp_path: Path) -> None:
    caps, clock = CapsConfig(day_nbytes=10**8), VirtualClock()
    one, other = (DayCount(tmp_path / "moved", caps, clock, UTC) for _ in range(2))
    one.ration.spend(6 * 10**7)
    one.keep()
    other.ration.spend(3 * 10**7)
    other.keep()
    assert DayCount(tmp_path / "moved", caps, clock, UTC).moved.nbytes == 9 * 10**7
    assert other.ration.left_nbytes == 10**7
    one.keep()
    assert one.ration.left_nbytes == 10**7
    one.ration.spend(10**7)
    one.keep()
    other.keep()
    assert other.ration.is_spent
    assert DayCount(tmp_path / "moved", caps, clock, UTC).moved.nbytes == 10**8


class Watched:
    """A guard, and what it said and did."""

    def __init__(self, root: Path, caps: CapsConfig, until: float | None = None) -> None:
        self.clock = VirtualClock()
        self.day = DayCount(root / "moved", caps, self.clock, UTC)
        self.events: list[Event] = []
        self.stops: list[str] = []
        self.reasons: list[str] = []
        self.taken = 0
        self.guard = Guard(caps, self.day, self.events.append, self, until, lambda: self.taken)

    @property
    def pausing(self) -> "Watched":
        return self

    def stop(self, reason: str) -> None:
        self.stops.append(reason)

    def fail(self, error: Exception) -> None:
        raise error

    def want(self, reason: str) -> None:
        self.reasons.append(reason)

    def want_no_more(self, reason: str) -> None:
        self.reasons = [each for each in self.reasons if each != reason]

    async def settled(self) -> None:
        pass


def test_near_the_days_cap_it_is_said_once_and_at_the_cap_the_peer_leaves(tmp_path: Path) -> None:
    watched = Watched(tmp_path, CapsConfig(day_nbytes=100_000_000))
    watched.day.ration.spend(89_000_000)
    watched.guard.look()
    assert watched.events == []
    watched.day.ration.spend(2_000_000)
    watched.guard.look()
    watched.guard.look()
    assert watched.events == [Notice(text="0.091 GB of the day's 0.1 GB are moved; at the cap this peer leaves")]
    assert watched.stops == []
    watched.day.ration.spend(9_000_000)
    watched.guard.look()
    assert watched.stops == ["0.1 GB moved today, and the cap is 0.1 GB"]


def test_who_takes_more_memory_than_its_cap_leaves(tmp_path: Path) -> None:
    watched = Watched(tmp_path, CapsConfig(memory_nbytes=2_000_000_000))
    watched.taken = 2_000_000_000
    watched.guard.look()
    assert watched.stops == []
    watched.taken += 1
    watched.guard.look()
    assert watched.stops == ["it uses 2 GB of memory, and the cap is 2 GB"]


def test_outside_its_hours_a_peer_is_paused(tmp_path: Path) -> None:
    watched = Watched(tmp_path, CapsConfig(hours=("22:00-07:00", "23:30-24:00")))
    watched.clock.advance(DAY_S - watched.clock.wall() % DAY_S + 6.5 * 3600)  # half past six, UTC
    seen = []
    for _ in range(48):
        watched.guard.look()
        watched.guard.look()
        seen.append((clock_face(minute_of(watched.day.local())), tuple(watched.reasons)))
        watched.clock.advance(1800)
    paused = [face for face, reasons in seen if reasons]
    assert (paused[0], paused[-1], len(paused)) == ("07:00", "21:30", 30)
    assert {reasons for _, reasons in seen if reasons} == {("outside its hours, until 22:00",)}
    assert watched.stops == []


def test_a_peer_leaves_when_its_time_has_come_and_says_when_at_its_start(tmp_path: Path) -> None:
    clock = VirtualClock()
    watched = Watched(tmp_path, CapsConfig(), until=clock.wall() + 7200)

    async def main() -> None:
        watching = asyncio.ensure_future(watched.guard.watch())
        await asyncio.sleep(7199)
        assert watched.stops == []
        await asyncio.sleep(2)
        watching.cancel()

    watched.clock.run(main())
    assert watched.events == [Notice(text="this peer leaves on 2023-11-15 at 00:13")]
    assert watched.stops[0] == "it is 00:13, the time at which it was to leave"


def test_memory_of_this_process_is_counted_without_mapped_files() -> None:
    before = process_nbytes()
    held = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # not what the heap has free
    held.write(os.urandom(1 << 20) * 64)
    assert process_nbytes() - before > 48 << 20
    held.close()


def test_cores_lie_side_by_side_and_several_peers_spread_out() -> None:
    assert chosen_cores([0, 1, 2, 3], 2, 0) == (0, 1)
    assert chosen_cores([0, 1, 2, 3], 2, 1) == (2, 3)
    assert chosen_cores([0, 1, 2, 3], 2, 2) == (0, 1)
    assert chosen_cores([0, 1, 2], 2, 1) == (0, 2)
    assert chosen_cores([4, 6], 3, 7) == (4, 6)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity that a test can put back")
def test_a_process_is_kept_to_its_cores_with_all_its_threads() -> None:
    before = os.sched_getaffinity(0)
    try:
        chosen = limit_cores(1)
        assert len(chosen) == 1
        assert os.sched_getaffinity(0) == set(chosen)
    finally:
        limit_cores_back(before)


def limit_cores_back(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)
