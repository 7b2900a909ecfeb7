"""States that members offer, and which of them is believed: what most of those asked offer.

After a commit replicas are equal, and so are the digests of their chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from weft.ids import Digest, PeerId, RunId
from weft.peer.messages import StateOffer
from weft.sync.records.charter import Charter
from weft.sync.records.messages import Manifest
from weft.wire import digest_of

MAX_DONORS = 4  # each copies its state for whoever asks, whose line is seldom faster than those of four


@dataclass(frozen=True, kw_only=True)
class Offered:
    """One state, and who offers it, in the order asked."""

    head: Manifest
    charter: Charter
    index: Digest
    donors: tuple[PeerId, ...] = ()


def opened(offer: StateOffer, run: RunId) -> Offered | str:
    """Return what an answer offers, without its donor, or what is wrong with it."""
    if offer.head is None or offer.index is None or offer.charter is None or offer.head.run != run:
        return "offers no state of this run"
    if digest_of(offer.charter) != offer.head.charter:
        return "offers a state with another charter than its manifest names"
    return Offered(head=offer.head, charter=offer.charter, index=Digest(offer.index))


def most_offered(offers: Sequence[tuple[PeerId, Offered]]) -> Offered:
    """Return the state that most offer, with all who do; of several the latest. There must be an offer."""
    found: dict[tuple[Digest, Digest], Offered] = {}
    for peer, offer in offers:
        key = digest_of(offer.head), offer.index
        donors = (*found[key].donors, peer) if key in found else (peer,)
        found[key] = Offered(head=offer.head, charter=offer.charter, index=offer.index, donors=donors)
    return found[max(found, key=lambda each: (len(found[each].donors), found[each].head.round, each))]
