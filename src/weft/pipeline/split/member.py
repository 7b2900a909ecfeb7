"""A member of a team that another leads: it computes its part of layers, and keeps what it found of their weights.

    member = TeamMember(means, current)     # helps from now on
    member.advance(step)                    # forgets what was of earlier ones

What it found of micro-batches that count is added up, until who leads asks for the sum of exactly those.

Failure:
- whatever breaks ends the micro-batch here; who leads computes it undivided, or gives it up.
- asked for the sum of other micro-batches than were counted, it has none.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.codec.dense import Fp32
from weft.errors import NetError, NotFinite, PeerError, Refused
from weft.ids import Digest, PeerId
from weft.pipeline.device import Step
from weft.pipeline.link import Parcel, StageLink, parcel
from weft.pipeline.split.exchange import Exchange, Exchanges
from weft.pipeline.split.messages import Counted, GoBack, Help, Helps, SumAnswer, SumRequest, TeamLeft
from weft.pipeline.split.section import LayersAt, Passing
from weft.pipeline.split.team import Team
from weft.pipeline.torch_device import TorchDevice
from weft.pipeline.worker import CurrentStep, Run
from weft.tasks import Tasks

MAX_HELPED = 256  # micro-batches of a step that are on their way, or were given up: many more than any member takes


class Lent(Protocol):
    @property
    def here(self) -> TorchDevice:
        """Return what computes the section.

        Raises:
            CallFailed: it is nowhere now.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Means:
    """What a member of a stage's teams computes with, whoever leads.

    Args:
        team: returns the one that this peer is in now; who leads it stands first.
        run: as of `Compute.train`.
        seq_len: tokens of a sample. `micro_batch`: samples of one, at most.
        batch_size: samples whose gradients are added once.
    """

    stage: int
    link: StageLink
    exchanges: Exchanges
    team: Callable[[], tuple[PeerId, ...]]
    section: Lent
    layers: LayersAt
    run: Run
    seq_len: int
    micro_batch: int
    batch_size: int

    def whole(self, num_samples: int) -> torch.Size:
        """Return the shape of a micro-batch's activations."""
        return torch.Size((num_samples, self.seq_len, self.layers.width))


@dataclass
class _Helped:
    request: Help
    going: "asyncio.Task[None] | None" = None  # on its way there, or back
    passing: Passing | None = None  # once it has gone there
    is_back: bool = False

    @property
    def leader(self) -> PeerId:
        return PeerId(self.request.members[0])

    @property
    def members(self) -> list[PeerId]:
        return [PeerId(each) for each in self.request.members]

    async def until_gone(self) -> None:
        while self.going is not None and not self.going.done():
            await asyncio.wait([self.going])


@dataclass
class _Sum:
    """Of the micro-batches of a step that count."""

    total: Tensor | None = None
    added: set[Digest] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class TeamMember:
    """Of one stage: computes its part of what another leads."""

    def __init__(self, means: Means, current: CurrentStep) -> None:
        self._means = means
        self._current = current
        self._tasks = Tasks()
        self._helped: dict[Digest, _Helped] = {}
        self._sums: dict[PeerId, _Sum] = defaultdict(_Sum)  # by who led: members may be other teams now
        self._given: dict[PeerId, Parcel] = {}
        link, stage = means.link, means.stage
        link.hold(stage, Help, self._on_help)
        link.hold(stage, GoBack, self._on_go_back)
        link.hold(stage, SumRequest, self._on_sum)
        link.hold(stage, Counted, self._on_counted)

    async def _on_help(self, peer: PeerId, request: Help) -> Helps:
        name, team = Digest(request.name), self._means.team()
        is_own = peer == team[0] != self._means.link.me and request.members == team
        is_own = is_own and request.num_samples <= self._means.micro_batch
        if not is_own or name in self._helped or len(self._helped) >= MAX_HELPED:
            return Helps(does=False)
        helped = self._helped[name] = _Helped(request)
        self._go(helped, request.there, self._forward(helped))
        return Helps(does=True)

    async def _on_go_back(self, peer: PeerId, request: GoBack) -> Helps:
        """Go back through a micro-batch, once the way there is done here, too."""
        helped = await self._known(peer, Digest(request.name))
        if helped is None or helped.passing is None or helped.is_back:
            return Helps(does=False)
        helped.is_back = True
        self._go(helped, helped.request.back, self._backward(helped, helped.passing))
        return Helps(does=True)

    async def _on_counted(self, peer: PeerId, note: Counted) -> None:
        await self._add(peer, Digest(note.name))

    async def _on_sum(self, peer: PeerId, request: SumRequest) -> SumAnswer:
        """Let `peer` fetch the sum of these micro-batches' gradients, if there is one."""
        names = {Digest(name) for name in request.names}
        for name in names:
            await self._add(peer, name)
        found = self._sums.get(peer)
        if found is None:
            return SumAnswer(digest=None)
        async with found.lock:
            total = found.total
            if total is None or found.added != names or found is not self._sums.pop(peer, None):
                return SumAnswer(digest=None)
            given = await self._means.run(lambda: parcel(Fp32().encode(total.float().cpu())))
        self._take_back(peer)
        self._given[peer] = given
        self._means.link.give(given)
        return SumAnswer(digest=given.digest)

    def advance(self, step: Step) -> None:
        """Forget all that was of earlier steps, whose weights are no more."""
        for name, helped in list(self._helped.items()):
            if Step(helped.request.round, helped.request.step) < step:
                if helped.going is not None:
                    helped.going.cancel()
                del self._helped[name]
        self._sums.clear()
        self._means.layers.forget()
        for peer in list(self._given):
            self._take_back(peer)

    async def aclose(self) -> None:
        link, stage = self._means.link, self._means.stage
        link.let_go(stage, Help, self._on_help)
        link.let_go(stage, GoBack, self._on_go_back)
        link.let_go(stage, SumRequest, self._on_sum)
        link.let_go(stage, Counted, self._on_counted)
        await self._tasks.aclose()
        for peer in list(self._given):
            self._take_back(peer)

    # --- one micro-batch ---

    async def _forward(self, helped: _Helped) -> None:
        means, request = self._means, helped.request
        step = Step(request.round, request.step)
        await self._current.until(step)
        number = request.members.index(means.link.me)
        layers = await means.run(lambda: means.layers.at(means.section.here.model, step, number))
        passing, shape = layers.passing(means.seq_len), means.whole(request.num_samples)
        async with Exchange(means.exchanges, request.there, helped.members) as exchange:
            team = Team(exchange, means.run)
            x = await team.dealt(passing.shape(shape, number), passing.vector)
            y = await passing.forward(team, x)
            if passing.has_pieces:
                await team.hand_in(y)
        helped.passing = passing

    async def _backward(self, helped: _Helped, passing: Passing) -> None:
        means, request = self._means, helped.request
        number = request.members.index(means.link.me)
        shape = passing.shape(means.whole(request.num_samples), number)
        async with Exchange(means.exchanges, request.back, helped.members) as exchange:
            team = Team(exchange, means.run)
            dy = await team.dealt(shape, passing.vector)
            with passing.weights.needed():
                dx = await passing.backward(team, dy)
            if passing.has_pieces:
                await team.hand_in(dx)

    async def _add(self, peer: PeerId, name: Digest) -> None:
        """Add what was found of a micro-batch to the sum, once."""
        helped = await self._known(peer, name)
        if helped is None or helped.passing is None or not helped.is_back:
            return
        passing, weight = helped.passing, helped.request.num_samples / self._means.batch_size
        into = self._sums[peer]
        async with into.lock:
            if self._helped.pop(name, None) is None or into is not self._sums.get(peer):
                return  # added meanwhile, or of weights that are no more

            def add() -> None:
                if into.total is None:
                    into.total = torch.zeros_like(passing.vector)
                passing.add(weight, into.total)

            await self._means.run(add)
            into.added.add(name)

    async def _known(self, peer: PeerId, name: Digest) -> _Helped | None:
        """Return a micro-batch that `peer` leads, once it is not on its way here."""
        helped = self._helped.get(name)
        if helped is None or helped.leader != peer:
            return None
        await helped.until_gone()
        return helped if self._helped.get(name) is helped else None

    def _go(self, helped: _Helped, team: Digest, work: Coroutine[Any, Any, None]) -> None:
        async def going() -> None:
            try:
                await work
            except (PeerError, NetError, Refused, NotFinite) as error:
                self._helped.pop(Digest(helped.request.name), None)
                note = TeamLeft(team=team, reason=type(error).__name__)
                await self._means.link.post(helped.leader, note)  # it need not wait

        helped.going = self._tasks.spawn(going())

    def _take_back(self, peer: PeerId) -> None:
        given = self._given.pop(peer, None)
        if given is not None:
            self._means.link.take_back(given.digest)
