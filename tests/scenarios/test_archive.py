"""An anchor that keeps all of an audited run: whoever has its archive can make any counted training step again."""

import asyncio
import shutil
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from scenarios.cheats import always
from scenarios.swarm import Swarm
from scenarios.test_anchor import Kept
from scenarios.test_audits import EXACT, METHODS
from weft.anchor import archivist
from weft.anchor.archive import KeptRound
from weft.clock import VirtualClock
from weft.errors import DataError
from weft.ids import PeerId
from weft.launch.replays import Report, _Check, replay
from weft.peer import chain
from weft.peer.audit.leases.starts import Starts
from weft.peer.messages import Gathered, WorkAnswer, WorkRequest
from weft.run.machine import PeerConfig
from weft.run.trust import AuditedTrust
from weft.sim.world import Life, Member
from weft.sync.method.presets import MethodConfig
from weft.sync.records.index import StateIndex
from weft.sync.records.messages import Ready
from weft.training.trainer import Trainer
from weft.wire import decode

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
        await level(anchor, *members)
        await anchor.end()

    swarm.run(scenario)


async def level(anchor: Kept, *members: Member, is_all: bool = True) -> None:
    """Wait until the archive has all rounds of these.

    Args:
        is_all: and all works that they count.
    """
    keeps = anchor.anchor.archivist
    assert keeps is not None
    await anchor.be_level_with(*members)
    async with asyncio.timeout(120):
        while keeps._archive.head != anchor.head or (is_all and keeps.num_pending):  # noqa: ASYNC110
            await asyncio.sleep(0.5)


def check(swarm: Swarm, folder: Path, num: int | None = None) -> Report:
    told: list[object] = []
    return replay(swarm.home, swarm.run_config.run, folder, num, OF_CPU, VirtualClock(), told.append)


@pytest.mark.parametrize(
    "trust", [pytest.param(EXACT, marks=pytest.mark.slow), AuditedTrust(audit_rate=1.0)], ids=["exact", "fp32"]
)
def test_all_leases_of_a_run_are_made_again_by_who_was_not_there(
    make: Make, tmp_path: Path, trust: AuditedTrust
) -> None:
    swarm = make(method=METHODS[0], trust=trust, num_rounds=3)
    kept(swarm, tmp_path / "anchor")
    report = check(swarm, tmp_path / "anchor" / "archive")
    assert report.faults == []
    assert report.founder == swarm.member("a").id
    assert report.outcomes == {"equal": report.num_segments}
    assert report.num_segments >= 3 * 3
    assert check(swarm, tmp_path / "anchor" / "archive", 4).num_drawn == 4


@pytest.mark.full
@pytest.mark.parametrize(
    "method",
    [METHODS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in METHODS[1:])],
    ids=lambda each: type(each).__name__,
)
def test_work_of_several_leases_and_of_who_was_killed_is_made_again(
    make: Make, tmp_path: Path, method: MethodConfig
) -> None:
    swarm = make(method=method, trust=RARELY, num_rounds=11, num_peers=4)
    works: list[int] = []

    async def scenario() -> None:
        a, b, c, d = members = await swarm.start("abcd")
        anchor = Kept(swarm, tmp_path / "anchor", has_archive=True)
        await anchor.start(*members)
        await swarm.round(a, 2)
        late = {3, 4, 7}

        def lose(life: Life, _to: PeerId, message: Any) -> bool:
            head = life.peer.head
            return not (life.member is c and isinstance(message, Ready | Gathered) and head and head.round + 1 in late)

        swarm.watchers.append(lose)
        await swarm.round(a, 6)
        swarm.kill(d)
        await anchor.crash()
        await swarm.round(a, 8)
        await anchor.start(*members)
        b.peer.stop("a moment")
        await b.life.task
        swarm.launch(b)
        new = swarm.member("e")
        swarm.launch(new)
        await swarm.done(a, b, c, new)
        await level(anchor, a, c, new, is_all=False)
        works.extend(len(each.work.segments) for each in listed(swarm, anchor.root / "archive"))
        await anchor.end()

    swarm.run(scenario)
    assert max(works) >= 2
    report = check(swarm, tmp_path / "anchor" / "archive")
    assert report.faults == []
    assert report.outcomes == {"equal": report.num_segments}


def listed(swarm: Swarm, folder: Path) -> list[Any]:
    """Return the works in an archive."""
    found = _Check(swarm.run_config, torch.zeros(0), folder, None, is_exact=True, on_found=print)  # type: ignore[arg-type]
    list(found._listed())
    return list(found._items.values())


@pytest.mark.full
@pytest.mark.parametrize("trust", [RARELY, AuditedTrust(audit_rate=1e-6)], ids=["exact", "fp32"])
def test_in_exact_numbers_what_nobody_has_shown_follows_from_the_work_before(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trust: AuditedTrust
) -> None:
    swarm = make(method=METHODS[2], trust=trust, num_rounds=6)
    monkeypatch.setattr(archivist, "GIVE_UP_ROUNDS", -1)
    monkeypatch.setattr(archivist, "GIVE_UP_S", 0.0)
    answer, silent = Starts._on_request, swarm.member("c").id

    async def hides(starts: Starts, peer: PeerId, request: WorkRequest) -> WorkAnswer:
        if starts._node.peer == silent:
            return WorkAnswer(is_here=False, reason="not today")
        return await answer(starts, peer, request)

    monkeypatch.setattr(Starts, "_on_request", hides)
    kept(swarm, tmp_path / "anchor")
    report = check(swarm, tmp_path / "anchor" / "archive")
    assert report.faults == []
    of_c = Counter(each.of.outcome for each in report.found if each.peer == silent)
    assert of_c["equal"] == (6 if trust.is_exact else 1), "the first begins with a new optimizer"
    assert of_c["unknown"] == (0 if trust.is_exact else 5)
    assert report.outcomes["equal"] == report.num_segments - of_c["unknown"]


@pytest.mark.parametrize(
    "trust", [pytest.param(RARELY, marks=pytest.mark.full), AuditedTrust(audit_rate=1e-6)], ids=["exact", "fp32"]
)
def test_who_has_not_done_what_it_says_is_named(make: Make, tmp_path: Path, trust: AuditedTrust) -> None:
    swarm = make(method=METHODS[0], trust=trust, num_rounds=3)
    made = count()
    swarm.make_trainer = lambda *given: (always("half the steps") if next(made) == 2 else Trainer)(*given)
    kept(swarm, tmp_path / "anchor")
    report = check(swarm, tmp_path / "anchor" / "archive")
    liar = swarm.member("c").id
    assert report.faults == []
    assert {each.peer for each in report.differing} == {liar}
    assert [each.round for each in report.differing] == [each.round for each in report.found if each.peer == liar]


@pytest.mark.full
def test_one_byte_that_is_altered_is_found_and_named(make: Make, tmp_path: Path) -> None:
    swarm = make(method=METHODS[2], trust=RARELY, num_rounds=4)
    kept(swarm, tmp_path / "anchor")
    archive, copy = tmp_path / "anchor" / "archive", tmp_path / "copy"
    work = next(each for each in listed(swarm, archive) if each.round == 3 and each.peer == swarm.member("b").id)
    blobs, round_3 = archive / "blobs", archive / "0" / "round-3.bin"
    begin = decode((blobs / work.kept.begins[0].state).read_bytes(), StateIndex)
    moments = next(each for each in begin.vectors if each.name != "local").chunks[0]
    result = decode(round_3.read_bytes(), KeptRound).manifest.parts[0].result
    body = round_3.read_bytes()
    places = {
        "a chunk of a state": (blobs / moments, 100, "blobs"),
        "the list of a state": (blobs / work.kept.begins[0].state, 40, "blobs"),
        "a result": (blobs / result, 10, "blobs"),
        "a signed work": (round_3, body.index(work.kept.signed.body) + 5, f"the work of {work.peer} that round 3"),
        "its signature": (round_3, body.index(work.kept.signed.signature) + 5, f"the work of {work.peer} that round 3"),
        "a path": (round_3, body.index(work.kept.begins[0].state.encode()) + 5, "round 3 counts is altered"),
        "a manifest": (round_3, body.index(b"committed_tokens") + 18, "round-3.bin is altered"),
        "the beginning": (archive / "0" / "begin.bin", 200, "begin.bin is altered"),
    }
    for what, (path, at, named) in places.items():
        shutil.copytree(archive, copy)
        altered = copy / path.relative_to(archive)
        data = bytearray(altered.read_bytes())
        data[at] ^= 1
        altered.chmod(0o644)
        altered.write_bytes(data)
        try:
            faults = check(swarm, copy).faults
        except DataError as error:
            faults = [str(error)]
        assert any(named in fault for fault in faults), (what, faults)
        shutil.rmtree(copy)


def archived_late(swarm: Swarm, folder: Path) -> Report:
    """Return what comes of a check of an archive whose anchor came after five rounds."""

    async def scenario() -> None:
        a, b, c = await swarm.start("abc")
        await swarm.round(a, 5)
        anchor = Kept(swarm, folder, has_archive=True)
        await anchor.start(a, b, c)
        await swarm.done(a, b, c)
        await level(anchor, a, b, c)
        await anchor.end()

    swarm.run(scenario)
    return check(swarm, folder / "archive")


@pytest.mark.full
def test_an_anchor_that_comes_late_archives_the_rounds_that_members_remember(make: Make, tmp_path: Path) -> None:
    swarm = make(method=METHODS[0], trust=RARELY, num_rounds=10)

    report = archived_late(swarm, tmp_path / "anchor")
    assert (report.num_rounds, report.faults) == (10, [])
    assert report.founder == swarm.member("a").id
    assert report.outcomes == {"equal": report.num_segments}


@pytest.mark.full
def test_where_nobody_remembers_the_beginning_an_archive_rests_on_a_state(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = make(method=METHODS[0], trust=RARELY, num_rounds=12)
    monkeypatch.setattr(chain, "MAX_REMEMBERED", 2)

    report = archived_late(swarm, tmp_path / "anchor")
    assert report.faults == []
    assert report.founder is None
    assert 1 <= report.num_rounds < 10
    assert report.outcomes["equal"] >= 3 * (report.num_rounds - 1)
    assert set(report.outcomes) <= {"equal", "unknown"}
