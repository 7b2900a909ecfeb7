"""What members say of how they came to what they bring, where that is audited: heard with their announcements, asked
for where one is missing, served to who lacks it.

Nobody votes for a manifest that counts a work it has not seen: whoever is drawn to audit must know what was claimed.
"""

from collections.abc import Iterable
from contextlib import suppress

from msgspec import UNSET

from weft.errors import NetError, PayloadError, PeerError, Refused, WireError
from weft.ids import Digest, PeerId, short
from weft.keys import verify
from weft.net.node import Node
from weft.sync.records.messages import Base, Counted, Manifest, Ready, payload_of
from weft.sync.records.work import Work
from weft.wire import Buffer, Signed, Verify, decode, digest_of, encode, unseal

MAX_NBYTES = 16 << 10  # of a signed work: eight segments take 2 kB
MAX_KEPT = 4096


class Works:
    """Of one peer."""

    def __init__(self, node: Node, check: Verify = verify) -> None:
        self._node = node
        self._verify = check
        self._kept: dict[Digest, tuple[Signed, Work]] = {}  # oldest first

    def hear(self, base: Base, peer: PeerId, ready: Ready) -> bool:
        """Keep what is announced; return whether it is what such an announcement has to say."""
        if ready.work is UNSET or ready.legacy is not None:
            return base.charter.audits is UNSET or ready.legacy is not None
        try:
            work = self.keep(ready.work)
        except WireError:
            return False
        is_its_own = (work.run, work.branch, work.peer) == (base.run, base.branch, peer)
        is_of_this = (
            work.payload == payload_of(ready.parts) and work.tokens == ready.tokens and work.round <= base.round
        )
        return is_its_own and is_of_this and is_in_order(work)

    def keep(self, signed: Signed) -> Work:
        """Keep a signed work.

        Raises:
            WireError: it is none.
        """
        name = digest_of(signed)
        if name in self._kept:
            return self._kept[name][1]
        if len(signed.body) > MAX_NBYTES:
            raise WireError("a work is longer than any")
        work = unseal(signed, Work, self._verify)
        if work.peer != signed.signer:
            raise WireError(f"{short(signed.signer)} has signed a work of {short(work.peer)}")
        if not self._kept:
            self._node.serve_blobs(self._lookup)
        self._kept[name] = signed, work
        while len(self._kept) > MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        return work

    def known(self, name: Digest) -> Work | None:
        found = self._kept.get(name)
        return None if found is None else found[1]

    def signed(self, name: Digest) -> Signed | None:
        found = self._kept.get(name)
        return None if found is None else found[0]

    def has(self, manifest: Manifest) -> bool:
        return all(Digest(each.work) in self._kept for each in manifest.contributions if each.work is not UNSET)

    async def find(self, manifest: Manifest, sender: PeerId) -> None:
        """Ask for the works that a manifest names and that are not here, of its sender first.

        Raises:
            PayloadError: nobody has one, or it is not of what the manifest counts.
        """
        for each in manifest.contributions:
            if each.work is UNSET:
                continue
            work = self.known(Digest(each.work)) or await self.fetch(Digest(each.work), (sender, each.peer))
            if work is None or not _is_of(manifest, each, work):
                raise PayloadError(f"nobody shows how {short(each.peer)} came to what it brings")

    async def fetch(self, name: Digest, holders: Iterable[PeerId]) -> Work | None:
        """Return a work that one of these has, or any other that is linked; None: nobody."""
        for holder in dict.fromkeys((*holders, *sorted(self._node.peers))):
            if holder != self._node.peer:
                with suppress(PeerError, NetError, Refused, WireError):
                    data = await self._node.fetch_small(holder, name, MAX_NBYTES)
                    return self.keep(decode(data, Signed))
        return None

    def _lookup(self, _peer: PeerId, wanted: Digest) -> Buffer | None:
        found = self._kept.get(wanted)
        return None if found is None else encode(found[0])


def _is_of(manifest: Manifest, counted: Counted, work: Work) -> bool:
    is_its_own = (work.run, work.branch, work.peer) == (manifest.run, manifest.branch, counted.peer)
    return is_its_own and work.payload == counted.payload and work.tokens >= counted.tokens and is_in_order(work)


def is_in_order(work: Work) -> bool:
    """Return whether a work's segments follow each other, each after another round, and all before its own."""
    rounds = [segment.round for segment in work.segments]
    return rounds == sorted(set(rounds)) and rounds[-1] + 1 == work.round and 0 < work.num_steps <= work.tokens
