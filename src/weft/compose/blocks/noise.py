"""How noisy the target is that a block reads: noise levels, their cut into blocks, and what EDM makes of a level.

    z = y + sigma n                                      y a row of the space's table, n normal: the noisy target
    D = c_skip(sigma) z + c_out(sigma) F(c_in(sigma) z)  what is made of it: y again, as far as it can be told

ln sigma is normal, cut off at both ends. A level has a second name, its share: of draws that have more noise. Shares
are uniform on 0..1, so blocks of equal intervals of it have equal parts of all draws; block 0 has the most noise.

How far noise hides a target depends on how far rows lie apart, in all channels together. So levels are told in lengths
of a row: where sigma is one length, a target tells at most half a nat, whatever the width is; at a tenth of it, any
byte. There a block reads its answer off the target and learns nothing of the text (target leakage), and its loss says
nothing of what it does with a target that other blocks have guessed. BlockTrain leaves that range out: so does this.

Where the range ends is our reading. BlockTrain names sigma from 1 to 10, and of what we know of it not the unit. Were
it a deviation in each channel of rows like ours, its targets would tell much more: 44 nats at 1, of 128 channels, where
ours tell half a nat. So `low` is worth trying; `benchmarks/blocks.py` tells of a lower one, too.

EDM: arXiv:2206.00364, table 1 and equation 7, but for c_noise, which is the share in place of ln(sigma) / 4. Levels
and equal cuts: DiffusionBlocks, arXiv:2506.14202; from 1 to 10: BlockTrain, arXiv:2606.24722.
"""

from dataclasses import dataclass
from math import log, sqrt
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64
from msgspec import Meta
from torch import Tensor
from torch.special import ndtr, ndtri

from weft.config import Config
from weft.errors import ConfigError
from weft.rng import draw_normal, integers64, stream

SIGMA_DATA = 1.0  # root mean square of a row of a space's table

_Length = Annotated[float, Meta(gt=0, le=1e6, description="lengths of a row")]


class NoiseConfig(Config, frozen=True, kw_only=True):
    """How noisy targets are: exp of a normal distribution, cut off at both ends, in lengths of a row."""

    mean: Annotated[float, Meta(ge=-100, le=100, description="of ln sigma")] = -1.2
    std: Annotated[float, Meta(gt=0, le=100, description="of ln sigma")] = 1.2
    low: _Length = 1.0
    high: _Length = 10.0

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ConfigError(f"noise.low: {self.low:g} is not below noise.high = {self.high:g}.")
        low, high = _ends(self)
        if not high - low > 1e-9:
            raise ConfigError(
                f"noise: hardly a draw lies from {self.low:g} to {self.high:g} where ln sigma has mean {self.mean:g} "
                f"and deviation {self.std:g}. Move the mean towards them, or make the deviation larger."
            )


@dataclass(frozen=True)
class NoiseLevels:
    """
    Args:
        width: of the space.
    """

    config: NoiseConfig
    width: int

    # --- levels ---

    def sigma_of(self, share: Float64[Tensor, "*dims"]) -> Float64[Tensor, "*dims"]:
        """Return the level that so large a share of draws has more noise than: a deviation in each channel."""
        # F(sigma) = F(high) - share (F(high) - F(low)),  ln sigma = mean + std F^-1(...)
        low, high = _ends(self.config)
        normal: Tensor = ndtri(high - share * (high - low))
        lengths = (self.config.mean + self.config.std * normal).exp().clamp(self.config.low, self.config.high)
        return lengths * sqrt(self.width)

    def share_of(self, sigma: Float[Tensor, "*dims"]) -> Float64[Tensor, "*dims"]:
        """Return the share of draws with more noise; 0 at the highest level and above it, 1 at the lowest and below."""
        low, high = _ends(self.config)
        quantile = _quantile(self.config, sigma.double() / sqrt(self.width))
        return ((high - quantile) / (high - low)).clamp(0.0, 1.0)

    def cuts(self, num_blocks: int) -> Float64[Tensor, " cuts"]:
        """Return the levels between which blocks lie, the highest first: block b has those from cut b to cut b + 1."""
        return self.sigma_of(torch.arange(num_blocks + 1, dtype=torch.float64) / num_blocks)

    def most_told(self, sigma: float) -> float:
        """Return how many nats a noisy target tells of its token at most: what a channel of such noise can carry."""
        # C = d/2 ln(1 + P/N)
        return 0.5 * self.width * log(1 + (SIGMA_DATA / sigma) ** 2)

    # --- draws ---

    def draw(
        self, block: int, num_blocks: int, seed: int, step: int, shape: tuple[int, int]
    ) -> tuple[Float32[Tensor, "batch tokens"], Float32[Tensor, "batch tokens width"]]:
        """Return the levels of a block's training step, of each token its own, and normal numbers for its noise."""
        words = integers64(stream(seed, "sigma", block, step), shape[0] * shape[1])
        uniform = torch.from_numpy((words >> np.uint64(11)).astype(np.float64) * 2.0**-53).view(shape)
        sigma = self.sigma_of((block + uniform) / num_blocks).float()
        return sigma, normals((*shape, self.width), seed, "noise", block, step)


def normals(shape: tuple[int, ...], seed: int, *name: str | int) -> Float32[Tensor, "*shape"]:
    """Return normal numbers that belong to `seed` and `name`, on the CPU."""
    numbers = torch.empty(shape)
    draw_normal(numbers, int(integers64(stream(seed, *name), 1)[0]))
    return numbers


def _quantile(config: NoiseConfig, lengths: Float64[Tensor, "*dims"]) -> Float64[Tensor, "*dims"]:
    """Return the share of draws below a level, were they not cut off."""
    quantile: Tensor = ndtr((lengths.log() - config.mean) / config.std)
    return quantile


def _ends(config: NoiseConfig) -> tuple[float, float]:
    low, high = _quantile(config, torch.tensor((config.low, config.high), dtype=torch.float64)).tolist()
    return low, high


# --- preconditioning, EDM ---


def c_skip(sigma: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
    # s_d^2 / (sigma^2 + s_d^2)
    return SIGMA_DATA**2 / (sigma**2 + SIGMA_DATA**2)


def c_out(sigma: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
    # sigma s_d / sqrt(sigma^2 + s_d^2)
    return sigma * SIGMA_DATA * c_in(sigma)


def c_in(sigma: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
    # 1 / sqrt(sigma^2 + s_d^2)
    return (sigma**2 + SIGMA_DATA**2).rsqrt()


def loss_weight(sigma: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
    # lambda = (sigma^2 + s_d^2) / (sigma s_d)^2 = 1 / c_out^2
    return c_out(sigma) ** -2
