"""Error feedback: what a codec leaves of a vector is kept, and added to the next.

    p = C(x + beta e)          e' = (x + beta e) - D(p)

e is private. `encode` computes e' and changes nothing: it is installed once p is counted, and forgotten otherwise. So
with beta = 1 all that was decoded, and e, sum up to all that was put in, through rounds that fail too.

Seide et al., "1-bit stochastic gradient descent" (Interspeech 2014); Karimireddy et al., 1901.09847, algorithm 2; beta:
SparseLoCo (Sarfi et al., 2508.15706, algorithm 1).

It does not know who counts what.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float32
from torch import Tensor

from weft.codec.codec import Codec
from weft.sync.merge.reduce import decode_parts, encode_parts
from weft.sync.merge.sharded import empty_like
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
