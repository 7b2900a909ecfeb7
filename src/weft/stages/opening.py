"""Who holds which stage when a run begins.

It does not know how fast anybody is: that is measured once all compute.
"""

from collections.abc import Sequence

from weft.ids import PeerId
from weft.stages.messages import StageBegin


def assigned(peers: Sequence[PeerId], num_stages: int) -> StageBegin:
    """Return who holds what at first: peers take stages in turn, from the first on; of few, each takes several."""
    num = max(len(peers), num_stages)
    return StageBegin(
        peers=tuple(peers[number % len(peers)] for number in range(num)),
        stages=tuple(number % num_stages for number in range(num)),
    )


def num_first(num_peers: int, num_stages: int) -> int:
    """Return how many members the first stage has at first: who begins all samples."""
    return -(-num_peers // num_stages)
