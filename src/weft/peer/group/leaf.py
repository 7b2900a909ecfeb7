"""This peer while the electorate has no room for it: it contributes through an elector, its aggregator.

    SponsorPlease ──► electors, in an order of its own, until one takes it
    Offer ──► aggregator        once a round, of what it has trained; the aggregator fetches the payload
    ◄── HandOn                  what was decided, and from whom to fetch it (`GroupBroadcast`)

It follows what is decided like anybody outside the electorate, and has no vote. In a round it offers to one aggregator
and to no other, so nothing is counted twice; what was not counted it offers in the next, to whoever is its aggregator
then.

Failure:
- the aggregator is gone, has left the electorate, is paused, or has not counted this peer for some rounds: the next one
  is asked, and the carry stays.
- all electors are full or away: they are asked again, with growing pauses.
- decisions are not heard: others tell that they are further, and the chain is fetched (`Entrance.catch_up`).
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from weft.errors import NetError, PeerError, Refused
from weft.events import Notice, Sponsored
from weft.ids import BranchId, Digest, PeerId, Round, Tokens, short
from weft.peer.context import Context
from weft.peer.group.records import GroupRecords
from weft.peer.messages import Hurry, Joining, OfferNote, Release, SponsorAnswer, SponsorPlease, WardPass
from weft.peer.round.driver import RoundDriver
from weft.rng import order_key
from weft.sync.merge.reduce import EncodedPart, named
from weft.sync.records.messages import Manifest, claims_in
from weft.sync.round.groups import Offer, order_of
from weft.wire import digest_of, seal

LOOK_S = 0.5
CALL_S = 5.0
REPEAT_S = 4.0  # until an offer is said again
MAX_MISSED = 3  # rounds in which the aggregator neither counted nor leased to this peer
LONGEST_PAUSE_S = 8.0
PATIENCE_S = 10.0  # with an electorate that has room and does not count this peer in


class Leaf:
    """
    Args:
        speed: returns the tokens per second of this peer's training.
    """

    def __init__(
        self, context: Context, rounds: RoundDriver, records: GroupRecords, speed: Callable[[], float]
    ) -> None:
        self.aggregator: PeerId | None = None
        self._node = context.node
        self._identity = context.identity
        self._emit = context.emit
        self._clock = context.clock
        self._rounds = rounds
        self._records = records
        self._speed = speed
        self._offered: tuple[BranchId, Round] | None = None  # where this peer last made an offer
        self._said: tuple[OfferNote, float] | None = None
        self._num_missed = 0
        self._left: PeerId | None = None  # the aggregator before
        self._pause_s = LOOK_S
        self._asked_in: Manifest | None = None
        self._outside_since = context.clock.now()
        self._hurried: tuple[BranchId, Round] | None = None
        self._is_told = False  # that there is no place for this peer
        context.node.on_note(Release, self._on_release)
        context.node.on_note(Hurry, self._on_hurry)

    async def watch(self, is_near: Callable[[], bool]) -> None:
        """Keep an aggregator as long as one is needed. Run until cancelled.

        Args:
            is_near: returns whether this peer can follow, and so be of use.
        """
        while True:
            await asyncio.sleep(self._pause_s if self.aggregator is None else LOOK_S)
            if self._node.peer in self._rounds.chain.base.electorate:
                self.aggregator, self._pause_s, self._outside_since = None, LOOK_S, self._clock.now()
                self._is_told = False
                self.take_from(None)
                continue
            if self.aggregator is not None and (reason := self._why_leave(self.aggregator)):
                self._leave(reason)
            if self.aggregator is None:
                await self._look(is_near)
            else:
                self._repeat()
                await self._ask_for_room()

    # --- what the peer does ---

    @property
    def is_hurried(self) -> bool:
        base = self._rounds.chain.base
        if self._rounds.chain.charter.has_even_leases:
            return False
        return not self._rounds.decided.empty() or self._hurried == (base.branch, base.round)

    def announce(self, tokens: Tokens, parts: Sequence[EncodedPart]) -> tuple[Digest, ...] | None:
        """Offer this peer's payload to its aggregator; None: it has none, or another has an offer of this round."""
        base = self._rounds.chain.base
        if self.aggregator is None or self._offered == (base.branch, base.round):
            return None
        payload = named(b"".join(part.encoded for part in parts))
        self._rounds.parts.offer([payload])
        offer = Offer(
            run=base.run,
            branch=base.branch,
            round=base.round,
            sponsor=self.aggregator,
            tokens=tokens,
            payload=payload.digest,
            tokens_per_s=self._speed(),
        )
        self._offered = (base.branch, base.round)
        self._said = OfferNote(signed=seal(self._identity, offer)), self._clock.now()
        self._node.post(self.aggregator, self._said[0])
        return (payload.digest,)

    def pass_on(self) -> None:
        """Bring nothing to the present round: this peer is paused."""
        base = self._rounds.chain.base
        if self.aggregator is not None:
            self._node.post(self.aggregator, WardPass(branch=base.branch, round=base.round))

    def settle(self, manifest: Manifest, is_counted: bool) -> None:
        """Take up whether a round counted this peer, and whether the next has work for it."""
        if self.aggregator is None:
            return
        self._said = None
        is_served = is_counted or len(self._records.leased(manifest, self._rounds.chain.charter)) > 0
        self._num_missed = 0 if is_served else self._num_missed + 1

    def take_from(self, parent: PeerId | None) -> None:
        """Have results fetched first from who hands them on to this peer; None: nobody does."""
        self._rounds.parts.fetch_first_from(parent)

    def give_up(self) -> None:
        """Obey nobody any more: this peer has to find its way first."""
        self.aggregator = None

    # --- the aggregator ---

    def _why_leave(self, aggregator: PeerId) -> str:
        if aggregator not in self._rounds.chain.base.electorate:
            return "it takes no part in decisions any more"
        if self._rounds.quorum.statuses.get(aggregator) == "gone":
            return "it is gone"
        if self._num_missed >= MAX_MISSED:
            return f"it counted nothing of this peer and gave it no data in {self._num_missed} rounds"
        return ""

    def _leave(self, reason: str) -> None:
        assert self.aggregator is not None
        self._emit(Notice(text=f"{short(self.aggregator)} no longer hands this peer's updates on: {reason}"))
        self._left, self.aggregator, self._pause_s = self.aggregator, None, LOOK_S
        self.take_from(None)
        self._rounds.decided.put_nowait(None)  # no decision comes from there any more: who waits for one looks around

    async def _look(self, is_near: Callable[[], bool]) -> None:
        """Ask electors in this peer's order until one takes it."""
        if not is_near():
            self._outside_since = self._clock.now()
            return
        base, charter = self._rounds.chain.base, self._rounds.chain.charter
        has_room = len(base.electorate) < charter.electors
        if charter.settings.method.graph is not None:  # nobody takes leaves: it waits for a place among the members
            self._tell_full(has_room)
            return
        if has_room and self._clock.now() - self._outside_since < PATIENCE_S:
            return
        statuses = self._rounds.quorum.statuses
        order = order_of(base.run, self._node.peer, base.electorate)
        for elector in sorted(order, key=lambda each: each == self._left):  # who was left last is asked last
            if statuses.get(elector) in ("gone", "suspected"):
                continue
            please = SponsorPlease(branch=base.branch, round=base.round)
            answer = await self._node.ask(elector, please, SponsorAnswer, deadline_s=CALL_S)
            if answer is None:
                continue
            if self._rounds.is_member:
                return
            if answer.is_taken:
                self.aggregator, self._num_missed, self._pause_s = elector, 0, LOOK_S
                self._emit(Sponsored(round=base.round, sponsor=elector, has_room=has_room))
                self._is_told = False
                return
        self._tell_full(has_room)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _tell_full(self, has_room: bool) -> None:
        """Say once that this peer trains nothing, because there is no place for it."""
        if has_room or self._is_told:
            return
        self._is_told = True
        num = len(self._rounds.chain.base.electorate)
        text = f"the run has as many members as it takes ({num}), and none of them takes this peer's work: it trains "
        self._emit(Notice(text=f"{text}nothing until there is a place"))

    def _repeat(self) -> None:
        """Say an offer again while its round lasts: letters get lost with links."""
        now, base = self._clock.now(), self._rounds.chain.base
        if self._said is None or self.aggregator is None or now - self._said[1] < REPEAT_S:
            return
        if self._offered == (base.branch, base.round):
            self._said = self._said[0], now
            self._node.post(self.aggregator, self._said[0])

    async def _ask_for_room(self) -> None:
        """Ask the electorate for a place in it that is free, where this peer is one of the first in its group to."""
        chain = self._rounds.chain
        head, room = chain.head, chain.charter.electors - len(chain.base.electorate)
        if room <= 0 or self._asked_in == head:
            return
        self._asked_in = head
        claim = claims_in(head).get(self.aggregator or head.leader)
        record = None if claim is None else self._records.known(claim.record)
        leaves = [stake.peer for stake in record.stakes if stake.samples] if record is not None else []
        leaves.sort(key=lambda peer: order_key(head.run, head.round, peer))
        if self._node.peer not in [peer for peer in leaves if peer != self.aggregator][:room]:
            return
        joining = Joining(branch=head.branch, manifest=digest_of(head))
        for elector in head.members:
            with suppress(PeerError, NetError, Refused):
                await self._node.note(elector, joining)

    # --- what the aggregator says ---

    async def _on_release(self, peer: PeerId, _note: Release) -> None:
        if peer == self.aggregator:
            self._leave("it takes no other peers now")

    async def _on_hurry(self, peer: PeerId, note: Hurry) -> None:
        if peer == self.aggregator:
            self._hurried = (note.branch, note.round)
