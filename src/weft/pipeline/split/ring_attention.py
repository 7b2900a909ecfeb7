"""A layer cut by segments of the sequence: queries stay, keys and values go round a ring, and softmax goes on online.

    step 0       each looks at its own keys and values
    step j       at those of the member j before it, which the one before has passed on
    back         the same way; the gradients dk, dv of a block travel one step behind it, and then home

Each query keeps its greatest score so far, the sum of exponentials below it, and the values so weighted:

    m' = max(m, max s)     l' = l e^(m - m') + sum e^(s - m')     o' = o e^(m - m') + e^(s - m') v     at the end o / l

and for the way back L = m + log l. From it, and from D = sum_d dO O, each block's gradients are exact alone:

    P = e^(s - L)     dV = P^T dO     dS = P (dO V^T - D) c     dQ += dS K     dK = dS^T Q     where s = c Q K^T

All else of a layer is done token by token: the gradient of each weight is the sum of what the segments find of it.

Shapes: B batch, H query heads, K key and value heads, T a segment's tokens, D channels per head. Scores are computed
for `TILE` queries at a time, whose scores a processor's cache holds; those that a causal mask hides are not computed,
but for a tile's on the diagonal. Numbers are fp32.

Milakov and Gimelshein, Online normalizer calculation for softmax, 1805.02867, algorithm 3; Liu et al., Ring Attention,
2310.01889, section 3; the way back as in FlashAttention-2, 2307.08691, algorithm 2.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from weft.model.layers import Block, Rotation, rotation
from weft.pipeline.split.cut import Segment

TILE = 64  # queries; of 32 to 512 the fastest on a CPU, at 1024 and at 4096 tokens

Activations = Float[Tensor, "batch tokens width"]


class KeyValues(NamedTuple):
    """Of one segment; or their gradients."""

    k: Float[Tensor, "batch kv_heads tokens head"]
    v: Float[Tensor, "batch kv_heads tokens head"]


def select(x: Float[Tensor, "batch all width"], segment: Segment) -> Activations:
    """Return the tokens of a segment."""
    return torch.cat([x[:, run.start : run.stop] for run in segment], dim=1)


def put(part: Activations, segment: Segment, into: Float[Tensor, "batch all width"]) -> None:
    """Write the tokens of a segment to their places."""
    for run, piece in zip(segment, torch.split(part, [len(run) for run in segment], dim=1), strict=True):
        into[:, run.start : run.stop] = piece


def segment_rotation(inverse: Float[Tensor, " pairs"], segment: Segment) -> Rotation:
    """Return `rotation` for the places that a segment's tokens have in the whole sequence."""
    turns = [rotation(inverse, run.start, len(run)) for run in segment]
    return torch.cat([cos for cos, _ in turns]), torch.cat([sin for _, sin in turns])


class Queries:
    """Of one segment, on the way through all blocks of keys and values, there and back."""

    def __init__(self, q: Float[Tensor, "batch heads tokens head"], segment: Segment, num_kv_heads: int) -> None:
        self._grouped = (q.shape[0], num_kv_heads, -1, *q.shape[2:])
        self._q = q.reshape(self._grouped)  # [B, K, H / K, T, D], as are o and dq
        self._segment = segment
        self._scale = q.shape[-1] ** -0.5
        self._m = self._q.new_full((*self._q.shape[:-1], 1), float("-inf"))
        self._sum = torch.zeros_like(self._m)
        self._o = torch.zeros_like(self._q)
        self._dq = self._do = self._delta = self._o[:0]  # of the way back

    def fold(self, block: KeyValues, segment: Segment) -> None:
        """Look at the keys of a segment. The own one is first: each query sees itself."""
        for rows, columns, hidden in _tiles(self._segment, segment):
            m, total, o = self._m[:, :, :, rows], self._sum[:, :, :, rows], self._o[:, :, :, rows]
            s = self._scores(rows, block.k[:, :, columns], hidden)
            # m' = max(m, max s)
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            p, kept = s.sub_(m_new).exp_(), (m - m_new).exp_()
            # l' = l e^(m - m') + sum e^(s - m'),  o' = o e^(m - m') + e^(s - m') v
            total.mul_(kept).add_(p.sum(-1, keepdim=True))
            o.mul_(kept).add_((p.flatten(2, 3) @ block.v[:, :, columns]).view_as(o))
            m.copy_(m_new)

    def end(self) -> Float[Tensor, "batch heads tokens head"]:
        """Return what the heads make of all that was folded."""
        self._o /= self._sum
        self._m += self._sum.log_()  # L = m + log l
        return self._o.flatten(1, 2)

    def begin_back(self, do: Float[Tensor, "batch heads tokens head"]) -> None:
        self._do = do.reshape(self._grouped)
        self._delta = (self._do * self._o).sum(-1, keepdim=True)  # D = sum_d dO O
        self._dq = torch.zeros_like(self._q)

    def back(self, block: KeyValues, segment: Segment) -> KeyValues:
        """Return the gradients that these queries have for the keys and values of a segment."""
        dk, dv = torch.zeros_like(block.k), torch.zeros_like(block.v)
        for rows, columns, hidden in _tiles(self._segment, segment):
            k, v = block.k[:, :, columns], block.v[:, :, columns]
            q, do = self._q[:, :, :, rows].flatten(2, 3), self._do[:, :, :, rows].flatten(2, 3)
            # P = e^(s - L)
            p = self._scores(rows, k, hidden).sub_(self._m[:, :, :, rows]).exp_()
            # dV = P^T dO,  dS = P (dO V^T - D) c
            dv[:, :, columns] += p.flatten(2, 3).mT @ do
            ds = (do @ v.mT).view_as(p).sub_(self._delta[:, :, :, rows]).mul_(p).mul_(self._scale)
            # dQ += dS K,  dK = dS^T Q
            self._dq[:, :, :, rows] += (ds.flatten(2, 3) @ k).view_as(self._dq[:, :, :, rows])
            dk[:, :, columns] += ds.flatten(2, 3).mT @ q
        return KeyValues(dk, dv)

    def end_back(self) -> Float[Tensor, "batch heads tokens head"]:
        """Return the gradient of the queries, once they have gone back through all blocks."""
        return self._dq.flatten(1, 2)

    def _scores(self, rows: slice, k: Tensor, hidden: Tensor) -> Tensor:
        """Return s = c Q K^T, [B, K, H / K, rows, columns]; -inf where a key is after its query."""
        q = self._q[:, :, :, rows]
        s: Tensor = (q.flatten(2, 3) @ k.mT).view(*q.shape[:-1], -1).mul_(self._scale)
        s[..., s.shape[-1] - hidden.shape[1] :].masked_fill_(hidden.to(s.device), float("-inf"))
        return s


def _tiles(queries: Segment, keys: Segment) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield some queries, the keys that the last of them sees, and which of the last keys each does not see.

    Slices count a segment's own tokens. Each query in a tile sees a key in it.
    """
    for query, row in zip(queries, _starts(queries), strict=True):
        for key, column in zip(keys, _starts(keys), strict=True):
            for first in range(max(query.start, key.start), query.stop, TILE):
                places = range(first, min(first + TILE, query.stop))
                seen = range(key.start, min(key.stop, places.stop))
                after = torch.arange(max(seen.start, min(first + 1, seen.stop)), seen.stop)  # the first query
                hidden = after[None, :] > torch.arange(places.start, places.stop)[:, None]
                start = row + places.start - query.start
                yield slice(start, start + len(places)), slice(column, column + len(seen)), hidden


def _starts(segment: Segment) -> list[int]:
    return [sum(map(len, segment[:number])) for number in range(len(segment))]


class SegmentPass:
    """One segment of a micro-batch on its way through a layer.

        block = segment.begin(x)                # its own keys and values
        segment.fold(each block, of which segment), the own one first
        y = segment.end()
        segment.begin_back(dy)
        dk, dv = segment.back(each block, of which segment)
        dx = segment.end_back(sum of the gradients of its own keys and values)

    Args:
        turn: `segment_rotation`.
    """

    def __init__(self, layer: Block, segment: Segment, turn: Rotation) -> None:
        self._layer = layer
        self._segment = segment
        self._turn = turn
        self.gradients: dict[str, Tensor] = {}
        """Of the layer's weights by name, after the way back."""

    def begin(self, x: Activations) -> KeyValues:
        self._x = x.detach().requires_grad_()
        with torch.enable_grad():
            normed = self._layer.attention_norm(self._x)
            self._heads = self._layer.attention.heads(normed, self._turn)
        q, k, v = (each.detach() for each in self._heads)
        self._queries = Queries(q, self._segment, k.shape[1])
        return KeyValues(k, v)

    def fold(self, block: KeyValues, segment: Segment) -> None:
        self._queries.fold(block, segment)

    def end(self) -> Activations:
        self._mixed = self._queries.end().requires_grad_()
        self._kept = self._x.detach().requires_grad_()  # what passes by attention
        with torch.enable_grad():
            h = self._kept + self._layer.attention.join(self._mixed)
            y: Tensor = h + self._layer.ffn(self._layer.ffn_norm(h))
        self._y = y
        return y.detach()

    def begin_back(self, dy: Activations) -> None:
        self._kept, mixed = self._found((self._y,), (dy,), [self._kept, self._mixed])
        self._queries.begin_back(mixed)

    def back(self, block: KeyValues, segment: Segment) -> KeyValues:
        return self._queries.back(block, segment)

    def end_back(self, own: KeyValues) -> Activations:
        (attended,) = self._found(self._heads, (self._queries.end_back(), *own), [self._x])
        dx: Tensor = attended + self._kept
        return dx

    def _found(self, made: tuple[Tensor, ...], of_made: tuple[Tensor, ...], given: list[Tensor]) -> list[Tensor]:
        """Return the gradients of what was given, and keep those of weights."""
        named = dict(self._layer.named_parameters())
        found = torch.autograd.grad(made, [*given, *named.values()], of_made, allow_unused=True)
        weights = zip(named, found[len(given) :], strict=True)
        self.gradients |= {name: each for name, each in weights if each is not None}
        return list(found[: len(given)])
