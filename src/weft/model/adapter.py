"""LoRA: a frozen model, and beside some of its matrices two small ones that are trained.

    y = W x + s B (A x)        A [rank, in] by chance, B [out, rank] of zeros, s = alpha / rank

So a model with an adapter begins as its base. Only A and B are parameters: they are the flat vector
that is trained, exchanged and kept (`flat.layout`). `peft.merged` makes of both a plain model.

Where one matrix stacks several (queries, keys and values; gate and up), each has an A and B of its own, as PEFT has.

LoRA arXiv:2106.09685, equation 3; rank-stabilized: s = alpha / sqrt(rank), arXiv:2312.03732.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from msgspec import UNSET
from torch import Tensor, nn
from torch.nn.functional import linear

from weft.model.config import AdapterConfig, ModelConfig


@dataclass(frozen=True)
class Adapted:
    """A matrix that has an adapter.

    Args:
        layer: number of its block.
        holder: the name in the block of what it lies in.
        name: PEFT's.
        rows: of what it lies in.
        num_in: numbers that it reads.
    """

    layer: int
    holder: str
    name: str
    rows: range
    num_in: int

    @property
    def path(self) -> str:
        """The name of its A and B, before `.a` and `.b`."""
        return f"layers.{self.layer}.{self.holder}.{self.name}"

    @property
    def base(self) -> str:
        """The name of what it lies in."""
        return f"layers.{self.layer}.{self.holder}.weight"


def adapted(config: ModelConfig, layer: int) -> Iterator[Adapted]:
    """Yield the matrices of a block that have an adapter, in the order of the forward pass."""
    assert config.adapter is not UNSET
    q, kv, ffn, width = config.q_width, config.kv_width, config.ffn_width, config.width
    stacks = (
        ("attention.qkv", width, (("q_proj", q), ("k_proj", kv), ("v_proj", kv))),
        ("attention.out", q, (("o_proj", width),)),
        ("ffn.gate_up", width, (("gate_proj", ffn), ("up_proj", ffn))),
        ("ffn.down", ffn, (("down_proj", width),)),
    )
    for holder, num_in, parts in stacks:
        row = 0
        for name, num in parts:
            if name in config.adapter.targets:
                yield Adapted(layer, holder, name, range(row, row + num), num_in)
            row += num


class LowRank(nn.Module):
    """s B A, of one matrix."""

    def __init__(self, matrix: Adapted, config: AdapterConfig) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(config.rank, matrix.num_in))
        self.b = nn.Parameter(torch.zeros(len(matrix.rows), config.rank))
        self.scale = config.scale

    def forward(self, x: Float[Tensor, "*dims num_in"]) -> Float[Tensor, "*dims num_out"]:
        return linear(linear(x, self.a), self.b) * self.scale


class AdaptedLinear(nn.Module):
    """A frozen linear layer with adapters of all its rows or of some, under the names of `Adapted`."""

    def __init__(self, layer: nn.Linear, matrices: list[Adapted], config: AdapterConfig) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._rows = {matrix.name: matrix.rows for matrix in matrices}
        for matrix in matrices:
            self.add_module(matrix.name, LowRank(matrix, config))

    def forward(self, x: Float[Tensor, "*dims num_in"]) -> Float[Tensor, "*dims num_out"]:
        y: Tensor = linear(x, self.weight, self.bias)
        if len(self._rows) == 1 and len(next(iter(self._rows.values()))) == self.out_features:
            whole: Tensor = y + self.get_submodule(next(iter(self._rows)))(x)
            return whole
        parts, row = list[Tensor](), 0
        for name, rows in self._rows.items():
            if rows.start > row:
                parts.append(y[..., row : rows.start])
            parts.append(y[..., rows.start : rows.stop] + self.get_submodule(name)(x))
            row = rows.stop
        if row < self.out_features:
            parts.append(y[..., row:])
        return torch.cat(parts, dim=-1)


def adapt(block: nn.Module, config: ModelConfig, layer: int) -> None:
    """Put adapters beside the matrices of a block."""
    assert config.adapter is not UNSET
    by_holder: dict[str, list[Adapted]] = {}
    for matrix in adapted(config, layer):
        by_holder.setdefault(matrix.holder, []).append(matrix)
    for holder, matrices in by_holder.items():
        owner, _, leaf = holder.rpartition(".")
        inside = block.get_submodule(owner)
        setattr(inside, leaf, AdaptedLinear(inside.get_submodule(leaf), matrices, config.adapter))  # type: ignore[arg-type]
