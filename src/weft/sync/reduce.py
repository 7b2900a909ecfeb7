"""How members average vectors in parts: where the parts lie, and what an owner does with what it collects.

    every member  -- its part i, encoded -->  owner of part i
    owner of i    -- the mean of part i, encoded once -->  every member

so all members decode the same bytes. The mean over peers, in whole weights (see `weights`):

    mean = (v_1 x_1 + v_2 x_2 + ... + v_n x_n) / (v_1 + ... + v_n + a)    peers ascending, as the manifest lists them

What a branch had counted (a legacy: the sum of any number of outer steps) is added after all others. Its part is made
so short that it moves no further than the median of theirs, the lower of two:

    x_b <- x_b min(1, median |v_i x_i| / |v_b x_b|)

No owner sees more than its own part, so parts are shortened one by one; as each is bounded, so is the whole.

in float64, elementwise, one rounding per operation, and one more to fp32 at the end: a fixed sequence of IEEE
operations, equal on every machine. Weights are integers and are not normalised first: w/W rounded to fp32 would not
sum to one. With float64 every w x is exact (24 + 29 bits, for w < 2^29), so
- the mean of equal vectors is that vector, bit for bit, where nobody is late; one contributor's mean is its own;
- the result differs from the true mean by little more than the final rounding (fp32 sums lose up to n of those);
- finite contributions have a finite mean: nothing can overflow on the way (n w x < 2^10 2^53 2^128).
It costs the owner 8 bytes per element of its own part, and holds one accumulator whatever the number of peers.

It does not know who the peers are, nor how bytes travel.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float32
from torch import Tensor

from weft.codec import MAX_BLOCK, bounds
from weft.codec.codec import Codec
from weft.errors import PayloadError
from weft.ids import Digest
from weft.sync.outer import clip_factor, norm
from weft.wire import Buffer, digest

ALIGNMENT = MAX_BLOCK  # elements; every codec's block divides it, so a part's encoding does not depend on the cut
MAX_WEIGHT = 1 << 53  # above, an integer is not exact in float64

Empty = Callable[[int, torch.dtype], Tensor]

_CHUNK = 1 << 16  # elements: the accumulator's and the scratch's 512 KiB each


def cut(num: int, uplinks: Sequence[int]) -> tuple[range, ...]:
    """Return one part of [0, num) per entry of `uplinks`, sized in proportion to it.

    Args:
        num: elements of the vector.
        uplinks: integers >= 0 in any unit; 0 owns an empty part. Where all are 0, all own alike.

    Returns:
        ranges that cover [0, num) in order without overlap; borders are multiples of `ALIGNMENT`, so each part is
        within one `ALIGNMENT` of its share. Integer arithmetic: equal on all machines.
    """
    if not uplinks or min(uplinks) < 0:
        raise ValueError(f"cannot cut among uplinks {list(uplinks)}: need one or more, none negative")
    shares = list(uplinks) if any(uplinks) else [1] * len(uplinks)
    total, num_blocks = sum(shares), -(-num // ALIGNMENT)
    parts, start, cumulative = [], 0, 0
    for share in shares:
        cumulative += share
        stop = min(num_blocks * cumulative // total * ALIGNMENT, num)
        parts.append(range(start, stop))
        start = stop
    return tuple(parts)


def encode_parts(codec: Codec, vector: Float32[Tensor, " num"], parts: Sequence[range]) -> tuple[Buffer, ...]:
    """Return each part of `vector` (CPU) encoded. The bytes may share its memory: see `Codec.encode`.

    Raises:
        NotFinite: the vector holds NaN or infinity.
    """
    return tuple(codec.encode(vector[part.start : part.stop]) for part in parts)


def decode_parts(
    codec: Codec, results: Sequence[Buffer], parts: Sequence[range], out: Float32[Tensor, " num"] | None = None
) -> Float32[Tensor, " num"]:
    """Return the vector whose `parts` (covering it in order) are encoded in `results`.

    Args:
        out: where to write it. Memory used again costs half as much time as new memory.

    Raises:
        PayloadError: a result of another size, not finite, or not canonical.
    """
    vector = bounds.empty(parts[-1].stop) if out is None else out
    for part, result in zip(parts, results, strict=True):
        codec.decode(result, len(part), vector[part.start : part.stop])
    return vector


@dataclass(frozen=True)
class EncodedPart:
    """A part's bytes, of a payload or of a result."""

    encoded: Buffer
    digest: Digest


def named(encoded: Buffer) -> EncodedPart:
    return EncodedPart(encoded=encoded, digest=digest(encoded))


class Merger:
    """Accumulates contributions to one part; for its owner.

    Contributions must be added in ascending peer order: float64 sums may round, so the order is part of the result.

    Args:
        awaited: a, the weight of what is late.
        is_measuring: note how long contributions are; needed where legacies follow.
        empty: gives memory for so many values of a type.
    """

    def __init__(
        self,
        num: int,
        codec: Codec,
        reply_codec: Codec,
        awaited: int = 0,
        empty: Empty = bounds.empty,
        is_measuring: bool = False,
    ) -> None:
        self._num = num
        self._lengths: list[float] | None = [] if is_measuring else None  # of x_i, times v_i
        self._divisor = awaited
        self._codec = codec
        self._reply_codec = reply_codec
        self._empty = empty
        self._sum: Tensor | None = None
        self._decoded = empty(num, torch.float32)
        self._has_weight = False

    def add(self, weight: int, encoded: Buffer) -> None:
        """Add one peer's contribution. Weight 0 is checked like any other and changes nothing.

        Raises:
            PayloadError: a weight out of range, or bytes that are no finite vector of this part. The sum is then as it
                was before, so the part can be merged without that peer.
        """
        self._decode(weight, encoded)
        if self._lengths is not None and weight:
            self._lengths.append(norm(self._decoded) * weight)
        self._accumulate(weight)

    def add_legacy(self, weight: int, encoded: Buffer, num_rounds: int) -> None:
        """Add what a branch had counted, after all others.

        Args:
            num_rounds: of outer steps, that it is the sum of. Beside nobody else, it counts as the mean of them.

        Raises:
            PayloadError: as `add`.
        """
        self._decode(weight, encoded)
        lengths = sorted(self._lengths or ())
        limit = lengths[(len(lengths) - 1) // 2] / weight if lengths else norm(self._decoded) / num_rounds
        if (factor := clip_factor(self._decoded, limit)) != 1.0:
            self._decoded.mul_(factor)
        self._accumulate(weight)

    def _decode(self, weight: int, encoded: Buffer) -> None:
        if not 0 <= weight <= MAX_WEIGHT - self._divisor:
            raise PayloadError(f"a contribution of {weight} tokens: allowed are 0 to {MAX_WEIGHT - self._divisor}")
        self._codec.decode(encoded, self._num, self._decoded)

    def _accumulate(self, weight: int) -> None:
        self._divisor += weight
        self._has_weight |= weight > 0
        if self._sum is None:
            self._sum = self._empty(self._num, torch.float64)
            accumulate(self._sum, weight, self._decoded, is_first=True)
        else:
            accumulate(self._sum, weight, self._decoded)

    def result(self) -> EncodedPart:
        """Return the mean so far, encoded with the reply codec, and the digest of those bytes.

        Raises:
            PayloadError: nobody contributed a token, so there is no mean.
        """
        if self._sum is None or not self._has_weight:
            raise PayloadError("no contribution with tokens: there is nothing to merge")
        mean = self._empty(self._num, torch.float32)
        divide(self._sum, self._divisor, mean)
        return named(self._reply_codec.encode(mean))


def merge(contributions: Iterable[tuple[int, Float32[Tensor, " num"]]]) -> Float32[Tensor, " num"]:
    """Return the mean of decoded vectors weighted by tokens, given in ascending peer order.

    Bit for bit what `Merger` computes before it encodes, where nobody is late. NaN stays NaN: codecs refuse it.
    """
    total, accumulator = 0, None
    for weight, vector in contributions:
        total += weight
        if accumulator is None:
            accumulator = torch.empty_like(vector, dtype=torch.float64)
            accumulate(accumulator, weight, vector, is_first=True)
        else:
            accumulate(accumulator, weight, vector)
    if accumulator is None or not 0 < total <= MAX_WEIGHT:
        raise ValueError(f"cannot take a mean over {total} tokens")
    mean = accumulator.new_empty(accumulator.shape, dtype=torch.float32)
    divide(accumulator, total, mean)
    return mean


def accumulate(accumulator: Tensor, weight: int, vector: Tensor, *, is_first: bool = False) -> None:
    """accumulator += weight vector; the first time it begins with that."""
    scratch = accumulator.new_empty(min(_CHUNK, vector.numel()))
    for start in range(0, vector.numel(), _CHUNK):
        here, there = vector[start : start + _CHUNK], accumulator[start : start + _CHUNK]
        product = there if is_first else scratch[: here.numel()]
        product.copy_(here)
        product.mul_(float(weight))
        if not is_first:
            there.add_(product)


def divide(accumulator: Tensor, total: int, mean: Tensor) -> None:
    """mean = accumulator / total, rounded to fp32."""
    # A tensor of its own: a GPU multiplies by a rounded reciprocal when it divides by a number.
    divisor = torch.tensor([float(total)], dtype=torch.float64, device=accumulator.device)
    scratch = accumulator.new_empty(min(_CHUNK, accumulator.numel()))
    for start in range(0, accumulator.numel(), _CHUNK):
        here = accumulator[start : start + _CHUNK]
        mean[start : start + _CHUNK].copy_(torch.div(here, divisor, out=scratch[: here.numel()]))
