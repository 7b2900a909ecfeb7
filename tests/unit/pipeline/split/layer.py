"""A small layer of each family, what goes into it and what comes back."""

from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from unit.pipeline.split.reference import undivided
from weft.model.config import ModelConfig
from weft.model.layers import Block, Rotation, rotation
from weft.model.wavelengths import inverse_wavelengths

SMALL = {"vocab_size": 11, "num_layers": 2, "num_heads": 8, "num_kv_heads": 4, "width": 32, "ffn_width": 50}
FAMILIES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_kv_heads": 8},
    "qk_norm": {"has_qk_norm": True, "head_width": 10},
    "qkv_bias": {"has_qkv_bias": True},
    "out_bias": {"has_qkv_bias": True, "has_out_bias": True},
    "yarn": {"yarn": {"factor": 4.0, "score_factor": 1.14, "original_seq_len": 16}},
    "scaled": {"rope_scaling": {"factor": 8.0, "original_seq_len": 16}},
}
BATCH, TOKENS = 2, 33


@dataclass
class Case:
    config: ModelConfig
    layer: Block
    inverse: Tensor
    turn: Rotation
    x: Tensor
    dy: Tensor
    y: Tensor
    dx: Tensor
    gradients: dict[str, Tensor]

    def zeros(self) -> dict[str, Tensor]:
        return {name: torch.zeros_like(each) for name, each in self.layer.named_parameters()}


def case(family: str, num_tokens: int = TOKENS) -> Case:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    config = msgspec.convert({**SMALL, "max_seq_len": 4096, **FAMILIES[family]}, ModelConfig)
    layer = Block(config, 1)
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            if weight.dim() == 1:
                weight.add_(0.3 * torch.randn_like(weight))  # norms and biases that do something
            elif name == "attention.qkv.weight":
                weight.mul_(4)  # attention that looks at some more than at others
    inverse = torch.tensor(inverse_wavelengths(config))
    turn = rotation(inverse, 0, num_tokens)
    x, dy = torch.randn(2, BATCH, num_tokens, config.width)
    return Case(config, layer, inverse, turn, x, dy, *undivided(layer, turn, x, dy))
