"""Seals on their way: told to all before anything is shown, and checked by all when they are opened."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from charters import charter
from unit.peer.snapshots import manifest
from weft.clock import VirtualClock
from weft.ids import Digest, PeerId, Round, Tokens
from weft.keys import Identity
from weft.ledger.tree import Tree
from weft.peer.audit.sealing import ANOTHER, SILENT, TWO, UNEQUAL, UNNAMED, Sealing
from weft.peer.messages import NamedState, SealNote, SealOpened
from weft.run.trust import AuditedTrust, TrustConfig
from weft.sync.records.charter import AuditTerms
from weft.sync.records.work import Segment, Work
from weft.verify.seals import ROUNDS, SECONDS
from weft.wire import Signed, digest, seal

AUDITOR, OTHER, WORKER = (Identity.from_seed(bytes([number] * 32)) for number in range(3))
STATES = [digest(b"state %d" % number) for number in range(3)]
TREE = Tree(bytes.fromhex(state) for state in STATES)
NAME, RUN = digest(b"the signed work"), "ab" * 32
WORK = Work(
    run=RUN,
    branch=RUN,
    round=1,
    peer=WORKER.peer,
    segments=(Segment(head="00" * 32, round=0, holder=WORKER.peer, num_steps=2),),
    follows=None,
    num_before=0,
    trace=TREE.root(),
    payload="00" * 32,
    tokens=Tokens(800),
    error=None,
    left=None,
)
EXACT: TrustConfig = AuditedTrust(numerics="exact")


def named(number: int) -> NamedState:
    return NamedState(state=STATES[number], path=TREE.path(number))


class World:
    """Some members, whose notes come at once."""

    def __init__(self, trust: TrustConfig = EXACT) -> None:
        self.clock, self.broken = VirtualClock(), list[tuple[PeerId, PeerId, str, str]]()  # by, of whom, outcome, why
        self.lost = set[PeerId]()  # to whom nothing comes
        members = tuple(sorted(each.peer for each in (AUDITOR, OTHER, WORKER)))
        self.head = replace(manifest(1), members=members)
        rules = replace(charter(1), audits=AuditTerms(rate=1.0, trace_every=1))
        self.replica: Any = SimpleNamespace(head=self.head, charter=rules, run=SimpleNamespace(run=RUN, trust=trust))
        self.handlers = dict[PeerId, dict[type, Any]]()
        self.sealing = {each.peer: self.begun(each) for each in (AUDITOR, OTHER, WORKER)}

    def begun(self, who: Identity) -> Sealing:
        mine: dict[type, Any] = {}
        self.handlers[who.peer] = mine

        def post(peer: PeerId, note: Any) -> None:
            if peer not in self.lost:
                asyncio.run(self.handlers[peer][type(note)](who.peer, note))

        node = SimpleNamespace(peer=who.peer, on_note=mine.__setitem__, post=post)
        node.peers = [each.peer for each in (AUDITOR, OTHER, WORKER) if each is not who]
        context: Any = SimpleNamespace(node=node, identity=who, clock=self.clock)
        found = Sealing(context, self.replica, lambda of, _work, how, why: self.broken.append((who.peer, of, how, why)))
        works: Any = SimpleNamespace(known=lambda name: WORK if name == NAME else None)
        found.begin(works)
        return found

    def seals(self, state: Digest) -> Signed:
        return self.sealing[AUDITOR.peer].tell(NAME, 1, state)

    def opens(self, after: NamedState | None = None) -> None:
        self.sealing[AUDITOR.peer].open(NAME, 1, after)

    def passes(self) -> None:
        """Let so much time go by that nobody waits any more."""
        self.clock.advance(SECONDS + 1)
        self.replica.head = replace(self.head, round=Round(self.head.round + ROUNDS + 1))
        for each in self.sealing.values():
            each.follow(self.replica.head)

    @property
    def found(self) -> set[tuple[str, str]]:
        assert {of for _, of, _, _ in self.broken} <= {AUDITOR.peer}
        assert len(self.broken) == len({by for by, _, _, _ in self.broken}), "each finds it once"
        return {(how, why) for _, _, how, why in self.broken}


@pytest.mark.parametrize("after", [None, named(2)])
def test_who_opens_what_it_had_sealed_is_right(after: NamedState | None) -> None:
    world = World()
    world.sealing[WORKER.peer].pass_on(world.seals(STATES[2]))
    world.opens(after)
    world.passes()
    assert world.broken == []


def test_what_is_sealed_is_told_to_all_before_the_worker_shows_anything() -> None:
    """Be it by the worker: an auditor that tells nobody else is found by them, too."""
    world = World()
    world.lost = {OTHER.peer, WORKER.peer}
    letter = world.seals(digest(b"I do not know yet"))
    world.lost = set()
    world.sealing[WORKER.peer].pass_on(letter)
    lie = SealOpened(work=NAME, before=1, state=STATES[2], salt=digest(b"salt"), after=named(2))
    for each in (OTHER, WORKER):
        asyncio.run(world.handlers[each.peer][SealOpened](AUDITOR.peer, lie))
    assert world.found == {("false", ANOTHER)}
    assert len(world.broken) == 2


def test_a_worker_passes_a_seal_on_once_however_often_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    world, posted = World(), list[Any]()
    letter, worker = world.seals(STATES[2]), world.sealing[WORKER.peer]
    monkeypatch.setattr(worker, "_post", posted.append)
    for _ in range(5):
        worker.pass_on(letter)
    assert posted == [SealNote(letter=letter)]


def test_who_seals_two_things_is_found() -> None:
    world = World()
    world.seals(STATES[1])
    world.sealing[AUDITOR.peer]._mine.clear()
    world.seals(STATES[2])
    world.opens(named(2))
    world.passes()
    assert world.found == {("false", TWO)}


def test_in_exact_numbers_who_found_the_same_had_sealed_the_same() -> None:
    world = World()
    world.seals(digest(b"no step was made"))
    world.opens(named(2))
    assert world.found == {("false", UNEQUAL)}


def test_where_machines_round_differently_another_state_may_be_as_good() -> None:
    world = World(AuditedTrust())
    world.seals(digest(b"some bits are others"))
    world.opens(named(2))
    world.passes()
    assert world.broken == []


def test_what_it_says_it_was_shown_is_what_the_worker_has_named() -> None:
    world = World()
    world.seals(STATES[1])
    world.opens(named(1))  # of another place
    assert world.found == {("false", UNNAMED)}


def test_who_opens_nothing_is_silent() -> None:
    world = World()
    world.seals(STATES[2])
    world.passes()
    assert world.found == {("silent", SILENT)}


def test_who_was_killed_seals_the_same_again() -> None:
    world = World()
    first = world.seals(STATES[2])
    world.sealing[AUDITOR.peer] = world.begun(AUDITOR)
    assert world.seals(STATES[2]) == first
    world.opens(named(2))
    world.passes()
    assert world.broken == []


def test_what_nobody_has_signed_is_no_seal() -> None:
    world = World()
    world.lost = {OTHER.peer, WORKER.peer}
    letter = world.seals(STATES[2])
    world.lost = set()
    for forged in (replace(letter, signature=bytes(64)), seal(Identity.from_seed(bytes([9] * 32)), WORK)):
        asyncio.run(world.handlers[OTHER.peer][SealNote](WORKER.peer, SealNote(letter=forged)))
    world.passes()
    assert world.broken == []
