"""What a process before this one measured of rounds."""

import asyncio
from pathlib import Path

import pytest

from weft.clock import VirtualClock
from weft.ids import PeerId
from weft.peer.round.timers import EVERY_S, SLACK, Measured, RoundTimes, Timers
from weft.sync.round.machine import FIRST_S, NUM_REMEMBERED

TOOK = Measured(graces_s=(1.0, 1.0, 1.0), latencies_s=(4.0, 4.0, 4.0))


A = PeerId("a")


def test_it_is_written_now_and_then_and_read_again(tmp_path: Path) -> None:
    now = [100.0]
    path = tmp_path / "a folder" / "measured.json"
    memory = RoundTimes(path, lambda: now[0], is_on=True)
    assert memory.read() == Measured()
    memory.keep(TOOK)
    memory.keep(Measured())  # a moment later
    assert RoundTimes(path, lambda: 0.0, is_on=True).read() == TOOK
    now[0] += EVERY_S
    memory.keep(Measured())
    assert memory.read() == Measured()
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_who_keeps_nothing_writes_nothing(tmp_path: Path) -> None:
    RoundTimes(tmp_path / "measured.json", lambda: 0.0, is_on=False).keep(TOOK)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b'{"graces_s": [-1.0]}', b'{"latencies_s": [1e300]}', b'{"graces_s": [' + b"1," * 99 + b"1]}"],
)
def test_what_is_damaged_is_as_if_nothing_had_been_measured(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "measured.json"
    path.write_bytes(data)
    assert RoundTimes(path, lambda: 0.0, is_on=True).read() == Measured()


def test_a_folder_that_cannot_be_written_disturbs_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    RoundTimes(tmp_path / "file" / "measured.json", lambda: 0.0, is_on=True).keep(TOOK)


def test_deadlines_are_as_long_as_they_were() -> None:
    clock = VirtualClock()

    async def scenario() -> None:
        timers = Timers(clock, lambda _timer, _attempt: None)
        assert timers.progress_s() == 2 * FIRST_S
        timers.recall(TOOK)
        assert timers.progress_s() == 2.0 + SLACK * 4.0
        for _ in range(NUM_REMEMBERED):
            timers.begin()
            timers.note_ready(A)
            timers.note_quorum()
            await asyncio.sleep(10)
            timers.note_decided([A], is_whole=True)
        assert timers.measured == Measured(graces_s=(0.0,) * NUM_REMEMBERED, latencies_s=(10.0,) * NUM_REMEMBERED)

    clock.run(scenario())
