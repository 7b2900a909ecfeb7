"""Keys and values of many sequences, in pages, and how new tokens look at them.

    Rounded    fp32 or bf16
    Integers   eight bits with a scale per token and head; every sum is one of integers

Sums of integers that fp32 or fp64 holds whole have no order. So with `Integers`, and matrices of integers (`numbers`),
what a token comes to is the same to the bit, however many tokens, sequences and threads share a step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import e, log2, sqrt
from typing import Protocol

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from weft.engine.numbers import Kind, rounded
from weft.engine.sizes import filled, of_attention

_SHARE = 2.0**24  # by which weights are integers in their sum: fp64 holds it for all contexts
_BYTE = 256.0
_WEIGHT = _BYTE**2 - 1  # of the token that is looked at most: two bytes, each a matmul of its own
_MAX_KEYS = 512  # of which fp32 holds all sums of products: 512 * 255 * 127 < 2^24
_LEAST_TOP = 2.0**-100


@dataclass(frozen=True)
class Group:
    """Sequences whose attention is computed at once: as many new tokens each, and as many pages at most.

    Args:
        start, num: their rows among all are the `num` times `num_new` from `start` on, one sequence after the other.
        kept: where their keys and values are, by sequence, head and page; what a shorter one lacks is its first page,
            masked.
        mask: added to scores, 0 or -inf, by window.
    """

    start: int
    num: int
    num_new: int
    kept: Int64[Tensor, " places"]
    mask: Mapping[int | None, Float[Tensor, "sequences one looking all"]]

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.num * self.num_new)


class Kept(Protocol):
    """The keys and values of one layer."""

    def write(
        self, places: Int64[Tensor, " written"], k: Float[Tensor, "rows kv_heads head"], v: Float[Tensor, "..."]
    ) -> None:
        """Keep those of new tokens.

        Args:
            places: one per row and head, as if all pages were one list.
        """
        ...

    def clear(self, places: Int64[Tensor, " written"]) -> None:
        """Have zeros there: 0 times what is no number is none, also where it is masked."""
        ...

    def attend(
        self, group: Group, q: Float[Tensor, "rows heads head"], window: int | None
    ) -> Float[Tensor, "rows heads head"]:
        """Let the new tokens of a group look at their sequences."""
        ...


class Rounded:
    """As floats.

    Args:
        shape: [pages, kv heads, PAGE, head].
        is_fused: whether attention is torch's own, which never holds the scores of all keys: those of long prompts do
            not fit a CPU's caches. Else it is two matmuls: torch's own goes through a text's keys one after the other,
            also where one token looks at them, and a GPU is idle then.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, *, is_fused: bool
    ) -> None:
        self._shape = shape
        self._keys, self._values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self._is_fused = is_fused

    def write(
        self, places: Int64[Tensor, " written"], k: Float[Tensor, "rows kv_heads head"], v: Float[Tensor, "..."]
    ) -> None:
        for kept, x in ((self._keys, k), (self._values, v)):
            kept.view(-1, self._shape[-1]).index_copy_(0, places, x.reshape(-1, x.shape[-1]).to(kept.dtype))

    def clear(self, places: Int64[Tensor, " written"]) -> None:
        for kept in (self._keys, self._values):
            kept.view(-1, self._shape[-1]).index_fill_(0, places, 0)

    def attend(
        self, group: Group, q: Float[Tensor, "rows heads head"], window: int | None
    ) -> Float[Tensor, "rows heads head"]:
        keys, values = (_gathered(kept, group) for kept in (self._keys, self._values))
        q, mask = _by_kv_head(q, group, self._shape[1]), group.mask[window]
        if self._is_fused:
            num = q.shape[2]
            q, mask = filled(q.to(keys.dtype), of_attention(num)), filled(mask, of_attention(num))
            return _by_row(scaled_dot_product_attention(q, keys, values, mask)[:, :, :num].float(), group)
        scores = torch.matmul((q / sqrt(q.shape[-1])).to(keys.dtype), keys.mT).float().add_(mask)
        return _by_row(torch.matmul(scores.softmax(-1).to(values.dtype), values).float(), group)


class Integers:
    """As integers of eight bits, with a scale per token and head.

    Queries are rounded alike, weights to two bytes of the largest: 2^-17 of it is the error of each.

    Args:
        shape: [pages, kv heads, PAGE, head].
    """

    def __init__(self, shape: tuple[int, int, int, int], device: torch.device) -> None:
        self._shape = shape
        self._keys, self._values = (torch.zeros(shape, dtype=torch.int8, device=device) for _ in range(2))
        self._key_scales, self._value_scales = (torch.zeros(*shape[:3], 1, device=device) for _ in range(2))

    def write(
        self, places: Int64[Tensor, " written"], k: Float[Tensor, "rows kv_heads head"], v: Float[Tensor, "..."]
    ) -> None:
        for kept, scales, x in ((self._keys, self._key_scales, k), (self._values, self._value_scales, v)):
            whole, scale = rounded(x.reshape(-1, x.shape[-1]))
            kept.view(-1, self._shape[-1]).index_copy_(0, places, whole.to(torch.int8))
            scales.view(-1, 1).index_copy_(0, places, scale)

    def clear(self, places: Int64[Tensor, " written"]) -> None:
        for kept, scales in ((self._keys, self._key_scales), (self._values, self._value_scales)):
            kept.view(-1, self._shape[-1]).index_fill_(0, places, 0)
            scales.view(-1, 1).index_fill_(0, places, 0)

    def attend(
        self, group: Group, q: Float[Tensor, "rows heads head"], window: int | None
    ) -> Float[Tensor, "rows heads head"]:
        keys, values = (_gathered(kept, group).float() for kept in (self._keys, self._values))
        # [sequences, kv heads, 1, all]
        key_scales, value_scales = (_gathered(kept, group).mT for kept in (self._key_scales, self._value_scales))
        whole, scale = rounded(_by_kv_head(q, group, self._shape[1]))
        scores = torch.matmul(whole, keys.mT).mul_(scale).mul_(key_scales * (log2(e) / sqrt(q.shape[-1])))
        scores.add_(group.mask[window])
        # exp2 is torch's own; its exp is MKL's, whose last bits depend on the processor.
        shares = scores.sub_(scores.amax(-1, keepdim=True)).exp2_()
        mass = (shares * _SHARE).round_().sum(-1, keepdim=True, dtype=torch.float64)
        weights = shares.mul_(value_scales)
        top = weights.amax(-1, keepdim=True).clamp_min_(_LEAST_TOP)
        mixed = _product(weights.mul_(_WEIGHT / top).round_(), values)
        return _by_row(mixed.mul_(top.double() * (_SHARE / _WEIGHT)).div_(mass).float(), group)


def _product(
    weights: Float[Tensor, "sequences kv_heads new all"], values: Float[Tensor, "sequences kv_heads all head"]
) -> Float[Tensor, "sequences kv_heads new head"]:
    """Return the product of two-byte integers with one-byte ones, exact, fp64."""
    high = (weights / _BYTE).floor_()
    planes = torch.cat((high, weights - high * _BYTE), 2)
    some = zip(torch.split(planes, _MAX_KEYS, 3), torch.split(values, _MAX_KEYS, 2), strict=True)
    products = torch.stack([torch.matmul(plane, value) for plane, value in some]).sum(0, dtype=torch.float64)
    of_high, of_low = products.chunk(2, 2)
    return of_high.mul_(_BYTE).add_(of_low)


def _gathered(kept: Tensor, group: Group) -> Tensor:
    """Return what is kept of a group's sequences: [sequences, kv heads, all, one's width]."""
    pages, kv_heads, _, width = kept.shape
    return kept.view(pages * kv_heads, -1).index_select(0, group.kept).view(group.num, kv_heads, -1, width)


def _by_kv_head(q: Float[Tensor, "rows heads head"], group: Group, num_kv: int) -> Tensor:
    """Return queries by the head whose keys they look at: [sequences, kv heads, shared * new, head]."""
    width = q.shape[-1]
    q = q.view(group.num, group.num_new, num_kv, -1, width).permute(0, 2, 3, 1, 4)
    return q.reshape(group.num, num_kv, -1, width)


def _by_row(mixed: Float[Tensor, "sequences kv_heads new head"], group: Group) -> Float[Tensor, "rows heads head"]:
    width = mixed.shape[-1]
    return (
        mixed.reshape(group.num, -1, group.num_new, width).transpose(1, 2).reshape(group.num * group.num_new, -1, width)
    )


def kept_of(kind: Kind, shape: tuple[int, int, int, int], device: torch.device, *, is_fused: bool) -> Kept:
    """Return room for the keys and values of one layer; `is_fused` as of `Rounded`."""
    return Integers(shape, device) if kind == "exact" else Rounded(shape, float_of(kind), device, is_fused=is_fused)


def float_of(kind: Kind) -> torch.dtype:
    """Return the numbers of masks, and of keys and values that are floats."""
    return torch.float32 if kind in ("fp32", "exact") else torch.bfloat16


def vector_nbytes(kind: Kind, width: int) -> int:
    """Return the bytes of one head's key, or value."""
    return {"fp32": 4 * width, "bf16": 2 * width, "w8a16": 2 * width, "int8": 2 * width, "exact": width + 4}[kind]
