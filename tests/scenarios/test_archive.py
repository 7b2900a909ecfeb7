"""An anchor that keeps all of an audited run: whoever has its archive can make any counted training step again."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from scenarios.cheats import HalfTheSteps
from scenarios.swarm import Swarm
from scenarios.test_anchor import Kept
from scenarios.test_audits import EXACT, METHODS
from weft.clock import VirtualClock
from weft.codec.config import TopKConfig
from weft.events import PeerStopped
from weft.launch.replays import Report, replay
from weft.peer.audit.starts import Starts
from weft.peer.messages import WorkAnswer, WorkRequest
from weft.run.machine import PeerConfig
from weft.run.trust import AuditedTrust
from weft.sync.method.presets import DiLoCoConfig, SparseLoCoConfig
from weft.training.trainer import Trainer

Make = Callable[..., Swarm]
RARELY = AuditedTrust(audit_rate=1e-6, numerics="exact")
OF_CPU = PeerConfig(device="cpu", threads=1)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda **options: Swarm(tmp_path / "swarm", **({"learns": True, "num_peers": 3} | options))


def kept(swarm: Swarm, root: Path, names: str = "abc") -> None:
    """Play a run to its end, beside an anchor that keeps all of it."""

    async def scenario() -> None:
        anchor = Kept(swarm, root, has_archive=True)
        members = await swarm.start(names)
        await anchor.start(*members)
        await swarm.done(*members)
        await level(anchor)
        await anchor.end()

    swarm.run(scenario)


async def level(anchor: Kept) -> None:
    """Wait until the archive has all that it can get."""
    async with asyncio.timeout(120):
        while True:
            archivist = anchor.anchor.archivist
            archive = archivist._archive
            if archive.head is not None and archive.head == anchor.head and not archivist.num_pending:
                return
            await asyncio.sleep(0.5)


def check(swarm: Swarm, folder: Path, num: int | None = None) -> Report:
    told: list[object] = []
    return replay(swarm.home, swarm.run_config.run, folder, num, OF_CPU, VirtualClock(), told.append)


@pytest.mark.parametrize("trust", [EXACT, AuditedTrust(audit_rate=1.0)], ids=["exact", "fp32"])
def test_all_leases_of_a_run_are_made_again_by_who_was_not_there(
    make: Make, tmp_path: Path, trust: AuditedTrust
) -> None:
    swarm = make(method=METHODS[0], trust=trust, num_rounds=5)
    kept(swarm, tmp_path / "anchor")
    report = check(swarm, tmp_path / "anchor" / "archive")
    assert report.faults == []
    assert report.founder == swarm.member("a").id
    assert report.outcomes == {"equal": report.num_segments}
    assert report.num_segments >= 5 * 3
    assert check(swarm, tmp_path / "anchor" / "archive", 4).num_drawn == 4
