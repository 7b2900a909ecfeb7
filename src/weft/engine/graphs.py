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
MOST_PADDED = 4  # times the pages that are needed
WARM_UPS = 2  # runs before a graph is made, in which libraries allocate what they keep


Compute = Callable[[Batch], Tensor]


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
        nobody = self._filled(Piece(nothing, 0, (), draws=0), num_new, pages)
        return found + [nobody] * (num - len(pieces))

    def _filled(self, piece: Piece, num_new: int, pages: int) -> Piece:
        tokens = piece.tokens
        missing = num_new - len(tokens)
        if isinstance(tokens, Tensor):
            tokens = torch.cat((tokens, tokens[:1].expand(missing, -1)))
        else:
            tokens = [*tokens, *[tokens[0]] * missing]
        # Pages from the first new token on have no name yet, and are the text's own: what is written there behind its
        # tokens is written over later.
        held = list(piece.pages[: num_pages(piece.start + num_new)])
        return Piece(tokens, piece.start, [*held, *[self._nobodys] * (pages - len(held))], draws=piece.draws)

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
