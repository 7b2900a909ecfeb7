"""When the majority is lost: those that remain wait, then go on as a branch of their own.

    majority lost ── MajorityLost ──► wait `orphan_after` ──► all that are alive consent ── BranchOpened ──► go on

The lowest key among those alive proposes a first manifest that names them; everybody named must consent, and by
consenting leaves the old branch for good. Alone, a peer consents to itself. A run that is strict never branches: it
waits for its majority.

Failure:
- one of those named does not answer or disagrees: nothing is opened; it is tried again with who is alive then, those
  among them that had consented and left their round.
- enough are alive, but some have no vote, because they came back from states older than their votes: they say so,
  and the majority is lost until those return that hold what was decided.
- the opener's word comes when the round was decided after all: it is not followed.
- the majority comes back first: the wait is over.
- the opener vanishes after consent: its followers find no majority there either, and open the next branch.
"""

import asyncio
from collections.abc import Sequence

from weft.clock import Clock
from weft.errors import WeftError
from weft.events import BranchOpened, Emit, MajorityLost
from weft.ids import PeerId
from weft.net.membership.full_mesh import GONE_S
from weft.net.node import Node
from weft.peer.chain import branch_name, open_branch
from weft.peer.messages import BranchBegin, BranchConsent, BranchProposal, StandingNote
from weft.peer.round.driver import RoundDriver
from weft.run.config import Genesis
from weft.sync.records.messages import Manifest

ORPHAN_AFTER_S = 60.0
ORPHAN_AFTER_PAIR_S = 15.0  # of two peers, one is all that is left to wait for
CHECK_S = 0.5
CONSENT_S = 5.0
UNREACHED_S = 30.0  # a member that this process never reached: a first link may take so long, through relays


def patience_s(run: Genesis, electorate: Sequence[PeerId]) -> float:
    """Return how long a minority of the electorate waits before it opens a branch, where the run is not strict."""
    default = ORPHAN_AFTER_PAIR_S if len(electorate) <= 2 else ORPHAN_AFTER_S
    return default if run.orphan_after_s is None else run.orphan_after_s


class Split:
    """Watches the majority of `rounds`."""

    def __init__(self, run: Genesis, node: Node, rounds: RoundDriver, clock: Clock, emit: Emit) -> None:
        self._run = run
        self._node = node
        self._rounds = rounds
        self._clock = clock
        self._emit = emit
        self.lost = asyncio.Event()  # set while no majority is in sight
        self._lost_at: float | None = None
        self._looked = clock.now(), clock.wall()  # a machine that sleeps may stop one of them
        self._consented: Manifest | None = None
        self._missed_at: dict[PeerId, float] = {}  # members without a link, since when
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
            if self._rounds.quorum.sees_majority():
                self.lost.clear()
            else:
                self.lost.set()
            if self._rounds.quorum.has_majority():
                self._lost_at = None
                continue
            if self._lost_at is None:
                self._lost_at = now - GONE_S  # for so long nothing was heard of those that are gone
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

    def _is_due(self, now: float) -> bool:
        wait_s = self.orphan_after_s()
        return wait_s is not None and self._lost_at is not None and now - self._lost_at >= wait_s

    def _tell(self) -> None:
        base = self._rounds.chain.base
        self._emit(
            MajorityLost(
                branch=base.branch,
                round=base.round,
                alive=len(self._rounds.quorum.present()),
                electorate=len(base.electorate),
                opens_branch_in_s=self.orphan_after_s(),
                reason=self._rounds.quorum.why_undecidable(),
            )
        )

    async def _open(self) -> None:
        me, reason = self._node.peer, self._rounds.quorum.why_undecidable()
        members = self._rounds.quorum.here() or (me,)  # nobody is left but who was about to be counted in
        if members[0] != me:
            return  # the lowest key proposes
        base = self._rounds.chain.base
        opening = open_branch(base, members, me, branch_name(base, members, me))
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
        expected = open_branch(base, opening.members, peer, branch_name(base, opening.members, peer))
        if opening != expected or self._node.peer not in opening.members or peer not in base.electorate:
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
            self._go(opening, self._rounds.quorum.why_undecidable())

    def _go(self, opening: Manifest, reason: str) -> None:
        self._lost_at, self._consented = None, None
        self._emit(BranchOpened(branch=opening.branch, round=opening.round, members=opening.members, reason=reason))
        self._rounds.branch_off(opening)
