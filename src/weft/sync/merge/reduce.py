"""How members average vectors in parts: where the parts lie, and what an owner does with what it collects.

    every member  -- its part i, encoded -->  owner of part i
    owner of i    -- the mean of part i, encoded once -->  every member

so all members decode the same bytes. How vectors are merged is the rule's (`mean`), peers ascending, as the manifest
lists them. What a branch had counted (a legacy: the sum of any number of outer steps) is added after all others. Its
part is made so short that it moves no further than the median of theirs, the lower of two:

    x_b <- x_b min(1, median |v_i x_i| / |v_b x_b|)

No owner sees more than its own part, so parts are shortened one by one; as each is bounded, so is the whole.

It costs the owner 8 bytes per element of its own part, and one accumulator whatever the number of peers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float32
from torch import Tensor

from weft.codec import MAX_BLOCK, bounds, pieces
from weft.codec.bounds import Empty
from weft.codec.codec import Codec
from weft.errors import PayloadError
from weft.ids import Digest
from weft.sync.merge import mean
from weft.sync.merge.mean import MAX_WEIGHT
from weft.sync.merge.outer import clip_factor, norm
from weft.sync.merge.sharded import SpreadVector
from weft.sync.method.choices import Rule
from weft.wire import Buffer, digest

ALIGNMENT = MAX_BLOCK  # elements; every codec's block divides it, so a part's encoding does not depend on the cut


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
    """Return each part of `vector` (CPU, or spread) encoded. The bytes may share its memory: see `Codec.encode`.

    Raises:
        NotFinite: the vector holds NaN or infinity.
    """
    if isinstance(vector, SpreadVector):
        return tuple(_encode_spread(codec, vector, part) for part in parts)
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
        if isinstance(vector, SpreadVector):
            pieces.decode(codec, result, len(part), partial(_write, vector, part))
            continue
        codec.decode(result, len(part), vector[part.start : part.stop])
    return vector


def _encode_spread(codec: Codec, vector: SpreadVector, part: range) -> Buffer:
    data = vector.room(codec.nbytes(len(part)))
    pieces.encode(codec, len(part), lambda here: vector.read(part[here.start : here.stop]), data)
    return data


def _write(vector: SpreadVector, part: range, here: range, values: Tensor) -> None:
    vector.write(part[here.start : here.stop], values)


@dataclass(frozen=True)
class EncodedPart:
    """A part's bytes, of a payload or of a result."""

    encoded: Buffer
    digest: Digest


def named(encoded: Buffer) -> EncodedPart:
    return EncodedPart(encoded=encoded, digest=digest(encoded))


@dataclass(frozen=True)
class Coding:
    """How a part is merged.

    Args:
        codec: of most contributions.
        reply: of the result.
    """

    codec: Codec
    reply: Codec
    rule: Rule = "peers_mean"


class Merger:
    """Accumulates contributions to one part; for its owner.

    Contributions must be added in ascending peer order: the order is part of the result.

    Args:
        awaited: a, the weight of what is late.
        is_measuring: note how long contributions are; needed where legacies follow.
        empty: gives memory for so many values of a type.
    """

    def __init__(
        self, num: int, coding: Coding, awaited: int = 0, empty: Empty = bounds.empty, is_measuring: bool = False
    ) -> None:
        self._num = num
        self._coding = coding
        self._awaited = awaited
        self._lengths: list[float] | None = [] if is_measuring else None  # of x_i, times v_i
        self._mean = mean.build(coding.rule, num, empty)
        self._decoded = empty(num, torch.float32)
        self._weight = 0

    def add(self, weight: int, encoded: Buffer, codec: Codec | None = None) -> None:
        """Add one peer's contribution. Weight 0 is checked like any other and changes nothing.

        Args:
            codec: how it is encoded; None: as most are.

        Raises:
            PayloadError: a weight out of range, or bytes that are no finite vector of this part. The sum is then as it
                was before, so the part can be merged without that peer.
        """
        self._decode(weight, encoded, codec)
        if self._lengths is not None and weight:
            self._lengths.append(norm(self._decoded) * weight)
        self._accumulate(weight)

    @property
    def decoded(self) -> Float32[Tensor, " num"]:
        """Return what was added last, until the next is."""
        return self._decoded

    def add_legacy(self, weight: int, encoded: Buffer, num_rounds: int, codec: Codec | None = None) -> None:
        """Add what a branch had counted, after all others.

        Args:
            num_rounds: of outer steps, that it is the sum of. Beside nobody else, it counts as the mean of them.
            codec: as in `add`.

        Raises:
            PayloadError: as `add`.
        """
        self._decode(weight, encoded, codec)
        lengths = sorted(self._lengths or ())
        limit = lengths[(len(lengths) - 1) // 2] / weight if lengths else norm(self._decoded) / num_rounds
        if (factor := clip_factor(self._decoded, limit)) != 1.0:
            self._decoded.mul_(factor)
        self._accumulate(weight)

    def _decode(self, weight: int, encoded: Buffer, codec: Codec | None) -> None:
        most = MAX_WEIGHT - self._awaited - self._weight
        if not 0 <= weight <= most:
            raise PayloadError(f"a contribution of {weight} tokens: allowed are 0 to {most}")
        (codec or self._coding.codec).decode(encoded, self._num, self._decoded)

    def _accumulate(self, weight: int) -> None:
        self._mean.add(weight, self._decoded)
        self._weight += weight

    def merged(self) -> Float32[Tensor, " num"]:
        """Return the mean so far.

        Raises:
            PayloadError: nobody contributed a token, so there is no mean.
        """
        if not self._weight:
            raise PayloadError("no contribution with tokens: there is nothing to merge")
        return self._mean.result(self._awaited)

    def result(self) -> EncodedPart:
        """Return the mean so far, encoded with the reply codec, and the digest of those bytes.

        Raises:
            PayloadError: as `merged`.
        """
        return named(self._coding.reply.encode(self.merged()))
