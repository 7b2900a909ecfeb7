"""This peer in the run of one piece of a model: a `Peer` on a channel of the node, from its beginning to its end.

Member        of a section: micro-batches come to its worker
TiedMember    of a matrix that both end sections have: a run of its own, held as long as they are

    member = await tied.held(stage)       before the stage is; begins it, unless it is held already
    await tied.let_go(stage)              once the stage has ended

Nothing but notices is told of the rounds of a tied matrix: they are part of the end stages' (`tied_conductor`).
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from torch import Tensor

from weft.errors import CheckpointError, PeerError
from weft.events import Event, Notice
from weft.ids import PeerId
from weft.launch.fetch import fetch_initial
from weft.net.channel import Channel
from weft.peer.companion import Parameters, Unmeasured
from weft.peer.peer import Context, Outcome, Peer
from weft.peer.round.acts import PendingActs
from weft.peer.state.checkpoint import Snapshot, load
from weft.pipeline.sender import Origin
from weft.pipeline.witness import Witness
from weft.pipeline.worker import Bounds, CurrentStep, Worker
from weft.run.frozen import frozen_section
from weft.run.genesis import initial
from weft.run.staged import channel_of
from weft.run.trust import AuditedTrust
from weft.stages.messages import (
    MAX_UNTRUSTED,
    BeatAnswer,
    BeatRequest,
    Held,
    LeaveAnswer,
    MayLeave,
    PinAt,
    PinnedAnswer,
    State,
)
from weft.stages.step.barrier import Snapshots
from weft.stages.step.conductor import Bystander, Conductor, Needs, Part, Source, StageEvaluator
from weft.stages.step.lookout import Lookout, Place
from weft.stages.step.pipeline import Kit, Pipeline
from weft.stages.step.teams import Teams
from weft.stages.step.tied_conductor import TiedConductor
from weft.store.pool import Pool
from weft.training.device import choose
from weft.training.section_memory import fitting
from weft.training.trainer import Trainer

AGAIN_S = 3.0  # until it is asked again for first weights that nobody delivers
LOOK_S = 0.05  # whether the tied matrix has come
BACKUP = -1  # in place of a stage: who has its newest state holds it until an end stage does
NOT_NEEDED = "this peer holds neither end stage any more"


async def first_weights(kit: Kit, stage: int) -> Tensor:
    """Return what a piece starts from: made of the seed, or fetched, from whoever has it, however long that takes."""
    node, run, home = kit.node, kit.run.of_stage(stage), kit.home
    while True:
        try:
            await fetch_initial(node, node.peers, run, home)
        except PeerError as error:
            text = f"nobody delivers the first weights of {kit.run.called(stage)} yet: {error}"
            kit.emit(Notice(text=text))
            await asyncio.sleep(AGAIN_S)
            continue
        outer = await kit.compute.serve(lambda: initial(run, home))
        assert outer is not None, "they have been fetched"
        return outer


class Membership:
    """
    Args:
        stage: the piece's number.
        since: which time it is that this process holds it: a number that grows.
    """

    peer: Peer
    conductor: Conductor | TiedConductor

    def __init__(self, kit: Kit, pipeline: Pipeline, stage: int, since: int) -> None:
        self.stage = stage
        self.since = since
        self.is_leaving = False
        self.has_ended = asyncio.Event()
        self._kit = kit
        self._pipeline = pipeline
        self._loop = asyncio.get_running_loop()
        self.run = kit.run.of_stage(stage)
        self.folder = kit.folder.stage(stage)
        self.channel = Channel(kit.node, channel_of(stage), self.run.run, since)
        self.channel.serve(BeatRequest, self._round_of)
        self.channel.serve(PinAt, self._pin_at)
        self.snapshots = Snapshots(lambda: self.peer.pin(), self._settled)

    def _make_context(self, trainer: Trainer, conductor: Conductor | TiedConductor, outer: Tensor) -> Context:
        """
        Args:
            outer: what the piece starts from; becomes its own.
        """
        kit = self._kit
        return Context(
            node=self.channel,
            identity=kit.identity,
            folder=self.folder,
            settings=kit.settings,
            data=kit.data,
            initial=outer,
            clock=kit.clock,
            compute=kit.compute,
            emit=kit.emit,
            make_learner=lambda _emit: trainer,
            memory=Pool(0, self.folder.scratch),  # a section is as large as there is memory for
            companion=conductor,
        )

    def snapshot(self) -> Snapshot | None:
        """Return the state of the piece that this machine has kept; it is read here."""
        if not self.folder.has_checkpoint:
            return None
        try:
            found = load(self.folder.checkpoint, max_parameters=self._kit.settings.max_parameters)
        except CheckpointError:
            return None
        return found if found.config == self.run else None

    async def live(self, *, wait_for: int | None, snapshot: Snapshot | None) -> Outcome:
        """Hold the piece until its run has ended, or `stop`.

        Args:
            wait_for: members with which to open its run; None: others have, or will.
        """
        try:
            if wait_for is not None:
                return await self.peer.found(wait_for=wait_for, snapshot=snapshot)
            return await self.peer.join(snapshot=snapshot)
        finally:
            self.is_leaving = True
            if self._pipeline.serving is not None:
                await self._pipeline.serving.let_go(self.stage)
            await self._end()
            self.channel.close()

    async def _end(self) -> None:
        """Let go of what it has beside its peer."""

    async def _settled(self, round: int) -> None:
        if (serving := self._pipeline.serving) is not None:
            await serving.settled(self.stage, round, self.peer.replica.outer)

    def leave(self) -> None:
        """Let nobody send it anything more: it is about to go."""
        self.is_leaving = True

    def stay(self) -> None:
        """Take it back that it is."""
        self.is_leaving = False

    def stop(self, reason: str) -> None:
        self.is_leaving = True
        self.conductor.stop()
        self.peer.stop(reason)

    @property
    def held(self) -> Held:
        """Return what others are told of it."""
        head = self.peer.head
        return Held(
            stage=self.stage,
            since=self.since,
            state=self._state,
            round=0 if head is None else head.round,
            rate=0.0,
            num_waiting=0,
        )

    @property
    def _state(self) -> State:
        if self.is_leaving or (self.peer.is_finishing and not self.peer.is_complete):  # who is complete measures yet
            return "finishing"
        return "paused" if self.peer.pausing.is_away else "ready"

    async def _round_of(self, _peer: PeerId, request: BeatRequest) -> BeatAnswer:
        if request.manifest is None:
            return BeatAnswer(beat=self.conductor.step.round)
        return BeatAnswer(beat=self.snapshots.round_after(request.manifest))

    async def _pin_at(self, _peer: PeerId, request: PinAt) -> PinnedAnswer:
        return PinnedAnswer(manifest=await self.snapshots.at(request.beat))

    def _emit_from_thread(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._kit.emit, event)


class TiedMember(Membership):
    """
    Args:
        since: as of a membership.
        outer: what the matrix starts from; becomes its own.
    """

    conductor: TiedConductor

    def __init__(self, kit: Kit, pipeline: Pipeline, stage: int, since: int, outer: Tensor) -> None:
        super().__init__(kit, pipeline, stage, since)
        self.has_begun = asyncio.Event()  # end stages may compute with it
        batches = kit.data.batches(self.run, "train")
        self.trainer = kit.make_tied(self.run, kit.settings, batches, self._emit_from_thread, kit.clock)
        self.trainer.on_started(lambda: self._loop.call_soon_threadsafe(self.has_begun.set))
        self.conductor = TiedConductor(self.channel, self.trainer, kit.compute, pipeline.barrier, self.snapshots)
        self.peer = Peer(self.run, self._make_context(self.trainer, self.conductor, outer))

    async def is_here(self, is_over: Callable[[], bool]) -> None:
        """Wait until the matrix is that of the others, or will never be, or for `is_over`."""
        while not (self.peer.takes_part or self.is_leaving or is_over()):  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(LOOK_S)

    @property
    def _state(self) -> State:
        state = super()._state
        return "joining" if state == "ready" and not self.peer.takes_part else state


class Member(Membership):
    """
    Args:
        stage, since: as of a membership.
        outer: what its section starts from; becomes its own.
        tied: of the matrix that lies apart from its section, if one does: it has begun.

    Raises:
        TooLarge: the section does not fit this machine.
    """

    conductor: Conductor

    def __init__(
        self, kit: Kit, pipeline: Pipeline, stage: int, since: int, outer: Tensor, tied: TiedMember | None
    ) -> None:
        micro_batch = kit.run.pipeline.micro_batch
        emit, self._compute = pipeline.reports.of(stage, kit.compute, micro_batch)
        kit = replace(kit, emit=emit, compute=self._compute)
        super().__init__(kit, pipeline, stage, since)
        run, clock = self.run, kit.clock
        self._evaluator: StageEvaluator | None = None  # of the first stage
        self.channel.serve(MayLeave, self._may_leave)
        batches = kit.data.batches(run, "train")
        matrix = None if tied is None else tied.trainer
        self._tied = None if tied is None else tied.conductor
        frozen = partial(frozen_section, run, kit.home)
        self.trainer = kit.make_section(run, kit.settings, batches, self._emit_from_thread, clock, matrix, frozen)
        current, onward = CurrentStep(stage, clock), None if stage == run.stages - 1 else pipeline.sender(stage + 1)
        bounds = Bounds(num_taken=fitting(run, kit.settings, choose(kit.settings)))
        is_split = run.pipeline.split is not None
        self._teams = Teams(kit, pipeline, run, self.trainer, current) if is_split else None
        leader = None if self._teams is None else self._teams.leader
        work = self._compute.piece
        witness = pipeline.witness
        self.worker = Worker(pipeline.link, stage, self.trainer, onward, work, current, emit, bounds, leader, witness)
        self._source: Source | None = None
        if stage == 0:
            first = int(clock.wall() * 1000) << 20  # no process of this peer has begun one so high
            origin = Origin(kit.node.peer, pipeline.sender(0), run.stages, first)
            self._source = Source(origin, batches, micro_batch, kit.compute)
        self._lookout = None if witness is None else self._make_lookout(witness)
        part = Part(
            stage=stage,
            run=run,
            channel=self.channel,
            worker=self.worker,
            trainer=self.trainer,
            compute=kit.compute,
            pipeline=pipeline,
            source=self._source,
            tied=self._tied,
            teams=self._teams,
            snapshots=self.snapshots,
            lookout=self._lookout,
            make_evaluator=self._make_evaluator,
        )
        self.conductor = Conductor(part)
        self._context = self._make_context(self.trainer, self.conductor, outer)
        self.peer = Peer(run, self._context)

    def _make_lookout(self, witness: Witness) -> Lookout:
        kit, trust = self._kit, self.run.trust
        assert isinstance(trust, AuditedTrust)

        def acts() -> PendingActs | None:
            return None if self.peer.rounds is None else self.peer.rounds.acts

        place = Place(self.stage, self.run, kit.identity, self._pipeline.link, witness, kit.clock, kit.emit, acts)
        return Lookout(place, trust.audit_rate, self.trainer, self.worker.again)

    async def live(self, *, wait_for: int | None, snapshot: Snapshot | None) -> Outcome:
        self.worker.start()
        return await super().live(wait_for=wait_for, snapshot=snapshot)

    def stop(self, reason: str) -> None:
        if self._tied is not None:
            self._tied.leave(self.stage)
        super().stop(reason)

    async def _end(self) -> None:
        self.worker.stop()
        if self._lookout is not None:
            await self._lookout.aclose()
        if self._teams is not None:
            await self._teams.aclose()
        await self.worker.aclose()

    @property
    def is_measuring(self) -> bool:
        """Whether it has yet to measure the end of the run."""
        return self._evaluator is not None and self.peer.is_complete and not self._evaluator.is_measured

    @property
    def held(self) -> Held:
        rate = self._compute.rate if self._teams is None else 0.0  # of who computes with others nothing is measured
        found = () if self._lookout is None else self._lookout.found_false
        banned = () if self._lookout is None else self.peer.replica.charter.banned
        untrusted = (*found, *banned)[-MAX_UNTRUSTED:]
        held = msgspec.structs.replace(super().held, rate=rate, num_waiting=self.worker.num_taken)
        return msgspec.structs.replace(held, untrusted=tuple(sorted(set(untrusted)))) if untrusted else held

    @property
    def _state(self) -> State:
        state = super()._state
        return "joining" if state == "ready" and not self.conductor.is_in_step else state

    def _make_evaluator(self, replica: Parameters, is_stopping: Callable[[], bool]) -> Unmeasured:
        kit = self._kit
        needs = Needs(kit.clock, self._pipeline.has_busy, kit.run.num_parameters)
        if self._source is None:
            return Bystander(needs)
        evaluator = StageEvaluator(self.run, self._context, self.trainer, replica, is_stopping)
        self._evaluator = evaluator.passing(self._source, self.conductor, needs)
        return self._evaluator

    async def _may_leave(self, _peer: PeerId, _request: MayLeave) -> LeaveAnswer:
        return LeaveAnswer(does_stay=not self.is_leaving and self.conductor.is_ready)


class Tied:
    """Of one peer, in a run whose matrix is tied.

    Args:
        spawn: lets something run until it has ended; that it failed ends the peer.
        on_change: called when it is held, or no longer.
    """

    def __init__(
        self,
        kit: Kit,
        pipeline: Pipeline,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        on_change: Callable[[TiedMember], None],
    ) -> None:
        def emit(event: Event) -> None:
            if isinstance(event, Notice):
                kit.emit(event)

        self.member: TiedMember | None = None
        self._kit = replace(kit, emit=emit)
        self._pipeline = pipeline
        self._table = pipeline.table
        self._spawn = spawn
        self._on_change = on_change
        self._ends: set[int] = set()
        self._making = asyncio.Lock()
        self._num_held = 0

    async def held(self, stage: int, opens: int | None) -> TiedMember:
        """Return it, which a stage can compute with now.

        Args:
            opens: members with which to open its run; None: others have, or will.
        """
        self._ends.add(stage)
        async with self._making:
            member = self.member
            if member is None or member.is_leaving:
                if member is not None:
                    await member.has_ended.wait()
                member = await self._made(opens)
            await member.has_begun.wait()
        return member

    @property
    def is_lost(self) -> bool:
        """Whether nobody has a state of it: who takes the first stage up begins it anew. It is told."""
        number = self._kit.run.tied
        if number is None or self._table.ready(number) or self._table.kept(number):
            return False
        self._kit.emit(Notice(text="no peer has a state of the tied matrix: it starts over"))
        return True

    def look(self) -> None:
        """Hold it without an end stage where nobody else has it, and its newest state is here; until others have."""
        number, me = self._kit.run.tied, self._kit.node.peer
        if number is None:
            return
        ready, kept = self._table.ready(number), self._table.kept(number)
        best = min(kept, key=lambda peer: (-kept[peer], peer), default=None)
        if not ready and best == me and self.member is None and self._table.held(number):
            self._spawn(self._keep())
        elif self._ends == {BACKUP} and ready.keys() - {me}:
            self._spawn(self.let_go(BACKUP))

    async def _keep(self) -> None:
        await self.held(BACKUP, None)

    async def let_go(self, stage: int) -> None:
        """Leave it, unless another stage of this peer needs it."""
        member = self.member
        if stage not in self._ends:
            return
        self._ends.discard(stage)
        if member is None:
            return
        member.conductor.leave(stage)
        if not self._ends:
            member.stop(NOT_NEEDED)
            await member.has_ended.wait()

    def stop(self, reason: str) -> None:
        """Leave it, whatever needs it."""
        if self.member is not None:
            self.member.stop(reason)

    async def _made(self, opens: int | None) -> TiedMember:
        number = self._kit.run.tied
        assert number is not None, "no matrix of this run is tied"
        outer = await first_weights(self._kit, number)
        self._num_held += 1
        self.member = member = TiedMember(self._kit, self._pipeline, number, self._num_held, outer)
        self._spawn(self._live(member, opens))
        self._on_change(member)
        return member

    async def _live(self, member: TiedMember, opens: int | None) -> None:
        try:
            snapshot = await self._kit.compute.serve(member.snapshot)
            await member.live(wait_for=opens, snapshot=snapshot)
        finally:
            member.conductor.stop()
            if self.member is member:
                self.member = None
            member.has_begun.set()
            member.has_ended.set()
            self._on_change(member)
