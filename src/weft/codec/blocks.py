"""Codecs by blocks: values that lie together share a scale, and each is a code of few bits.

Layout: the scales, then the codes, both in order; the last block may be short. Codes of less than a byte fill bytes
from the lowest bit up; bits beyond the last code are zero.

A `Scheme` says what scales and codes are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float32, Int8
from numpy.typing import NDArray
from torch import Tensor

from weft.codec import bounds
from weft.errors import PayloadError
from weft.wire import Buffer

# What a scheme works on: blocks in rows.
Values = Float32[Tensor, "blocks width"]
Codes = Int8[Tensor, "blocks width"]
Scratch = Float32[Tensor, "2 blocks width"]

NO_ENCODER = "payload of blocks that no encoder makes: {}; dropped"


@runtime_checkable  # the shape check that is on in tests asks
class Scheme(Protocol):
    num_bits: int  # of a code: 1, 2, 4 or 8
    scale: np.dtype[np.generic]

    def quantize(self, values: Values, codes: Codes, work: Scratch) -> NDArray[np.generic]:
        """Fill `codes` and return the scales; `work` is overwritten.

        Codes of 2 and 4 bits have no others; that of 1 bit is any number but 0, or 0.

        As large a tensor that is made anew costs more than all arithmetic on it: its pages are touched first here.

        Raises:
            NotFinite: a value is NaN or infinite.
        """
        ...

    def spread(self, packed: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        """Fill `out` with what codes stand for under a factor of 1; NaN for a code that no encoder makes."""
        ...

    def factors(self, scales: NDArray[np.generic], tops: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return what the blocks are multiplied with.

        Args:
            tops: the largest magnitude in each block of what `spread` gave.

        Raises:
            PayloadError: a scale that no encoder makes, or not with such a block.
        """
        ...


@final
class Blocks:
    def __init__(self, scheme: Scheme, block: int) -> None:
        self._scheme = scheme
        self._block = block
        # Values worked on at a time: whole blocks, about a cache full, whose codes begin with a byte.
        self._run = max(bounds.CHUNK // (8 * block), 1) * 8 * block

    def encode(self, vector: Float32[Tensor, " num"]) -> Buffer:
        bounds.require_flat(vector)
        vector, num, scheme = vector.detach(), vector.numel(), self._scheme
        data = np.empty(self.nbytes(num), dtype=np.uint8)
        scales, packed = self._split(data, num)
        size = min(self._run, num)
        codes, work = bounds.empty(size, torch.int8), bounds.empty(2 * size).view(2, size)
        for start in range(0, num, self._run):
            for here in self._pieces(start, num):
                values = vector[here.vector].view(here.shape)
                scratch = work[:, here.run].view(2, *here.shape)
                scales[here.blocks] = scheme.quantize(values, codes[here.run].view(here.shape), scratch)
            num_codes = min(self._run, num - start)
            _pack(codes[:num_codes].numpy().view(np.uint8), packed[self._bytes_of(start) :], scheme.num_bits)
        return bounds.as_buffer(data)

    def decode(self, data: Buffer, num: int, out: Float32[Tensor, " num"] | None = None) -> Float32[Tensor, " num"]:
        view, scheme = bounds.require_nbytes(data, self.nbytes(num)), self._scheme
        scales, packed = self._split(np.frombuffer(view, np.uint8), num)
        _require_zero_bits_beyond(packed, num, scheme.num_bits)
        out = bounds.target(num, out)
        work = bounds.empty(min(self._run, num))
        for start in range(0, num, self._run):
            stop = min(start + self._run, num)
            scheme.spread(packed[self._bytes_of(start) : self._bytes_of(stop)], out.numpy()[start:stop])
            for here in self._pieces(start, num):
                values, scratch = out[here.vector].view(here.shape), work[here.run].view(here.shape)
                torch.abs(values, out=scratch)
                factors = scheme.factors(scales[here.blocks], scratch.amax(1).numpy())
                values.mul_(torch.from_numpy(factors).unsqueeze(1))
        return out

    def nbytes(self, num: int) -> int:
        return sum(self.sections(num))

    def sections(self, num: int) -> tuple[int, ...]:
        return self._scheme.scale.itemsize * -(-num // self._block), self._bytes_of(num)

    def _bytes_of(self, num: int) -> int:
        return -(-num * self._scheme.num_bits // 8)

    def _pieces(self, start: int, num: int) -> Iterator["_Piece"]:
        """Yield the whole blocks of a run that begins at `start`, then the short last block if it is there."""
        block, stop = self._block, min(start + self._run, num)
        whole = stop - (stop - start) % block
        for begin, end, width in ((start, whole, block), (whole, stop, stop - whole)):
            if begin < end:
                yield _Piece(
                    vector=slice(begin, end),
                    run=slice(begin - start, end - start),
                    blocks=slice(begin // block, -(-end // block)),
                    shape=(-1, width),
                )

    def _split(self, data: NDArray[np.uint8], num: int) -> tuple[NDArray[np.generic], NDArray[np.uint8]]:
        end = self._scheme.scale.itemsize * -(-num // self._block)
        return data[:end].view(self._scheme.scale), data[end:]


@dataclass(frozen=True)
class _Piece:
    """Blocks of one width: where they lie in the vector and in the run, and which they are."""

    vector: slice
    run: slice
    blocks: slice
    shape: tuple[int, int]


def table(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the values that each of 256 bytes of codes stands for, given those of each code, the lowest bits first.

    Args:
        values: of 2, 4, 16 or 256 codes.
    """
    num_bits = {2: 1, 4: 2, 16: 4, 256: 8}[len(values)]
    shifts = np.arange(0, 8, num_bits)
    codes = np.arange(256).reshape(-1, 1) >> shifts & len(values) - 1
    found: NDArray[np.float32] = values[codes]
    return found


def look_up(table: NDArray[np.float32], packed: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    """Fill `out` with what `packed` codes stand for by `table`."""
    per_byte = table.shape[1]
    whole = len(out) // per_byte
    if per_byte > 2:
        np.take(table, packed[:whole], axis=0, out=out[: whole * per_byte].reshape(whole, per_byte), mode="clip")
    else:  # as integers of as many bits: torch moves those faster, and numpy rows of more
        word = {1: np.int32, 2: np.int64}[per_byte]
        words = torch.from_numpy(table.view(word).reshape(-1))
        target = torch.from_numpy(out[: whole * per_byte].view(word))
        torch.index_select(words, 0, torch.from_numpy(packed[:whole].astype(np.int32)), out=target)
    if whole < len(packed):
        out[whole * per_byte :] = table[packed[whole], : len(out) - whole * per_byte]


def _pack(codes: NDArray[np.uint8], packed: NDArray[np.uint8], num_bits: int) -> None:
    """Write codes, a byte each, to the begin of `packed`; `codes` is overwritten."""
    if num_bits == 8:
        packed[: len(codes)] = codes
    elif num_bits == 1:
        packed[: -(-len(codes) // 8)] = np.packbits(codes, bitorder="little")
    elif num_bits == 2:
        rest = len(codes) % 4
        fours = codes[: len(codes) - rest].view("<u4")
        fours *= 0x01041040  # 2^24 c0 + 2^26 c1 + 2^28 c2 + 2^30 c3, and products below 2^24 or beyond 2^32
        fours >>= 24
        np.copyto(packed[: len(fours)], fours, casting="unsafe")
        if rest:
            shifts = np.array((0, 2, 4), np.uint8)[:rest]
            packed[len(fours)] = np.add.reduce(codes[len(codes) - rest :] << shifts, dtype=np.uint8)
    else:
        pairs = codes[: len(codes) // 2 * 2].view("<u2")
        pairs *= 17  # p + 16 p, at most FFFF, so that its lower byte without 4 bits is the first code, then the second
        pairs >>= 4
        np.copyto(packed[: len(pairs)], pairs, casting="unsafe")
        if len(codes) % 2:
            packed[len(pairs)] = codes[-1]


def _require_zero_bits_beyond(packed: NDArray[np.uint8], num: int, num_bits: int) -> None:
    used = num * num_bits % 8
    if used and packed[-1] >> used:
        raise PayloadError(NO_ENCODER.format("bits beyond its end"))
