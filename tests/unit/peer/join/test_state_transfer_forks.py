"""A fork is read once, however often and by however many it is asked for."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unit.peer.join.test_state_transfer import Node, Slow
from weft.clock import VirtualClock
from weft.errors import CheckpointError
from weft.ids import Digest, PeerId
from weft.peer.join.state_transfer import MAX_PINS, PIN_S, StateServer
from weft.peer.messages import ForkRequest
from weft.tasks import Inline

ASKER = PeerId("aa" * 32)
NAMES = [Digest(f"{number:064x}") for number in range(4)]


class Trial:
    """A donor of the forks `NAMES`, and what it read."""

    def __init__(self, compute: Any) -> None:
        self.clock = VirtualClock()
        self.node = Node()
        self.read: list[Digest] = []
        self.is_damaged = False
        place: Any = SimpleNamespace(node=self.node, compute=compute, clock=self.clock, memory=None)
        legacies: Any = SimpleNamespace(fork=self._find)
        self.donor = StateServer(place, SimpleNamespace(), legacies, lambda: None)  # type: ignore[arg-type]

    def _find(self, manifest: Digest) -> torch.Tensor | None:
        if manifest not in NAMES:
            return None
        self.read.append(manifest)
        if self.is_damaged:
            raise CheckpointError("altered")
        return torch.arange(5.0) + NAMES.index(manifest)

    async def ask(self, manifest: Digest) -> Digest | None:
        offer = await self.node.served[ForkRequest](ASKER, ForkRequest(manifest=manifest))
        return offer.index  # type: ignore[no-any-return]


@pytest.fixture
def trial() -> Trial:
    return Trial(Inline())


def test_a_fork_is_read_once_as_long_as_it_is_asked_for(trial: Trial) -> None:
    async def main() -> None:
        first = await trial.ask(NAMES[0])
        other = await trial.ask(NAMES[1])
        for _ in range(3):
            await asyncio.sleep(PIN_S - 1)
            assert await trial.ask(NAMES[0]) == first
        assert trial.read == NAMES[:2]
        assert first is not None
        assert trial.node.lookup(ASKER, first) is not None
        assert trial.node.lookup(ASKER, other) is None, "nobody asks for it any more"
        await asyncio.sleep(PIN_S)
        assert trial.node.lookup(ASKER, first) is None

    trial.clock.run(main())


def test_no_more_forks_are_in_memory_than_on_the_disk(trial: Trial) -> None:
    async def main() -> None:
        indexes = []
        for name in NAMES:
            indexes.append(await trial.ask(name))
            await asyncio.sleep(1)
        assert [trial.node.lookup(ASKER, each) is not None for each in indexes] == [False] * 2 + [True] * MAX_PINS
        assert await trial.ask(Digest("f" * 64)) is None
        assert len(trial.donor._forks) == MAX_PINS

    trial.clock.run(main())


def test_a_damaged_fork_is_not_read_again_and_again(trial: Trial) -> None:
    trial.is_damaged = True

    async def main() -> None:
        for _ in range(3):
            assert await trial.ask(NAMES[0]) is None
        assert trial.read == NAMES[:1]

    trial.clock.run(main())


async def test_it_is_read_once_though_who_asked_first_stopped_waiting() -> None:
    compute = Slow()
    trial = Trial(compute)
    for _ in range(3):
        asking = asyncio.ensure_future(trial.ask(NAMES[0]))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
    compute.may_go.set()
    assert await trial.ask(NAMES[0]) is not None
    assert (trial.read, compute.num_served) == (NAMES[:1], 1)
