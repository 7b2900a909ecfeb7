"""Whether a letter may be believed, before the machine hears of it: what it wants voted for, and what it claims.

A vote says that its voter can make the outer step. What cannot be fetched or is no vector is never voted for, so nobody
can make a majority decide it. To the machine the letter is late, or lost.

A member may claim to have trained no more than was leased to it since it was last counted.

    allowance = tokens of all leases since the last manifest that counted the member, as far as this peer knows them
    bound     = all tokens that were ever leased on the branch and not counted, whoever held them
    missing   = bound - allowance - what the last manifest leased to the others that are not late
    of group  = allowance + missing, but no more of it than a round leases, nor than twice the allowance

A member that missed rounds carries several leases, so the allowance follows the manifests. What a leader hears is cut
to the allowance. A leaf that was late, or whose aggregator is gone or paused, brings what was leased to it with another
round or through another aggregator: so who announces for a group may claim some of what has not come. How much is
missing the last manifest tells, so who was just started believes a group what all others do. What all claim together is
cut to the bound, and of another's plan the bound alone is asked, which is the same for all members, so no two of them
disagree whether a plan stands. (docs/threat_model.md: a claim within the lease says nothing of honest work.)

Who rests may have trained in the place of one who was drawn and is away (`weft.peer.loop.contribution`): it is allowed
one lease more in that round, within the bound.

In a stage of a pipeline it is allowed what is routed to it: the bound is a multiple of what a round leases.

A legacy weighs no more than the median of the others, whatever it claims (`weft.sync.governance`). Its tokens
are the difference between two manifests: the head of the branch that was given up, and the last common one. A head that
no member of the last common one has signed counts as one lease.

Failure:
- a leader's own proposal names results that cannot be had or applied: the leader is suspected, the next one leads.
- a manifest accepted before names such results: they are looked for until they are here; until then the round has no
  outcome.
"""

import asyncio
from contextlib import suppress

import msgspec

from weft.errors import PeerError
from weft.events import Emit, Notice, PayloadRejected
from weft.ids import PeerId, Tokens, short
from weft.peer.messages import GENESIS
from weft.peer.round.members import Member, Quorum
from weft.peer.round.merge import RoundMerger
from weft.sync.governance import legacy_tokens
from weft.sync.records.charter import Charter
from weft.sync.records.messages import AnyRoundMessage, Base, Collect, Manifest, Propose, Ready
from weft.sync.round.machine import Noticed
from weft.sync.round.rules import is_successor

RECOVER_S = 5.0  # between two looks for results that nobody had


class Validity:
    def __init__(self, member: Member, merger: RoundMerger, quorum: Quorum, emit: Emit) -> None:
        self._member = member
        self._merger = merger
        self._parts = merger.parts
        self._quorum = quorum
        self._emit = emit

    def must_weigh(self, base: Base, named: Manifest) -> bool:
        """Return whether the machine might vote for `named`, and its results are not here."""
        return is_successor(base, named) and not self._parts.has_results(named)

    async def weigh(self, sender: PeerId, message: AnyRoundMessage, named: Manifest) -> bool:
        """Return, once that is known, whether what `message` names can be applied here.

        A leader whose own proposal cannot be is suspected: nobody need wait for the next.
        """
        try:
            await self._merger.check(named)
            await self._parts.results(named)
        except PeerError as error:
            reason = f"it names results that cannot be applied: {error}"
            self._emit(PayloadRejected(round=named.round, member=sender, reason=reason))
            is_its_own = isinstance(message, Propose) and named.attempt == message.attempt
            if is_its_own:
                self._member.feed(Noticed(peer=sender, status="suspected"))
            else:
                self.recover(named)
            return False
        return True

    def recover(self, manifest: Manifest) -> None:
        """Look for the results of what was accepted or decided, until they are here or the round is over."""
        self._member.tasks.spawn(self._recover(manifest))

    async def _recover(self, manifest: Manifest) -> None:
        base = self._member.base
        while self._member.base == base:
            with suppress(PeerError):
                await self._parts.results(manifest)
                self._quorum.find_results()
                return
            self._quorum.lose_results(base)
            await asyncio.sleep(RECOVER_S)


MAX_MISSING = 2  # times its allowance: what a group may bring of what was leased and has not come


class Claims:
    """The claims of one branch, from `head` on, after which `charter` holds."""

    def __init__(self, head: Manifest, charter: Charter, emit: Emit) -> None:
        self._emit = emit
        self._allowed: dict[PeerId, int] = {}  # tokens; who is not in here may carry work that this peer has not seen
        self._leased: dict[PeerId, int] = {}  # tokens, by the last manifest
        self._late: frozenset[PeerId] = frozenset()  # members that it did not count
        self.restart(head, charter)

    def restart(self, head: Manifest, charter: Charter) -> None:
        """Go on from another head, before which nothing is known, unless it is the run's first."""
        self._allowed = dict.fromkeys(head.members, 0) if head.previous == GENESIS else {}
        self.follow(head, charter)

    def follow(self, manifest: Manifest, charter: Charter) -> None:
        """Take up what a manifest counted, and what it leases, in samples as long as `charter` says."""
        counted = {each.peer for each in manifest.contributions if each.legacy is None}
        self._allowed |= dict.fromkeys(counted, 0)
        for peer in (*manifest.left, *manifest.joined):
            self._allowed.pop(peer, None)
        self._leased = {}
        for lease in manifest.leases:
            tokens = lease.num_windows * charter.settings.seq_len
            self._leased[lease.peer] = self._leased.get(lease.peer, 0) + tokens
            if lease.peer in self._allowed:
                self._allowed[lease.peer] += tokens
        is_opening = not manifest.contributions
        self._late = frozenset() if is_opening else frozenset(manifest.members) - counted - set(manifest.joined)

    def believed(self, base: Base, peer: PeerId, ready: Ready) -> Ready:
        """Return what `peer` announces, cut to what it is believed."""
        if ready.legacy is not None:
            return self._of_branch(base, peer, ready)
        bound = base.unclaimed
        instead = base.charter.settings.quota_tokens if peer in base.resting else 0
        allowed = bound if base.charter.is_routed else min(self._allowed.get(peer, bound) + instead, bound)
        most = allowed if ready.group is None else self._of_group(base, peer, allowed)
        tokens = Tokens(min(ready.tokens, most))
        if tokens != ready.tokens:
            text = f"{short(peer)} claims {ready.tokens} tokens; counted as the {tokens} that were leased to it"
            self._emit(Notice(text=text))
        return msgspec.structs.replace(ready, tokens=tokens)

    def allowance(self, base: Base, peer: PeerId) -> int:
        """Return how many tokens everybody will believe `peer` for a group, even who has seen more of the past."""
        return self._of_group(base, peer, self._allowed.get(peer, self._leased.get(peer, 0)))

    def _of_group(self, base: Base, peer: PeerId, allowed: int) -> int:
        bound = base.unclaimed
        due = sum(tokens for other, tokens in self._leased.items() if other != peer and other not in self._late)
        missing = max(0, bound - allowed - due)
        return min(bound, allowed + min(missing, sum(self._leased.values()), MAX_MISSING * allowed))

    def _of_branch(self, base: Base, peer: PeerId, ready: Ready) -> Ready:
        legacy = ready.legacy
        assert legacy is not None
        tokens = legacy_tokens(base, ready)
        if tokens < legacy.tokens:
            text = f"{short(peer)} brings {legacy.tokens} tokens that a branch had counted, by its own word; the"
            self._emit(Notice(text=f"{text} proof shows {tokens}, and no more are counted"))
        legacy = msgspec.structs.replace(legacy, tokens=tokens)
        return msgspec.structs.replace(ready, tokens=tokens, legacy=legacy, proof=None)

    def is_possible(self, base: Base, peer: PeerId, message: Collect | Propose) -> bool:
        """Return whether the plan or manifest that `peer` sends claims no more than was ever leased."""
        bound = base.unclaimed
        counted = message.contributions if isinstance(message, Collect) else message.manifest.contributions
        is_each = all(0 <= contribution.tokens <= bound for contribution in counted)
        if is_each and sum(each.tokens for each in counted if each.legacy is None) <= bound:
            return True
        self._emit(Notice(text=f"{short(peer)} plans to count more tokens than were ever leased: not followed"))
        return False
