"""One forward pass over rows of many sequences, each at its own place, keys and values in pages.

    rows     tokens one after the other, those of one sequence together: [rows, width] all the way
    pages    keys and values: [pages, kv heads, PAGE, head], one tensor each per layer

The residual stream is fp32; matrices are as `numbers` has them. What a row comes to depends on its own sequence alone,
up to rounding: matmuls of other shapes add in another order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import sqrt

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, silu

from weft.engine.numbers import MATRICES, Kind, Matrix
from weft.engine.pages import PAGE
from weft.model.config import ModelConfig
from weft.model.flat import layout
from weft.model.layers import inverse_wavelengths, rotate


@dataclass(frozen=True)
class Piece:
    """Tokens of one sequence in a step.

    Args:
        tokens: new ones.
        start: the position of the first.
        pages: of the sequence, those of the new tokens among them.
        draws: whether the logits after the last are wanted.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    draws: bool

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Layer:
    attention_norm: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Matrix
    out_bias: Tensor | None
    ffn_norm: Tensor
    gate_up: Matrix
    down: Matrix
    window: int | None


class Weights:
    """A whole model's numbers, ready to multiply by. The vector is read, and not kept.

    Args:
        vector: flat, fp32 (`model.flat`).
    """

    def __init__(self, config: ModelConfig, vector: Float[Tensor, " num"], kind: Kind) -> None:
        self.config = config
        self.kind = kind
        spans = layout(config)
        tensors = {span.name: spans.view(vector, span) for span in spans}
        make = MATRICES[kind]
        self.embed = tensors["embed.weight"].clone() if kind == "fp32" else tensors["embed.weight"].to(torch.bfloat16)
        self.head = make(tensors["embed.weight" if config.is_tied else "head.weight"])
        self.norm = tensors["norm.weight"].clone()
        self.layers = [_layer(config, tensors, number, kind) for number in range(config.num_layers)]
        self.nbytes = self.embed.nbytes + self.head.nbytes
        self.nbytes += sum(
            each.nbytes for layer in self.layers for each in (layer.qkv, layer.out, layer.gate_up, layer.down)
        )


def _layer(config: ModelConfig, tensors: Mapping[str, Tensor], number: int, kind: Kind) -> Layer:
    make = MATRICES[kind]

    def vector(name: str) -> Tensor | None:
        found = tensors.get(f"layers.{number}.{name}")
        return None if found is None else found.clone()

    def matrix(name: str) -> Matrix:
        return make(tensors[f"layers.{number}.{name}.weight"])

    attention_norm, ffn_norm = vector("attention_norm.weight"), vector("ffn_norm.weight")
    assert attention_norm is not None
    assert ffn_norm is not None
    return Layer(
        attention_norm=attention_norm,
        qkv=matrix("attention.qkv"),
        qkv_bias=vector("attention.qkv.bias"),
        q_norm=vector("attention.q_norm.weight"),
        k_norm=vector("attention.k_norm.weight"),
        out=matrix("attention.out"),
        out_bias=vector("attention.out.bias"),
        ffn_norm=ffn_norm,
        gate_up=matrix("ffn.gate_up"),
        down=matrix("ffn.down"),
        window=config.window_of(number),
    )


class KeysAndValues:
    """Those of all pages, allocated once.

    Args:
        num_pages: of `PAGE` tokens.
    """

    def __init__(self, config: ModelConfig, num_pages: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (num_pages, config.num_kv_heads, PAGE, config.channels_per_head)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]


def page_nbytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of one page, in all layers."""
    return 2 * config.num_layers * config.kv_width * PAGE * dtype.itemsize


@dataclass(frozen=True)
class Group:
    """Sequences whose attention is one pair of matmuls: as many new tokens each, and as many pages at most.

    Args:
        rows: theirs among all, one sequence after the other: [sequences, new].
        pages: [sequences, most]; what a shorter one lacks is page 0, and masked.
        mask: added to scores, 0 or -inf: [sequences, 1, new, most * PAGE], by window.
    """

    rows: Int64[Tensor, "sequences new"]
    pages: Int64[Tensor, "sequences most"]
    mask: Mapping[int | None, Float[Tensor, "sequences one new all"]]


class Stepper:
    """Computes steps of one model."""

    def __init__(self, weights: Weights, kept: KeysAndValues) -> None:
        self._weights = weights
        self._config = weights.config
        self._kept = kept
        self._device = weights.embed.device
        self._inverse = torch.tensor(inverse_wavelengths(weights.config), dtype=torch.float32, device=self._device)
        self._windows = {layer.window for layer in weights.layers}

    @torch.inference_mode()
    def step(self, pieces: Sequence[Piece]) -> Float[Tensor, "drawing vocab"]:
        """Compute all rows, keep their keys and values, and return the logits of those that draw, fp32, in order."""
        tokens = self._ids([token for piece in pieces for token in piece.tokens])
        places = [at for piece in pieces for at in range(piece.start, piece.stop)]
        page = self._ids([piece.pages[at // PAGE] for piece in pieces for at in range(piece.start, piece.stop)])
        slot = self._ids([at % PAGE for at in places])
        turn = self._turn(self._ids(places))
        groups = self._grouped(pieces)
        x = embedding(tokens, self._weights.embed).float()
        for number, layer in enumerate(self._weights.layers):
            q, k, v = self._heads(layer, x, turn)
            keys, values = self._kept.keys[number], self._kept.values[number]
            keys[page, :, slot] = k.to(keys.dtype)
            values[page, :, slot] = v.to(values.dtype)
            mixed = torch.empty_like(q)
            for group in groups:
                mixed[group.rows] = _attend(
                    q[group.rows], keys[group.pages], values[group.pages], group.mask[layer.window]
                )
            y = layer.out(mixed.flatten(1))
            x = x + (y if layer.out_bias is None else y + layer.out_bias)
            gate, up = layer.gate_up(self._normed(x, layer.ffn_norm)).chunk(2, dim=1)
            x = x + layer.down(silu(gate) * up)
        last, at = [], 0
        for piece in pieces:
            at += len(piece.tokens)
            last += [at - 1] if piece.draws else []
        return self._weights.head(self._normed(x[self._ids(last)], self._weights.norm))

    def _heads(self, layer: Layer, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        config = self._config
        heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.channels_per_head
        qkv = layer.qkv(self._normed(x, layer.attention_norm))
        if layer.qkv_bias is not None:
            qkv = qkv + layer.qkv_bias
        q, k, v = qkv.view(len(x), heads + 2 * kv_heads, width).split([heads, kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)
        factor = config.yarn.score_factor if config.yarn else 1.0
        turned = rotate(torch.cat((q, k), 1)[None], turn)[0]
        if factor != 1.0:
            turned = turned * factor
        return turned[:, :heads], turned[:, heads:], v

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight, self._config.norm_eps)

    def _turn(self, places: Int64[Tensor, " rows"]) -> tuple[Tensor, Tensor]:
        angles = (places.to(torch.float32)[:, None] * self._inverse)[:, None, :]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def _grouped(self, pieces: Sequence[Piece]) -> list[Group]:
        """Sort pieces by how many tokens they have, and pad their pages to the longest."""
        begins, at = [], 0
        for piece in pieces:
            begins.append(at)
            at += len(piece.tokens)
        order = sorted(range(len(pieces)), key=lambda number: (len(pieces[number].tokens), pieces[number].stop))
        found = []
        for num_new, numbers in groupby(order, key=lambda number: len(pieces[number].tokens)):
            for some in _alike([*numbers], pieces):
                most = max(-(-pieces[number].stop // PAGE) for number in some)
                pages = [[*pieces[number].pages[:most], *[0] * (most - len(pieces[number].pages))] for number in some]
                rows = [[*range(begins[number], begins[number] + num_new)] for number in some]
                starts = self._ids([pieces[number].start for number in some])
                masks = {window: self._mask(starts, num_new, most * PAGE, window) for window in self._windows}
                found.append(Group(self._ids(rows), self._ids(pages), masks))
        return found

    def _mask(self, starts: Tensor, num_new: int, num_all: int, window: int | None) -> Tensor:
        here = (starts[:, None] + torch.arange(num_new, device=self._device))[:, None, :, None]
        there = torch.arange(num_all, device=self._device)
        is_seen = there <= here
        if window is not None:
            is_seen &= there > here - window
        return torch.zeros(is_seen.shape, device=self._device).masked_fill_(~is_seen, float("-inf"))

    def _ids(self, numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)


def _alike(numbers: list[int], pieces: Sequence[Piece]) -> list[list[int]]:
    """Cut sequences, shortest first, so that none is padded to more than twice its length."""
    found: list[list[int]] = []
    for number in numbers:
        if found and pieces[number].stop <= 2 * max(pieces[found[-1][0]].stop, PAGE):
            found[-1].append(number)
        else:
            found.append([number])
    return found


def _attend(
    q: Float[Tensor, "sequences new heads head"],
    keys: Float[Tensor, "sequences pages kv_heads page head"],
    values: Float[Tensor, "sequences pages kv_heads page head"],
    mask: Float[Tensor, "sequences one new all"],
) -> Float[Tensor, "sequences new heads head"]:
    """Let new tokens look at their sequences: two matmuls, for torch's own attention in bf16 is slow on CPUs."""
    num, num_new, num_heads, width = q.shape
    num_kv = keys.shape[2]
    k = keys.transpose(1, 2).reshape(num, num_kv, -1, width)
    v = values.transpose(1, 2).reshape(num, num_kv, -1, width)
    shared = num_heads // num_kv
    q = q.view(num, num_new, num_kv, shared, width).permute(0, 2, 3, 1, 4).reshape(num, num_kv, -1, width)
    scores = torch.matmul((q / sqrt(width)).to(k.dtype), k.transpose(2, 3)).float()
    scores = scores.view(num, num_heads, num_new, -1).add_(mask).softmax(-1)
    mixed = torch.matmul(scores.view(num, num_kv, shared * num_new, -1).to(v.dtype), v).float()
    return mixed.view(num, num_heads, num_new, width).transpose(1, 2)
