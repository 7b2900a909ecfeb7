"""What a peer brings to a round: what it trained, in the method's basis, of one fragment, with feedback, encoded.

    delta or gradient ──basis──► fragment ──+ error──► codec ──► parts
                                                └──────────────► what is left: the next error

The error is kept where it is added: of an orthonormal basis in that basis, of a projection in the parameters' own,
because what it leaves out is part of the error.
"""

from collections.abc import Sequence

from jaxtyping import Float32
from torch import Tensor

from weft.sync.merge import feedback
from weft.sync.merge.coding import codec_in
from weft.sync.merge.fragments import Scope
from weft.sync.merge.method import Method
from weft.sync.merge.outer import State
from weft.sync.merge.reduce import encode_parts
from weft.wire import Buffer


def encode(
    method: Method,
    scope: Scope,
    state: State,
    delta: Float32[Tensor, " num"],
    error: Float32[Tensor, " num_kept"] | None,
    parts: Sequence[range],
    round: int,
) -> tuple[tuple[Buffer, ...], Float32[Tensor, " num_left"] | None]:
    """Return a payload, part by part, and what it leaves of what `scope` takes of an error; None: nothing is kept.

    Args:
        state: replicated.
        delta: `Method.delta`, on the CPU; only read.
        error: of the whole vector; None: zero.

    Raises:
        NotFinite: what was trained holds NaN or infinity.
    """
    codec, basis, decay = codec_in(method.choices, round), method.basis, method.choices.feedback
    if not basis.is_orthonormal:
        return feedback.encode(
            codec,
            delta,
            parts,
            error,
            decay or 0.0,
            lambda whole: basis.forward(whole, state, round),
            lambda sent: basis.inverse(sent, state, round),
        )
    vector = scope.take(basis.forward(delta, state, round), round)
    if decay is None:
        return encode_parts(codec, vector, parts), None
    return feedback.encode(codec, vector, parts, None if error is None else scope.take(error, round), decay)
