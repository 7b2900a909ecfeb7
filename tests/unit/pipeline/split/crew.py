"""Teams of a few nodes on a memory network and a virtual clock, that do a layer of `unit.pipeline.split.layer`."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import torch
from torch import Tensor

from unit.pipeline.split.layer import Case
from weft.clock import VirtualClock
from weft.ids import Digest, RunId
from weft.keys import Identity
from weft.net.admission import Anyone
from weft.net.blobs.blobs import inline
from weft.net.link.handshake import Passport
from weft.net.node import Node
from weft.net.transport.memory import MemoryNetwork
from weft.pipeline.link import StageLink
from weft.pipeline.split.cut import Segment, heads_parts
from weft.pipeline.split.exchange import Exchange, Exchanges
from weft.pipeline.split.layer import ByHeads, BySegments
from weft.pipeline.split.ring_attention import put, select
from weft.pipeline.split.team import Team
from weft.pipeline.split.tensor_parallel import add_gradients, cut_layer
from weft.tasks import Compute, Inline

RUN = RunId("cd" * 32)
TEAM = Digest("5e" * 32)
PATIENCE_S = 20.0


def passport(number: int) -> Passport:
    identity = Identity.from_seed(bytes([number + 1]) * 32)
    return Passport(identity=identity, run=RUN, name=f"peer-{number}", admission=Anyone())


class Crew:
    """Linked nodes, each with its exchanges."""

    def __init__(self, num: int, train_s: float = 0.01) -> None:
        self.clock = VirtualClock()
        self.network = MemoryNetwork(delay_s=0.001)
        self.compute: Compute = Inline(train_s)
        self.nodes: list[Node] = []
        self.exchanges: list[Exchanges] = []
        for number in range(num):
            each = passport(number)
            transport = self.network.transport(each.peer)
            self.nodes.append(Node(each, [transport], self.clock, lambda _: None, offload=inline))
            self.exchanges.append(Exchanges(StageLink(self.nodes[-1])))

    @property
    def peers(self) -> list[str]:
        return [node.peer for node in self.nodes]

    def run(self, play: Callable[[], Awaitable[None]]) -> None:
        async def whole() -> None:
            for node in self.nodes:
                for other in self.nodes:
                    node.remember(other.peer, [f"memory://{other.peer}"])
                await node.start()
            await link(self.nodes)
            try:
                await play()
            finally:
                for node in self.nodes:
                    await node.aclose()

        self.clock.run(whole())

    def exchange(self, number: int) -> Exchange:
        return Exchange(self.exchanges[number], TEAM, [node.peer for node in self.nodes], patience_s=PATIENCE_S)


async def link(nodes: Sequence[Node]) -> None:
    for number, node in enumerate(nodes):
        for other in nodes[:number]:
            await node.connect(other.peer)


Found = tuple[Tensor, Tensor, dict[str, Tensor]]  # of one member: y, dx, gradients where they lie in the layer's
Join = Callable[[int], Exchange]


async def by_heads(given: Case, join: Join, compute: Compute, speeds: tuple[float, ...]) -> list[Found]:
    parts = heads_parts(given.config, speeds)

    async def one(number: int) -> Found:
        part = cut_layer(given.layer, given.config, parts[number])
        async with join(number) as exchange:
            member = ByHeads(Team(exchange, compute.train), part, given.turn)
            y = await member.forward(given.x)
            dx = await member.backward(given.dy)
        gradients = given.zeros()
        add_gradients(given.config, parts[number], member.gradients, gradients)
        return y, dx, gradients

    return list(await asyncio.gather(*map(one, range(len(speeds)))))


async def by_segments(given: Case, join: Join, compute: Compute, segments: tuple[Segment, ...]) -> list[Found]:
    async def one(number: int) -> Found:
        segment = segments[number]
        async with join(number) as exchange:
            member = BySegments(Team(exchange, compute.train), given.layer, given.inverse, segments)
            y, dx = torch.zeros_like(given.x), torch.zeros_like(given.x)
            put(await member.forward(select(given.x, segment)), segment, y)
            put(await member.backward(select(given.dy, segment)), segment, dx)
        return y, dx, member.gradients

    return list(await asyncio.gather(*map(one, range(len(segments)))))


def summed(found: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([each[name] for each in found]).sum(0) for name in found[0]}
