"""Error feedback: what a codec leaves of a vector is kept, and added to the next.

    p = C(x + beta e)          e' = (x + beta e) - D(p)

e is private. `encode` computes e' and changes nothing: it is installed once p is counted, and forgotten otherwise. So
with beta = 1 all that was decoded, and e, sum up to all that was put in, through rounds that fail too.

Seide et al., "1-bit stochastic gradient descent" (Interspeech 2014); Karimireddy et al., 1901.09847, algorithm 2; beta:
SparseLoCo (Sarfi et al., 2508.15706, algorithm 1).

The merged parts that this peer encodes, and what their encoding leaves: added when it owns those places again.

    part i of a round: mean + beta e  --reply codec-->  result        committed: e = (mean + beta e) - result

Who owns which part changes from round to round. What is left lies with whoever encoded it; where another owns those
places next, it waits.

Failure:
- the round counts another result for the part, or is given up: nothing has changed.
- the process ends: what was left is lost. No peer's work is counted by it.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from jaxtyping import Float32
from torch import Tensor, zeros

from weft.codec.codec import Codec
from weft.ids import Digest, Round
from weft.sync.merge.coding import reply_codec_in
from weft.sync.merge.fragments import Scope
from weft.sync.merge.reduce import EncodedPart, decode_parts, encode_parts, named
from weft.sync.merge.sharded import empty_like
from weft.sync.method.choices import Choices
from weft.wire import Buffer

Map = Callable[[Tensor], Tensor]


def _same(vector: Tensor) -> Tensor:
    return vector


def encode(
    codec: Codec,
    vector: Float32[Tensor, " num"],
    parts: Sequence[range],
    kept: Float32[Tensor, " num"] | None,
    decay: float,
    forward: Map = _same,
    inverse: Map = _same,
) -> tuple[tuple[Buffer, ...], Float32[Tensor, " num"]]:
    """Return a payload, part by part, and what it leaves.

    Args:
        forward: what of the vector is encoded, where that is not all of it; inverse: back again.
        vector: on the CPU; only read.
        kept: e; None: zero.
        decay: beta.

    Raises:
        NotFinite: the vector holds NaN or infinity.
    """
    total = vector
    if kept is not None and decay:
        total = torch.mul(kept, decay, out=empty_like(vector))
        total.add_(vector)
    encoded = encode_parts(codec, forward(total), parts)
    left = inverse(decode_parts(codec, encoded, parts, empty_like(total) if forward is _same else None))
    return encoded, torch.sub(total, left, out=left)


class Replies:
    """Of one peer.

    Args:
        scope: tells which numbers a round synchronises.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._kept: dict[int, Float32[Tensor, " num"]] = {}  # by fragment
        self._left: dict[Digest, tuple[Round, range, Tensor]] = {}  # by result, until its round is decided

    def encode(self, mean: Float32[Tensor, " part"], here: range, round: Round, choices: Choices) -> EncodedPart:
        """Return a merged part, encoded; change nothing that a later round starts from.

        It may run on another thread than `settle`.
        """
        codec, decay = reply_codec_in(choices, round), choices.reply_feedback
        if decay is None:
            return named(codec.encode(mean))
        known = self._kept.get(self._scope.fragment(round))
        kept = None if known is None else known[here.start : here.stop]
        (encoded,), left = encode(codec, mean, [range(len(here))], kept, decay)
        part = named(encoded)
        self._left[part.digest] = (round, here, left)
        return part

    def settle(self, round: Round, results: Iterable[Digest]) -> None:
        """Keep what was left of those results that a round has counted, and nothing of others."""
        for result in results:
            found = self._left.get(result)
            if found is not None and found[0] == round:
                _, here, left = found
                fragment = self._scope.fragment(round)
                if fragment not in self._kept:
                    self._kept[fragment] = zeros(self._scope.num_sent(round))
                self._kept[fragment][here.start : here.stop] = left
        for result, (encoded_in, _, _) in list(self._left.items()):
            if encoded_in <= round:
                del self._left[result]
