"""When a step of the pipeline is over: the members of the first stage say how far they are, and all others follow.

They begin the micro-batches of a step, and tell once all of theirs have come back. A step is over for a member of any
stage once all who had micro-batches to begin have told so, or are gone; or somebody is further, because the first stage
went on without who was late. What comes of an earlier step later counts all the same.

The members of a piece's run tell each other of payloads, too, before these are announced (`Reports`). States are known
by the round of the first stage that is over in them: those of the last rounds, and of one to come, for who puts a model
together has all pieces keep the states of one such round.

    round = snapshots.round_after(manifest)       # how far the first stage is in a state; None: it is not known
    manifest = await snapshots.at(round)          # its state after so many rounds is kept; None: it is not
    await snapshots.settled(round, manifest)      # its conductor's word, once a round is over, before anything changes
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from weft.ids import Digest, PeerId
from weft.net.channel import Channel
from weft.net.node import Node
from weft.pipeline.device import FIRST, Step
from weft.pipeline.exactly_once import Told
from weft.pipeline.messages import Passing
from weft.stages.messages import Tallied, TalliedAnswer, TalliedRequest, tallied
from weft.stages.table import StageTable
from weft.sync.records.messages import Manifest

LOOK_S = 0.5  # until it is looked again: that a member is gone is told by nobody
ASK_S = 5.0
MAX_KEPT = 256  # of the last rounds
MAX_AHEAD = 64  # rounds: who asks for the state of a later one asks again


class Progress(NamedTuple):
    """How far a member of the first stage is."""

    step: Step
    is_done: bool  # all that it began of the step has come back
    origins: frozenset[PeerId]  # who begins micro-batches in this round


class Steps:
    """What one peer has heard of that.

    Args:
        is_here: whether a peer is still a member of the first stage, as far as is known.
    """

    def __init__(self, is_here: Callable[[PeerId], bool]) -> None:
        self._is_here = is_here
        self._told: dict[PeerId, Progress] = {}

    def told(self, peer: PeerId, progress: Progress) -> None:
        """Take up what `peer` says of itself."""
        self._told[peer] = progress

    def forget(self, peer: PeerId) -> None:
        """Take it up that `peer` begins no more micro-batches."""
        self._told.pop(peer, None)

    @property
    def newest(self) -> Step:
        """Return the furthest step that anybody is in; the first of all where nobody has told."""
        return max((each.step for each in self._told.values()), default=FIRST)

    @property
    def num_origins(self) -> int:
        """Return how many begin micro-batches in the newest round that was told of; 1 where nobody has told."""
        furthest = max(self._told.values(), key=lambda each: each.step, default=None)
        return 1 if furthest is None else max(1, len(furthest.origins))

    def is_over(self, step: Step) -> bool:
        if self.newest > step:
            return True
        at_it = [each for each in self._told.values() if each.step == step]
        origins = frozenset[PeerId]().union(*(each.origins for each in at_it))
        return bool(at_it) and all(self._has_done(peer, step) or not self._is_here(peer) for peer in origins)

    def _has_done(self, peer: PeerId, step: Step) -> bool:
        told = self._told.get(peer)
        return told is not None and told.step == step and told.is_done


class Barrier:
    """Of one peer: it waits for steps to be over.

    Args:
        table: who is a member of the first stage.
    """

    def __init__(self, node: Node, table: StageTable) -> None:
        self._node = node
        self.steps = Steps(lambda peer: peer in table.ready(0))
        self._changed = asyncio.Event()  # another each time
        self._last: Passing | None = None
        node.on_note(Passing, self._on_passing)
        node.on_link(self._on_link)

    def tell(self, step: Step, origins: frozenset[PeerId], *, is_done: bool) -> None:
        """Say how far this peer is with what it begins."""
        self._take(self._node.peer, Progress(step, is_done, origins))
        self._last = Passing(round=step.round, step=step.number, is_done=is_done, origins=tuple(sorted(origins)))
        self.tell_again()

    def tell_again(self) -> None:
        """Say once more how far this peer is: who was linked before it listened has not heard it, and where all wait
        nothing new is said."""
        if self._last is not None:
            for peer in self._node.peers:
                self._node.post(peer, self._last)

    def look(self) -> None:
        """Let whoever waits look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until_over(self, step: Step, is_over: Callable[[], bool]) -> None:
        """Wait for a step to be over, or for `is_over`."""
        await self.until(lambda: self.steps.is_over(step) or is_over())

    async def until(self, is_so: Callable[[], bool], wakes: "asyncio.Future[Any] | None" = None) -> None:
        """Wait until something is so.

        Args:
            wakes: looks again as soon as this is done.
        """
        while not is_so():
            changing = asyncio.ensure_future(self._changed.wait())
            try:
                others = [] if wakes is None else [wakes]
                await asyncio.wait([changing, *others], timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changing.cancel()
                with suppress(asyncio.CancelledError):
                    await changing

    def _take(self, peer: PeerId, progress: Progress) -> None:
        self.steps.told(peer, progress)
        self.look()

    async def _on_passing(self, peer: PeerId, note: Passing) -> None:
        origins = frozenset(PeerId(each) for each in note.origins)
        self._take(peer, Progress(Step(note.round, note.step), note.is_done, origins))

    def _on_link(self, peer: PeerId, is_up: bool, _reason: str) -> None:
        if not is_up:  # should it come back, it says again how far it is
            self.steps.forget(peer)
        elif self._last is not None:
            self._node.post(peer, self._last)
        self.look()


class Reports:
    """
    Args:
        look: called when another one has come.
    """

    def __init__(self, channel: Channel, look: Callable[[], None]) -> None:
        self._channel = channel
        self._look = look
        self._heard: dict[tuple[Digest, PeerId], Tallied] = {}  # the oldest first
        self._by: dict[PeerId, bytes] = {}  # the process that each was last heard of from
        channel.on_note(Tallied, self._on_tallied)
        channel.serve(TalliedRequest, self._on_request)

    def tell(self, previous: Digest, payload: Digest | None, round: int, told: Told) -> None:
        """Tell the other members what the payload is made of; None: this peer brings nothing.

        Args:
            round: of the first stage, whose micro-batches these are.
        """
        note = tallied(previous, payload, round, told)
        me = self._channel.peer
        self._keep(me, note, by=me)
        for peer in self._channel.peers:
            self._channel.post(peer, note)

    def of(self, previous: Digest, members: Collection[PeerId]) -> dict[PeerId, Tallied]:
        """Return what members have told for the round that follows on a manifest."""
        notes = {peer: self._heard.get((previous, peer)) for peer in members}
        return {peer: note for peer, note in notes.items() if note is not None}

    def forget(self, previous: Digest, notes: Mapping[PeerId, Tallied]) -> None:
        """Forget these, but not what has been told instead."""
        for peer, note in notes.items():
            if self._heard.get((previous, peer)) is note:
                del self._heard[previous, peer]

    def rounds(self, previous: Digest) -> list[int]:
        """Return the rounds of the first stage that members have told of, whatever they bring."""
        return [note.beat for note in self._of_round(previous)]

    def brought(self, previous: Digest | None) -> list[int]:
        """Return the rounds of the first stage of the payloads that members are about to announce."""
        notes = [] if previous is None else self._of_round(previous)
        return [note.beat for note in notes if note.payload is not None]

    def is_coming(self, previous: Digest | None) -> bool:
        """Return whether a payload that was told of is still to be announced: who told of it is there, and is the same
        process."""
        return any(
            note.payload is not None and before == previous and self._is_there(peer)
            for (before, peer), note in self._heard.items()
        )

    async def until_lost(self, previous: Digest | None) -> None:
        """Return once whoever has told of payloads of this round is gone, with what it had."""
        await asyncio.sleep(LOOK_S)
        while self.is_coming(previous) or not self.brought(previous):  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(LOOK_S)

    async def ask_all(self, previous: Digest) -> None:
        """Hear what the others have announced before this peer was there."""
        for peer in self._channel.peers:
            await self._asked(previous, peer)

    async def reports(self, manifest: Manifest, electorate: Collection[PeerId]) -> Mapping[PeerId, Told]:
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

    def _of_round(self, previous: Digest) -> list[Tallied]:
        return [note for (each, _), note in self._heard.items() if each == previous]

    async def _asked(self, previous: Digest, peer: PeerId) -> Tallied | None:
        request = TalliedRequest(previous=previous, peer=peer)
        for other in sorted(
            self._channel.peers, key=lambda each: each != peer
        ):  # who else tells it may not know that it is gone
            answer = await self._channel.ask(other, request, TalliedAnswer, deadline_s=ASK_S)
            if answer is not None and answer.tallied is not None:
                self._keep(peer, answer.tallied, by=other)
                return answer.tallied
        return None

    def _is_there(self, peer: PeerId) -> bool:
        me = self._channel.peer
        return peer == me or (self._channel.is_linked(peer) and self._by.get(peer) == self._channel.instance_of(peer))

    def _keep(self, peer: PeerId, note: Tallied, by: PeerId) -> None:
        self._heard[note.previous, peer] = note
        if by == peer:
            self._by[peer] = self._channel.instance_of(peer)
        while len(self._heard) > MAX_KEPT:
            del self._heard[next(iter(self._heard))]

    async def _on_tallied(self, peer: PeerId, note: Tallied) -> None:
        self._keep(peer, note, by=peer)
        self._look()

    async def _on_request(self, _peer: PeerId, request: TalliedRequest) -> TalliedAnswer:
        return TalliedAnswer(tallied=self._heard.get((request.previous, request.peer)))


class Snapshots:
    """Of one member.

    Args:
        pin: keeps the present state for a while.
        told: of each round that is in the state, before anything changes it; None: nobody is.
    """

    def __init__(
        self, pin: Callable[[], Awaitable[object]], told: Callable[[int], Awaitable[None]] | None = None
    ) -> None:
        self._pin = pin
        self._told = told
        self._wanted: dict[int, asyncio.Future[Digest | None]] = {}
        self._round = 0
        self._rounds: dict[Digest, int] = {}  # the oldest first

    def round_after(self, manifest: Digest) -> int | None:
        return self._rounds.get(manifest)

    async def at(self, round: int) -> Digest | None:
        if not self._round < round <= self._round + MAX_AHEAD:
            return None
        wanted = self._wanted.setdefault(round, asyncio.get_running_loop().create_future())
        return await asyncio.shield(wanted)

    async def settled(self, round: int, manifest: Digest) -> None:
        self._rounds[manifest] = round
        while len(self._rounds) > MAX_KEPT:
            del self._rounds[next(iter(self._rounds))]
        self._round = round
        due = [each for each in self._wanted if each <= round]
        if round in due:
            await self._pin()
        if self._told is not None:
            await self._told(round)
        for each in due:
            self._wanted.pop(each).set_result(manifest if each == round else None)
