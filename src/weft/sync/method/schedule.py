"""Learning rates by committed tokens: a pure function of what the whole run has trained on, not of one peer's steps.

    constant   warm-up, then the peak
    cosine     warm-up, then half a cosine down to floor x peak at total_tokens           SGDR, 1608.03983, eq. 5
    wsd        warm-up, the peak, then linear decay to floor x peak over decay_tokens
               MiniCPM, 2404.06395, section 4; the linear decay after Hägele et al., 2405.18392

Where the optimizer's moments are replicated (`ddp`) the rate must be the same bits on every member, so the cosine is a
polynomial in Python floats (IEEE doubles, each operation rounded once), not the C library's.
"""

import math
from fractions import Fraction
from typing import Annotated, assert_never

import msgspec

from weft.config import Config
from weft.errors import ConfigError

_Lr = Annotated[float, msgspec.Meta(gt=0, le=10, description="peak learning rate")]
_Tokens = Annotated[int, msgspec.Meta(ge=0)]
_Total = Annotated[int, msgspec.Meta(ge=1, description="committed tokens at which the decay ends")]
_Floor = Annotated[float, msgspec.Meta(ge=0, le=1, description="fraction of the peak that remains at the end")]


class ConstantConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="constant"):
    lr: _Lr = 1e-3
    warmup_tokens: _Tokens = 0


class CosineConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="cosine"):
    lr: _Lr = 1e-3
    warmup_tokens: _Tokens = 0
    total_tokens: _Total
    floor: _Floor = 0.1

    def __post_init__(self) -> None:
        _require_order(self.warmup_tokens, self.total_tokens)


class WsdConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="wsd"):
    lr: _Lr = 1e-3
    warmup_tokens: _Tokens = 0
    decay_tokens: _Tokens
    total_tokens: _Total
    floor: _Floor = 0.0

    def __post_init__(self) -> None:
        _require_order(self.warmup_tokens + self.decay_tokens, self.total_tokens)


ScheduleConfig = ConstantConfig | CosineConfig | WsdConfig


def lr_of_step(
    config: ScheduleConfig, committed_tokens: int, num_steps: int, tokens_per_step: int, pace: Fraction | int
) -> float:
    """Return the learning rate of the step that makes `num_steps` since the last commit.

    Args:
        committed_tokens: of the run, then.
        pace: of the whole run, in multiples of a peer's.
    """
    return lr(config, committed_tokens + int(num_steps * tokens_per_step * pace))


def lr(config: ScheduleConfig, committed_tokens: int) -> float:
    """Return the learning rate of the step that brings the run to `committed_tokens` (> 0, that step included).

    At 0 a warm-up gives 0. After `total_tokens` the rate stays at floor x peak.
    """
    if committed_tokens < config.warmup_tokens:
        return config.lr * (committed_tokens / config.warmup_tokens)
    match config:
        case ConstantConfig():
            return config.lr
        case CosineConfig():
            share = _share(committed_tokens - config.warmup_tokens, config.total_tokens - config.warmup_tokens)
            # eta = eta_min + (eta_max - eta_min) (1 + cos(pi t / T)) / 2
            return config.lr * (config.floor + (1 - config.floor) * (0.5 * (1 + cos_pi(share))))
        case WsdConfig():
            done = committed_tokens - (config.total_tokens - config.decay_tokens)
            share = _share(done, config.decay_tokens)
            return config.lr * (1 - (1 - config.floor) * share)
    assert_never(config)


def missed(config: ScheduleConfig, tokens: int, first: int) -> str | None:
    """Return what a run that ends at `tokens` does not come to, in words; None: its schedule ends no later.

    Args:
        first: tokens of all peers' first step.
    """
    if not lr(config, first):
        return f"a step of all peers has {first:,}, and by then the learning rate is 0, so nothing is learnt"
    if tokens < config.warmup_tokens:
        return f"all of it is warm-up, and the rate never reaches its peak (warmup_tokens is {config.warmup_tokens:,})"
    if not isinstance(config, ConstantConfig) and tokens < config.total_tokens:
        return f"it ends before the rate has come down (total_tokens is {config.total_tokens:,})"
    return None


def cos_pi(x: float) -> float:
    """Return cos(pi x) for 0 <= x <= 1 within 1e-15, from + - * / only.

    cos(pi x) = sin(pi (1/2 - x)), and the sine's Taylor series needs 11 terms up to pi / 2.
    """
    y = math.pi * (0.5 - x)
    square, series = y * y, 0.0
    # sin y = y (1 - y^2/(2 3) (1 - y^2/(4 5) (1 - ...)))
    for n in range(22, 0, -2):
        series = square / (n * (n + 1)) * (1 - series)
    return min(max(y * (1 - series), -1.0), 1.0)


def _share(done: int, whole: int) -> float:
    return min(max(done, 0) / whole, 1.0) if whole else float(done >= 0)


def _require_order(before: int, total_tokens: int) -> None:
    if before > total_tokens:
        raise ConfigError(
            f"schedule: total_tokens: {total_tokens:,} is less than the {before:,} tokens of warm-up and decay; "
            "raise total_tokens or shorten them."
        )
