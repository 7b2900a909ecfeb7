"""What each process of `split` does: `python -m benchmarks._split_members`.

Each is asked in lines of JSON: to start (it tells where it is), to meet the others, how fast the link is, and to
compute a layer; it tells how long that took, and how much of a processor. A handing over that nobody times comes before
it: all begin alike.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from weft.clock import SystemClock
from weft.ids import PeerId, RunId
from weft.keys import Identity
from weft.model.config import named
from weft.model.layers import Block, rotation
from weft.model.wavelengths import inverse_wavelengths
from weft.net.admission import ByTicket
from weft.net.link.handshake import Passport
from weft.net.node import Node
from weft.net.transport.tls import TlsConfig, TlsTransport
from weft.pipeline.link import StageLink
from weft.pipeline.split.cut import heads_parts, zigzag
from weft.pipeline.split.exchange import Exchange, Exchanges
from weft.pipeline.split.layer import ByHeads, BySegments
from weft.pipeline.split.ring_attention import select
from weft.pipeline.split.team import Team
from weft.pipeline.split.tensor_parallel import cut_layer
from weft.tasks import Threads
from weft.wire import digest

RUN = RunId("5b" * 32)
PROBED, PROBES = 1 << 20, 9  # numbers: 4 MiB


class Work:
    """A layer that all processes have alike."""

    def __init__(self, size: str, batch: int, seq_len: int) -> None:
        torch.manual_seed(1)
        self.config = named(size, 32_000, seq_len)
        self.layer = Block(self.config, 0)
        self.inverse = torch.tensor(inverse_wavelengths(self.config))
        self.turn = rotation(self.inverse, 0, seq_len)
        self.x, self.dy = torch.randn(2, batch, seq_len, self.config.width)

    def undivided(self) -> None:
        x = self.x.clone().requires_grad_()
        torch.autograd.grad(self.layer(x, self.turn), [x, *self.layer.parameters()], self.dy)


async def _members() -> None:
    identity, compute = Identity.generate(), Threads()
    passport = Passport(identity=identity, run=RUN, name="member", admission=ByTicket(secret=bytes(16)))
    node = Node(passport, [TlsTransport(identity, TlsConfig(host="127.0.0.1"))], SystemClock(), lambda _event: None)
    exchanges, peers = Exchanges(StageLink(node)), list[PeerId]()
    try:
        while question := await asyncio.to_thread(_ask):
            match question["do"]:
                case "start":
                    _tell(peer=node.peer, addresses=await node.start())
                case "meet":
                    peers = question["peers"]
                    for peer, addresses in question["addresses"].items():
                        if peer < node.peer:
                            node.remember(peer, addresses)
                            await node.connect(peer)
                    _tell()
                case "probe":
                    async with Exchange(exchanges, digest(b"probe"), peers) as exchange:
                        await _probe(Team(exchange, compute.train))
                case "undivided":
                    work = Work(question["size"], question["batch"], question["seq_len"])
                    took_s, cpu_s = await _timed(partial(compute.train, work.undivided))
                    _tell(took_s=took_s, cpu_s=cpu_s)
                case way:
                    work = Work(question["size"], question["batch"], question["seq_len"])
                    async with Exchange(exchanges, digest(question["team"].encode()), peers) as exchange:
                        team = Team(exchange, compute.train)
                        act = _by_heads(work, team) if way == "by heads" else _by_segments(work, team)
                        await _alike(team)
                        took_s, cpu_s = await _timed(act)
                        _tell(took_s=took_s, cpu_s=cpu_s)
    finally:
        await node.aclose()
        await compute.aclose()


async def _alike(team: Team) -> None:
    await team.shift(team.pack(torch.full((1,), float(team.number))), 1)


async def _timed(act: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """Return seconds, and CPU-seconds of this process."""
    began, cpu = time.perf_counter(), time.process_time()
    await act()
    return time.perf_counter() - began, time.process_time() - cpu


async def _probe(team: Team) -> None:
    found: dict[int, list[float]] = {1: [], PROBED: []}
    for turn in range(PROBES):
        for num, times in found.items():
            held = team.pack(torch.full((num,), float(turn + 10 * team.number)))
            await _alike(team)
            times.append((await _timed(partial(team.shift, held, num)))[0])
    _tell(small_s=median(found[1]), large_s=median(found[PROBED]), nbytes=4 * PROBED)


def _by_heads(work: Work, team: Team) -> Callable[[], Awaitable[Tensor]]:
    part = cut_layer(work.layer, work.config, heads_parts(work.config, [1.0] * team.size)[team.number])

    async def act() -> Tensor:
        member = ByHeads(team, part, work.turn)
        await member.forward(work.x)
        return await member.backward(work.dy)

    return act


def _by_segments(work: Work, team: Team) -> Callable[[], Awaitable[Tensor]]:
    segments = zigzag(work.x.shape[1], [1.0] * team.size)
    x, dy = (select(each, segments[team.number]) for each in (work.x, work.dy))

    async def act() -> Tensor:
        member = BySegments(team, work.layer, work.inverse, segments)
        await member.forward(x)
        return await member.backward(dy)

    return act


def _ask() -> dict[str, Any]:
    """Return the next question; an empty one at the end."""
    line = sys.stdin.readline()
    return json.loads(line) if line else {}


def _tell(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(_members())
