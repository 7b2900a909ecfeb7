"""What a member may claim to have trained: no more than was leased to it since it was last counted.

    allowance = tokens of all leases since the last manifest that counted the member, as far as this peer knows them
    bound     = all tokens that were ever leased on the branch and not counted, whoever held them

A member that missed rounds carries several leases, so the allowance follows the manifests. What a leader hears is cut
to the allowance. What was leased to a member that has left and was not counted, wards of its group may bring through
another sponsor: who announces for a group may claim that, too. Of another's plan the bound alone is asked, which is the
same for all members, so no two of them disagree whether a plan stands. (docs/threat_model.md: a claim within the lease
says nothing of honest work.)

A legacy weighs no more than the median of the others, whatever it claims (`weft.sync.legacy`). Its tokens are the
difference between two manifests: the head of the branch that was given up, and the last common one. A head that no
member of the last common one has signed counts as one lease.

It does not know payloads, nor whether the work was done.
"""

import msgspec

from weft.errors import WireError
from weft.events import Emit, Notice
from weft.ids import PeerId, Tokens, short
from weft.keys import verify
from weft.peer.messages import GENESIS
from weft.sync.charter import Charter
from weft.sync.legacy import history
from weft.sync.lineage import History, parting
from weft.sync.messages import Accept, Base, Certificate, Collect, Manifest, Propose, Ready, RoundNote
from weft.wire import digest_of, unseal


class Claims:
    """The claims of one branch, from `head` on, after which `charter` holds."""

    def __init__(self, head: Manifest, charter: Charter, emit: Emit) -> None:
        self._emit = emit
        self._allowed: dict[PeerId, int] = {}  # tokens; who is not in here may carry work that this peer has not seen
        self._left = 0  # tokens leased to members that have left, and not counted
        self.restart(head, charter)

    def restart(self, head: Manifest, charter: Charter) -> None:
        """Go on from another head, before which nothing is known, unless it is the run's first."""
        self._allowed = dict.fromkeys(head.members, 0) if head.previous == GENESIS else {}
        self._left = 0
        self.follow(head, charter)

    def follow(self, manifest: Manifest, charter: Charter) -> None:
        """Take up what a manifest counted, and what it leases, in samples as long as `charter` says."""
        for contribution in manifest.contributions:
            if contribution.legacy is not None:
                continue
            allowed = self._allowed.get(contribution.peer, contribution.tokens)
            self._left -= min(max(contribution.tokens - allowed, 0), self._left)
            self._allowed[contribution.peer] = 0
        self._left += sum(self._allowed.pop(peer, 0) for peer in manifest.left)
        for peer in manifest.joined:
            self._allowed.pop(peer, None)
        for lease in manifest.leases:
            if lease.peer in self._allowed:
                self._allowed[lease.peer] += (lease.stop - lease.start) * charter.settings.seq_len

    def believed(self, base: Base, peer: PeerId, ready: Ready) -> Ready:
        """Return what `peer` announces, cut to what it is believed."""
        if ready.legacy is not None:
            return self._of_branch(base, peer, ready)
        bound = self._bound(base)
        allowed = self._allowed.get(peer, bound) + (0 if ready.group is None else self._left)
        tokens = Tokens(max(0, min(ready.tokens, bound, allowed)))
        if tokens != ready.tokens:
            text = f"{short(peer)} claims {ready.tokens} tokens; counted as the {tokens} that were leased to it"
            self._emit(Notice(text=text))
        return msgspec.structs.replace(ready, tokens=tokens)

    def _of_branch(self, base: Base, peer: PeerId, ready: Ready) -> Ready:
        legacy = ready.legacy
        assert legacy is not None
        tokens = legacy_tokens(base, ready)
        if tokens < legacy.tokens:
            text = (
                f"{short(peer)} brings what a branch had counted and claims {legacy.tokens} tokens, of which {tokens}"
            )
            self._emit(Notice(text=f"{text} are shown"))
        legacy = msgspec.structs.replace(legacy, tokens=tokens)
        return msgspec.structs.replace(ready, tokens=tokens, legacy=legacy, proof=None)

    def is_possible(self, base: Base, peer: PeerId, message: Collect | Propose) -> bool:
        """Return whether the plan or manifest that `peer` sends claims no more than was ever leased."""
        bound = self._bound(base)
        counted = message.contributions if isinstance(message, Collect) else message.manifest.contributions
        if all(0 <= contribution.tokens <= bound for contribution in counted):
            return True
        self._emit(Notice(text=f"{short(peer)} plans to count more tokens than were ever leased: not followed"))
        return False

    def _bound(self, base: Base) -> int:
        return base.charter.leased_tokens(base.cursor) - base.committed_tokens


def legacy_tokens(base: Base, ready: Ready) -> Tokens:
    """Return how many tokens of a branch that was given up `ready` shows."""
    legacy, proof = ready.legacy, ready.proof
    if legacy is None or proof is None or digest_of(proof.charter) != proof.certificate.manifest.charter:
        return Tokens(0)
    head = proof.certificate.manifest
    found = parting(
        history(head, proof.charter), History(base.branch, base.charter.forks, base.round, base.charter.taken_in)
    )
    if head.run != base.run or found is None or found.stretches != legacy.stretches:
        return Tokens(0)
    tokens = max(0, min(legacy.tokens, head.committed_tokens - found.fork.committed_tokens))
    if _signers(proof.certificate).isdisjoint(found.fork.members):
        tokens = min(tokens, base.quota * base.charter.settings.seq_len)
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
