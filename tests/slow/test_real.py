"""A script with every fault that real processes can suffer, played by three of them."""

import asyncio
import os
import shutil
import time
from pathlib import Path

import psutil
import pytest
from benchmarks.rig.namespaces import Lines
from benchmarks.rig.real import RealStage

from slow.shell import RUN
from weft.events import LoopStalled, MajorityLost, MemberGone, MemberLeft, RoundCommitted, StateJoined
from weft.sim.scenario import Freeze, Kill, Kind, Line, Partition, Scenario, Slow, Stop

pytestmark = pytest.mark.slow

FROZEN_S, SLOW_S, FACTOR = 4.0, 10.0, 0.2
LIMIT_S = 75.0


def test_real_processes_are_killed_stopped_frozen_and_slowed_by_a_script(tmp_path: Path, run_file: Path) -> None:
    run_file.write_text(RUN.replace("peers = 2", "peers = 3"))
    scenario = Scenario(
        run="",
        kind=(Kind(name="lab", count=3), Kind(name="late", joins_at_s=2.0)),
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
    looks: dict[str, list[bool]] = {"slow": [], "usual": []}

    def watch() -> None:
        since_s = time.time() - stage.began_at
        when = "slow" if 21.0 < since_s < 20.0 + SLOW_S else "usual" if since_s > 40.0 else ""
        if when:
            process = psutil.Process(stage.machines["lab-1"].lives[-1].process.pid)
            looks[when].append(process.status() == psutil.STATUS_STOPPED)

    asyncio.run(stage.play(watch))
    assert stage.broken == []
    assert stage.living == []
    maker, frozen, stopped, late = stage.machines.values()

    assert [life.process.returncode for life in maker.lives] == [-9]
    assert (maker.lives[0].ended_at or 0.0) - stage.began_at == pytest.approx(7.0, abs=1.0)
    assert [life.process.returncode for life in stopped.lives] == [0, 0]
    assert {type(entry.event) for entry in frozen.entries} >= {LoopStalled, MemberLeft}
    stalls = [entry.event.stall_s for entry in frozen.entries if isinstance(entry.event, LoopStalled)]
    assert max(stalls) == pytest.approx(FROZEN_S, abs=1.5)

    assert sum(looks["slow"]) > 0.4 * len(looks["slow"])  # it stands still four fifths of that time
    assert sum(looks["usual"]) == 0

    # Who came later, and who came again, are counted in like anybody.
    assert any(isinstance(entry.event, StateJoined) for entry in late.entries)
    counted = [entry.event for entry in frozen.entries if isinstance(entry.event, RoundCommitted)][-5:]
    assert all({late.entries[0].peer, stopped.entries[0].peer} <= set(event.contributors) for event in counted)


@pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "iptables"))),
    reason="network namespaces need root, iproute2, tc and iptables",
)
def test_real_machines_are_parted_and_their_lines_slowed_by_a_script(tmp_path: Path, run_file: Path) -> None:
    run = RUN.replace("peers = 2", "peers = 3").replace("orphan_after_s = 5.0", "orphan_after_s = 60.0")
    run_file.write_text(run.replace("\nwidth = 32", "\nwidth = 128"))  # payloads of some 100 kB
    scenario = Scenario(
        run="",
        kind=(Kind(name="lab", count=2), Kind(name="away", up_mbit=20.0)),
        fault=(
            Partition(sides=(("away",),), at_s=2.0, lasts_s=16.0),
            Line(peer="lab-1", up_mbit=1.0, down_mbit=1.0, at_s=30.0, lasts_s=10.0),
        ),
        limit_s=50.0,
    )
    with Lines("weft-real", 3, mbit=100) as lines:
        stage = RealStage(scenario, run_file, tmp_path, lines=lines)
        asyncio.run(stage.play())
    assert stage.broken == []
    here, _, away = stage.machines.values()

    def commits(since_s: float, until_s: float) -> list[RoundCommitted]:
        entries = [entry for entry in here.entries if isinstance(entry.event, RoundCommitted)]
        return [
            entry.event
            for entry in entries
            if isinstance(entry.event, RoundCommitted) and since_s <= entry.at - stage.began_at < until_s
        ]

    gone = [entry for entry in here.entries if isinstance(entry.event, MemberGone)]
    assert [entry.event.member for entry in gone if isinstance(entry.event, MemberGone)] == [away.entries[0].peer]
    assert 2.0 < gone[0].at - stage.began_at < 18.0
    assert any(isinstance(entry.event, MajorityLost) for entry in away.entries)
    parted = commits(13.0, 18.0)
    assert parted
    assert all(away.entries[0].peer not in event.contributors for event in parted)
    healed = commits(28.0, 50.0)
    assert away.entries[0].peer in healed[-1].contributors
    # A round's exchange over a line of 1 Mbit/s takes longer than over one of 100.
    slowed, usual = commits(31.0, 40.0), commits(41.0, 50.0)
    assert min(event.duration_s for event in slowed) > min(event.duration_s for event in usual)
