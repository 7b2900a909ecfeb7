"""A stage's peer in step with the other stages: the companion of its rounds.

    first stage    micro-batches of the lease are begun, step by step; all are told how far that is
    every stage    a step is over once all who begin have all back; then what was accepted here is the step's gradient
    methods that send gradients    one step a round, which the round merges
    methods that send deltas       `every` steps a round, each an inner step on what was routed here

Before a payload is announced, the other members of the stage hear which micro-batches it is made of; after the round
all work out the same of what nobody has counted (`pipeline.tally`).

Rounds of the stages go together: that of the first stage numbers the beats, and the others follow. A stage that has
fallen behind, or counts its rounds otherwise since a branch, goes on with the newest beat that it hears of. Who hears
that another member has ended the step ends it, too: they may have come to different names for it.

It does not know links, nor who may join.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.errors import NetError, PeerError, Refused
from weft.ids import Digest, PeerId
from weft.net.channel import Channel
from weft.peer.compute import Compute
from weft.peer.replica import Replica
from weft.peer.section_trainer import SectionTrainer
from weft.peer.staged import StagedConfig
from weft.peer.unmeasured import Unmeasured
from weft.pipeline.beat import Beat
from weft.pipeline.tally import Told
from weft.pipeline.worker import Sum, Worker
from weft.stages.messages import Tallied, TalliedAnswer, TalliedRequest, tallied
from weft.stages.pulse import Pulse
from weft.stages.source import Source
from weft.sync.messages import Manifest
from weft.wire import digest_of

SETTLE_S = 10.0  # for what was sent back to be accepted or not, once the step is over
ASK_S = 5.0
MAX_KEPT = 256  # notes of what payloads hold: of the last rounds


@dataclass(frozen=True)
class Part:
    """What a conductor joins, of one stage."""

    run: StagedConfig
    channel: Channel
    worker: Worker
    trainer: SectionTrainer
    compute: Compute
    pulse: Pulse
    source: Source | None  # None: another stage than the first
    make_evaluator: Callable[["Conductor", Replica, Callable[[], bool]], Unmeasured]


class Conductor:
    def __init__(self, part: Part) -> None:
        self._part = part
        self._sends_gradient = part.run.method.send == "gradient"
        self._round: int | None = None  # of the beats; None: nothing was heard of any yet
        self._heard: dict[tuple[Digest, PeerId], Tallied] = {}  # the oldest first
        self._states: dict[Digest, int] = {}  # of manifests: the beat that follows; the oldest first
        self._previous: Digest | None = None  # of the round that this peer trains for
        self.is_ready = False  # it computes in step with the others
        self.on_ready: Callable[[], None] = lambda: None
        part.channel.on_note(Tallied, self._on_tallied)
        part.channel.serve(TalliedRequest, self._on_request)

    @property
    def beat(self) -> Beat:
        """Return the first step of the round that this peer is in."""
        return Beat(self._round or 0, 0)

    @property
    def is_in_step(self) -> bool:
        """Whether this peer computes with the others: they are at most one round further."""
        return self.is_ready and self.beat.round + 1 >= self._part.pulse.newest.round

    # --- what rounds ask of it ---

    async def train(self, head: Manifest, positions: NDArray[np.int64], is_over: Callable[[], bool]) -> None:
        part = self._part
        self._previous = digest_of(head)
        self._round = head.round if part.source is not None else max(self._round or 0, part.pulse.newest.round)
        if not self.is_ready:
            await self._ask_all(self._previous)
            self.is_ready = True
            self.on_ready()
        is_again = False
        while not await self._made(head, positions, is_over, is_again) and await self._nobody_brings(head, is_over):
            is_again = True
            if part.source is None:
                self._round += 1

    async def _made(
        self, head: Manifest, positions: NDArray[np.int64], is_over: Callable[[], bool], is_again: bool
    ) -> bool:
        """Make a round's steps; return whether there is something to bring, or others bring something already.

        Args:
            is_again: the lease was begun before, and its work may have been assigned to this member since.
        """
        part, every, round = self._part, self._part.run.method.every, self._round or 0
        origins = frozenset(lease.peer for lease in head.leases)
        num_samples = 0
        for step, share in enumerate(np.array_split(positions, 1 if self._sends_gradient else every)):
            beat = Beat(round, step)
            await part.worker.advance(beat)
            if part.source is not None and not (is_again and part.worker.num_counted):
                await self._begun(part.source, beat, share, origins, is_over)
            await part.pulse.until_over(beat, lambda: is_over() or self._is_announced())
            with suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_S):
                    await part.worker.settled()
            num_samples += part.worker.num_counted
            if not self._sends_gradient:
                await self._step(part.worker.take_sum(), head.committed_tokens, step + 1)
            if is_over() or self._is_announced():
                break
        brought = [note.beat for note in self._notes(digest_of(head)) if note.payload is not None]
        self._round = max(brought, default=round)
        await part.worker.report()
        if self._sends_gradient and num_samples:
            part.trainer.hand_in(part.worker.take_sum())
        return num_samples > 0 or is_over() or self._is_announced()

    async def _step(self, total: Sum, committed_tokens: int, num_steps: int) -> None:
        part, pace = self._part, float(self._part.pulse.num_origins)
        await part.compute.train(lambda: part.trainer.make_step(total, committed_tokens, num_steps, pace))

    async def _nobody_brings(self, head: Manifest, is_over: Callable[[], bool]) -> bool:
        """Where no member has anything to bring, no round will be: settle among the reports alone what is held.

        So it is where all that came to a stage were later attempts, as after its members died.
        """
        part = self._part
        await self.announcing(None)
        here = set(head.members) & {part.channel.peer, *part.channel.peers}

        def heard() -> dict[PeerId, Tallied]:
            notes = {peer: self._heard.get((digest_of(head), peer)) for peer in here}
            return {peer: note for peer, note in notes.items() if note is not None}

        await part.pulse.until(lambda: is_over() or self._is_announced() or heard().keys() == here)
        if is_over() or self._is_announced():
            return False
        notes = heard()
        await part.worker.close({peer: note.told for peer, note in notes.items()}, head.members)
        for peer, note in notes.items():
            if self._heard.get((digest_of(head), peer)) is note:
                del self._heard[digest_of(head), peer]
        return True

    async def _begun(
        self,
        source: Source,
        beat: Beat,
        positions: NDArray[np.int64],
        origins: frozenset[PeerId],
        is_over: Callable[[], bool],
    ) -> None:
        """Have all micro-batches of a step pass through the stages, or as many as there is time for."""
        pulse = self._part.pulse
        pulse.tell(beat, origins, is_done=False)
        beginning = asyncio.ensure_future(source.begin(positions, beat))
        try:
            await pulse.until(lambda: beginning.done() or is_over(), wakes=beginning)
            if beginning.done():
                beginning.result()
        finally:
            beginning.cancel()
            pulse.tell(beat, origins, is_done=True)

    async def announcing(self, payload: Digest | None) -> None:
        """Tell the other members what the payload is made of; None: this peer brings nothing."""
        told = self._part.worker.tally.told
        if told is None or self._previous is None:
            return
        note = tallied(self._previous, payload, self._round or 0, told)
        self._keep(self._part.channel.peer, note)
        for peer in self._part.channel.peers:
            self._part.channel.post(peer, note)

    async def settled(self, manifest: Manifest, electorate: Collection[PeerId]) -> bool:
        part = self._part
        reports = await self._reports(manifest, electorate)
        if self._sends_gradient:
            await part.compute.train(part.trainer.clear)
        closed = await part.worker.close(reports, electorate)
        told = [note.beat for note in self._notes(manifest.previous)]
        self._round = manifest.round if part.source is not None else max([self._round or 0, *told]) + 1
        self._states[digest_of(manifest)] = self._round
        while len(self._states) > MAX_KEPT:
            del self._states[next(iter(self._states))]
        await part.worker.advance(self.beat)
        return bool(closed.given_up)

    def beat_after(self, manifest: Digest) -> int | None:
        """Return how many rounds of the first stage are in the state after a manifest; None: it is not known."""
        return self._states.get(manifest)

    def evaluator(self, replica: Replica, is_stopping: Callable[[], bool]) -> Unmeasured:
        return self._part.make_evaluator(self, replica, is_stopping)

    # --- what payloads hold ---

    def _notes(self, previous: Digest) -> list[Tallied]:
        return [note for (each, _), note in self._heard.items() if each == previous]

    def _is_announced(self) -> bool:
        """Whether another member of the stage has ended the step that this peer is in: it is over, by whatever name."""
        return self._previous is not None and any(note.payload is not None for note in self._notes(self._previous))

    async def _ask_all(self, previous: Digest) -> None:
        """Hear what the others have announced before this peer was there."""
        for peer in self._part.channel.peers:
            await self._asked(previous, peer)

    async def _reports(self, manifest: Manifest, electorate: Collection[PeerId]) -> Mapping[PeerId, Told]:
        """Return what is known of the contributors that a manifest counts, and of who has brought nothing."""
        counted = {each.peer: each.payload for each in manifest.contributions if each.legacy is None}
        found = dict[PeerId, Told]()
        for peer in sorted(set(electorate) | counted.keys()):
            note = self._heard.get((manifest.previous, peer))
            if note is None and peer in counted:
                note = await self._asked(manifest.previous, peer)
            if note is not None and note.payload == counted.get(peer):
                found[peer] = note.told
        return found

    async def _asked(self, previous: Digest, peer: PeerId) -> Tallied | None:
        request = TalliedRequest(previous=previous, peer=peer)
        for other in self._part.channel.peers:
            with suppress(PeerError, NetError, Refused):
                answer = await self._part.channel.call(other, request, TalliedAnswer, deadline_s=ASK_S)
                if answer.tallied is not None:
                    self._keep(peer, answer.tallied)
                    return answer.tallied
        return None

    def _keep(self, peer: PeerId, note: Tallied) -> None:
        self._heard[note.previous, peer] = note
        while len(self._heard) > MAX_KEPT:
            del self._heard[next(iter(self._heard))]

    async def _on_tallied(self, peer: PeerId, note: Tallied) -> None:
        self._keep(peer, note)
        self._part.pulse.look()

    async def _on_request(self, _peer: PeerId, request: TalliedRequest) -> TalliedAnswer:
        return TalliedAnswer(tallied=self._heard.get((request.previous, request.peer)))
