"""The records of groups that this peer has heard of: who is counted through whom, and who trains on what.

Electors hear a record whole with the announcement that names it, leaves from their aggregator. Who lacks one asks
others for it by its digest; each serves what it has.

Failure:
- a record that a manifest names cannot be had: what this peer offered to that aggregator is taken for counted. It is
  lost then where it was not; it is never counted twice.
"""

import asyncio
from collections.abc import Iterable
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from weft.data.assign import Lease
from weft.errors import NetError, PeerError, Refused, WireError
from weft.events import Notice
from weft.ids import Digest, PeerId, short
from weft.peer.context import Context
from weft.peer.state.carry import Carry
from weft.sync.records.charter import Charter
from weft.sync.records.messages import GroupClaim, GroupRecord, Manifest, claims_in, own_work
from weft.sync.round.groups import slices, tokens_of
from weft.wire import Buffer, decode, digest_of, encode

MAX_KEPT = 2048  # records: those of 64 rounds of the largest electorate
MAX_NBYTES = 64 << 10  # of one, whose 64 stakes take 4 KiB
AGAIN_S = (1.0, 2.0, 4.0, 8.0)  # between two looks for one that nobody delivered


class GroupRecords:
    """Of one peer, which offers what is in `carry`."""

    def __init__(self, context: Context, carry: Carry) -> None:
        self._node = context.node
        self._carry = carry
        self._emit = context.emit
        self._kept: dict[Digest, GroupRecord] = {}

    def keep(self, record: GroupRecord) -> Digest:
        """Keep a record; the oldest makes room."""
        name = digest_of(record)
        if name not in self._kept:
            if not self._kept:
                self._node.serve_blobs(self._lookup)
            while len(self._kept) >= MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[name] = record
        return name

    def read(self, data: Buffer) -> None:
        """Keep a record that was fetched, if it is one."""
        with suppress(WireError):
            self.keep(decode(data, GroupRecord))

    def known(self, name: Digest) -> GroupRecord | None:
        return self._kept.get(name)

    def leased(self, manifest: Manifest, charter: Charter) -> NDArray[np.int64]:
        """Return the positions that this peer trains on next, in order: of its own lease, or of its aggregator's.

        An aggregator that has lost its record trains on no more than is surely its own.

        Args:
            charter: what holds after `manifest`.
        """
        me, claims = self._node.peer, claims_in(manifest)
        if me in manifest.members and me not in claims:
            new = lease_of(manifest.leases, me)
            is_at_work = not len(new) and charter.settings.method.wait == "ready"
            return lease_of(manifest.uncounted, me) if is_at_work else new
        if me in claims and claims[me].record not in self._kept:
            settings = charter.settings
            return lease_of(manifest.leases, me)[: settings.quota if charter.has_even_leases else settings.unit]
        for aggregator, claim in claims.items():
            record = self._kept.get(claim.record)
            whole = lease_of(manifest.leases, aggregator)
            mine = None if record is None else slices(len(whole), record, charter).get(me)
            if mine is not None:
                return whole[mine.start : mine.stop]
        return lease_of(manifest.leases, None)

    async def counts(self, manifest: Manifest) -> bool:
        """Return whether `manifest` counts what this peer offered, itself or through an aggregator; in doubt it does.

        What an earlier process of this peer offered, it may have offered to any.
        """
        me, claims = self._node.peer, claims_in(manifest)
        mine = own_work(manifest, me)
        if mine is not None and mine.group is None:
            return True
        suspects = set(claims) if self._carry.is_restored else {me, self._carry.offered_to or me}
        for aggregator in sorted(suspects & claims.keys()):
            record = await self._find(manifest, aggregator, claims[aggregator])
            if record is None or tokens_of(record, me):
                return True
        return False

    async def _find(self, manifest: Manifest, aggregator: PeerId, claim: GroupClaim) -> GroupRecord | None:
        holders = list(dict.fromkeys([aggregator, *self._node.peers, *manifest.members]))
        for wait_s in (*AGAIN_S, None):
            for holder in holders:
                if (record := self._kept.get(claim.record)) is not None:
                    return record
                if holder == self._node.peer:
                    continue
                with suppress(PeerError, NetError, Refused, WireError):
                    data = await self._node.fetch_small(holder, claim.record, MAX_NBYTES)
                    self.keep(decode(data, GroupRecord))
            if wait_s is not None:
                await asyncio.sleep(wait_s)
        text = f"nobody can say whose work {short(aggregator)} counted in round {manifest.round}: this peer takes "
        text += "its own as counted. If it was not, it is lost; no work is ever counted twice"
        self._emit(Notice(text=text))
        return None

    def _lookup(self, _peer: PeerId, wanted: Digest) -> Buffer | None:
        record = self._kept.get(wanted)
        return None if record is None else encode(record)


def lease_of(leases: Iterable[Lease], peer: PeerId | None) -> NDArray[np.int64]:
    """Return the positions that `peer` is to train on by `leases`, in order."""
    found = [lease.positions() for lease in leases if lease.peer == peer]
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)
