"""LoRA: a frozen model, and beside some of its matrices two small ones that are trained.

    y = W x + s B (A x)        A [rank, in] by chance, B [out, rank] of zeros, s = alpha / rank

So a model with an adapter begins as its base. Only A and B are parameters: they are the flat vector
that is trained, exchanged and kept (`flat.layout`). `peft.merged` makes of both a plain model.

In a training step a share p of what A reads may be left out by chance (dropout), and the rest counts 1 / (1 - p)
times. What is left out follows from the sample and the matrix (`Noise`): it is the same however samples are batched,
and when a block is computed again.

Where one matrix stacks several (queries, keys and values; gate and up), each has an A and B of its own, as PEFT has.

LoRA arXiv:2106.09685, equation 3; rank-stabilized: s = alpha / sqrt(rank), arXiv:2312.03732.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from msgspec import UNSET
from torch import Tensor, nn
from torch.nn.functional import linear

from weft import rng
from weft.model.config import AdapterConfig, ModelConfig
from weft.model.held import Matrix, product

_ODD = 0x9E3779B97F4A7C15  # so that the words of one sample's matrices are none of another's


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


class Noise:
    """What the adapters of a model leave out: by a word of each sample that is computed; nothing where there are none.

    Args:
        share: p.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.words: Sequence[int] = ()

    @contextmanager
    def of(self, words: Sequence[int]) -> Iterator[None]:
        """Compute with what the words of samples leave out, forward and backward.

        Args:
            words: of 64 bits, one for each sample, in their order.
        """
        self.words = words
        try:
            yield
        finally:
            self.words = ()


class LowRank(nn.Module):
    """s B A, of one matrix.

    Args:
        number: of the matrix in the model.
    """

    def __init__(self, matrix: Adapted, config: AdapterConfig, noise: Noise, number: int) -> None:
        super().__init__()
        self._noise, self._number = noise, number
        self.a = nn.Parameter(torch.zeros(config.rank, matrix.num_in))
        self.b = nn.Parameter(torch.zeros(len(matrix.rows), config.rank))
        self.scale = config.scale

    def forward(self, x: Float[Tensor, "*dims num_in"]) -> Float[Tensor, "*dims num_out"]:
        if not self._noise.words:
            return linear(linear(x, self.a), self.b) * self.scale
        share = 1.0 - self._noise.share
        return linear(linear(self._thinned(x, share), self.a), self.b) * (self.scale / share)

    def _thinned(self, x: Float[Tensor, "batch *dims"], share: float) -> Float[Tensor, "batch *dims"]:
        kept = torch.empty(x.shape, dtype=torch.bool, device=x.device)
        for row, word in zip(kept, self._noise.words, strict=True):
            rng.draw_kept(row, (word + self._number * _ODD) % (1 << 63), share)
        return torch.where(kept, x, 0.0)


class AdaptedLinear(nn.Module):
    """A frozen linear layer with adapters of all its rows or of some, under the names of `Adapted`."""

    def __init__(
        self, layer: nn.Linear, matrices: list[tuple[int, Adapted]], config: AdapterConfig, noise: Noise
    ) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self._held: Matrix | None = None  # in the place of the weight
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._rows = {matrix.name: matrix.rows for _, matrix in matrices}
        for number, matrix in matrices:
            self.add_module(matrix.name, LowRank(matrix, config, noise, number))

    def hold(self, weight: Matrix) -> None:
        """Compute with a weight that is held in fewer bytes."""
        self._held, self.weight = weight, None  # type: ignore[assignment]

    def forward(self, x: Float[Tensor, "*dims num_in"]) -> Float[Tensor, "*dims num_out"]:
        held = self._held
        y: Tensor = linear(x, self.weight, self.bias) if held is None else product(x, held, self.bias)
        if not self._rows:
            return y
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


def with_held(model: nn.Module, name: str, weight: Matrix, config: AdapterConfig) -> None:
    """Let a model compute with a matrix of its layers that is held in fewer bytes.

    Args:
        name: of the layer.
    """
    layer = model.get_submodule(name)
    if not isinstance(layer, AdaptedLinear):
        owner, _, leaf = name.rpartition(".")
        layer = AdaptedLinear(layer, [], config, Noise(0.0))  # type: ignore[arg-type]
        setattr(model.get_submodule(owner), leaf, layer)
    layer.hold(weight)


def adapt(block: nn.Module, config: ModelConfig, layer: int, noise: Noise) -> None:
    """Put adapters beside the matrices of a block."""
    assert config.adapter is not UNSET
    by_holder: dict[str, list[tuple[int, Adapted]]] = {}
    for place, matrix in enumerate(adapted(config, layer)):
        number = layer * len(config.adapter.targets) + place
        by_holder.setdefault(matrix.holder, []).append((number, matrix))
    for holder, matrices in by_holder.items():
        owner, _, leaf = holder.rpartition(".")
        inside = block.get_submodule(owner)
        setattr(inside, leaf, AdaptedLinear(inside.get_submodule(leaf), matrices, config.adapter, noise))  # type: ignore[arg-type]
