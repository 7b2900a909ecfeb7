"""Discriminative re-sharding: documents go to the paths that are best at them, as far as their features tell.

    label    of some documents, kept apart for the router: the path under which the loss is least
    router   softmax regression from z to that path
    shards   all other documents, by the router

It alternates with training, as expectation and maximisation do: paths are trained on their shards, and then shards are
made anew. What the router learns from, no path is trained on: else a path would seem best at what it has memorised.

    minimise   mean of -log softmax(W z + b)[label]  +  l2 / 2 (|W|^2 + |b|^2),    z shifted and scaled to deviation 1

It is strictly convex, so there is one router, and L-BFGS from zero finds it; in fp64, with no random numbers.

DiPaCo: Douillard et al., 2403.10616, section 2. L-BFGS: Liu and Nocedal, 1989.
"""

from collections import deque
from collections.abc import Callable
from typing import Annotated

import msgspec
import numpy as np
from jaxtyping import Float64, Int64

from weft.compose.paths.levels import Levels
from weft.compose.paths.routing import PREFIX, Features, Router, RoutingConfig, Shards, made, shards
from weft.config import Config
from weft.errors import ConfigError
from weft.ids import Digest
from weft.rng import integers64, stream

Vector = Float64[np.ndarray, " num"]

MAX_STEPS = 2000
_MEMORY = 10  # pairs that L-BFGS knows the curvature by
_ENOUGH = 1e-4  # of the descent that the slope promises (Armijo)
_LEAST_STD = 1e-6  # of a feature: below, it says nothing, and would be blown up


class ReshardingConfig(Config, frozen=True, kw_only=True):
    """How documents get new paths."""

    router_share: Annotated[
        float, msgspec.Meta(gt=0, lt=1, description="of all documents: the router learns from them, and no path does")
    ] = 0.05
    l2: Annotated[float, msgspec.Meta(gt=0, le=100, description="holds the router's weights small")] = 1e-3
    tolerance: Annotated[float, msgspec.Meta(gt=0, le=1, description="largest slope that is left")] = 1e-6


def apart(
    num_documents: int, share: float, seed: int
) -> tuple[Int64[np.ndarray, " router"], Int64[np.ndarray, " rest"]]:
    """Return the documents that the router learns from, and those that paths train on; both in ascending order.

    Raises:
        ConfigError: one of the two would be empty.
    """
    num = round(share * num_documents)
    if not 0 < num < num_documents:
        raise ConfigError(
            f"router_share: {share:g} of {num_documents} documents leaves {num} for the router and "
            f"{num_documents - num} for the paths. Both need some: give more documents, or another share."
        )
    order = np.argsort(integers64(stream(seed, "paths", "router"), num_documents), kind="stable")
    return np.sort(order[:num]), np.sort(order[num:])


def labels(losses: Float64[np.ndarray, "documents paths"]) -> Int64[np.ndarray, " documents"]:
    """Return the path of least loss; of equal ones the first."""
    found: Int64[np.ndarray, " documents"] = losses.argmin(1)
    return found


def discriminative(
    config: ReshardingConfig,
    levels: Levels,
    z: Features,
    losses: Float64[np.ndarray, "documents paths"],
    features: Digest,
    prefix: int = PREFIX,
) -> Router:
    """Return the router that learns which path is best.

    Args:
        z, losses: of the documents kept apart: features, and the loss under each path, in the order of `Levels.paths`.
        features: digest of the vector of the model that z comes from.
        prefix: tokens that z is of: those of a document's beginning, or of a piece.

    Raises:
        ConfigError: it comes to no end.
    """
    weights, biases = softmax_regression(z, labels(losses), len(levels.paths), config.l2, config.tolerance)
    return made("softmax", levels.config, features, weights, biases, prefix)


def reassigned(
    config: ReshardingConfig,
    routing: RoutingConfig,
    levels: Levels,
    learnt: tuple[Float64[np.ndarray, "apart width"], Float64[np.ndarray, "apart paths"]],
    z: Features,
    features: Digest,
) -> tuple[Router, Shards]:
    """Return the router, and the shards that paths are trained on until the next time: one turn of the two.

    Args:
        routing: how many paths share a document, and what each has at least.
        learnt: features of the documents kept apart, and their loss under each path as it is now.
        z: features of the documents to train on.
        features: as of `discriminative`.

    Raises:
        ConfigError: as of `discriminative`.
    """
    router = discriminative(config, levels, *learnt, features)
    return router, shards(router.scores(z), overlap=routing.overlap, least=routing.least)


def softmax_regression(
    z: Features, chosen: Int64[np.ndarray, " documents"], num_classes: int, l2: float, tolerance: float = 1e-6
) -> tuple[Float64[np.ndarray, "classes width"], Float64[np.ndarray, " classes"]]:
    """Return weights and biases, for z as it is.

    Raises:
        ConfigError: it comes to no end.
    """
    mean, std = z.mean(0), np.maximum(z.std(0), _LEAST_STD)
    scaled = np.hstack([(z - mean) / std, np.ones((len(z), 1))])
    one_hot = np.eye(num_classes)[chosen]

    def value(flat: Vector) -> tuple[float, Vector]:
        w = flat.reshape(num_classes, -1)
        logits = scaled @ w.T
        logits -= logits.max(1, keepdims=True)
        log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        loss = -(one_hot * log_p).sum() / len(z) + l2 / 2 * (w * w).sum()
        return float(loss), ((np.exp(log_p) - one_hot).T @ scaled / len(z) + l2 * w).ravel()

    w = minimum(value, np.zeros(num_classes * scaled.shape[1]), tolerance).reshape(num_classes, -1)
    weights = w[:, :-1] / std
    return weights, w[:, -1] - weights @ mean


def minimum(value: Callable[[Vector], tuple[float, Vector]], x: Vector, tolerance: float) -> Vector:
    """Return where a smooth convex function is least, by L-BFGS.

    Args:
        value: returns the function and its gradient.
        x: where to begin.
        tolerance: largest element of the gradient at the end.

    Raises:
        ConfigError: it is not there after `MAX_STEPS` steps.
    """
    pairs = deque[tuple[Vector, Vector, float]](maxlen=_MEMORY)
    loss, gradient = value(x)
    for _ in range(MAX_STEPS):
        if np.abs(gradient).max() <= tolerance:
            return x
        direction = _direction(gradient, pairs)
        slope, length = float(gradient @ direction), 1.0 if pairs else 1.0 / max(1.0, float(np.abs(gradient).sum()))
        while True:
            there = x + length * direction
            loss_there, gradient_there = value(there)
            if loss_there <= loss + _ENOUGH * length * slope or length < np.finfo(np.float64).eps:
                break
            length /= 2
        moved, turned = there - x, gradient_there - gradient
        if (curvature := float(moved @ turned)) > 0:
            pairs.append((moved, turned, 1 / curvature))
        x, loss, gradient = there, loss_there, gradient_there
    raise ConfigError(
        f"l2: the router has not settled after {MAX_STEPS:,} steps: a slope of {np.abs(gradient).max():.1e} is left. "
        f"Allowed: {tolerance:.1e}. Raise l2, or tolerance."
    )


def _direction(gradient: Vector, pairs: deque[tuple[Vector, Vector, float]]) -> Vector:
    """Return where to go: the gradient by the inverse curvature that the last steps met, in two loops."""
    direction, shares = -gradient, list[float]()
    for moved, turned, inverse in reversed(pairs):
        shares.append(inverse * float(moved @ direction))
        direction = direction - shares[-1] * turned
    if pairs:
        moved, turned, inverse = pairs[-1]
        direction = direction / (inverse * float(turned @ turned))
    for (moved, turned, inverse), share in zip(pairs, reversed(shares), strict=True):
        direction = direction + moved * (share - inverse * float(turned @ direction))
    return direction
