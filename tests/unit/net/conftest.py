"""Nodes that meet on a memory network and a virtual clock."""

import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from weft.clock import VirtualClock
from weft.events import Event
from weft.ids import PeerId, RunId
from weft.keys import Identity
from weft.net.admission import Admission, Anyone
from weft.net.blobs.blobs import inline
from weft.net.blobs.relay import NO_RELAY, RelayConfig
from weft.net.link.handshake import Passport
from weft.net.node import Node
from weft.net.transport.memory import MemoryNetwork

RUN = RunId("ab" * 32)


class World:
    """A virtual clock, a network and nodes; `ids[0] < ids[1] < ...`."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.network = MemoryNetwork(delay_s=0.01)
        self.identities = sorted((Identity.from_seed(bytes([i]) * 32) for i in range(8)), key=lambda one: one.peer)
        self.ids = [identity.peer for identity in self.identities]
        self.events: dict[PeerId, list[Event]] = {peer: [] for peer in self.ids}
        self.nodes: list[Node] = []

    def passport(self, index: int, admission: Admission | None = None, run: RunId = RUN) -> Passport:
        # A process that starts again has another instance.
        instance = len(self.nodes).to_bytes(4, "big") * 2
        return Passport(
            identity=self.identities[index],
            run=run,
            name=f"peer-{index}",
            admission=admission or Anyone(),
            instance=instance,
        )

    def node(
        self,
        index: int,
        admission: Admission | None = None,
        run: RunId = RUN,
        relay: RelayConfig | None = None,
        *,
        is_listed: bool = True,
    ) -> Node:
        """Return a node that is not started and knows everybody's address.

        Args:
            relay: None: it neither passes on nor is reached through others.
        """
        passport = self.passport(index, admission, run)
        node = Node(
            passport,
            [self.network.transport(passport.peer)],
            self.clock,
            self.events[passport.peer].append,
            offload=inline,
            relay=relay or NO_RELAY,
            via=None if relay is None else self.identities[index],
            is_listed=is_listed,
        )
        for peer in self.ids:
            node.remember(peer, [f"memory://{peer}"])
        self.nodes.append(node)
        return node

    async def started(self, num: int) -> list[Node]:
        nodes = [self.node(index) for index in range(num)]
        for node in nodes:
            await node.start()
        return nodes

    async def relaying(self, num: int, relay: RelayConfig = RelayConfig()) -> list[Node]:  # noqa: B008
        """Return started nodes that pass on for each other; the last is linked to all, the others to nobody else."""
        nodes = [self.node(index, relay=relay) for index in range(num)]
        for node in nodes:
            await node.start()
        for a, b in itertools.combinations(self.ids[: num - 1], 2):
            self.network.partition(a, b)
        for node in nodes[:-1]:
            await node.connect(nodes[-1].peer)
        return nodes

    def seen(self, index: int, kind: type[Event]) -> list[Any]:
        return [event for event in self.events[self.ids[index]] if isinstance(event, kind)]

    def run(self, scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def whole() -> None:
            try:
                await scenario()
            finally:
                for node in self.nodes:
                    await node.aclose()

        self.clock.run(whole())


@pytest.fixture
def world() -> World:
    return World()
