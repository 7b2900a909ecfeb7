"""Hugging Face's words for our models: config.json and tensor names of llama, mistral, qwen2 and qwen3, both ways.

The four families are one architecture with different flags, so a config maps to a `ModelConfig` or is refused. Our
fused matrices hold Hugging Face's as runs of rows, so every one of its tensors is one range of the flat vector:
reading and writing a folder is copying ranges. What would change the numbers and is not supported (sliding windows that
bite, other rotary scalings, biases elsewhere, quantised weights) is an error, never ignored.

Pure; files are the business of `weights`.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from weft.errors import ConfigError
from weft.model.config import ModelConfig
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


class _HfConfig(msgspec.Struct):
    """The fields of config.json that reach the numbers. Defaults are those of `transformers`."""

    model_type: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
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
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None


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
    if config.has_qkv_bias:
        return "qwen2"
    # transformers refuses a llama whose width is no multiple of its heads; mistral without a window is the same model.
    return "mistral" if config.width % config.num_heads else "llama"


def config_from_hf(data: bytes, where: str) -> ModelConfig:
    """Return the model that a config.json describes.

    Args:
        data: the file's bytes.
        where: its path, for errors.

    Raises:
        ConfigError: not JSON, a field missing or ill-typed, another family, or something weft does not compute.
    """
    try:
        hf = msgspec.json.decode(data, type=_HfConfig)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: {error}. weft reads the families {', '.join(_ARCHITECTURES)}.") from None
    _refuse_unsupported(hf, where)
    heads = hf.num_attention_heads
    default_head = 128 if hf.model_type == "qwen3" else None
    fields = {
        "vocab_size": hf.vocab_size,
        "num_layers": hf.num_hidden_layers,
        "num_heads": heads,
        "num_kv_heads": heads if hf.num_key_value_heads is None else hf.num_key_value_heads,
        "width": hf.hidden_size,
        "head_width": hf.head_dim or default_head,
        "ffn_width": hf.intermediate_size,
        "max_seq_len": hf.max_position_embeddings,
        "norm_eps": hf.rms_norm_eps,
        "has_qk_norm": hf.model_type == "qwen3",
        "has_qkv_bias": hf.model_type == "qwen2",
        "is_tied": hf.tie_word_embeddings,
        **_rope_fields(hf, where),
    }
    if fields["head_width"] is not None and fields["head_width"] * heads == hf.hidden_size:
        fields["head_width"] = None  # one spelling per model, so that equal models have equal configs
    try:
        return msgspec.convert(fields, ModelConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}.") from None


def _refuse_unsupported(hf: _HfConfig, where: str) -> None:
    def refuse(field: str, found: object, allowed: str) -> ConfigError:
        return ConfigError(f"{where}: {field}: Found {found!r}. weft computes only {allowed}.")

    if hf.quantization_config is not None:
        raise refuse(
            "quantization_config", hf.quantization_config.get("quant_method", "a"), "fp32, bf16 and fp16 weights"
        )
    if hf.hidden_act != "silu":
        raise refuse("hidden_act", hf.hidden_act, "silu")
    if hf.attention_bias and hf.model_type != "qwen2":
        raise refuse("attention_bias", True, "false, or the biases of model_type qwen2")
    if hf.mlp_bias:
        raise refuse("mlp_bias", True, "false")
    rope = hf.rope_parameters or hf.rope_scaling or _Rope()
    if hf.partial_rotary_factor != 1.0 or rope.partial_rotary_factor != 1.0:
        raise refuse("partial_rotary_factor", min(hf.partial_rotary_factor, rope.partial_rotary_factor), "1.0")
    window = _window(hf)
    if window is not None and window < hf.max_position_embeddings:
        raise ConfigError(
            f"{where}: sliding_window: Found {window}, shorter than max_position_embeddings = "
            f"{hf.max_position_embeddings}. "
            "weft attends to the whole context and would compute something else. "
            f"If {window} tokens suffice, set max_position_embeddings to {window} in a copy of that file."
        )


def _window(hf: _HfConfig) -> int | None:
    if hf.model_type == "llama" or (hf.layer_types is not None and set(hf.layer_types) == {"full_attention"}):
        return None
    if hf.model_type in ("qwen2", "qwen3") and not hf.use_sliding_window:
        return None
    return 4096 if hf.sliding_window is UNSET else hf.sliding_window


def _rope_fields(hf: _HfConfig, where: str) -> dict[str, Any]:
    rope = hf.rope_parameters or hf.rope_scaling or _Rope()
    theta = hf.rope_theta if rope.rope_theta is None else rope.rope_theta
    kind = rope.rope_type or rope.type or "default"
    if kind == "default":
        return {"rope_theta": theta}
    if kind != "llama3":
        raise ConfigError(f"{where}: rope_scaling: Found type {kind!r}. weft computes only 'default' and 'llama3'.")
    scaling = {
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_seq_len": rope.original_max_position_embeddings,
    }
    return {"rope_theta": theta, "rope_scaling": scaling}


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
        tree["sliding_window"] = None
    if family in ("llama", "qwen3"):
        tree["attention_bias"] = False
    if config.rope_scaling is not None:
        tree["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_seq_len,
        }
    return tree


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
            HfTensor(theirs + "post_attention_layernorm.weight", (width,), at[ours + "ffn_norm.weight"]),
            HfTensor(theirs + "mlp.gate_proj.weight", (ffn, width), at[ours + "ffn.gate_up.weight"]),
            HfTensor(theirs + "mlp.up_proj.weight", (ffn, width), at[ours + "ffn.gate_up.weight"] + ffn * width),
            HfTensor(theirs + "mlp.down_proj.weight", (width, ffn), at[ours + "ffn.down.weight"]),
        ]
    tensors.append(HfTensor("model.norm.weight", (width,), at["norm.weight"]))
    if not config.is_tied:
        tensors.append(HfTensor("lm_head.weight", (config.vocab_size, width), at["head.weight"]))
    return tuple(tensors)
