"""Each method over real sockets: four processes, one killed in the middle of a round, another one joining."""

import asyncio
from pathlib import Path

import pytest
from benchmarks.rig.real import RealStage

from slow.shell import RUN
from weft.events import MemberGone, RoundCommitted, StateJoined
from weft.plan.catalogue import CATALOGUE
from weft.sim.scenario import Kill, Kind, Scenario

pytestmark = pytest.mark.slow

LIMIT_S = 60.0  # two cores start six processes and train five
EVERY = {"streaming": 20}  # of each fragment; others: 5
WITHOUT_EVERY = ("ddp", "powersgd", "demo", "auto")
MERGED_BY_ALL = """type = "custom"
every = 5
send = "delta"
merged_by = "all"

[method.codec]
type = "int8"

[method.apply]
type = "nesterov"
"""
METHODS = {
    each.name: f'type = "{each.name}"\n'
    + (f"every = {EVERY.get(each.name, 5)}\n" if each.name not in WITHOUT_EVERY else "")
    for each in CATALOGUE
}
METHODS["merged by all"] = MERGED_BY_ALL


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_method_outlives_a_kill_and_counts_who_joins(tmp_path: Path, run_file: Path, method: str) -> None:
    text = RUN.replace("peers = 2", "peers = 4").replace('type = "diloco"\nevery = 20\n', method)
    (tmp_path / "text.txt").write_text("".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(2_000)))
    run_file.write_text(text)
    scenario = Scenario(
        run="",
        kind=(Kind(name="lab", count=4), Kind(name="late", joins_at_s=15.0)),
        fault=(Kill(peer="lab-2", at_round=6),),
        limit_s=LIMIT_S,
    )
    stage = RealStage(scenario, run_file, tmp_path)
    asyncio.run(stage.play())
    assert stage.broken == []
    assert stage.living == []

    stays, killed, late = stage.machines["lab-1"], stage.machines["lab-2"], stage.machines["late"]
    assert [life.process.returncode for life in killed.lives] == [-9]
    dead, newcomer = killed.entries[0].peer, late.entries[0].peer
    commits = [entry for entry in stays.entries if isinstance(entry.event, RoundCommitted)]
    # Rounds may be so fast that one of them had not met it yet.
    seen = [entry for name in ("lab-0", "lab-1", "lab-3") for entry in stage.machines[name].entries]
    gone_at = min(entry.at for entry in seen if isinstance(entry.event, MemberGone) and entry.event.member == dead)
    after = [entry.event for entry in commits if entry.at > gone_at]
    assert len(after) >= 5
    assert not any(dead in event.contributors for event in after)
    assert any(isinstance(entry.event, StateJoined) for entry in late.entries)
    assert any(newcomer in event.contributors for event in after)
    # All that made a round's step hold the same state after it.
    known = {(event.branch, event.round): event.manifest for event in (entry.event for entry in commits)}
    theirs = [entry.event for entry in late.entries if isinstance(entry.event, RoundCommitted)]
    assert theirs
    assert all(known.get((event.branch, event.round), event.manifest) == event.manifest for event in theirs)
