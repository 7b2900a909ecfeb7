"""A space, bodies and text small enough to train in milliseconds, for tests of stacks."""

import torch
from torch import Tensor

from weft.compose.descent import DescentConfig, Draw, windows
from weft.compose.space import Space
from weft.compose.stacks.body import body, fresh
from weft.compose.stacks.stack import Handover, Stack, uniform
from weft.data.rows import Batch
from weft.model.config import ModelConfig
from weft.model.flat import assemble
from weft.model.initial import initial_vector
from weft.model.transformer import SectionModule
from weft.rng import stream
from weft.wire import digest

VOCAB, WIDTH, SEQ_LEN = 32, 16, 12
CONFIG = ModelConfig(
    vocab_size=VOCAB, num_layers=2, num_heads=2, num_kv_heads=2, width=WIDTH, ffn_width=24, max_seq_len=64
)
SHALLOW = ModelConfig(
    vocab_size=VOCAB, num_layers=1, num_heads=2, num_kv_heads=2, width=WIDTH, ffn_width=24, max_seq_len=64, is_tied=True
)
TRAINING = DescentConfig(steps=6, lr=1e-2, warmup_steps=2)


def space() -> Space:
    return Space.of(assemble(SHALLOW, 4 * initial_vector(SHALLOW, 3)), digest(b"tokenizer"))


def vector(seed: int, config: ModelConfig = CONFIG) -> Tensor:
    """Return what no initial vector is: layers that write much."""
    return 8 * fresh(config, seed)


def member(seed: int, config: ModelConfig = CONFIG) -> SectionModule:
    return body(config, vector(seed, config))


def stacked(handover: Handover, *seeds: int) -> Stack:
    return Stack(space(), tuple(member(seed) for seed in seeds), uniform(handover, len(seeds)))


def text(num: int = 2000) -> Tensor:
    """Return tokens that a model can learn something of: they mostly count."""
    drawn = stream(7, "text").random(num) < 0.2
    return torch.arange(num).add(5 * torch.from_numpy(drawn).cumsum(0)) % VOCAB


def draw(seed: int = 1) -> Draw:
    return windows(text(), SEQ_LEN, 4, seed)


def batch(number: int = 0) -> Batch:
    return draw(9)(number)
