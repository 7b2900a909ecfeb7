"""The bytes of rounds: this peer's payload, what it fetches of others', and the results it keeps.

    member's payload, part i --fetch--> owner of part i: merge --result--> everybody fetches, checks, keeps

Payload parts and results are blobs under their digests. A result is kept and counts as held once it is known to decode,
so no quorum commits what its members could not apply.

Failure:
- an owner whose result is no payload: it is not held, and counts as suspected in this round, so another gets the part.
- a holder that delivers a result too slowly, or is gone: the next one is asked.

Small parts and small results are handed without being asked for (`Handing`):

    contributor ──Handed, Ready──► owner of the part          owner ──Handed, Merged──► all

Each is said right before the letter that names it, on the same link, so it is here when it is wanted. To ask takes a
round trip, and more of both computers than a small part itself; in a round each member would ask twice of every other.

What is larger is asked for: it would stand on its sender's line before what others wait for, and how long it takes says
how fast its holder sends.

Members from before this note drop it, and ask. So whoever hands nothing itself is handed no more than `MAX_UNANSWERED`.

What is handed and gets lost, or is damaged, is asked for. Of what nobody wants only members' is kept, `MAX_KEPT` of
each.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from statistics import median
from typing import TypeVar
from weakref import WeakValueDictionary

from weft.codec.codec import Codec, Size, size_of
from weft.errors import DeadlineExceeded, NetError, PayloadError, PeerError, Refused
from weft.events import Notice, PayloadRejected
from weft.ids import Digest, PeerId, Round, short
from weft.net.blobs.blobs import StillComing, first_of
from weft.net.node import Node
from weft.peer.chain import Chain
from weft.peer.context import Context
from weft.peer.messages import HANDED_NBYTES, Handed
from weft.store.pool import Pool
from weft.sync.merge import dense, reduce
from weft.sync.merge.method import Scope
from weft.sync.merge.sharded import SpreadVector
from weft.sync.records.messages import Base, Brought, Certificate, Collect, Contribution, Manifest
from weft.sync.records.parts import cut
from weft.sync.round.machine import Noticed, ResultHeld, Status
from weft.sync.round.neighbours import dealt, receives
from weft.tasks import Compute
from weft.wire import Buffer, digest

T = TypeVar("T")

FEW = 1 << 14  # elements: a codec takes 50 us for them, and a change of threads 100
LEAST_NBYTES = HANDED_NBYTES + 1  # of a transfer: a smaller one measures its delay only
LEAST_S = 1e-4
NUM_REMEMBERED = 9


async def serve(compute: Compute, num: int, work: Callable[[], T]) -> T:
    """Do `work` on `num` elements beside training; here and now where that is sooner done than handed to a thread."""
    return work() if num <= FEW else await compute.serve(work)


class Rates:
    """How fast each member sends, as this peer receives it: the median of its last transfers.

    All members fetch from one at the same time, so what each receives is alike a fraction of that one's uplink: the
    rates compare members, they are no line's capacity.
    """

    def __init__(self) -> None:
        self._measured: dict[PeerId, deque[float]] = {}

    def note(self, peer: PeerId, nbytes: int, took_s: float) -> None:
        if nbytes >= LEAST_NBYTES:
            rates = self._measured.setdefault(peer, deque(maxlen=NUM_REMEMBERED))
            rates.append(nbytes / max(took_s, LEAST_S))

    def known(self) -> dict[PeerId, float]:
        """Return bytes per second."""
        return {peer: median(rates) for peer, rates in self._measured.items()}


# Between rounds, memory of so many fp32 vectors is kept for the next: for sums, payloads and results.
POOL_VECTORS = 3
FETCH_AGAIN_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # after a result could not be had; then the next attempt tries

# How long a blob may take, whole: its holder's uplink carries the vector's other parts at the same time. A byte now and
# then keeps a stream alive for ever; who has less than 1 Mbit/s makes all others wait longer than its work is worth.
FETCH_FLOOR_S = 10.0  # a first connection and a slow answer
MIN_UPLINK_BPS = 1e6
PATIENCE = 10  # times as long for a payload that travels while rounds go on


@dataclass(frozen=True)
class Wanted:
    """A result: of which part of a plan, its bytes' digest, its elements, the round."""

    part: int
    result: Digest
    num: int
    round: Round


class Payloads:
    """Payload and results of one peer; results go into `chain`.

    Args:
        scope: tells which numbers a round synchronises.
    """

    def __init__(self, context: Context, chain: Chain, scope: Scope) -> None:
        self._node = context.node
        self._clock = context.clock
        self._compute = context.compute
        self._emit = context.emit
        self._chain = chain
        self._journal = context.journal
        self._scope = scope
        self.rates = Rates()
        self._handing = Handing(context.node, chain)
        self._parent: PeerId | None = None  # who hands results on to this peer, if somebody does
        self._payload: dict[Digest, Buffer] = {}
        self._offered: tuple[Buffer, ...] = ()  # the same, as it was cut
        # Who has begun to fetch of this round, or was handed something: whether it fetches the payload.
        self.asked_by: dict[PeerId, bool] = {}
        self._gathered: dict[Digest, Buffer] = {}  # parts of others' payloads, fetched before they were planned
        self._coming: dict[Digest, asyncio.Event] = {}  # those that are being fetched so
        is_spread = isinstance(context.initial, SpreadVector)
        self.pool = Pool(POOL_VECTORS * 4 * scope.most_sent, context.folder.scratch if is_spread else None)
        self._fetching: WeakValueDictionary[Digest, asyncio.Lock] = WeakValueDictionary()  # of results
        self._asked_at: dict[tuple[Round, PeerId, Digest], float] = {}  # contributions that are not here yet
        self._cut_in: Base | None = None
        self._cut: tuple[range, ...] = ()
        self._wanted_in: Base | None = None
        self._wanted: dict[PeerId | None, tuple[dict[int, int], ...]] = {}
        self._gone: set[PeerId] = set()
        self._limits: dict[PeerId, set[asyncio.Timeout]] = {}  # of what is being fetched, by who holds it
        self._node.serve_blobs(self._lookup)
        self._node.serve_blobs(lambda _peer, wanted: chain.result(wanted), is_patient=True)

    def cut(self, base: Base) -> tuple[range, ...]:
        """Return how a payload is cut that is brought to a round: where the parts lie, or whole, for neighbours."""
        if self._cut_in is not base:
            self._cut_in, self._cut = base, self._cut_of(base)
        return self._cut

    def _cut_of(self, base: Base) -> tuple[range, ...]:
        if base.is_gossip:
            return (range(base.charter.settings.method.num_gossiped(self._scope.num)),)
        return cut(self._scope.num_sent(base.round), base.uplinks)

    def results_in(self, base: Base) -> tuple[range, ...]:
        """Return where the parts lie that are merged in a round, and given to all."""
        return (range(0),) * base.num_parts if base.is_gossip else self.cut(base)

    def nums(self, base: Base, peer: PeerId) -> tuple[int, ...]:
        """Return how many numbers each part has of what `peer` brings to a round."""
        ranges = self.cut(base)
        if base.is_gossip:
            return tuple(len(ranges[0]) if is_taken else 0 for is_taken in receives(base, peer))
        return tuple(map(len, ranges))

    def wanted(self, base: Base, peer: PeerId) -> tuple[dict[int, int], ...]:
        """Return which parts of what `peer` brings to a round each elector merges, and how many numbers these have.

        An empty part is none.
        """
        if self._wanted_in is not base:  # asked of each with every message of a round
            self._wanted_in, self._wanted = base, {}
        key = peer if base.is_gossip else None  # of a mean everybody brings the same
        if key not in self._wanted:
            self._wanted[key] = self._wanted_of(base, peer)
        return self._wanted[key]

    def _wanted_of(self, base: Base, peer: PeerId) -> tuple[dict[int, int], ...]:
        nums = {part: num for part, num in enumerate(self.nums(base, peer)) if num}
        if base.charter.settings.method.is_merged_by_all:
            return (nums,) * base.num_parts
        return tuple({part: nums[part]} if part in nums else {} for part in range(base.num_parts))

    def offer(self, parts: Sequence[reduce.EncodedPart]) -> tuple[Digest, ...]:
        """Serve a payload, in the place of the one before; return its parts' digests."""
        self._payload, self.asked_by = {part.digest: part.encoded for part in parts}, {}
        self._offered = tuple(part.encoded for part in parts)
        base, me = self._chain.base, self._node.peer
        if base.is_gossip and me in base.electorate:
            return dealt(base, me, parts[0].digest)
        return tuple(part.digest for part in parts)

    def hand_out(self) -> None:
        """Give each owner the part of the offered payload that it merges, where that is small."""
        base, me = self._chain.base, self._node.peer
        if me not in base.electorate or len(self._offered) != len(base.electorate) or not self._is_handing(base):
            return
        for owner, data in zip(base.electorate, self._offered, strict=True):
            if owner != me:
                self._note_handed(self._handing.hand([owner], data))

    def hand_on(self, result: Buffer) -> None:
        """Give all others a part that was merged here, where that is small."""
        base, me = self._chain.base, self._node.peer
        if self._is_handing(base):
            self._note_handed(self._handing.hand([peer for peer in base.electorate if peer != me], result))

    def _note_handed(self, to: list[PeerId]) -> None:
        for peer in to:  # it may be counted there; but nothing goes on travelling of what is as small
            self.asked_by.setdefault(peer, False)

    def _is_handing(self, base: Base) -> bool:
        """Return whether each part has one owner, who gives all the same."""
        return not base.is_gossip and not base.charter.settings.method.is_merged_by_all

    def take(self, brought: Brought, wanted: Digest, num: int) -> bool:
        """Return whether a part of another's payload was handed to this peer. If so, it stays until `forget`."""
        size = size_of(self._codec_of(brought, self._chain.base.round), num)
        if (data := self._handing.take(brought.peer, wanted, size)) is None:
            return False
        self._gathered[wanted] = data
        return True

    @property
    def is_asked_for(self) -> bool:
        """Whether somebody has begun to fetch the payload that is offered, which may take long."""
        return any(self.asked_by.values())

    def fetch_first_from(self, parent: PeerId | None) -> None:
        """Fetch results from who hands them on to this peer, before anybody else; None: nobody does."""
        self._parent = parent

    def notice(self, peer: PeerId, status: Status) -> None:
        """Take up what membership says: nothing is fetched from who is gone."""
        if status != "gone":
            self._gone.discard(peer)
            return
        self._gone.add(peer)
        for limit in self._limits.get(peer, ()):
            limit.reschedule(asyncio.get_running_loop().time())

    def is_here(self, wanted: Digest) -> bool:
        """Return whether a payload's part is here, to be merged."""
        return wanted in self._payload or wanted in self._gathered

    def hold(self, wanted: Digest) -> bool:
        """Return whether a part of another's payload is here. If so, it stays until `forget`.

        It may be what this peer offers itself: peers that have nothing to say say the same. What this peer offers next
        would take its place.
        """
        if wanted in self._payload and wanted not in self._gathered:
            mine = memoryview(self._payload[wanted]).cast("B")
            self._gathered[wanted] = kept = self.pool.block(mine.nbytes)
            kept[:] = mine  # whoever computed it may use its memory again once another is offered
        return wanted in self._gathered

    async def gather(self, brought: Brought, wanted: Digest, num: int) -> None:
        """Fetch a part of `num` elements of a payload that is announced. Nobody waits for it.

        Raises:
            PeerError: it cannot be had, or only too slowly.
        """
        base = self._chain.base
        codec = self._codec_of(brought, base.round)
        size, limit_s = size_of(codec, num), PATIENCE * self.limit_s(codec)
        has_come = self._coming[wanted] = asyncio.Event()
        try:
            try:
                data = await self._fetch(brought.peer, wanted, size, limit_s)
            except PeerError as error:
                others = self._others(base, brought.peer) if base.charter.settings.method.is_merged_by_all else []
                try:
                    data = await self._from_any(others, wanted, size, limit_s)
                except PeerError:
                    raise error from None
            self._gathered[wanted] = data
        finally:
            self._coming.pop(wanted, None)
            has_come.set()

    async def here(self, wanted: Digest) -> Buffer | None:
        """Return a part of a payload that is here, or that `gather` is fetching just now; None: it has not come."""
        if (has_come := self._coming.get(wanted)) is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(has_come.wait(), self.limit_s(self._codec(self._chain.base.round)))
        return self._payload.get(wanted, self._gathered.get(wanted))

    async def whole(self, peer: PeerId, wanted: Digest) -> tuple[Buffer, ...]:
        """Return the encoded parts of a payload that a leaf offers to the present round.

        Raises:
            PeerError: it cannot be had, or only too slowly.
            PayloadError: it is of another length.
        """
        base = self._chain.base
        codec, parts = self._codec(base.round), self.cut(base)
        data = await self._fetch(peer, wanted, reduce.payload_size(codec, parts), self.limit_s(codec))
        return reduce.split(codec, data, parts)

    def group_mean(self, base: Base) -> reduce.GroupMean:
        """Return an empty mean of payloads of a round."""
        choices = self._chain.choices_in(base.round)
        is_of_steps = not choices.sends_gradient
        return reduce.GroupMean(self._codec(base.round), self.cut(base), choices.merge, is_of_steps=is_of_steps)

    def group_codec(self, base: Base, num_merged: int) -> Codec:
        """Return how the mean of `num_merged` payloads of a round is encoded."""
        return reduce.group_codec_in(self._chain.choices_in(base.round), base.round, num_merged)

    def gathered(self, parts: Iterable[Digest]) -> Buffer | None:
        """Return the first of these parts that `gather` fetched; None: none is here."""
        return next((self._gathered[part] for part in parts if part in self._gathered), None)

    async def contribution(self, brought: Contribution, part: int, num: int, round: Round) -> Buffer | None:
        """Return a part of `num` elements of what somebody brings; None: it cannot be had."""
        wanted, peer = brought.parts[part], brought.peer
        if not num:
            return b""
        if self.is_here(wanted):
            return self._payload[wanted] if wanted in self._payload else self._gathered[wanted]
        # Planned in again, by another leader or in another revision, it has what is left of its time, and no more.
        self._asked_at = {asked: at for asked, at in self._asked_at.items() if asked[0] == round}
        asked = (round, peer, wanted)
        waited_s = self._clock.now() - self._asked_at.setdefault(asked, self._clock.now())
        try:
            codec = self._codec_of(brought, round)
            data = await self._fetch(peer, wanted, size_of(codec, num), self.limit_s(codec) - waited_s)
        except DeadlineExceeded as error:
            self._emit(PayloadRejected(round=round, member=peer, reason=str(error)))
            return None
        except PeerError:
            data = None
        self._asked_at.pop(asked, None)
        return data

    async def from_others(self, brought: Contribution, wanted: Digest, num: int, base: Base) -> Buffer | None:
        """Return a payload from members that may have it beside who brings it; None: it cannot be had."""
        codec = self._codec_of(brought, base.round)
        with suppress(PeerError):
            others = self._others(base, brought.peer)
            return await self._from_any(others, wanted, size_of(codec, num), self.limit_s(codec))
        return None

    async def from_any(self, first: PeerId, wanted: Digest, codec: Codec, num: int) -> Buffer:
        """Return `num` elements of a round gone by, from who is asked first or whoever has kept them.

        Raises:
            PeerError: nobody has, or delivers it in time.
        """
        holders = [first] if self._node.is_linked(first) else []
        holders += self._others(self._chain.base, first)
        return await self._from_any(holders, wanted, size_of(codec, num), self.limit_s(codec))

    def _others(self, base: Base, bringer: PeerId) -> list[PeerId]:
        return [each for each in base.electorate if each != bringer and self._node.is_linked(each)]

    def alone(self, result: Digest) -> asyncio.Lock:
        """Return what keeps a result from being fetched while it is fetched or found already."""
        return self._fetching.setdefault(result, asyncio.Lock())

    def forget(self, wanted: Digest) -> None:
        self._gathered.pop(wanted, None)

    async def fetch(
        self, plan: Collect, wanted: Wanted, is_wanted: Callable[[], bool] = lambda: True
    ) -> ResultHeld | Noticed | None:
        """Fetch a result, from its owner or whoever contributes; None where it cannot be had.

        Where it is no part of a vector, its owner is to own nothing more in this round: it would in every attempt.
        """
        part, owner = wanted.part, plan.owners[wanted.part]
        holders = [owner, *(each.peer for each in plan.contributions)]
        for wait_s in FETCH_AGAIN_S:  # whoever had it may be gone, and another have it in a moment
            try:
                await self._result(wanted.round, wanted.result, wanted.num, holders)
                return ResultHeld(plan=plan, part=part)
            except PayloadError as error:
                reason = f"its merged part {part}: {error}"
                self._emit(PayloadRejected(round=wanted.round, member=owner, reason=reason))
                return Noticed(peer=owner, status="suspected")
            except PeerError:
                await asyncio.sleep(wait_s)
            if not is_wanted():
                break
        return None

    def has_results(self, manifest: Manifest) -> bool:
        """Return whether all results that a manifest names are here: what is here can be applied."""
        parts = reduce.parts_of(manifest, self._scope)
        codec = self._reply_codec(manifest.round)
        return all(
            self._known(part.result, size_of(codec, len(here)))
            for here, part in zip(parts, manifest.parts, strict=True)
        )

    async def results(self, manifest: Manifest) -> tuple[Buffer, ...]:
        """Return the results that a manifest names, fetched from whoever holds them, once they are known to decode.

        Each part comes from who hands it on, its owner, or else from another holder, and all at once.

        Raises:
            PeerError: nobody that can be reached has one of them.
            PayloadError: one of them is no part of a vector.
        """
        parts = reduce.parts_of(manifest, self._scope)
        codec = self._reply_codec(manifest.round)
        known = [
            self._known(part.result, size_of(codec, len(here)))
            for here, part in zip(parts, manifest.parts, strict=True)
        ]
        if (found := tuple(each for each in known if each is not None)) and len(found) == len(known):
            return found
        others = [*manifest.members, *(each.peer for each in manifest.contributions), *sorted(self._node.peers)]
        return tuple(
            await asyncio.gather(
                *(
                    self._result(manifest.round, part.result, len(here), [part.owner, *others[at:], *others[:at]])
                    for at, (here, part) in enumerate(zip(parts, manifest.parts, strict=True))
                )
            )
        )

    def _codec(self, round: Round) -> Codec:
        return reduce.codec_in(self._chain.choices_in(round), round)

    def _codec_of(self, brought: Brought, round: Round) -> Codec:
        return reduce.payload_codec_in(self._chain.choices_in(round), round, brought)

    def _reply_codec(self, round: Round) -> Codec:
        return reduce.reply_codec_in(self._chain.choices_in(round), round)

    def _known(self, wanted: Digest, size: Size) -> Buffer | None:
        if not size.most:  # of a part without elements
            return b""
        known = self._chain.result(wanted)
        is_whole = known is not None and size.fits(memoryview(known).nbytes)
        return known if is_whole else None

    async def _from_any(self, holders: Sequence[PeerId], wanted: Digest, size: Size, limit_s: float) -> Buffer:
        return await first_of(
            holders, lambda peer: self._fetch(peer, wanted, size, limit_s), lambda: f"blob {short(wanted)}"
        )

    async def _result(self, round: Round, wanted: Digest, num: int, holders: Sequence[PeerId]) -> Buffer:
        codec = self._reply_codec(round)
        size = size_of(codec, num)
        known = self._known(wanted, size)
        if known is not None:
            return known
        # Where a quorum commits before this member holds the result, its round and its outer step both want it.
        async with self.alone(wanted):
            if (kept := await self.kept(round, wanted, num)) is not None:
                return kept
            # Only who is linked: dialling the dead takes seconds each, and links to the living are kept up.
            first = () if self._parent is None else (self._parent,)
            others = [peer for peer in dict.fromkeys((*first, *holders)) if self._node.is_linked(peer)]
            with self._node.expect(wanted) if first else nullcontext():  # electors would wait for each other
                limit_s = self.limit_s(codec)
                data = await self._from_any(others, wanted, size, limit_s)
                await serve(self._compute, num, lambda: dense.check_encoded(codec, data, num, self.pool.empty))
                await self.keep(round, wanted, data)
            return data

    async def kept(self, round: Round, wanted: Digest, num: int) -> Buffer | None:
        """Return a result of `num` elements that is here, or on disk, of a process before this one; None: it is not."""
        size = size_of(self._reply_codec(round), num)
        if (known := self._known(wanted, size)) is not None:
            return known
        kept = await serve(self._compute, num, lambda: self._journal.result(round, wanted))
        if kept is None or not size.fits(len(kept)):
            return None
        self._chain.keep(round, wanted, kept)
        return kept

    async def keep(self, round: Round, result: Digest, data: Buffer) -> None:
        """Keep a result, on disk before anybody counts on it that this peer holds it."""
        if self._journal.is_on:
            await self._compute.serve(lambda: self._journal.keep(round, result, data))
        if (failure := self._journal.take_failure()) is not None:
            self._emit(Notice(text=failure))
        self._chain.keep(round, result, data)

    async def note(self, certificate: Certificate) -> None:
        if self._journal.is_on:
            await self._compute.serve(lambda: self._journal.decide(certificate))

    async def _fetch(self, holder: PeerId, wanted: Digest, size: Size, limit_s: float) -> Buffer:
        if holder in self._gone:
            raise PeerError(f"{short(holder)} is gone")
        if (handed := self._handing.take(holder, wanted, size)) is not None:
            return handed
        began, data = self._clock.now(), None
        try:
            async with self._limited(holder, limit_s):
                while data is None:
                    data = await self._come(holder, wanted, size)  # where it has yet to come, it let this peer wait
            self.rates.note(holder, data.nbytes, self._clock.now() - began)
            return data
        except PeerError:
            raise
        except (NetError, Refused) as error:
            raise PeerError(f"{short(holder)} did not deliver blob {short(wanted)}: {error}") from error
        except TimeoutError:
            if holder in self._gone:
                raise PeerError(f"{short(holder)} is gone") from None
            raise DeadlineExceeded(f"{short(holder)} did not deliver blob {short(wanted)} in time") from None

    @asynccontextmanager
    async def _limited(self, holder: PeerId, limit_s: float) -> AsyncIterator[None]:
        limits = self._limits.setdefault(holder, set())
        async with asyncio.timeout(limit_s) as limit:
            limits.add(limit)
            try:
                yield
            finally:
                limits.discard(limit)

    async def _come(self, holder: PeerId, wanted: Digest, size: Size) -> memoryview | None:
        """Fetch a blob, unless the holder says that it has yet to come there."""
        try:
            if not size.is_exact:
                return await self._node.fetch_within(holder, wanted, size.most, self.pool.block)
            into = self.pool.block(size.most)
            await self._node.fetch(holder, wanted, into)
        except StillComing:
            return None
        return into

    def limit_s(self, codec: Codec) -> float:
        """Return how long a blob of a payload may take."""
        most = max(self._scope.most_sent, self._chain.charter.settings.method.num_gossiped(self._scope.num))
        return FETCH_FLOOR_S + 8 * codec.nbytes(most) / MIN_UPLINK_BPS

    def _lookup(self, peer: PeerId, wanted: Digest) -> Buffer | None:
        mine = self._payload.get(wanted)  # may be empty, where a part is
        if mine is not None or self._chain.result(wanted, since=self._chain.base.round) is not None:
            self.asked_by[peer] = self.asked_by.get(peer, False) or mine is not None
        if mine is None and (mine := self._gathered.get(wanted)) is None:  # a neighbour's: others may want it, too
            return self._chain.result(wanted, since=Round(self._chain.head.round))
        return mine


# --- what is handed ---


MAX_KEPT = 4  # of one member: a payload's part and a result, of this round and the next
MAX_UNANSWERED = 8  # four rounds of that


class Handing:
    """Of one peer."""

    def __init__(self, node: Node, chain: Chain) -> None:
        self._node = node
        self._chain = chain
        self._kept: dict[PeerId, dict[Digest, bytes]] = {}  # oldest first
        self._num_unanswered: dict[PeerId, int] = {}  # handed since a peer last handed something, or its link came up
        node.on_note(Handed, self._on_handed)
        node.on_link(self._on_link)

    def hand(self, to: list[PeerId], data: Buffer) -> list[PeerId]:
        """Give these peers what they are about to want, if it is small; return to whom it has left."""
        if not 0 < memoryview(data).nbytes <= HANDED_NBYTES:
            return []
        note, told = Handed(data=bytes(data)), []
        for peer in to:
            num = self._num_unanswered.get(peer, 0)
            if num < MAX_UNANSWERED and self._node.post(peer, note):
                self._num_unanswered[peer] = num + 1
                told.append(peer)
        return told

    def take(self, peer: PeerId, wanted: Digest, size: Size) -> bytes | None:
        """Return what a peer has handed to this one, once; None: it has not."""
        kept = self._kept.get(peer, {})
        return kept.pop(wanted) if kept.get(wanted) and size.fits(len(kept[wanted])) else None

    async def _on_handed(self, peer: PeerId, note: Handed) -> None:
        self._num_unanswered.pop(peer, None)
        if peer in self._chain.base.electorate:
            kept = self._kept.setdefault(peer, {})
            kept[digest(note.data)] = note.data
            if len(kept) > MAX_KEPT:
                del kept[next(iter(kept))]

    def _on_link(self, peer: PeerId, _is_up: bool, _reason: str) -> None:
        self._kept.pop(peer, None)
        self._num_unanswered.pop(peer, None)
