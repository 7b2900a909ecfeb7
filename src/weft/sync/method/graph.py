"""Who exchanges with whom in a round, and what each one's parameters weigh: the mixing matrix W of gossip.

    graph         neighbours of i, of n                            w_ij                     in a round
    ring          i - 1, i + 1                                     Metropolis               all
    torus         the four beside it on a grid, rows x columns     Metropolis               all
    random        `degree`, drawn once                             Metropolis               all
    exponential   i - 1, i - 2, i - 4, ...                         1 / (1 + ceil(log2 n))   all
    one_peer      one of those, in turn                            1/2                      one
    pairs         a partner, drawn anew for each round             1/2                      one
    complete      everybody                                        1 / n                    all

    Metropolis: w_ij = 1 / (1 + max(degree_i, degree_j));  w_ii = 1 - sum_j w_ij

Rows and columns of W sum to one, so mixing keeps the mean over all. The spectral gap, 1 - |lambda_2|, tells how
fast it brings all to the mean: the distance to the mean shrinks by |lambda_2| per round; of graphs that change from
round to round it is that of the mean round. 0 means that some never hear of the others.

Where somebody is not counted in a round, weights to and from it are left out. That keeps the mean where w_ij = w_ji;
`exponential` and `one_peer` move it then.

Members stand in ascending order. The same integers give the same graph on every machine.

Metropolis weights: Xiao, Boyd and Lall, "Distributed average consensus with time-varying Metropolis weights", 2006.
Exponential graphs: Assran et al., 1811.10792; Ying et al., 2110.13363.
"""

import math
from functools import lru_cache
from typing import Literal

import numpy as np

from weft.rng import order_key

GraphName = Literal["ring", "torus", "random", "exponential", "one_peer", "pairs", "complete"]
Mixing = tuple[dict[int, float], ...]  # of member i, who it takes from, and with which weight w_ij; itself left out

_CHANGING: frozenset[GraphName] = frozenset(("one_peer", "pairs"))


def is_static(graph: GraphName) -> bool:
    """Return whether the graph is the same in all rounds."""
    return graph not in _CHANGING


@lru_cache(maxsize=64)  # asked with every message of a round
def mixing(graph: GraphName, num: int, degree: int = 4, key: str = "", round: int = 0) -> Mixing:
    """Return the mixing matrix of `num` members.

    Args:
        degree: of the random graph. With no more members than that plus one, all are neighbours.
        key: of a run, which draws what is drawn.
    """
    everybody = range(num)
    match graph:
        case "complete":
            return tuple({j: 1 / num for j in everybody if j != i} for i in everybody)
        case "ring":
            return _metropolis([{(i - 1) % num, (i + 1) % num} - {i} for i in everybody])
        case "torus":
            return _metropolis(_torus(num))
        case "random":
            return _metropolis(_random(num, degree, key))
        case "exponential":
            hops = _hops(num)
            return tuple({(i - hop) % num: 1 / (1 + len(hops)) for hop in hops} for i in everybody)
        case "one_peer":
            hops = _hops(num)
            return tuple({(i - hops[round % len(hops)]) % num: 0.5} if hops else {} for i in everybody)
        case "pairs":
            partners = _pairs(num, f"{key} {round}")
            return tuple({partners[i]: 0.5} if i in partners else {} for i in everybody)


def spectral_gap(graph: GraphName, num: int, degree: int = 4, key: str = "") -> float:
    """Return 1 - |lambda_2| of a round's mixing; of the mean round, where the graph changes. 1 for a member alone.

    Of random pairs it is that of the expected matrix, which is what the distance shrinks by, squared, in expectation.
    """
    if num < 2:
        return 1.0
    if graph == "pairs":  # W W = W; the expectation has 1/2 on the diagonal, or less where one is left alone
        left = num % 2 / num
        diagonal = left + (1 - left) / 2
        return 1.0 - (diagonal - (1 - diagonal) / (num - 1))
    num_rounds = len(_hops(num)) if graph == "one_peer" else 1
    product = np.eye(num)
    for round in range(num_rounds):
        product = _matrix(mixing(graph, num, degree, key, round)) @ product
    moduli = np.sort(np.abs(np.linalg.eigvals(product)))
    second = min(float(moduli[-2]), 1.0)
    return float(1.0 - second ** (1 / num_rounds))


def _matrix(mixing: Mixing) -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
    matrix = np.eye(len(mixing))
    for i, row in enumerate(mixing):
        for j, weight in row.items():
            matrix[i, j] = weight
        matrix[i, i] = 1.0 - sum(row.values())
    return matrix


def _metropolis(neighbours: list[set[int]]) -> Mixing:
    return tuple({j: 1 / (1 + max(len(mine), len(neighbours[j]))) for j in sorted(mine)} for mine in neighbours)


def _torus(num: int) -> list[set[int]]:
    """Return the neighbours on a grid that is as square as `num` allows; of a prime, that is a ring."""
    rows = next(rows for rows in range(math.isqrt(num), 0, -1) if num % rows == 0)
    columns = num // rows
    return [
        {
            (row + down) % rows * columns + (column + right) % columns
            for down, right in ((1, 0), (-1, 0), (0, 1), (0, -1))
        }
        - {row * columns + column}
        for row in range(rows)
        for column in range(columns)
    ]


def _random(num: int, degree: int, key: str) -> list[set[int]]:
    """Return the neighbours in cycles through all members, each in an order of its own; of an odd degree, in pairs too.

    One cycle already connects all. Where two share an edge, its ends have a neighbour less.
    """
    if degree >= num - 1:
        return [set(range(num)) - {i} for i in range(num)]
    neighbours: list[set[int]] = [set() for _ in range(num)]
    for number in range(degree // 2):
        cycle = _shuffled(num, f"{key} cycle {number}")
        for one, other in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
            neighbours[one].add(other)
            neighbours[other].add(one)
    if degree % 2:
        for one, other in _pairs(num, key).items():
            neighbours[one].add(other)
    return neighbours


def _hops(num: int) -> list[int]:
    return [1 << power for power in range((num - 1).bit_length())]


def _pairs(num: int, key: str) -> dict[int, int]:
    order = _shuffled(num, f"{key} pairs")
    pairs = zip(order[::2], order[1::2], strict=False)
    return {one: other for pair in pairs for one, other in (pair, pair[::-1])}


def _shuffled(num: int, key: str) -> tuple[int, ...]:
    return tuple(sorted(range(num), key=lambda i: order_key("graph", key, i)))
