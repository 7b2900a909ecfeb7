"""Which codec encodes what, in a round of a run.

    a peer's own work          the method's codec, with feedback where the method says so
    the mean of a group        the same, or where that is lossy a finer one: nobody keeps what it would leave
    what a branch had counted  the same, or where that is lossy int8: it is handed in once
    a merged part              the method's reply codec, with feedback at its owner

Whether this process can compute by a method: its codecs and outer step may be from outside of weft.
"""

from typing import assert_never

from msgspec.structs import replace

from weft.codec import (
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
from weft.codec.build import build
from weft.codec.codec import Codec
from weft.sync.merge import outer as optimizers
from weft.sync.merge.reduce import Coding
from weft.sync.method.choices import Choices, ExtensionOuterConfig
from weft.sync.records.messages import Brought


def codec_in(choices: Choices, round: int) -> Codec:
    """Return how peers encode their own work in a round."""
    return build(choices.codec, round)


def reply_codec_in(choices: Choices, round: int) -> Codec:
    """Return how merged parts are encoded in a round."""
    return build(choices.reply, round)


def coding_in(choices: Choices, round: int) -> Coding:
    """Return how a part is merged in a round."""
    return Coding(codec_in(choices, round), reply_codec_in(choices, round), choices.merge)


def group_codec_in(choices: Choices, round: int, num_merged: int) -> Codec:
    """Return how the mean of `num_merged` peers' work is encoded in a round: all that they sent has room in it."""
    return build(_of_group(choices.codec), round, num_merged)


def legacy_codec_in(choices: Choices, round: int) -> Codec:
    """Return how what a branch had counted is encoded in a round."""
    return build(Int8Config() if isinstance(choices.codec, (*LOSSY, ExtensionCodecConfig)) else choices.codec, round)


def payload_codec_in(choices: Choices, round: int, brought: Brought) -> Codec:
    """Return how what somebody brings to a round is encoded."""
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
