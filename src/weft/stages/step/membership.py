"""This peer in the run of one piece of a model: a `Peer` on a channel of the node, from its beginning to its end.

Member        (`member`)  of a section: micro-batches come to it
TiedMember    (`tied`)    of a matrix that both end sections have
"""

import asyncio

from torch import Tensor

from weft.errors import CheckpointError, PeerError
from weft.events import Event, Notice
from weft.ids import PeerId
from weft.launch.fetch import fetch_initial
from weft.net.channel import Channel
from weft.peer.peer import Context, Outcome, Peer
from weft.peer.state.checkpoint import Snapshot, load
from weft.run.genesis import initial
from weft.run.staged import channel_of
from weft.stages.messages import BeatAnswer, BeatRequest, Held, PinAt, PinnedAnswer, State
from weft.stages.step.conductor import Conductor
from weft.stages.step.pipeline import Kit, Pipeline
from weft.stages.step.reports import Snapshots
from weft.stages.step.tied_conductor import TiedConductor
from weft.store.pool import Pool
from weft.training.trainer import Trainer

LOOK_S = 3.0  # until it is asked again for first weights that nobody delivers


async def first_weights(kit: Kit, stage: int) -> Tensor:
    """Return what a piece starts from: made of the seed, or fetched, from whoever has it, however long that takes."""
    node, run, home = kit.node, kit.run.of_stage(stage), kit.home
    while True:
        try:
            await fetch_initial(node, node.peers, run, home)
        except PeerError as error:
            text = f"nobody delivers the first weights of {kit.run.called(stage)} yet: {error}"
            kit.emit(Notice(text=text))
            await asyncio.sleep(LOOK_S)
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
        self.snapshots = Snapshots(lambda: self.peer.pin())

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
            await self._end()
            self.channel.close()

    async def _end(self) -> None:
        """Let go of what it has beside its peer."""

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
