"""How members average vectors in parts: what a peer brings, encoded; where the parts lie; what an owner does with what
it collects, by which rule; and what it replies.

    every member  -- its part i, encoded -->  owner of part i
    owner of i    -- the mean of part i, encoded once -->  every member

so all members decode the same bytes. Contributions are merged peers ascending, as the manifest lists them: `mean` and
`robust` have the rules.

Of a group only its mean (`GroupMean`) comes to the owner of a part, with the weight of the whole group. The mean over
peers stays what it is, but for rounding. That over senders does not: it is taken within the group, and then over groups
and lone members, so an element that one of ten leaves sent weighs there as if all ten had.

What a branch had counted (a legacy: the sum of any number of outer steps) is added after all others. Its part is made
so short that it moves no further than the median of theirs, the lower of two:

    x_b <- x_b min(1, median |v_i x_i| / |v_b x_b|)

No owner sees more than its own part, so parts are shortened one by one; as each is bounded, so is the whole.

A group's mean is made of whole payloads, one after the other, in the order in which they come: one accumulator and one
decoded vector, whatever the number of peers; by a rule of `robust` all of them are held. The order of float64 sums is
part of the result; a `GroupRecord` lists it.

What a peer brings is what it trained, in the method's basis, of one fragment, with feedback, encoded:

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
from dataclasses import dataclass
from functools import partial
from typing import assert_never

import torch
from jaxtyping import Float32
from msgspec.structs import replace
from torch import Tensor, zeros

from weft.codec import bounds, pieces
from weft.codec.bounds import Empty
from weft.codec.build import build
from weft.codec.codec import Codec, Elastic, Size, size_of
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
from weft.errors import PayloadError
from weft.ids import Digest, Round
from weft.sync.merge import outer as optimizers
from weft.sync.merge.mean import MAX_WEIGHT, Mean, PeersMean, SendersMean
from weft.sync.merge.method import Method, Scope
from weft.sync.merge.outer import State, clip_factor, norm
from weft.sync.merge.robust import RobustMean
from weft.sync.merge.sharded import SpreadVector, empty_like
from weft.sync.method.choices import Choices, ExtensionOuterConfig, Rule
from weft.sync.records.messages import Brought, Manifest
from weft.sync.records.parts import cut
from weft.wire import Buffer, digest


def parts_of(manifest: Manifest, scope: Scope) -> tuple[range, ...]:
    """Return where the parts lie whose results a manifest names, of what its round has synchronised."""
    if manifest.is_gossip:
        return (range(0),) * len(manifest.parts)
    return cut(scope.num_sent(manifest.round), [part.uplink for part in manifest.parts])


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
    return pieces.encode(codec, len(part), lambda here: vector.read(part[here.start : here.stop]), data)


def _write(vector: SpreadVector, part: range, here: range, values: Tensor) -> None:
    vector.write(part[here.start : here.stop], values)


@dataclass(frozen=True)
class EncodedPart:
    """A part's bytes, of a payload or of a result."""

    encoded: Buffer
    digest: Digest


def named(encoded: Buffer) -> EncodedPart:
    return EncodedPart(encoded=encoded, digest=digest(encoded))


def empty_mean(rule: Rule, num: int, empty: Empty = bounds.empty, *, is_of_steps: bool = True) -> Mean:
    """Return an empty mean of vectors of `num` elements.

    Args:
        empty: gives memory for so many values of a type.
        is_of_steps: vectors are what inner steps came to; False: they are gradients.
    """
    match rule:
        case "peers_mean":
            return PeersMean(num, empty)
        case "senders_mean":
            return SendersMean(num, empty)
    return RobustMean(rule, num, empty, is_of_steps=is_of_steps)


@dataclass(frozen=True)
class Coding:
    """How a part is merged.

    Args:
        codec: of most contributions.
        reply: of the result.
        is_of_steps: contributions are what inner steps came to; False: they are gradients.
    """

    codec: Codec
    reply: Codec
    rule: Rule = "peers_mean"
    is_of_steps: bool = True


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
        self._mean = empty_mean(coding.rule, num, empty, is_of_steps=coding.is_of_steps)
        self._decoded = empty(num, torch.float32)
        self._weight = 0

    def add(self, weight: int, encoded: Buffer, codec: Codec | None = None, num_peers: int = 1) -> None:
        """Add one peer's contribution. Weight 0 is checked like any other and changes nothing.

        Args:
            codec: how it is encoded; None: as most are.
            num_peers: whose mean it is: of a group more than one.

        Raises:
            PayloadError: a weight out of range, or bytes that are no finite vector of this part. The sum is then as it
                was before, so the part can be merged without that peer.
        """
        self._decode(weight, encoded, codec)
        if self._lengths is not None and weight:
            self._lengths.append(norm(self._decoded) * weight)
        self._mean.add(weight, self._decoded, num_peers)
        self._weight += weight

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
        self._mean.add_legacy(weight, self._decoded)
        self._weight += weight

    def _decode(self, weight: int, encoded: Buffer, codec: Codec | None) -> None:
        most = MAX_WEIGHT - self._awaited - self._weight
        if not 0 <= weight <= most:
            raise PayloadError(f"a contribution of {weight} tokens: allowed are 0 to {most}")
        (codec or self._coding.codec).decode(encoded, self._num, self._decoded)

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


def payload_size(codec: Codec, parts: Sequence[range]) -> Size:
    """Return how many bytes a whole payload can have."""
    sizes = [size_of(codec, len(part)) for part in parts]
    return Size(sum(size.most for size in sizes), all(size.is_exact for size in sizes))


def split(codec: Codec, payload: Buffer, parts: Sequence[range]) -> tuple[Buffer, ...]:
    """Return the encoded parts of a whole payload.

    Raises:
        PayloadError: it is of another length.
    """
    view, start, found = bounds.plain(payload), 0, list[Buffer]()
    size = payload_size(codec, parts)
    if size.is_exact and view.nbytes != size.most:
        raise PayloadError(f"a payload of {view.nbytes} bytes: {size.most} were announced by its round")
    for part in parts:
        num = len(part)
        stop = start + (codec.length(view[start:], num) if isinstance(codec, Elastic) else codec.nbytes(num))
        found.append(view[start:stop])
        start = stop
    if start != view.nbytes:
        raise PayloadError(f"a payload of {view.nbytes} bytes: its parts have {start}")
    return tuple(found)


class GroupMean:
    """Accumulates payloads of one round.

    Args:
        codec: of payloads.
        parts: how the vector is cut in the round.
    """

    def __init__(
        self, codec: Codec, parts: Sequence[range], rule: Rule = "peers_mean", *, is_of_steps: bool = True
    ) -> None:
        self._codec = codec
        self._parts = tuple(parts)
        num = self._parts[-1].stop
        self._decoded = bounds.empty(num, torch.float32)
        self._mean = empty_mean(rule, num, is_of_steps=is_of_steps)
        self._weight = 0  # of all that was added

    def add(self, weight: int, payload: Sequence[Buffer]) -> None:
        """Add one peer's payload, as its encoded parts.

        Raises:
            PayloadError: a weight out of range, or bytes that are no finite vector. Nothing has changed.
        """
        if not 0 < weight <= MAX_WEIGHT - self._weight:
            raise PayloadError(f"a contribution of {weight} tokens: allowed are 1 to {MAX_WEIGHT - self._weight}")
        decode_parts(self._codec, payload, self._parts, self._decoded)
        self._mean.add(weight, self._decoded)
        self._weight += weight

    def result(self, codec: Codec) -> tuple[EncodedPart, ...]:
        """Return the mean of what was added, part by part, encoded by `codec`.

        Raises:
            PayloadError: nothing was.
        """
        if not self._weight:
            raise PayloadError("no contribution with tokens: there is nothing to merge")
        return tuple(map(named, encode_parts(codec, self._mean.result(), self._parts)))


def codec_in(choices: Choices, round: int) -> Codec:
    return build(choices.codec, round)


def reply_codec_in(choices: Choices, round: int) -> Codec:
    return build(choices.reply, round)


def coding_in(choices: Choices, round: int) -> Coding:
    codec, reply = codec_in(choices, round), reply_codec_in(choices, round)
    return Coding(codec, reply, choices.merge, not choices.sends_gradient)


def group_codec_in(choices: Choices, round: int, num_merged: int) -> Codec:
    """Return how the mean of `num_merged` peers' work is encoded in a round: all that they sent has room in it."""
    return build(_of_group(choices.codec), round, num_merged)


def legacy_codec_in(choices: Choices, round: int) -> Codec:
    return build(Int8Config() if isinstance(choices.codec, (*LOSSY, ExtensionCodecConfig)) else choices.codec, round)


def payload_codec_in(choices: Choices, round: int, brought: Brought) -> Codec:
    if brought.legacy is not None:
        return legacy_codec_in(choices, round)
    if brought.group is not None:
        return group_codec_in(choices, round, brought.num_peers)
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


def encode_payload(
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
        state: replicated, with the parameters.
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
