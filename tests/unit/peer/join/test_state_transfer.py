"""What a donor gives: a pin made once, whoever stops waiting, and kept while it is used; answers that fit a call."""

import asyncio
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from charters import charter
from weft.clock import VirtualClock
from weft.ids import BranchId, PeerId, Round, RunId
from weft.peer import chain as module
from weft.peer.chain import Chain, genesis, open_branch
from weft.peer.join.state_transfer import PIN_S, StateServer
from weft.peer.messages import ChainRequest, StateRequest
from weft.store.pool import Pool
from weft.sync.records.messages import Certificate, Manifest
from weft.tasks import Inline
from weft.wire import digest_of

RUN, A, B = RunId("cc" * 32), PeerId("aa" * 32), PeerId("bb" * 32)
OPENING = open_branch(genesis(RUN, A, charter()), [A, B], A, BranchId(RUN))
PIN = StateRequest(run=RUN, wanted=digest_of(OPENING))


class Slow:
    """Serves when it is told to."""

    def __init__(self) -> None:
        self.may_go = asyncio.Event()
        self.num_served = 0

    async def serve(self, work: Any) -> Any:
        self.num_served += 1
        await self.may_go.wait()
        return work()


class Node:
    def __init__(self) -> None:
        self.served: dict[type, Any] = {}

    def serve(self, kind: type, handler: Any) -> None:
        self.served[kind] = handler

    def serve_blobs(self, lookup: Any, *, is_patient: bool = False) -> None:
        self.lookup = lookup


@pytest.fixture
def node() -> Node:
    return Node()


def replica_at(head: Manifest) -> Any:
    replica = SimpleNamespace(head=head, charter=charter())
    replica.vectors = lambda: {"outer": torch.arange(5.0) + replica.head.round}
    return replica


def head_of_round(round: int) -> Manifest:
    """Return a head whose state needs no result of a round to be replayed from any before it."""
    return msgspec.structs.replace(OPENING, round=Round(round))


class Endless:
    """A chain of which every round's certificate is remembered, and none names a result."""

    head = OPENING

    def after(self, round: int, limit: int) -> tuple[Certificate, ...]:
        return ()


def donor(
    node: Node, compute: Any, chain: Any = None, clock: VirtualClock | None = None, replica: Any = None
) -> StateServer:
    replica = replica or replica_at(OPENING)
    clock = clock or VirtualClock()
    place = SimpleNamespace(node=node, compute=compute, clock=clock, memory=Pool(0))
    participation = SimpleNamespace(chain=chain or Chain(OPENING, charter()))
    return StateServer(place, replica, SimpleNamespace(), participation)  # type: ignore[arg-type]


async def test_a_pin_is_made_once_though_who_asked_first_stopped_waiting(node: Node) -> None:
    compute = Slow()
    donor(node, compute)
    ask = node.served[StateRequest]
    first = asyncio.ensure_future(ask(B, PIN))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    compute.may_go.set()
    offer = await ask(B, PIN)
    assert (offer.head, compute.num_served) == (OPENING, 2)  # the copy, and the digests of its chunks
    assert node.lookup(B, offer.index) is not None


def test_a_pin_is_dropped_ten_minutes_after_its_last_use_though_nobody_asks(node: Node) -> None:
    clock = VirtualClock()

    async def scenario() -> None:
        giver = donor(node, Inline(), clock=clock)
        ask = node.served[StateRequest]
        offer = await ask(B, PIN)
        await asyncio.sleep(PIN_S - 1)
        assert node.lookup(B, offer.index) is not None
        await asyncio.sleep(PIN_S - 1)
        assert (await ask(B, PIN)).index == offer.index
        assert len(giver._pins) == 1
        await asyncio.sleep(PIN_S + 1)
        assert not giver._pins
        await ask(B, PIN)
        assert len(giver._pins) == 1

    clock.run(scenario())


async def test_who_only_asks_what_there_is_makes_nobody_pin_anything(node: Node) -> None:
    giver = donor(node, Inline())
    offer = await node.served[StateRequest](B, StateRequest(run=RUN))
    assert (offer.head, offer.index) == (OPENING, None)
    assert not giver._pins


def test_a_state_that_is_past_is_offered_by_whoever_has_pinned_it_and_else_the_present_one(node: Node) -> None:
    clock, replica = VirtualClock(), replica_at(OPENING)

    async def scenario() -> None:
        donor(node, Inline(), Endless(), clock, replica)
        ask = node.served[StateRequest]
        first = await ask(B, PIN)
        replica.head = head_of_round(1)
        await asyncio.sleep(100)
        assert await ask(B, PIN) == first
        gone = StateRequest(run=RUN, wanted=digest_of(head_of_round(7)))
        present = await ask(B, gone)
        assert present.head == replica.head
        assert present.index != first.index

    clock.run(scenario())


def test_no_pin_is_dropped_that_somebody_is_fetching(node: Node) -> None:
    """Three newcomers, a round after the other: the third shares what the second fetches, and the first goes on."""
    clock, replica = VirtualClock(), replica_at(OPENING)

    async def scenario() -> None:
        donor(node, Inline(), Endless(), clock, replica)
        ask, offers = node.served[StateRequest], []
        for round in range(3):
            replica.head = head_of_round(round)
            offers.append(await ask(B, StateRequest(run=RUN, wanted=digest_of(replica.head))))
            for _ in range(10):
                await asyncio.sleep(5)
                assert all(node.lookup(B, offer.index) is not None for offer in offers)
        assert [offer.head.round for offer in offers] == [0, 1, 1]
        await asyncio.sleep(20)  # nobody fetches any more
        assert (await ask(B, StateRequest(run=RUN, wanted=digest_of(replica.head)))).head.round == 2

    clock.run(scenario())


@pytest.mark.full
def test_what_waits_for_a_pin_to_be_due_keeps_no_donor_alive() -> None:
    clock, node = VirtualClock(), Node()

    async def scenario() -> None:
        alive = weakref.ref(donor(node, Inline(), clock=clock))
        await node.served[StateRequest](B, PIN)
        assert alive() is not None
        node.served.clear()
        del node.lookup
        await asyncio.sleep(0)
        gc.collect()
        assert alive() is None
        await asyncio.sleep(PIN_S + 1)

    clock.run(scenario())


async def test_an_answer_holds_as_many_certificates_as_fit(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates = tuple(Certificate(attempt=0, manifest=OPENING, votes=(), farewells=()) for _ in range(10))
    size = len(module.encode(certificates[0]))
    chain = SimpleNamespace(head=OPENING, charter=charter(), after_in=lambda branch, after, most: certificates)
    donor(node, Slow(), chain)
    ask, request = node.served[ChainRequest], ChainRequest(branch=OPENING.branch, after=Round(0))
    for room, num in ((100 * size, 10), (3 * size + 1, 3), (1, 1)):
        monkeypatch.setattr(module, "ANSWER_NBYTES", room)
        assert len((await ask(B, request)).certificates) == num
