"""The counter of a false work: what a round has counted of it, taken out of the mean of another.

    m_i <- m_i - c_i

m is the mean of what is brought to this round, c what the other has moved by the false work x of member X:

    c_i = (v / t) x_i                               in parts that others have merged
    c_i = r_i - sum over others j of (v_j / t) x_ji   in those that X has merged: r is what it said they came to

v are the weights of that round's mean, t is their sum, with that of what was late. What X has brought to its own parts
nobody else has, and it need not show it, nor have merged it; what others have brought, they keep. Were r itself less
by another false work, c would put that back: of such a round nothing is taken out (`weft.sync.round.shares.weighed`).

In float64, one rounding per operation, and one more to fp32 at the end, as in `mean`: equal on every machine. The other
round was cut otherwise: of each of its parts that lies across this one, what lies there is taken.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float32
from torch import Tensor

from weft.codec.bounds import Empty
from weft.codec.codec import Codec
from weft.errors import PayloadError
from weft.ids import Digest, PeerId
from weft.sync.merge.mean import accumulate
from weft.sync.merge.reduce import codec_in, reply_codec_in
from weft.sync.method.choices import Choices
from weft.sync.records.acts import Weighed
from weft.sync.records.messages import Manifest
from weft.sync.records.parts import cut
from weft.wire import Buffer


@dataclass(frozen=True)
class Term:
    """Bytes of a part, and how often what they encode is in c.

    Args:
        by: who has brought them, or says that they are the result.
    """

    digest: Digest
    by: PeerId
    codec: Codec
    share: float


@dataclass(frozen=True)
class Piece:
    """What is to be taken out of a part, as another round was cut.

    Args:
        there: where it lies in the vector that rounds synchronise.
    """

    there: range
    terms: tuple[Term, ...]


def pieces(
    false: PeerId,
    weighed: Weighed,
    manifest: Manifest,
    parts: Mapping[PeerId, Sequence[Digest]],
    choices: Choices,
    num: int,
    here: range,
) -> tuple[Piece, ...]:
    """Return what is taken out of a part.

    Args:
        false: whose work it is.
        manifest: that has counted it.
        parts: of the payloads that it counts, by who brought them.
        choices: by which its round was computed.
        num: elements of the vector.
        here: those of the part.
    """
    found, total = list[Piece](), sum(weighed.weights) + weighed.late
    codec, reply = codec_in(choices, manifest.round), reply_codec_in(choices, manifest.round)
    weights = dict(zip((PeerId(each.peer) for each in manifest.contributions), weighed.weights, strict=True))
    ranges = cut(num, [part.uplink for part in manifest.parts])
    for number, (there, part) in enumerate(zip(ranges, manifest.parts, strict=True)):
        if max(there.start, here.start) >= min(there.stop, here.stop):
            continue
        if part.owner != false:
            terms = [Term(parts[false][number], false, codec, weights[false] / total)]
        else:
            others = [(peer, weight) for peer, weight in weights.items() if peer != false and weight]
            terms = [Term(Digest(part.result), false, reply, 1.0)]
            terms += [Term(parts[peer][number], peer, codec, -(weight / total)) for peer, weight in others]
        found.append(Piece(there, tuple(terms)))
    return tuple(found)


def wanted(taken_out: Sequence[Piece]) -> Iterator[tuple[Term, int]]:
    """Yield whose bytes it takes, and how many elements they encode."""
    for piece in taken_out:
        for term in piece.terms:
            yield term, len(piece.there)


def take_out(
    mean: Float32[Tensor, " part"],
    here: range,
    taken_out: Sequence[Piece],
    brought: Mapping[Digest, Buffer],
    empty: Empty,
) -> None:
    """Take pieces out of `mean`, in place.

    Args:
        here: where the part lies.
        brought: bytes, by their digests.
        empty: gives memory for so many values of a type.

    Raises:
        PayloadError: something is missing, or is no part of a vector. `mean` means nothing then.
    """
    for piece in taken_out:
        there = piece.there
        start, stop = max(there.start, here.start), min(there.stop, here.stop)
        moved = empty(stop - start, torch.float64)
        for number, term in enumerate(piece.terms):
            if (data := brought.get(term.digest)) is None:
                raise PayloadError("a part of what is to be taken out is missing")
            decoded = empty(len(there), torch.float32)
            term.codec.decode(data, len(there), decoded)
            now = decoded[start - there.start : stop - there.start]
            accumulate(moved, term.share, now, is_first=number == 0)
        rest = mean[start - here.start : stop - here.start]
        rest.copy_(rest.double().sub_(moved))
