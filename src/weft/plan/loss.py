"""What rare outer steps cost in loss, as far as it was published, and how many more tokens make up for it.

    losses of DiLoCo with M replicas, every 30 steps, and of plain data-parallel training    profiles.toml, [replicas]
    + slope ln(H / 30)          nats, for H inner steps between outer ones                   profiles.toml, [steps]
    B / D^b - nats = B / D'^b   D' tokens reach the loss that plain training reaches with D

The last line is the term of data in the parametric loss of Hoffmann et al., 2203.15556, section 3.3: B 410.7, b 0.28.

Between the rows the relative difference is interpolated by the logarithms of parameters and replicas; beyond them the
nearest row holds, and beyond eight replicas the published power of their number. Fewer than 30 steps are credited
with nothing. All of it was measured on text in tokens of about four bytes, with some thousands of rounds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from weft.plan.profiles import Replicas, Steps, known

B, BETA = 410.7, 0.28
# benchmarks/reports/shakespeare.md: four peers end 8 % above one peer's loss on as many tokens after 100 outer steps,
# 9 % after 50, 13 % after 20. The published runs had thousands.
FEW_ROUNDS, MIN_ROUNDS = 200, 50
MOST_OF = 0.9  # of what more tokens can still gain: beyond, the number asked for grows without bound


@dataclass(frozen=True, kw_only=True)
class Penalty:
    """Against data-parallel training on as many tokens.

    Args:
        share: of the loss: 0.01 is one per cent more.
        nats: per token, of the published loss at that size.
        more_tokens: times as many tokens reach the same loss; None: no number does.
        notes: where the figures were stretched beyond what was measured.
    """

    share: float
    nats: float
    more_tokens: float | None
    notes: tuple[str, ...] = ()


NONE = Penalty(share=0.0, nats=0.0, more_tokens=1.0)


def penalty(num_parameters: int, num_peers: int, every: int, num_tokens: int) -> Penalty:
    """Return what DiLoCo with so many peers and inner steps costs a run of `num_tokens`."""
    replicas, steps = known().replicas, known().steps
    plain, share = _at_thirty(replicas, num_parameters, num_peers)
    slope = {1: 0.0, 2: steps.two}.get(num_peers, steps.more)
    nats = max(0.0, plain * share + slope * math.log(max(1.0, every / steps.measured_every)))
    return Penalty(
        share=nats / plain,
        nats=nats,
        more_tokens=_more_tokens(nats, num_tokens),
        notes=tuple(_stretched(replicas, steps, num_parameters, num_peers, every)),
    )


def _at_thirty(replicas: Replicas, num_parameters: int, num_peers: int) -> tuple[float, float]:
    """Return the plain loss at a size, and what share of it more DiLoCo's is every 30 steps."""
    sizes = [math.log(row.parameters) for row in replicas.row]
    counts = [math.log(count) for count in replicas.counts]
    here, among = math.log(max(1, num_parameters)), math.log(num_peers)
    plain = _between(sizes, [row.plain for row in replicas.row], here)
    ratios = [_between(counts, [loss / row.plain for loss in row.diloco], among) for row in replicas.row]
    ratio = _between(sizes, ratios, here) * max(1.0, num_peers / replicas.counts[-1]) ** replicas.growth
    return plain, ratio - 1


def _more_tokens(nats: float, num_tokens: int) -> float | None:
    reducible = B / num_tokens**BETA
    if nats > MOST_OF * reducible:
        return None
    return float((1 - nats / reducible) ** (-1 / BETA))


def _stretched(replicas: Replicas, steps: Steps, num_parameters: int, num_peers: int, every: int) -> list[str]:
    notes = []
    least, most = replicas.row[0].parameters, replicas.row[-1].parameters
    if not least <= num_parameters <= most:
        notes.append(f"measured from {least / 1e6:.0f}M to {most / 1e9:.1f}B parameters")
    if num_peers > replicas.counts[-1]:
        notes.append(f"measured with at most {replicas.counts[-1]} replicas")
    if every > steps.last_every:
        notes.append(f"measured up to {steps.last_every} training steps")
    return notes


def _between(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """Return the value at a place between two neighbours, by straight lines; outside, that of the nearest."""
    for (left, low), (right, high) in pairwise(zip(places, values, strict=True)):
        if left <= at <= right:
            return low + (high - low) * (at - left) / (right - left)
    return values[0] if at < places[0] else values[-1]
