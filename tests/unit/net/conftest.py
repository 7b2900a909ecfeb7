"""Nodes that meet on a memory network and a virtual clock."""

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from weft.clock import VirtualClock
from weft.events import Event
from weft.ids import PeerId, RunId
from weft.keys import Identity
from weft.net.admission import Admission, Anyone
from weft.net.blobs import inline
from weft.net.handshake import Passport
from weft.net.memory import MemoryNetwork
from weft.net.node import Node

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

    def node(self, index: int, admission: Admission | None = None, run: RunId = RUN) -> Node:
        """Return a node that is not started and knows everybody's address."""
        passport = self.passport(index, admission, run)
        transport = self.network.transport(passport.peer)
        node = Node(passport, [transport], self.clock, self.events[passport.peer].append, offload=inline)
        for peer in self.ids:
            node.remember(peer, [f"memory://{peer}"])
        self.nodes.append(node)
        return node

    async def started(self, num: int) -> list[Node]:
        nodes = [self.node(index) for index in range(num)]
        for node in nodes:
            await node.start()
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
