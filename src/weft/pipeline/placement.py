"""Which stage a peer holds: where a newcomer goes, and who moves when stages have become unequal.

    throughput of a pipeline = that of its weakest stage

A newcomer goes to the weakest stage. Every so often all work out the same moves from what peers tell of themselves: to
the weakest stage goes, of all others, that peer with whom the weaker of the two stages is strongest afterwards; then to
the stage that is weakest now, and so on while that gains anything worth a state's bytes. Nobody leaves a stage alone,
and who has just moved stays, so nobody goes to and fro.

Sections may be unequal work: a peer's rate is that in a section of usual work, and a stage is as fast as its members'
rates added up, over what a sample takes there.

After Ryabinin et al., SWARM, 2301.11913, section 3.3: there one peer moves each time, the least loaded of the least
loaded stage to the most loaded one, whatever that gains.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from weft.ids import PeerId
from weft.rng import order_key

GAIN = 0.02  # of the weakest stage's rate, at least: a move costs its peer's work while the state is fetched


@dataclass(frozen=True)
class Move:
    peer: PeerId
    source: int
    target: int


Stage = Mapping[PeerId, float]  # who holds it, and the samples that each does in a second, where work is usual


def totals_of(stages: Sequence[Stage], costs: Sequence[float] | None = None) -> list[float]:
    """Return the samples that each stage does in a second.

    Args:
        costs: of a sample in each stage, 1 where work is usual; None: they are alike.
    """
    return [sum(stage.values()) / cost for stage, cost in zip(stages, costs or [1.0] * len(stages), strict=True)]


def stage_for(peer: PeerId, stages: Sequence[Stage], costs: Sequence[float] | None = None) -> int:
    """Return where a newcomer gains most: the weakest stage. Of several, newcomers do not all choose the same."""
    totals = totals_of(stages, costs)
    return min(range(len(stages)), key=lambda number: (totals[number], order_key("stage", peer, number)))


def num_first(num_peers: int, num_stages: int) -> int:
    """Return how many members the first stage has when a run begins: who begins all samples."""
    return -(-num_peers // num_stages)


def moves(
    stages: Sequence[Stage], staying: Collection[PeerId] = (), costs: Sequence[float] | None = None
) -> tuple[Move, ...]:
    """Return who moves where, the most useful move first; equal for all who know the same.

    Args:
        staying: who has moved a short while ago, or cannot.
        costs: as of `totals_of`.
    """
    left, per_sample = [dict(stage) for stage in stages], costs or [1.0] * len(stages)
    found: list[Move] = []
    moved = set(staying)
    while True:
        totals = totals_of(left, costs)
        target = min(range(len(left)), key=lambda number: (totals[number], number))
        best: tuple[float, float, PeerId, int] | None = None  # of the two stages the weaker, the source; who, whence
        for source, stage in enumerate(left):
            if source == target or len(stage) < 2:
                continue
            for peer, rate in stage.items():
                rest = totals[source] - rate / per_sample[source]
                offer = min(rest, totals[target] + rate / per_sample[target]), rest, peer, source
                if peer not in moved and (best is None or offer > best):
                    best = offer
        if best is None or best[0] < totals[target] * (1 + GAIN) or best[0] <= 0:
            return tuple(found)
        _, _, peer, source = best
        found.append(Move(peer, source, target))
        left[target][peer] = left[source].pop(peer)
        moved.add(peer)
