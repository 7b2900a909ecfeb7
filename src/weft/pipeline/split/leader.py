"""A member of a stage that computes its section's layers with others: what is before and after them it computes alone.

    leader = Leader(means, clock)
    passed = await leader.forward(given)         # None: nobody helps; the member computes alone
    gradient = await passed.backward(of_output, member)
    passed.count()
    is_whole = await leader.collect(into)       # what the others found of the weights' gradients is added, too

Failure:
- a helper does not help, or is gone on the way there: the micro-batch is computed undivided, and for a while all are.
- a helper is gone on the way back: the micro-batch is given up, and its sender tries again.
- a helper is gone with its part of what was counted: all that was counted with it is lost, as if this member were gone.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count

from torch import Tensor

from weft.clock import Clock
from weft.codec.dense import Fp32
from weft.errors import NetError, PeerError, Refused
from weft.ids import Digest, PeerId
from weft.model.backward import Passed, forward
from weft.model.transformer import mean_loss
from weft.pipeline.device import Encode, Given
from weft.pipeline.sender import CALL_S
from weft.pipeline.split.exchange import Exchange
from weft.pipeline.split.member import Means
from weft.pipeline.split.messages import Counted, GoBack, Help, Helps, SumAnswer, SumRequest
from weft.pipeline.split.team import Team, together
from weft.pipeline.torch_device import TorchDevice, finite_loss
from weft.tasks import Tasks
from weft.wire import Buffer, digest

SUM_BPS = 50e6  # bytes a second at least, at which a helper makes its sum ready
REFUSED_S, BROKEN_S = 2.0, 30.0  # to compute alone after a helper knew another team; and after a team broke


class Leader:
    """Of one stage."""

    def __init__(self, means: Means, clock: Clock) -> None:
        self.means = means
        self._clock = clock
        self._since, self._numbers = int(clock.wall() * 1000), count()
        self._barred_until = -1.0
        self._counted: dict[PeerId, list[Digest]] = defaultdict(list)
        self._loop = asyncio.get_running_loop()
        self._tasks = Tasks()

    async def forward(self, given: Given) -> "LedPassed | None":
        team, me = self.means.team(), self.means.link.me
        helpers = team[1:] if team[0] == me else ()
        if given.is_measured or not helpers or self._clock.now() < self._barred_until:
            return None
        stage = self.means.stage
        request = Help(
            stage=stage,
            name=digest(f"{me} {stage} {self._since} {next(self._numbers)}".encode()),
            members=team,
            round=given.step.round,
            step=given.step.number,
            num_samples=given.num_samples,
        )
        device = self.means.section.here
        passed = await self.means.run(lambda: LedPassed(self, device, given, request))
        bar_s = REFUSED_S
        try:
            await self.ask(helpers, request)
            bar_s = BROKEN_S
            await passed.forward()
            return passed
        except (PeerError, NetError, Refused):
            self.bar(bar_s)
            return None

    async def collect(self, into: Tensor) -> bool:
        """Add to a gradient what helpers found of it; return whether all of it was to be had."""
        counted, self._counted = self._counted, defaultdict(list)
        try:
            await together(*(self._collected(peer, names, into) for peer, names in counted.items()))
        except (PeerError, NetError, Refused):
            self.bar()
            return False
        return True

    def forget(self) -> None:
        """Forget what was counted: the gradient is of weights that are no more."""
        self._counted.clear()

    def bar(self, seconds: float = BROKEN_S) -> None:
        """Compute alone for a while."""
        self._barred_until = self._clock.now() + seconds

    def on_counted(self, request: Help) -> None:
        """Note that a micro-batch counts, and tell helpers. In the thread that computes; nobody collects meanwhile."""
        for peer in request.members[1:]:
            self._counted[PeerId(peer)].append(Digest(request.name))
        self._loop.call_soon_threadsafe(self._tell, request)

    async def aclose(self) -> None:
        await self._tasks.aclose()

    async def ask(self, helpers: tuple[PeerId, ...], request: Help | GoBack) -> None:
        """
        Raises:
            PeerError: one does not.
        """
        await together(*(self._helps(peer, request) for peer in helpers))

    async def _helps(self, peer: PeerId, request: Help | GoBack) -> None:
        answer = await self.means.link.call(peer, request, Helps, deadline_s=CALL_S)
        if not answer.does:
            raise PeerError("it does not help")

    async def _collected(self, peer: PeerId, names: list[Digest], into: Tensor) -> None:
        request = SumRequest(stage=self.means.stage, names=tuple(names))
        deadline_s = CALL_S + Fp32().nbytes(into.numel()) / SUM_BPS
        answer = await self.means.link.call(peer, request, SumAnswer, deadline_s=deadline_s)
        if answer.digest is None:
            raise PeerError("its part is not to be had")
        found = await self.means.link.fetch(peer, Digest(answer.digest), Fp32().nbytes(into.numel()))

        def add() -> None:
            into.add_(Fp32().decode(found.data, into.numel()).to(into.device))

        await self.means.run(add)

    def _tell(self, request: Help) -> None:
        for peer in request.members[1:]:
            note = Counted(stage=self.means.stage, name=request.name)
            self._tasks.spawn(self.means.link.post(PeerId(peer), note))


class LedPassed:
    """A micro-batch that a team passes through the layers of a section.

    Raises:
        PayloadError: it is none.
    """

    def __init__(self, leader: Leader, device: TorchDevice, given: Given, request: Help) -> None:
        means = leader.means
        self._leader = leader
        self._model = device.model
        self._is_last = device.section.is_last
        self._weight = device.weight(given)
        self._request = request
        self._passing = means.layers.at(device.model, given.step, 0).passing(means.seq_len)
        self._edges = device.edges(given)
        self._shape = means.whole(request.num_samples)
        self._first: Passed | None = None  # of the embedding
        self._last: Passed | None = None  # of head and loss
        self._x = self._begin(given)
        self.loss: float | None = None
        self.output: Buffer | Encode | None = None

    async def forward(self) -> None:
        """Pass it through the layers, with helpers who have said that they do."""
        async with self._team(self._request.there) as team:
            y = await self._through(team, self._x, self._passing.forward)
        await self._leader.means.run(lambda: self._end(y))

    async def backward(self, gradient: Buffer | None, member: PeerId | None) -> Buffer | None:
        """
        Raises:
            PeerError: the team is broken.
            CallFailed: the weights were written since the forward pass.
        """
        with self._passing.weights.needed():
            return await self._backward(gradient, member)

    async def _backward(self, gradient: Buffer | None, member: PeerId | None) -> Buffer | None:
        leader, request = self._leader, self._request
        dy = await leader.means.run(lambda: self._of_output(gradient, member))
        try:
            helpers = tuple(PeerId(peer) for peer in request.members[1:])
            await leader.ask(helpers, GoBack(stage=leader.means.stage, name=request.name))
            async with self._team(request.back) as team:
                dx = await self._through(team, dy, self._passing.backward)
        except (PeerError, NetError, Refused):
            leader.bar()
            raise
        return await leader.means.run(lambda: self._of_input(dx))

    def count(self) -> None:
        for passed in (self._first, self._last):
            if passed is not None:
                passed.add_weight_gradients(self._weight)
        self._passing.add(self._weight, self._model.gradient)
        self._leader.on_counted(self._request)

    @asynccontextmanager
    async def _team(self, name: Digest) -> AsyncIterator[Team]:
        means, members = self._leader.means, [PeerId(peer) for peer in self._request.members]
        async with Exchange(means.exchanges, name, members) as exchange:
            yield Team(exchange, means.run)

    async def _through(self, team: Team, x: Tensor, way: Callable[[Team, Tensor], Awaitable[Tensor]]) -> Tensor:
        """Return what the team makes of x, on its way there or back."""
        passing = self._passing
        pieces = await team.run(lambda: [passing.piece(x, number) for number in range(team.size)])
        await team.deal(pieces)
        found = await way(team, pieces[0])
        if not passing.has_pieces:
            return found
        shapes = [passing.shape(self._shape, number) for number in range(team.size)]
        all_found = await team.handed_in(found, shapes)
        return await team.run(lambda: passing.joined(all_found, self._shape))

    # --- before and after the layers, in the thread that computes ---

    def _begin(self, given: Given) -> Tensor:
        if given.activations is not None:
            return self._edges.decoded(given.activations.data)
        self._first = forward(self._model, lambda module: module.begin(self._edges.tokens), self._edges.tokens)
        return self._first.output

    def _end(self, y: Tensor) -> None:
        if not self._is_last:
            self.output = self._edges.output(y)
            return
        x = y.detach()
        self._last = forward(self._model, lambda module: mean_loss(module.logits(x), self._edges.targets), x)
        self.loss = finite_loss(self._last.output)

    def _of_output(self, gradient: Buffer | None, member: PeerId | None) -> Tensor:
        if gradient is not None:
            return self._edges.gradient(gradient, member)
        assert self._last is not None, "only the last section's output has no gradient from elsewhere"
        dy = self._last.input_gradient()
        assert dy is not None
        return dy

    def _of_input(self, dx: Tensor) -> Buffer | None:
        if self._first is None:
            return self._edges.input_gradient(dx)
        self._first.input_gradient(dx)
        return None
