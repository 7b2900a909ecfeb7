"""What a peer brings to a round: what it trained, in the method's basis, of one fragment, with feedback, encoded.

    delta or gradient ──basis──► fragment ──+ error──► codec ──► parts
                                                └──────────────► what is left: the next error

Which codec encodes what:

    a peer's own work          the method's codec, with feedback where the method says so
    the mean of a group        the same, or where that is lossy a finer one: nobody keeps what it would leave
    what a branch had counted  the same, or where that is lossy int8: it is handed in once
    a merged part              the method's reply codec, with feedback at its owner

Error feedback: what a codec leaves of a vector is kept, and added to the next.

    p = C(x + beta e)          e' = (x + beta e) - D(p)

e is private. It is computed without a change of anything: it is installed once p is counted, and forgotten otherwise.
So with beta = 1 all that was decoded, and e, sum up to all that was put in, through rounds that fail too. The error is
kept where it is added: of an orthonormal basis in that basis, of a projection in the parameters' own, because what it
leaves out is part of the error.

`Replies` keeps what the encoding of merged parts leaves: it is added when this peer owns those places again.

    part i of a round: mean + beta e  --reply codec-->  result        committed: e = (mean + beta e) - result

Who owns which part changes from round to round. What is left lies with whoever encoded it; where another owns those
places next, it waits.

Failure:
- the round counts another result for the part, or is given up: nothing has changed.
- the process ends: what was left is lost. No peer's work is counted by it.

Seide et al., "1-bit stochastic gradient descent" (Interspeech 2014); Karimireddy et al., 1901.09847, algorithm 2; beta:
SparseLoCo (Sarfi et al., 2508.15706, algorithm 1).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import assert_never

import torch
from jaxtyping import Float32
from msgspec.structs import replace
from torch import Tensor, zeros

from weft.codec.build import build
from weft.codec.codec import Codec
from weft.codec.config import (
    LOSSY,
    CodecConfig,
    ExtensionCodecConfig,
    Int2Config,
    Int8Config,
    RandomKConfig,
    SignConfig,
    TopKConfig,
    Values,
)
from weft.ids import Digest, Round
from weft.sync.merge import outer as optimizers
from weft.sync.merge.basis import Scope
from weft.sync.merge.method import Method
from weft.sync.merge.outer import State
from weft.sync.merge.reduce import Coding, EncodedPart, decode_parts, encode_parts, named
from weft.sync.merge.sharded import empty_like
from weft.sync.method.choices import Choices, ExtensionOuterConfig
from weft.sync.records.messages import Brought
from weft.wire import Buffer


def codec_in(choices: Choices, round: int) -> Codec:
    return build(choices.codec, round)


def reply_codec_in(choices: Choices, round: int) -> Codec:
    return build(choices.reply, round)


def coding_in(choices: Choices, round: int) -> Coding:
    return Coding(codec_in(choices, round), reply_codec_in(choices, round), choices.merge)


def group_codec_in(choices: Choices, round: int, num_merged: int) -> Codec:
    """Return how the mean of `num_merged` peers' work is encoded in a round: all that they sent has room in it."""
    return build(_of_group(choices.codec), round, num_merged)


def legacy_codec_in(choices: Choices, round: int) -> Codec:
    return build(Int8Config() if isinstance(choices.codec, (*LOSSY, ExtensionCodecConfig)) else choices.codec, round)


def payload_codec_in(choices: Choices, round: int, brought: Brought) -> Codec:
    if brought.legacy is not None:
        return legacy_codec_in(choices, round)
    if brought.group is not None:
        return group_codec_in(choices, round, brought.group.num_counted + 1)
    return codec_in(choices, round)


def _of_group(config: CodecConfig) -> CodecConfig:
    match config:
        case TopKConfig() | RandomKConfig():
            return replace(config, values=_fine(config.values))
        case Int2Config() | SignConfig() | ExtensionCodecConfig():  # what the latter leaves out, nobody knows
            return Int8Config()
    return config


def _fine(values: Values) -> Values:
    match values:
        case "sign" | "e3m0" | "int4" | "fp8" | "int8":
            return "int8"
        case "bf16" | "fp32":
            return values
    assert_never(values)


def require(choices: Choices) -> None:
    """Refuse what this process cannot compute with.

    Raises:
        ConfigError: a codec or an outer step from outside of weft, which it does not know.
    """
    codec_in(choices, 0)
    reply_codec_in(choices, 0)
    if isinstance(choices.apply, ExtensionOuterConfig):
        optimizers.build(choices.apply)


Map = Callable[[Tensor], Tensor]


def _same(vector: Tensor) -> Tensor:
    return vector


def encode_with_feedback(
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
        (encoded,), left = encode_with_feedback(codec, mean, [range(len(here))], kept, decay)
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
        return encode_with_feedback(
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
    return encode_with_feedback(codec, vector, parts, None if error is None else scope.take(error, round), decay)
