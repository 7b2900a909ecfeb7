"""A script with every fault that real processes can suffer, played by three of them."""

import asyncio
from pathlib import Path

import pytest

from slow.shell import RUN
from weft.events import LoopStalled, MemberLeft, RoundCommitted, StateJoined, StepDone
from weft.sim.faults import Freeze, Kill, Slow, Stop
from weft.sim.real import RealStage
from weft.sim.scenario import Group, Scenario

pytestmark = pytest.mark.slow

FROZEN_S, SLOW_S, FACTOR = 4.0, 10.0, 0.2
LIMIT_S = 75.0


def test_real_processes_are_killed_stopped_frozen_and_slowed_by_a_script(tmp_path: Path, run_file: Path) -> None:
    run_file.write_text(RUN.replace("peers = 2", "peers = 3"))
    scenario = Scenario(
        run="",
        group=(Group(name="lab", count=3), Group(name="late", joins_at_s=2.0)),
        fault=(
            Freeze(peer="lab-1", at_s=1.0, lasts_s=FROZEN_S),
            Kill(peer="lab-0", at_s=7.0),  # the maker
            Stop(peer="lab-2", at_round=3, returns_after_s=0.5),
            Slow(peer="lab-1", at_s=20.0, factor=FACTOR, lasts_s=SLOW_S),
            Slow(peer="lab-1", at_s=21.0, factor=1.0, lasts_s=2.0),
        ),
        limit_s=LIMIT_S,
    )
    stage = RealStage(scenario, run_file, tmp_path)
    asyncio.run(stage.play())
    assert stage.broken == []
    assert stage.living == []
    maker, frozen, stopped, late = stage.machines.values()

    assert [life.process.returncode for life in maker.lives] == [-9]
    assert (maker.lives[0].ended_at or 0.0) - stage.began_at == pytest.approx(7.0, abs=1.0)
    assert [life.process.returncode for life in stopped.lives] == [0, 0]
    assert {type(entry.event) for entry in frozen.entries} >= {LoopStalled, MemberLeft}
    stalls = [entry.event.stall_s for entry in frozen.entries if isinstance(entry.event, LoopStalled)]
    assert max(stalls) == pytest.approx(FROZEN_S, abs=1.5)

    def speed(since_s: float, until_s: float) -> float:
        steps = [entry.at - stage.began_at for entry in frozen.entries if isinstance(entry.event, StepDone)]
        return sum(since_s < at <= until_s for at in steps) / (until_s - since_s)

    # It works a fifth of the time: its own computing stretches by as much; the rest of a round it waits in any case.
    assert speed(21.0, 20.0 + SLOW_S) < 0.7 * speed(45.0, LIMIT_S)

    # Who came later, and who came again, are counted in like anybody.
    assert any(isinstance(entry.event, StateJoined) for entry in late.entries)
    counted = [entry.event for entry in frozen.entries if isinstance(entry.event, RoundCommitted)][-5:]
    assert all({late.entries[0].peer, stopped.entries[0].peer} <= set(event.contributors) for event in counted)
