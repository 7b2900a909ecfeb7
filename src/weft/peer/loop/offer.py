"""What this peer brings to the present round: what it has trained, or what a branch of its own had counted.

Offering ──► RoundDriver.announce           an elector
Offering ──► Aggregator ──► RoundDriver     an elector that has leaves: their mean
Offering ──► Leaf                           a leaf: to its aggregator
"""

from weft.events import PayloadOffered
from weft.ids import Round
from weft.peer.context import Context
from weft.peer.group.groups import Groups, Turn
from weft.peer.group.leaf import Leaf
from weft.peer.round.driver import RoundDriver
from weft.peer.state.carry import Carry
from weft.peer.state.legacies import Legacies
from weft.peer.state.replica import Replica
from weft.sync.records.messages import Manifest, payload_of


class Offering:
    """Of one peer, round after round."""

    def __init__(self, context: Context, replica: Replica, carry: Carry, legacies: Legacies, groups: Groups) -> None:
        self._compute = context.compute
        self._emit = context.emit
        self._replica = replica
        self._carry = carry
        self._legacies = legacies
        self._groups = groups
        self._companion = context.companion

    async def offer(self, rounds: RoundDriver, turn: Turn) -> None:
        """Announce it, unless the round is decided before it is encoded: it would be counted twice.

        Who lacks what a gossip round builds on says that it brings nothing.
        """
        head, base, ranges = rounds.chain.head, rounds.chain.base, rounds.ranges
        is_for_neighbours = base.is_gossip
        may_bring_other = rounds.is_member and not is_for_neighbours
        brought = await self._legacies.to_bring(base, ranges) if may_bring_other else None
        if brought is None and not self._carry.due:
            if self._companion is not None:  # nothing was routed to this peer: nobody should wait for it
                await self._companion.announcing(None)
                self.pass_on(turn)
            return
        if is_for_neighbours and not self._carry.mixing.is_in_step:
            self.pass_on(turn)
            return
        encode = lambda: self._carry.encode(ranges, head.round + 1, is_gossip=is_for_neighbours)  # noqa: E731
        payload = brought.payload if brought else await self._compute.serve(encode)
        if brought is None and self._companion is not None:
            await self._companion.announcing(payload_of(part.digest for part in payload))
        if rounds.chain.head != head or head != self._replica.head:
            return
        if brought is None and turn is self._groups.turn:
            through = turn.aggregator if isinstance(turn, Leaf) else None
            self._carry.offer(self._groups.through(turn).announce(self._carry.due, payload), through)
        elif brought is not None and rounds.is_member:
            self._carry.offer(rounds.announce(brought.tokens, payload, brought.kept))
        if self._carry.offered is not None:
            tokens, nbytes = brought.tokens if brought else self._carry.due, sum(len(part.encoded) for part in payload)
            self._emit(PayloadOffered(round=Round(head.round + 1), tokens=tokens, nbytes=nbytes))

    def pass_on(self, turn: Turn) -> None:
        """Bring nothing to the present round."""
        self._groups.through(turn).pass_on()

    def is_in_doubt(self, opening: Manifest, rounds: RoundDriver) -> bool:
        """Return whether the round without which a branch begins may be decided elsewhere, and count this peer there.

        Somebody who is not in the branch has fetched what this peer offered, or results that hold it; what a leaf
        offers is in its aggregator's payload. Of gradients a branch brings nothing to another: none is counted twice.
        """
        if self._carry.offered is None or self._carry.sends_gradient:
            return False
        asked_by = rounds.parts.asked_by
        return bool(asked_by if self._carry.offered_to else asked_by.keys() - set(opening.members))
