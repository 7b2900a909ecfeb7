"""Which numbers of a vector a round synchronises, in which order and in which basis they are encoded and merged.

    fragments = 3   |0|1|2|0|1|2|0|1|2|...|     round t: the pieces of fragment t mod 3, one after the other

Each fragment has pieces from all over the vector, so from all depths of the model, and all fragments are about as
large. Streaming DiLoCo (Douillard et al., 2501.18512, section 3.1) deals out whole layers in the same strides; where
a layer ends makes no difference to what is computed.

The basis:

    flat    as the model lays it out
    tiles   the 64 x 64 tiles of all matrices, one after the other; then what is left over, as it was
    dct     the same, and each tile X in cosines: D X D^T; of the rest, runs of 64 numbers: D x
    low rank  of each matrix a few directions (`low_rank`)

A codec that keeps some of each 4096 values then chooses among a tile of one matrix, or among its frequencies. These two
are orthonormal maps, so means, error feedback and norms are the same on either side. What all members undo alike, they
undo to the same bits (`codec.exact`).

DeMo: Peng et al., 2411.19870, section 3 (chunks of 64, two-dimensional for matrices). It leaves out what its paper does
with matrices whose sides are no multiples of 64: smaller tiles. Here their edges are part of the rest.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Protocol, assert_never, final

import torch
from jaxtyping import Float32
from torch import Tensor

from weft.codec.exact import matmul
from weft.errors import ConfigError
from weft.sync.merge.low_rank import LowRank
from weft.sync.merge.outer import State
from weft.sync.method.choices import BasisName, LowRankConfig
from weft.sync.method.schedule import cos_pi

PIECES = 8  # of each fragment
_GRAIN = 64  # pieces are a multiple of so many numbers


class Scope:
    """
    Args:
        num: numbers of the vector.

    Raises:
        ConfigError: a fragment would be empty.
    """

    def __init__(self, num: int, fragments: int = 1) -> None:
        self.num = num
        self.fragments = fragments
        size = -(-num // (fragments * PIECES * _GRAIN)) * _GRAIN
        pieces = [slice(start, min(start + size, num)) for start in range(0, num, size or 1)]
        self._pieces = (
            [pieces[number::fragments] for number in range(fragments)] if fragments > 1 else [[slice(0, num)]]
        )
        if num and not all(self._pieces):
            raise ConfigError(
                f"method: fragments: a vector of {num:,} numbers has no {fragments} fragments; set fewer, or train a "
                "larger model."
            )

    def fragment(self, round: int) -> int:
        return round % self.fragments

    def num_sent(self, round: int) -> int:
        """Return how many numbers that has."""
        return sum(piece.stop - piece.start for piece in self._pieces[self.fragment(round)])

    @property
    def most_sent(self) -> int:
        """The same, of the largest."""
        return max(self.num_sent(number) for number in range(self.fragments))

    def take(self, vector: Tensor, round: int) -> Tensor:
        """Return the numbers of `vector` that a round synchronises: a view where it is all of them."""
        if self.fragments == 1:
            return vector
        return torch.cat([vector[piece] for piece in self._pieces[self.fragment(round)]])

    def put(self, vector: Tensor, round: int, numbers: Tensor) -> None:
        """Write what `take` returned, changed, back into `vector`."""
        if self.fragments == 1:
            if numbers is not vector and not numbers.data_ptr() == vector.data_ptr() != 0:  # 0: it lies elsewhere
                vector.copy_(numbers)
            return
        start = 0
        for piece in self._pieces[self.fragment(round)]:
            stop = start + piece.stop - piece.start
            vector[piece] = numbers[start:stop]
            start = stop


SIDE = 64
_TILE = SIDE * SIDE
_BATCH = 64  # tiles transformed together: 2 MiB in float64, which caches hold; of 1024 each takes four times as long

Shapes = Sequence[tuple[int, ...]]


class Basis(Protocol):
    is_orthonormal: bool  # else a projection: what it leaves out is an error, as what a codec leaves is

    def num_sent(self, num: int) -> int:
        """Return how many numbers are encoded of a vector of `num`."""
        ...

    def init(self) -> State:
        """Return what it needs before the first round: replicated."""
        ...

    def forward(self, vector: Float32[Tensor, " num"], state: State, round: int) -> Float32[Tensor, " num_sent"]:
        """Return what is to be encoded in a round; `vector` is only read, and may be returned."""
        ...

    def inverse(self, vector: Float32[Tensor, " num_sent"], state: State, round: int) -> Float32[Tensor, " num"]:
        """Return what `forward` was given, or as much of it as that let through; to the same bits on every machine."""
        ...

    def advance(self, vector: Float32[Tensor, " num_sent"], state: State, round: int) -> None:
        """Change `state` for the next round by what this one's mean is, to the same bits."""
        ...


def build(config: BasisName | LowRankConfig, shapes: Shapes) -> Basis:
    """Return the basis that is asked for, of a vector in which tensors of these shapes lie one after the other."""
    match config:
        case LowRankConfig():
            return LowRank(config, shapes)
        case "flat":
            return Flat()
        case "tiles":
            return Tiles(shapes)
        case "dct":
            return Dct(shapes)
    assert_never(config)


class Flat:
    is_orthonormal = True

    def num_sent(self, num: int) -> int:
        return num

    def init(self) -> State:
        return {}

    def forward(self, vector: Float32[Tensor, " num"], state: State, round: int) -> Float32[Tensor, " num"]:  # noqa: ARG002  # the protocol's signature
        return vector

    def inverse(self, vector: Float32[Tensor, " num"], state: State, round: int) -> Float32[Tensor, " num"]:  # noqa: ARG002  # the same
        return vector

    def advance(self, vector: Float32[Tensor, " num"], state: State, round: int) -> None:
        pass


class Tiles(Flat):
    """A permutation.

    Args:
        shapes: of the tensors, in the order of the vector; what comes after them is left over.
    """

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = tuple(shapes)
        self.num_tiled = sum(_TILE * math.prod(_tiles(shape)) for shape in self._shapes)

    def forward(self, vector: Float32[Tensor, " num"], state: State, round: int) -> Float32[Tensor, " num"]:  # noqa: ARG002  # the same
        return self._moved(vector, lambda here, there, out: there(out).copy_(here(vector)))

    def inverse(self, vector: Float32[Tensor, " num"], state: State, round: int) -> Float32[Tensor, " num"]:  # noqa: ARG002  # the same
        return self._moved(vector, lambda here, there, out: here(out).copy_(there(vector)))

    def _moved(self, vector: Tensor, copy: Callable[["_View", "_View", Tensor], object]) -> Tensor:
        out = torch.empty_like(vector)
        for here, there in self._pairs(vector.numel()):
            copy(here, there, out)
        return out

    def _pairs(self, num: int) -> Iterator[tuple["_View", "_View"]]:
        """Yield what lies where: views of a vector in the model's order, and of one in tiles."""
        start, tiled, rest = 0, 0, self.num_tiled
        for shape in self._shapes:
            size, (down, across) = math.prod(shape), _tiles(shape)
            if down and across:
                width, height = shape[1], shape[0]
                yield _tiles_of(start, shape), _span(tiled, (down, across, SIDE, SIDE))
                tiled += down * across * _TILE
                for rows, columns in (
                    (slice(0, down * SIDE), slice(across * SIDE, width)),  # the right edge
                    (slice(down * SIDE, height), slice(0, width)),  # the lower one, with the corner
                ):
                    edge = (rows.stop - rows.start, columns.stop - columns.start)
                    yield _block(start, shape, rows, columns), _span(rest, edge)
                    rest += math.prod(edge)
            else:
                yield _span(start, (size,)), _span(rest, (size,))
                rest += size
            start += size
        yield _span(start, (num - start,)), _span(rest, (num - start,))


@final
class Dct(Tiles):
    """Tiles, and then type-II cosine transforms, orthonormal."""

    def forward(self, vector: Float32[Tensor, " num"], state: State, round: int) -> Float32[Tensor, " num"]:
        return self._transformed(super().forward(vector, state, round), cosines(vector.device))

    def inverse(self, vector: Float32[Tensor, " num"], state: State, round: int) -> Float32[Tensor, " num"]:
        return super().inverse(self._transformed(vector.clone(), cosines(vector.device).T), state, round)

    def _transformed(self, vector: Tensor, matrix: Tensor) -> Tensor:
        """Transform `vector` in place: tiles from both sides, runs from one."""
        tiles = vector[: self.num_tiled].view(-1, SIDE, SIDE)
        for start in range(0, len(tiles), _BATCH):
            here = tiles[start : start + _BATCH]
            here.copy_(
                matmul(matmul(matrix.expand(len(here), SIDE, SIDE), here), matrix.T.expand(len(here), SIDE, SIDE))
            )
        num_runs = (vector.numel() - self.num_tiled) // SIDE
        runs = vector[self.num_tiled : self.num_tiled + num_runs * SIDE].view(-1, SIDE)
        for start in range(0, num_runs, _BATCH * SIDE):
            here = runs[start : start + _BATCH * SIDE]
            here.copy_(matmul(here, matrix.T))
        return vector


@cache
def cosines(device: torch.device) -> Float32[Tensor, "64 64"]:
    """Return D: row f is the cosine of frequency f, D D^T = 1. The same bits everywhere: no C library is asked."""
    rows = []
    for frequency in range(SIDE):
        length = math.sqrt((1 if frequency == 0 else 2) / SIDE)
        rows.append([length * _cosine(frequency * (2 * place + 1), 2 * SIDE) for place in range(SIDE)])
    return torch.tensor(rows, dtype=torch.float64, device=device).float()


def _cosine(numerator: int, denominator: int) -> float:
    """Return cos(pi numerator / denominator)."""
    turned = numerator % (2 * denominator)
    return cos_pi(min(turned, 2 * denominator - turned) / denominator)


_View = Callable[[Tensor], Tensor]


def _tiles(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return how many whole tiles a tensor has, down and across; (0, 0): none."""
    if len(shape) != 2 or min(shape) < SIDE:  # a matrix
        return 0, 0
    return shape[0] // SIDE, shape[1] // SIDE


def _span(start: int, shape: tuple[int, ...]) -> _View:
    return lambda vector: vector[start : start + math.prod(shape)].view(shape)


def _block(start: int, shape: tuple[int, ...], rows: slice, columns: slice) -> _View:
    whole = _span(start, shape)
    return lambda vector: whole(vector)[rows, columns]


def _tiles_of(start: int, shape: tuple[int, ...]) -> _View:
    """Return the tiles of a matrix as (down, across, rows, columns)."""
    down, across = _tiles(shape)
    block = _block(start, shape, slice(0, down * SIDE), slice(0, across * SIDE))
    return lambda vector: block(vector).view(down, SIDE, across, SIDE).transpose(1, 2)
