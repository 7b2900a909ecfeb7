"""A member of a team that another leads: it computes its part of layers, and keeps what it found of their weights.

    desk = HelpDesk.on(lane)            # one for each peer
    desk.at[stage] = Helping(...)

What it found of micro-batches that count is added up, until who leads asks for the sum of exactly those.

Failure:
- whatever breaks ends the micro-batch here; who leads computes it undivided, or gives it up.
- asked for the sum of other micro-batches than were counted, it has none.

It does not know what is before and after the layers, nor when a round is over.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.codec.dense import Fp32
from weft.errors import NetError, NotFinite, PeerError, Refused
from weft.ids import Digest, PeerId
from weft.net.tasks import Tasks
from weft.pipeline.beat import Beat
from weft.pipeline.device import Parcel, parcel
from weft.pipeline.lane import Lane
from weft.pipeline.schedule import Run
from weft.pipeline.split.handover import Handover
from weft.pipeline.split.messages import Counted, GoBack, Help, Helps, SumAnswer, SumRequest
from weft.pipeline.split.section import LayersAt, Passing
from weft.pipeline.split.team import Team

MAX_HELPED = 64  # micro-batches at a time: more than any member takes


@dataclass(frozen=True, kw_only=True)
class Means:
    """What a member of a team computes with, whoever leads it.

    Args:
        run: as of `Compute.train`.
        seq_len: tokens of a sample.
        batch_size: samples whose gradients are added once.
    """

    lane: Lane
    handover: Handover
    layers: LayersAt
    run: Run
    seq_len: int
    batch_size: int

    def whole(self, num_samples: int) -> torch.Size:
        """Return the shape of a micro-batch's activations."""
        return torch.Size((num_samples, self.seq_len, self.layers.width))


@dataclass
class _Helped:
    request: Help
    leader: PeerId
    passing: Passing
    is_back: bool = False


class HelpDesk:
    """Where calls of those who lead arrive, by the stage that they name, and what a peer's teams hand over."""

    def __init__(self, handover: Handover) -> None:
        self.at: dict[int, Helping] = {}
        self.handover, lane = handover, handover.lane
        lane.serve(Help, self._on_help)
        lane.serve(GoBack, self._on_go_back)
        lane.serve(SumRequest, self._on_sum)
        lane.on_note(Counted, self._on_counted)

    @classmethod
    def on(cls, lane: Lane) -> "HelpDesk":
        return cls(Handover(lane))

    async def _on_help(self, peer: PeerId, request: Help) -> Helps:
        helping = self.at.get(request.stage)
        return Helps(does=helping is not None and helping.begin(peer, request))

    async def _on_go_back(self, peer: PeerId, request: GoBack) -> Helps:
        helping = self.at.get(request.stage)
        return Helps(does=helping is not None and await helping.go_back(peer, request))

    async def _on_sum(self, peer: PeerId, request: SumRequest) -> SumAnswer:
        helping = self.at.get(request.stage)
        return SumAnswer(digest=None if helping is None else await helping.sum(peer, request))

    async def _on_counted(self, peer: PeerId, note: Counted) -> None:
        if (helping := self.at.get(note.stage)) is not None:
            await helping.counted(peer, note)


class Helping:
    """Of one stage.

    Args:
        may_lead: whether this peer helps that one.
        until_due: waits until this peer is at a step.
    """

    def __init__(
        self, means: Means, may_lead: Callable[[PeerId], bool], until_due: Callable[[Beat], Awaitable[None]]
    ) -> None:
        self._means = means
        self._may_lead = may_lead
        self._until_due = until_due
        self._tasks = Tasks()
        self._going: dict[Digest, asyncio.Task[None]] = {}  # on their way there, or back
        self._helped: dict[Digest, _Helped] = {}
        self._total: Tensor | None = None
        self._added: set[Digest] = set()
        self._given: Parcel | None = None

    def begin(self, peer: PeerId, request: Help) -> bool:
        """Compute a micro-batch with others, from now on; return whether this peer does."""
        name, me = Digest(request.name), self._means.lane.me
        is_fit = request.members[0] == peer != me and me in request.members
        if not is_fit or not self._may_lead(peer) or name in self._helped or len(self._going) >= MAX_HELPED:
            return False
        self._go(name, self._forward(peer, name, request))
        return True

    async def go_back(self, peer: PeerId, request: GoBack) -> bool:
        """Go back through a micro-batch, once the way there is done here, too."""
        name = Digest(request.name)
        await self._until_gone(name)
        helped = self._helped.get(name)
        if helped is None or helped.leader != peer or helped.is_back:
            return False
        helped.is_back = True
        self._go(name, self._backward(helped))
        return True

    async def counted(self, peer: PeerId, note: Counted) -> None:
        await self._add(peer, Digest(note.name))

    async def sum(self, peer: PeerId, request: SumRequest) -> Digest | None:
        """Return the name of the sum of these micro-batches' gradients, which `peer` may fetch; None: there is none."""
        names = {Digest(name) for name in request.names}
        for name in names:
            await self._add(peer, name)
        total, added = self._total, self._added
        self._total, self._added = None, set()
        if total is None or added != names:
            return None
        given = await self._means.run(lambda: parcel(Fp32().encode(total.float().cpu())))
        self._take_back()
        self._given = given
        self._means.lane.give(given)
        return given.digest

    def clear(self) -> None:
        """Forget all that was of weights that are no more."""
        for going in self._going.values():
            going.cancel()
        self._helped.clear()
        self._total, self._added = None, set()
        self._take_back()

    async def aclose(self) -> None:
        self.clear()
        await self._tasks.aclose()

    # --- one micro-batch ---

    async def _forward(self, leader: PeerId, name: Digest, request: Help) -> None:
        means, beat = self._means, Beat(request.round, request.step)
        await self._until_due(beat)
        number = request.members.index(means.lane.me)
        layers = await means.run(lambda: means.layers.at(beat, number))
        passing, shape = layers.passing(means.seq_len), means.whole(request.num_samples)
        members = [PeerId(each) for each in request.members]
        async with means.handover.join(request.there, members) as seat:
            team = Team(seat, means.run)
            x = await team.dealt(passing.shape(shape, number), layers.vector)
            y = await passing.forward(team, x)
            if passing.has_pieces:
                await team.hand_in(y)
        self._helped[name] = _Helped(request, leader, passing)

    async def _backward(self, helped: _Helped) -> None:
        means, request, passing = self._means, helped.request, helped.passing
        number, members = request.members.index(means.lane.me), [PeerId(each) for each in request.members]
        shape = passing.shape(means.whole(request.num_samples), number)
        async with means.handover.join(request.back, members) as seat:
            team = Team(seat, means.run)
            dx = await passing.backward(team, await team.dealt(shape, passing.vector))
            if passing.has_pieces:
                await team.hand_in(dx)

    async def _add(self, peer: PeerId, name: Digest) -> None:
        """Add what was found of a micro-batch to the sum, once."""
        await self._until_gone(name)
        helped = self._helped.get(name)
        if helped is None or helped.leader != peer or not helped.is_back:
            return
        del self._helped[name]

        def add() -> Tensor:
            total = torch.zeros_like(helped.passing.vector) if self._total is None else self._total
            helped.passing.add(helped.request.num_samples / self._means.batch_size, total)
            return total

        self._added.add(name)
        self._total = await self._means.run(add)

    def _go(self, name: Digest, work: Coroutine[Any, Any, None]) -> None:
        async def going() -> None:
            try:
                await work
            except (PeerError, NetError, Refused, NotFinite):
                self._helped.pop(name, None)  # who leads finds out by itself

        task = self._going[name] = self._tasks.spawn(going())
        task.add_done_callback(lambda _task: self._going.pop(name, None))

    async def _until_gone(self, name: Digest) -> None:
        while (going := self._going.get(name)) is not None:
            await asyncio.wait([going])

    def _take_back(self) -> None:
        if self._given is not None:
            self._means.lane.take_back(self._given.digest)
            self._given = None
