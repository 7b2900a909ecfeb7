"""How the state comes to a newcomer: which members are asked to pin it, and its chunks from all of them at once.

    heads     what linked members hold (`Entrance` asks)
    ask       some of them, the furthest first, to pin one and the same head
    choose    the state that most of them offer: after a commit replicas are equal, and so are the digests of chunks
    pull      the chunks that are missing, from everybody who offers that state

What has come stays, also over a restart of this process: the same head is asked for again as long as that is less to
fetch than a newer one.

Failure:
- some donors vanish, lie or forget their pin: the others deliver the rest. All do: the caller asks again, and what has
  come stays.
- members disagree what the state at one head is: what most of those asked offer is believed, and an event says so.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from weft.errors import NetError, PeerError, Refused, WireError
from weft.events import Notice, StateJoined
from weft.ids import Digest, PeerId, short
from weft.net.blobs.blobs import first_of
from weft.net.messages import Heartbeat
from weft.net.multi_source import Blob, pull
from weft.peer.chain import Heads
from weft.peer.context import Place
from weft.peer.fork.choice import NEAR
from weft.peer.join.offers import MAX_DONORS, Offered, most_offered, opened
from weft.peer.messages import StateOffer, StateRequest
from weft.peer.state.replica import Replica
from weft.progress import Meter
from weft.store.index import StateIndex
from weft.store.partial import MAX_OFFER_NBYTES, Partial, drop
from weft.sync.records.charter import Charter
from weft.sync.records.messages import Manifest
from weft.wire import Buffer, decode, digest_of

OFFER_S = 60.0  # for a member to copy its state and name the chunks
Beats = Callable[[], Mapping[PeerId, Heartbeat]]


class StateFetch:
    """Fetches states for one peer, of the shape that `replica` has.

    Args:
        beats: returns what linked members told last: who stands at a head can still pin it.
    """

    def __init__(self, place: Place, replica: Replica, beats: Beats) -> None:
        self._node = place.node
        self._place = place
        self._replica = replica
        self._beats = beats
        self._folder = place.folder.arriving
        self._partial: Partial | None = None
        self._is_opened = False
        self._began_at: float | None = None
        self._asked: set[PeerId] = set()  # for the state that is being fetched
        self._votes: Counter[tuple[Digest, Digest]] = Counter()  # what those asked offer: head and index
        self._last = 0  # the furthest round that is believed in
        self.failed: set[PeerId] = set()  # who delivered nothing when `fetch` last failed
        self.under_way: Partial | None = None  # what is coming just now

    async def fetch(self, heads: Heads) -> tuple[Manifest, Charter, dict[str, Tensor]]:
        """Return the manifest that a state belongs to, what holds after it, and the state.

        Args:
            heads: who holds which state, in the order in which they are asked; the first is the one that is wanted.

        Raises:
            PeerError, NetError, Refused: nobody delivered one; what has come is kept for the next time.
        """
        if self._began_at is None:
            self._began_at = self._place.clock.now()
        if not self._is_opened:
            self._partial = await self._place.compute.serve(
                lambda: Partial.open(self._folder, self._place.memory.empty)
            )
            self._is_opened = True
        counts = Counter(digest_of(head) for _, head in heads)
        best = max(heads, key=lambda each: counts[digest_of(each[1])])[1]  # of the first, where all differ
        self._last = max(head.round for _, head in heads if head.branch == best.branch) + NEAR
        self.failed, self._asked, self._votes = set(), set(), Counter()
        offered = await self._ask([peer for peer, head in heads if head.branch == best.branch], self._wanted(best))
        self.failed |= set(offered.donors)
        partial = await self._begin(offered)
        delivered = await self._pull(partial, offered)
        await self._place.compute.serve(partial.drop)
        self._partial = None
        self._tell(partial, delivered)
        return partial.head, partial.charter, partial.vectors

    async def forget(self) -> None:
        """Drop what has come of a state: this peer needs none."""
        self._partial = None
        await self._place.compute.serve(lambda: drop(self._folder))

    def _wanted(self, best: Manifest) -> Digest:
        """Return the head to ask for: that of what has come, where the rest and what was committed since is less."""
        partial = self._partial
        if partial is None or partial.head.branch != best.branch:
            return digest_of(best)
        num_rounds = max(best.round - partial.head.round, 0)
        is_less = partial.missing_nbytes + num_rounds * self._replica.result_nbytes < partial.index.nbytes
        return partial.name if is_less else digest_of(best)

    async def _ask(self, peers: Sequence[PeerId], wanted: Digest) -> Offered:
        """Ask members to pin the state of a head, as many at once as may give it; return what most of them offer."""
        offers: list[tuple[PeerId, Offered]] = []
        failures: list[str] = []
        rest = list(peers)
        while rest and len(offers) < MAX_DONORS:
            now, rest = rest[: MAX_DONORS - len(offers)], rest[MAX_DONORS - len(offers) :]
            self._asked |= set(now)
            answers = await asyncio.gather(*(self._offer_of(peer, wanted) for peer in now))
            for peer, answer in zip(now, answers, strict=True):
                if isinstance(answer, str):
                    self.failed.add(peer)
                    failures.append(answer)
                else:
                    offers.append((peer, answer))
        if not offers:
            raise PeerError(f"nobody offers a state: {'; '.join(failures)}")
        return self._choose(offers)

    async def _offer_of(self, peer: PeerId, wanted: Digest) -> Offered | str:
        request = StateRequest(run=self._node.run, wanted=wanted)
        try:
            offer = await self._node.call(peer, request, StateOffer, deadline_s=OFFER_S)
        except (PeerError, NetError, Refused) as error:
            return str(error)
        found = opened(offer, self._node.run)
        if isinstance(found, Offered) and found.head.round > self._last:
            found = f"offers round {found.head.round}, which nobody else has come near"
        return f"{short(peer)} {found}" if isinstance(found, str) else found

    def _choose(self, offers: Sequence[tuple[PeerId, Offered]]) -> Offered:
        for _, offer in offers:
            self._count(offer)
        chosen = most_offered(offers)
        self._tell_disagreement(chosen.head, chosen.index)
        return chosen

    def _count(self, offer: Offered) -> None:
        self._votes[digest_of(offer.head), offer.index] += 1

    def _tell_disagreement(self, head: Manifest, index: Digest) -> None:
        name = digest_of(head)
        num_asked = sum(votes for (each, _), votes in self._votes.items() if each == name)
        if self._votes[name, index] < num_asked:
            text = f"members disagree what the state after round {head.round} is: {self._votes[name, index]} of "
            text += f"{num_asked} asked are believed; others lie, or their machines are broken"
            self._place.emit(Notice(text=text))

    async def _begin(self, offered: Offered) -> Partial:
        """Return what is to be completed: what has come, if it is of the offered state, else a new one."""
        before = self._partial
        if before is not None and (before.name, digest_of(before.index)) == (digest_of(offered.head), offered.index):
            return before
        index = await self._index(offered)
        mine = self._replica.vectors()
        found = {each.name: each.num for each in index.vectors}
        if found != {name: vector.numel() for name, vector in mine.items()}:
            raise WireError("the offered state has other vectors than this run's model")
        partial = Partial(self._folder, offered.head, offered.charter, index, self._place.memory.empty)
        await self._place.compute.serve(lambda: partial.begin(before))
        self._partial = partial
        return partial

    async def _index(self, offered: Offered) -> StateIndex:
        async def ask(donor: PeerId) -> StateIndex:
            data = await self._node.fetch_small(donor, offered.index, MAX_OFFER_NBYTES)
            index: StateIndex = decode(data, StateIndex, max_nbytes=MAX_OFFER_NBYTES)
            return index

        return await first_of(offered.donors, ask, "the index of its state")

    async def _more(self, offered: Offered, known: Sequence[PeerId]) -> Sequence[PeerId]:
        """Ask those that stand at the head and were not asked to pin it, too: a link may have come up since."""
        beats, wanted = self._beats(), digest_of(offered.head)
        found = [peer for peer, beat in beats.items() if beat.manifest == wanted and peer not in self._asked]
        asked = found[: max(MAX_DONORS - len(known), 0)]
        self._asked |= set(asked)
        name = wanted
        answers = await asyncio.gather(*(self._offer_of(peer, name) for peer in asked))
        offers = [(peer, each) for peer, each in zip(asked, answers, strict=True) if isinstance(each, Offered)]
        for _, offer in offers:
            self._count(offer)
        if max(votes for (each, _), votes in self._votes.items() if each == name) > self._votes[name, offered.index]:
            raise PeerError(f"most members offer another state after round {offered.head.round} than those asked first")
        if any(offer.head == offered.head and offer.index != offered.index for _, offer in offers):
            self._tell_disagreement(offered.head, offered.index)
        return [peer for peer, offer in offers if (offer.head, offer.index) == (offered.head, offered.index)]

    async def _pull(self, partial: Partial, offered: Offered) -> dict[PeerId, int]:
        async def keep(blob: Blob, data: Buffer) -> None:
            was_kept = partial.why_not_kept is None
            await self._place.compute.serve(lambda: partial.put(blob.digest, data))
            meter.add(len(data))
            if was_kept and partial.why_not_kept is not None:
                text = f"what has come of the state cannot be kept on disk ({partial.why_not_kept}): should this "
                self._place.emit(Notice(text=text + "process end before all has come, it is fetched anew"))

        async def more(known: Sequence[PeerId]) -> Sequence[PeerId]:
            return await self._more(offered, known)

        missing, total = partial.missing(), partial.index.nbytes
        there = total - sum(blob.nbytes for blob in missing)
        self.under_way = partial
        try:
            with Meter("fetching the state", "B", self._place.emit, self._place.clock, total, done=there) as meter:
                return await pull(self._node, missing, offered.donors, keep, self._place.clock, more)
        finally:
            self.under_way = None

    def _tell(self, partial: Partial, delivered: dict[PeerId, int]) -> None:
        assert self._began_at is not None
        self._place.emit(
            StateJoined(
                round=partial.head.round,
                nbytes=partial.index.nbytes,
                fetched_nbytes=sum(delivered.values()),
                duration_s=self._place.clock.now() - self._began_at,
                donors=tuple(sorted(delivered)),
            )
        )
        self._began_at = None
