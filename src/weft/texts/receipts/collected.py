"""Receipts of all texts of one that asks: what is wrong with them, told once, and those of the last texts."""

from collections import OrderedDict
from collections.abc import Callable, Iterable

from weft.events import Event, ReceiptFailed
from weft.ids import PeerId
from weft.texts.messages import Receipts
from weft.texts.receipts.witness import Kept

MAX_KEPT = 8192  # receipts of texts that have ended
MAX_TOLD = 1024  # failures of receipts, each told once; and weights that members have named


class Collected:
    """
    Args:
        tell: what is wrong.
    """

    def __init__(self, tell: Callable[[Event], None]) -> None:
        self._tell = tell
        self._kept: OrderedDict[bytes, tuple[Kept, ...]] = OrderedDict()
        self._weights: OrderedDict[tuple[int, int], bytes] = OrderedDict()  # by round and stage
        self._failed: OrderedDict[tuple[PeerId, str], None] = OrderedDict()

    @property
    def kept(self) -> dict[bytes, tuple[Kept, ...]]:
        return dict(self._kept)

    def keep(self, text: bytes, kept: tuple[Kept, ...]) -> None:
        """Take up the receipts of a text that has ended, in place of the oldest."""
        if kept:
            self._kept[text] = kept
        while sum(map(len, self._kept.values())) > MAX_KEPT:
            self._kept.popitem(last=False)

    def named(self, peer: PeerId, round: int, note: Receipts) -> None:
        """A member says with which weights it computes: all have the same after a round."""
        if note.weights is None:
            return
        if self._weights.setdefault((round, note.stage), note.weights) != note.weights:
            why = "it names other weights than another member for the same round"
            self.tell([ReceiptFailed(stage=note.stage, member=peer, reason=why)])
        while len(self._weights) > MAX_TOLD:
            self._weights.popitem(last=False)

    def tell(self, found: Iterable[Event]) -> None:
        """Tell what is wrong, of each member and reason once."""
        for event in found:
            if isinstance(event, ReceiptFailed):
                if (event.member, event.reason) in self._failed:
                    continue
                self._failed[event.member, event.reason] = None
                if len(self._failed) > MAX_TOLD:
                    self._failed.popitem(last=False)
            self._tell(event)
