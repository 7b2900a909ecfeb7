"""What members say of how they came to what they bring, where that is audited: heard with their announcements, asked
for where one is missing, served to who lacks it.

Nobody votes for a manifest that counts a work it has not seen: whoever is drawn to audit must know what was claimed.
Nor for one that counts training steps again: what a peer brings begins where the last round that counted it ended, or
later. A name alone would not tell, for the same words can be signed in many ways, and so have many names.
"""

from collections.abc import Iterable
from contextlib import suppress

from msgspec import UNSET

from weft.errors import NetError, PayloadError, PeerError, Refused, WireError
from weft.ids import BranchId, Digest, PeerId, Round, short
from weft.keys import verify
from weft.net.node import Node
from weft.peer.chain import Chain
from weft.sync.records.messages import Base, Counted, Manifest, Ready, own_work, payload_of, works_in
from weft.sync.records.work import Work
from weft.wire import Buffer, Signed, Verify, decode, digest_of, encode, unseal

MAX_NBYTES = 16 << 10  # of a signed work: eight segments take 2 kB
MAX_KEPT = 64  # of one peer: a round counts one
MAX_COUNTED = 4096
MAX_LAST = 1024  # peers and branches: four times as many as members
MAX_TRAVELLING = 64  # rounds for which a payload may be on its way


class Works:
    """Of one peer, on one chain."""

    def __init__(self, node: Node, chain: Chain, check: Verify = verify) -> None:
        self._node = node
        self._chain = chain
        self._verify = check
        self._kept: dict[Digest, tuple[Signed, Work]] = {}  # oldest first
        self._counted: dict[Digest, None] = {}  # that rounds have counted, oldest first
        self._last = dict[tuple[BranchId, PeerId], Round]()  # that has counted own work of a peer, on a branch
        self._is_serving = False

    def follow(self, manifest: Manifest) -> None:
        """Take up what a round has counted: it counts no work again."""
        self._counted |= {Digest(each.work): None for each in manifest.contributions if each.work}
        for forgotten in list(self._counted)[:-MAX_COUNTED]:
            del self._counted[forgotten]
        for each in manifest.contributions:
            if own_work(manifest, PeerId(each.peer)) is not None:
                self._last.pop((manifest.branch, PeerId(each.peer)), None)
                self._last[manifest.branch, PeerId(each.peer)] = manifest.round
        for old in list(self._last)[:-MAX_LAST]:
            del self._last[old]

    def restart(self) -> None:
        """Go on from another head: what this peer has followed up to now may have been something else."""
        self._last.clear()

    def hear(self, base: Base, peer: PeerId, ready: Ready) -> bool:
        """Keep what is announced; return whether it is what such an announcement has to say."""
        if base.charter.audits is UNSET:
            return ready.work is UNSET
        if ready.work is UNSET or ready.legacy is not None:
            return False
        try:
            work = self._opened(ready.work)
        except WireError:
            return False
        is_of_this = (work.peer, work.payload, work.tokens) == (peer, payload_of(ready.parts), ready.tokens)
        is_right = is_of_this and self._may_count(base, digest_of(ready.work), work)
        if is_right:
            self.keep(ready.work)
        return is_right

    def _may_count(self, base: Base, name: Digest, work: Work) -> bool:
        """Return whether a round may count a work, as far as that follows from what all know."""
        if (work.run, work.branch) != (base.run, base.branch) or name in self._counted:
            return False
        if not is_in_order(work) or not 0 <= base.round - work.round <= MAX_TRAVELLING:
            return False
        if work.segments[0].round < self._last.get((base.branch, PeerId(work.peer)), 0):
            return False
        return all(self._chain.may_be(Round(each.round), Digest(each.head)) for each in work.segments)

    def _opened(self, signed: Signed) -> Work:
        """
        Raises:
            WireError: it is no work, or another's.
        """
        if len(signed.body) > MAX_NBYTES:
            raise WireError("a work is longer than any")
        work = unseal(signed, Work, self._verify)
        if work.peer != signed.signer:
            raise WireError(f"{short(signed.signer)} has signed a work of {short(work.peer)}")
        return work

    def keep(self, signed: Signed) -> Work:
        """Keep a signed work, as one of its signer's newest.

        Raises:
            WireError: it is none.
        """
        name = digest_of(signed)
        if name in self._kept:
            return self._kept[name][1]
        work = self._opened(signed)
        if not self._is_serving:
            self._is_serving = True
            self._node.serve_blobs(self._lookup)
        self._kept[name] = signed, work
        mine = [each for each, (letter, _) in self._kept.items() if letter.signer == signed.signer]
        for forgotten in mine[:-MAX_KEPT]:
            del self._kept[forgotten]
        return work

    def known(self, name: Digest) -> Work | None:
        found = self._kept.get(name)
        return None if found is None else found[1]

    def signed(self, name: Digest) -> Signed | None:
        """Return a work as its worker has signed it; None: it is not here."""
        found = self._kept.get(name)
        return None if found is None else found[0]

    def has(self, manifest: Manifest) -> bool:
        return all(name in self._kept for _, name in works_in(manifest))

    async def find(self, manifest: Manifest, sender: PeerId) -> None:
        """Ask for the works that a manifest names and that are not here, of its sender first.

        Raises:
            PayloadError: nobody has one, or it is not of what the manifest counts.
        """
        counted = {each.peer: each for each in manifest.contributions}
        for peer, name in works_in(manifest):
            work = self.known(name) or await self.fetch(name, (sender, peer))
            if work is None or not self._is_of(peer, name, work, counted.get(peer)):
                raise PayloadError(f"nobody shows how {short(peer)} came to what it brings")

    async def fetch(self, name: Digest, holders: Iterable[PeerId]) -> Work | None:
        """Return a work that one of these has, or any other that is linked; None: nobody."""
        for holder in dict.fromkeys((*holders, *sorted(self._node.peers))):
            if holder != self._node.peer:
                with suppress(PeerError, NetError, Refused, WireError):
                    data = await self._node.fetch_small(holder, name, MAX_NBYTES)
                    return self.keep(decode(data, Signed))
        return None

    def _is_of(self, peer: PeerId, name: Digest, work: Work, counted: Counted | None) -> bool:
        """
        Args:
            counted: as the manifest counts it; None: it only names it.
        """
        is_right = counted is None or (work.payload == counted.payload and work.tokens >= counted.tokens)
        return is_right and work.peer == peer and self._may_count(self._chain.base, name, work)

    def _lookup(self, _peer: PeerId, wanted: Digest) -> Buffer | None:
        found = self._kept.get(wanted)
        return None if found is None else encode(found[0])


def is_in_order(work: Work) -> bool:
    """Return whether a work's segments follow each other from round to round, to the one before its own."""
    first = work.segments[0].round
    rounds = [segment.round for segment in work.segments]
    is_row = rounds == list(range(first, first + len(rounds))) and rounds[-1] + 1 == work.round
    return is_row and 0 < work.num_steps <= work.tokens
