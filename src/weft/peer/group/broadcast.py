"""What was decided, on its way through a group: no peer sends it more than twice.

    aggregator ── HandOn ──► every leaf             the certificate's digest, and from whom to fetch it
    leaf ── fetch ──► parent, or the aggregator     the certificate, the group's record, then the results

The parents make a tree under the aggregator. All leaves ask at once, and who is asked for what it is itself about to
get lets the asker wait (`Node.expect`), so parts of results run down the tree one behind the other.

Failure:
- a parent dies, or does not get it either: the aggregator delivers.
- the aggregator dies when it has told: what is below who has it gets it from there; others find the decision like
  anybody who is behind (`Entrance.catch_up`).
- a parent delivers something else: it has another digest, and was never fetched.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from weft.errors import NetError, PeerError, Refused, WireError
from weft.ids import Digest, PeerId
from weft.net.blobs.blobs import StillComing
from weft.peer.context import Context
from weft.peer.group.leaf import Leaf
from weft.peer.group.records import MAX_NBYTES, GroupRecords
from weft.peer.messages import Decision, HandOn
from weft.peer.round.driver import RoundDriver
from weft.sync.records.messages import Certificate, claims_in
from weft.sync.round.groups import parents
from weft.tasks import Tasks
from weft.wire import MAX_RECORD_NBYTES, Buffer, decode, digest, encode

NUM_KEPT = 2  # rounds whose certificates are served
SOURCE_S = 8.0  # for a parent to deliver what is small: it may wait for its own, some links further up


class GroupBroadcast:
    """Of one peer, as an aggregator and as a leaf."""

    def __init__(self, context: Context, rounds: RoundDriver, records: GroupRecords, leaf: Leaf, tasks: Tasks) -> None:
        self._node = context.node
        self._rounds = rounds
        self._records = records
        self._leaf = leaf
        self._tasks = tasks
        self._kept: dict[Digest, bytes] = {}
        self._taking: Digest | None = None
        context.node.on_note(HandOn, self._on_hand_on)
        context.node.serve_blobs(self._lookup)

    async def tell(self, certificate: Certificate, leaves: Sequence[PeerId]) -> None:
        """Aggregator: tell leaves of a decision, once its results can be had from here.

        Args:
            leaves: those first that should hand it on.
        """
        with suppress(PeerError):
            await self._rounds.parts.results(certificate.manifest)
        name = self._keep(encode(certificate))
        for leaf, parent in parents(self._node.peer, leaves).items():
            self._node.post(leaf, HandOn(round=certificate.manifest.round, certificate=name, source=parent))

    async def _on_hand_on(self, peer: PeerId, note: HandOn) -> None:
        is_new = note.round == self._rounds.chain.base.round and note.certificate != self._taking
        if peer == self._leaf.aggregator and is_new:
            self._taking = note.certificate
            self._tasks.spawn(self._take(peer, note))

    async def _take(self, aggregator: PeerId, note: HandOn) -> None:
        """Leaf: fetch what was decided, and go on from it."""
        with self._node.expect(note.certificate):
            parent, data = await self._from((note.source, aggregator), note.certificate, MAX_RECORD_NBYTES)
            if data is not None:
                self._keep(data)
        if data is None:
            return  # others tell that they are further, and the chain is fetched
        try:
            certificate = decode(data, Certificate)
        except WireError:
            return
        claim = claims_in(certificate.manifest).get(aggregator)
        if claim is not None and self._records.known(claim.record) is None:
            with self._node.expect(claim.record):
                _, record = await self._from((parent, aggregator), claim.record, MAX_NBYTES)
                if record is not None:
                    self._records.read(record)
        self._leaf.take_from(parent)
        self._rounds.hear(aggregator, Decision(certificate=certificate))

    async def _from(self, holders: Sequence[PeerId], wanted: Digest, most: int) -> tuple[PeerId, bytes | None]:
        """Return who delivered a blob, and the blob."""
        for holder in dict.fromkeys(holders):
            with suppress(PeerError, NetError, Refused, TimeoutError):
                async with asyncio.timeout(SOURCE_S):
                    while True:
                        with suppress(StillComing):
                            return holder, await self._node.fetch_small(holder, wanted, most)
        return holders[-1], None

    def _keep(self, certificate: bytes) -> Digest:
        name = digest(certificate)
        self._kept[name] = certificate
        while len(self._kept) > NUM_KEPT:
            del self._kept[next(iter(self._kept))]
        return name

    def _lookup(self, _peer: PeerId, wanted: Digest) -> Buffer | None:
        return self._kept.get(wanted)
