"""Which path a document takes: a score for each path, linear in the document's features z.

    k_means            the nearest of P centres:  -|z - c|^2, without |z|^2, is 2 c z - |c|^2
    product_k_means    z is split into a part for each level, whose modules are clusters of that part: for many paths
                       few centres. A path's centre is its modules' centres, one after the other.
    softmax            log p(path | z), but for what all paths have in common (`resharding`)

So a router is a matrix and a vector, whatever made it. All peers have the same one, by its digest. A document goes to
the best path, or to its best n: shards then overlap. No path starves: one that is the best of too few documents gets
those that lose least by it.

Centres are found in fp64, from a seed. DiPaCo: Douillard et al., 2403.10616, section 2. k-means++: Arthur and
Vassilvitskii, 2007.
"""

from dataclasses import dataclass
from math import prod
from typing import Annotated, Literal

import msgspec
import numpy as np
from jaxtyping import Float64, Int64

from weft import wire
from weft.compose.paths.levels import Levels, LevelsConfig
from weft.config import Config
from weft.errors import ConfigError, WireError
from weft.ids import Digest
from weft.rng import integers64, stream

Kind = Literal["k_means", "product_k_means", "softmax"]
Features = Float64[np.ndarray, "documents width"]
Shards = tuple[Int64[np.ndarray, " _"], ...]  # of each path, the numbers of its documents

PREFIX = 32  # tokens of a document that decide its path, and are not scored
MAX_ROUTER_NBYTES = 64 << 20  # of 4,096 paths and 4,096 channels, in fp32
MAX_STEPS = 300  # of k-means: it settles in tens

_LEVELS_NBYTES = 4096


class RoutingConfig(Config, frozen=True, kw_only=True):
    """How documents get their first paths."""

    kind: Annotated[
        Literal["k_means", "product_k_means"],
        msgspec.Meta(description="a centre for each path, or for each module: then levels are parts of the features"),
    ] = "k_means"
    num_tries: Annotated[int, msgspec.Meta(ge=1, le=1000, description="k-means; the closest is taken")] = 4
    overlap: Annotated[int, msgspec.Meta(ge=1, le=64, description="paths that train on a document")] = 1
    least: Annotated[
        float, msgspec.Meta(ge=0, le=1, description="of an even share of the documents: what each path has at least")
    ] = 0.25


class RouterRecord(wire.Record, frozen=True, kw_only=True):
    """A router, as all have it."""

    format: int = 1
    kind: Kind
    levels: LevelsConfig
    features: Digest  # of the vector of the model that z comes from
    prefix: int  # tokens that it reads of a document
    width: int
    weights: bytes  # little-endian fp32 [paths, width]
    biases: bytes  # little-endian fp32 [paths]


@dataclass(frozen=True, eq=False)
class Router:
    """
    Raises:
        WireError: the record's numbers do not fit its levels, or are not finite.
    """

    record: RouterRecord

    def __post_init__(self) -> None:
        num, sizes = prod(self.record.levels.levels), (len(self.record.weights), len(self.record.biases))
        if min(self.record.width, self.record.prefix) < 1 or sizes != (4 * num * self.record.width, 4 * num):
            raise WireError(
                f"a router of {num} paths and {self.record.width} features has {sizes[0]:,} bytes of weights and "
                f"{sizes[1]:,} of biases: it is incomplete, or of other levels"
            )
        if not (np.isfinite(self.weights).all() and np.isfinite(self.biases).all()):
            raise WireError("a router's numbers are NaN or infinite")

    @classmethod
    def from_bytes(cls, data: wire.Buffer) -> "Router":
        """
        Raises:
            WireError: these bytes are no router.
        """
        return cls(wire.decode(data, RouterRecord, max_nbytes=MAX_ROUTER_NBYTES + _LEVELS_NBYTES))

    def to_bytes(self) -> bytes:
        return wire.encode(self.record)

    @property
    def digest(self) -> Digest:
        return wire.digest_of(self.record)

    @property
    def weights(self) -> Float64[np.ndarray, "paths width"]:
        return _numbers(self.record.weights).reshape(-1, self.record.width)

    @property
    def biases(self) -> Float64[np.ndarray, " paths"]:
        return _numbers(self.record.biases)

    def scores(self, z: Features) -> Float64[np.ndarray, "documents paths"]:
        """
        Raises:
            ConfigError: the features are of another model.
        """
        if z.shape[1] != self.record.width:
            raise ConfigError(
                f"the router reads {self.record.width} features, found {z.shape[1]}. They come from another model than "
                "the one it was made with."
            )
        found: Float64[np.ndarray, "documents paths"] = z @ self.weights.T + self.biases
        return found

    def best(self, z: Features) -> Int64[np.ndarray, " documents"]:
        """Return the number of each document's path; of equal ones the first."""
        found: Int64[np.ndarray, " documents"] = self.scores(z).argmax(1)
        return found


def made(
    kind: Kind,
    levels: LevelsConfig,
    features: Digest,
    weights: Float64[np.ndarray, "paths width"],
    biases: Float64[np.ndarray, " paths"],
    prefix: int = PREFIX,
) -> Router:
    """Return a router of these numbers, rounded to fp32."""
    return Router(
        RouterRecord(
            kind=kind,
            levels=levels,
            features=features,
            prefix=prefix,
            width=weights.shape[1],
            weights=weights.astype("<f4").tobytes(),
            biases=biases.astype("<f4").tobytes(),
        )
    )


# --- generative routing ---


def generative(config: RoutingConfig, levels: Levels, z: Features, features: Digest, seed: int) -> Router:
    """Return the router by k-means on features of documents.

    Args:
        z: of some documents, as many as can be had.
        features: digest of the vector of the model that they come from.

    Raises:
        ConfigError: fewer different documents than centres.
    """
    if config.kind == "k_means":
        centres = k_means(z, len(levels.paths), seed, "all", num_tries=config.num_tries)
    else:
        parts = np.array_split(z, levels.num_levels, axis=1)
        clusters = [
            k_means(part, num, seed, level, num_tries=config.num_tries)
            for level, (part, num) in enumerate(zip(parts, levels.config.levels, strict=True))
        ]
        centres = np.stack(
            [np.concatenate([clusters[level][number] for level, number in enumerate(path)]) for path in levels.paths]
        )
    return made(config.kind, levels.config, features, 2 * centres, -(centres**2).sum(1))


def k_means(z: Features, num: int, seed: int, *name: str | int, num_tries: int = 1) -> Float64[np.ndarray, "num width"]:
    """Return the centres of `num` clusters, the closest to their documents of some tries.

    Raises:
        ConfigError: fewer different documents than clusters.
    """
    num_different = len(np.unique(z, axis=0))
    if num_different < num:
        raise ConfigError(
            f"k-means: {num} clusters of {num_different} different documents. Give more documents, or take fewer paths."
        )
    z = z.astype(np.float64)
    tries = [_settled(z, _seeded(z, num, seed, *name, number)) for number in range(num_tries)]
    return min(tries, key=lambda centres: float(_squares(z, centres).min(1).sum()))


def _seeded(z: Features, num: int, seed: int, *name: str | int) -> Float64[np.ndarray, "num width"]:
    """Return documents that lie apart: each is drawn by its squared distance to the nearest one before."""
    words = integers64(stream(seed, "paths", "k_means", *name), num)
    draws = (words >> np.uint64(11)) * 2.0**-53  # of [0, 1)
    chosen = [int(draws[0] * len(z))]
    squares = ((z - z[chosen[0]]) ** 2).sum(1)
    for draw in draws[1:]:
        mass = squares.cumsum()
        chosen.append(min(int(np.searchsorted(mass, draw * mass[-1], side="right")), len(z) - 1))
        squares = np.minimum(squares, ((z - z[chosen[-1]]) ** 2).sum(1))
    return z[chosen]


def _settled(z: Features, centres: Float64[np.ndarray, "num width"]) -> Float64[np.ndarray, "num width"]:
    """Return where centres come to: each at the mean of the documents nearest to it (Lloyd)."""
    before = None
    for _ in range(MAX_STEPS):
        squares = _squares(z, centres)
        nearest = squares.argmin(1)
        if before is not None and np.array_equal(nearest, before):
            break
        before, left = nearest, squares.min(1)
        centres = centres.copy()
        for number in range(len(centres)):
            mine = nearest == number
            if mine.any():
                centres[number] = z[mine].mean(0)
            else:  # nobody is near: it goes to the document that lies furthest from its own
                furthest = int(left.argmax())
                centres[number], left[furthest] = z[furthest], 0.0
    return centres


def _squares(z: Features, centres: Float64[np.ndarray, "num width"]) -> Float64[np.ndarray, "documents num"]:
    """Return all squared distances."""
    found: Float64[np.ndarray, "documents num"] = (z**2).sum(1)[:, None] - 2 * z @ centres.T + (centres**2).sum(1)
    np.maximum(found, 0, out=found)
    return found


def _numbers(data: bytes) -> Float64[np.ndarray, " num"]:
    return np.frombuffer(data, dtype="<f4").astype(np.float64)


# --- shards ---


def shards(scores: Float64[np.ndarray, "documents paths"], *, overlap: int = 1, least: float = 0.0) -> Shards:
    """Return the documents of each path, in the order of `Levels.paths`; each path's ascending.

    Each document goes to its best paths. Then, path after path, one that has too few gets the documents that lose least
    by leaving a path that has more than it needs.

    Args:
        overlap: paths of each document.
        least: of an even share, what each path has at least.

    Raises:
        ConfigError: fewer paths than each document is to have.
    """
    num_documents, num_paths = scores.shape
    if overlap > num_paths:
        raise ConfigError(f"overlap: {overlap} paths for each document, and there are {num_paths}.")
    taken = np.argsort(-scores, axis=1, kind="stable")[:, :overlap]
    counts = np.bincount(taken.ravel(), minlength=num_paths)
    floor = int(least * num_documents * overlap / num_paths)
    rows = np.arange(num_documents)[:, None]
    for path in range(num_paths):
        losses = scores[rows, taken] - scores[:, [path]]
        for place in np.argsort(losses, axis=None, kind="stable"):
            if counts[path] >= floor:
                break
            document, slot = divmod(int(place), overlap)
            if counts[taken[document, slot]] > floor and path not in taken[document]:
                counts[taken[document, slot]] -= 1
                counts[path] += 1
                taken[document, slot] = path
    return tuple(np.flatnonzero((taken == path).any(1)) for path in range(num_paths))
