"""What is announced is fetched at once, and counted by the first leader when it has arrived."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from charters import charter
from weft.clock import VirtualClock
from weft.errors import PayloadError, PeerError
from weft.ids import Attempt, BranchId, Digest, PeerId, Round, RunId, Tokens
from weft.peer.chain import Chain, genesis, open_branch
from weft.peer.messages import Gathered
from weft.peer.round.gather import NUM_TRIES, REPEAT_S, Gather
from weft.sync.records.messages import AnyRoundMessage, Base, Contribution, Ready
from weft.sync.round import round as machine
from weft.sync.round.machine import Input, Lost, Received, State, Trained
from weft.sync.round.rules import leader
from weft.tasks import Tasks

RUN = RunId("cc" * 32)
CHARTER = charter()
PEERS = tuple(PeerId(letter * 64) for letter in "abc")
NUM = 3 * 4096


class FakeParts:
    """Delivers what `deliver` says, and counts what it was asked for."""

    def __init__(self) -> None:
        self.here: set[Digest] = set()
        self.handed: set[Digest] = set()
        self.asked: list[Digest] = []
        self.forgotten: list[Digest] = []
        self.deliver: Callable[[Digest], Coroutine[Any, Any, None]] = self.at_once

    async def at_once(self, _wanted: Digest) -> None:
        pass

    def cut(self, base: Base) -> tuple[range, ...]:
        return tuple(range(4096 * part, 4096 * (part + bool(uplink))) for part, uplink in enumerate(base.uplinks))

    def wanted(self, base: Base, _peer: PeerId) -> tuple[dict[int, int], ...]:
        return tuple({part: len(here)} if here else {} for part, here in enumerate(self.cut(base)))

    def is_here(self, wanted: Digest) -> bool:
        return wanted in self.here

    def hold(self, wanted: Digest) -> bool:
        return self.is_here(wanted)

    def take(self, _brought: Contribution, wanted: Digest, _num: int) -> bool:
        self.here |= self.handed & {wanted}
        return wanted in self.handed

    async def gather(self, _brought: Contribution, wanted: Digest, _num: int) -> None:
        self.asked.append(wanted)
        await self.deliver(wanted)
        self.here.add(wanted)

    def forget(self, wanted: Digest) -> None:
        self.forgotten.append(wanted)
        self.here.discard(wanted)


class Stage:
    """One of three members, who leads the first attempt or does not."""

    def __init__(self, *, leads: bool) -> None:
        opening = open_branch(genesis(RUN, PEERS[0], CHARTER), PEERS, PEERS[0], BranchId(RUN))
        self.chain = Chain(opening, CHARTER)
        self.first = leader(self.chain.base, Attempt(0))
        self.me = self.peer = self.first if leads else next(peer for peer in PEERS if peer != self.first)
        self.others = [peer for peer in PEERS if peer != self.me]
        self.part = PEERS.index(self.me)
        self.state: State = machine.begin(self.me, self.chain.base)
        self.posted: list[tuple[PeerId, Gathered]] = []
        self.taken: list[PeerId] = []
        self.said: list[AnyRoundMessage] = []
        self.fed: list[Input] = []
        self.clock, self.parts = VirtualClock(), FakeParts()
        self.gathering: Gather = None  # type: ignore[assignment]

    def run(self, scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def play() -> None:
            place = SimpleNamespace(node=SimpleNamespace(on_note=lambda *_: None), clock=self.clock)
            timers = SimpleNamespace(
                note_gathering=lambda _took_s: None, note_ready=lambda _peer: None, note_quorum=lambda: None
            )
            self.tasks = Tasks()
            self.gathering = Gather(place, self, self.parts, timers)  # type: ignore[arg-type]
            self.gathering.begin()
            await scenario()
            await self.tasks.aclose()

        self.clock.run(play())

    def feed(self, event: Input) -> None:
        if isinstance(event, Received | Trained):
            self.taken.append(event.sender if isinstance(event, Received) else self.me)
        else:
            self.fed.append(event)

    def say(self, _to: Iterable[PeerId], message: AnyRoundMessage) -> None:
        self.said.append(message)

    def post(self, to: Iterable[PeerId], note: Gathered) -> None:
        self.posted += [(peer, note) for peer in to]

    @property
    def base(self) -> Base:
        return self.chain.base

    def payload(self, peer: PeerId, life: int = 0) -> tuple[Digest, ...]:
        return tuple(Digest(f"{peer[0]}{part}{life}" * 16) for part in range(3))

    def hear(self, peer: PeerId, life: int = 0) -> None:
        ready = Ready(tokens=Tokens(1), parts=self.payload(peer, life))
        self.gathering.hear(peer, ready, Received(sender=peer, message=ready))

    async def told(self, owner: PeerId, *holds: PeerId, missing: tuple[PeerId, ...] = ()) -> None:
        base = self.chain.base
        note = Gathered(branch=base.branch, round=base.round, peers=holds, missing=missing)
        await self.gathering._on_gathered(owner, note)


def test_the_leader_takes_an_announcement_when_every_owner_holds_the_payload() -> None:
    stage = Stage(leads=True)
    one, other = stage.others

    async def scenario() -> None:
        stage.hear(one)
        await asyncio.sleep(1)
        assert stage.parts.asked == [stage.payload(one)[stage.part]]
        assert stage.taken == []  # the third does not hold it yet
        stage.hear(one)
        assert stage.taken == []  # said again
        await stage.told(other, other)
        assert stage.taken == []
        await stage.told(other, one, other)
        assert stage.taken == [one]

    stage.run(scenario)


def test_who_does_not_lead_takes_it_at_once_and_tells_the_leader_what_it_holds() -> None:
    stage = Stage(leads=False)

    async def scenario() -> None:
        for peer in stage.others:
            stage.hear(peer)
        assert stage.taken == stage.others
        await asyncio.sleep(1)

    stage.run(scenario)
    assert [(to, note.peers) for to, note in stage.posted] == [(stage.first, tuple(sorted(stage.others)))]


def test_nobody_waits_for_an_owner_that_is_away_nor_in_a_later_attempt() -> None:
    stage = Stage(leads=True)
    one, other = stage.others

    async def scenario() -> None:
        stage.hear(one)
        await asyncio.sleep(1)
        stage.state = msgspec.structs.replace(stage.state, suspected=frozenset({other}))
        stage.gathering.check()
        assert stage.taken == [one]
        stage.state = msgspec.structs.replace(stage.state, suspected=frozenset())
        stage.hear(other)
        await asyncio.sleep(1)
        assert stage.taken == [one]
        stage.state = msgspec.structs.replace(stage.state, attempt=Attempt(1))
        stage.gathering.check()
        assert stage.taken == [one, other]

    stage.run(scenario)


def test_what_owns_nothing_is_waited_for_by_nobody() -> None:
    stage = Stage(leads=True)
    one, other = stage.others
    uplinks = tuple(0 if peer == other else 16 for peer in PEERS)
    stage.chain.base = msgspec.structs.replace(stage.chain.base, uplinks=uplinks)
    stage.state = machine.begin(stage.me, stage.chain.base)

    async def scenario() -> None:
        stage.hear(one)
        await asyncio.sleep(1)
        assert stage.taken == [one]

    stage.run(scenario)


def test_a_payload_that_is_none_is_planned_in_to_be_refused() -> None:
    stage = Stage(leads=False)

    async def is_none(_wanted: Digest) -> None:
        raise PayloadError("other bytes")

    stage.parts.deliver = is_none

    async def scenario() -> None:
        stage.hear(stage.others[0])
        await asyncio.sleep(10)

    stage.run(scenario)
    assert len(stage.parts.asked) == 1
    assert [note.peers for _, note in stage.posted] == [(stage.others[0],)]


def test_what_cannot_be_had_is_asked_for_again() -> None:
    stage = Stage(leads=False)

    async def fails_twice(_wanted: Digest) -> None:
        if len(stage.parts.asked) < 3:
            raise PeerError("the stream broke")

    stage.parts.deliver = fails_twice

    async def scenario() -> None:
        stage.hear(stage.others[0])
        await asyncio.sleep(10)

    stage.run(scenario)
    assert len(stage.parts.asked) == 3
    assert len(stage.posted) == 1


@pytest.mark.parametrize("is_offered_again", [True, False])
def test_a_payload_goes_on_travelling_while_it_is_offered(is_offered_again: bool) -> None:
    stage = Stage(leads=False)
    one = stage.others[0]

    async def takes_long(_wanted: Digest) -> None:
        await asyncio.sleep(50)

    stage.parts.deliver = takes_long

    async def scenario() -> None:
        for number in range(4):
            base = stage.chain.base
            stage.chain.base = msgspec.structs.replace(base, round=Round(base.round + 1))
            stage.gathering.begin()
            if is_offered_again or not number:
                stage.hear(one)
            await asyncio.sleep(20)

    stage.run(scenario)
    wanted = stage.payload(one)[stage.part]
    assert stage.parts.asked == [wanted]
    assert (wanted in stage.parts.here) == is_offered_again
    assert (wanted in stage.parts.forgotten) == (not is_offered_again)


def test_an_announcement_is_said_again_until_the_round_is_over() -> None:
    stage = Stage(leads=True)

    async def scenario() -> None:
        ready = Ready(tokens=Tokens(4), parts=stage.payload(stage.me))
        stage.gathering.announce(ready, Trained(ready=Ready(tokens=ready.tokens, parts=ready.parts)))
        assert len(stage.said) == 1  # at once: the owners begin to fetch
        assert stage.taken == []
        await asyncio.sleep(7 * REPEAT_S + 1)
        assert len(stage.said) == 4
        stage.gathering.begin()
        await asyncio.sleep(100 * REPEAT_S)
        assert len(stage.said) == 4

    stage.run(scenario)


def test_an_owner_that_asks_in_vain_says_so() -> None:
    stage = Stage(leads=False)
    stage.parts.deliver = unreachable

    async def scenario() -> None:
        stage.hear(stage.first)
        await asyncio.sleep(NUM_TRIES - 1.5)
        assert stage.posted == []
        await asyncio.sleep(2)

    stage.run(scenario)
    assert [(note.peers, note.missing) for _, note in stage.posted] == [((), (stage.first,))]


def test_the_leader_gives_a_payload_up_once_most_owners_miss_it() -> None:
    stage = Stage(leads=True)
    stage.parts.deliver = unreachable
    one, other = stage.others

    async def scenario() -> None:
        stage.hear(one)
        await stage.told(other, missing=(one,))
        assert stage.fed == []  # one of two owners may lie
        await asyncio.sleep(NUM_TRIES)
        assert stage.fed == [Lost(peer=one)]
        await stage.told(other, missing=(one,))
        assert stage.fed == [Lost(peer=one)]
        stage.hear(other)
        await asyncio.sleep(NUM_TRIES)
        await stage.told(one, other)
        assert stage.fed == [Lost(peer=one)]  # who has it may serve it
        assert stage.taken == []

    stage.run(scenario)


async def unreachable(_wanted: Digest) -> None:
    raise PeerError("nobody is there")
