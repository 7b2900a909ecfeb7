"""What a model is: one decoder family in a dozen numbers, named sizes, and how many parameters that makes.

A `ModelConfig` is part of what all peers of a run share, so it fixes every shape and constant that reaches the
numbers. A config that came from elsewhere has fields in range once it is decoded; whether the model they describe
is one this machine wants is a second question, asked with `check_size` before any memory is allocated.

Llama (arXiv:2302.13971), grouped queries (arXiv:2305.13245), norms on queries and keys (Qwen3, arXiv:2505.09388).
"""

from math import sqrt
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import UNSET, UnsetType

from weft.config import Config
from weft.errors import ConfigError, TooLarge

# Bounds on what a stranger's config may say, far above any model trained today. They keep every product of two
# fields far below 2**63 and a single layer's shapes writable.
MAX_VOCAB = 1 << 22
MAX_LAYERS = 1 << 10
MAX_HEADS = 1 << 10
MAX_WIDTH = 1 << 16
MAX_FFN_WIDTH = 1 << 18
MAX_SEQ_LEN = 1 << 24
MAX_ROPE_THETA = 1e12

Size = Literal["nano", "tiny", "35m", "150m", "400m", "1b", "3b", "7b"]


class Llama3Scaling(Config, frozen=True, kw_only=True):
    """Stretch rotary wavelengths so that a model reads further than it was trained to (Llama 3.1)."""

    factor: Annotated[float, msgspec.Meta(ge=1.0, le=1024.0, description="how much longest wavelengths are stretched")]
    low_freq_factor: Annotated[
        float, msgspec.Meta(gt=0.0, le=1024.0, description="context / longest unscaled wavelength")
    ] = 1.0
    high_freq_factor: Annotated[
        float, msgspec.Meta(gt=0.0, le=1024.0, description="context / longest kept wavelength")
    ] = 4.0
    original_seq_len: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQ_LEN, description="tokens, context before scaling")]

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"model.rope_scaling.high_freq_factor: must exceed low_freq_factor = {self.low_freq_factor}. "
                f"Found {self.high_freq_factor}."
            )


class YarnScaling(Config, frozen=True, kw_only=True):
    """Stretch long rotary wavelengths alone, and scores a little (YaRN, arXiv:2309.00071, sections 3.2 and 3.4)."""

    factor: Annotated[float, msgspec.Meta(ge=1.0, le=1024.0, description="how much longest wavelengths are stretched")]
    score_factor: Annotated[
        float, msgspec.Meta(gt=0.0, le=16.0, description="what queries and keys are multiplied by: sqrt(1/t) of eq. 14")
    ]
    fast_turns: Annotated[float, msgspec.Meta(gt=0.0, le=1e6, description="turns in the context; more are kept")] = 32.0
    slow_turns: Annotated[
        float, msgspec.Meta(gt=0.0, le=1e6, description="turns in the context; less are stretched")
    ] = 1.0
    original_seq_len: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQ_LEN, description="tokens, context before scaling")]
    is_rounded: bool = True
    """The pairs between which it blends are whole numbers, as in published models."""


Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: tuple[Target, ...] = get_args(Target)


class AdapterConfig(Config, frozen=True, kw_only=True):
    """The table `[adapter]`: small matrices beside those of a model, which alone are trained (`model.adapter`)."""

    rank: Annotated[int, msgspec.Meta(ge=1, le=MAX_WIDTH, description="of the small matrices")] = 16
    alpha: Annotated[float, msgspec.Meta(gt=0.0, le=1e6, description="what they add is scaled by alpha / rank")] = 32.0
    targets: Annotated[
        tuple[Target, ...], msgspec.Meta(min_length=1, max_length=7, description="which matrices have them")
    ] = TARGETS
    is_rank_stabilized: bool = False
    """Scale by alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732)."""
    dropout: (
        Annotated[
            float, msgspec.Meta(gt=0.0, lt=1.0, description="share of its inputs that a training step leaves out")
        ]
        | UnsetType
    ) = UNSET

    def __post_init__(self) -> None:
        if len(set(self.targets)) != len(self.targets):
            raise ConfigError("adapter.targets: each is named once.")

    @property
    def scale(self) -> float:
        return self.alpha / (sqrt(self.rank) if self.is_rank_stabilized else self.rank)


class ModelConfig(Config, frozen=True, kw_only=True):
    """A decoder: embedding, `num_layers` blocks of attention and SwiGLU, norm, head."""

    vocab_size: Annotated[int, msgspec.Meta(ge=2, le=MAX_VOCAB, description="number of tokens")]
    num_layers: Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS, description="blocks")]
    num_heads: Annotated[int, msgspec.Meta(ge=1, le=MAX_HEADS, description="query heads")]
    num_kv_heads: Annotated[int, msgspec.Meta(ge=1, le=MAX_HEADS, description="key and value heads; divides num_heads")]
    width: Annotated[int, msgspec.Meta(ge=2, le=MAX_WIDTH, description="channels of the residual stream")]
    head_width: Annotated[int, msgspec.Meta(ge=2, le=MAX_WIDTH, description="channels per head, even")] | None = None
    """None means width / num_heads."""
    ffn_width: Annotated[int, msgspec.Meta(ge=1, le=MAX_FFN_WIDTH, description="channels inside SwiGLU")]
    max_seq_len: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQ_LEN, description="tokens, longest context")]
    rope_theta: Annotated[float, msgspec.Meta(gt=1.0, le=MAX_ROPE_THETA, description="base of rotary wavelengths")] = (
        10_000.0
    )
    rope_scaling: Llama3Scaling | None = None
    norm_eps: Annotated[float, msgspec.Meta(gt=0.0, le=0.1, description="added to the mean square in RMSNorm")] = 1e-5
    has_qk_norm: bool = False
    """RMSNorm over each head of queries and keys, as in Qwen3."""
    has_qkv_bias: bool = False
    """Biases on the query, key and value projections, as in Qwen2."""
    is_tied: bool = False
    """The head is the embedding."""
    # What follows is left out of the bytes of a config that has none of it, so that those stay what they were.
    yarn: YarnScaling | UnsetType = UNSET
    window: (
        Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQ_LEN, description="tokens that each token sees, itself included")]
        | UnsetType
    ) = UNSET
    """Itself the last of them, in the layers from `first_windowed` on; unset: all that came before."""
    first_windowed: Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS, description="layer")] | UnsetType = UNSET
    """Unset: every layer is windowed where one is."""
    has_out_bias: Literal[True] | UnsetType = UNSET
    """Biases on the output projection too, as llama's `attention_bias` has them."""
    adapter: AdapterConfig | UnsetType = UNSET
    """Of which the parameters are; all else is frozen, and lies elsewhere. Unset: the whole model is trained."""
    has_frozen_ends: Literal[True] | UnsetType = UNSET
    """Embedding, last norm and head are a space's: frozen, and lie elsewhere. Unset: they are trained as all else."""

    def __post_init__(self) -> None:
        if self.head_width is None and self.width % self.num_heads:
            raise ConfigError(
                f"model.width: must be a multiple of num_heads = {self.num_heads}, or set head_width. "
                f"Found {self.width}."
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model.num_kv_heads: must divide num_heads = {self.num_heads}. Found {self.num_kv_heads}."
            )
        if self.channels_per_head % 2:
            raise ConfigError(f"model.head_width: rotary positions need an even width. Found {self.channels_per_head}.")
        if self.has_qk_norm and self.has_qkv_bias:
            raise ConfigError(
                "model.has_qk_norm and model.has_qkv_bias: no published family has both, so the model could not be "
                "exported. Choose one."
            )
        if self.has_out_bias and not self.has_qkv_bias:
            raise ConfigError("model.has_out_bias: no published family has it without model.has_qkv_bias.")
        if self.adapter is not UNSET:
            sides = {"q_proj": self.q_width, "k_proj": self.kv_width, "v_proj": self.kv_width, "o_proj": self.q_width}
            for target in self.adapter.targets:
                most = min(self.width, sides.get(target, self.ffn_width))
                if self.adapter.rank > most:
                    raise ConfigError(
                        f"adapter.rank: {target} has a side of {most}, and a rank of more adds nothing. "
                        f"Found {self.adapter.rank}."
                    )
        if self.has_frozen_ends and (self.is_tied or self.adapter is not UNSET):
            raise ConfigError(
                "model.has_frozen_ends: in a space embedding and head are two matrices, and layers are trained whole. "
                "Leave is_tied and the adapter out."
            )
        if self.yarn is not UNSET and self.rope_scaling is not None:
            raise ConfigError("model.yarn and model.rope_scaling: both stretch rotary wavelengths. Choose one.")

    @property
    def channels_per_head(self) -> int:
        return self.head_width if self.head_width is not None else self.width // self.num_heads

    def window_of(self, layer: int) -> int | None:
        """Return how many tokens a token sees in that layer; None: all that came before."""
        if self.window is UNSET or layer < (self.first_windowed or 0):
            return None
        return self.window

    @property
    def q_width(self) -> int:
        """Channels of all query heads together."""
        return self.num_heads * self.channels_per_head

    @property
    def kv_width(self) -> int:
        """Channels of all key heads together; as many for values."""
        return self.num_kv_heads * self.channels_per_head


# layers, heads, kv heads, width, ffn width, tied. Names count parameters at a vocabulary of 32 000, nano at 257 bytes.
# 35m is the smallest shape of Streaming DiLoCo (arXiv:2501.18512), its two-matrix FFN of 2048 as a SwiGLU of equal
# size; 1b and 3b follow Llama 3.2, 7b follows Mistral (arXiv:2310.06825).
_SHAPES: dict[Size, tuple[int, int, int, int, int, bool]] = {
    "nano": (4, 4, 4, 128, 384, True),
    "tiny": (6, 8, 4, 256, 704, True),
    "35m": (6, 8, 8, 512, 1408, True),
    "150m": (20, 12, 4, 768, 2048, True),
    "400m": (32, 16, 4, 1024, 2816, True),
    "1b": (16, 32, 8, 2048, 8192, True),
    "3b": (28, 24, 8, 3072, 8192, True),
    "7b": (32, 32, 8, 4096, 14336, False),
}
SIZES: tuple[Size, ...] = get_args(Size)

_LONG_CONTEXT = 4096  # tokens; beyond it wavelengths of base 10 000 are too few, and Llama 3's base is used


def named(size: str, vocab_size: int, seq_len: int) -> ModelConfig:
    """Return the config of a named size.

    Args:
        size: one of `SIZES`.
        vocab_size: tokens the tokenizer knows.
        seq_len: tokens of the longest context.

    Raises:
        ConfigError: no such size, or a vocabulary or length out of range.
    """
    shape = _SHAPES.get(size)  # type: ignore[call-overload]  # any string may be asked for
    if shape is None:
        raise ConfigError(f"model.size: Found {size!r}. Allowed: {', '.join(SIZES)}.")
    num_layers, num_heads, num_kv_heads, width, ffn_width, is_tied = shape
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "width": width,
        "ffn_width": ffn_width,
        "max_seq_len": seq_len,
        "rope_theta": 10_000.0 if seq_len <= _LONG_CONTEXT else 500_000.0,
        "is_tied": is_tied,
    }
    try:
        return msgspec.convert(fields, ModelConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"model of size {size!r} with vocab_size {vocab_size} and seq_len {seq_len}: {error}."
        ) from None


def plain(config: ModelConfig) -> ModelConfig:
    """Return the model of which nothing is frozen: without its adapter, with ends of its own."""
    return msgspec.structs.replace(config, adapter=UNSET, has_frozen_ends=UNSET) if has_base(config) else config


def has_base(config: ModelConfig) -> bool:
    """Return whether a part of the model is frozen, and no part of its vector: its base."""
    return config.adapter is not UNSET or config.has_frozen_ends is True


def num_parameters(config: ModelConfig) -> int:
    """Return how many numbers of the model are trained: all, a tied head once; without those of its base.

    Equals `layout(config).num_parameters`, in closed form: it costs nothing, however large the model.
    """
    tables = num_table_parameters(config) * (1 if config.is_tied else 2)
    return config.num_layers * num_layer_parameters(config) + tables + num_norm_parameters(config)


def num_layer_parameters(config: ModelConfig) -> int:
    """Return how many numbers one block is made of; all are alike."""
    if config.adapter is not UNSET:
        q, kv, ffn, width = config.q_width, config.kv_width, config.ffn_width, config.width
        others = {"q_proj": q, "k_proj": kv, "v_proj": kv, "o_proj": q}  # of the two sides, the one that is not width
        return config.adapter.rank * sum(width + others.get(target, ffn) for target in config.adapter.targets)
    projections = config.width * (config.q_width + 2 * config.kv_width) + config.q_width * config.width
    biases = (config.q_width + 2 * config.kv_width) * config.has_qkv_bias + config.width * bool(config.has_out_bias)
    norms = 2 * config.width + 2 * config.channels_per_head * config.has_qk_norm
    return projections + biases + norms + 3 * config.width * config.ffn_width


def num_table_parameters(config: ModelConfig) -> int:
    """Return how many numbers the embedding is made of; the head has as many."""
    return 0 if has_base(config) else config.vocab_size * config.width


def num_base_parameters(config: ModelConfig) -> int:
    """Return how many numbers are frozen: what an adapter goes beside, or the ends of a space; else none."""
    if not has_base(config):
        return 0
    whole = num_parameters(plain(config))
    return whole - num_parameters(config) if config.has_frozen_ends else whole


def num_norm_parameters(config: ModelConfig) -> int:
    """Return how many numbers the norm before the head is made of."""
    return 0 if has_base(config) else config.width


def check_size(found: int, max_parameters: int) -> None:
    """Refuse a model of `found` parameters where this machine is willing to hold fewer, before any is allocated.

    Raises:
        TooLarge: it has more than `max_parameters` parameters.
    """
    if found > max_parameters:
        raise TooLarge(
            f"the model has {found:,} parameters; this machine takes at most {max_parameters:,}. "
            "Join from a machine with more memory, or raise the limit if it is set too low."
        )
