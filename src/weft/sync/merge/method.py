"""A method is five choices: how often to synchronise, what to send, in which bytes, among whom, and how to apply it.

    row           every  send      codec         among  apply             replicated          private
    ddp           1      gradient  bf16          all    inner optimizer   outer, moments      -
    powersgd      1      gradient  low rank      all    inner optimizer   outer, moments, L R error
    fedavg        H      delta     bf16          all o  SGD, rate 1       outer               inner optimizer
    diloco        H      delta     int8          all    SGD-Nesterov      outer, momentum     inner optimizer
    streaming     H *    delta     e3m0          all    SGD-Nesterov      outer, momentum     inner optimizer
    async-diloco  H      delta     int8          all +  delayed Nesterov  outer, momentum     inner optimizer
    cocktail      1 *    delta     random-k of   all    SGD               outer               inner optimizer
                                   top-k, int4
    sparseloco    H      delta     top-k         all    SGD               outer               inner optimizer, error
    demo          1      gradient  top-k of DCT  all    sign SGD          outer               error: the momentum
    pulse         H      delta     seen in bf16  all    SGD-Nesterov      outer, momentum     inner optimizer, error

    * inner steps go on while a round is decided; streaming: of each fragment, one after the other, and a share of the
      local parameters stays; cocktail: what was not sent stays in them
    o or a sample, drawn anew for each round
    + whoever is ready: a round waits for nobody

A run file names a preset or spells the choices out (`type = "custom"`). Before a run starts, `spell_out` turns either
into `Choices`, which RunConfig holds (all in `choices`): what depends on the number of peers is decided once, for all.

`Method` is what a peer computes between rounds: tensors in, tensors out. `Scope` says which numbers of the vector a
round synchronises:

    fragments = 3   |0|1|2|0|1|2|0|1|2|...|     round t: the pieces of fragment t mod 3, one after the other

Each fragment has pieces from all over the vector, so from all depths of the model, and all fragments are about as
large. Streaming DiLoCo (Douillard et al., 2501.18512, section 3.1) deals out whole layers in the same strides; where
a layer ends makes no difference to what is computed.

`Basis` says in which order and basis they are encoded and merged:

    flat    as the model lays it out
    tiles   the 64 x 64 tiles of all matrices, one after the other; then what is left over, as it was
    dct     the same, and each tile X in cosines: D X D^T; of the rest, runs of 64 numbers: D x
    low rank  of each matrix a few directions (`low_rank`)
    visible   of the vector, those numbers that would change a parameter's bf16 value; the others are zero

A codec that keeps some of each 4096 values then chooses among a tile of one matrix, or among its frequencies. Tiles and
cosines are orthonormal maps, so means, error feedback and norms are the same on either side. What all members undo
alike, they undo to the same bits (`codec.exact`).

FedAvg: McMahan et al., 1602.05629, algorithm 1. DiLoCo: Douillard et al., 2311.08105, algorithm 1; streaming: Douillard
et al., 2501.18512, algorithm 2; asynchronous: Liu et al., 2401.09135, algorithm 3. SparseLoCo: Sarfi et al.,
2508.15706, algorithm 1. PULSELoCo: Miahi and Belilovsky, 2602.03839v2, algorithm 2. CocktailSGD: Wang et al., ICML
2023, algorithm 1. DeMo: Peng et al., 2411.19870, algorithm 1 and section 3 (chunks of 64, two-dimensional for
matrices). It leaves out what its paper does with matrices whose sides are no multiples of 64: smaller tiles. Here their
edges are part of the rest.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Protocol, assert_never, final, runtime_checkable

import torch
from jaxtyping import Float32
from torch import Tensor

from weft.codec import bounds
from weft.codec.dense import upper_half
from weft.codec.exact import matmul
from weft.errors import ConfigError
from weft.sync.merge import outer as optimizers
from weft.sync.merge.low_rank import LowRank
from weft.sync.merge.outer import State, StepContext
from weft.sync.merge.sharded import SpreadVector
from weft.sync.method.choices import (
    BasisName,
    Choices,
    InnerConfig,
    LowRankConfig,
    MixConfig,
    MuonConfig,
    OptimizerConfig,
    PairNesterovConfig,
    check,
)
from weft.sync.method.schedule import cos_pi

OUTER = "outer"  # the name of the parameters among the replicated vectors
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


@runtime_checkable  # the shape check that is on in tests asks
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


def build_basis(config: BasisName | LowRankConfig, shapes: Shapes) -> Basis:
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
        case "visible":
            return Visible()
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


@final
class Visible(Flat):
    """Lets through what a model that computes in bf16 would notice: x_i where bf16(w_i - x_i) is not bf16(w_i).

    A step of fine-tuning moves most parameters by less than their bf16 values lie apart: by half of it, a 512th of
    the parameter. What is not let through is an error, and adds up to what is (Miahi and Belilovsky, 2602.03839v2).
    """

    is_orthonormal = False

    def forward(self, vector: Float32[Tensor, " num"], state: State, round: int) -> Float32[Tensor, " num"]:  # noqa: ARG002  # the protocol's signature
        """Return what is seen of a delta; all of it where `state` has no parameters that it is one of."""
        outer = state.get(OUTER)
        if outer is None:
            return vector
        found = bounds.empty(vector.numel())
        for start in range(0, vector.numel(), bounds.CHUNK):
            here = slice(start, start + bounds.CHUNK)
            w, x = outer[here].cpu(), vector[here]
            torch.where(upper_half(w - x) == upper_half(w), torch.zeros(()), x, out=found[here])
        return found


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


_NOTHING: State = {}


@final
class Method:
    """The five choices as operations on flat vectors. It holds no state of a run.

    Args:
        choices: where members exchange, those of the rounds that make the mean count: `gossip` has the others.
        inner: the run's inner optimizer.
        shapes: of the tensors that lie in a vector, in order.
    """

    def __init__(self, choices: Choices, inner: OptimizerConfig, shapes: Shapes = ()) -> None:
        check(choices, inner)
        self.choices = choices = choices.of_mean()
        self.basis = build_basis(choices.basis, shapes)
        self._of_basis = frozenset(self.basis.init())
        apply = inner if isinstance(choices.apply, InnerConfig) else choices.apply
        assert not isinstance(apply, InnerConfig | MuonConfig | MixConfig | PairNesterovConfig)
        self._apply = apply
        self._optimizer = optimizers.build(apply)

    def init(self, num: int) -> State:
        """Return the state of the outer optimizer and of the basis before the first round: replicated."""
        return {**self._optimizer.init(num), **self.basis.init()}

    def delta(
        self,
        outer: Float32[Tensor, " num"],
        local_or_gradient: Float32[Tensor, " num"],
        into: Float32[Tensor, " num"] | None = None,
    ) -> Float32[Tensor, " num"]:
        """Return what this peer's training comes to, on the device it is given.

        Args:
            outer: the parameters after the last commit this peer applied.
            local_or_gradient: the parameters after the inner steps where deltas are sent (carry included: see
                `Carry`); the mean gradient where gradients are.
            into: memory that may be written to, the local parameters' own, too; None: new memory.

        Returns:
            outer - local; or the gradient itself, not copied.
        """
        if self.choices.sends_gradient:
            return local_or_gradient
        if into is None and outer.device.type == local_or_gradient.device.type == "cpu":
            into = bounds.empty(outer.numel())
        return torch.sub(outer, local_or_gradient, out=into)

    def num_sent(self, num: int) -> int:
        return self.basis.num_sent(num)

    def contribution(
        self,
        outer: Float32[Tensor, " num"],
        local_or_gradient: Float32[Tensor, " num"],
        state: State = _NOTHING,
        round: int = 0,
    ) -> Float32[Tensor, " num_sent"]:
        """Return this peer's `delta` in the basis in which it is encoded and merged; `state` is the basis' own."""
        return self.basis.forward(self.delta(outer, local_or_gradient), state, round)

    def apply(
        self, outer: Float32[Tensor, " num"], state: State, merged: Float32[Tensor, " num_sent"], context: StepContext
    ) -> None:
        """Make the outer step on `outer` and `state`, in place; `merged` is the decoded result of a round."""
        own = {name: vector for name, vector in state.items() if name not in self._of_basis}
        descent = self.basis.inverse(merged, state, context.round)
        if isinstance(outer, SpreadVector):
            outer.step(self._apply, own, descent, context)
        else:
            self._optimizer.apply(outer, own, descent, context)
        self.basis.advance(merged, state, context.round)


def most_sent(choices: Choices, shapes: Shapes, num: int) -> int:
    """Return how many numbers a round encodes at most of a vector of `num`, in which tensors of these shapes lie."""
    return Scope(build_basis(choices.basis, shapes).num_sent(num), choices.fragments).most_sent
