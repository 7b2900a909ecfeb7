"""One forward pass over rows of many sequences, each at its own place, keys and values in pages.

A model that is cut is computed section by section: the first embeds tokens, the last gives logits, and from one to the
next goes what the layers made of each row.

    rows     tokens one after the other, those of one sequence together: [rows, width] all the way
    pages    keys and values: [pages, kv heads, PAGE, head], one tensor each per layer

The residual stream is fp32; matrices are as `numbers` has them. What a row comes to depends on its own sequence alone:
to the bit where numbers are exact, else up to rounding, for matmuls of other shapes add in another order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding, rms_norm

from weft.engine.attention import Group, float_of, kept_of, vector_nbytes
from weft.engine.batch import Batch, Piece, Spread
from weft.engine.feed import Feed, feed_of
from weft.engine.graphs import Compute, Graphs
from weft.engine.numbers import MATRICES, Kind, Matrix, normed
from weft.engine.scheduling.groups import least_padded
from weft.engine.scheduling.pages import PAGE, num_pages
from weft.model.config import ModelConfig
from weft.model.flat import Layout, layout
from weft.model.layers import rotate
from weft.model.sections import Section, whole
from weft.model.wavelengths import inverse_wavelengths


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
    ffn: Feed
    window: int | None


class Weights:
    """The numbers of a model or of a section, ready to multiply by. Vectors are read, and not kept; but in fp32
    matrices are views of them, so they have to stay as they are.

    Args:
        vector: flat, fp32 (`model.flat`).
        section: None: the whole model.
        table: the matrix of the embedding, where a section's vector lacks it: a tied one that lies apart.
        spans: where the vector's tensors lie; None: as of such a model. Layers of a mixture have several networks.
        top: of a mixture, how many of them compute a row.
    """

    def __init__(
        self,
        config: ModelConfig,
        vector: Float[Tensor, " num"],
        kind: Kind,
        section: Section | None = None,
        table: Float[Tensor, "vocab width"] | None = None,
        *,
        spans: Layout | None = None,
        top: int = 1,
    ) -> None:
        self.config = config
        self.kind = kind
        self.section = section = section or whole(config)
        self.device = vector.device
        spans = spans or layout(config, section)
        tensors = {span.name: spans.view(vector, span) for span in spans}
        if table is not None:
            tensors["embed.weight"] = table
        make = MATRICES[kind]
        self.embed: Tensor | None = None
        if section.is_first:
            embed = tensors["embed.weight"]
            self.embed = embed.clone() if kind == "fp32" else embed.to(torch.bfloat16)
        self.head: Matrix | None = None
        self.norm: Tensor | None = None
        if section.is_last:
            self.head = make(tensors["embed.weight" if config.is_tied else "head.weight"])
            self.norm = tensors["norm.weight"].clone()
        self.layers = [_layer(config, tensors, number, kind, top) for number in section.layers]
        self.nbytes = sum(each.nbytes for each in (self.embed, self.head) if each is not None)
        self.nbytes += sum(each.nbytes for layer in self.layers for each in (layer.qkv, layer.out, layer.ffn))


def _layer(config: ModelConfig, tensors: Mapping[str, Tensor], number: int, kind: Kind, top: int) -> Layer:
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
        ffn=feed_of(tensors, f"layers.{number}", kind, top),
        window=config.window_of(number),
    )


class KeysAndValues:
    """Those of all pages, allocated once.

    Args:
        num_pages: of `PAGE` tokens.
        num_layers: of a section; None: all.
        has_graphs: whether steps of few tokens a text are made as graphs (`graphs`); None: on a GPU.

    Attributes:
        broken: pages that hold what is no number.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        device: torch.device,
        kind: Kind,
        num_layers: int | None = None,
        *,
        has_graphs: bool | None = None,
    ) -> None:
        self.has_graphs = device.type == "cuda" if has_graphs is None else has_graphs
        shape = (num_pages + self.has_graphs, config.num_kv_heads, PAGE, config.channels_per_head)  # and one for nobody
        self.num_pages = num_pages
        self.broken: set[int] = set()
        self.layers = [
            kept_of(kind, shape, device, is_fused=not self.has_graphs) for _ in range(_num_layers(config, num_layers))
        ]


def page_nbytes(config: ModelConfig, kind: Kind, num_layers: int | None = None) -> int:
    """Return the bytes of one page, in all layers, or in those of a section."""
    num_vectors = 2 * _num_layers(config, num_layers) * config.num_kv_heads * PAGE
    return num_vectors * vector_nbytes(kind, config.channels_per_head)


def _num_layers(config: ModelConfig, of_section: int | None) -> int:
    return config.num_layers if of_section is None else of_section


class Steps(Protocol):
    """What an engine has its logits from.

    Attributes:
        has_sums: whether it has sums of last hidden states; else no mean of them can be asked for.
    """

    has_sums: bool

    @property
    def sums(self) -> Sequence[Float[Tensor, " width"]]:
        """Of the last step: of each piece that asks for them, in order."""
        ...

    @property
    def num_graphs(self) -> int:
        """How many graphs were made: a step that makes one lasts far longer than others."""
        ...

    def step(self, pieces: Sequence[Piece]) -> Float[Tensor, "drawing vocab"]:
        """As of a `Stepper`."""
        ...


class Stepper:
    """Computes steps of one model, or of a section."""

    has_sums = True

    def __init__(self, weights: Weights, kept: KeysAndValues) -> None:
        self._weights = weights
        self._config = weights.config
        self._kept = kept
        self._device = weights.device
        self._inverse = torch.tensor(inverse_wavelengths(weights.config), dtype=torch.float32, device=self._device)
        self._heads_of_kv = torch.arange(self._config.num_kv_heads, device=self._device)
        self._shared = self._config.num_heads // self._config.num_kv_heads
        self._windows = {layer.window for layer in weights.layers}
        self._score_factor = self._config.yarn.score_factor if self._config.yarn else 1.0
        self._graphs = Graphs(self._device, kept.num_pages) if kept.has_graphs else None
        self.sums: list[Float[Tensor, " width"]] = []
        """Of the last step: of each piece that asks for them, in order."""

    @torch.inference_mode()
    def step(self, pieces: Sequence[Piece]) -> Float[Tensor, "drawing vocab"]:
        """Compute all rows, keep their keys and values, and return the logits of those that draw, fp32, in order.

        Of the last section. Keys and values of tokens that turn out otherwise are written over by those of the others.
        """
        assert self._weights.norm is not None
        self.sums = []
        self._begin_anew(pieces)
        if (replayed := self._replayed(pieces, self._logits)) is not None:
            logits, spans = replayed
            self._note_broken(logits, pieces, spans)
            return logits[self._ids(_last(pieces, spans))]
        x, spans = self._through(pieces)
        self._note_broken(x, pieces, spans)
        self.sums = [
            self._normed(x[span], self._weights.norm).sum(0)
            for piece, span in zip(pieces, spans, strict=True)
            if piece.sums
        ]
        return self.logits_of(x[self._ids(_last(pieces, spans))])

    @torch.inference_mode()
    def pass_on(self, pieces: Sequence[Piece]) -> list[Float[Tensor, "new width"]]:
        """Compute all rows, keep their keys and values, and return what goes to the next section, fp32, by piece."""
        self._begin_anew(pieces)
        if (replayed := self._replayed(pieces, self._computed)) is not None:
            x, spans = replayed
            self._note_broken(x, pieces, spans)
            return [x[span].clone() for span in spans]
        x, spans = self._through(pieces)
        self._note_broken(x, pieces, spans)
        return [x[span] for span in spans]

    def _begin_anew(self, pieces: Sequence[Piece]) -> None:
        """Have zeros where texts begin pages in which others left what is no number: 0 times that is none, so a text
        would see it where it is masked, too."""
        broken = self._kept.broken
        if begun := {page for piece in pieces for page in piece.pages[-(-piece.start // PAGE) :]} & broken:
            self._clear(sorted(begun))
            broken -= begun

    def _note_broken(self, found: Float[Tensor, "rows any"], pieces: Sequence[Piece], spans: Sequence[slice]) -> None:
        """Note where rows are that came to no numbers. Their own text looks at them as they are, and comes to none."""
        if found.isfinite().all():
            return
        for piece, span in zip(pieces, spans, strict=True):
            if not found[span].isfinite().all():
                self._kept.broken.update(piece.pages[piece.start // PAGE :])
        if self._graphs is not None:
            self._clear([self._kept.num_pages])  # nobody's, to which rows may reach over the end of their pages

    def _clear(self, pages: Sequence[int]) -> None:
        places = self._by_head(self._ids(pages)).mul_(PAGE).flatten()[:, None] + self._ids(range(PAGE))
        for kept in self._kept.layers:
            kept.clear(places.flatten())

    @property
    def num_graphs(self) -> int:
        """Return how many graphs were made: a step that makes one lasts far longer than others."""
        return 0 if self._graphs is None else self._graphs.num_made

    def _replayed(self, pieces: Sequence[Piece], compute: Compute) -> tuple[Tensor, list[slice]] | None:
        """Return what a graph finds, until its next run, and which rows are whose; None: these have no graph."""
        if self._graphs is None or (padded := self._graphs.padded(pieces)) is None:
            return None
        num_new = len(padded[0].tokens)
        batch = self._batch(padded, [padded], len(padded[0].pages))
        spans = [slice(at * num_new, at * num_new + len(piece.tokens)) for at, piece in enumerate(pieces)]
        return self._graphs.run(batch, compute), spans

    def _logits(self, batch: Batch) -> Float[Tensor, "rows vocab"]:
        return self.logits_of(self._computed(batch))

    def logits_of(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows vocab"]:
        """Return the logits after rows, of what the last layer made of them; of the last section."""
        head, norm = self._weights.head, self._weights.norm
        assert head is not None
        assert norm is not None
        return head(self._normed(x, norm))

    def _through(self, pieces: Sequence[Piece]) -> tuple[Float[Tensor, "rows width"], list[slice]]:
        """Return what the layers make of all rows, those of a group together, and which rows are whose."""
        order = sorted(range(len(pieces)), key=lambda number: (len(pieces[number].tokens), pieces[number].stop))
        rows = [pieces[number] for number in order]
        return self._computed(self._batch(rows, _alike(rows))), _spans(pieces, order)

    def _batch(self, rows: Sequence[Piece], groups: Sequence[Sequence[Piece]], num_pages: int | None = None) -> Batch:
        """Return what is told of rows, of which those of a group are computed together.

        Args:
            num_pages: that are looked at; None: those of a group's longest.
        """
        places = self._ids([at for piece in rows for at in range(piece.start, piece.stop)])
        return Batch(self._given(rows), places, self._written(rows, places), self._spread(groups, num_pages))

    def _computed(self, batch: Batch) -> Float[Tensor, "rows width"]:
        """Return what the layers make of all rows."""
        turn = self._turn(batch.places)
        groups = [self._group(spread) for spread in batch.spreads]
        embed, x = self._weights.embed, batch.given
        if embed is not None:
            x = embedding(batch.given, embed).float()
        for number, layer in enumerate(self._weights.layers):
            q, k, v = self._heads(layer, x, turn)
            kept = self._kept.layers[number]
            kept.write(batch.written, k, v)
            mixed = torch.empty_like(q)
            for group in groups:
                mixed[group.rows] = kept.attend(group, q[group.rows], layer.window)
            y = layer.out(mixed.flatten(1))
            x = x + (y if layer.out_bias is None else y + layer.out_bias)
            x = x + layer.ffn(self._normed(x, layer.ffn_norm))
        return x

    def _given(self, rows: Sequence[Piece]) -> Tensor:
        """Return tokens, or what the section before made of them."""
        if self._weights.embed is not None:
            return self._ids([int(token) for piece in rows for token in piece.tokens])
        given = [piece.tokens for piece in rows if isinstance(piece.tokens, Tensor)]
        return torch.cat(given).to(self._device)

    def _heads(self, layer: Layer, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        config = self._config
        heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.channels_per_head
        qkv = layer.qkv(self._normed(x, layer.attention_norm))
        if layer.qkv_bias is not None:
            qkv = qkv + layer.qkv_bias
        qk, v = torch.split(qkv.view(len(x), heads + 2 * kv_heads, width), [heads + kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = torch.split(qk, [heads, kv_heads], dim=1)
            qk = torch.cat((self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)), 1)
        qk = rotate(qk[None], turn)[0]
        if self._score_factor != 1.0:
            qk = qk * self._score_factor
        return qk[:, :heads], qk[:, heads:], v

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        if self._weights.kind == "exact":
            return normed(x, weight, self._config.norm_eps)
        return rms_norm(x, weight.shape, weight, self._config.norm_eps)

    def _turn(self, places: Int64[Tensor, " rows"]) -> tuple[Tensor, Tensor]:
        angles = (places.to(torch.float32)[:, None] * self._inverse)[:, None, :]
        angles = angles.double()  # whose rounded cosine does not depend on the library that computes it
        cos, sin = angles.cos().float(), angles.sin().float()
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def _written(self, rows: Sequence[Piece], places: Int64[Tensor, " rows"]) -> Int64[Tensor, " written"]:
        """Return where keys and values of the new tokens go, by row and head, as if all pages were one list."""
        pages = self._ids([piece.pages[at // PAGE] for piece in rows for at in range(piece.start, piece.stop)])
        return self._by_head(pages).mul_(PAGE).add_((places % PAGE)[:, None]).flatten()

    def _by_head(self, pages: Int64[Tensor, " pages"]) -> Int64[Tensor, "pages kv_heads"]:
        return pages[:, None] * len(self._heads_of_kv) + self._heads_of_kv

    def _spread(self, groups: Sequence[Sequence[Piece]], num: int | None) -> tuple[Spread, ...]:
        found, start = list[Spread](), 0
        for some in groups:
            num_new, most = len(some[0].tokens), num or max(num_pages(piece.stop) for piece in some)
            pages = self._ids([[*each.pages[:most], *[each.pages[0]] * (most - len(each.pages))] for each in some])
            kept = self._by_head(pages.flatten()).view(len(some), most, -1).transpose(1, 2).flatten()
            starts = self._ids([each.start for each in some])
            found.append(Spread(start, len(some), num_new, most * PAGE, kept, starts))
            start += len(some) * num_new
        return tuple(found)

    def _group(self, spread: Spread) -> Group:
        masks = {window: self._mask(spread.starts, spread.num_new, spread.num_all, window) for window in self._windows}
        return Group(spread.start, spread.num, spread.num_new, spread.kept, masks)

    def _mask(self, starts: Tensor, num_new: int, num_all: int, window: int | None) -> Tensor:
        here = (starts[:, None] + torch.arange(num_new, device=self._device))[:, None, :, None]
        there = torch.arange(num_all, device=self._device)
        is_seen = there <= here
        if window is not None:
            is_seen &= there > here - window
        by_row = torch.zeros(is_seen.shape, dtype=float_of(self._weights.kind), device=self._device)
        return by_row.masked_fill_(~is_seen, float("-inf")).repeat(1, 1, self._shared, 1)

    def _ids(self, numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)


def on_host(logits: Float[Tensor, "drawing vocab"]) -> NDArray[np.float32]:
    """Return logits in main memory: a GPU's through pages that it may write itself, which torch keeps for the next."""
    if not logits.is_cuda:
        return logits.cpu().numpy()
    return torch.empty_like(logits, device="cpu", pin_memory=True).copy_(logits).numpy()


def _last(pieces: Sequence[Piece], spans: Sequence[slice]) -> list[int]:
    """Return the rows after which logits are wanted, of pieces whose rows these are."""
    return [
        row for piece, span in zip(pieces, spans, strict=True) for row in range(span.stop - piece.num_draws, span.stop)
    ]


def _alike(rows: Sequence[Piece]) -> list[list[Piece]]:
    """Cut pieces, sorted by their length and then their place, into those that are computed together."""
    found: list[list[Piece]] = []
    for _, pieces in groupby(rows, key=lambda piece: len(piece.tokens)):
        some = list(pieces)
        stops = least_padded([num_pages(piece.stop) for piece in some])
        found += [some[start:stop] for start, stop in pairwise((0, *stops))]
    return found


def _spans(pieces: Sequence[Piece], order: Sequence[int]) -> list[slice]:
    """Return the rows of each piece, of rows in `order`."""
    found = dict[int, slice]()
    at = 0
    for number in order:
        found[number] = slice(at, at + len(pieces[number].tokens))
        at = found[number].stop
    return [found[number] for number in range(len(pieces))]
