"""The fork watch: where others say that they stand, what they can show of it, and whom this peer follows.

    not in a round, or back in one     goes by what it is told
    holding its branch                 asks for the certificate of a head that it hears of, and goes by who signed it

What is told and shown is weighed by `choice`.

Failure:
- who claims to be further shows nothing, or does not answer: another is asked that tells of the same branch.
"""

import asyncio
from collections.abc import Sequence

from weft.clock import Clock
from weft.ids import BranchId, PeerId, Round
from weft.net.membership.membership import Membership
from weft.net.messages import Heartbeat
from weft.net.node import Node
from weft.peer.chain import Heads, signers
from weft.peer.fork.choice import MOST_NEEDED, NEAR, Proof, believed, is_followed, is_further
from weft.peer.messages import ChainAnswer, ChainRequest
from weft.peer.round.driver import Participation, RoundDriver
from weft.peer.state.replica import Replica
from weft.sync.records.messages import Manifest

LOOK_S = 1.0  # between two looks at what others tell
CALL_S = 5.0
AGAIN_S = 5.0  # between two requests to one peer to show where it stands
NUM_ASKED = 4  # at once


class ForkWatch:
    """Of one peer."""

    def __init__(
        self, node: Node, clock: Clock, membership: Membership, replica: Replica, participation: Participation
    ) -> None:
        self._node = node
        self._clock = clock
        self._membership = membership
        self._replica = replica
        self._participation = participation
        self._proofs: dict[BranchId, Proof] = {}  # of each branch told of, the latest shown
        self._asked_at: dict[PeerId, float] = {}

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
        beats = {peer: beat for peer, beat in self.beats().items() if beat.manifest is not None}
        return {
            peer
            for peer, beat in beats.items()
            if (beat.round > head.round if beat.branch == head.branch else self._draws(beat, head))
        }

    def is_on_lesser_branch(self, head: Manifest) -> bool:
        """Return whether peers tell of another branch than `head` is on, and one to prefer."""
        return any(self.has_left(peer, head.branch) for peer in self.ahead(head))

    async def watch(self, rounds: RoundDriver) -> None:
        """Have it shown where others stand that tell of another branch than `rounds` are on, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._participation.is_holding:
                await self._seek(rounds.chain.head)

    async def _seek(self, head: Manifest) -> None:
        told: dict[BranchId, list[PeerId]] = {}
        for peer, beat in self.beats().items():
            if beat.manifest is not None and beat.branch != head.branch:
                told.setdefault(beat.branch, []).append(peer)
        self._proofs = {branch: proof for branch, proof in self._proofs.items() if branch in (*told, head.branch)}
        await asyncio.gather(*(self._seek_of(peers) for peers in told.values()))

    async def is_too_far(self, peer: PeerId, head: Manifest, answer: ChainAnswer) -> bool:
        """Return whether what `peer` has beyond `head`, and does not prove round by round, is to be fetched as a state.

        Args:
            peer: one that is ahead.
            answer: what it says was decided after `head`.
        """
        beat = self._membership.heartbeat_of(peer)
        if beat is None or (beat.branch == head.branch and answer.certificates is not None):
            return False
        if self._participation.is_holding and beat.branch == head.branch:
            await self._seek_of([peer])
        rounds = self._participation.rounds
        return (rounds is None or rounds.chain.head == head) and self._draws(beat, head)

    def _draws(self, beat: Heartbeat, head: Manifest) -> bool:
        """Return whether this peer, at `head`, goes over to where a peer says that it stands."""
        rounds = self._participation.rounds
        if rounds is None or not rounds.quorum.is_holding:
            return is_further(beat, head)
        proof = self._proofs.get(beat.branch)
        return proof is not None and is_followed(head, rounds.chain.charter, self._num_beside(rounds), proof)

    def _num_beside(self, rounds: RoundDriver) -> int:
        """Return how many members stand where this peer does, as they tell; itself included.

        Who comes and keeps links to all does not count a member that it has never heard: it may be long gone.
        """
        head, electorate = rounds.chain.head, rounds.chain.base.electorate
        beats = (self._membership.heartbeat_of(peer) for peer in rounds.quorum.present() if peer != self._node.peer)
        counts_unheard = self._node.peer in electorate or not self._membership.watches_all
        return 1 + sum(
            counts_unheard if beat is None else beat.branch == head.branch and beat.round <= head.round + NEAR
            for beat in beats
        )

    async def _seek_of(self, peers: Sequence[PeerId]) -> None:
        now = self._clock.now()
        due = [peer for peer in peers if now - self._asked_at.get(peer, -AGAIN_S) >= AGAIN_S][:NUM_ASKED]
        self._asked_at = {peer: at for peer, at in self._asked_at.items() if now - at < AGAIN_S} | dict.fromkeys(
            due, now
        )
        await asyncio.gather(*(self._ask(peer) for peer in due))

    async def _ask(self, peer: PeerId) -> None:
        proof = await self._shown(peer)
        if proof is None:
            return
        before = self._proofs.get(proof.manifest.branch)
        if before is None or _weight(proof) > _weight(before):
            self._proofs[proof.manifest.branch] = proof

    async def _shown(self, peer: PeerId) -> Proof | None:
        """Return what a peer shows of the head that it tells of."""
        beat, rounds = self._membership.heartbeat_of(peer), self._participation.rounds
        if beat is None or rounds is None:
            return None
        request = ChainRequest(branch=beat.branch, after=Round(max(beat.round - 1, 0)))
        answer = await self._node.ask(peer, request, ChainAnswer, deadline_s=CALL_S)
        if answer is None:
            return None
        found = [each for each in answer.certificates or () if each.manifest.branch == beat.branch]
        if not found or found[-1].manifest.round < beat.round:
            return None
        num = len(signers(found[-1], rounds.chain.electors))
        if num and self._num_beside(rounds) == 1:  # it would believe one alone: those who sign with it count as well
            num = len(signers(found[-1], found[-1].manifest.members))
        return Proof(found[-1].manifest, num)

    # --- from outside ---

    async def later(self, heads: Heads) -> Heads:
        """Return those of `heads` to go over to."""
        mine, rounds = self._replica.head, self._participation.rounds
        if mine is not None and rounds is not None and rounds.quorum.is_holding:
            return await self._shown_later(heads, mine, rounds)
        further = [(peer, head) for peer, head in heads if mine is None or is_further(head, mine)]
        if not further:
            return ()
        best, last = believed([head for _, head in further])
        return [(peer, head) for peer, head in further if head.branch == best and head.round <= last]

    async def _shown_later(self, heads: Heads, mine: Manifest, rounds: RoundDriver) -> Heads:
        here = rounds.chain.head  # proven, and further than `mine` where the results between them are lost
        await self._seek_of([peer for peer, head in heads if head.branch == here.branch and head.round > here.round])
        num = self._num_beside(rounds)
        followed = [proof for proof in self._proofs.values() if is_followed(here, rounds.chain.charter, num, proof)]
        last = {here.branch: here.round} | {proof.manifest.branch: proof.manifest.round for proof in followed}
        return [
            (peer, head)
            for peer, head in heads
            if head.round <= last.get(head.branch, -NEAR) + NEAR
            and (head.branch != mine.branch or head.round > mine.round)
        ]


def _weight(proof: Proof) -> tuple[int, int, int]:
    return min(proof.num_signers, MOST_NEEDED), proof.manifest.committed_tokens, proof.manifest.round
