"""A module's outer step, from what the paths that contain it came to.

    alpha_i = |D_i| / sum_j |D_j|                   of the paths whose deltas came
    delta = sqrt(P) sum_i alpha_i (old - local_i)   of P paths that came
    m = mu m + delta;  x -= lr (delta + mu m)       Nesterov

A mean over P independent deltas is shorter by about sqrt(P), and modules of different levels have different P: the root
makes up for it. It acts as an outer rate of lr sqrt(P), so a run of a module's own needs no more than that rate
(`nesterov`). A path whose delta does not come counts in neither the mean nor the root. One path: DiLoCo of one peer.

DiPaCo: Douillard et al., 2403.10616, algorithm 1, equations 2 and 3. Of equation 3 there are two readings: here a
module's weights add up to 1; divided by all documents, those of a level's modules together would, and each module's
step would be shorter by its share of all documents.
"""

from collections.abc import Mapping
from math import sqrt
from typing import Annotated, Literal

import msgspec
import torch
from jaxtyping import Float32
from torch import Tensor

from weft.compose.paths.levels import Path
from weft.config import Config
from weft.errors import ConfigError
from weft.sync.merge.outer import Nesterov, StepContext
from weft.sync.method.choices import Lr, Momentum, NesterovConfig


class OuterStepConfig(Config, frozen=True, kw_only=True):
    """The step of every module, after each round."""

    lr: Lr = 0.7
    momentum: Momentum = 0.9
    rescale: Annotated[
        Literal["root", "none"], msgspec.Meta(description="times the root of how many paths came, or a plain mean")
    ] = "root"


def nesterov(config: OuterStepConfig, num_paths: int) -> NesterovConfig:
    """Return the outer step of a run in which `num_paths` peers train a module and merge by a plain weighted mean."""
    return NesterovConfig(lr=config.lr * _factor(config, num_paths), momentum=config.momentum)


def shares(sizes: Mapping[Path, int]) -> dict[Path, float]:
    """Return the weight of each path, by how many documents its shard has.

    Raises:
        ConfigError: all shards are empty.
    """
    total = sum(sizes.values())
    if total == 0:
        raise ConfigError(
            f"the shards of the paths {', '.join(map(str, sorted(sizes)))} are empty: nothing was trained. Assign "
            "documents to them, or leave these paths out."
        )
    return {path: size / total for path, size in sizes.items()}


def merged(
    config: OuterStepConfig, deltas: Mapping[Path, Float32[Tensor, " num"]], sizes: Mapping[Path, int]
) -> Float32[Tensor, " num"]:
    """Return what a module steps against.

    Args:
        deltas: old parameters minus local ones, of each path that came; one at least.
        sizes: documents of each path's shard.

    Raises:
        ConfigError: as `shares`.
    """
    weights = shares({path: sizes[path] for path in deltas})
    came = sorted(deltas)  # one order, and in fp64: sums do not depend on who came first
    total = torch.zeros_like(deltas[came[0]], dtype=torch.float64)
    for path in came:
        total.add_(deltas[path].double() * weights[path])
    return (total * _factor(config, len(came))).float()


def step(
    config: OuterStepConfig,
    vector: Float32[Tensor, " num"],
    momentum: Float32[Tensor, " num"],
    delta: Float32[Tensor, " num"],
) -> None:
    """Make one step of a module against `delta`, in place."""
    plain = NesterovConfig(lr=config.lr, momentum=config.momentum)
    Nesterov(plain).apply(vector, {"momentum": momentum}, delta, StepContext(number=1))


def _factor(config: OuterStepConfig, num_paths: int) -> float:
    return sqrt(num_paths) if config.rescale == "root" else 1.0
