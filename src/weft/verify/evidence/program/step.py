"""Which operations a training step is, in order: a function of the model's shape and of how samples are taken.

    words | weights turned | of each micro-batch: forward, backward, the gradient so far | its length

What follows is `weft.training.numerics.decoder` and its gradient, operation by operation. Shapes: N rows (tokens of a
micro-batch), B samples, T tokens, H query heads, K key heads, G = H / K, D channels of a head, P = B K pairs, R = G T
rows of queries that share a key head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod, sqrt
from typing import NamedTuple

import numpy as np
from msgspec import UNSET

from weft.model.config import ModelConfig
from weft.model.wavelengths import inverse_wavelengths
from weft.verify.evidence.program.cells import Cells, Cut, Gate, GateBack, Joined, Paired, PairedBack, Rotary
from weft.verify.evidence.program.gradients import Folded, Gradient, Length, Span, widths
from weft.verify.evidence.program.grids import product_bits
from weft.verify.evidence.program.operation import Kind, Operation, Parameters
from weft.verify.evidence.program.products import Product, Seen
from weft.verify.evidence.program.rows import Rows, Weights
from weft.verify.evidence.program.samples import CrossEntropyBack, Embedded, EmbeddedBack, Some, Words

Source = int | Parameters
MAX_OPERATIONS = 1 << 14  # whose list is made once, in a tenth of a second
_OF_LAYER, _OF_SAMPLES, _OF_STEP = 100, 40, 16  # operations, at most


@dataclass(frozen=True)
class Program:
    """
    Args:
        gradient: the number of the operation that comes to the whole gradient; the last one comes to its length.
        samples, tokens: of a step.
    """

    operations: tuple[Operation, ...]
    gradient: int
    samples: int
    tokens: int

    @property
    def num_parameters(self) -> int:
        return self.operations[self.gradient].kind.num


def num_operations(model: ModelConfig, micro_batches: int) -> int:
    """Return how many operations a step has at most."""
    layers = model.num_layers
    return micro_batches * (_OF_LAYER * layers + _OF_SAMPLES) + 4 * layers + _OF_STEP


@lru_cache(maxsize=4)
def program(model: ModelConfig, samples: int, tokens: int, micro_batch: int) -> Program:
    """Return the operations of a step.

    Args:
        samples: of a step.
        tokens: of a sample.
        micro_batch: samples that are computed at a time.
    """
    return _Builder(model, samples, tokens).program(micro_batch)


def shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a model in the order of its flat vector (`weft.model.flat`)."""
    qkv = model.q_width + 2 * model.kv_width
    found: dict[str, tuple[int, ...]] = {"embed": (model.vocab_size, model.width)}
    for layer in range(model.num_layers):
        of_layer: dict[str, tuple[int, ...]] = {
            "attention_norm": (model.width,),
            "qkv": (qkv, model.width),
            **({"qkv.bias": (qkv,)} if model.has_qkv_bias else {}),
            **(
                {"q_norm": (model.channels_per_head,), "k_norm": (model.channels_per_head,)}
                if model.has_qk_norm
                else {}
            ),
            "out": (model.width, model.q_width),
            **({"out.bias": (model.width,)} if model.has_out_bias else {}),
            "ffn_norm": (model.width,),
            "gate_up": (2 * model.ffn_width, model.width),
            "down": (model.width, model.ffn_width),
        }
        found |= {f"{layer}.{name}": shape for name, shape in of_layer.items()}
    found["norm"] = (model.width,)
    if not model.is_tied:
        found["head"] = (model.vocab_size, model.width)
    matrices = {name: shape for name, shape in found.items() if len(shape) == 2}
    return matrices | {name: shape for name, shape in found.items() if len(shape) == 1}


class _Normed(NamedTuple):
    """A norm, and what it leaves for its way back."""

    name: str
    x: int
    inverse: int
    rows: int
    width: int
    y: int


class _Heads(NamedTuple):
    """What attention leaves for its way back; `norms` of queries and of keys, where they are normed."""

    q: int
    k: int
    v: int
    weights: int
    sums: int
    mixed: int
    norms: tuple[_Normed, _Normed] | None


class _Layer(NamedTuple):
    """What a layer leaves for its way back."""

    normed: _Normed
    heads: _Heads
    joined: int
    ffn: _Normed
    gate_up: int
    gated: int


class _Builder:
    def __init__(self, model: ModelConfig, samples: int, tokens: int) -> None:
        self._model = model
        self._samples = samples
        self._tokens = tokens
        self._shapes = shapes(model)
        self._places = dict[str, Parameters]()
        start = 0
        for name, shape in self._shapes.items():
            self._places[name] = Parameters(start, prod(shape))
            start += prod(shape)
        self._found = list[Operation]()
        self._turned = dict[str, int]()  # weights
        self._slopes = dict[str, list[int]]()  # gradients of each tensor in a micro-batch
        self._rotary = Rotary(tuple(float(np.float32(each)) for each in inverse_wavelengths(model)))
        self._where = ""

    def program(self, micro_batch: int) -> Program:
        words = self._add("words", Words(self._samples, self._tokens))
        for name, shape in self._shapes.items():
            if len(shape) == 2 and (name != "embed" or self._model.is_tied):
                self._turned[name] = self._add(f"{name}.turned", Cells(1, *shape, "copied", True), self._places[name])
        gradient: int | None = None
        for first in range(0, self._samples, micro_batch):
            some = Some(first, min(micro_batch, self._samples - first), self._tokens)
            self._where = f"samples {first} to {first + some.num - 1}: "
            gradient = self._of_samples(words, some, gradient)
        self._where = ""
        assert gradient is not None
        self._length(gradient)
        return Program(tuple(self._found), gradient, self._samples, self._tokens)

    def _add(self, name: str, kind: Kind, *operands: Source) -> int:
        self._found.append(Operation(self._where + name, kind, operands))
        return len(self._found) - 1

    # --- a micro-batch ---

    def _of_samples(self, words: int, some: Some, before: int | None) -> int:
        model, rows = self._model, some.rows
        self._slopes = {name: [] for name in self._shapes}
        x = self._add("embed", Embedded(some, model.width), words, self._places["embed"])
        layers = []
        for layer in range(model.num_layers):
            x, kept = self._layer(layer, x, some)
            layers.append(kept)
        last = self._norm("norm", x, rows, model.width)
        logits = self._linear("head", last.y, rows)
        largest = self._add("logits.largest", Rows(rows, model.vocab_size, "largest"), logits)
        powers = self._add("logits.powers", Rows(rows, model.vocab_size, "powers"), logits, largest)
        weight = np.float32(some.num / self._samples) / np.float32(rows)
        cost = CrossEntropyBack(some, model.vocab_size, float(weight))
        grad = self._add("logits.slope", cost, words, logits, largest, powers)
        grad = self._norm_back(last, self._linear_back("head", last.y, grad, rows))
        for layer in reversed(range(model.num_layers)):
            grad = self._layer_back(layer, layers[layer], grad, some)
        turned = self._add("embed.columns", Cells(1, rows, model.width, "copied", True), grad)
        back = EmbeddedBack(some, model.vocab_size, model.width)
        self._slopes["embed"].append(self._add("embed.slope", back, words, turned))
        return self._gradient(before)

    def _gradient(self, before: int | None) -> int:
        operands = [] if before is None else [before]
        spans = []
        for name, place in self._places.items():
            numbers = range(len(operands), len(operands) + len(self._slopes[name]))
            operands += self._slopes[name]
            spans.append(Span(place.start, place.num, tuple(numbers)))
        return self._add("gradient", Gradient(tuple(spans), before is not None), *operands)

    def _length(self, gradient: int) -> None:
        num = self._found[gradient].kind.num
        chunks, at, given = widths(num), gradient, num
        while (is_first := at == gradient) or max(chunks) > 1:
            kind = Folded(chunks, given, is_first)
            at, chunks = self._add("length.folded", kind, at), kind.folded
            given = kind.num
        self._add("length", Length(len(chunks)), at)

    # --- layers ---

    def _layer(self, layer: int, x: int, some: Some) -> tuple[int, _Layer]:
        model, rows, name = self._model, some.rows, f"{layer}."
        added = Cells(1, rows, model.width, "added")
        normed = self._norm(name + "attention_norm", x, rows, model.width)
        qkv = self._linear(name + "qkv", normed.y, rows)
        heads = self._attention(name, layer, qkv, some)
        joined = self._add(name + "mixed.joined", PairedBack(*self._of_heads(some)), heads.mixed)
        x = self._add(name + "attention.added", added, x, self._linear(name + "out", joined, rows))
        ffn = self._norm(name + "ffn_norm", x, rows, model.width)
        gate_up = self._linear(name + "gate_up", ffn.y, rows)
        gated = self._add(name + "gated", Gate(rows, model.ffn_width), gate_up)
        x = self._add(name + "ffn.added", added, x, self._linear(name + "down", gated, rows))
        return x, _Layer(normed, heads, joined, ffn, gate_up, gated)

    def _layer_back(self, layer: int, kept: _Layer, grad: int, some: Some) -> int:
        model, rows, name = self._model, some.rows, f"{layer}."
        added = Cells(1, rows, model.width, "added")
        back = self._linear_back(name + "down", kept.gated, grad, rows)
        back = self._add(name + "gated.slope", GateBack(rows, model.ffn_width), back, kept.gate_up)
        back = self._linear_back(name + "gate_up", kept.ffn.y, back, rows)
        grad = self._add(name + "ffn.added.slope", added, grad, self._norm_back(kept.ffn, back))
        back = self._linear_back(name + "out", kept.joined, grad, rows)
        back = self._attention_back(name, kept.heads, back, some)
        back = self._linear_back(name + "qkv", kept.normed.y, back, rows)
        return self._add(name + "attention.added.slope", added, grad, self._norm_back(kept.normed, back))

    # --- norms ---

    def _norm(self, name: str, x: int, rows: int, width: int) -> _Normed:
        inverse = self._add(f"{name}.inverse", Rows(rows, width, "inverse", self._model.norm_eps), x)
        y = self._add(name, Cells(1, rows, width, "normed"), x, inverse, self._places[name])
        return _Normed(name, x, inverse, rows, width, y)

    def _norm_back(self, normed: _Normed, grad: int) -> int:
        name, x, inverse, rows, width, _ = normed
        mean = self._add(f"{name}.mean", Rows(rows, width, "slope"), grad, x, inverse, self._places[name])
        columns = self._add(f"{name}.columns", Cells(1, rows, width, "weighed", True), grad, x, inverse)
        self._slopes[name].append(self._add(f"{name}.weight.slope", Rows(width, rows, "total"), columns))
        back = Cells(1, rows, width, "norm_back")
        return self._add(f"{name}.slope", back, grad, x, inverse, self._places[name], mean)

    # --- linear layers ---

    def _weight(self, name: str) -> str:
        return "embed" if name == "head" and self._model.is_tied else name

    def _linear(self, name: str, x: int, rows: int) -> int:
        weight, bias = self._weight(name), self._places.get(f"{name}.bias")
        out, width = self._shapes[weight]
        kind = Product(1, rows, out, width, width, width, has_bias=bias is not None)
        more = () if bias is None else (bias,)
        return self._add(name, kind, x, self._places[weight], *more)

    def _linear_back(self, name: str, x: int, grad: int, rows: int) -> int:
        weight, bias = self._weight(name), f"{name}.bias"
        out, width = self._shapes[weight]
        longer = max(rows, out)
        step = self._add(f"{name}.steps", Rows(rows, out, "step", longer), grad)
        most = self._add(f"{name}.most", Rows(1, rows, "largest"), step)
        whole = self._add(f"{name}.slope.columns", Cells(1, rows, out, "whole", True), grad, step)
        scaled = self._add(f"{name}.input.columns", Cells(1, rows, width, "scaled", True), x, step, most)
        of_weight = Product(1, out, width, rows, None, rows, has_scale=True)
        self._slopes[weight].append(self._add(f"{name}.weight.slope", of_weight, whole, scaled, most))
        if bias in self._shapes:
            columns = self._add(f"{name}.bias.columns", Cells(1, rows, out, "copied", True), grad)
            self._slopes[bias].append(self._add(f"{name}.bias.slope", Rows(out, rows, "total"), columns))
        return self._add(f"{name}.slope", Product(1, rows, width, out, longer, out), grad, self._turned[weight])

    # --- attention ---

    def _of_heads(self, some: Some) -> tuple[int, int, int, int, int]:
        """Return B, T, K, G, D."""
        model = self._model
        groups = model.num_heads // model.num_kv_heads
        return some.num, some.tokens, model.num_kv_heads, groups, model.channels_per_head

    def _attention(self, name: str, layer: int, qkv: int, some: Some) -> _Heads:
        model, rows = self._model, some.rows
        samples, tokens, kv_heads, groups, channels = self._of_heads(some)
        num_q, num_kv, pairs, queries = model.q_width, model.kv_width, samples * kv_heads, groups * tokens
        all_of, norms = num_q + 2 * num_kv, None
        q = self._add(name + "q", Cut(rows, all_of, 0, num_q), qkv)
        k = self._add(name + "k", Cut(rows, all_of, num_q, num_q + num_kv), qkv)
        v = self._add(name + "v", Cut(rows, all_of, num_q + num_kv, all_of), qkv)
        if model.has_qk_norm:
            norms = (
                self._norm(name + "q_norm", q, rows * model.num_heads, channels),
                self._norm(name + "k_norm", k, rows * kv_heads, channels),
            )
            q, k = norms[0].y, norms[1].y
        of_q, of_k = self._factors()
        q = self._add(name + "q.turned", Paired(samples, tokens, kv_heads, groups, channels, self._rotary, of_q), q)
        k = self._add(name + "k.turned", Paired(samples, tokens, kv_heads, 1, channels, self._rotary, of_k), k)
        v = self._add(name + "v.paired", Paired(samples, tokens, kv_heads, 1, channels), v)
        seen = Seen(tokens, model.window_of(layer))
        scores = Product(pairs, queries, tokens, channels, channels, channels, seen=seen)
        found = self._add(name + "scores", scores, q, k)
        weights = self._add(name + "weights", Weights(pairs * queries, tokens, product_bits(queries)), found)
        sums = self._add(name + "weights.sums", Rows(pairs * queries, tokens, "sum"), weights)
        columns = self._add(name + "v.columns", Cells(pairs, tokens, channels, "copied", True), v)
        mean = Product(pairs, queries, channels, tokens, None, queries, is_mean=True)
        mixed = self._add(name + "mixed", mean, weights, columns)
        return _Heads(q, k, v, weights, sums, mixed, norms)

    def _factors(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return what queries and keys are multiplied by."""
        yarn = self._model.yarn
        score = () if yarn is UNSET or yarn.score_factor == 1.0 else (yarn.score_factor,)
        return (*score, 1 / sqrt(self._model.channels_per_head)), score

    def _attention_back(self, name: str, heads: _Heads, grad: int, some: Some) -> int:
        samples, tokens, kv_heads, groups, channels = self._of_heads(some)
        pairs, queries = samples * kv_heads, groups * tokens
        all_rows = pairs * queries
        grad = self._add(name + "mixed.slope", Paired(samples, tokens, kv_heads, groups, channels), grad)
        less = self._add(name + "less", Rows(all_rows, channels, "dot"), grad, heads.mixed)
        divided = self._add(name + "mixed.columns", Cells(pairs, queries, channels, "divided", True), grad, heads.sums)
        turned = self._add(name + "weights.columns", Cells(pairs, queries, tokens, "copied", True), heads.weights)
        dv = self._add(name + "v.slope", Product(pairs, tokens, channels, queries, None, queries), turned, divided)
        dots = self._add(
            name + "weights.slope", Product(pairs, queries, tokens, channels, channels, channels), grad, heads.v
        )
        slope = self._add(
            name + "scores.slope", Cells(1, all_rows, tokens, "slope"), dots, less, heads.weights, heads.sums
        )
        step = self._add(name + "scores.steps", Rows(all_rows, tokens, "step", queries), slope)
        most = self._add(name + "scores.most", Rows(pairs, queries, "largest"), step)
        columns = self._add(name + "k.columns", Cells(pairs, tokens, channels, "copied", True), heads.k)
        scale = 1 / sqrt(channels)
        dq = self._add(
            name + "q.slope",
            Product(pairs, queries, channels, tokens, queries, queries, factor=scale),
            *(slope, columns),
        )
        whole = self._add(name + "scores.columns", Cells(pairs, queries, tokens, "whole", True), slope, step)
        scaled = self._add(name + "q.columns", Cells(pairs, queries, channels, "scaled", True), heads.q, step, most)
        dk = self._add(
            name + "k.slope",
            Product(pairs, tokens, channels, queries, None, queries, has_scale=True),
            *(whole, scaled, most),
        )
        return self._heads_back(name, (dq, dk, dv), heads.norms, some)

    def _heads_back(self, name: str, grads: Sequence[int], norms: tuple[_Normed, _Normed] | None, some: Some) -> int:
        samples, tokens, kv_heads, groups, channels = self._of_heads(some)
        (dq, dk, dv), (_, factors) = grads, self._factors()
        turn = self._rotary
        dq = self._add(
            name + "q.turned.slope", PairedBack(samples, tokens, kv_heads, groups, channels, turn, factors), dq
        )
        dk = self._add(name + "k.turned.slope", PairedBack(samples, tokens, kv_heads, 1, channels, turn, factors), dk)
        dv = self._add(name + "v.paired.slope", PairedBack(samples, tokens, kv_heads, 1, channels), dv)
        if norms is not None:
            dq, dk = self._norm_back(norms[0], dq), self._norm_back(norms[1], dk)
        parts = self._model.q_width, self._model.kv_width, self._model.kv_width
        return self._add(name + "qkv.joined", Joined(some.rows, parts), dq, dk, dv)
