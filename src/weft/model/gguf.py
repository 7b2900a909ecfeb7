"""A model as one GGUF file, as llama.cpp and what is built on it load it: numbers, tokenizer, chat template.

    vector ──hf_tensors──► Hugging Face's matrices ──llama.cpp's names and order of channels──► file
    tokenizer.json ──► pieces, kinds, merges, and how text is cut into words, by the name that llama.cpp has for it

llama.cpp knows ways of cutting text by name alone, so a tokenizer that cuts in a way that has none here is refused: the
file would read text as other tokens, in silence. So is a model that llama.cpp computes in another way.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; the package `gguf` writes it.
"""

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial as bound
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tokenizers
import torch
from jaxtyping import Float32
from msgspec import UNSET
from numpy.typing import NDArray
from torch import Tensor

from weft import reading
from weft.errors import ConfigError
from weft.model.config import ModelConfig, num_parameters
from weft.model.families import HfTensor, family_of, hf_tensors
from weft.model.wavelengths import inverse_wavelengths
from weft.model.weights import FileDtype, not_exported

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# llama.cpp's code for a family, and whether it turns neighbouring channels as a pair, where others turn halves.
_ARCHITECTURES = {
    "llama": ("llama", True),
    "mistral": ("llama", True),
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
}

# Ways of cutting text into words, by what tokenizer.json says, and llama.cpp's names for them.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_CUTS = {"gpt2": "gpt-2", "digits": "smollm", _LLAMA3: "llama-bpe", _QWEN2: "qwen2"}
_NEVER = "ÿ ÿ"  # no UTF-8 has these two bytes: llama.cpp loads no file without a merge
_NORMAL, _CONTROL, _OWN, _UNUSED = 1, 3, 4, 5  # kinds of pieces


@dataclass(frozen=True)
class Words:
    """What the file says beside its numbers.

    Args:
        name: of the model.
        tokenizer_json: bytes of a `tokenizers` file.
        chat_template: Jinja; None: there is none.
        ids: of control tokens, by Hugging Face's names (`eos_token_id`, ...).
    """

    name: str
    tokenizer_json: bytes
    chat_template: str | None = None
    ids: Mapping[str, int] = field(default_factory=dict)


def write_gguf(
    path: Path,
    config: ModelConfig,
    vector: Float32[Tensor, " num"],
    words: Words,
    *,
    dtype: FileDtype = "float32",
    on_written: Callable[[int], None] = lambda _nbytes: None,
) -> None:
    """Write the model as one file.

    Args:
        path: the new file; must not exist.
        vector: the flat parameters, on any device.
        dtype: of matrices; norms, biases and what stretches wavelengths are fp32.
        on_written: told how many bytes of tensors were written since it was told last.

    Raises:
        ConfigError: the package `gguf` is not installed, `path` is taken, or llama.cpp would compute another model or
            read text as other tokens.
        DiskFull: no room; nothing is left behind.
    """
    if vector.numel() != num_parameters(config):
        raise ConfigError(
            f"{path}: the model has {num_parameters(config):,} parameters, the vector {vector.numel():,} numbers. They "
            "belong to different configs."
        )
    if path.exists():
        raise ConfigError(f"{path}: exists; weft overwrites no export. Remove it or choose another place.")
    writer = _writer(config, words, dtype)
    tensors = list(_tensors(config, vector.detach(), dtype))
    for each in tensors:
        writer.add_tensor_info(each.name, each.shape, np.dtype(np.float32), each.nbytes, raw_dtype=each.kind)
    partial: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
        os.close(handle)
        partial = Path(name)
        with suppress(OSError):  # a disk that knows no modes
            partial.chmod(0o644)
        writer.write_header_to_file(partial)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for each in tensors:
            writer.write_tensor_data(each.numbers())
            on_written(each.nbytes)
        writer.flush()
        partial.replace(path)
    except OSError as error:
        raise not_exported(path, error) from error
    finally:
        with suppress(OSError):
            writer.close()
        if partial is not None:
            with suppress(OSError):
                partial.unlink()


# --- numbers ---


@dataclass(frozen=True)
class _Tensor:
    """One of the file's, whose numbers are made when they are written."""

    name: str
    shape: tuple[int, ...]
    kind: Any  # of gguf
    nbytes: int
    numbers: Callable[[], NDArray[Any]]


def _tensors(config: ModelConfig, vector: Tensor, dtype: FileDtype) -> Iterator[_Tensor]:
    from gguf import GGMLQuantizationType

    if (factors := _factors(config)) is not None:
        kind = GGMLQuantizationType.F32
        yield _Tensor("rope_freqs.weight", factors.shape, kind, factors.nbytes, lambda: factors)
    for tensor in hf_tensors(config):
        is_whole = dtype == "float32" or len(tensor.shape) == 1
        kind = GGMLQuantizationType.F32 if is_whole else GGMLQuantizationType.BF16
        nbytes = (tensor.stop - tensor.offset) * (4 if is_whole else 2)
        numbers = bound(_numbers, config, vector, tensor, is_whole=is_whole)
        yield _Tensor(_name(tensor.name), tensor.shape, kind, nbytes, numbers)


def _numbers(config: ModelConfig, vector: Tensor, tensor: HfTensor, *, is_whole: bool) -> NDArray[Any]:
    part = vector[tensor.offset : tensor.stop].view(tensor.shape)
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(tensor.name.split(".")[-2])
    if heads is not None and _ARCHITECTURES[family_of(config)][1]:
        # Channels i and i + D/2 of a head, which turn together, become 2i and 2i + 1.
        part = part.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2)
    part = part.to("cpu", torch.float32 if is_whole else torch.bfloat16).contiguous()
    return part.view(torch.float32 if is_whole else torch.int16).numpy()


def _name(theirs: str) -> str:
    """Return llama.cpp's name of a tensor of Hugging Face's."""
    stem, _, kind = theirs.rpartition(".")
    if found := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem):
        return f"blk.{found[1]}.{_IN_LAYER[found[2]]}.{kind}"
    return f"{_TOP[stem]}.{kind}"


def _factors(config: ModelConfig) -> NDArray[np.float32] | None:
    """Return what llama.cpp divides angles by, for wavelengths that are stretched; None: they are not."""
    if config.rope_scaling is None:
        return None
    plain = inverse_wavelengths(msgspec.structs.replace(config, rope_scaling=None))
    return np.divide(plain, inverse_wavelengths(config)).astype(np.float32)


# --- what it says beside them ---


def _writer(config: ModelConfig, words: Words, dtype: FileDtype) -> Any:
    """Return a writer that knows all but the tensors.

    Raises:
        ConfigError: as `write_gguf`.
    """
    try:
        from gguf import GGUFWriter, LlamaFileType
    except ImportError:
        raise ConfigError("GGUF needs the package gguf, which is not installed: pip install 'weft[gguf]'") from None
    _refuse_unlike(config)
    tokens = _tokens_of(words, config.vocab_size)
    writer = GGUFWriter(None, _ARCHITECTURES[family_of(config)][0])
    writer.add_name(words.name)
    writer.add_file_type(LlamaFileType.ALL_F32 if dtype == "float32" else LlamaFileType.MOSTLY_BF16)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_seq_len)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.ffn_width)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.channels_per_head)
    writer.add_value_length(config.channels_per_head)
    writer.add_rope_dimension_count(config.channels_per_head)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokens.cut)
    writer.add_token_list(tokens.pieces)
    writer.add_token_types(tokens.kinds)
    writer.add_token_merges(tokens.merges or [_NEVER])
    writer.add_add_bos_token(tokens.begins_with_bos)
    writer.add_add_space_prefix(False)
    for name, add in (
        ("bos_token_id", writer.add_bos_token_id),
        ("eos_token_id", writer.add_eos_token_id),
        ("pad_token_id", writer.add_pad_token_id),
    ):
        if (id := words.ids.get(name)) is not None and 0 <= id < config.vocab_size:
            add(id)
    if words.chat_template is not None:
        writer.add_chat_template(words.chat_template)
    return writer


def _refuse_unlike(config: ModelConfig) -> None:
    """Accept a model that llama.cpp computes as weft does.

    Raises:
        ConfigError: it does not.
    """
    for has, what in (
        (config.window is not UNSET, "windows of attention"),
        (config.yarn is not UNSET, "YaRN's stretched wavelengths"),
        (config.has_out_bias is not UNSET, "biases on the output projection"),
    ):
        if has:
            raise ConfigError(
                f"GGUF: weft writes no model with {what}. Export a folder instead, and turn that into GGUF with "
                "llama.cpp's convert_hf_to_gguf.py."
            )


@dataclass(frozen=True)
class _Tokens:
    """The tokenizer in llama.cpp's words.

    Args:
        cut: its name for how text is cut into words.
    """

    cut: str
    pieces: list[str]
    kinds: list[int]
    merges: list[str]
    begins_with_bos: bool


def _tokens_of(words: Words, vocab_size: int) -> _Tokens:
    """Return the tokenizer of a tokenizer.json; ids that it does not know are filled up.

    Raises:
        ConfigError: llama.cpp would read text as other tokens.
    """
    tree = reading.json_of(words.tokenizer_json)
    model = tree.get("model") or {}
    merges = [each if isinstance(each, str) else " ".join(each) for each in model.get("merges") or ()]
    cut = _cut_of(tree, has_merges=bool(merges))
    known = {id: (piece, _NORMAL) for piece, id in model.get("vocab", {}).items()}
    for token in tree.get("added_tokens") or ():
        known[token["id"]] = (token["content"], _CONTROL if token["special"] else _OWN)
    all_known = [known.get(id, (f"[PAD{id}]", _UNUSED)) for id in range(vocab_size)]
    before: list[int] = tokenizers.Tokenizer.from_str(words.tokenizer_json.decode()).encode("").ids
    return _Tokens(
        cut,
        [piece for piece, _ in all_known],
        [kind for _, kind in all_known],
        merges,
        before[:1] == [words.ids.get("bos_token_id")],
    )


def _cut_of(tree: Mapping[str, Any], *, has_merges: bool) -> str:
    """Return llama.cpp's name for how a tokenizer cuts text into words.

    Raises:
        ConfigError: it has none here.
    """
    model = tree.get("model") or {}
    steps = tree.get("pre_tokenizer") or {}
    steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    kinds = [each.get("type") for each in steps]
    is_bytes = kinds[-1] == "ByteLevel" and not steps[-1].get("add_prefix_space", True)
    has_regex = is_bytes and steps[-1].get("use_regex", True)
    is_bpe = model.get("type", "BPE") == "BPE" and not model.get("byte_fallback")
    norm = (tree.get("normalizer") or {}).get("type")
    way = None
    if is_bpe and is_bytes and kinds == ["ByteLevel"] and (has_regex or not has_merges):
        way = "gpt2"  # without merges each byte is a token, however text is cut
    elif is_bpe and kinds == ["Digits", "ByteLevel"] and has_regex and steps[0].get("individual_digits"):
        way = "digits"
    elif is_bpe and is_bytes and kinds == ["Split", "ByteLevel"] and not has_regex:
        is_plain = steps[0].get("behavior") == "Isolated" and not steps[0].get("invert")
        way = (steps[0].get("pattern") or {}).get("Regex") if is_plain else None
    ignores = bool(model.get("ignore_merges"))
    is_alike = ignores == (way == _LLAMA3) and norm in (None, "NFC" if way == _QWEN2 else None)
    if way not in _CUTS or not is_alike:
        raise ConfigError(
            "GGUF: llama.cpp would read text as other tokens than this model's tokenizer does: weft writes byte-level "
            "BPE that cuts text as GPT-2, SmolLM, Llama 3 or Qwen2 do. Export a folder instead, and turn that into "
            "GGUF with llama.cpp's convert_hf_to_gguf.py, if it knows the tokenizer."
        )
    return _CUTS[way]
