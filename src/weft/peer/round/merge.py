"""Makes of what all bring to a round this peer's part of the mean, or takes what its neighbours brought.

    round                       this peer collects              and makes
    reduce                      its part of every payload       that part of the mean, for all
    reduce, merged by all       every payload                   its part for all, and the others' for itself
    gossip                      its neighbours' payloads        nothing that others need

Where all merge for themselves results do not travel among them: each owner names what it found, and every member that
has the payloads finds the same bytes, or neither holds nor votes for what was named.

What is announced is fetched before there is a plan: see `gather`.

Failure:
- a contributor that cannot deliver, delivers what is no payload, or delivers too slowly: `MergeFailed` names it, and
  what it trained stays in its carry.
- an owner names another result than was found here, or one of what is no payload: it is not held, and counts as
  suspected in this round.
- what is to be taken out of the mean again cannot be had: likewise, of who brought it.
- a payload is not here when its mean is named: the result is fetched, and believed.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from weft.codec.codec import Codec
from weft.data.assign import Lease
from weft.errors import PayloadError
from weft.events import PayloadRejected
from weft.ids import Digest, PeerId, Round
from weft.peer.chain import Chain
from weft.peer.context import Context
from weft.peer.round.gather import Gather
from weft.peer.round.payloads import Payloads, Wanted, serve
from weft.sync.merge import dense, reduce
from weft.sync.merge.counter import Piece, take_out
from weft.sync.merge.method import Scope
from weft.sync.method.choices import Choices
from weft.sync.records.charter import Charter
from weft.sync.records.messages import Base, Collect, Contribution, Manifest, counted, payload_of
from weft.sync.records.weights import awaited_weight, weight_of
from weft.sync.round.machine import MergeDone, MergeFailed, Noticed, ResultHeld
from weft.sync.round.neighbours import NOTHING, taken, takes_from
from weft.wire import Buffer


@dataclass(frozen=True)
class TakenOut:
    """What is taken out of a part's mean: `weft.sync.merge.counter`.

    Args:
        lacking: whose false work cannot be had.
    """

    pieces: tuple[Piece, ...] = ()
    brought: Mapping[Digest, Buffer] = field(default_factory=dict)
    lacking: tuple[PeerId, ...] = ()


@dataclass(frozen=True)
class _Failed:
    """What contributors a merge lacks."""

    missing: tuple[PeerId, ...]


@dataclass(frozen=True)
class _Work:
    """A part to be merged, by what holds when that begins: its round may be decided meanwhile.

    Args:
        here: the elements of the part.
        awaited: what the late weigh.
        is_mine: who brings no payload is told of by its owner, not by all who find the same.
        out: what is taken out of the mean.
    """

    plan: Collect
    here: range
    round: Round
    charter: Charter
    choices: Choices
    awaited: int
    is_mine: bool
    out: "TakenOut"


OnAdded = Callable[[Round, Contribution, float, bool], None]  # the round, what, how long, is it a whole payload
Recall = Callable[[Charter, Collect, range], Awaitable[TakenOut]]  # of what holds in the round, and a part of it
OnBrought = Callable[[Mapping[Digest, Buffer]], Awaitable[None]]


class RoundMerger:
    """Of one peer.

    Args:
        scope: tells which numbers a round synchronises.
    """

    def __init__(self, context: Context, chain: Chain, parts: Payloads, gather: Gather, scope: Scope) -> None:
        self._node = context.node
        self._compute = context.compute
        self._emit = context.emit
        self._chain = chain
        self.parts = parts
        self._gather = gather
        self._replies = reduce.Replies(scope)
        self._taken: dict[tuple[Round, Digest], Buffer] = {}  # by the digest of all its parts
        self._on_added: list[OnAdded] = []
        self._on_brought: list[OnBrought] = []
        self._recall: list[Recall] = []

    def on_added(self, callback: OnAdded) -> None:
        """Call `callback(round, contribution, length, is_whole)` for what is merged here, or taken from a neighbour."""
        self._on_added.append(callback)

    def on_brought(self, callback: OnBrought) -> None:
        """Call `callback(bytes by digest)` with what this peer has merged its part of, before it says so."""
        self._on_brought.append(callback)

    def recall_by(self, recall: Recall) -> None:
        """Let `recall(charter, plan, part)` find what a plan takes out of a part."""
        self._recall.append(recall)

    async def merge(self, plan: Collect, part: int, here: range, round: Round) -> MergeDone | MergeFailed:
        """Merge this peer's part of a plan, and serve the result.

        In a gossip round it takes what its neighbours brought, whole, and there is nothing to serve.

        Args:
            here: the elements of the part.
        """
        base = self._chain.base
        if base.round == round and base.is_gossip:
            found = await self._take(plan, part, base)
        else:
            work, fetch = self._work(plan, here, round, is_mine=True), self.parts.contribution
            brought = await asyncio.gather(*(fetch(each, part, len(here), round) for each in plan.contributions))
            work = await self._with_false(work)
            found = _Failed(work.out.lacking) if work.out.lacking else await self._merged(work, brought)
            here_now = {each.parts[part]: data for each, data in zip(plan.contributions, brought, strict=True) if data}
            here_now |= work.out.brought
            for callback in self._on_brought:
                await callback(here_now)
        if isinstance(found, _Failed):
            return MergeFailed(plan=plan, part=part, missing=found.missing)
        await self.parts.keep(round, found.digest, found.encoded)
        self.parts.hand_on(found.encoded)
        return MergeDone(plan=plan, part=part, result=found.digest)

    async def find(self, base: Base, plan: Collect, wanted: Wanted, here: range) -> ResultHeld | Noticed | None:
        """Find the result of another's part, where all merge for themselves.

        Args:
            base: of the round that it is a result of.

        Returns:
            None: they do not, not all that was brought is here, or the round is decided; the result may be had, then.
        """
        if not self._chain.choices_in(wanted.round).is_merged_by_all:
            return None
        try:
            is_held = await self._is_found(base, plan, wanted, here)
        except PayloadError as error:
            owner = plan.owners[wanted.part]
            self._emit(PayloadRejected(round=wanted.round, member=owner, reason=str(error)))
            return Noticed(peer=owner, status="suspected")
        return ResultHeld(plan=plan, part=wanted.part) if is_held else None

    async def check(self, manifest: Manifest) -> None:
        """Find the results that a proposed manifest names, where all merge for themselves and it can be done.

        Raises:
            PayloadError: one of them is another.
        """
        base = self._chain.base
        if (manifest.branch, manifest.round) != (base.branch, base.round) or not self._chain.choices_in(
            base.round
        ).is_merged_by_all:
            return
        if (plan := plan_behind(manifest, self._gather.announced)) is None:
            return
        for part, (named, here) in enumerate(zip(manifest.parts, self.parts.cut(base), strict=True)):
            await self._is_found(base, plan, Wanted(part, named.result, len(here), base.round), here)

    async def again(
        self,
        base: Base,
        leases: Iterable[Lease],
        plan: Collect,
        here: range,
        brought: Mapping[Digest, Buffer],
        part: int,
        pieces: tuple[Piece, ...] = (),
    ) -> reduce.EncodedPart | None:
        """Return what a part of any round comes to; None: something that was brought is no payload.

        Args:
            base: of the round; leases: of it.
            brought: what each contribution has of the part, and what `pieces` are made of.
            pieces: what is taken out of it.
        """
        choices, charter = base.charter.settings.method.of_mean(), base.charter
        awaited = awaited_weight(charter, plan.awaited, leases, base.uncounted)
        out = TakenOut(pieces, brought)
        work = _Work(plan, here, base.round, charter, choices, awaited, is_mine=False, out=out)
        found = await self._merged(work, [brought[each.parts[part]] for each in plan.contributions])
        return None if isinstance(found, _Failed) else found

    def settle(self, manifest: Manifest) -> None:
        """Keep what was left of the results that a round has counted."""
        self._replies.settle(manifest.round, [part.result for part in manifest.parts])

    def taken(self, base: Base, manifest: Manifest) -> dict[PeerId, Buffer | None]:
        """Return what a manifest counts of this peer's neighbours in a gossip round; None: it is not here.

        Who is not counted may have fetched it all the same, once it was announced.

        Args:
            base: of the round that the manifest decides.
        """
        neighbours, found = takes_from(base, self._node.peer), dict[PeerId, Buffer | None]()
        for each in manifest.contributions:
            if each.peer in neighbours:
                data = self._taken.get((manifest.round, each.payload))
                parts = self._gather.announced.get(each.peer, ())
                if data is None and payload_of(parts) == each.payload:
                    data = self.parts.gathered(parts)
                found[each.peer] = data
        return found

    async def _is_found(self, base: Base, plan: Collect, wanted: Wanted, here: range) -> bool:
        """Return whether a result is held once all that is here was merged.

        False: not all that was brought is here, or the round after `base` is decided: another mean is made of it now.

        Raises:
            PayloadError: what is here has another mean, or none.
        """
        if self._chain.base != base:
            return False
        work = self._work(plan, here, wanted.round, is_mine=False)
        digests = [each.parts[wanted.part] for each in plan.contributions]
        brought = [await self.parts.here(each) if wanted.num else b"" for each in digests]
        async with self.parts.alone(wanted.result):  # who makes the outer step waits, and fetches nothing
            if await self.parts.kept(work.round, wanted.result, wanted.num) is not None:
                return True
            if any(data is None for data in brought) or self._chain.base != base:
                return False
            found = await self._merged(work, brought)
            if isinstance(found, _Failed):
                raise PayloadError(f"its merged part {wanted.part}: it was made of something that is not a payload")
            if found.digest != wanted.result:
                raise PayloadError(f"its merged part {wanted.part} is not the mean of what it names")
            await self.parts.keep(work.round, found.digest, found.encoded)
            return True

    def _work(self, plan: Collect, here: range, round: Round, *, is_mine: bool) -> _Work:
        charter, base = self._chain.charter_in(round), self._chain.base
        awaited = awaited_weight(charter, plan.awaited, self._chain.head.leases, base.uncounted)
        return _Work(plan, here, round, charter, self._chain.choices_in(round), awaited, is_mine, TakenOut())

    async def _with_false(self, work: _Work) -> _Work:
        """Return the work with what its plan takes out of the mean."""
        if not work.plan.counters:
            return work
        for recall in self._recall:
            return replace(work, out=await recall(work.charter, work.plan, work.here))
        return replace(work, out=TakenOut(lacking=work.plan.counters))

    async def _merged(self, work: _Work, brought: Sequence[Buffer | None]) -> reduce.EncodedPart | _Failed:
        """Merge what was brought to a part in ascending peer order, legacies last."""
        contributions, here, round = work.plan.contributions, work.here, work.round
        if not any(each.tokens for each in contributions):  # no mean; no honest leader plans this
            return _Failed(tuple(each.peer for each in contributions))
        has_legacies = any(each.legacy is not None for each in contributions)
        coding = reduce.coding_in(work.choices, round)
        if not has_legacies and (found := await self._added_up(work, coding, brought)) is not None:
            return found
        merger = reduce.Merger(len(here), coding, work.awaited, self.parts.pool.empty, has_legacies)
        missing = []
        inorder = sorted(zip(contributions, brought, strict=True), key=lambda each: each[0].legacy is not None)
        for each, data in inorder:  # legacies last: they are measured against the others
            if data is None or not await self._add(work, merger, each, data):
                missing.append(each.peer)
        if missing:
            return _Failed(tuple(missing))

        return await serve(self._compute, len(here), lambda: self._reply(work, merger.merged()))

    def _reply(self, work: _Work, mean: torch.Tensor) -> reduce.EncodedPart | _Failed:
        try:
            take_out(mean, work.here, work.out.pieces, work.out.brought, self.parts.pool.empty)
        except PayloadError:
            return _Failed(work.plan.counters or ())
        found = self._replies.encode(mean, work.here, work.round, work.choices)
        return reduce.EncodedPart(encoded=self.parts.pool.moved(found.encoded), digest=found.digest)

    async def _added_up(
        self, work: _Work, coding: reduce.Coding, brought: Sequence[Buffer | None]
    ) -> reduce.EncodedPart | _Failed | None:
        """Merge large dense contributions, all of which are here, a few numbers at a time; None: they are others."""
        contributions, num = work.plan.contributions, len(work.here)
        parts = [
            dense.Dense(weight_of(work.charter, each), data, reduce.payload_codec_in(work.choices, work.round, each))
            for each, data in zip(contributions, brought, strict=True)
            if data is not None
        ]
        if num <= dense.DENSE_STEP or len(parts) < len(contributions) or not dense.is_dense(coding.rule, parts):
            return None
        lengths, missing = [0.0] * len(parts), []

        def seen(number: int, values: torch.Tensor) -> None:
            lengths[number] = math.hypot(lengths[number], float(torch.linalg.vector_norm(values)))

        mean, faults = await self._compute.serve(
            lambda: dense.add_up(parts, num, work.awaited, self.parts.pool.empty, seen)
        )
        for each, fault, length in zip(contributions, faults, lengths, strict=True):
            if fault is not None:
                missing.append(each.peer)
            if fault is not None and work.is_mine:
                self._emit(PayloadRejected(round=work.round, member=each.peer, reason=str(fault)))
            elif work.is_mine:
                self._tell(work.round, each, length, is_whole=False)
        if missing:
            return _Failed(tuple(missing))
        return await self._compute.serve(lambda: self._reply(work, mean))

    async def _add(self, work: _Work, merger: reduce.Merger, contribution: Contribution, data: Buffer) -> bool:
        try:
            weight, legacy = weight_of(work.charter, contribution), contribution.legacy
            codec = reduce.payload_codec_in(work.choices, work.round, contribution)
            if legacy is None:
                length = await serve(
                    self._compute, len(work.here), lambda: _add(merger, weight, data, codec, contribution.num_peers)
                )
                if work.is_mine:
                    self._tell(work.round, contribution, length, is_whole=False)
            else:
                await serve(
                    self._compute, len(work.here), lambda: merger.add_legacy(weight, data, legacy.num_rounds, codec)
                )
        except PayloadError as error:
            if work.is_mine:
                self._emit(PayloadRejected(round=work.round, member=contribution.peer, reason=str(error)))
            return False
        return True

    async def _take(self, plan: Collect, part: int, base: Base) -> reduce.EncodedPart | _Failed:
        me, round = self._node.peer, base.round
        wanted = taken(base, plan, me) if base.electorate[part] == me else ()
        alone = _alone(base, self._chain.head)
        self._taken = {key: data for key, data in self._taken.items() if key[0] == round}
        fetched = await asyncio.gather(*(self._whole(each, part, base, alone) for each in wanted))
        if missing := [each.peer for each, data in zip(wanted, fetched, strict=True) if data is None]:
            return _Failed(tuple(missing))
        if wanted and alone:
            await self._measure_own(plan, base, alone)
        return reduce.EncodedPart(encoded=b"", digest=NOTHING)

    async def _whole(self, contribution: Contribution, part: int, base: Base, alone: float) -> Buffer | None:
        """Return a neighbour's payload, from it or whoever has it, once it decodes; None: it cannot be had."""
        num = self.parts.nums(base, contribution.peer)[part]
        data = await self.parts.contribution(contribution, part, num, base.round)
        if data is None:
            data = await self.parts.from_others(contribution, contribution.parts[part], num, base)
        if data is None:
            return None
        try:
            await self._measure(contribution, data, num, base, alone)
        except PayloadError as error:
            self._emit(PayloadRejected(round=base.round, member=contribution.peer, reason=str(error)))
            return None
        self._taken[base.round, counted(contribution).payload] = data
        return data

    async def _measure_own(self, plan: Collect, base: Base, alone: float) -> None:
        """Tell how long what this peer brings to its neighbours is: theirs are compared with it."""
        nums = self.parts.nums(base, self._node.peer)
        for each in plan.contributions:
            if each.peer == self._node.peer and any(nums):
                part = nums.index(max(nums))
                if (data := await self.parts.here(each.parts[part])) is not None:
                    await self._measure(each, data, nums[part], base, alone)

    async def _measure(self, contribution: Contribution, data: Buffer, num: int, base: Base, alone: float) -> None:
        """Decode a payload for neighbours, and tell how long the share `alone` of it is, if that is any.

        Raises:
            PayloadError: it is none.
        """
        codec = reduce.codec_in(base.charter.settings.method, base.round)

        def measured() -> float:
            decoded = reduce.decode_parts(codec, [data], [range(num)], self.parts.pool.empty(num))
            return float(torch.linalg.vector_norm(decoded[: int(num * alone)]))

        length = await self._compute.serve(measured)
        if alone:
            self._tell(base.round, contribution, length, is_whole=True)

    def _tell(self, round: Round, contribution: Contribution, length: float, *, is_whole: bool) -> None:
        for callback in self._on_added:
            callback(round, contribution, length, is_whole)


def plan_behind(manifest: Manifest, announced: Mapping[PeerId, Sequence[Digest]]) -> Collect | None:
    """Return the plan that a manifest came of; None: of who is counted, another payload was announced, or none."""
    contributions = tuple(
        Contribution(
            peer=each.peer, tokens=each.tokens, group=each.group, legacy=each.legacy, parts=tuple(announced[each.peer])
        )
        for each in manifest.contributions
        if each.peer in announced and payload_of(announced[each.peer]) == each.payload
    )
    if len(contributions) < len(manifest.contributions):
        return None
    owners = tuple(part.owner for part in manifest.parts)
    return Collect(
        attempt=manifest.attempt, revision=0, contributions=contributions, owners=owners, awaited=manifest.awaited
    )


def _alone(base: Base, head: Manifest) -> float:
    """Return of which share of what members send to neighbours, from its beginning, nothing but inner steps is told.

    Of weights, and of how they differ from those before, it is all where everybody has begun from the same in this
    round, and nothing once they are mixed with others'.
    """
    if base.charter.settings.method.send == "delta+weights":
        return 0.5
    return 1.0 if head.round == 0 or head.has_result else 0.0


def _add(merger: reduce.Merger, weight: int, data: Buffer, codec: Codec, num_peers: int) -> float:
    """Add a contribution to a part; return how long it is there, to a few digits."""
    merger.add(weight, data, codec, num_peers)
    return float(torch.linalg.vector_norm(merger.decoded))
