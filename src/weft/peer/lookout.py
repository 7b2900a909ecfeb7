"""A peer's eye on the others: where they say that they stand, and which of it this peer follows.

What others tell is weighed by `heed`; here it is brought together, from heartbeats or from heads that were asked for.

It does not know how a state or a decision comes.
"""

from collections.abc import Callable, Mapping

from weft.ids import BranchId, PeerId, Round
from weft.net.heartbeat import Membership
from weft.net.messages import Heartbeat
from weft.net.node import Node
from weft.peer.arrival import Heads
from weft.peer.heed import Told, furthest, is_credible, preferred, told
from weft.peer.messages import ChainAnswer
from weft.peer.replica import Replica
from weft.peer.rounds import Rounds
from weft.sync.messages import Base, Manifest, next_base


class Lookout:
    """Of one peer.

    Args:
        rounds: returns the rounds it takes part in, once it does.
    """

    def __init__(
        self, node: Node, membership: Membership, replica: Replica, rounds: Callable[[], Rounds | None]
    ) -> None:
        self._node = node
        self._membership = membership
        self._replica = replica
        self._rounds = rounds

    def beats(self) -> dict[PeerId, Heartbeat]:
        """Return what linked peers have told last."""
        beats = {peer: self._membership.heartbeat_of(peer) for peer in sorted(self._node.peers)}
        return {peer: beat for peer, beat in beats.items() if beat is not None}

    def has_state(self, peer: PeerId) -> bool:
        beat = self._membership.heartbeat_of(peer)
        return beat is not None and beat.manifest is not None

    def has_left(self, peer: PeerId, branch: BranchId) -> bool:
        """Return whether it tells of another branch."""
        beat = self._membership.heartbeat_of(peer)
        return beat is not None and beat.branch != branch

    # --- beside a round ---

    def ahead(self, head: Manifest) -> set[PeerId]:
        """Return who tells of a state that this peer should follow, at `head`, or go over to."""
        standing = self._heard(head)
        best = preferred(standing.values())
        return {
            peer
            for peer, each in standing.items()
            if (each.round > head.round if each.branch == head.branch else each.branch == best)
        }

    def is_on_lesser_branch(self, head: Manifest) -> bool:
        """Return whether peers tell of another branch than `head` is on, and one to prefer."""
        return preferred(self._heard(head).values()) != head.branch

    def is_too_far(self, peer: PeerId, base: Base, answer: ChainAnswer) -> bool:
        """Return whether what `peer` has, and does not prove round by round, is to be fetched as a state.

        Args:
            peer: one that is ahead.
            base: of the round that this peer is in.
            answer: what it has decided after that round began.
        """
        beat, rounds = self._membership.heartbeat_of(peer), self._rounds()
        if beat is None or rounds is None or beat.branch != base.branch:
            return beat is not None
        heard = self._heard(rounds.chain.head)
        return answer.certificates is None and self._is_credible(base, beat.round, heard)

    # --- from outside ---

    def later(self, heads: Heads) -> Heads:
        """Return those of `heads` to go over to: on the branch to prefer, and further than this peer's own."""
        if not heads:
            return ()
        mine = self._replica.head
        beats = self.beats()
        others = {peer: told(head, peer in beats and beats[peer].is_holding) for peer, head in heads}
        standing = others | self._own(mine)
        best = preferred(standing.values())
        last = furthest(others.values(), best)
        there = [(peer, head) for peer, head in heads if head.branch == best and head.round <= last]
        if mine is None or mine.branch != best:
            return there
        base, further = next_base(mine, self._replica.charter), [each for each in there if each[1].round > mine.round]
        return [(peer, head) for peer, head in further if self._is_credible(base, head.round, standing)]

    def _heard(self, head: Manifest) -> dict[PeerId, Told]:
        """Return where linked peers say that they stand, and where this one does, at `head`."""
        beats = self.beats().items()
        return {peer: told(beat, beat.is_holding) for peer, beat in beats if beat.manifest is not None} | self._own(
            head
        )

    def _own(self, head: Manifest | None) -> dict[PeerId, Told]:
        rounds = self._rounds()
        if head is None:
            return {}
        return {self._node.peer: told(head, rounds is not None and rounds.standing.is_holding)}

    def _is_credible(self, base: Base, round: Round, standing: Mapping[PeerId, Told]) -> bool:
        """Return whether `round` can have been decided since `base`; who only begins to take part believes it."""
        rounds = self._rounds()
        if rounds is None:
            return True
        me, voteless = self._node.peer, rounds.standing.voteless
        return is_credible(base, round, standing, voteless | {me} if rounds.standing.abstains else voteless)
