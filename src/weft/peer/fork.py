"""A branch opens where the majority is lost (`Split`), and is left where others show a better one (`ForkWatch`).

Those that remain wait, then go on as a branch of their own:

    majority lost ── MajorityLost ──► wait `orphan_after` ──► all that are alive consent ── BranchOpened ──► go on

The lowest key among those alive proposes a first manifest that names them; everybody named must consent, and by
consenting leaves the old branch for good. Alone, a peer consents to itself. A run that is strict never branches: it
waits for its majority.

Where others say that they stand, what they can show of it, and whom this peer follows:

    not in a round, or back in one     goes by what it is told
    holding its branch                 asks for the certificate of a head that it hears of, and goes by who signed it

The fork choice (`weft.peer.chain`) weighs what is told and shown.

Failure:
- one of those named does not answer or disagrees: nothing is opened; it is tried again with who is alive then, those
  among them that had consented and left their round.
- enough are alive, but some have no vote, because they came back from states older than their votes: they say so,
  and the majority is lost until those return that hold what was decided.
- all were stopped in one round, and are back: nobody of them can decide it, and nobody is missing. They go on as a
  branch at once.
- the opener's word comes when the round was decided after all: it is not followed.
- the majority comes back first: the wait is over.
- who has left the round comes back before it is decided, and its last word was missed: it says it again.
- the opener vanishes after consent: its followers find no majority there either, and open the next branch.
- who claims to be further shows nothing, or does not answer: another is asked that tells of the same branch.
"""

import asyncio
from collections.abc import Sequence

from msgspec import UNSET

from weft.errors import WeftError
from weft.events import BranchOpened, MajorityLost
from weft.ids import BranchId, PeerId, Round
from weft.net.membership.full_mesh import GONE_S
from weft.net.membership.membership import Membership
from weft.net.messages import Heartbeat
from weft.peer import chain
from weft.peer.context import Context
from weft.peer.messages import BranchBegin, BranchConsent, BranchProposal, ChainAnswer, ChainRequest, StandingNote
from weft.peer.round.driver import Participation, RoundDriver
from weft.peer.state.carry import Carry
from weft.peer.state.replica import Replica
from weft.run.config import Genesis
from weft.sync.governance import signers
from weft.sync.records.messages import Manifest
from weft.sync.records.quarantine import settled
from weft.sync.round.rules import is_quorum

ORPHAN_AFTER_S = 60.0
TOGETHER_S = 5.0  # where all who vote are here, nobody of them is waited for: who only keeps a state may come yet
ORPHAN_AFTER_PAIR_S = 15.0  # of two peers, one is all that is left to wait for
CHECK_S = 0.5
CONSENT_S = 5.0
LEFT_AGAIN_S = 5.0  # between two times that who has left a round says so
UNREACHED_S = 30.0  # a member that this process never reached: a first link may take so long, through relays


def patience_s(run: Genesis, electorate: Sequence[PeerId]) -> float:
    """Return how long a minority of the electorate waits before it opens a branch, where the run is not strict."""
    default = ORPHAN_AFTER_PAIR_S if len(electorate) <= 2 else ORPHAN_AFTER_S
    return default if run.orphan_after_s is None else run.orphan_after_s


def waits_s(run: Genesis, electorate: Sequence[PeerId], me: PeerId) -> float | None:
    """Return how long `me`, back from a checkpoint of a member of `electorate`, waits where nobody answers, before it
    goes on alone; None: a strict run goes on with a majority only."""
    if tuple(electorate) == (me,):
        return 0.0
    return None if run.is_strict else patience_s(run, electorate)


class Split:
    def __init__(self, run: Genesis, context: Context, rounds: RoundDriver) -> None:
        self._run = run
        self._node = node = context.node
        self._rounds = rounds
        self._clock = context.clock
        self._emit = context.emit
        self.lost = asyncio.Event()  # set while no majority is in sight
        self._lost_at: float | None = None
        self._together_at: float | None = None  # since when all stand in a round that they cannot decide
        self._is_told = False  # that the majority is lost
        self._looked = self._clock.now(), self._clock.wall()  # a machine that sleeps may stop one of them
        self._consented: Manifest | None = None
        self._missed_at: dict[PeerId, float] = {}  # members without a link, since when
        self._left_at = self._clock.now()  # when it last saw to what it has left
        node.serve(BranchProposal, self._consider)
        node.on_note(BranchBegin, self._begin)
        node.on_note(StandingNote, self._take_standing)

    async def watch(self) -> None:
        """Run until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            now = self._clock.now()
            self._miss(now)
            self._tell_standing()
            self._rounds.keep_up()
            self._rounds.quorum.look(now, has_slept=self._has_slept(now))
            self._rounds.acts.tell_again(now)
            if now - self._left_at >= LEFT_AGAIN_S:
                self._left_at = now
                self._rounds.take_leave_again()
            if self._rounds.quorum.sees_majority():
                self.lost.clear()
            else:
                self.lost.set()
            if self._rounds.quorum.has_majority():
                self._lost_at = self._together_at = None
                continue
            if self._lost_at is None:
                self._lost_at = now - GONE_S  # for so long nothing was heard of those that are gone
                self._is_told = False
            if not self._rounds.quorum.are_together():
                self._together_at = None
            elif self._together_at is None:
                self._together_at = now
            if not self._is_told and self._is_worth_telling(now):
                self._is_told = True
                self._tell()
            if self._is_due(now):
                await self._open()

    def _has_slept(self, now: float) -> bool:
        """Return whether this process, or its machine, stood still since the last look: others may have gone on."""
        before, self._looked = self._looked, (now, self._clock.wall())
        return max(then - since for then, since in zip(self._looked, before, strict=True)) > GONE_S

    def orphan_after_s(self) -> float | None:
        """Return how long to wait; None: for ever. All together may leave even a strict run's branch: nobody is left
        who could go on with it."""
        electorate = self._rounds.chain.base.electorate
        if self._run.is_strict and self._rounds.quorum.here() != electorate:
            return None
        return patience_s(self._run, electorate)

    def _miss(self, now: float) -> None:
        """Give up who was never heard in this process's life, of whom membership therefore says nothing."""
        others = [peer for peer in self._rounds.quorum.present() if peer != self._node.peer]
        is_due = self._rounds.quorum.links_electorate
        missed = [peer for peer in others if is_due and not self._node.is_linked(peer)]
        self._missed_at = {peer: self._missed_at.get(peer, now) for peer in missed}
        for peer, at in self._missed_at.items():
            if now - at >= UNREACHED_S:
                self._rounds.notice(peer, "gone")

    def _tell_standing(self) -> None:
        note = self._rounds.quorum.note()
        if note is None:
            return
        for member in self._rounds.chain.base.electorate:
            if member != self._node.peer:
                self._node.post(member, note)

    async def _take_standing(self, peer: PeerId, note: StandingNote) -> None:
        self._rounds.quorum.take(peer, note)

    def _is_worth_telling(self, now: float) -> bool:
        """Return whether a person should hear of it: not where all were stopped, and are just coming back."""
        quorum = self._rounds.quorum
        is_short = quorum.are_results_lost or not is_quorum(self._rounds.chain.base, quorum.present())
        return is_short or (self._lost_at is not None and now - self._lost_at >= GONE_S + 2 * TOGETHER_S)

    def _is_due(self, now: float) -> bool:
        if self._together_at is not None and now - self._together_at >= TOGETHER_S:
            return True
        wait_s = self.orphan_after_s()
        return wait_s is not None and self._lost_at is not None and now - self._lost_at >= wait_s

    def _tell(self) -> None:
        base, wait_s = self._rounds.chain.base, self.orphan_after_s()
        waited_s = 0.0 if self._lost_at is None else self._clock.now() - self._lost_at
        self._emit(
            MajorityLost(
                branch=base.branch,
                round=base.round,
                alive=len(self._rounds.quorum.heard(self._node.peers)),
                electorate=len(base.electorate),
                opens_branch_in_s=None if wait_s is None else max(0.0, wait_s - waited_s),
                reason=self._rounds.quorum.why_undecidable(self._node.peers),
            )
        )

    async def _open(self) -> None:
        me, reason = self._node.peer, self._rounds.quorum.why_undecidable(self._node.peers)
        members = self._rounds.quorum.here() or (me,)  # nobody is left but who was about to be counted in
        if members[0] != me:
            return  # the lowest key proposes
        base = self._rounds.chain.base
        opening = chain.open_branch(base, members, me, chain.branch_name(base, members, me))
        for member in members:
            if member == me:
                continue
            try:
                consent = await self._node.call(
                    member, BranchProposal(opening=opening, opener=me), BranchConsent, deadline_s=CONSENT_S
                )
            except WeftError:
                return
            if not consent.is_given:
                return
        if self._rounds.chain.base != base:
            return  # decided meanwhile
        self._rounds.leave()
        for member in members:
            if member != me:
                self._node.post(member, BranchBegin(opening=opening))
        self._go(opening, reason)

    async def _consider(self, peer: PeerId, proposal: BranchProposal) -> BranchConsent:
        opening, base = proposal.opening, self._rounds.chain.base
        expected = chain.open_branch(base, opening.members, peer, chain.branch_name(base, opening.members, peer))
        is_of_members = {peer, self._node.peer, *opening.members} <= set(base.electorate)
        if opening != expected or self._node.peer not in opening.members or not is_of_members:
            return BranchConsent(is_given=False, reason="it does not follow on what is committed here")
        is_everybody = opening.members == base.electorate
        if self._rounds.quorum.has_majority() or (self._run.is_strict and not is_everybody):
            return BranchConsent(is_given=False, reason="the majority is not lost here")
        self._rounds.leave()
        self._consented = opening
        return BranchConsent(is_given=True)

    async def _begin(self, peer: PeerId, begin: BranchBegin) -> None:
        opening, base = begin.opening, self._rounds.chain.base
        is_undecided = (opening.previous, opening.round) == (base.previous, base.round)
        if opening == self._consented and opening.leader == peer and is_undecided:
            self._go(opening, self._rounds.quorum.why_undecidable(self._node.peers))

    def _go(self, opening: Manifest, reason: str) -> None:
        is_everybody = opening.members == self._rounds.chain.base.electorate
        if is_everybody and not self._rounds.quorum.are_results_lost:
            reason = "all are back, and begin the round again in which they were stopped"
        self._lost_at, self._together_at, self._consented = None, None, None
        self._emit(
            BranchOpened(
                branch=opening.branch,
                round=opening.round,
                members=opening.members,
                reason=reason,
                is_everybody=is_everybody or UNSET,
            )
        )
        self._rounds.branch_off(opening)


LOOK_S = 1.0  # between two looks at what others tell
CALL_S = 5.0
AGAIN_S = 5.0  # between two requests to one peer to show where it stands
NUM_ASKED = 4  # at once
SETTLE_S = 10.0  # at most, for the round in which this peer has announced, before it goes over to another branch


class ForkWatch:
    def __init__(
        self, context: Context, membership: Membership, replica: Replica, carry: Carry, participation: Participation
    ) -> None:
        self._node = context.node
        self._clock = context.clock
        self._membership = membership
        self._replica = replica
        self._carry = carry
        self._participation = participation
        self._settling_since: float | None = None
        self._proofs: dict[BranchId, chain.Proof] = {}  # of each branch told of, the latest shown
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

    def should_settle(self, head: Manifest) -> bool:
        """Return whether to let the present round end before going over to another branch; asked again and again.

        Who goes over in the middle of an exchange cannot tell whether its work is counted where it comes from. Where
        another of its branch has left already, the round may never end.
        """
        now, others = self._clock.now(), set(head.members) - {self._node.peer}
        is_wanted = self._carry.offered is not None and self.is_on_lesser_branch(head)
        if not is_wanted or any(self.has_left(peer, head.branch) for peer in others):
            self._settling_since = None
            return False
        if self._settling_since is None:
            self._settling_since = now
        return now - self._settling_since <= SETTLE_S

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
            return chain.is_further(beat, head)
        proof = self._proofs.get(beat.branch)
        return proof is not None and chain.is_followed(head, rounds.chain.charter, len(self._beside(rounds)), proof)

    def _beside(self, rounds: RoundDriver) -> set[PeerId]:
        """Return which members stand where this peer does, as they tell; itself included.

        Who comes and keeps links to all does not count a member that it has never heard: it may be long gone. In a run
        that audits nobody counts that is in quarantine.
        """
        head, electorate = rounds.chain.head, rounds.chain.base.electorate
        counts_unheard = self._node.peer in electorate or not self._membership.watches_all

        def is_beside(peer: PeerId) -> bool:
            beat = self._membership.heartbeat_of(peer)
            if beat is None:
                return counts_unheard
            return beat.branch == head.branch and beat.round <= head.round + chain.NEAR

        others = settled(rounds.chain.charter, rounds.quorum.present()) - {self._node.peer}
        return {self._node.peer, *filter(is_beside, others)}

    async def _seek_of(self, peers: Sequence[PeerId]) -> None:
        now = self._clock.now()
        due = [peer for peer in peers if now - self._asked_at.get(peer, -AGAIN_S) >= AGAIN_S][:NUM_ASKED]
        self._asked_at = {peer: at for peer, at in self._asked_at.items() if now - at < AGAIN_S} | dict.fromkeys(
            due, now
        )
        await asyncio.gather(*(self._ask(peer) for peer in due))

    async def _ask(self, peer: PeerId) -> None:
        proof, rounds = await self._shown(peer), self._participation.rounds
        if proof is None or rounds is None:
            return
        before, num = self._proofs.get(proof.manifest.branch), len(self._beside(rounds))
        if before is None or _weight(proof, num) > _weight(before, num):
            self._proofs[proof.manifest.branch] = proof

    async def _shown(self, peer: PeerId) -> chain.Proof | None:
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
        manifest, known, beside = found[-1].manifest, rounds.chain.electors, self._beside(rounds)
        signed, audits = signers(found[-1], known), rounds.chain.charter.audits
        there, num = chain.num_there(manifest, signed, known, beside) if audits else 0, len(signed)
        if num and len(beside) == 1:  # it would believe one alone: those who sign with it count as well
            num = len(signers(found[-1], manifest.members))
        return chain.Proof(manifest, num, there)

    # --- from outside ---

    async def later(self, heads: chain.Heads) -> chain.Heads:
        """Return those of `heads` to go over to."""
        mine, rounds = self._replica.head, self._participation.rounds
        if mine is not None and rounds is not None and rounds.quorum.is_holding:
            return await self._shown_later(heads, mine, rounds)
        further = [(peer, head) for peer, head in heads if mine is None or chain.is_further(head, mine)]
        if not further:
            return ()
        best, last = chain.believed([head for _, head in further])
        return [(peer, head) for peer, head in further if head.branch == best and head.round <= last]

    async def _shown_later(self, heads: chain.Heads, mine: Manifest, rounds: RoundDriver) -> chain.Heads:
        here = rounds.chain.head  # proven, and further than `mine` where the results between them are lost
        await self._seek_of([peer for peer, head in heads if head.branch == here.branch and head.round > here.round])
        num = len(self._beside(rounds))
        followed = [
            proof for proof in self._proofs.values() if chain.is_followed(here, rounds.chain.charter, num, proof)
        ]
        last = {here.branch: here.round} | {proof.manifest.branch: proof.manifest.round for proof in followed}
        return [
            (peer, head)
            for peer, head in heads
            if head.round <= last.get(head.branch, -chain.NEAR) + chain.NEAR
            and (head.branch != mine.branch or head.round > mine.round)
        ]


def _weight(proof: chain.Proof, num_beside: int) -> tuple[bool, int, int, int]:
    num, head = min(proof.num_signers, chain.MOST_NEEDED), proof.manifest
    return proof.num_there >= num_beside, num, head.committed_tokens, head.round
