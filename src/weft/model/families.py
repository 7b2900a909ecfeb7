"""Hugging Face's words for our models: config.json and tensor names of llama, mistral, qwen2 and qwen3, both ways.

The four families are one architecture with different flags, so a config maps to a `ModelConfig` or is refused. Our
fused matrices hold Hugging Face's as runs of rows, so every one of its tensors is one range of the flat vector:
reading and writing a folder is copying ranges. What would change the numbers and is not supported (other rotary
scalings, biases elsewhere, quantised weights) is an error, never ignored.

Pure; files are the business of `weights`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log, prod
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from weft import reading
from weft.errors import ConfigError
from weft.model.config import Llama3Scaling, ModelConfig
from weft.model.flat import layout

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

_ARCHITECTURES: dict[Family, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


class _Rope(msgspec.Struct):
    """`rope_parameters`, or its older names `rope_theta` and `rope_scaling`."""

    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float = 1.0
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class _HfConfig(msgspec.Struct):
    """The fields of config.json that reach the numbers. What is unset has the default of `transformers`."""

    model_type: Family
    vocab_size: int | UnsetType = UNSET
    hidden_size: int | UnsetType = UNSET
    intermediate_size: int | UnsetType = UNSET
    num_hidden_layers: int | UnsetType = UNSET
    num_attention_heads: int | UnsetType = UNSET
    max_position_embeddings: int | UnsetType = UNSET
    num_key_value_heads: int | UnsetType | None = UNSET
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    partial_rotary_factor: float = 1.0
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | UnsetType | None = UNSET
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None


# What `transformers` takes where a config.json does not say.
_DEFAULTS: dict[str, int] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 32_768,
}
_DEFAULTS_OF: dict[Family, dict[str, int]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"intermediate_size": 14_336, "max_position_embeddings": 131_072, "num_key_value_heads": 8},
    "qwen2": {"vocab_size": 151_936, "intermediate_size": 22_016, "num_key_value_heads": 32},
    "qwen3": {"vocab_size": 151_936, "intermediate_size": 22_016, "num_key_value_heads": 32},
}
_DEFAULT_WINDOW = 4096
# A linear scaling is a llama3 one that keeps no pair: in a context of one token every pair turns less than once.
_LINEAR_SEQ_LEN = 1


@dataclass(frozen=True)
class HfTensor:
    """A tensor of a Hugging Face checkpoint and where it begins in the flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + prod(self.shape)


def family_of(config: ModelConfig) -> Family:
    """Return the family whose code in `transformers` computes what `config` says."""
    if config.has_qk_norm:
        return "qwen3"
    if config.has_out_bias:
        return "llama"
    if config.has_qkv_bias:
        return "qwen2"
    # transformers refuses a llama whose width is no multiple of its heads, and no llama has a window. Mistral has both.
    is_mistral = config.window is not UNSET or config.width % config.num_heads
    return "mistral" if is_mistral else "llama"


def config_from_hf(data: bytes, where: str) -> ModelConfig:
    """Return the model that a config.json describes.

    Args:
        data: the file's bytes.
        where: its path, for errors.

    Raises:
        ConfigError: not JSON, a field missing or ill-typed, another family, or something weft does not compute.
    """
    try:
        tree = reading.json_of(data)
        hf = msgspec.convert(_plain(tree), _HfConfig)
    except msgspec.ValidationError as error:
        families = f" weft reads the families {', '.join(_ARCHITECTURES)}." if "model_type" in str(error) else ""
        raise ConfigError(f"{where}: {error}.{families}") from None
    except ValueError as error:
        if (kind := reading.what_else(data[: reading.HEAD_NBYTES])) is not None:
            raise ConfigError(f"{where} is {kind}.") from None
        raise ConfigError(f"{where}: not JSON: {error}. Download or export it again.") from None
    _refuse_unsupported(hf, where)
    size = {**_DEFAULTS, **_DEFAULTS_OF[hf.model_type]}
    size |= {name: value for name in _DEFAULTS if (value := getattr(hf, name)) is not UNSET}
    heads = size["num_attention_heads"]
    kv_heads = size.get("num_key_value_heads", heads) if hf.num_key_value_heads is UNSET else hf.num_key_value_heads
    default_head = 128 if hf.model_type == "qwen3" else None
    fields = {
        "vocab_size": size["vocab_size"],
        "num_layers": size["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": heads if kv_heads is None else kv_heads,
        "width": size["hidden_size"],
        "head_width": hf.head_dim or default_head,
        "ffn_width": size["intermediate_size"],
        "max_seq_len": size["max_position_embeddings"],
        "norm_eps": hf.rms_norm_eps,
        "has_qk_norm": hf.model_type == "qwen3",
        "has_qkv_bias": hf.model_type == "qwen2" or hf.attention_bias,
        "is_tied": hf.tie_word_embeddings,
        **({"has_out_bias": True} if hf.attention_bias and hf.model_type == "llama" else {}),
        **_window_fields(hf, size, where),
        **_rope_fields(hf, size["max_position_embeddings"], where),
    }
    if fields["head_width"] is not None and fields["head_width"] * heads == fields["width"]:
        fields["head_width"] = None  # one spelling per model, so that equal models have equal configs
    try:
        return msgspec.convert(fields, ModelConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {str(error).rstrip('.')}.") from None


_MEANT_NULL = ("num_key_value_heads", "sliding_window")


def _plain(tree: Any) -> Any:
    """Return the settings without those that are null, and 4096.0 as the 4096 that it means."""
    if not isinstance(tree, dict):
        return tree
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53 else value
        for name, value in tree.items()
        if value is not None or name in _MEANT_NULL
    }


def _refuse_unsupported(hf: _HfConfig, where: str) -> None:
    def refuse(field: str, found: object, allowed: str) -> ConfigError:
        return ConfigError(f"{where}: {field}: Found {found!r}. weft computes only {allowed}.")

    if hf.quantization_config is not None:
        raise refuse(
            "quantization_config", hf.quantization_config.get("quant_method", "a"), "fp32, bf16 and fp16 weights"
        )
    if hf.hidden_act != "silu":
        raise refuse("hidden_act", hf.hidden_act, "silu")
    if hf.attention_bias and hf.model_type not in ("llama", "qwen2"):
        raise refuse("attention_bias", True, "false, or the biases of model_type llama and qwen2")
    if hf.mlp_bias:
        raise refuse("mlp_bias", True, "false")
    rope = hf.rope_parameters or hf.rope_scaling or _Rope()
    if hf.partial_rotary_factor != 1.0 or rope.partial_rotary_factor != 1.0:
        raise refuse("partial_rotary_factor", min(hf.partial_rotary_factor, rope.partial_rotary_factor), "1.0")


def _window_fields(hf: _HfConfig, size: Mapping[str, int], where: str) -> dict[str, int]:
    """Return from which layer on a token sees how much; nothing where no window is shorter than the context."""
    if hf.model_type == "llama" or (hf.model_type in ("qwen2", "qwen3") and not hf.use_sliding_window):
        return {}
    window = _DEFAULT_WINDOW if hf.sliding_window is UNSET else hf.sliding_window
    if window is None or window >= size["max_position_embeddings"]:
        return {}
    num_layers = size["num_hidden_layers"]
    first = 0 if hf.model_type == "mistral" else min(hf.max_window_layers, num_layers)
    if hf.layer_types is not None:
        kinds = hf.layer_types
        first = kinds.index("sliding_attention") if "sliding_attention" in kinds else num_layers
        if kinds != ["full_attention"] * first + ["sliding_attention"] * (num_layers - first):
            raise ConfigError(
                f"{where}: layer_types: Found windows in other layers. weft can compute them only in all layers or in "
                f"the last ones. If {window} tokens suffice, set max_position_embeddings to {window} in a copy of that "
                "file."
            )
    if first == num_layers:
        return {}
    return {"window": window, **({"first_windowed": first} if first else {})}


def _rope_fields(hf: _HfConfig, context: int, where: str) -> dict[str, Any]:
    rope = hf.rope_parameters or hf.rope_scaling or _Rope()
    theta = hf.rope_theta if rope.rope_theta is None else rope.rope_theta
    kind = rope.rope_type or rope.type or "default"
    found: dict[str, Any] = {"rope_theta": theta}
    match kind:
        case "default" | "dynamic":  # dynamic scales beyond the context alone, where weft does not go
            return found
        case "linear":
            return found | {"rope_scaling": {"factor": rope.factor, "original_seq_len": _LINEAR_SEQ_LEN}}
        case "llama3":
            scaling = {
                "factor": rope.factor,
                "low_freq_factor": rope.low_freq_factor,
                "high_freq_factor": rope.high_freq_factor,
                "original_seq_len": rope.original_max_position_embeddings,
            }
            return found | {"rope_scaling": scaling}
        case "yarn":
            return found | {"yarn": _yarn_fields(rope, context)}
    raise ConfigError(
        f"{where}: rope_scaling: Found type {kind!r}. weft computes default, linear, dynamic, llama3 and yarn."
    )


def _yarn_fields(rope: _Rope, context: int) -> dict[str, Any]:
    original = rope.original_max_position_embeddings or context
    factor = context / original if rope.factor is None else rope.factor
    score_factor = rope.attention_factor
    if score_factor is None:
        score_factor = _yarn_score(factor, 1.0)
        if rope.mscale and rope.mscale_all_dim:
            score_factor = _yarn_score(factor, rope.mscale) / _yarn_score(factor, rope.mscale_all_dim)
    return {
        "factor": factor,
        "score_factor": score_factor,
        "fast_turns": rope.beta_fast or 32.0,
        "slow_turns": rope.beta_slow or 1.0,
        "original_seq_len": original,
        "is_rounded": rope.truncate,
    }


def _yarn_score(factor: float, scale: float) -> float:
    """Return sqrt(1/t) of YaRN, eq. 15, which some models scale."""
    return 0.1 * scale * log(factor) + 1.0 if factor > 1 else 1.0


def config_to_hf(config: ModelConfig, *, dtype: str, stop_id: int | None) -> dict[str, Any]:
    """Return what config.json says about `config`, in the spelling old and new `transformers`, vLLM and llama.cpp read.

    Args:
        dtype: "float32" or "bfloat16", the type of the tensors beside it.
        stop_id: the token that ends a text, or None.
    """
    family = family_of(config)
    tree: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.ffn_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.channels_per_head,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "initializer_range": 0.02,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.is_tied,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": stop_id,
        "use_cache": True,
    }
    if family == "mistral":
        tree["sliding_window"] = None if config.window is UNSET else config.window
    elif config.window is not UNSET:
        tree |= {
            "sliding_window": config.window,
            "use_sliding_window": True,
            "max_window_layers": config.first_windowed or 0,
        }
    if family in ("llama", "qwen3"):
        tree["attention_bias"] = bool(config.has_out_bias)
    if config.yarn is not UNSET:
        tree["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": config.yarn.factor,
            "attention_factor": config.yarn.score_factor,
            "beta_fast": config.yarn.fast_turns,
            "beta_slow": config.yarn.slow_turns,
            "original_max_position_embeddings": config.yarn.original_seq_len,
            "truncate": config.yarn.is_rounded,
        }
    elif config.rope_scaling is not None:
        tree["rope_scaling"] = _scaling_to_hf(config.rope_scaling)
    return tree


def _scaling_to_hf(scaling: Llama3Scaling) -> dict[str, Any]:
    if scaling.original_seq_len == _LINEAR_SEQ_LEN:
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_seq_len,
    }


def hf_tensors(config: ModelConfig) -> tuple[HfTensor, ...]:
    """Return Hugging Face's tensors of the model, layer by layer: together the whole vector, each number once."""
    at = {span.name: span.offset for span in layout(config)}
    q, kv, ffn, width = config.q_width, config.kv_width, config.ffn_width, config.width
    tensors = [HfTensor("model.embed_tokens.weight", (config.vocab_size, width), at["embed.weight"])]
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        tensors.append(HfTensor(theirs + "input_layernorm.weight", (width,), at[ours + "attention_norm.weight"]))
        row = 0
        for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            start = at[ours + "attention.qkv.weight"] + row * width
            tensors.append(HfTensor(f"{theirs}self_attn.{name}.weight", (rows, width), start))
            if config.has_qkv_bias:
                start = at[ours + "attention.qkv.bias"] + row
                tensors.append(HfTensor(f"{theirs}self_attn.{name}.bias", (rows,), start))
            row += rows
        if config.has_qk_norm:
            for name in ("q_norm", "k_norm"):
                start = at[f"{ours}attention.{name}.weight"]
                tensors.append(HfTensor(f"{theirs}self_attn.{name}.weight", (config.channels_per_head,), start))
        tensors += [
            HfTensor(theirs + "self_attn.o_proj.weight", (width, q), at[ours + "attention.out.weight"]),
            *_out_bias(config, theirs, at.get(ours + "attention.out.bias")),
            HfTensor(theirs + "post_attention_layernorm.weight", (width,), at[ours + "ffn_norm.weight"]),
            HfTensor(theirs + "mlp.gate_proj.weight", (ffn, width), at[ours + "ffn.gate_up.weight"]),
            HfTensor(theirs + "mlp.up_proj.weight", (ffn, width), at[ours + "ffn.gate_up.weight"] + ffn * width),
            HfTensor(theirs + "mlp.down_proj.weight", (width, ffn), at[ours + "ffn.down.weight"]),
        ]
    tensors.append(HfTensor("model.norm.weight", (width,), at["norm.weight"]))
    if not config.is_tied:
        tensors.append(HfTensor("lm_head.weight", (config.vocab_size, width), at["head.weight"]))
    return tuple(tensors)


def _out_bias(config: ModelConfig, theirs: str, offset: int | None) -> tuple[HfTensor, ...]:
    return () if offset is None else (HfTensor(theirs + "self_attn.o_proj.bias", (config.width,), offset),)
