"""Steps of few tokens a text as CUDA graphs.

A step of one token launches some hundred kernels, which takes a GPU's host ten times as long as they run. A graph of
them is launched at once. It is of fixed shapes, so texts, tokens and pages are padded to the next of a few sizes: what
is padded reads a page that is nobody's, and writes there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.engine.batch import Batch, Piece
from weft.engine.guess import MAX_GUESSED
from weft.engine.pages import num_pages

MOST_NEW = 1 + MAX_GUESSED  # tokens of a text
MOST_TEXTS = 64
WARM_UPS = 2  # runs before a graph is made, in which libraries allocate what they keep


Compute = Callable[[Batch], Tensor]


class Graphs:
    """Of one stepper.

    Args:
        nobodys: a page that no text has.
    """

    def __init__(self, device: torch.device, nobodys: int) -> None:
        self._nobodys = nobodys
        self._is_cuda = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._is_cuda else None
        self._made: dict[tuple[int, int, int], _Plain] = {}

    def padded(self, pieces: Sequence[Piece]) -> list[Piece] | None:
        """Return pieces of one length, as many and with as many pages as a graph has; None: these have none."""
        most = max(len(piece.tokens) for piece in pieces)
        if most > MOST_NEW or len(pieces) > MOST_TEXTS or any(piece.sums for piece in pieces):
            return None
        num_new, num = 1 if most == 1 else MOST_NEW, _size(len(pieces))
        pages = _size(max(num_pages(piece.start + num_new) for piece in pieces))
        found = [self._filled(piece, num_new, pages) for piece in pieces]
        nothing = pieces[0].tokens[:1]
        nobody = self._filled(Piece(nothing, 0, (), draws=0), num_new, pages)
        return found + [nobody] * (num - len(pieces))

    def _filled(self, piece: Piece, num_new: int, pages: int) -> Piece:
        tokens = piece.tokens
        missing = num_new - len(tokens)
        if isinstance(tokens, Tensor):
            tokens = torch.cat((tokens, tokens[:1].expand(missing, -1)))
        else:
            tokens = [*tokens, *[tokens[0]] * missing]
        # A page that the text has only in part is its own: what is written behind its tokens is written over later.
        held = list(piece.pages[: num_pages(piece.start + num_new)])
        return Piece(tokens, piece.start, [*held, *[self._nobodys] * (pages - len(held))], draws=piece.draws)

    def run(self, batch: Batch, compute: Compute) -> Tensor:
        """Return what is computed, which holds until the next run."""
        (spread,) = batch.spreads
        key = (spread.num, spread.num_new, spread.num_all)
        if key not in self._made:
            self._made[key] = _Graph(batch, compute, self._pool) if self._is_cuda else _Plain(batch, compute)
        return self._made[key].run(batch)


class _Plain:
    """Without a graph: a CPU has none."""

    def __init__(self, batch: Batch, compute: Compute) -> None:
        self._batch = batch.cloned()
        self._compute = compute

    def run(self, batch: Batch) -> Tensor:
        for mine, theirs in zip(self._batch.tensors, batch.tensors, strict=True):
            mine.copy_(theirs)
        return self._compute(self._batch)


class _Graph(_Plain):
    def __init__(self, batch: Batch, compute: Compute, pool: Any) -> None:
        super().__init__(batch, compute)
        apart = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        apart.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(apart):
            for _ in range(WARM_UPS):
                compute(self._batch)
        torch.cuda.current_stream().wait_stream(apart)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._out = compute(self._batch)

    def run(self, batch: Batch) -> Tensor:
        for mine, theirs in zip(self._batch.tensors, batch.tensors, strict=True):
            mine.copy_(theirs)
        self._graph.replay()
        return self._out


def _size(num: int) -> int:
    """Return the next power of two."""
    return 1 << (num - 1).bit_length()
