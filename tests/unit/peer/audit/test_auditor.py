"""What an auditor does with a work that it has to ask for."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from charters import charter
from unit.net.conftest import World
from unit.peer.audit.test_heads import STATE, a_row
from unit.sync.test_governance_audits import ACCUSED, OTHERS, finding
from weft.clock import VirtualClock
from weft.cost.audits import MAX_DOUBTING
from weft.errors import DeadlineExceeded, PayloadError, Refused
from weft.ids import Digest, PeerId, Round, Tokens
from weft.peer.audit import checks
from weft.peer.audit.auditor import Auditor
from weft.peer.audit.checks import Audit, Checks, NotShown
from weft.peer.audit.heads import Heads
from weft.peer.audit.outcome import ANSWER_ROUNDS, ANSWER_S, MAX_CAME, Found
from weft.peer.audit.steps import LOCAL
from weft.peer.audit.trace import tree_of
from weft.peer.messages import AuditAnswer, AuditRequest, NamedState
from weft.store.chunks import chunks, state_index
from weft.sync.records.charter import AuditTerms
from weft.sync.records.messages import Counted
from weft.sync.records.work import Segment, Work, link
from weft.tasks import Inline, Tasks
from weft.verify.draw import Draw
from weft.wire import digest, digest_of, encode, seal

ME, ACCUSER, SECOND = OTHERS[:3]
NAME = digest(b"the signed work")
ROUND_S = ANSWER_S / ANSWER_ROUNDS + 1.0
ANSWERED = (1 + MAX_CAME) * ANSWER_ROUNDS  # rounds in which a worker may be slow
WORK = Work(
    run="ab" * 32,
    branch="ab" * 32,
    round=1,
    peer=ACCUSED,
    segments=(Segment(head="00" * 32, round=0, holder=ACCUSED, num_steps=100),),
    follows=None,
    num_before=0,
    trace="00" * 32,
    payload="00" * 32,
    tokens=Tokens(800),
    error=None,
    left=None,
)


def test_a_work_that_is_doubted_while_it_is_asked_for_is_audited_as_it_was_drawn_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, begun = VirtualClock(), list[tuple[str, int]]()
    first, second = a_row(2)
    brings = Counted(peer=ACCUSED, tokens=Tokens(800), payload=digest(b"payload"), work=NAME)
    first = replace(first, members=(ME.peer, ACCUSED))
    second = replace(second, contributions=(brings,), previous=digest_of(first))
    rules = replace(charter(1), audits=AuditTerms(rate=1.0, trace_every=1))
    heads = Heads(tmp_path / "heads.bin", lambda _event: None)
    for each in (first, second):
        heads.note(each, rules, STATE, 0.0)

    async def fetch(_name: Digest, _peers: Any) -> Work:
        await asyncio.sleep(1.0)
        return WORK

    monkeypatch.setattr(checks, "shape_of", lambda _trainer: ())
    monkeypatch.setattr(checks, "StateClient", lambda *_: None)
    monkeypatch.setattr(
        Auditor, "_begin", lambda _self, _round, _name, _work, link, ticket: begun.append((ticket.signer, link.before))
    )
    base = SimpleNamespace(electorate=(ME.peer, ACCUSED))
    rounds: Any = SimpleNamespace(
        chain=SimpleNamespace(head=second, base=base), works=SimpleNamespace(known=lambda _name: None, fetch=fetch)
    )
    context: Any = SimpleNamespace(node=SimpleNamespace(peer=ME.peer), clock=clock, compute=None)
    trainer: Any = None
    sealing: Any = None
    replica: Any = SimpleNamespace(charter=rules)
    draw = Draw(run="ab" * 32, branch="ab" * 32, round=1, manifest=digest_of(second))
    doubts = [(who, finding(who, round=1, before=before, work=NAME)) for who, before in ((ACCUSER, 3), (SECOND, 5))]

    async def scenario() -> None:
        tasks = Tasks()
        kept: Any = None
        made = Auditor(
            context, trainer, replica, rounds, heads, kept, kept, sealing, tasks, lambda _audit, _found: None
        )
        for who, verdict in (*doubts, (ACCUSER, finding(ACCUSER, round=1, before=7, work=NAME))):
            assert made.look_again(seal(who, verdict), verdict)
        made.follow(second, seal(ME, draw), lambda _peer: 1.0)
        await asyncio.sleep(5.0)
        assert len(tasks) == 0

    clock.run(scenario())
    assert begun[:2] == [(ACCUSER.peer, 3), (SECOND.peer, 5)], "who doubts what is right first shields nothing else"
    assert [who for who, _ in begun[2:]] == [ME.peer]


@pytest.mark.parametrize(
    "lacks",
    [
        NotShown("no chunk comes"),
        NotShown("it shows a state that it has not named"),
        PayloadError("a chunk is not what its digest says"),
        DeadlineExceeded("its list comes byte by byte"),
        Refused("not for you"),
    ],
    ids=lambda error: str(error),
)
def test_a_worker_that_answers_for_ever_and_shows_not_all_of_what_it_named_has_not_answered(
    monkeypatch: pytest.MonkeyPatch, lacks: Exception
) -> None:
    """It answers only after some time, so that it is asked again before that is over."""
    clock, asked = VirtualClock(), [0]

    async def answers(_self: Any, _audit: Any) -> AuditAnswer:
        asked[0] += 1
        await asyncio.sleep(ANSWER_S / 2 if asked[0] == 1 else 0.0)
        return AuditAnswer(is_ready=True)

    async def nothing(_self: Any, _audit: Any, _shown: Any) -> None:
        raise lacks

    for name, each in (("_asked", answers), ("_make", nothing)):
        monkeypatch.setattr(Auditor, name, each)
    monkeypatch.setattr(Checks, "claim", lambda _self, _audit: None)
    monkeypatch.setattr(checks, "shape_of", lambda _trainer: ())
    monkeypatch.setattr(checks, "StateClient", lambda *_: None)
    head = SimpleNamespace(round=1)
    base = SimpleNamespace(electorate=(ACCUSED,))
    chain = SimpleNamespace(head=head, base=base, charter=charter())
    rounds: Any = SimpleNamespace(chain=chain, works=None)
    context: Any = SimpleNamespace(node=SimpleNamespace(peer=ME.peer), clock=clock, compute=None)
    opened = list[Any]()
    sealing: Any = SimpleNamespace(open=lambda *given: opened.append(given))
    made = Auditor(context, *2 * [sealing], rounds, *4 * [sealing], Tasks(), lambda _audit, _found: None)
    audit = Audit(Round(1), NAME, WORK, link(WORK.segments, 1, 0), seal(ME, WORK))

    async def scenario() -> None:
        looking = asyncio.ensure_future(made.look(audit))
        while not looking.done():
            await asyncio.sleep(ANSWER_S)
            head.round += 5
            assert clock.now() < 10 * ANSWER_S
        assert looking.result() == Found("unanswered", str(lacks))

    clock.run(scenario())
    assert opened == [(NAME, 0, None)]


def test_what_an_auditor_tells_after_all_the_time_that_a_worker_can_take_is_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that keeps the first who asks waiting would else be asked by nobody else."""
    clock, begun = VirtualClock(), list[int]()
    row = a_row(1 + ANSWERED + 2)
    brings = Counted(peer=ACCUSED, tokens=Tokens(800), payload=digest(b"payload"), work=NAME)
    row[0] = replace(row[0], contributions=(brings,))
    heads = Heads(tmp_path / "heads.bin", lambda _event: None)
    rules = replace(charter(1), audits=AuditTerms(rate=1.0, trace_every=1))
    heads.note(row[0], rules, STATE, 0.0)
    monkeypatch.setattr(checks, "shape_of", lambda _trainer: ())
    monkeypatch.setattr(checks, "StateClient", lambda *_: None)
    monkeypatch.setattr(Auditor, "_begin", lambda _self, _round, _name, _work, link, _ticket: begun.append(link.before))
    chain = SimpleNamespace(head=row[ANSWERED])
    rounds: Any = SimpleNamespace(chain=chain, works=SimpleNamespace(known=lambda _name: WORK))
    context: Any = SimpleNamespace(node=SimpleNamespace(peer=ME.peer), clock=clock, compute=None)
    stub: Any = SimpleNamespace(charter=rules)
    made = Auditor(context, stub, stub, rounds, heads, stub, stub, stub, Tasks(), lambda _audit, _found: None)
    verdict = finding(ACCUSER, round=0, before=3, work=NAME)

    async def scenario() -> None:
        await asyncio.sleep((1 + MAX_CAME) * ANSWER_S)
        assert made.look_again(seal(ACCUSER, verdict), verdict)
        chain.head = row[ANSWERED + 2]
        await asyncio.sleep(ANSWER_S)
        assert not made.look_again(seal(SECOND, verdict), verdict), "what it needs may be there no more"

    clock.run(scenario())
    assert begun == [3]


def test_what_one_member_doubts_is_looked_at_by_and_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each audit holds three states: all at once would be more than a machine has."""
    clock, running, most = VirtualClock(), [0], dict[PeerId, int]()
    row = a_row(1)
    names = [digest(b"%d" % number) for number in range(6)]
    brings = [Counted(peer=ACCUSED, tokens=Tokens(800), payload=digest(b"payload"), work=name) for name in names]
    row[0] = replace(row[0], contributions=tuple(brings))
    heads = Heads(tmp_path / "heads.bin", lambda _event: None)
    rules = replace(charter(1), audits=AuditTerms(rate=1.0, trace_every=1))
    heads.note(row[0], rules, STATE, 0.0)

    async def look(_self: Any, audit: Audit) -> None:
        running[0] += 1
        who = audit.ticket.signer
        most[who] = max(most.get(who, 0), running[0])
        await asyncio.sleep(10.0)
        running[0] -= 1

    monkeypatch.setattr(checks, "shape_of", lambda _trainer: ())
    monkeypatch.setattr(checks, "StateClient", lambda *_: None)
    monkeypatch.setattr(Auditor, "look", look)
    rounds: Any = SimpleNamespace(chain=SimpleNamespace(head=row[0]), works=SimpleNamespace(known=lambda _name: WORK))
    context: Any = SimpleNamespace(node=SimpleNamespace(peer=ME.peer), clock=clock, compute=None)
    stub: Any = SimpleNamespace(charter=rules, is_parked=False)

    async def scenario() -> None:
        tasks = Tasks()
        made = Auditor(context, stub, stub, rounds, heads, stub, stub, stub, tasks, lambda _audit, _found: None)
        for number, name in enumerate(names):
            verdict = finding(ACCUSER, round=0, before=number, work=name)
            assert made.look_again(seal(ACCUSER, verdict), verdict)
        await asyncio.sleep(31.0)
        assert len(tasks) == 0

    clock.run(scenario())
    assert most == {ACCUSER.peer: MAX_DOUBTING}


class Shown:
    """A worker with a node of its own, and an auditor that fetches of it what the work ended with.

    Args:
        lookup: returns what the worker serves in the place of a blob.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lookup: Callable[[str, bytes], bytes]) -> None:
        self.world = World()
        self.clock = self.world.clock
        self.head = SimpleNamespace(round=Round(1))
        self.has_come = False
        self.num_tries = 0
        self.asked = list[Round]()  # in which round it was
        self.ready_from = Round(0)
        state = {LOCAL: torch.arange(300_000.0)}  # of two chunks
        index = state_index(state)
        self.first, *_ = self.chunks = chunks(state[LOCAL])
        self.blobs = {digest_of(index): encode(index)} | {digest(each): bytes(each) for each in self.chunks}
        self.index = digest_of(index)
        tree = tree_of(bytes.fromhex(digest(b"the first") + self.index))
        self.named = NamedState(state=self.index, path=tree.path(1))
        self.lookup = lookup
        self.segments = (Segment(head="00" * 32, round=0, holder=ACCUSED, num_steps=1),)
        self.trace = tree.root()
        monkeypatch.setattr(Checks, "claim", lambda _self, _audit: None)
        monkeypatch.setattr(checks, "shape_of", lambda _trainer: index.shape)
        monkeypatch.setattr(Auditor, "_make", self._make)

    async def _make(self, audit: Audit, shown: Any) -> None:
        """Fetch all of a state as each audit does; then leave it at that."""
        self.num_tries += 1
        index = await self.looks.index(audit, shown.answer.last, 1, audit.work)
        vectors = await self.looks.pulled(audit, index)
        self.has_come = torch.equal(vectors[LOCAL], torch.arange(300_000.0))
        raise checks.Unknown

    async def found(self) -> Found | None:
        """Return what comes of an audit, while rounds go on."""
        world = self.world
        auditing, working = await world.started(2)

        async def answers(_peer: PeerId, _request: AuditRequest) -> AuditAnswer:
            self.asked.append(self.head.round)
            if self.head.round < self.ready_from:
                return AuditAnswer(is_ready=False, reason="it is at these training steps")
            return AuditAnswer(is_ready=True, last=self.named)

        def serves(_peer: PeerId, wanted: Digest) -> bytes | None:
            data = self.blobs.get(wanted)
            return None if data is None else self.lookup(wanted, data)

        working.serve(AuditRequest, answers)
        working.serve_blobs(serves)
        base = SimpleNamespace(electorate=(working.peer,))
        chain = SimpleNamespace(head=self.head, base=base, charter=charter())
        rules = replace(charter(1), audits=AuditTerms(rate=1.0, trace_every=1))
        rounds: Any = SimpleNamespace(chain=chain, works=None)
        context: Any = SimpleNamespace(node=auditing, clock=self.clock, compute=Inline())
        stub: Any = SimpleNamespace(
            charter=rules, open=lambda *_given: None, is_parked=False, began_at=lambda _head: None
        )
        found = list[Found]()
        made = Auditor(context, stub, stub, rounds, *4 * [stub], Tasks(), lambda _audit, each: found.append(each))
        self.looks = made._checks
        work = replace(WORK, peer=working.peer, segments=self.segments, trace=self.trace)
        looking = asyncio.ensure_future(
            made._begun_now(Audit(Round(1), NAME, work, link(work.segments, 1, 0), seal(ME, WORK)))
        )
        while not looking.done():
            await asyncio.wait([looking], timeout=ROUND_S)
            self.head.round = Round(self.head.round + 1)
            assert self.head.round < 100
        looking.result()
        return found[0] if found else None

    def result(self) -> Found | None:
        outcome = list[Found | None]()

        async def scenario() -> None:
            outcome.append(await self.found())

        self.world.run(scenario)
        return outcome[0]


def as_it_is(_name: str, data: bytes) -> bytes:
    return data


def test_what_is_shown_whole_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown(monkeypatch, as_it_is)
    assert shown.result() is None
    assert shown.has_come


@pytest.mark.parametrize("lie", ["half of its list", "another chunk"])
def test_who_shows_half_a_list_or_another_chunk_than_it_has_named_has_not_answered(
    monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    shown, served = Shown(monkeypatch, as_it_is), list[bytes]()

    def false(name: str, data: bytes) -> bytes:
        is_list, is_first = name == shown.index, name == digest(shown.first)
        if is_list if lie == "half of its list" else is_first:
            served.append(data[: len(data) // 2] if is_list else bytes(len(data)))
            return served[-1]
        return data

    shown.lookup = false
    found = shown.result()
    assert found is not None
    assert found.outcome == "unanswered", found
    assert not shown.has_come
    assert served
    assert shown.num_tries > 1, "it is asked for again, as long as it may take"


@pytest.mark.parametrize("late", [0, 1])
def test_who_answers_in_the_round_after_the_last_has_not_answered(monkeypatch: pytest.MonkeyPatch, late: int) -> None:
    shown = Shown(monkeypatch, as_it_is)
    shown.ready_from = Round(ANSWER_ROUNDS + late)
    found = shown.result()
    assert shown.has_come == (not late)
    assert found == (Found("unanswered", "it is at these training steps") if late else None)
    assert max(shown.asked) == ANSWER_ROUNDS, "nobody asks after that"


@pytest.mark.parametrize("bps", [8e3, 64e3, 1e6])
def test_who_answers_and_lets_its_bytes_trickle_has_not_answered(monkeypatch: pytest.MonkeyPatch, bps: float) -> None:
    """Some come all the time. The state takes 20 minutes, two and a half, or ten seconds."""
    shown = Shown(monkeypatch, as_it_is)
    shown.world.network.set_line(shown.world.ids[1], up_bps=bps, down_bps=None)
    found, is_slow = shown.result(), bps < 1e6
    assert shown.has_come == (not is_slow)
    assert (None if found is None else found.outcome) == ("unanswered" if is_slow else None)
    assert shown.head.round <= 2 + ANSWERED, "it takes twelve rounds, and no more"
