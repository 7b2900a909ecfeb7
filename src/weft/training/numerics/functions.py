"""The parts of a decoder in exact numbers, each with its gradient: what `numerics` defines, as torch differentiates it.

Shapes: N rows (tokens of all texts), B batch, T tokens, H query heads, K key and value heads, G = H / K, D channels per
head. Attention takes the queries that share a key head as rows of one matrix.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.cost.training import EXACT_TOKENS
from weft.training.numerics.grids import (
    LOG2_E,
    MOST_POWER,
    OF_PRODUCTS,
    PIECE,
    Room,
    at_a_time,
    exp2_,
    gridded,
    in_steps,
    inverse,
    large_of,
    log,
    on_sums,
    pieces,
    product,
    product_bits,
    roots,
    shared,
    step_of,
    total,
)

_ONE = torch.ones(())
TOKENS = EXACT_TOKENS  # whose queries are computed at a time: keys that none of them sees are left out


class Seen(NamedTuple):
    """Which tokens each looks at, of each text or of all alike: none after it, and none before its window.

    Args:
        mask: added to scores: 0 where it looks, else -inf.
    """

    mask: Float32[Tensor, "texts tokens tokens"]
    window: int | None


class Linear(torch.autograd.Function):
    """y = x W^T + b."""

    @staticmethod
    def forward(
        ctx: Any, x: Float32[Tensor, "rows in"], weight: Float32[Tensor, "out in"], bias: Float32[Tensor, " out"] | None
    ) -> Float32[Tensor, "rows out"]:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        y = product(x, weight)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        # dx = dy W,  dW = dy^T x: dy is on the grids of its rows in both, so x takes their steps in the second
        x, weight = ctx.saved_tensors
        (num, width), num_in = grad.shape, x.shape[1]
        size = at_a_time(num, (width + num_in) // OF_PRODUCTS)
        of_grad, of_x, sums = Room(size, width), Room(size, num_in), torch.empty(size, num_in, dtype=torch.float64)
        step = of_grad.step_of(grad, max(grad.shape))
        share, most = shared(step)
        right, scaled = gridded(weight, 0), x * share
        large, per_step, step = large_of(step_of(scaled, 0)), inverse(step), step.double()
        found, of_weight = torch.empty_like(x), torch.zeros(weight.shape, dtype=torch.float64)
        for here in pieces(num, size):
            whole = of_grad.in_steps(grad[here], per_step[here])
            found[here] = torch.mm(whole, right, out=sums[: len(whole)]).mul_(step[here])
            of_weight.addmm_(whole.t(), of_x.on_grid(scaled[here], large))
        of_bias = total(grad, 0)[0].float() if ctx.has_bias else None
        return found, of_weight.mul_(most).float(), of_bias


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
        for here in pieces(len(up), at_a_time(*up.shape)):
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
        for here in pieces(len(share), at_a_time(len(share), width)):
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
        for here in pieces(len(logits), at_a_time(*logits.shape)):
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
        seen: Seen,
    ) -> Float32[Tensor, "batch heads tokens head"]:
        scale = 1 / sqrt(q.shape[-1])
        q_PGTD, k_PTD, v_PTD = _paired(q * scale, k), k.flatten(0, 1), v.flatten(0, 1)
        mixed, sums, weights = torch.empty_like(q_PGTD), torch.empty_like(q_PGTD[..., :1]), list[Tensor]()
        q_grid, k_grid, v_grid = gridded(q_PGTD, -1), gridded(k_PTD, -1), gridded(v_PTD, -2, _num_rows(q_PGTD))
        for at in _blocks(q_PGTD, seen):
            e = _weights(at, q_grid, k_grid, product_bits(_num_rows(q_PGTD)))
            weights.append(e)
            e = e.double()
            added = e.sum(-1, keepdim=True)
            mixed[at.queries] = at.by_group((e @ v_grid[at.keys]).div_(added))
            sums[at.queries] = at.by_group(added)
        ctx.save_for_backward(q_PGTD, k_PTD, v_PTD, mixed, sums, *weights)
        ctx.seen, ctx.scale, ctx.shape = seen, scale, k.shape
        return mixed.view(q.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        # p = e / sum(e),  dv = e^T (do / sum(e)),  ds = p (do v^T - sum(do o)),  dq = ds k,  dk = ds^T q
        q_PGTD, k_PTD, v_PTD, mixed, sums, *weights = ctx.saved_tensors
        shape, num_rows = grad.shape, _num_rows(q_PGTD)
        grad = _paired(grad, k_PTD.view(ctx.shape))
        less = total(grad * mixed, -1).float()
        of_v = _columns(torch.div(grad, sums))
        grad_grid, v_grid, k_grid = gridded(grad, -1), gridded(v_PTD, -1), gridded(k_PTD, -2, num_rows)
        dq, steps, slopes = torch.empty_like(q_PGTD), torch.empty_like(sums), list[Tensor]()
        dk, dv = torch.zeros_like(k_grid), torch.zeros_like(k_grid)
        blocks = list(_blocks(q_PGTD, ctx.seen))
        for at, e in zip(blocks, weights, strict=True):
            dv[at.keys] += e.double().mT @ at.rows(of_v)
            slope = (at.rows(grad_grid) @ v_grid[at.keys].mT).float()
            slope.sub_(at.rows(less)).mul_(torch.div(e, at.rows(sums)))
            step = step_of(slope, -1, num_rows)
            whole = in_steps(slope, step)
            dq[at.queries] = at.by_group((whole @ k_grid[at.keys]).mul_(step.double()))
            steps[at.queries] = at.by_group(step)
            slopes.append(whole.float())
        share, most = shared(steps.flatten(1, 2))
        of_k = _columns(q_PGTD * share.view(steps.shape))
        for at, slope in zip(blocks, slopes, strict=True):
            dk[at.keys] += slope.double().mT @ at.rows(of_k)
        return dq.mul_(ctx.scale).view(shape), dk.mul_(most).float().view(ctx.shape), dv.float().view(ctx.shape), None


@dataclass(frozen=True)
class _Block:
    """Queries that are computed at a time: of some key heads, so many tokens; and the keys that any of them sees."""

    pairs: slice
    tokens: slice
    seen_tokens: slice
    mask: Float32[Tensor, "some one tokens seen_tokens"]

    @property
    def queries(self) -> tuple[slice, slice, slice]:
        return self.pairs, slice(None), self.tokens

    @property
    def keys(self) -> tuple[slice, slice]:
        return self.pairs, self.seen_tokens

    def rows(self, x: Float[Tensor, "pairs groups tokens width"]) -> Float[Tensor, "here rows width"]:
        return x[self.queries].flatten(1, 2)

    def by_group(self, x: Float[Tensor, "here rows width"]) -> Float[Tensor, "here groups tokens width"]:
        return x.view(len(x), -1, self.tokens.stop - self.tokens.start, x.shape[-1])


def _blocks(q_PGTD: Tensor, seen: Seen) -> Iterator[_Block]:
    num_pairs, num_groups, num_tokens, _ = q_PGTD.shape
    num_texts = len(seen.mask)
    for start in range(0, num_tokens, TOKENS):
        tokens = slice(start, min(start + TOKENS, num_tokens))
        first = 0 if seen.window is None else max(start + 1 - seen.window, 0)
        keys = slice(first, tokens.stop)
        size = max(PIECE // (num_groups * (tokens.stop - start) * (keys.stop - first)), 1)
        for pair in range(0, num_pairs, size):
            pairs = slice(pair, min(pair + size, num_pairs))
            texts = torch.arange(pairs.start, pairs.stop) * num_texts // num_pairs if num_texts > 1 else slice(None)
            yield _Block(pairs, tokens, keys, seen.mask[texts, tokens, keys][:, None])


def _paired(q: Float32[Tensor, "batch heads tokens head"], k: Tensor) -> Float32[Tensor, "pairs groups tokens head"]:
    """Return the queries of each key head."""
    batch, kv_heads = k.shape[:2]
    return q.contiguous().view(batch * kv_heads, -1, *q.shape[2:])


def _num_rows(q_PGTD: Tensor) -> int:
    """Return how many rows the queries of a key head are: no product of attention adds more, but over channels."""
    return q_PGTD.shape[1] * q_PGTD.shape[2]


def _columns(x_PGTD: Float32[Tensor, "pairs groups tokens head"]) -> Float64[Tensor, "pairs groups tokens head"]:
    """Return the queries of each key head on the grids of its columns."""
    return gridded(x_PGTD.flatten(1, 2), -2).view(x_PGTD.shape)


def _weights(at: _Block, q_grid: Tensor, k_grid: Tensor, bits: int) -> Float32[Tensor, "here rows keys"]:
    """Return e, of so many bits; 0 of what is not seen."""
    scores = (at.rows(q_grid) @ k_grid[at.keys].mT).float()
    at.by_group(scores).add_(at.mask)
    scores.sub_(scores.amax(-1, keepdim=True)).mul_(LOG2_E)
    large = 1.5 * 2.0 ** (23 - bits)
    return exp2_(scores).add_(large).sub_(large)


def total_by(
    x: Float32[Tensor, "rows width"], places: Int64[Tensor, " rows"], num: int
) -> Float64[Tensor, "num width"]:
    """Return the sums of those rows that have the same place, on the grid of the sum of all."""
    return torch.zeros(num, x.shape[1], dtype=torch.float64).index_add_(0, places, on_sums(x, 0))
