"""The first weights, the same bits on every machine.

`torch.randn` gives other bits under other instruction sets, so the numbers are made of integers: a weight is the sum of
the four 16-bit words of one 64-bit random word, centred and scaled (Irwin-Hall, close to normal out to 3.4 deviations).
Sum and centring are exact in integers, the integer is exact in fp32, and the one multiplication is rounded once. Each
tensor draws from its own stream, named like the tensor, so a change elsewhere in the model leaves it as it was.

Of an adapter, A is uniform in +-1 / sqrt(in), of 24 bits of a word each (He et al., as PEFT has it), and B is 0.

Matrices have deviation 0.02, those that write to the residual stream 0.02 / sqrt(2 num_layers) (GPT-2); norms start
at 1, biases at 0.
"""

from collections.abc import Iterator
from math import prod, sqrt

import numpy as np
import torch
from jaxtyping import Float32
from msgspec import UNSET
from torch import Tensor

from weft.model.config import ModelConfig, plain
from weft.model.flat import Layout, Span, base_layout, layout
from weft.model.sections import Section
from weft.rng import integers64, stream

STD = 0.02
_CHUNK = 1 << 20  # numbers made at a time: bounds the scratch memory at some tens of MiB
_SUM_MEAN = 2 * 0xFFFF  # of four words uniform on 0..65535
_SUM_STD = sqrt(((1 << 32) - 1) / 3)  # sqrt(4 (2^32 - 1) / 12)
_EVEN_WORDS = np.uint64(0x0000_FFFF_0000_FFFF)


def initial_vector(config: ModelConfig, seed: int, section: Section | None = None) -> Float32[Tensor, " num"]:
    """Return the flat vector that a run with this config and seed starts from (CPU, bit-identical everywhere).

    Args:
        section: of which to return what it has of that; None: of the whole.
    """
    return _drawn(layout(config, section), config, seed)


def initial_base(config: ModelConfig, seed: int) -> Float32[Tensor, " all"]:
    """Return what of a model is frozen, drawn as first weights are: to time it, where what it was is of no matter."""
    return _drawn(base_layout(config), plain(config), seed)


def _drawn(spans: Layout, config: ModelConfig, seed: int) -> Float32[Tensor, " num"]:
    vector = torch.empty(spans.num_parameters, dtype=torch.float32)
    numbers = vector.numpy()
    for span in spans:
        if config.adapter is not UNSET:
            start = span.offset
            for chunk in _uniform(span, seed) if span.name.endswith(".a") else ():
                numbers[start : start + len(chunk)] = chunk
                start += len(chunk)
            numbers[start : span.stop] = 0.0
        elif span.has_decay:
            start = span.offset
            for chunk in _normal(span, _std(span, config), seed):
                numbers[start : start + len(chunk)] = chunk
                start += len(chunk)
        else:
            numbers[span.offset : span.stop] = 0.0 if span.name.endswith(".bias") else 1.0
    return vector


def _uniform(span: Span, seed: int) -> Iterator["np.ndarray[tuple[int], np.dtype[np.float32]]"]:
    generator, remaining = stream(seed, "initial", span.name), prod(span.shape)
    scale = np.float32(1 / (sqrt(span.shape[1]) * (1 << 23)))
    while remaining:
        count = min(remaining, _CHUNK)
        drawn = (integers64(generator, count) >> np.uint64(40)).astype(np.int64)
        yield (drawn - (1 << 23)).astype(np.float32) * scale
        remaining -= count


def _std(span: Span, config: ModelConfig) -> float:
    writes_residual = span.name.endswith((".attention.out.weight", ".ffn.down.weight"))
    return STD / sqrt(2 * config.num_layers) if writes_residual else STD


def _normal(span: Span, std: float, seed: int) -> Iterator["np.ndarray[tuple[int], np.dtype[np.float32]]"]:
    generator = stream(seed, "initial", span.name)
    scale = np.float32(std / _SUM_STD)
    remaining = prod(span.shape)
    while remaining:
        count = min(remaining, _CHUNK)
        words = integers64(generator, count)
        pairs = (words & _EVEN_WORDS) + ((words >> np.uint64(16)) & _EVEN_WORDS)  # two 32-bit sums of two words each
        sums = (pairs & np.uint64(0xFFFF_FFFF)).astype(np.int64) + (pairs >> np.uint64(32)).astype(np.int64)
        yield (sums - _SUM_MEAN).astype(np.float32) * scale
        remaining -= count
