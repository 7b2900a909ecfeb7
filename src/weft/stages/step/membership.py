"""This peer in the run of one piece of a model: a `Peer` on a channel of the node, from its beginning to its end.

Member        (`member`)  of a section: micro-batches come to it
TiedMember    (`tied`)    of a matrix that both end sections have
"""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import Tensor

from weft.clock import Clock
from weft.errors import CheckpointError
from weft.events import Emit, Event
from weft.executor import Compute
from weft.ids import PeerId
from weft.keys import Identity
from weft.net.channel import Channel
from weft.net.node import Node
from weft.peer.context import Data
from weft.peer.peer import Context, Outcome, Peer
from weft.peer.state.checkpoint import Snapshot, load
from weft.pipeline.dispatch import Dispatch
from weft.pipeline.link import StageLink
from weft.pipeline.sender import Sender
from weft.pipeline.split.member import HelpDesk
from weft.run.machine import PeerConfig
from weft.run.staged import StagedConfig, channel_of
from weft.stages.messages import BeatAnswer, BeatRequest, Held, PinAt, PinnedAnswer, State
from weft.stages.step.barrier import Barrier
from weft.stages.step.conductor import Conductor
from weft.stages.step.snapshots import Snapshots
from weft.stages.step.tied_conductor import TiedConductor
from weft.store.home import Home, PeerFolder
from weft.store.pool import Pool
from weft.training.section import SectionTrainer
from weft.training.tied import TiedTrainer
from weft.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Kit:
    """What a peer of a run with stages works with: everything with effects, made by `launch` or by a scenario."""

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
    make_section: Callable[..., SectionTrainer] = SectionTrainer
    make_tied: Callable[..., TiedTrainer] = TiedTrainer


@dataclass(frozen=True, kw_only=True)
class Grounds(Kit):
    """What all that one peer holds stands on."""

    link: StageLink
    dispatch: Dispatch
    barrier: Barrier
    onward: Callable[[int], Sender]  # to a stage
    ready: Callable[[int], Collection[PeerId]]  # who computes a stage's micro-batches
    helps: HelpDesk
    has_busy: Callable[[], bool]  # whether anybody evaluates or fetches at the end


class Membership:
    """
    Args:
        stage: the piece's number.
        since: which time it is that this process holds it: a number that grows.
    """

    peer: Peer
    conductor: Conductor | TiedConductor

    def __init__(self, grounds: Grounds, stage: int, since: int) -> None:
        self.stage = stage
        self.since = since
        self.is_leaving = False
        self.has_ended = asyncio.Event()
        self._grounds = grounds
        self._loop = asyncio.get_running_loop()
        self.run = grounds.run.of_stage(stage)
        self.folder = grounds.folder.stage(stage)
        self.channel = Channel(grounds.node, channel_of(stage), self.run.run, since)
        self.channel.serve(BeatRequest, self._beat)
        self.channel.serve(PinAt, self._pin_at)
        self.snapshots = Snapshots(lambda: self.peer.pin())

    def _place(self, trainer: Trainer, conductor: Conductor | TiedConductor, outer: Tensor) -> Context:
        """
        Args:
            outer: what the piece starts from; becomes its own.
        """
        grounds = self._grounds
        return Context(
            node=self.channel,
            identity=grounds.identity,
            folder=self.folder,
            settings=grounds.settings,
            data=grounds.data,
            initial=outer,
            clock=grounds.clock,
            compute=grounds.compute,
            emit=grounds.emit,
            make_learner=lambda _emit: trainer,
            memory=Pool(0, self.folder.scratch),  # a section is as large as there is memory for
            companion=conductor,
        )

    def snapshot(self) -> Snapshot | None:
        """Return the state of the piece that this machine has kept; it is read here."""
        if not self.folder.has_checkpoint:
            return None
        try:
            found = load(self.folder.checkpoint, max_parameters=self._grounds.settings.max_parameters)
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
            await self._end()
            self.channel.close()

    async def _end(self) -> None:
        """Let go of what it has beside its peer."""

    def stop(self, reason: str) -> None:
        self.is_leaving = self.conductor.is_leaving = True
        self._grounds.barrier.look()
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

    async def _beat(self, _peer: PeerId, request: BeatRequest) -> BeatAnswer:
        if request.manifest is None:
            return BeatAnswer(beat=self.conductor.beat.round)
        return BeatAnswer(beat=self.conductor.beat_after(request.manifest))

    async def _pin_at(self, _peer: PeerId, request: PinAt) -> PinnedAnswer:
        return PinnedAnswer(manifest=await self.snapshots.at(request.beat))

    def _emit_from_thread(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._grounds.emit, event)
