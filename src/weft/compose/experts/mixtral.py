"""A mixture as a Hugging Face folder of the family mixtral, which transformers, vLLM and llama.cpp compute.

    layers.i.ffn.router               model.layers.i.block_sparse_moe.gate
    layers.i.ffn.experts.j.gate_up    model.layers.i.block_sparse_moe.experts.j.w1 (gate), w3 (up)
    layers.i.ffn.experts.j.down       model.layers.i.block_sparse_moe.experts.j.w2
    all else                          as in a folder of llama or mistral (`weft.model.families`)

These are the names of published checkpoints; transformers 5 puts w1 and w3 together as it loads them. Its router is
ours: a softmax over all experts, and the likeliest `num_experts_per_tok` share what they have together.
"""

from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from jaxtyping import Float32
from msgspec import UNSET
from safetensors.torch import save_file
from torch import Tensor

from weft import reading
from weft.compose.experts.mixture import BALANCE, MixtureConfig, mixture_layout
from weft.config import from_tree
from weft.errors import ConfigError
from weft.model.came_with import CameWith
from weft.model.families import HfTensor, config_from_hf, config_to_hf, hf_tensors
from weft.model.flat import layout
from weft.model.weights import FileDtype, read_bytes, read_tensors, whole_folder, write_json, write_tokenizer

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_DTYPES: dict[FileDtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_THEIRS = {"gate_proj.weight": "w1", "up_proj.weight": "w3", "down_proj.weight": "w2"}


def write_mixture(
    folder: Path,
    config: MixtureConfig,
    vector: Float32[Tensor, " num"],
    tokenizer_json: bytes | None = None,
    *,
    stop_id: int | None = None,
    came_with: CameWith | None = None,
    dtype: FileDtype = "float32",
) -> None:
    """Write a mixture as a folder that others load.

    Args:
        folder: the new folder; must not exist, or be empty.
        vector: as of `weft.compose.experts.mixture`, on any device.
        tokenizer_json: bytes of a `tokenizers` file, passed through.
        stop_id: the token that ends a text.
        came_with: written as it came: chat template, licence and the like; None: nothing came.
        dtype: of the tensors in the file.

    Raises:
        ConfigError: the folder is taken or cannot be made, the vector belongs to another config, or the model has what
            no mixtral has.
        DiskFull: no room; nothing is left behind.
    """
    if vector.numel() != mixture_layout(config).num_parameters:
        raise ConfigError(f"{folder}: the vector of {vector.numel():,} numbers belongs to another config.")
    came = came_with or CameWith()
    tree = mixtral_config(config, dtype=dtype, stop_id=stop_id) | came.ids.below(config.model.vocab_size)
    given = vector.detach().to("cpu", _DTYPES[dtype])
    tensors = {each.name: given[each.offset : each.stop].view(each.shape) for each in mixtral_tensors(config)}
    with whole_folder(folder, last=_CONFIG) as partial:
        save_file(tensors, partial / _WEIGHTS, metadata={"format": "pt"})
        came.write(partial)
        write_tokenizer(partial, tree, tokenizer_json, stop_id, came)
        write_json(partial / _CONFIG, tree)


def is_mixture(folder: Path) -> bool:
    """Return whether a folder holds a mixture, as far as its config.json says."""
    try:
        tree = reading.json_of((folder / _CONFIG).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(tree, dict) and tree.get("model_type") == "mixtral"


def read_mixture(folder: Path) -> tuple[MixtureConfig, Float32[Tensor, " num"]]:
    """Return config and flat fp32 vector (CPU) of the mixture in a folder.

    Raises:
        ConfigError: a file is missing or malformed, or its tensors are not those of the config.
    """
    config = read_mixture_config(folder)
    wanted = {tensor.name: tensor for tensor in mixtral_tensors(config)}
    return config, read_tensors(folder, wanted, mixture_layout(config).num_parameters)


def read_mixture_config(folder: Path) -> MixtureConfig:
    """Return which mixture is in a folder, without touching its weights.

    Raises:
        ConfigError: config.json is missing or malformed, or is of something that weft does not compute.
    """
    file = folder / _CONFIG
    try:
        tree = reading.json_of(read_bytes(file))
        num, top = tree.pop("num_local_experts"), tree.pop("num_experts_per_tok")
        window = tree.get("sliding_window")
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{file}: no config of a mixtral: {error}. Download or export it again.") from None
    # Beside its experts a mixtral is a mistral, which is a llama where no window is.
    tree |= {"model_type": "llama" if window is None else "mistral", "architectures": None}
    model = config_from_hf(msgspec.json.encode(tree), str(file))
    config: MixtureConfig = from_tree(
        {"model": msgspec.to_builtins(model), "num_experts": num, "top_k": top}, MixtureConfig, where=str(file)
    )
    return config


def mixtral_config(config: MixtureConfig, *, dtype: FileDtype, stop_id: int | None) -> dict[str, Any]:
    """Return what config.json says.

    Raises:
        ConfigError: the model has what no mixtral has.
    """
    model = config.model
    for field, has in (
        ("has_qk_norm", model.has_qk_norm),
        ("has_qkv_bias", model.has_qkv_bias),
        ("first_windowed", model.first_windowed is not UNSET),
    ):
        if has:
            raise ConfigError(f"model.{field}: no mixtral has it, so the mixture cannot be exported as one.")
    tree = config_to_hf(model, dtype=dtype, stop_id=stop_id)
    tree.pop("attention_bias", None)
    return tree | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "sliding_window": None if model.window is UNSET else model.window,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.top_k,
        "router_aux_loss_coef": BALANCE / config.top_k,  # theirs counts each of the k choices as one
        "output_router_logits": False,
    }


def mixtral_tensors(config: MixtureConfig) -> Iterator[HfTensor]:
    """Yield their tensors, and where each begins in our vector: together the whole of it, each number once."""
    plain, there = layout(config.model).spans, {span.name: span.offset for span in mixture_layout(config)}
    starts = [span.offset for span in plain]
    for tensor in hf_tensors(config.model):
        span = plain[bisect_right(starts, tensor.offset) - 1]  # it lies within this one
        further = tensor.offset - span.offset
        layer, is_ffn, leaf = span.name.partition(".ffn.")
        if not is_ffn:
            yield HfTensor(tensor.name, tensor.shape, there[span.name] + further)
            continue
        theirs, _, projection = tensor.name.partition("mlp.")
        if _THEIRS[projection] == "w1":
            shape = config.num_experts, config.model.width
            yield HfTensor(f"{theirs}block_sparse_moe.gate.weight", shape, there[f"{layer}.ffn.router.weight"])
        for number in range(config.num_experts):
            name = f"{theirs}block_sparse_moe.experts.{number}.{_THEIRS[projection]}.weight"
            yield HfTensor(name, tensor.shape, there[f"{layer}.ffn.experts.{number}.{leaf}"] + further)
