"""How a state comes from those who hold it: newcomers, gatherers, anchors, and who lacks a fork ask the same way.

    ask         peers what state they hold; one that is named, they pin
    offers      of one state, opened: what most of those asked offer is believed (`most_offered`)
    index       the digests of its chunks, from the first who delivers it
    pull        its chunks, from everybody who offers it, each to all its places as it comes

After a commit replicas are equal, and so are the digests of their chunks. `Ranking` says whom to ask first. What is to
outlive this process (`weft.store.chunks`, `weft.anchor.disk`) is pulled by digest (`weft.net.multi_source`).

Failure:
- some of those asked do not answer, lie or vanish: the others do. All do: PeerError says what each answered.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from weft.clock import Clock
from weft.errors import NetError, PeerError, Refused
from weft.events import StateJoined
from weft.ids import Digest, PeerId, RunId, short
from weft.net.blobs.blobs import first_of
from weft.net.membership.membership import Membership
from weft.net.multi_source import Blob, pull
from weft.net.node import Node
from weft.peer.messages import StateOffer, StateRequest
from weft.sync.records.charter import Charter
from weft.sync.records.index import MAX_INDEX_NBYTES, StateIndex
from weft.sync.records.messages import Manifest, has_right_entry
from weft.tasks import Compute
from weft.wire import Buffer, decode, digest_of

MAX_DONORS = 4  # each copies its state for whoever asks, whose line is seldom faster than those of four
CALL_S = 10.0
OFFER_S = 60.0  # for a member to copy its state and name the chunks
FAILED_S = 60.0  # who failed to deliver is asked after all others for so long

Put = Callable[[str, int, Buffer], None]  # numbers of a vector, from this one on


@dataclass(frozen=True, kw_only=True)
class Offered:
    """One state, and who offers it, in the order asked."""

    head: Manifest
    charter: Charter
    index: Digest
    donors: tuple[PeerId, ...]


def opened(peer: PeerId, offer: StateOffer, run: RunId) -> Offered | str:
    """Return what a peer's answer offers, or what is wrong with it."""
    if offer.head is None or offer.index is None or offer.charter is None or offer.head.run != run:
        return f"{short(peer)} offers no state of this run"
    if digest_of(offer.charter) != offer.head.charter or not has_right_entry(offer.head, offer.charter):
        return f"{short(peer)} offers a state with another charter than its manifest names"
    return Offered(head=offer.head, charter=offer.charter, index=Digest(offer.index), donors=(peer,))


def most_offered(offers: Iterable[Offered]) -> Offered:
    """Return the state that most offer, with all who do; of several the latest. There must be an offer."""
    found: dict[tuple[Digest, Digest], Offered] = {}
    for offer in offers:
        key = digest_of(offer.head), offer.index
        donors = (*found[key].donors, *offer.donors) if key in found else offer.donors
        found[key] = Offered(head=offer.head, charter=offer.charter, index=offer.index, donors=donors)
    return found[max(found, key=lambda each: (len(found[each].donors), found[each].head.round, each))]


def joined(head: Manifest, index: StateIndex, delivered: dict[PeerId, int], took_s: float) -> StateJoined:
    """Return the event that a state has come, of which each donor has delivered so many bytes."""
    return StateJoined(
        round=head.round,
        nbytes=index.nbytes,
        fetched_nbytes=sum(delivered.values()),
        duration_s=took_s,
        donors=tuple(sorted(delivered)),
    )


class StateClient:
    """Asks those linked to a node, or on a channel, for states of its run."""

    def __init__(self, node: Node, compute: Compute, clock: Clock) -> None:
        self._node = node
        self._compute = compute
        self._clock = clock

    async def ask(
        self, peers: Sequence[PeerId], wanted: Digest | None = None, deadline_s: float = CALL_S
    ) -> dict[PeerId, StateOffer | str]:
        """Return what each of these answers, all asked at once, or why it does not.

        Args:
            wanted: the head of the state that they are to pin; None: they only say which they have.
        """
        request = StateRequest(run=self._node.run, wanted=wanted)

        async def answer(peer: PeerId) -> StateOffer | str:
            try:
                return await self._node.call(peer, request, StateOffer, deadline_s=deadline_s)
            except (PeerError, NetError, Refused) as error:
                return str(error)

        return dict(zip(peers, await asyncio.gather(*map(answer, peers)), strict=True))

    async def offers(self, peers: Sequence[PeerId], wanted: Digest) -> dict[PeerId, Offered | str]:
        """Return what each of these offers, asked to pin the state at a head, or why nothing."""
        answers = await self.ask(peers, wanted, OFFER_S)
        return {
            peer: answer if isinstance(answer, str) else opened(peer, answer, self._node.run)
            for peer, answer in answers.items()
        }

    async def index(self, wanted: Digest, donors: Sequence[PeerId]) -> StateIndex:
        """
        Raises:
            PeerError: nobody delivers it.
        """

        async def fetch(donor: PeerId) -> StateIndex:
            data = await self._node.fetch_small(donor, wanted, MAX_INDEX_NBYTES)
            return decode(data, StateIndex, max_nbytes=MAX_INDEX_NBYTES)  # type: ignore[no-any-return]

        return await first_of(donors, fetch, lambda: "the index of its state")

    async def pull(
        self,
        index: StateIndex,
        donors: Sequence[PeerId],
        put: Put,
        names: Collection[str] | None = None,
        on_come: Callable[[int], None] = lambda _nbytes: None,
    ) -> dict[PeerId, int]:
        """Fetch vectors; return how many bytes each donor delivered.

        Args:
            put: given each piece, where states are merged; pieces come in any order.
            names: of the vectors; None: all.
            on_come: told the bytes of each chunk once it is put.

        Raises:
            PeerError: nobody is left who delivers; what has come has been put.
        """
        places = index.places(names)

        async def keep(blob: Blob, data: Buffer) -> None:
            def put_all() -> None:
                for each in places[blob.digest]:
                    put(each.name, each.start, data)

            await self._compute.serve(put_all)
            on_come(len(data))

        blobs = [Blob(digest=name, nbytes=each[0].nbytes) for name, each in places.items()]
        return await pull(self._node, blobs, donors, keep, self._clock)


class Ranking:
    """Whom to ask for what is further than what is here: who tells of the most first, who just failed last."""

    def __init__(self, node: Node, membership: Membership, clock: Clock) -> None:
        self._node = node
        self._membership = membership
        self._clock = clock
        self._failed_at: dict[PeerId, float] = {}

    def note_failure(self, *peers: PeerId) -> None:
        """Note that these have not delivered."""
        now = self._clock.now()
        kept = {peer: at for peer, at in self._failed_at.items() if now - at < FAILED_S}
        self._failed_at = kept | dict.fromkeys(peers, now)

    def has_failed(self, peer: PeerId) -> bool:
        """Return whether it failed to deliver just now."""
        at = self._failed_at.get(peer)
        return at is not None and self._clock.now() - at < FAILED_S

    def furthest_first(self) -> list[PeerId]:
        """Return the linked peers, those first that tell of the latest state, and last who just failed."""

        def place(peer: PeerId) -> tuple[bool, int, int, PeerId]:
            beat = self._membership.heartbeat_of(peer)
            if beat is None or beat.manifest is None:
                return self.has_failed(peer), 0, 0, peer
            return self.has_failed(peer), -beat.committed_tokens, -beat.round - 1, peer

        return sorted(self._node.peers, key=place)
