"""What a member may claim to have trained: no more than was leased to it since it was last counted.

    allowance = tokens of all leases since the last manifest that counted the member, as far as this peer knows them
    bound     = all tokens that were ever leased on the branch and not counted, whoever held them

A member that missed rounds carries several leases, so the allowance follows the manifests. What a leader hears is cut
to the allowance. Of another's plan the bound alone is asked, which is the same for all members, so no two of them
disagree whether a plan stands. (docs/threat_model.md: a claim within the lease says nothing of honest work.)

It does not know payloads, nor whether the work was done.
"""

from collections.abc import Iterable

from weft.ids import PeerId, Tokens
from weft.peer.config import GENESIS
from weft.sync.messages import Base, Contribution, Manifest


class Claims:
    """The claims of one branch, from `head` on.

    Args:
        seq_len: tokens of a sample.
    """

    def __init__(self, head: Manifest, seq_len: int) -> None:
        self._seq_len = seq_len
        self._allowed: dict[PeerId, int] = {}  # tokens; who is not in here may carry work that this peer has not seen
        self.restart(head)

    def restart(self, head: Manifest) -> None:
        """Go on from another head, before which nothing is known, unless it is the run's first."""
        self._allowed = dict.fromkeys(head.members, 0) if head.previous == GENESIS else {}
        self.follow(head)

    def follow(self, manifest: Manifest) -> None:
        """Take up what a manifest counted, and what it leases."""
        for contribution in manifest.contributions:
            self._allowed[contribution.peer] = 0
        for peer in manifest.joined:
            self._allowed.pop(peer, None)
        for lease in manifest.leases:
            if lease.peer in self._allowed:
                self._allowed[lease.peer] += (lease.stop - lease.start) * self._seq_len

    def cut(self, base: Base, peer: PeerId, tokens: int) -> Tokens:
        """Return what `peer` is believed of a claim of `tokens`."""
        bound = self._bound(base)
        return Tokens(max(0, min(tokens, bound, self._allowed.get(peer, bound))))

    def are_possible(self, base: Base, contributions: Iterable[Contribution]) -> bool:
        """Return whether a plan or manifest claims no more than was ever leased."""
        bound = self._bound(base)
        return all(0 <= contribution.tokens <= bound for contribution in contributions)

    def _bound(self, base: Base) -> int:
        return base.cursor * self._seq_len - base.committed_tokens
