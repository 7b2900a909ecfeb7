"""A member of a stage: takes micro-batches, computes their section, sends them on, and goes back.

    taken ─► activations fetched ─► forward ─► next stage ─► its gradient ─► input gradient ─► accepted ─► counted

The gradients of weights are added for what its sender accepted (`exactly_once`), and only then computed. What later
attempts brought is held, as input and output gradient alone, until a round says who computes it; within bounds, beyond
which the oldest is dropped.

    worker.start()                                   # takes micro-batches
    await worker.advance(step)                       # computes those up to this step; gives up earlier ones
    await worker.settled()                           # what is accepted is counted
    told = await worker.counting.report()            # what the gradient has in it stays as it is from here
    gradient = ...                                   # of the device's model: of a round, by whatever method
    closed = await worker.counting.close(reports, electorate)  # the round is over: assigned ones are computed anew

Failure:
- the sender is gone before it has said what counts: what was computed is held.
- the sender forgot, as after a restart: the same.
- activations cannot be fetched, or are none: nothing was promised; the sender tries another.
- the next stage has nobody: the micro-batch waits here, and the sender may try another meanwhile.

What a member computes next: input gradients, for which others wait; then forward passes; then weights' gradients; then
what others have computed already, where members of a stage audit each other.

Weights' gradients fill the time in which nothing else can be done. What they are made of takes memory until then: where
many are owed, or a round waits for them, they go before forward passes.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from msgspec.structs import replace as replace_fields

from weft.clock import Clock
from weft.errors import CallFailed, ConfigError, NetError, NotFinite, PeerError, Refused
from weft.events import Emit, HeldDropped, MicroBatchFailed
from weft.ids import PeerId
from weft.pipeline.device import ANY, Device, Encode, Given, Passed, PassedTogether, Step, Together
from weft.pipeline.exactly_once import NONE, Attempt, BatchId, Closed, ExactlyOnce, Told
from weft.pipeline.link import Parcel, StageLink, parcel
from weft.pipeline.messages import Backward, Computed, Forward, GivenUp, IsTaken, Verdict, Word
from weft.pipeline.routing import Pace
from weft.pipeline.sender import CALL_S, MAX_REMEMBERED, Returned, Sender
from weft.pipeline.witness import Made, Witness
from weft.tasks import Tasks
from weft.wire import Buffer

T = TypeVar("T")

MAX_OWED = 4  # micro-batches whose weights' gradients wait while there are forward passes to make


class Run(Protocol):
    def __call__(self, work: Callable[[], T]) -> Awaitable[T]: ...


class _Asked(NamedTuple):
    work: Callable[[], Any]
    done: asyncio.Future[Any]


class Schedule:
    """Of one member: one piece of work at a time.

    Args:
        run: does a piece of work, on a thread or inline.
        tasks: in one of which this runs while there is work.
    """

    def __init__(self, run: Run, tasks: Tasks) -> None:
        self._run = run
        self._tasks = tasks
        self._backward: deque[_Asked] = deque()
        self._forward: deque[_Asked] = deque()
        self._weights: deque[_Asked] = deque()
        self._again: deque[_Asked] = deque()
        self._is_running = False
        self._has_haste = False  # somebody waits for weights' gradients: they go before forward passes

    @property
    def num_back(self) -> int:
        """Return how many input gradients wait."""
        return len(self._backward)

    async def backward(self, work: Callable[[], T]) -> T:
        return await self._ask(self._backward, work)

    async def forward(self, work: Callable[[], T]) -> T:
        return await self._ask(self._forward, work)

    async def weights(self, work: Callable[[], T]) -> T:
        return await self._ask(self._weights, work)

    async def again(self, work: Callable[[], T]) -> T:
        """Do what others have done already: when nothing else is to be done."""
        return await self._ask(self._again, work)

    @contextmanager
    def weights_first(self) -> Iterator[None]:
        """Let weights' gradients go before forward passes meanwhile: somebody waits for them."""
        self._has_haste = True
        try:
            yield
        finally:
            self._has_haste = False

    async def _ask(self, queue: deque[_Asked], work: Callable[[], T]) -> T:
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        queue.append(_Asked(work, done))
        if not self._is_running:
            self._is_running = True
            self._tasks.spawn(self._go_on())
        return await done

    async def _go_on(self) -> None:
        try:
            while (asked := self._next()) is not None:
                if asked.done.done():  # whoever asked waits no longer
                    continue
                try:
                    found = await self._run(asked.work)
                except Exception as error:  # whoever asked is told
                    if not asked.done.done():
                        asked.done.set_exception(error)
                else:
                    if not asked.done.done():
                        asked.done.set_result(found)
        finally:
            self._is_running = False

    def _next(self) -> _Asked | None:
        is_owing = self._has_haste or len(self._weights) >= MAX_OWED
        last = (self._weights, self._forward) if is_owing else (self._forward, self._weights)
        return next((queue.popleft() for queue in (self._backward, *last, self._again) if queue), None)


AGAIN_S = 1.0  # until a sender that did not answer is asked again; doubled each time
NUM_ASKED = 6  # times in vain, and it is taken to be gone


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How much a member keeps at a time."""

    num_taken: int = 16  # micro-batches between their forward pass and their sender's word
    held_nbytes: int = 1 << 30  # of what later attempts brought


@dataclass(frozen=True)
class _Held:
    """What a weights' gradient can be computed of, once more."""

    given: Given
    returned: Returned  # for its output
    began: int  # rounds had been closed when it was computed

    @property
    def nbytes(self) -> int:
        activations = 0 if self.given.activations is None else memoryview(self.given.activations.data).nbytes
        return activations + (0 if self.returned.gradient is None else memoryview(self.returned.gradient).nbytes)


@dataclass(frozen=True)
class Sum:
    """What a gradient is made of."""

    num_samples: int = 0
    loss: float = 0.0  # of all samples together
    weight: float = 0.0  # of all of them, as of a `Given`

    def plus(self, given: Given, mean_loss: float) -> "Sum":
        return self + Sum(given.num_samples, given.weight * mean_loss, given.weight)

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(self.num_samples + other.num_samples, self.loss + other.loss, self.weight + other.weight)


class Counting:
    """Which micro-batches this member's gradient has in it, and what it holds that a round may assign to it.

    Args:
        held_nbytes: as of `Bounds`.
    """

    def __init__(
        self, me: PeerId, stage: int, device: Device, schedule: Schedule, emit: Emit, held_nbytes: int
    ) -> None:
        self._me = me
        self._stage = stage
        self._device = device
        self._schedule = schedule
        self._emit = emit
        self._held_nbytes = held_nbytes
        self._sum = Sum()
        self._held: dict[BatchId, _Held] = {}
        self._adding: set[asyncio.Future[None]] = set()
        self._may_count = asyncio.Event()
        self._may_count.set()
        self.num_closed = 0  # rounds
        self.exactly_once = ExactlyOnce()

    @property
    def num_samples(self) -> int:
        """Return how many samples the gradient that stands now is made of."""
        return self._sum.num_samples

    def take_sum(self) -> Sum:
        """Return what the gradient is made of that stands now, of which the caller takes hold."""
        taken, self._sum = self._sum, Sum()
        return taken

    def lose(self) -> None:
        """Let what was reported as counted, and taken, be lost: its gradient is."""
        self.exactly_once = self.exactly_once.lost()

    async def report(self) -> Told:
        """Return what the gradient that stands now has in it, and what is held. It stays so until `close`."""
        self.exactly_once = self.exactly_once.report()
        self._may_count.clear()
        with self._schedule.weights_first():
            while self._adding:
                await asyncio.wait(self._adding)
        assert self.exactly_once.told is not None
        return self.exactly_once.told

    async def close(self, reports: Mapping[PeerId, Told], electorate: Collection[PeerId]) -> Closed:
        """Take up what a round counted; see `ExactlyOnce.committed`. The gradient is as the caller has left it.

        What this member is to compute has been added when this returns.
        """
        self.num_closed += 1
        closed = self.exactly_once.committed(self._me, reports, electorate)
        self.exactly_once = closed.exactly_once
        to_compute = {batch: self._held[batch] for batch in sorted(closed.to_compute)}
        self._held = {batch: held for batch, held in self._held.items() if batch in self.exactly_once.held}
        with self._schedule.weights_first():
            for held in to_compute.values():
                await self._schedule.weights(partial(self._again, held))
                self._sum = self._sum.plus(held.given, held.returned.loss)
        self._may_count.set()
        return closed

    # --- what becomes of one micro-batch ---

    def computed(self, attempt: Attempt) -> None:
        """Its input gradient is ready: its sender is asked next."""
        self.exactly_once = self.exactly_once.computed(attempt)

    def must_wait(self, attempt: Attempt, word: Word) -> bool:
        """Whether a round is under way which what was accepted is not in: its sender is asked again afterwards."""
        return word == "accepted" and attempt.is_first and not self._may_count.is_set()

    async def until_closed(self) -> None:
        await self._may_count.wait()

    async def settle(self, attempt: Attempt, word: Word, held: _Held, passed: PassedTogether) -> None:
        """Do what its sender said: count it, hold it, or forget it."""
        before = self.exactly_once
        match word:
            case "accepted":
                self.exactly_once = before.accepted(attempt)
            case "refused":
                self.exactly_once = before.refused(attempt)
            case "unknown":
                self.exactly_once = before.doubted(attempt)
        if attempt.batch in self.exactly_once.counted - before.counted:
            # A team has forgotten its parts of what a round has gone by.
            is_forgotten = self.num_closed > held.began and not isinstance(passed, _Alone)
            await self._add(partial(self._again, held) if is_forgotten else passed.count)
            self._sum = self._sum.plus(held.given, held.returned.loss)
        elif attempt.batch in self.exactly_once.held:
            self._hold(attempt.batch, held)

    async def _add(self, count: Callable[[], None]) -> None:
        adding = asyncio.ensure_future(self._schedule.weights(count))
        self._adding.add(adding)
        adding.add_done_callback(self._adding.discard)
        await adding

    def _hold(self, batch: BatchId, held: _Held) -> None:
        self._held[batch] = held
        dropped = list[BatchId]()
        total = sum(each.nbytes for each in self._held.values())
        told = NONE if self.exactly_once.told is None else self.exactly_once.told.held
        for oldest in [each for each in self._held if each not in told]:
            if total <= self._held_nbytes:
                break
            total -= self._held.pop(oldest).nbytes
            dropped.append(oldest)
        if dropped:
            self.exactly_once = self.exactly_once.dropped(frozenset(dropped))
            self._emit(HeldDropped(stage=self._stage, num=len(dropped)))

    def _again(self, held: _Held) -> None:
        """Compute the weights' gradients of a micro-batch alone."""
        passed = self._device.forward(held.given)
        passed.backward(held.returned.gradient, held.returned.member)
        passed.count()


# What was sent may wait so long for a member to come to its step, at least, and so many times as long as that takes
# usually; the first ones for a long time, for nobody knows yet how long rounds take.
LOST_S, LOST, FIRST_LOST_S = 30.0, 4.0, 600.0


class CurrentStep:
    """The step that a member of a stage is at."""

    def __init__(self, stage: int, clock: Clock) -> None:
        self._stage = stage
        self._clock = clock
        self._at, self._advanced = ANY, asyncio.Event()
        self._wait = Pace()  # seconds that what was sent waits for its step

    def advance(self, step: Step) -> None:
        """Let what is of `step`, and before, go on."""
        self._at = step
        self._advanced.set()
        self._advanced = asyncio.Event()

    async def until(self, step: Step) -> None:
        """Wait until this member is at a step, or further.

        Raises:
            CallFailed: the others are long beyond it: it has lost touch with its stage, and somebody else may compute.
        """
        began = self._clock.now()
        deadline = began + (max(LOST_S, LOST * self._wait.mean) if self._wait.is_known else FIRST_LOST_S)
        while step > self._at:
            left_s = deadline - self._clock.now()
            if left_s <= 0:
                raise CallFailed(f"stage {self._stage} is at step {self._at} here, and was sent one of {step}")
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._advanced.wait()
        self._wait.measured(self._clock.now() - began)


class Worker:
    """One member of one stage.

    Args:
        device: computes the section.
        onward: to the next stage; None: this is the last one.
        run: does work for `device`, one piece at a time.
        current: the step that this member is at.
        together: computes with others what it can; None: this member computes all alone.
        witness: signs what this member computes, for others to look at; None: nobody does.
    """

    def __init__(
        self,
        link: StageLink,
        stage: int,
        device: Device,
        onward: Sender | None,
        run: Run,
        current: CurrentStep,
        emit: Emit,
        bounds: Bounds = Bounds(),
        together: Together | None = None,
        witness: Witness | None = None,
    ) -> None:
        self._witness = witness
        self._link = link
        self._stage = stage
        self._device = device
        self._together = together
        self._onward = onward
        self._current = current
        self._emit = emit
        self._bounds = bounds
        self._tasks = Tasks()
        self._schedule = Schedule(run, self._tasks)
        self._taken: dict[Attempt, PeerId] = {}
        self._passed: set[Attempt] = set()  # of those, which have gone on to the next stage
        self._carrying: dict[Attempt, tuple[Step, asyncio.Task[None]]] = {}
        self._settling: dict[asyncio.Task[None], PeerId] = {}  # and who is to say what counts
        self._done: dict[Attempt, None] = {}  # the oldest first
        self.counting = Counting(link.me, stage, device, self._schedule, emit, bounds.held_nbytes)

    def start(self) -> None:
        """Take micro-batches from now on."""
        self._link.hold(self._stage, Forward, self.on_forward)

    def stop(self) -> None:
        """Take none from now on."""
        self._link.let_go(self._stage, Forward, self.on_forward)

    @property
    def num_taken(self) -> int:
        """Return how many micro-batches are under way here."""
        return len(self._taken)

    @property
    def _has_queue(self) -> bool:
        """Return whether what is taken now would wait for more than what is computed just now."""
        return len(self._taken) - len(self._passed) > 1 or self._schedule.num_back > 0

    async def on_forward(self, peer: PeerId, request: Forward) -> IsTaken:
        """Take a micro-batch, if there is room. What is taken already is taken."""
        attempt = Attempt.of(request)
        if attempt in self._taken:
            return IsTaken(is_taken=self._taken[attempt] == peer)
        if attempt in self._done:  # computed twice, it would be sent on as two first attempts
            return IsTaken(is_taken=True)
        is_whole = len(request.tokens) == request.num_samples * self._device.tokens_nbytes
        is_fit = request.stage == self._stage and is_whole and (request.activations is None) == (self._stage == 0)
        if not is_fit or len(self._taken) >= self._bounds.num_taken:
            return IsTaken(is_taken=False)
        if self._has_queue and not request.may_wait:
            return IsTaken(is_taken=False)
        self._taken[attempt] = peer
        self._carrying[attempt] = Step(request.round, request.step), self._tasks.spawn(self._carry(peer, request))
        return IsTaken(is_taken=True)

    async def advance(self, step: Step) -> None:
        """Compute micro-batches up to `step`; later ones wait. Earlier ones that nobody has accepted are given up.

        Their activations are of weights that are no more: whoever sent them tries again.
        """
        for attempt, (of, carrying) in list(self._carrying.items()):
            if of < step and carrying not in self._settling:
                carrying.cancel()
                await self._link.post(self._taken[attempt], GivenUp(**attempt.at(self._stage)))
        self._current.advance(step)

    async def settled(self) -> None:
        """Wait until of all that was sent back it is known whether it counts, and what counts is counted.

        Of what a sender is to tell that is gone this may never be known.
        """
        while due := [task for task, sender in self._settling.items() if self._link.is_linked(sender)]:
            await asyncio.wait(due, timeout=AGAIN_S)

    async def again(self, work: Callable[[], T]) -> T:
        """Do something else with the device, once it has nothing to do for others."""
        return await self._schedule.again(work)

    async def aclose(self) -> None:
        """End, and say so to whoever waits for what was taken: others may compute it."""
        self.stop()
        taken = dict(self._taken)
        await self._tasks.aclose()
        for attempt, sender in taken.items():
            await self._link.post(sender, GivenUp(**attempt.at(self._stage)))

    # --- the life of a micro-batch ---

    async def _carry(self, sender: PeerId, request: Forward) -> None:
        attempt = Attempt.of(request)
        try:
            given = await self._given(sender, request)
            await self._current.until(given.step)
            began = self.counting.num_closed
            head = None if self._witness is None or given.is_measured else await self._witness.head(self._stage)
            passed = await self._forward(given)
            self._passed.add(attempt)
            await self._link.post(sender, Computed(**attempt.at(self._stage)))
            returned, output = await self._beyond(attempt, given, passed)
            answer = Backward(**attempt.at(self._stage), gradient=None, loss=returned.loss)
            if given.is_measured:
                await self._asked(sender, answer)
                return
            gradient = await passed.backward(returned.gradient, returned.member)
            back = None if gradient is None else parcel(gradient)
            answer = replace_fields(answer, gradient=None if back is None else back.digest)
            if self._witness is not None and head is not None:
                made = Made(given.activations, output, returned.member, _packed(returned.gradient), back, returned.loss)
                signed = self._witness.signed(request, sender, head, made)
                answer = replace_fields(answer, passage=signed, after=returned.passage)
            settling = asyncio.current_task()
            assert settling is not None
            self._settling[settling] = sender
            try:
                await self._settle(answer, sender, _Held(given, returned, began), passed, back)
            finally:
                del self._settling[settling]
        except Exception as error:  # whatever it is, nobody waits for it
            self._emit(MicroBatchFailed(stage=self._stage, member=sender, reason=str(error)))
            await self._link.post(sender, GivenUp(**attempt.at(self._stage)))
            if not isinstance(error, PeerError | NetError | Refused | NotFinite | ConfigError):
                raise
        finally:
            del self._taken[attempt], self._carrying[attempt]
            self._passed.discard(attempt)
            self._done[attempt] = None
            while len(self._done) > MAX_REMEMBERED:
                del self._done[next(iter(self._done))]

    async def _given(self, sender: PeerId, request: Forward) -> Given:
        activations = None
        if request.activations is not None:
            nbytes = self._device.input_nbytes(request.num_samples)
            activations = await self._link.fetch(sender, request.activations, nbytes)
        step = Step(request.round, request.step)
        return Given(request.num_samples, request.tokens, activations, step, request.is_measured, sender)

    async def _forward(self, given: Given) -> PassedTogether:
        passed = None if self._together is None else await self._together.forward(given)
        if passed is not None:
            return passed
        return _Alone(self._schedule, await self._schedule.forward(partial(self._device.forward, given)))

    async def _beyond(self, attempt: Attempt, given: Given, passed: PassedTogether) -> tuple[Returned, Parcel | None]:
        """Return the gradient of this section's output, and the loss; and the output, where all get the same."""
        output = passed.output
        if output is None:
            assert passed.loss is not None
            return Returned(None, passed.loss, self._link.me), None
        assert self._onward is not None
        encode = None
        if callable(output):
            onward, encode = replace(given, activations=None), partial(self._encoded, output)
        else:
            onward = replace(given, activations=parcel(output))
        nbytes = 0 if given.is_measured else self._device.gradient_nbytes(given.num_samples)
        returned = await self._onward.send(attempt.batch, onward, nbytes, is_first=attempt.is_first, encode=encode)
        return returned, onward.activations

    async def _encoded(self, encode: Encode, member: PeerId) -> Parcel:
        return await self._schedule.forward(lambda: parcel(encode(member)))

    async def _settle(
        self, answer: Backward, sender: PeerId, held: _Held, passed: PassedTogether, back: Parcel | None
    ) -> None:
        attempt = Attempt.of(answer)
        self.counting.computed(attempt)
        if back is not None:
            self._link.give(back)
        try:
            word = await self._asked(sender, answer)
            while self.counting.must_wait(attempt, word):
                await self.counting.until_closed()
                word = await self._asked(sender, answer)  # a round has gone by it
        finally:
            if back is not None:
                self._link.take_back(back.digest)
        await self.counting.settle(attempt, word, held, passed)

    async def _asked(self, sender: PeerId, request: Backward) -> Word:
        wait_s = AGAIN_S
        for _ in range(NUM_ASKED):
            try:
                return (await self._link.call(sender, request, Verdict, deadline_s=CALL_S)).word
            except (PeerError, NetError, Refused):
                await asyncio.sleep(wait_s)
                wait_s *= 2
        return "unknown"


def _packed(data: Buffer | None) -> Parcel | None:
    return None if data is None else parcel(data)


class _Alone:
    def __init__(self, schedule: Schedule, passed: Passed) -> None:
        self.output, self.loss, self.count = passed.output, passed.loss, passed.count
        self._schedule = schedule
        self._passed = passed

    async def backward(self, gradient: Buffer | None, member: PeerId | None) -> Buffer | None:
        return await self._schedule.backward(partial(self._passed.backward, gradient, member))
