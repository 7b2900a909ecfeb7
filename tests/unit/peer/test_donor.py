"""What a donor gives: a pin that is made once, whoever stops waiting; answers that fit a call."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.clock import VirtualClock
from weft.ids import BranchId, PeerId, Round, RunId
from weft.peer import donor as module
from weft.peer.chain import Chain, genesis, open_branch
from weft.peer.donor import Donor
from weft.peer.messages import ChainRequest, StateRequest
from weft.sync.messages import Certificate

RUN, A, B = RunId("cc" * 32), PeerId("aa" * 32), PeerId("bb" * 32)
OPENING = open_branch(genesis(RUN, A, 1), [A, B], A, BranchId(RUN), 1)


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

    def serve_blobs(self, lookup: Any) -> None:
        self.lookup = lookup


@pytest.fixture
def node() -> Node:
    return Node()


def donor(node: Node, compute: Slow, chain: Any = None) -> Donor:
    replica = SimpleNamespace(head=OPENING, vectors=lambda: {"outer": torch.arange(5.0)})
    return Donor(node, replica, lambda: chain or Chain(OPENING, 1), compute, VirtualClock())  # type: ignore[arg-type]


async def test_a_pin_is_made_once_though_who_asked_first_stopped_waiting(node: Node) -> None:
    compute = Slow()
    donor(node, compute)
    ask = node.served[StateRequest]
    first = asyncio.ensure_future(ask(B, StateRequest(run=RUN)))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    compute.may_go.set()
    offer = await ask(B, StateRequest(run=RUN))
    assert (offer.head, compute.num_served) == (OPENING, 1)
    assert node.lookup(B, offer.index) is not None


async def test_an_answer_holds_as_many_certificates_as_fit(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates = tuple(Certificate(attempt=0, manifest=OPENING, votes=(), farewells=()) for _ in range(10))
    size = len(module.encode(certificates[0]))
    chain = SimpleNamespace(head=OPENING, after=lambda after, most: certificates)
    donor(node, Slow(), chain)
    ask, request = node.served[ChainRequest], ChainRequest(branch=OPENING.branch, after=Round(0))
    for room, num in ((100 * size, 10), (3 * size + 1, 3), (1, 1)):
        monkeypatch.setattr(module, "ANSWER_NBYTES", room)
        assert len((await ask(B, request)).certificates) == num
