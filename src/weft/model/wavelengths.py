"""How far a step of one token turns each pair of channels, without torch: light commands ask for it, too.

RoPE arXiv:2104.09864; stretched as Llama 3.1 does, or by YaRN, arXiv:2309.00071.
"""

from decimal import Decimal, localcontext
from math import ceil, floor, pi

from msgspec import UNSET

from weft.model.config import ModelConfig, YarnScaling


def inverse_wavelengths(config: ModelConfig) -> list[float]:
    """Return the D/2 angles, in radians, that a step of one token turns each pair of channels by.

    The same on every machine: where IEEE 754 says nothing, decimal numbers do, and no library of the system.
    """
    width = config.channels_per_head
    angles = [_power(config.rope_theta, -i, width) for i in range(0, width, 2)]
    if config.yarn is not UNSET:
        return _yarn(angles, config.yarn, config)
    scaling = config.rope_scaling
    if scaling is None:
        return angles
    scaled = []
    for angle in angles:
        # Llama 3.1: s = (L / wavelength - low) / (high - low), cut to 0..1; angle' = (1 - s) angle / factor + s angle
        turns = scaling.original_seq_len * angle / (2 * pi)
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = min(max(kept, 0.0), 1.0)
        scaled.append((1 - kept) * angle / scaling.factor + kept * angle)
    return scaled


def _yarn(angles: list[float], scaling: YarnScaling, config: ModelConfig) -> list[float]:
    """Keep the pairs that turn fast, stretch those that turn slowly, blend between (YaRN, eq. 9 to 13).

    As published models do: the ramp is linear in the number of the pair, from the one that turns `fast_turns` times in
    the context to the one that turns `slow_turns` times.
    """
    width = config.channels_per_head

    def pair_of(turns: float) -> float:
        return width * _log(scaling.original_seq_len / (turns * 2 * pi)) / (2 * _log(config.rope_theta))

    low, high = pair_of(scaling.fast_turns), pair_of(scaling.slow_turns)
    if scaling.is_rounded:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # as there: no division by zero
    stretched = [min(max((pair - low) / (high - low), 0.0), 1.0) for pair in range(len(angles))]
    return [
        angle * (1 - share) + angle / scaling.factor * share for angle, share in zip(angles, stretched, strict=True)
    ]


_DIGITS = 40


def _power(base: float, over: int, under: int) -> float:
    """Return base^(over / under)."""
    with localcontext(prec=_DIGITS):
        return float(Decimal(base) ** (Decimal(over) / under))


def _log(x: float) -> float:
    with localcontext(prec=_DIGITS):
        return float(Decimal(x).ln())
