"""What this peer brings to the present round: what it has trained, or what a branch of its own had counted."""

from weft.events import PayloadOffered
from weft.ids import Round
from weft.peer.context import Place
from weft.peer.group.groups import Groups, Turn
from weft.peer.round.driver import RoundDriver
from weft.peer.state.carry import Carry
from weft.peer.state.legacies import Legacies
from weft.peer.state.replica import Replica
from weft.sync.round.groups import payload_of
from weft.sync.round.neighbours import is_gossip


class Offering:
    """Of one peer, round after round."""

    def __init__(self, place: Place, replica: Replica, carry: Carry, legacies: Legacies, groups: Groups) -> None:
        self._compute = place.compute
        self._emit = place.emit
        self._replica = replica
        self._carry = carry
        self._legacies = legacies
        self._groups = groups
        self._companion = place.companion

    async def offer(self, rounds: RoundDriver, turn: Turn) -> None:
        """Announce it, unless the round is decided before it is encoded: it would be counted twice.

        Who lacks what a gossip round builds on says that it brings nothing.
        """
        head, base, ranges = rounds.chain.head, rounds.chain.base, turn.ranges
        is_for_neighbours = is_gossip(base)
        may_bring_other = rounds.is_member and not is_for_neighbours
        brought = await self._legacies.to_bring(base, ranges) if may_bring_other else None
        if brought is None and not self._carry.due:
            if self._companion is not None:  # nothing was routed to this peer: nobody should wait for it
                await self._companion.announcing(None)
                turn.pass_on()
            return
        if is_for_neighbours and not self._carry.mixing.is_in_step:
            turn.pass_on()
            return
        encode = lambda: self._carry.encode(ranges, head.round + 1, is_gossip=is_for_neighbours)  # noqa: E731
        payload = brought.payload if brought else await self._compute.serve(encode)
        if brought is None and self._companion is not None:
            await self._companion.announcing(payload_of(part.digest for part in payload))
        if rounds.chain.head != head or head != self._replica.head:
            return
        if brought is None:
            self._groups.offer(turn, payload)
        elif rounds.is_member:
            self._carry.offered = rounds.announce(brought.tokens, payload, brought.kept)
        if self._carry.offered is not None:
            tokens, nbytes = brought.tokens if brought else self._carry.due, sum(len(part.encoded) for part in payload)
            self._emit(PayloadOffered(round=Round(head.round + 1), tokens=tokens, nbytes=nbytes))
