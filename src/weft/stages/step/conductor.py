"""A stage's peer in step with the other stages: the companion of its rounds.

    first stage    micro-batches of the lease are begun, step by step; all are told how far that is
    every stage    a step is over once all who begin have all back; then what was accepted here is the step's gradient
    methods that send gradients    one step a round, which the round merges
    methods that send deltas       `every` steps a round, each an inner step on what was routed here

Before a payload is announced, the other members of the stage hear which micro-batches it is made of (`barrier`); after
the round all work out the same of what nobody has counted (`pipeline.exactly_once`).

An end stage of a model whose embedding is its head hands its part of that matrix's gradient to `tied_conductor`, and
goes on once that has been merged, too.

Rounds of the stages go together: that of the first stage numbers the steps, and the others follow. A stage that has
fallen behind, or counts its rounds otherwise since a branch, goes on with the newest step that it hears of. Who hears
that another member has ended the step ends it, too: they may have come to different names for it.

Held-out loss is of a model that nobody holds whole: a member of the first stage sends windows through all stages
(`StageEvaluator`; others have a `Bystander`). Both stay at the end until nobody measures or fetches any more, for that
takes all sections. No text is sampled: that takes a pass through all stages for each token.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.clock import Clock
from weft.data import rows
from weft.data.batch import Batches
from weft.data.rows import Batch
from weft.ids import Digest, PeerId, Round
from weft.net.channel import Channel
from weft.peer.companion import Parameters, Unmeasured
from weft.peer.loop.evaluate import Evaluator
from weft.pipeline.device import Given, Step
from weft.pipeline.sender import Origin
from weft.pipeline.worker import Sum, Worker
from weft.run.staged import StagedConfig
from weft.stages.step.barrier import ASK_S, Reports, Snapshots
from weft.stages.step.lookout import Lookout
from weft.stages.step.pipeline import Pipeline
from weft.stages.step.teams import Teams
from weft.stages.step.tied_conductor import TiedConductor
from weft.sync.records.messages import Manifest
from weft.tasks import Compute
from weft.training.learner import Measured
from weft.training.section import SectionTrainer
from weft.wire import digest_of

LOOK_S = 0.5  # at whether what is measured should be broken off, and whether a stage is needed still
FIRST_S = 3.0  # for whoever measures at the end to begin
MOST_S = 600.0  # and as long as the whole model takes over a slow line
SLOW_BPS = 8e6
SETTLE_S = 10.0  # for what was sent back to be accepted or not, once the step is over


class Source:
    """Of one member of the first stage.

    Args:
        micro_batch: samples at a time.
    """

    def __init__(self, origin: Origin, batches: Batches, micro_batch: int, compute: Compute) -> None:
        self._origin = origin
        self._batches = batches
        self._micro_batch = micro_batch
        self._compute = compute

    async def begin(self, positions: NDArray[np.int64], step: Step) -> None:
        """Have micro-batches of these samples computed and counted by all stages."""

        async def one(some: NDArray[np.int64]) -> None:
            batch = await self._compute.serve(lambda: self._batches.at(some))
            await self._origin.begin(Given(len(some), packed(batch), None, step))

        size = self._micro_batch
        await _all(*(one(positions[start : start + size]) for start in range(0, len(positions), size)))

    async def measured(self, heldout: Batches, num_windows: int, step: Step, between: Callable[[], None]) -> Measured:
        """Return the mean loss of held-out windows, by parameters as they are in `step`.

        Args:
            between: called now and then: other stages may be gone; what it raises ends this.
        """
        total, num_tokens = 0.0, 0

        async def one(batch: Batch) -> None:
            nonlocal total, num_tokens
            given = Given(len(batch.tokens), packed(batch), None, step, is_measured=True)
            returned = await self._origin.begin(given)
            total += returned.loss * batch.num_predicted
            num_tokens += batch.num_predicted

        batches = heldout.heldout_batches(num_windows, self._micro_batch)
        measuring = asyncio.ensure_future(_all(*(one(batch) for batch in batches)))
        try:
            while not measuring.done():
                between()
                await asyncio.wait([measuring], timeout=LOOK_S)
            measuring.result()
        finally:
            measuring.cancel()
            await asyncio.wait([measuring])
        return Measured(total / num_tokens, num_tokens)


async def _all(*works: Coroutine[Any, Any, None]) -> None:
    """Do all of it at once; where one fails, or this is cancelled, none goes on."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def packed(batch: Batch) -> bytes:
    """Return windows as a `Forward` has them: all tokens and the one after the last, four bytes each."""
    data: bytes = rows.written(batch).to(torch.int32).contiguous().numpy().tobytes()
    return data


@dataclass(frozen=True)
class Part:
    """What a conductor joins, of one stage."""

    stage: int
    run: StagedConfig
    channel: Channel
    worker: Worker
    trainer: SectionTrainer
    compute: Compute
    pipeline: Pipeline
    source: Source | None  # None: another stage than the first
    tied: TiedConductor | None  # None: no tied matrix lies apart from this section
    teams: Teams | None  # None: all members compute alone
    snapshots: Snapshots
    lookout: Lookout | None  # None: members of the stage do not audit each other
    make_evaluator: Callable[[Parameters, Callable[[], bool]], Unmeasured]


class Conductor:
    def __init__(self, part: Part) -> None:
        self._part = part
        self._barrier = part.pipeline.barrier
        self._sends_gradient = part.run.method.sends_gradient
        self._round: int | None = None  # of the first stage; None: nothing was heard of any yet
        self._reports = Reports(part.channel, self._barrier.look)
        self._previous: Digest | None = None  # of the round that this peer trains for
        self._is_stopped = False
        self.is_ready = False  # it computes in step with the others

    def stop(self) -> None:
        """Wait for nobody any more."""
        self._is_stopped = True
        self._barrier.look()

    @property
    def step(self) -> Step:
        """Return the first step of the round that this peer is in."""
        return Step(self._round or 0, 0)

    @property
    def has_begun(self) -> bool:
        """Whether this peer has been in any round, since this process began."""
        return self._round is not None

    @property
    def is_in_step(self) -> bool:
        """Whether this peer computes with the others: they are at most one round further."""
        return self.is_ready and self.step.round + 1 >= self._barrier.steps.newest.round

    # --- what rounds ask of it ---

    async def train(self, head: Manifest, positions: NDArray[np.int64], is_over: Callable[[], bool]) -> None:
        part = self._part
        self._previous = digest_of(head)
        self._round = head.round if part.source is not None else max(self._round or 0, self._barrier.steps.newest.round)
        self._open(head)
        if not self.is_ready:
            await self._reports.ask_all(self._previous)
            self.is_ready = True
            if part.tied is not None:
                part.tied.follow(part.stage)
            part.pipeline.changed()
        self._leave_steps(self._previous)
        is_again = False
        while not await self._made(head, positions, is_over, is_again) and await self._nobody_brings(head, is_over):
            is_again = True
            if part.source is None:
                self._round = max(self._round + 1, self._barrier.steps.newest.round)

    async def _made(
        self, head: Manifest, positions: NDArray[np.int64], is_over: Callable[[], bool], is_again: bool
    ) -> bool:
        """Make a round's steps; return whether there is something to bring, or others bring something already.

        Args:
            is_again: the lease was begun before, and its work may have been assigned to this member since.
        """
        part, every, round = self._part, self._part.run.method.every, self._round or 0
        counting = part.worker.counting
        origins = frozenset(lease.peer for lease in head.leases)
        num_samples = 0
        for number, share in enumerate(np.array_split(positions, 1 if self._sends_gradient else every)):
            step = Step(round, number)
            await part.worker.advance(step)
            if part.source is not None and not (is_again and counting.num_samples):
                await self._begun(part.source, step, share, origins, is_over)
            await self._barrier.until_over(step, lambda: is_over() or self._is_announced())
            with suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_S):
                    await part.worker.settled()
            num_samples += counting.num_samples
            if not self._sends_gradient:
                await self._make_step(counting.take_sum(), head.committed_tokens, number + 1)
            if is_over() or self._is_announced():
                break
        if part.lookout is not None:
            await part.lookout.looked()
        self._round = max(self._reports.brought(digest_of(head)), default=round)
        await counting.report()
        total = counting.take_sum() if self._sends_gradient and num_samples else Sum()
        if part.tied is not None:
            await part.tied.hand_in(part.stage, self._round, total)
        if total.num_samples and part.teams is not None and not await part.teams.collect():
            counting.lose()
            await part.compute.train(part.trainer.clear)
            total, num_samples = Sum(), 0
        part.trainer.hand_in(total)
        return num_samples > 0 or is_over() or self._is_announced()

    async def _make_step(self, total: Sum, committed_tokens: int, num_steps: int) -> None:
        part, pace = self._part, self._barrier.steps.num_origins
        await part.compute.train(lambda: part.trainer.make_step(total, committed_tokens, num_steps, pace))

    async def _nobody_brings(self, head: Manifest, is_over: Callable[[], bool]) -> bool:
        """Where no member has anything to bring, no round will be: settle among the reports alone what is held.

        So it is where all that came to a stage were later attempts, as after its members died. Others of the stage may
        be at a later step: what comes of that is computed meanwhile, for they wait for it before they tell.
        """
        part = self._part
        await self.announcing(None)
        previous = digest_of(head)
        others = {peer: part.channel.instance_of(peer) for peer in part.channel.peers if peer in head.members}

        def here() -> set[PeerId]:
            """Return who may still tell: who dies, leaves or starts again meanwhile does not."""
            return {part.channel.peer, *(peer for peer in others if part.channel.instance_of(peer) == others[peer])}

        def is_known() -> bool:
            return is_over() or self._is_announced() or self._reports.of(previous, here()).keys() == here()

        at = Step(self._round or 0, 0)

        def is_behind() -> bool:
            return part.source is None and self._barrier.steps.newest > at

        while not is_known():
            if is_behind():
                at = self._barrier.steps.newest
                await part.worker.advance(at)
            await self._reports.ask_all(previous)  # what was told while the link was down, this peer has not heard
            with suppress(TimeoutError):
                async with asyncio.timeout(ASK_S):
                    await self._barrier.until(lambda: is_known() or is_behind())
        if is_over() or self._is_announced():
            return False
        told = self._reports.of(previous, here())
        await part.worker.counting.close({peer: each.told for peer, each in told.items()}, head.members)
        self._reports.forget(previous, told)
        return True

    async def _begun(
        self,
        source: Source,
        step: Step,
        positions: NDArray[np.int64],
        origins: frozenset[PeerId],
        is_over: Callable[[], bool],
    ) -> None:
        """Have all micro-batches of a step pass through the stages, or as many as there is time for."""
        barrier = self._barrier
        barrier.tell(step, origins, is_done=False)
        beginning = asyncio.ensure_future(source.begin(positions, step))
        try:
            await barrier.until(lambda: beginning.done() or is_over(), wakes=beginning)
            if beginning.done():
                beginning.result()
        finally:
            beginning.cancel()
            barrier.tell(step, origins, is_done=True)

    async def announcing(self, payload: Digest | None) -> None:
        """Tell the other members what the payload is made of; None: this peer brings nothing."""
        told = self._part.worker.counting.exactly_once.told
        if told is not None and self._previous is not None:
            self._reports.tell(self._previous, payload, self._round or 0, told)

    async def until_lost(self) -> None:
        await self._reports.until_lost(self._previous)

    async def settling(self) -> None:
        if self._part.lookout is not None:
            await self._part.lookout.close()

    async def settled(self, manifest: Manifest, electorate: Collection[PeerId]) -> bool:
        part = self._part
        reports = await self._reports.reports(manifest, electorate)
        if self._sends_gradient:
            await part.compute.train(part.trainer.clear)
        if part.teams is not None:
            part.teams.forget()
        closed = await part.worker.counting.close(reports, electorate)
        told = self._reports.rounds(manifest.previous)
        self._round = manifest.round if part.source is not None else max([self._round or 0, *told]) + 1
        await part.snapshots.settled(self._round, digest_of(manifest))
        if part.tied is not None:
            await part.tied.merged(part.stage, self._round - 1, lambda: self._is_stopped)
        self._leave_steps(digest_of(manifest))
        self._open(manifest)
        await part.worker.advance(self.step)
        return bool(closed.given_up)

    def _open(self, head: Manifest) -> None:
        """Let this peer look at what others compute with the parameters after a manifest, which it has."""
        if self._part.lookout is not None:
            self._part.lookout.open(head)

    def _leave_steps(self, state: Digest) -> None:
        """Let a team forget what was of other weights than those after `state`."""
        if self._part.teams is not None:
            self._part.teams.advance(self.step, state)

    def evaluator(self, replica: Parameters, is_stopping: Callable[[], bool]) -> Unmeasured:
        return self._part.make_evaluator(replica, is_stopping)

    def _is_announced(self) -> bool:
        """Whether another member of the stage has ended the step that this peer is in: it is over, by whatever name."""
        return self._reports.is_coming(self._previous)


class Needs:
    """Whether a stage is needed at the end of the run.

    Args:
        has_busy: whether anybody measures or fetches.
        num_parameters: of the whole model.
    """

    def __init__(self, clock: Clock, has_busy: Callable[[], bool], num_parameters: int) -> None:
        self._clock = clock
        self._has_busy = has_busy
        self._most_s = MOST_S + 32 * num_parameters / SLOW_BPS

    async def over(self) -> None:
        """Wait until nobody needs this stage any more."""
        began = self._clock.now()
        await asyncio.sleep(FIRST_S)
        while self._has_busy() and self._clock.now() - began < self._most_s:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(LOOK_S)


class StageEvaluator(Evaluator):
    is_measured = False  # at the end of the run

    def passing(self, source: Source, conductor: Conductor, needs: Needs) -> "StageEvaluator":
        """Send what is measured through `source`, by parameters as of `conductor`'s round; return itself."""
        self._source, self._conductor, self._needs = source, conductor, needs
        return self

    async def finish(self) -> None:
        if self._conductor.has_begun:  # else all was trained, and measured, before: the others' rounds are over, too
            await super().finish()
        self.is_measured = True
        await self._needs.over()

    async def _measured(self, outer: Tensor, windows: int, between: Callable[[], None]) -> Measured:  # noqa: ARG002
        return await self._source.measured(self._heldout, windows, self._conductor.step, between)

    async def _sample(self, round: Round) -> None:
        """Write nothing."""


class Bystander(Unmeasured):
    def __init__(self, needs: Needs) -> None:
        super().__init__()
        self._needs = needs

    async def finish(self) -> None:
        await self._needs.over()
