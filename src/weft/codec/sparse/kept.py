"""Some values of each chunk, and nothing of the others: the k largest magnitudes, or k drawn at random.

    top-k      which places, as one number a chunk (`rank`)  |  the values there, by another codec
    random-k   the values at places that all peers draw alike, by another codec

A chunk is 4096 values that lie together, the last one short: of n' values it keeps ceil(k n' / 4096). The mean of m
peers' work has room for m times as many: all that they kept. Equal magnitudes are kept from the lowest place on, and
the choice is made by integers, the bits of |x|. The values of a chunk are a block of the other codec: they share a
scale.

Where the other codec makes zeros of values that were kept, their places tell nothing: the lowest that are free take
them. So a vector has one encoding, and what is decoded is encoded to the same bytes.

Top-k by chunks: SparseLoCo (Sarfi et al., 2508.15706, algorithm 1). Random-k, and top-k of it: CocktailSGD (Wang et
al., ICML 2023, section 3).
"""

from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Float32
from numpy.typing import NDArray
from torch import Tensor

from weft.codec import bounds
from weft.codec.codec import Sectioned
from weft.codec.sparse import rank
from weft.codec.sparse.rank import Choices, Places
from weft.errors import PayloadError
from weft.rng import integers64, stream
from weft.wire import Buffer

_RUN = 2048  # chunks whose places are worked on together: places of 8 chunks end with a byte

_BATCH = 32  # chunks searched together: 512 KiB


@dataclass(frozen=True)
class Room:
    """How many values of each `chunk` are kept: `kept` for each of `num_peers`, or all."""

    chunk: int
    kept: int
    num_peers: int = 1

    def num_kept(self, num: int) -> int:
        """Return how many of `num` values are kept."""
        short = num % self.chunk
        return num // self.chunk * self._num_of(self.chunk) + self._num_of(short)

    def _num_of(self, width: int) -> int:
        return min(-(-self.kept * width // self.chunk) * self.num_peers, width)


@dataclass(frozen=True)
class _Run:
    """Chunks of one width that are worked on together."""

    values: slice  # of the vector
    kept: slice  # of the values that are kept
    places: slice  # bytes of their places
    width: int
    choices: Choices
    num_kept: int

    @property
    def num_chunks(self) -> int:
        return int(self.values.stop - self.values.start) // self.width


@final
class TopK:
    """The largest magnitudes of each chunk, as many as it has room for.

    Args:
        values: encodes what is kept; its blocks have as many values as a chunk keeps.
    """

    def __init__(self, room: Room, values: Sectioned) -> None:
        self._room = room
        self._values = values

    def encode(self, vector: Float32[Tensor, " num"]) -> Buffer:
        bounds.require_flat(vector)
        array, num = vector.detach().numpy(), vector.numel()
        runs = _runs(num, self._room)
        data = np.empty(self.nbytes(num), dtype=np.uint8)
        kept = bounds.empty(self._room.num_kept(num))
        places = []
        for run in runs:
            rows = array[run.values].reshape(-1, run.width)
            found = np.concatenate(
                [_largest(rows[start : start + _BATCH], run.num_kept) for start in range(0, len(rows), _BATCH)]
            )
            kept.numpy()[run.kept] = np.take_along_axis(rows, found, 1).reshape(-1)
            places.append(found)
        # What the other codec makes of them decides which places tell anything.
        decoded = self._values.decode(self._values.encode(kept), kept.numel())
        for run, found in zip(runs, places, strict=True):
            settled, values = _settled(found, decoded.numpy()[run.kept].reshape(found.shape), run.width)
            decoded.numpy()[run.kept] = values.reshape(-1)
            data[run.places] = rank.encode(run.choices, settled)
        end = runs[-1].places.stop if runs else 0
        data[end:] = np.frombuffer(self._values.encode(decoded), np.uint8)
        return bounds.as_buffer(data)

    def decode(self, data: Buffer, num: int, out: Float32[Tensor, " num"] | None = None) -> Float32[Tensor, " num"]:
        view = bounds.require_nbytes(data, self.nbytes(num))
        found, runs = np.frombuffer(view, np.uint8), _runs(num, self._room)
        end = runs[-1].places.stop if runs else 0
        kept = self._values.decode(view[end:], self._room.num_kept(num)).numpy()
        out = bounds.target(num, out)
        out.zero_()
        for run in runs:
            places = rank.decode(run.choices, found[run.places], run.num_chunks)
            values = kept[run.kept].reshape(places.shape)
            settled, same = _settled(places, values, run.width)
            if not (np.array_equal(settled, places) and np.array_equal(same.view(np.int32), values.view(np.int32))):
                raise PayloadError("payload that keeps zeros where no encoder does; dropped")
            begins = np.arange(run.values.start, run.values.stop, run.width)[:, None]
            out.numpy()[(places + begins).reshape(-1)] = values.reshape(-1)
        return out

    def nbytes(self, num: int) -> int:
        return sum(self.sections(num))

    def sections(self, num: int) -> tuple[int, ...]:
        room = self._room
        places = rank.nbytes(rank.build(room.chunk, room.num_kept(room.chunk)), num // room.chunk)
        if short := num % room.chunk:
            places += rank.nbytes(rank.build(short, room.num_kept(short)), 1)
        return places, *self._values.sections(self._room.num_kept(num))


@final
class RandomK:
    """Values of each chunk, as many as it has room for, at places that follow from `salt`: the same in whole chunks.

    Args:
        salt: equal for all that merge with each other, another in each round.
        values: encodes what is kept; its blocks have as many values as a chunk keeps.
    """

    def __init__(self, room: Room, salt: int, values: Sectioned) -> None:
        self._room = room
        self._salt = salt
        self._values = values

    def encode(self, vector: Float32[Tensor, " num"]) -> Buffer:
        bounds.require_flat(vector)
        vector, num = vector.detach(), vector.numel()
        kept = bounds.empty(self._room.num_kept(num))
        for run in _runs(num, self._room):
            rows = vector.numpy()[run.values].reshape(-1, run.width)
            bounds.require_finite_vector(bounds.largest(vector[run.values]))
            kept.numpy()[run.kept] = rows[:, self._places(run)].reshape(-1)
        return self._values.encode(kept)

    def decode(self, data: Buffer, num: int, out: Float32[Tensor, " num"] | None = None) -> Float32[Tensor, " num"]:
        kept = self._values.decode(data, self._room.num_kept(num)).numpy()
        out = bounds.target(num, out)
        out.zero_()
        for run in _runs(num, self._room):
            rows = out.numpy()[run.values].reshape(-1, run.width)
            rows[:, self._places(run)] = kept[run.kept].reshape(-1, run.num_kept)
        return out

    def nbytes(self, num: int) -> int:
        return sum(self.sections(num))

    def sections(self, num: int) -> tuple[int, ...]:
        return self._values.sections(self._room.num_kept(num))

    def _places(self, run: _Run) -> Places:
        """Return the places with the `num_kept` smallest words of a stream, ascending."""
        words = integers64(stream(0, "random-k", self._salt), run.width)
        return np.sort(np.argsort(words, kind="stable")[: run.num_kept])


def _runs(num: int, room: Room) -> list[_Run]:
    """Return whole chunks in runs, then the short last one."""
    chunk = room.chunk
    whole = num - num % chunk
    runs, end = [], 0
    for start, stop, width in [
        *((start, min(start + _RUN * chunk, whole), chunk) for start in range(0, whole, _RUN * chunk)),
        *([(whole, num, num - whole)] if whole < num else []),
    ]:
        choices = rank.build(width, room.num_kept(width))
        begin, end = end, end + rank.nbytes(choices, (stop - start) // width)
        runs.append(
            _Run(
                values=slice(start, stop),
                kept=slice(room.num_kept(start), room.num_kept(stop)),
                places=slice(begin, end),
                width=width,
                choices=choices,
                num_kept=room.num_kept(width),
            )
        )
    return runs


def _largest(rows: NDArray[np.float32], kept: int) -> Places:
    """Return the places of the `kept` largest magnitudes of each row, ascending; of equal ones the first.

    Raises:
        NotFinite: a value is NaN or infinite.
    """
    width = rows.shape[1]
    keys = rows.view(np.int32) & np.int32(0x7FFFFFFF)
    least = np.partition(keys, width - kept, axis=1)[:, width - kept :].min(1)[:, None]
    bounds.require_finite_vector(float(keys.max().view(np.float32)))
    is_kept = keys >= least
    tied = np.flatnonzero(np.count_nonzero(is_kept, axis=1) > kept)
    if len(tied):
        above, equal = keys[tied] > least[tied], keys[tied] == least[tied]
        num_left = kept - np.count_nonzero(above, axis=1)
        is_kept[tied] = above | equal & (np.cumsum(equal, axis=1) <= num_left[:, None])
    return np.nonzero(is_kept)[1].reshape(len(rows), kept)


def _settled(places: Places, values: NDArray[np.float32], width: int) -> tuple[Places, NDArray[np.float32]]:
    """Return rows of places and what lies there, once zeros lie at the lowest places that are free, without a sign."""
    rows = np.flatnonzero((values == 0).any(1))
    if not len(rows):
        return places, values
    dense = np.zeros((len(rows), width), np.float32)
    np.put_along_axis(dense, places[rows], values[rows], 1)
    is_kept = dense != 0
    num_free = places.shape[1] - np.count_nonzero(is_kept, axis=1)
    is_kept |= ~is_kept & (np.cumsum(~is_kept, axis=1) <= num_free[:, None])
    places, values = places.copy(), values.copy()
    places[rows] = np.nonzero(is_kept)[1].reshape(len(rows), -1)
    values[rows] = np.take_along_axis(dense, places[rows], 1) + np.float32(0)  # -0 + 0 is 0
    return places, values
