"""Whether this machine rounds as others do, by how near its training steps come to theirs. It judges nobody.

    share     the distance of two states, of what is held for honest (`weft.verify.judge`)
    unlike    a share of more than `NEAR`: honest machines that were measured came to less, in bf16 some to more
    this      of two members or more, more than half are unlike this machine: then it is the odd one, and not they

Who computes otherwise than the others is struck out as if it had cheated. So it should know before.
"""

from collections.abc import Collection
from dataclasses import dataclass

from weft.ids import PeerId

NEAR = 0.1


@dataclass(frozen=True)
class Apart:
    """How far two states lie apart, and how far they may."""

    distance: float
    held: float

    @property
    def share(self) -> float:
        return self.distance / self.held


@dataclass(frozen=True)
class Unlike:
    """What was measured.

    Args:
        farthest: of all.
        num_members: that were measured; num_unlike: of these.
    """

    farthest: Apart
    num_members: int
    num_unlike: int

    @property
    def is_this(self) -> bool:
        """Whether this machine is the odd one."""
        return self.num_members >= 2 and 2 * self.num_unlike > self.num_members

    @property
    def is_beyond(self) -> bool:
        return self.farthest.share > 1.0


class Calibration:
    """Of one machine, since its process began."""

    def __init__(self) -> None:
        self._farthest = dict[PeerId, Apart]()  # the largest share of each
        self._least: float | None = None

    def decided(self, members: Collection[PeerId]) -> None:
        """Forget who is no member any more."""
        self._farthest = {peer: apart for peer, apart in self._farthest.items() if peer in members}

    def note(self, peer: PeerId, apart: Apart) -> None:
        """Note how far this machine came from a peer's state by the same steps."""
        before = self._farthest.get(peer)
        if before is None or apart.share > before.share:
            self._farthest[peer] = apart
        self._least = apart.share if self._least is None else min(self._least, apart.share)

    @property
    def unlike(self) -> Unlike | None:
        """What it comes to; None: this machine came near to all."""
        shares = [each.share for each in self._farthest.values()]
        num = sum(share > NEAR for share in shares)
        farthest = max(self._farthest.values(), key=lambda each: each.share) if num else None
        return None if farthest is None else Unlike(farthest, len(shares), num)

    @property
    def is_apart_from_all(self) -> bool:
        """Whether nothing that was measured, of two members or more, came as near as honest machines do."""
        return len(self._farthest) >= 2 and self._least is not None and self._least > 1.0
