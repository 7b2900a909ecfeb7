"""What this peer makes of what all bring to a round: its part of the mean, or what its neighbours brought.

    round                       this peer collects              and makes
    reduce                      its part of every payload       that part of the mean, for all
    reduce, merged by all       every payload                   its part for all, and the others' for itself
    gossip                      its neighbours' payloads        nothing that others need

Where all merge for themselves no result travels: each owner names what it found, and every other member finds the same
bytes or refuses them. So a lying owner is known by all.

Failure:
- a contributor that cannot deliver, delivers what is no payload, or delivers too slowly: `MergeFailed` names it, and
  what it trained stays in its carry.
- an owner whose result is another than was found here: it is not held, and counts as suspected in this round.

It does not know how bytes travel, nor the round's decisions.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from weft.codec.codec import Codec
from weft.errors import PayloadError
from weft.events import PayloadRejected
from weft.ids import Digest, PeerId, Round
from weft.peer.chain import Chain
from weft.peer.parts import Parts, Wanted
from weft.peer.place import Place
from weft.sync.coding import codec_in, coding_in, payload_codec_in
from weft.sync.groups import counted, payload_of
from weft.sync.machine import MergeDone, MergeFailed, Noticed, ResultHeld
from weft.sync.messages import Base, Collect, Contribution, Manifest
from weft.sync.neighbours import NOTHING, is_gossip, taken, takes_from
from weft.sync.reduce import EncodedPart, Merger
from weft.sync.replies import Replies
from weft.sync.scope import Scope
from weft.sync.weights import awaited_weight, weight_of
from weft.wire import Buffer

_Collected = tuple[Contribution, Buffer | None]  # None: it cannot be had


@dataclass(frozen=True)
class _Failed:
    """What contributors a merge lacks."""

    missing: tuple[PeerId, ...]


class Merging:
    """Of one peer.

    Args:
        scope: tells which numbers a round synchronises.
    """

    def __init__(self, place: Place, chain: Chain, parts: Parts, scope: Scope) -> None:
        self._node = place.node
        self._compute = place.compute
        self._emit = place.emit
        self._chain = chain
        self._parts = parts
        self._replies = Replies(scope)
        self._taken: dict[tuple[Round, Digest], Buffer] = {}  # by the digest of all its parts
        self.on_added: Callable[[Round, Contribution, float], None] = lambda _round, _contribution, _length: None

    async def merge(self, plan: Collect, part: int, here: range, round: Round) -> MergeDone | MergeFailed:
        """Merge this peer's part of a plan, and serve the result.

        In a gossip round it takes what its neighbours brought, whole, and there is nothing to serve.

        Args:
            here: the elements of the part.
        """
        base = self._chain.base
        if base.round == round and is_gossip(base):
            found = await self._take(plan, part, base)
        else:
            found = await self._merged(plan, await self._collected(plan, part, len(here), round), here, round)
        if isinstance(found, _Failed):
            return MergeFailed(plan=plan, part=part, missing=found.missing)
        await self._parts.keep(round, found.digest, found.encoded)
        return MergeDone(plan=plan, part=part, result=found.digest)

    async def find(self, plan: Collect, wanted: Wanted, here: range) -> ResultHeld | Noticed | None:
        """Find the result of another's part, where all merge for themselves.

        Returns:
            None: they do not, or not all that was brought can be had; the result may, then.
        """
        round, owner = wanted.round, plan.owners[wanted.part]
        if not self._chain.choices_in(round).is_merged_by_all or is_gossip(self._chain.base):
            return None
        collected = await self._collected(plan, wanted.part, len(here), round)
        async with self._parts.alone(wanted.result):  # who makes the outer step waits, and fetches nothing
            found = await self._merged(plan, collected, here, round)
            if isinstance(found, _Failed):
                return None
            if found.digest == wanted.result:
                await self._parts.keep(round, found.digest, found.encoded)
                return ResultHeld(plan=plan, part=wanted.part)
        reason = f"its merged part {wanted.part} is not the mean of what it names"
        self._emit(PayloadRejected(round=round, member=owner, reason=reason))
        return Noticed(peer=owner, status="suspected")

    def settle(self, manifest: Manifest) -> None:
        """Keep what was left of the results that a round has counted."""
        self._replies.settle(manifest.round, [part.result for part in manifest.parts])

    def taken(
        self, base: Base, manifest: Manifest, announced: Mapping[PeerId, tuple[Digest, ...]]
    ) -> dict[PeerId, Buffer | None]:
        """Return what a manifest counts of this peer's neighbours in a gossip round; None: it is not here.

        Args:
            base: of the round that the manifest decides.
            announced: parts, as far as they were heard of: who is not counted may have fetched them all the same.
        """
        neighbours, found = takes_from(base, self._node.peer), dict[PeerId, Buffer | None]()
        for each in manifest.contributions:
            if each.peer in neighbours:
                data = self._taken.get((manifest.round, each.payload))
                parts = announced.get(each.peer, ())
                if data is None and payload_of(parts) == each.payload:
                    data = self._parts.gathered(parts)
                found[each.peer] = data
        return found

    async def _collected(self, plan: Collect, part: int, num: int, round: Round) -> list[_Collected]:
        fetch = self._parts.contribution
        fetched = await asyncio.gather(*(fetch(each, part, num, round) for each in plan.contributions))
        return list(zip(plan.contributions, fetched, strict=True))

    async def _merged(
        self, plan: Collect, collected: Sequence[_Collected], here: range, round: Round
    ) -> EncodedPart | _Failed:
        """Merge what was brought to a part in ascending peer order, legacies last."""
        if not any(each.tokens for each in plan.contributions):  # no mean; no honest leader plans this
            return _Failed(tuple(each.peer for each in plan.contributions))
        choices, head, base = self._chain.choices_in(round), self._chain.head, self._chain.base
        awaited = awaited_weight(self._chain.charter_in(round), plan.awaited, head.leases, base.uncounted)
        has_legacies = any(each.legacy is not None for each in plan.contributions)
        merger = Merger(len(here), coding_in(choices, round), awaited, self._parts.pool.empty, has_legacies)
        missing = []
        for each, data in sorted(collected, key=lambda each: each[0].legacy is not None):  # measured against the others
            if data is None or not await self._add(merger, each, data, round):
                missing.append(each.peer)
        if missing:
            return _Failed(tuple(missing))

        def reply() -> EncodedPart:
            found = self._replies.encode(merger.merged(), here, round, choices)
            return EncodedPart(encoded=self._parts.pool.moved(found.encoded), digest=found.digest)

        return await self._compute.serve(reply)

    async def _take(self, plan: Collect, part: int, base: Base) -> EncodedPart | _Failed:
        me, round = self._node.peer, base.round
        wanted = taken(base, plan, me) if base.electorate[part] == me else ()
        self._taken = {key: data for key, data in self._taken.items() if key[0] == round}
        fetched = await asyncio.gather(*(self._whole(each, part, base) for each in wanted))
        if missing := [each.peer for each, data in zip(wanted, fetched, strict=True) if data is None]:
            return _Failed(tuple(missing))
        return EncodedPart(encoded=b"", digest=NOTHING)

    async def _whole(self, contribution: Contribution, part: int, base: Base) -> Buffer | None:
        """Return a neighbour's payload, from it or whoever has it, once it decodes; None: it cannot be had."""
        num, codec = self._parts.nums(base, contribution.peer)[part], codec_in(base.charter.settings.method, base.round)
        data = await self._parts.contribution(contribution, part, num, base.round)
        if data is None:
            return None
        try:
            await self._compute.serve(lambda: self._parts.check(codec, data, num))
        except PayloadError as error:
            self._emit(PayloadRejected(round=base.round, member=contribution.peer, reason=str(error)))
            return None
        self._taken[base.round, counted(contribution).payload] = data
        return data

    async def _add(self, merger: Merger, contribution: Contribution, data: Buffer, round: Round) -> bool:
        try:
            weight, legacy = weight_of(self._chain.charter_in(round), contribution), contribution.legacy
            codec = payload_codec_in(self._chain.choices_in(round), round, contribution)
            if legacy is None:
                length = await self._compute.serve(lambda: _add(merger, weight, data, codec))
                self.on_added(round, contribution, length)
            else:
                await self._compute.serve(lambda: merger.add_legacy(weight, data, legacy.num_rounds, codec))
        except PayloadError as error:
            self._emit(PayloadRejected(round=round, member=contribution.peer, reason=str(error)))
            return False
        return True


def _add(merger: Merger, weight: int, data: Buffer, codec: Codec) -> float:
    """Add a contribution to a part; return how long it is there, to a few digits."""
    merger.add(weight, data, codec)
    return float(torch.linalg.vector_norm(merger.decoded))
