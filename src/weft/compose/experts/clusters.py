"""Clusters of documents: centres in the vectors of a tf-idf, found by balanced k-means, each found again by anybody.

    sample ──tf-idf──► vectors ──balanced k-means──► centres        once, by one
    document ──tf-idf──► vector ──nearest centre──► cluster         by each who has documents

Balanced: in each round every centre gets equally many points of the sample, with the least sum of squared distances,
so no expert is left with a handful of documents. Afterwards a document goes to the nearest centre, however many are
there: c-BTM (arXiv:2303.14177, section 2.1), which balances by an auction. Here the assignment is exact: it starts with
every point at its nearest centre and moves points from centres that have too many along the cheapest chains to those
that have too few (successive shortest paths). First centres: k-means++ (Arthur and Vassilvitskii, 2007).
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64, Int64

from weft import rng, wire
from weft.compose.experts.tfidf import Tfidf, TfidfRecord
from weft.errors import DataError, WireError
from weft.ids import Digest

FORMAT = 1
MOST_CLUSTERS = 1 << 8  # the assignment's chains take time with the square of them; c-BTM goes to 128
MOST_ROUNDS = 20  # of k-means, as in the paper's code
_ONE = 1 << 40  # the largest cost, in integers: chains of 2^8 moves, added up, stay exact
_NO_MOVE = 1 << 60


class ClustersRecord(wire.Record, frozen=True, kw_only=True):
    """All that it takes to find the cluster of a document.

    Args:
        centres: a row each, fp32, little-endian.
    """

    format: int = FORMAT
    tfidf: TfidfRecord
    num: int
    centres: bytes


@dataclass(frozen=True, eq=False)
class Clusters:
    tfidf: Tfidf
    centres: Float32[np.ndarray, "clusters directions"]

    @classmethod
    def of(cls, record: ClustersRecord) -> "Clusters":
        """
        Raises:
            WireError: the record is of another format, or not whole.
        """
        tfidf = Tfidf.of(record.tfidf)
        num_directions = tfidf.directions.shape[1]
        if record.format != FORMAT:
            raise WireError(f"clusters of format {record.format}; this weft reads {FORMAT}")
        if not 0 < record.num <= MOST_CLUSTERS or len(record.centres) != 4 * record.num * num_directions:
            raise WireError(f"{record.num} clusters, which are none, too many, or not as many as their centres")
        centres = np.frombuffer(record.centres, "<f4").astype(np.float32).reshape(record.num, num_directions)
        if not np.isfinite(centres).all():
            raise WireError("clusters whose centres are not finite")
        return cls(tfidf, centres)

    @cached_property
    def record(self) -> ClustersRecord:
        return ClustersRecord(tfidf=self.tfidf.record, num=self.num, centres=self.centres.astype("<f4").tobytes())

    @cached_property
    def digest(self) -> Digest:
        return wire.digest_of(self.record)

    @property
    def num(self) -> int:
        return len(self.centres)

    def distances(self, vectors: Float32[np.ndarray, "texts directions"]) -> Float64[np.ndarray, "texts clusters"]:
        """Return squared distances to the centres."""
        return squared_distances(vectors, self.centres)

    def nearest(self, texts: list[str]) -> Int64[np.ndarray, " texts"]:
        """Return the cluster of each text: the first of those that are equally near."""
        found: Int64[np.ndarray, " texts"] = self.distances(self.tfidf.vectors(texts)).argmin(1)
        return found

    def words(self, num: int) -> list[tuple[str, ...]]:
        """Return for each cluster so many words that count most in it: what it is about, for a person to read."""
        order = np.argsort(-(self.centres @ self.tfidf.directions.T), axis=1, kind="stable")[:, :num]
        return [tuple(self.tfidf.words[place] for place in row) for row in order]


def decode(data: wire.Buffer) -> Clusters:
    """Return the clusters that a record's bytes hold, which anybody may have written.

    Raises:
        WireError: malformed, too large, or not whole.
    """
    record: ClustersRecord = wire.decode(data, ClustersRecord)
    return Clusters.of(record)


def clustered(tfidf: Tfidf, vectors: Float32[np.ndarray, "points directions"], num: int, seed: int) -> Clusters:
    """Return clusters of a sample's vectors.

    Args:
        vectors: by `tfidf`; those of length 0 count for nothing, and up to `num - 1` of the last, so that all clusters
            get equally many.

    Raises:
        DataError: fewer than `num` of them, or more clusters than there may be.
    """
    known = vectors[vectors.any(1)]
    if not 0 < num <= min(len(known), MOST_CLUSTERS):
        raise DataError(
            f"{num} clusters of {len(known)} documents. Allowed: 1 to {MOST_CLUSTERS}, and as many documents or more."
        )
    points = known[: len(known) - len(known) % num].astype(np.float64)
    centres = _apart(points, num, rng.stream(seed, "clusters"))
    members: Int64[np.ndarray, " points"] | None = None
    for _ in range(MOST_ROUNDS):
        before, members = members, balanced(squared_distances(points, centres))
        if before is not None and np.array_equal(before, members):
            break
        centres = np.stack([points[members == cluster].mean(0) for cluster in range(num)])
    return Clusters(tfidf, centres.astype(np.float32))


def squared_distances(
    points: "np.ndarray[Any, np.dtype[np.floating[Any]]]", centres: "np.ndarray[Any, np.dtype[np.floating[Any]]]"
) -> Float64[np.ndarray, "points clusters"]:
    # |x - c|^2 = |x|^2 - 2 x c + |c|^2
    x, c = points.astype(np.float64), centres.astype(np.float64)
    found: Float64[np.ndarray, "points clusters"] = (x * x).sum(1)[:, None] - 2 * (x @ c.T) + (c * c).sum(1)
    np.maximum(found, 0.0, out=found)  # what rounding leaves may lie below
    return found


def _apart(
    points: Float64[np.ndarray, "points directions"], num: int, generator: np.random.Generator
) -> Float64[np.ndarray, "clusters directions"]:
    """Return points that lie apart: each drawn by the square of its distance to the nearest drawn before."""
    chosen = [int(generator.integers(len(points)))]
    near = squared_distances(points, points[chosen])[:, 0]
    while len(chosen) < num:
        place = int(np.searchsorted(np.cumsum(near), generator.random() * near.sum(), side="right"))
        chosen.append(min(place, len(points) - 1))
        near = np.minimum(near, squared_distances(points, points[chosen[-1:]])[:, 0])
    return points[chosen]


def balanced(costs: Float64[np.ndarray, "points clusters"]) -> Int64[np.ndarray, " points"]:
    """Return a cluster for each point: each cluster gets equally many, and the sum of costs is the least.

    Costs are rounded to 2^-40 of the largest. Of assignments that cost the same, always the same one.

    Args:
        costs: not negative; a multiple of the clusters of points.
    """
    num_points, num = costs.shape
    assert num_points % num == 0, "of each cluster's points there are equally many"
    largest = float(costs.max(initial=0.0))
    whole = np.rint(costs / (largest or 1.0) * _ONE).astype(np.int64)
    members: Int64[np.ndarray, " points"] = whole.argmin(1)
    surplus = np.bincount(members, minlength=num) - num_points // num
    moves = _Moves(whole, members)
    while (surplus > 0).any():
        path = moves.cheapest(surplus)
        moves.make(path)
        surplus[path[0]] -= 1
        surplus[path[-1]] += 1
    return members


class _Moves:
    """From each cluster to each other: the point that is moved there at the least cost, which may be negative.

    Moved along cheapest chains alone, no round of moves saves anything: so chains never go in circles.
    """

    def __init__(self, costs: Int64[np.ndarray, "points clusters"], members: Int64[np.ndarray, " points"]) -> None:
        num = costs.shape[1]
        self._costs, self._members = costs, members
        self._extra = np.full((num, num), _NO_MOVE)
        self._point = np.zeros((num, num), np.int64)
        for cluster in range(num):
            self._look(cluster)

    def _look(self, cluster: int) -> None:
        points = np.flatnonzero(self._members == cluster)
        self._extra[cluster] = _NO_MOVE
        if len(points):
            extra = self._costs[points] - self._costs[points, cluster, None]
            best = extra.argmin(0)
            self._extra[cluster], self._point[cluster] = extra[best, np.arange(extra.shape[1])], points[best]

    def cheapest(self, surplus: Int64[np.ndarray, " clusters"]) -> list[int]:
        """Return the cheapest chain from any cluster that has too many points to any that has too few."""
        cost, before = np.where(surplus > 0, 0, _NO_MOVE), np.full(len(surplus), -1)
        for _ in range(len(surplus)):  # Bellman and Ford
            through = cost[:, None] + self._extra
            best = through.min(0)
            is_better = best < cost
            if not is_better.any():
                break
            before = np.where(is_better, through.argmin(0), before)
            cost = np.minimum(cost, best)
        path = [int(np.where(surplus < 0, cost, _NO_MOVE).argmin())]
        while before[path[-1]] >= 0:
            path.append(int(before[path[-1]]))
        return path[::-1]

    def make(self, path: list[int]) -> None:
        """Move a point along each step of a chain."""
        for here, there in pairwise(path):
            self._members[self._point[here, there]] = there
        for cluster in path:
            self._look(cluster)
