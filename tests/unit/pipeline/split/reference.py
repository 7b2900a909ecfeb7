"""What splits are compared with: softmax over a list of scores, one after the other; a layer's parts added plainly."""

from collections.abc import Sequence
from math import exp, inf, log

import torch
from torch import Tensor

from weft.model.layers import Block, Rotation
from weft.pipeline.split.cut import Segment, runs, shares


def contiguous(length: int, speeds: Sequence[float]) -> tuple[Segment, ...]:
    """Cut a sequence into one run for each."""
    return tuple((run,) for run in runs(shares(length, speeds)))


def online(scores: list[float], values: list[float]) -> tuple[float, float]:
    """Return softmax(scores) . values and log sum exp, one score at a time (1805.02867, algorithm 3)."""
    m, total, o = -inf, 0.0, 0.0
    for s, v in zip(scores, values, strict=True):
        m_new = max(m, s)
        total = total * exp(m - m_new) + exp(s - m_new)
        o = o * exp(m - m_new) + exp(s - m_new) * v
        m = m_new
    return o / total, m + log(total)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention in float64, the whole matrix of scores at once; key and value heads repeated."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(groups, 1), v.double().repeat_interleave(groups, 1)
    scores = q.double() @ k.mT / q.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -inf).softmax(-1) @ v


def undivided(layer: Block, turn: Rotation, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return y, dx and the gradients of all weights, as torch finds them."""
    x = x.clone().requires_grad_()
    named = dict(layer.named_parameters())
    y = layer(x, turn)
    dx, *found = torch.autograd.grad(y, [x, *named.values()], dy)
    return y.detach(), dx, dict(zip(named, found, strict=True))


def heads_by_hand(layer: Block, turn: Rotation, x: Tensor, cut: int) -> Tensor:
    """Return y of a layer with as many key and value heads as query heads, of two parts: heads below `cut`, the others.

    Other heads' outputs are set to 0 before `out`, the other columns' before `down`: what is left is a part's output.
    """
    attention, ffn = layer.attention, layer.ffn
    heads = attention.num_heads
    q, k, v = attention.heads(layer.attention_norm(x), turn)
    mixed = attention_of(q, k, v)
    low = (torch.arange(heads) < cut).view(1, heads, 1, 1)
    h = x + (attention.join(mixed * low) + attention.join(mixed * ~low))
    gate, up = ffn.gate_up(layer.ffn_norm(h)).chunk(2, -1)
    hidden = torch.nn.functional.silu(gate) * up
    low_columns = torch.arange(hidden.shape[-1]) < cut
    return h + (ffn.down(hidden * low_columns) + ffn.down(hidden * ~low_columns))


def attention_of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v).float()


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
