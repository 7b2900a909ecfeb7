"""The parts of a decoder in exact numbers, each with its gradient: what `numerics` defines, as torch differentiates it.

Shapes: N rows (tokens of all texts), B batch, T tokens, H query heads, K key and value heads, G = H / K, D channels per
head. Attention takes the queries that share a key head as rows of one matrix.
"""

from collections.abc import Iterator
from math import sqrt
from typing import Any

import torch
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.training.numerics.grids import (
    LOG2_E,
    MOST_POWER,
    PIECE,
    exp2_,
    gridded,
    log,
    on_sums,
    pieces,
    product,
    product_bits,
    roots,
    total,
)

_ONE = torch.ones(())


class Linear(torch.autograd.Function):
    """y = x W^T + b."""

    @staticmethod
    def forward(
        ctx: Any, x: Float32[Tensor, "rows in"], weight: Float32[Tensor, "out in"], bias: Float32[Tensor, " out"] | None
    ) -> Float32[Tensor, "rows out"]:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        y = product(x, weight.t())
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_bias = total(grad, 0)[0].float() if ctx.has_bias else None
        return product(grad, weight), product(grad.t(), x), of_bias


class Norm(torch.autograd.Function):
    """y = w n,  n = x / sqrt(mean(x^2) + eps)."""

    @staticmethod
    def forward(
        ctx: Any, x: Float32[Tensor, "*dims width"], weight: Float32[Tensor, " width"], eps: float
    ) -> Float32[Tensor, "*dims width"]:
        width = torch.tensor(float(x.shape[-1]), dtype=torch.float64)
        mean = total(x * x, -1).div_(width).add_(eps)
        inverse = torch.div(_ONE.double(), roots(mean)).float()
        normed = x * inverse
        ctx.save_for_backward(normed, inverse, weight)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        # dw = sum(g n),  dx = (g w - n mean(g w n)) / rms
        normed, inverse, weight = ctx.saved_tensors
        width = torch.tensor(float(normed.shape[-1]), dtype=torch.float64)
        product_ = grad * normed
        mean = total(product_ * weight, -1).div_(width).float()
        grad_x = (grad * weight).sub_(normed * mean).mul_(inverse)
        return grad_x, total(product_.flatten(0, -2), 0)[0].float(), None


class Gate(torch.autograd.Function):
    """y = silu(g) u, of rows that have g and then u; silu(g) = g s, s = 1 / (1 + 2^(-g log2 e))."""

    @staticmethod
    def forward(ctx: Any, gate_up: Float32[Tensor, "rows twice"]) -> Float32[Tensor, "rows width"]:
        gate, up = gate_up.chunk(2, -1)
        share, y = torch.empty_like(up), torch.empty_like(up)
        for here in pieces(len(up), up.shape[1]):
            s = exp2_((gate[here] * -LOG2_E).clamp_(max=MOST_POWER)).add_(1.0)
            torch.div(_ONE, s, out=share[here])
            torch.mul(gate[here], share[here], out=y[here])
            y[here].mul_(up[here])
        ctx.save_for_backward(gate_up, share)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        # du = d g s,  dg = d u s (1 + g (1 - s))
        gate_up, share = ctx.saved_tensors
        found, width = torch.empty_like(gate_up), share.shape[1]
        for here in pieces(len(share), width):
            d, s, (g, u) = grad[here], share[here], gate_up[here].chunk(2, -1)
            slope = torch.sub(_ONE, s).mul_(g).add_(1.0).mul_(s)
            torch.mul(slope.mul_(u), d, out=found[here, :width])
            torch.mul(g * s, d, out=found[here, width:])
        return found


class Embedding(torch.autograd.Function):
    """Rows of a table, by number."""

    @staticmethod
    def forward(
        ctx: Any, table: Float32[Tensor, "vocab width"], tokens: Int64[Tensor, "*dims"]
    ) -> Float32[Tensor, "*dims width"]:
        ctx.save_for_backward(tokens)
        ctx.shape = table.shape
        return table[tokens]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (tokens,) = ctx.saved_tensors
        found, (seen, places) = grad.new_zeros(ctx.shape), tokens.unique(return_inverse=True)
        found[seen] = total_by(grad.flatten(0, -2), places.flatten(), len(seen)).float()
        return found, None


class CrossEntropy(torch.autograd.Function):
    """The mean of log(sum(e^l)) - l_t over rows whose target t is none below 0, nats."""

    @staticmethod
    def forward(
        ctx: Any, logits: Float32[Tensor, "rows vocab"], targets: Int64[Tensor, " rows"]
    ) -> Float32[Tensor, ""]:
        is_counted = targets >= 0
        num = is_counted.sum().clamp(min=1).double()
        shares, losses = torch.empty_like(logits), torch.empty(len(logits), 1)
        for here in pieces(*logits.shape):
            below = logits[here] - logits[here].amax(-1, keepdim=True)
            target = targets[here, None].clamp(min=0)
            of_target = below.gather(-1, target).double()
            powers = exp2_(below.mul_(LOG2_E))
            added = total(powers, -1)
            losses[here] = log(added).sub_(of_target)
            torch.div(powers, added.float(), out=shares[here])
            shares[here].scatter_add_(-1, target, torch.full(target.shape, -1.0))
        ctx.save_for_backward(shares.mul_(is_counted[:, None]), num)
        return total(losses.mul_(is_counted[:, None]), 0).div_(num).float().view(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        shares, num = ctx.saved_tensors
        return shares * torch.div(grad, num.float()), None


class Attention(torch.autograd.Function):
    """o = (e v) / sum(e),  e = 2^((q k - max(q k)) log2 e) on the grid of products, q divided by sqrt(D)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Float32[Tensor, "batch heads tokens head"],
        k: Float32[Tensor, "batch kv_heads tokens head"],
        v: Float32[Tensor, "batch kv_heads tokens head"],
        seen: Bool[Tensor, "texts tokens tokens"],
    ) -> Float32[Tensor, "batch heads tokens head"]:
        scale = 1 / sqrt(q.shape[-1])
        q_PRD, k_PTD, v_PTD = _paired(q * scale, k), k.flatten(0, 1), v.flatten(0, 1)
        mixed, sums = torch.empty_like(q_PRD), q_PRD.new_empty(*q_PRD.shape[:2], 1)
        for here, seen_here in _pairs(q_PRD, k_PTD, seen, k.shape[1]):
            weights = _weights(q_PRD[here], k_PTD[here], seen_here).double()
            added = weights.sum(-1, keepdim=True)
            sums[here] = added
            mixed[here] = (weights @ gridded(v_PTD[here], -2)).div_(added)
        ctx.save_for_backward(q_PRD, k_PTD, v_PTD, mixed, sums, seen)
        ctx.scale = scale
        ctx.shapes = q.shape, k.shape
        return mixed.view(q.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        # p = e / sum(e),  dv = e^T (do / sum(e)),  ds = p (do v^T - sum(do o)),  dq = ds k,  dk = ds^T q
        q_PRD, k_PTD, v_PTD, mixed, sums, seen = ctx.saved_tensors
        (q_shape, k_shape), num = ctx.shapes, q_PRD.shape[1]
        grad = _paired(grad.reshape(q_shape), k_PTD.view(k_shape))
        dq, dk, dv = torch.empty_like(q_PRD), torch.empty_like(k_PTD), torch.empty_like(v_PTD)
        for here, seen_here in _pairs(q_PRD, k_PTD, seen, k_shape[1]):
            q, k, v, d, added = q_PRD[here], k_PTD[here], v_PTD[here], grad[here], sums[here]
            shares = _weights(q, k, seen_here)
            dv[here] = shares.double().mT @ gridded(torch.div(d, added), -2)
            shares.div_(added)
            slopes = (gridded(d, -1) @ gridded(v, -1).mT).float()
            slopes.sub_(total(d * mixed[here], -1).float()).mul_(shares)
            dq[here] = gridded(slopes, -1) @ gridded(k, -2)
            dk[here] = gridded(slopes, -2).mT @ gridded(q, -2)
        return dq.mul_(ctx.scale).view(q_shape), dk.view(k_shape), dv.view(k_shape), None


def _paired(q: Float32[Tensor, "batch heads tokens head"], k: Tensor) -> Float32[Tensor, "pairs rows head"]:
    """Return the queries of each key head, one after the other."""
    batch, kv_heads = k.shape[:2]
    return q.contiguous().view(batch * kv_heads, -1, q.shape[-1])


def _pairs(
    q_PRD: Tensor, k_PTD: Tensor, seen: Bool[Tensor, "texts tokens tokens"], kv_heads: int
) -> Iterator[tuple[slice, Bool[Tensor, "pairs one tokens tokens"]]]:
    """Yield the key heads that are computed at a time, with what their queries see."""
    size = max(PIECE // (q_PRD.shape[1] * k_PTD.shape[1]), 1)
    for start in range(0, len(k_PTD), size):
        here = slice(start, min(start + size, len(k_PTD)))
        if len(seen) == 1:
            yield here, seen[:, None]
        else:
            yield here, seen[torch.arange(here.start, here.stop) // kv_heads][:, None]


def _weights(
    q: Float32[Tensor, "pairs rows head"],
    k: Float32[Tensor, "pairs tokens head"],
    seen: Bool[Tensor, "some one tokens tokens"],
) -> Float32[Tensor, "pairs rows tokens"]:
    """Return e, on the grid of sums over rows, which are no fewer than tokens."""
    scores = (gridded(q, -1) @ gridded(k, -1).mT).float()
    num_tokens = k.shape[1]
    scores.view(len(q), -1, num_tokens, num_tokens).masked_fill_(~seen, -torch.inf)
    scores.sub_(scores.amax(-1, keepdim=True)).mul_(LOG2_E)
    round_by = 1.5 * 2.0 ** (23 - product_bits(q.shape[1]))
    return exp2_(scores).add_(round_by).sub_(round_by)


def total_by(
    x: Float32[Tensor, "rows width"], places: Int64[Tensor, " rows"], num: int
) -> Float64[Tensor, "num width"]:
    """Return the sums of those rows that have the same place, on the grid of the sum of all."""
    return torch.zeros(num, x.shape[1], dtype=torch.float64).index_add_(0, places, on_sums(x, 0))
