"""How this peer takes part: as an elector, with wards or without, or as a ward. The main loop need not know which.

groups.turn          where it announces: `Aggregator` or `Leaf`
groups.is_outside    neither: it has to ask its way in
groups.leased(...)   what it trains on
"""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.events import CountedThrough, RoundMissed
from weft.ids import Digest, PeerId, Round, Tokens
from weft.peer.companion import Unmeasured
from weft.peer.context import Place
from weft.peer.group.aggregator import Aggregator
from weft.peer.group.broadcast import GroupBroadcast
from weft.peer.group.leaf import Leaf
from weft.peer.group.records import GroupRecords
from weft.peer.round.driver import RoundDriver
from weft.peer.state.carry import Carry
from weft.sync.merge.reduce import EncodedPart
from weft.sync.records.messages import Manifest
from weft.sync.round.machine import Status
from weft.tasks import Tasks


class Turn(Protocol):
    """One peer's part in a round."""

    @property
    def ranges(self) -> tuple[range, ...]:
        """Return how the vector is cut."""
        ...

    @property
    def is_hurried(self) -> bool:
        """Return whether to make no further inner step before announcing."""
        ...

    def announce(self, tokens: Tokens, parts: Sequence[EncodedPart]) -> tuple[Digest, ...] | None:
        """Bring a payload; None: it was not taken."""
        ...

    def pass_on(self) -> None:
        """Bring nothing: this peer is paused."""
        ...


class Groups:
    """
    Args:
        speed: returns the tokens per second of this peer's training.
    """

    def __init__(
        self,
        place: Place,
        rounds: RoundDriver,
        records: GroupRecords,
        carry: Carry,
        speed: Callable[[], float],
        tasks: Tasks,
    ) -> None:
        self._me = place.node.peer
        self._emit = place.emit
        self._rounds = rounds
        self._records = records
        self._carry = carry
        self._ward = Leaf(place, rounds, records, speed)
        broadcast = GroupBroadcast(place, rounds, records, lambda: self._ward.sponsor, tasks)
        self._sponsor = Aggregator(place, rounds, records, broadcast, speed, tasks)
        rounds.on_decided = self._sponsor.decided
        rounds.inbox.on_record = records.keep

    def watch(self) -> Coroutine[Any, Any, None]:
        """Keep a sponsor as long as this peer needs one. Run until cancelled."""
        return self._ward.watch()

    def hand_on(self, evaluator: Unmeasured, is_near: Callable[[], bool]) -> None:
        """Let wards hear what this peer hears of evaluations, and let it ask for a sponsor only where it is near."""
        evaluator.on_heard = self._sponsor.pass_evaluation_on
        self._ward.is_near = is_near

    @property
    def turn(self) -> Turn:
        return self._sponsor if self._rounds.is_member else self._ward

    @property
    def is_outside(self) -> bool:
        return not self._rounds.is_member and not self.is_ward

    @property
    def is_ward(self) -> bool:
        return not self._rounds.is_member and self._ward.sponsor is not None

    def pins(self) -> tuple[PeerId, ...]:
        """Return to whom links are kept, however many peers there are: electors to electors, wards to sponsors."""
        base = self._rounds.chain.base
        has_room = len(base.electorate) < base.charter.electors
        is_linked = self._me in base.electorate or (self.is_outside and has_room)
        self._rounds.quorum.links_electorate = is_linked
        if is_linked:
            return base.electorate
        return () if self._ward.sponsor is None else (self._ward.sponsor,)

    def notice(self, peer: PeerId, status: Status) -> None:
        """Take up what membership says of a peer."""
        self._rounds.notice(peer, status)
        self._sponsor.notice(peer, is_away=status in ("gone", "suspected"))

    def give_up(self) -> None:
        """Take no part in a round that the others have long left behind."""
        self._ward.give_up()
        self._rounds.give_up()

    def leased(self, manifest: Manifest) -> NDArray[np.int64]:
        """Return the positions that this peer trains on after `manifest`."""
        return self._records.leased(manifest, self._rounds.chain.charter_in(Round(manifest.round + 1)))

    def offer(self, turn: Turn, parts: Sequence[EncodedPart]) -> None:
        """Announce the carry where it is this peer's turn."""
        if turn is self.turn:
            self._carry.offered_to = self._ward.sponsor if turn is self._ward else None
            self._carry.offered = turn.announce(self._carry.due, parts)

    def is_in_doubt(self, opening: Manifest) -> bool:
        """Return whether the round without which a branch begins may be decided elsewhere, and count this peer there.

        Somebody who is not in the branch has fetched what this peer offered, or results that hold it; what a ward
        offers is in its sponsor's payload. Of gradients a branch brings nothing to another: none is counted twice.
        """
        if self._carry.offered is None or self._carry.sends_gradient:
            return False
        asked_by = self._rounds.parts.asked_by
        return bool(asked_by if self._carry.offered_to else asked_by - set(opening.members))

    def tell(self, manifest: Manifest, is_counted: bool, tokens: Tokens) -> None:
        """Tell what became of what this peer had offered through a sponsor, if it had.

        Args:
            tokens: that were due before the manifest was settled.
        """
        was_offered, self._carry.offered_to = self._carry.offered_to is not None, None
        if self._ward.sponsor is not None:
            self._ward.settle(manifest, is_counted)
        if is_counted and tokens and all(each.peer != self._me for each in manifest.contributions):
            self._emit(CountedThrough(round=manifest.round, tokens=tokens))
        elif was_offered and not is_counted:
            reason = "its sponsor was not counted, or did not have its payload in time"
            self._emit(RoundMissed(round=manifest.round, carried_tokens=self._carry.tokens, reason=reason))
