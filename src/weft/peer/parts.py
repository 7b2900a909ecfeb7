"""The bytes of rounds: this peer's payload, what it merges for others, and the results it keeps.

    member's payload, part i --fetch--> owner of part i: merge --result--> everybody fetches, checks, keeps

Payload parts and results are blobs under their digests. A result counts as held once it is known to decode, so no
quorum commits what its members could not apply.

Failure:
- a contributor that cannot deliver, or delivers what is no payload: `MergeFailed` names it.
- an owner whose result is no payload: it is not held, and the next attempt gives the part to another.

It does not know the round's decisions.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from weakref import WeakValueDictionary

from weft.errors import NetError, PayloadError, PeerError, Refused
from weft.events import Emit, PayloadRejected
from weft.ids import Digest, PeerId, Round
from weft.net.node import Node
from weft.peer.chain import Chain
from weft.peer.compute import Compute
from weft.peer.pool import Pool
from weft.sync.machine import MergeDone, MergeFailed, ResultHeld
from weft.sync.messages import Collect, Contribution, Manifest
from weft.sync.method import Method
from weft.sync.reduce import EncodedPart, Merger, cut, decode_parts
from weft.wire import Buffer

# Between rounds, memory of so many fp32 vectors is kept for the next: for sums, payloads and results.
POOL_VECTORS = 3


class Parts:
    """Payload and results of one peer; results go into `chain`.

    Args:
        num: elements of the vector that is synchronised.
    """

    def __init__(self, node: Node, chain: Chain, method: Method, num: int, compute: Compute, emit: Emit) -> None:
        self._node = node
        self._chain = chain
        self._method = method
        self._num = num
        self._compute = compute
        self._emit = emit
        self._payload: dict[Digest, Buffer] = {}
        self._pool = Pool(POOL_VECTORS * 4 * num)
        self._fetching: WeakValueDictionary[Digest, asyncio.Lock] = WeakValueDictionary()  # of results
        node.serve_blobs(self._lookup)

    def cut(self, num_parts: int) -> tuple[range, ...]:
        """Return where the parts of the vector lie."""
        return cut(self._num, [1] * num_parts)

    def offer(self, parts: Sequence[EncodedPart]) -> tuple[Digest, ...]:
        """Serve a payload, in the place of the one before; return its parts' digests."""
        self._payload = {part.digest: part.encoded for part in parts}
        return tuple(part.digest for part in parts)

    async def merge(self, plan: Collect, part: int, round: Round) -> MergeDone | MergeFailed:
        """Collect the contributions to a part, merge them in ascending peer order, and serve the result."""
        num = len(self.cut(len(plan.owners))[part])
        nbytes = self._method.codec.nbytes(num)
        fetched = await asyncio.gather(*(self._contribution(each, part, nbytes) for each in plan.contributions))
        if not any(
            each.tokens for each in plan.contributions
        ):  # there is no mean; the leader waits for somebody's work
            return MergeFailed(plan=plan, part=part, missing=tuple(each.peer for each in plan.contributions))
        merger = Merger(num, self._method.codec, self._method.reply_codec, self._pool.empty)
        missing = []
        for each, data in zip(plan.contributions, fetched, strict=True):
            if data is None or not await self._add(merger, each, data, round):
                missing.append(each.peer)
        if missing:
            return MergeFailed(plan=plan, part=part, missing=tuple(missing))
        merged: EncodedPart = await self._compute.serve(merger.result)
        self._chain.keep(merged.digest, merged.encoded)
        return MergeDone(plan=plan, part=part, result=merged.digest)

    async def fetch(self, plan: Collect, part: int, result: Digest, round: Round) -> ResultHeld | None:
        """Fetch a result, from its owner or whoever contributes; None where it cannot be had or applied."""
        num, owner = len(self.cut(len(plan.owners))[part]), plan.owners[part]
        try:
            data = await self._result(result, num, [owner, *(each.peer for each in plan.contributions)])
            await self._compute.serve(lambda: self._check(data, num))
        except PayloadError as error:
            self._emit(PayloadRejected(round=round, member=owner, reason=f"its merged part {part}: {error}"))
            return None
        except PeerError:
            return None  # the leader hears of no holder here, and the next attempt tries again
        return ResultHeld(plan=plan, part=part)

    async def results(self, manifest: Manifest) -> tuple[Buffer, ...]:
        """Return the results of a committed round, fetched from whoever holds them.

        Raises:
            PeerError: nobody that can be reached has one of them any more.
        """
        parts = self.cut(len(manifest.parts))
        others = [*manifest.members, *(each.peer for each in manifest.contributions), *sorted(self._node.peers)]
        found = []
        for here, part in zip(parts, manifest.parts, strict=True):
            found.append(await self._result(part.result, len(here), [part.owner, *others]))
        return tuple(found)

    async def _add(self, merger: Merger, contribution: Contribution, data: Buffer, round: Round) -> bool:
        try:
            await self._compute.serve(lambda: merger.add(contribution.tokens, data))
        except PayloadError as error:
            self._emit(PayloadRejected(round=round, member=contribution.peer, reason=str(error)))
            return False
        return True

    def _check(self, result: Buffer, num: int) -> None:
        decode_parts(self._method.reply_codec, [result], [range(num)], self._pool.empty(num))

    async def _contribution(self, contribution: Contribution, part: int, nbytes: int) -> Buffer | None:
        wanted = contribution.parts[part]
        mine = self._payload.get(wanted)
        if mine is not None:
            return mine
        with suppress(PeerError, NetError, Refused):
            return await self._node.fetch_any([contribution.peer], wanted, nbytes, self._pool.block)
        return None

    async def _result(self, wanted: Digest, num: int, holders: Sequence[PeerId]) -> Buffer:
        known = self._chain.result(wanted)
        if known is not None:
            return known
        # Where a quorum commits before this member holds the result, its round and its outer step both want it.
        async with self._fetching.setdefault(wanted, asyncio.Lock()):
            known = self._chain.result(wanted)
            if known is not None:
                return known
            # Only who is linked: dialling the dead takes seconds each, and links to the living are kept up.
            others = [peer for peer in dict.fromkeys(holders) if self._node.is_linked(peer)]
            nbytes = self._method.reply_codec.nbytes(num)
            data = await self._node.fetch_any(others, wanted, nbytes, self._pool.block)
            self._chain.keep(wanted, data)
            return data

    def _lookup(self, _peer: PeerId, wanted: Digest) -> Buffer | None:
        mine = self._payload.get(wanted)  # may be empty, where a part is
        return self._chain.result(wanted) if mine is None else mine
