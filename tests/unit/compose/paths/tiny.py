"""Levels small enough to train in milliseconds."""

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from weft.compose.paths.levels import Levels, LevelsConfig
from weft.model.config import ModelConfig
from weft.model.initial import initial_vector

MODEL = ModelConfig(
    vocab_size=29, num_layers=3, num_heads=2, num_kv_heads=1, width=8, ffn_width=12, max_seq_len=64, has_qk_norm=True
)
LEVELS = Levels(LevelsConfig(levels=(2, 2)), MODEL)


@cache
def begun() -> torch.Tensor:
    """Return the vector that all paths begin as."""
    return initial_vector(MODEL, 3)


def texts(num: int, num_words: int, seed: int = 0) -> NDArray[np.int64]:
    """Return texts of two kinds, by turns: letters that go up, and letters that go down."""
    generator = np.random.default_rng(seed)
    begins, ways = generator.integers(0, 13, size=(num, 1)), np.arange(num)[:, None] % 2
    up = (begins + np.arange(num_words)) % 13
    return np.where(ways == 0, up, 28 - up).astype(np.int64)
