"""How the state comes to a newcomer: which members are asked to pin it, and its chunks from all of them at once.

    ask       some of those that hold one, the furthest first, to pin one and the same head
    choose    the state that most of them offer
    pull      the chunks that are missing, from everybody who offers that state

What has come stays, also over a restart of this process: the same head is asked for again as long as that is less to
fetch than a newer one.

Failure:
- some donors vanish, lie or forget their pin: the others deliver the rest. All do: the caller asks again, and what has
  come stays.
- members disagree what the state at one head is: what most of those asked offer is believed, and an event says so.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from weft.errors import PeerError, WireError
from weft.events import Notice
from weft.ids import Digest, PeerId, short
from weft.net.messages import Heartbeat
from weft.net.multi_source import Blob, pull
from weft.peer.chain import Heads
from weft.peer.context import Context
from weft.peer.fork.choice import NEAR
from weft.peer.state.replica import Replica
from weft.peer.state.state_client import MAX_DONORS, Offered, StateClient, joined, most_offered
from weft.progress import Meter
from weft.store.partial import Partial, drop
from weft.sync.records.charter import Charter
from weft.sync.records.messages import Manifest
from weft.wire import Buffer, digest_of

Beats = Callable[[], Mapping[PeerId, Heartbeat]]


class StateFetch:
    """Fetches states for one peer, of the shape that `replica` has.

    Args:
        beats: returns what linked members told last: who stands at a head can still pin it.
    """

    def __init__(self, context: Context, replica: Replica, beats: Beats) -> None:
        self._context = context
        self._client = StateClient(context.node, context.compute, context.clock)
        self._replica = replica
        self._beats = beats
        self._folder = context.folder.arriving
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
            self._began_at = self._context.clock.now()
        if not self._is_opened:
            self._partial = await self._context.compute.serve(
                lambda: Partial.open(self._folder, self._context.memory.empty)
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
        await self._context.compute.serve(partial.drop)
        self._partial = None
        self._tell(partial, delivered)
        return partial.head, partial.charter, partial.vectors

    async def forget(self) -> None:
        """Drop what has come of a state: this peer needs none."""
        self._partial = None
        await self._context.compute.serve(lambda: drop(self._folder))

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
        offers: list[Offered] = []
        failures: list[str] = []
        rest = list(peers)
        while rest and len(offers) < MAX_DONORS:
            now, rest = rest[: MAX_DONORS - len(offers)], rest[MAX_DONORS - len(offers) :]
            for peer, offer in (await self._offers(now, wanted)).items():
                if isinstance(offer, str):
                    self.failed.add(peer)
                    failures.append(offer)
                else:
                    offers.append(offer)
        if not offers:
            raise PeerError(f"nobody offers a state: {'; '.join(failures)}")
        chosen = most_offered(offers)
        self._tell_disagreement(chosen.head, chosen.index)
        return chosen

    async def _offers(self, peers: Sequence[PeerId], wanted: Digest) -> dict[PeerId, Offered | str]:
        """Return what these offer, counted among the votes, or why it is not believed."""
        self._asked |= set(peers)
        offers = await self._client.offers(peers, wanted)
        for peer, offer in offers.items():
            if isinstance(offer, str):
                continue
            if offer.head.round > self._last:
                offers[peer] = f"{short(peer)} offers round {offer.head.round}, which nobody else has come near"
            else:
                self._votes[digest_of(offer.head), offer.index] += 1
        return offers

    def _tell_disagreement(self, head: Manifest, index: Digest) -> None:
        name = digest_of(head)
        num_asked = sum(votes for (each, _), votes in self._votes.items() if each == name)
        if self._votes[name, index] < num_asked:
            text = f"members disagree what the state after round {head.round} is: {self._votes[name, index]} of "
            text += f"{num_asked} asked are believed; others lie, or their machines are broken"
            self._context.emit(Notice(text=text))

    async def _begin(self, offered: Offered) -> Partial:
        """Return what is to be completed: what has come, if it is of the offered state, else a new one."""
        before = self._partial
        if before is not None and (before.name, digest_of(before.index)) == (digest_of(offered.head), offered.index):
            return before
        index = await self._client.index(offered.index, offered.donors)
        if index.shape != {name: vector.numel() for name, vector in self._replica.vectors().items()}:
            raise WireError("the offered state has other vectors than this run's model")
        partial = Partial(self._folder, offered.head, offered.charter, index, self._context.memory.empty)
        await self._context.compute.serve(lambda: partial.begin(before))
        self._partial = partial
        return partial

    async def _more(self, offered: Offered, known: Sequence[PeerId]) -> Sequence[PeerId]:
        """Ask those that stand at the head and were not asked to pin it, too: a link may have come up since."""
        beats, wanted = self._beats(), digest_of(offered.head)
        found = [peer for peer, beat in beats.items() if beat.manifest == wanted and peer not in self._asked]
        answers = await self._offers(found[: max(MAX_DONORS - len(known), 0)], wanted)
        if (
            max(votes for (each, _), votes in self._votes.items() if each == wanted)
            > self._votes[wanted, offered.index]
        ):
            raise PeerError(f"most members offer another state after round {offered.head.round} than those asked first")
        offers = [each for each in answers.values() if isinstance(each, Offered) and each.head == offered.head]
        if any(offer.index != offered.index for offer in offers):
            self._tell_disagreement(offered.head, offered.index)
        return [peer for offer in offers if offer.index == offered.index for peer in offer.donors]

    async def _pull(self, partial: Partial, offered: Offered) -> dict[PeerId, int]:
        async def keep(blob: Blob, data: Buffer) -> None:
            was_kept = partial.why_not_kept is None
            await self._context.compute.serve(lambda: partial.put(blob.digest, data))
            meter.add(len(data))
            if was_kept and partial.why_not_kept is not None:
                text = f"what has come of the state cannot be kept on disk ({partial.why_not_kept}): should this "
                self._context.emit(Notice(text=text + "process end before all has come, it is fetched anew"))

        async def more(known: Sequence[PeerId]) -> Sequence[PeerId]:
            return await self._more(offered, known)

        missing, total = partial.missing(), partial.index.nbytes
        there = total - sum(blob.nbytes for blob in missing)
        self.under_way = partial
        try:
            with Meter("fetching the state", "B", self._context.emit, self._context.clock, total, done=there) as meter:
                return await pull(self._context.node, missing, offered.donors, keep, self._context.clock, more)
        finally:
            self.under_way = None

    def _tell(self, partial: Partial, delivered: dict[PeerId, int]) -> None:
        assert self._began_at is not None
        took_s = self._context.clock.now() - self._began_at
        self._context.emit(joined(partial.head, partial.index, delivered, took_s))
        self._began_at = None
