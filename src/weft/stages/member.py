"""One stage that this peer holds: a `Peer` of that stage's run, and the worker that micro-batches come to.

It does not know which stages should be held, nor by whom.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from weft.clock import Clock
from weft.errors import CheckpointError
from weft.events import Emit, Event
from weft.ids import PeerId
from weft.keys import Identity
from weft.net.channel import Channel
from weft.net.node import Node
from weft.peer.checkpoint import Snapshot, load
from weft.peer.compute import Compute
from weft.peer.device import choose
from weft.peer.holding import fitting
from weft.peer.home import Home, PeerFolder
from weft.peer.machine import PeerConfig
from weft.peer.peer import Outcome, Peer, Place
from weft.peer.place import Data
from weft.peer.replica import Replica
from weft.peer.section_trainer import SectionTrainer
from weft.peer.staged import StagedConfig, channel_of
from weft.peer.unmeasured import Unmeasured
from weft.pipeline.desk import Desk
from weft.pipeline.lane import Lane
from weft.pipeline.origin import Origin
from weft.pipeline.sender import Sender
from weft.pipeline.worker import Bounds, Worker
from weft.stages.busy import Busy
from weft.stages.conductor import Conductor, Part
from weft.stages.measure import Bystander, Needs, StageEvaluator
from weft.stages.messages import BeatAnswer, BeatRequest, Held, LeaveAnswer, MayLeave, State
from weft.stages.pulse import Pulse
from weft.stages.source import Source


@dataclass(frozen=True, kw_only=True)
class Grounds:
    """What all stages of one peer stand on."""

    run: StagedConfig  # the whole
    node: Node
    identity: Identity
    home: Home
    folder: PeerFolder  # of the whole run
    settings: PeerConfig
    data: Data
    clock: Clock
    compute: Compute
    emit: Emit
    lane: Lane
    desk: Desk
    pulse: Pulse
    onward: Callable[[int], Sender]  # to a stage
    has_busy: Callable[[], bool]  # whether anybody evaluates or fetches at the end


class Member:
    """
    Args:
        since: which time it is that this process holds the stage: a number that grows.
        outer: what its section starts from; becomes its own.

    Raises:
        TooLarge: the section does not fit this machine.
    """

    def __init__(self, grounds: Grounds, stage: int, since: int, outer: Tensor) -> None:
        self.stage = stage
        self.since = since
        self.is_leaving = False
        self.has_ended = asyncio.Event()
        self._measuring: StageEvaluator | None = None  # of the first stage
        self._grounds = grounds
        self._loop = asyncio.get_running_loop()
        self.run = run = grounds.run.of_stage(stage)
        self.folder = grounds.folder.stage(stage)
        self.channel = channel = Channel(grounds.node, channel_of(stage), run.run, since)
        self.channel.serve(MayLeave, self._may_leave)
        self.channel.serve(BeatRequest, self._beat)
        batches = grounds.data.batches(run, "train")
        self.trainer = SectionTrainer(run, grounds.settings, batches, self._emit_from_thread, grounds.clock)
        self._busy = Busy(grounds.compute, grounds.clock, run.pipeline.micro_batch)
        is_last = stage == run.stages - 1
        onward = None if is_last else grounds.onward(stage + 1)
        bounds = Bounds(num_taken=fitting(run, grounds.settings, choose(grounds.settings)))
        run_work, clock, emit = self._busy.train, grounds.clock, grounds.emit
        self.worker = Worker(grounds.lane, stage, self.trainer, onward, run_work, clock, emit, bounds)
        source = None
        if stage == 0:
            first = int(grounds.clock.wall() * 1000) << 20  # no process of this peer has begun one so high
            origin = Origin(grounds.node.peer, grounds.onward(0), run.stages, first)
            source = Source(origin, batches, run.pipeline.micro_batch, grounds.compute)
        part = Part(run, channel, self.worker, self.trainer, grounds.compute, grounds.pulse, source, self._evaluator)
        self.conductor = Conductor(part)
        self._source = source
        self._place = self._standing(outer)
        self.peer = Peer(run, self._place)

    def _standing(self, outer: Tensor) -> Place:
        grounds = self._grounds
        return Place(
            node=self.channel,
            identity=grounds.identity,
            folder=self.folder,
            settings=grounds.settings,
            data=grounds.data,
            initial=outer,
            clock=grounds.clock,
            compute=grounds.compute,
            emit=grounds.emit,
            make_learner=lambda _emit: self.trainer,
            companion=self.conductor,
        )

    def snapshot(self) -> Snapshot | None:
        """Return the state of the stage that this machine has kept; it is read here."""
        if not self.folder.has_checkpoint:
            return None
        try:
            found = load(self.folder.checkpoint, max_parameters=self._grounds.settings.max_parameters)
        except CheckpointError:
            return None
        return found if found.config == self.run else None

    async def live(self, *, wait_for: int | None, snapshot: Snapshot | None) -> Outcome:
        """Hold the stage until it has ended, or `stop`.

        Args:
            wait_for: members with which to open its run; None: others have, or will.
        """
        self._grounds.desk.workers[self.stage] = self.worker
        try:
            if wait_for is not None:
                return await self.peer.found(wait_for=wait_for, snapshot=snapshot)
            return await self.peer.join(snapshot=snapshot)
        finally:
            self.is_leaving = True
            if self._grounds.desk.workers.get(self.stage) is self.worker:
                del self._grounds.desk.workers[self.stage]
            await self.worker.aclose()
            self.channel.close()

    def stop(self, reason: str) -> None:
        self.is_leaving = True
        self.peer.stop(reason)

    @property
    def is_measuring(self) -> bool:
        """Whether it has yet to measure the end of the run."""
        return self._measuring is not None and self.peer.is_complete and not self._measuring.is_measured

    @property
    def held(self) -> Held:
        """Return what others are told of it."""
        head = self.peer.head
        state: State = "ready"
        if self.is_leaving or (self.peer.is_finishing and not self.peer.is_complete):  # who is complete measures yet
            state = "finishing"
        elif self.peer.pausing.is_away:
            state = "paused"
        elif not self.conductor.is_in_step:
            state = "joining"
        return Held(
            stage=self.stage,
            since=self.since,
            state=state,
            round=0 if head is None else head.round,
            rate=self._busy.rate,
            num_waiting=self.worker.num_taken,
        )

    def _evaluator(self, conductor: Conductor, replica: Replica, is_stopping: Callable[[], bool]) -> Unmeasured:
        grounds = self._grounds
        needs = Needs(grounds.clock, grounds.has_busy, grounds.run.num_parameters)
        if self._source is None:
            return Bystander(needs)
        self._measuring = StageEvaluator(self.run, self._place, self.trainer, replica, is_stopping)
        return self._measuring.passing(self._source, conductor, needs)

    async def _may_leave(self, _peer: PeerId, _request: MayLeave) -> LeaveAnswer:
        return LeaveAnswer(does_stay=not self.is_leaving and self.conductor.is_ready)

    async def _beat(self, _peer: PeerId, request: BeatRequest) -> BeatAnswer:
        if request.manifest is None:
            return BeatAnswer(beat=self.conductor.beat.round)
        return BeatAnswer(beat=self.conductor.beat_after(request.manifest))

    def _emit_from_thread(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._grounds.emit, event)
