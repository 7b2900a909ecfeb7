"""Steps of few tokens a text as CUDA graphs.

A step of one token launches some hundred kernels, which takes a GPU's host ten times as long as they run. A graph of
them is launched at once. It is of fixed shapes, so texts, tokens and pages are padded to the next of a few sizes: what
is padded reads a page that is nobody's, and writes there.

Each graph keeps what it is given and what it finds as long as it lives (`held_nbytes`); what it needs between, the next
one uses again.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.engine.attention import float_of, vector_nbytes
from weft.engine.batch import Batch, Piece
from weft.engine.numbers import Kind
from weft.engine.scheduling.guess import MAX_GUESSED
from weft.engine.scheduling.pages import PAGE, num_pages
from weft.model.config import ModelConfig
from weft.model.sections import Section, whole

MOST_NEW = 1 + MAX_GUESSED  # tokens of a text
MOST_TEXTS = 64
MOST_PADDED = 4  # times the pages that are needed
WARM_UPS = 2  # runs before a graph is made, in which libraries allocate what they keep
_FP32 = 4  # bytes


Compute = Callable[[Batch], Tensor]
Shape = tuple[int, int, int]  # texts, new tokens of each, pages of each


def shapes(context: int, pool: int) -> Iterator[Shape]:
    """Yield the shapes that steps may come in.

    Args:
        context: tokens of the longest text.
        pool: pages of all texts together.
    """
    for num_new in (1, MOST_NEW):
        for num in _sizes(MOST_TEXTS):
            for pages in _sizes(min(num_pages(context), pool)):
                if num * pages <= MOST_PADDED * pool:
                    yield num, num_new, pages


def held_nbytes(config: ModelConfig, kind: Kind, context: int, pool: int, section: Section | None = None) -> int:
    """Return about how many bytes the graphs of a model, or of a section, hold once steps of all shapes were made.

    sum over shapes of (given + found)  +  the most of what a shape needs between

    Not in it: what the driver keeps of each graph, and libraries' own buffers.

    Args:
        context, pool: as of `shapes`.
    """
    section = section or whole(config)
    found = list(shapes(context, pool))
    kept = sum(_given_nbytes(config, shape, section) + _found_nbytes(config, shape, section) for shape in found)
    return kept + max(_between_nbytes(config, kind, shape, section) for shape in found)


def _given_nbytes(config: ModelConfig, shape: Shape, section: Section) -> int:
    """Tokens or rows, places, where each is written and what each text looks at, as `Batch` has them."""
    num, num_new, pages = shape
    row = 8 if section.is_first else 4 * config.width
    return num * num_new * (row + 8 + 8 * config.num_kv_heads) + 8 * num * (pages * config.num_kv_heads + 1)


def _found_nbytes(config: ModelConfig, shape: Shape, section: Section) -> int:
    num, num_new, _ = shape
    return 4 * num * num_new * (config.vocab_size if section.is_last else config.width)


def _between_nbytes(config: ModelConfig, kind: Kind, shape: Shape, section: Section) -> int:
    """At its most: in attention, in the layer behind it, or before logits are fp32."""
    num, num_new, pages = shape
    rows, looked = num * num_new, pages * PAGE
    each = vector_nbytes(kind, config.channels_per_head) // config.channels_per_head
    gathered = 2 * num * config.num_kv_heads * looked * vector_nbytes(kind, config.channels_per_head)
    scores = rows * config.num_heads * looked * (8 + (each if each < _FP32 else 0))  # scores, weights, and these again
    shared = config.num_heads // config.num_kv_heads
    mask = rows * looked * shared * float_of(kind).itemsize
    ffn = rows * config.ffn_width * 16  # gate and up, silu of gate, their product
    head = rows * config.vocab_size * 2 if section.is_last and each < _FP32 else 0
    return rows * config.width * 12 + mask + max(gathered + scores, ffn, head)


class Graphs:
    """Of one stepper.

    Args:
        nobodys: a page that no text has.
    """

    def __init__(self, device: torch.device, nobodys: int) -> None:
        self._nobodys, self._device = nobodys, device
        self._is_cuda = device.type == "cuda"
        # Libraries keep memory for each stream, which goes with the last graph of it: other steppers have their own.
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle() if self._is_cuda else None
        self._made: dict[tuple[int, int, int], _Graph | None] = {}
        self.num_made = 0

    def padded(self, pieces: Sequence[Piece]) -> list[Piece] | None:
        """Return pieces of one length, as many and with as many pages as a graph has; None: these have none."""
        most = max(len(piece.tokens) for piece in pieces)
        if most > MOST_NEW or len(pieces) > MOST_TEXTS or any(piece.sums for piece in pieces):
            return None
        num_new, num = 1 if most == 1 else MOST_NEW, _size(len(pieces))
        held = [num_pages(piece.start + num_new) for piece in pieces]
        pages = _size(max(held))
        if num * pages > MOST_PADDED * sum(held):  # a long text among short ones
            return None
        found = [self._filled(piece, num_new, pages) for piece in pieces]
        nothing = pieces[0].tokens[:1]
        nobody = self._filled(Piece(nothing, 0, (), num_draws=0), num_new, pages)
        return found + [nobody] * (num - len(pieces))

    def _filled(self, piece: Piece, num_new: int, pages: int) -> Piece:
        tokens = piece.tokens
        missing = num_new - len(tokens)
        if isinstance(tokens, Tensor):
            tokens = torch.cat((tokens, tokens[:1].expand(missing, -1)))
        else:
            tokens = [*tokens, *[tokens[0]] * missing]
        # Pages from the first new token on have no name yet, and are the text's own: what is written there behind its
        # tokens is written over later; over the end of its pages it goes to nobody's. What pads the others is its own:
        # nobody's page may hold what is no number for a step.
        held = list(piece.pages[: num_pages(piece.start + num_new)])
        written = num_pages(piece.start + num_new) - len(held)
        own = held[0] if held else self._nobodys
        behind = [self._nobodys] * written + [own] * (pages - len(held) - written)
        return Piece(tokens, piece.start, [*held, *behind], num_draws=piece.num_draws)

    def run(self, batch: Batch, compute: Compute) -> Tensor:
        """Return what is computed, which holds until the next run."""
        (spread,) = batch.spreads
        key = (spread.num, spread.num_new, spread.num_all)
        if key not in self._made:
            self._made[key] = self._graph(batch, compute) if self._is_cuda else None
            self.num_made += 1
        graph = self._made[key]
        return compute(batch) if graph is None else graph.run(batch)

    def _graph(self, batch: Batch, compute: Compute) -> "_Graph | None":
        """Return a graph; None: the card has no room for one, and such steps are launched as others are."""
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream()):
            try:
                return _Graph(batch, compute, self._stream, self._pool)
            except RuntimeError:  # out of memory among them
                torch.cuda.empty_cache()
                return None


class _Graph:
    """Of one shape. It has no reference to who computes: its end frees the weights that it reads."""

    def __init__(self, batch: Batch, compute: Compute, stream: Any, pool: Any) -> None:
        self._batch = batch.cloned()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                compute(self._batch)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._out = compute(self._batch)

    def run(self, batch: Batch) -> Tensor:
        with torch.cuda.device(self._out.device):
            for mine, theirs in zip(self._batch.tensors, batch.tensors, strict=True):
                mine.copy_(theirs)
            self._graph.replay()
        return self._out


def _size(num: int) -> int:
    """Return the least power of two that is no less."""
    return 1 << (num - 1).bit_length()


def _sizes(most: int) -> list[int]:
    """Return the powers of two up to that of `most`."""
    return [1 << power for power in range(_size(most).bit_length())]
