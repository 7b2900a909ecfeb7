"""What the members of a piece's run tell each other of payloads, before these are announced; and of its states.

States are known by the round of the first stage that is over in them: those of the last rounds, and of one to come, for
who puts a model together has all pieces keep the states of one such round.

    round = snapshots.round_after(manifest)       # how far the first stage is in a state; None: it is not known
    manifest = await snapshots.at(round)          # its state after so many rounds is kept; None: it is not
    await snapshots.settled(round, manifest)      # its conductor's word, once a round is over, before anything changes
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping

from weft.ids import Digest, PeerId
from weft.net.channel import Channel
from weft.pipeline.exactly_once import Told
from weft.stages.messages import Tallied, TalliedAnswer, TalliedRequest, tallied
from weft.sync.records.messages import Manifest

ASK_S = 5.0
MAX_KEPT = 256  # of the last rounds
MAX_AHEAD = 64  # rounds: who asks for the state of a later one asks again


class Reports:
    """
    Args:
        look: called when another one has come.
    """

    def __init__(self, channel: Channel, look: Callable[[], None]) -> None:
        self._channel = channel
        self._look = look
        self._heard: dict[tuple[Digest, PeerId], Tallied] = {}  # the oldest first
        channel.on_note(Tallied, self._on_tallied)
        channel.serve(TalliedRequest, self._on_request)

    def tell(self, previous: Digest, payload: Digest | None, round: int, told: Told) -> None:
        """Tell the other members what the payload is made of; None: this peer brings nothing.

        Args:
            round: of the first stage, whose micro-batches these are.
        """
        note = tallied(previous, payload, round, told)
        self._keep(self._channel.peer, note)
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
        for other in self._channel.peers:
            answer = await self._channel.ask(other, request, TalliedAnswer, deadline_s=ASK_S)
            if answer is not None and answer.tallied is not None:
                self._keep(peer, answer.tallied)
                return answer.tallied
        return None

    def _keep(self, peer: PeerId, note: Tallied) -> None:
        self._heard[note.previous, peer] = note
        while len(self._heard) > MAX_KEPT:
            del self._heard[next(iter(self._heard))]

    async def _on_tallied(self, peer: PeerId, note: Tallied) -> None:
        self._keep(peer, note)
        self._look()

    async def _on_request(self, _peer: PeerId, request: TalliedRequest) -> TalliedAnswer:
        return TalliedAnswer(tallied=self._heard.get((request.previous, request.peer)))


class Snapshots:
    """Of one member.

    Args:
        pin: keeps the present state for a while.
    """

    def __init__(self, pin: Callable[[], Awaitable[object]]) -> None:
        self._pin = pin
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
        for each in due:
            self._wanted.pop(each).set_result(manifest if each == round else None)
