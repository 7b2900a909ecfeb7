"""What a member may claim to have trained: no more than was leased to it since it was last counted.

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

Who rests may have trained in the place of one who was drawn and is away (`weft.peer.loop.lease`): it is allowed one
lease more in that round, within the bound.

In a stage of a pipeline it is allowed what is routed to it: the bound is a multiple of what a round leases.

A legacy weighs no more than the median of the others, whatever it claims (`weft.sync.governance.enact`). Its tokens
are the difference between two manifests: the head of the branch that was given up, and the last common one. A head that
no member of the last common one has signed counts as one lease.
"""

import msgspec

from weft.errors import WireError
from weft.events import Emit, Notice
from weft.ids import PeerId, Tokens, short
from weft.keys import verify
from weft.peer.messages import GENESIS
from weft.sync.governance.enact import history, history_before
from weft.sync.records.ancestry import fork_point
from weft.sync.records.charter import Charter
from weft.sync.records.messages import Accept, Base, Certificate, Collect, Manifest, Propose, Ready, RoundNote
from weft.wire import digest_of, unseal

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


def legacy_tokens(base: Base, ready: Ready) -> Tokens:
    """Return how many tokens of a branch that was given up `ready` shows."""
    legacy, proof = ready.legacy, ready.proof
    if legacy is None or proof is None or digest_of(proof.charter) != proof.certificate.manifest.charter:
        return Tokens(0)
    head = proof.certificate.manifest
    found = fork_point(history(head, proof.charter), history_before(base))
    if head.run != base.run or found is None or found.stretches != legacy.stretches:
        return Tokens(0)
    tokens = max(0, min(legacy.tokens, head.committed_tokens - found.fork.committed_tokens))
    if _signers(proof.certificate).isdisjoint(found.fork.members):
        tokens = min(tokens, base.charter.settings.quota_tokens)
    return Tokens(tokens)


def _signers(certificate: Certificate) -> set[PeerId]:
    """Return who has signed that it accepts the manifest."""
    manifest, signers = certificate.manifest, set[PeerId]()
    wanted = Accept(attempt=certificate.attempt, manifest=digest_of(manifest))
    for signed in certificate.votes:
        try:
            note = unseal(signed, RoundNote, verify)
        except WireError:
            continue
        if (note.branch, note.round, note.message) == (manifest.branch, manifest.round, wanted):
            signers.add(signed.signer)
    return signers
