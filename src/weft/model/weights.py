"""Hugging Face folders in and out: config.json, safetensors in one file or many, tokenizer.json.

    folder/ config.json  model.safetensors                                  or
            config.json  model.safetensors.index.json  model-00001-of-00002.safetensors ...
            tokenizer.json  tokenizer_config.json  generation_config.json  and what else came with the model

Tensors are copied one at a time between file and flat vector, so neither way needs the model twice in memory. A folder
is written beside its place and renamed into it: it is there whole or not at all. One that is there and empty is filled,
config.json last. Only safetensors is read, never a pickle. What the names mean is the business of `families`.
"""

import errno
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from jaxtyping import Float32
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft import reading
from weft.errors import ConfigError, DiskFull
from weft.model.came_with import GENERATION_CONFIG, TOKENIZER_CONFIG, CameWith
from weft.model.config import ModelConfig, num_parameters
from weft.model.families import HfTensor, config_from_hf, config_to_hf, hf_tensors

FileDtype = Literal["float32", "bfloat16"]

MAX_SHARD_NBYTES = 4 << 30  # what file systems without large files and impatient downloads take
_CONFIG, _TOKENIZER = "config.json", "tokenizer.json"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_READABLE = {"F64", "F32", "BF16", "F16"}
_TORCH_DTYPES: dict[FileDtype, tuple[torch.dtype, str]] = {
    "float32": (torch.float32, "F32"),
    "bfloat16": (torch.bfloat16, "BF16"),
}
# Old llama checkpoints carry the rotary angles, which follow from the config.
_DERIVED_SUFFIX = ".rotary_emb.inv_freq"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def read_config(path: Path) -> ModelConfig:
    """Return the model that the folder at `path` holds, without touching its weights.

    Raises:
        ConfigError: no such folder, no config.json in it, or a model weft does not compute.
    """
    return config_from_hf(read_bytes(path / _CONFIG), str(path / _CONFIG))


def own_name(path: Path) -> str:
    """Return what the model of a folder says that it is called; empty: it does not.

    Raises:
        ConfigError: its config.json cannot be read.
    """
    found = reading.json_of(read_bytes(path / _CONFIG)).get("_name_or_path")
    return found if isinstance(found, str) else ""


def read_folder(path: Path) -> tuple[ModelConfig, Float32[Tensor, " num"]]:
    """Return config and flat fp32 vector (CPU) of the model in the folder at `path`.

    Check `read_config` with `check_size` first where the folder is not your own: this allocates the whole model.

    Raises:
        ConfigError: a file is missing or malformed, or its tensors are not those of the config; names file and tensor.
    """
    config = read_config(path)
    wanted = {tensor.name: tensor for tensor in hf_tensors(config)}
    return config, read_tensors(path, wanted, num_parameters(config))


def read_tensors(path: Path, wanted: Mapping[str, HfTensor], num: int) -> Float32[Tensor, " num"]:
    """Return a flat fp32 vector (CPU) of so many numbers, of a folder's tensors.

    Args:
        wanted: all that the vector is made of, by name.

    Raises:
        ConfigError: as `read_folder`.
    """
    vector = torch.empty(num, dtype=torch.float32)
    found: dict[str, Path] = {}
    for file in _weight_files(path):
        try:
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118  # a safetensors reader is no mapping
                    if name in found:
                        raise ConfigError(f"{file}: tensor {name} is also in {found[name].name}. Remove one of them.")
                    if not name.endswith(_DERIVED_SUFFIX):
                        found[name] = file
                        _read_tensor(reader, name, wanted, vector, file)
        except (SafetensorError, OSError) as error:
            kind = _kind_of(file)
            raise ConfigError(
                f"{file}: cannot be read as safetensors: {kind or error}. Download or export it again."
            ) from None
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ConfigError(
            f"{path}: {len(missing)} of {len(wanted)} tensors are missing, first {missing[0]}. The download is "
            f"incomplete, or {_CONFIG} belongs to another model."
        )
    if _HEAD in found and _HEAD not in wanted:
        _refuse_another_head(found[_HEAD], wanted[_EMBEDDING], vector, path / _CONFIG)
    return vector


def _refuse_another_head(file: Path, embedding: HfTensor, vector: Tensor, config: Path) -> None:
    """Accept the head of a tied model where it is the embedding, as most folders that hold both have it."""
    with safe_open(file, framework="pt") as reader:
        head = reader.get_tensor(_HEAD).float()
    if not torch.equal(head, vector[embedding.offset : embedding.stop].view(embedding.shape)):
        raise ConfigError(
            f"{file}: {_HEAD} is not {_EMBEDDING}, but {config} says that they are tied. Programs differ in which they "
            f"take. Set tie_word_embeddings to false in that file to keep the head, or remove the tensor."
        )


def _kind_of(file: Path) -> str | None:
    """Return what the file is, where its first bytes say that it is something else."""
    try:
        with file.open("rb") as opened:
            return reading.what_else(opened.read(reading.HEAD_NBYTES))
    except OSError:
        return None


def _read_tensor(reader: Any, name: str, wanted: Mapping[str, HfTensor], vector: Tensor, file: Path) -> None:
    tensor = wanted.get(name)
    # A tied model may carry its head as well, which `_refuse_another_head` compares with the embedding.
    is_repeated_head = tensor is None and name == _HEAD
    if is_repeated_head:
        tensor = wanted[_EMBEDDING]
    if tensor is None:
        raise ConfigError(
            f"{file}: tensor {name} has no place in the model that {_CONFIG} describes. Do they belong together?"
        )
    part = reader.get_slice(name)
    shape, dtype = tuple(part.get_shape()), str(part.get_dtype())
    if shape != tensor.shape:
        raise ConfigError(f"{file}: tensor {name} has shape {list(shape)}; {_CONFIG} says {list(tensor.shape)}.")
    if dtype not in _READABLE:
        raise ConfigError(
            f"{file}: tensor {name} has dtype {dtype}; weft reads F64, F32, BF16 and F16. Export it unquantised."
        )
    if not is_repeated_head:
        vector[tensor.offset : tensor.stop].view(tensor.shape).copy_(reader.get_tensor(name))


def _weight_files(path: Path) -> list[Path]:
    index, single = path / _INDEX, path / _SINGLE
    if single.exists():
        return [single]  # as transformers does, whatever an index beside it says
    if not index.exists():
        raise ConfigError(
            f"{path}: holds neither {_SINGLE} nor {_INDEX}. weft reads no pickled weights (.bin, .pt); "
            "save the model with `save_pretrained` of a recent transformers."
        )
    try:
        names = set(reading.json_of(read_bytes(index))["weight_map"].values())
        if not names or not all(isinstance(name, str) and name and Path(name).name == name for name in names):
            raise ValueError("weight_map must lead to plain file names")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index}: no index of safetensors files ({error}). Download or export it again.") from None
    return [path / name for name in sorted(names)]


def read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file. A Hugging Face model folder is needed.") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error}.") from error


def not_exported(path: Path, error: OSError) -> ConfigError | DiskFull:
    """Return what to say where an export could not be written, of which nothing is left."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"{path}: no room for the export: {error}. Nothing was left behind; free some space.")
    return ConfigError(f"{path}: cannot be written: {error.strerror or error}. Choose another place.")


def write_folder(
    path: Path,
    config: ModelConfig,
    vector: Float32[Tensor, " num"],
    tokenizer_json: bytes | None = None,
    *,
    stop_id: int | None = None,
    came_with: CameWith | None = None,
    dtype: FileDtype = "float32",
    on_written: Callable[[int], None] = lambda _nbytes: None,
) -> None:
    """Write the model as a folder that transformers, vLLM and llama.cpp load.

    Args:
        path: the new folder; must not exist, or be empty.
        vector: the flat parameters, on any device.
        tokenizer_json: bytes of a `tokenizers` file, passed through.
        stop_id: the token that ends a text.
        came_with: written as it came, in the place of weft's own words; None: nothing came.
        dtype: of the tensors in the files.
        on_written: told how many bytes of tensors were written since it was told last.

    Raises:
        ConfigError: `path` is taken or cannot be made, or the vector belongs to another config.
        DiskFull: no room; nothing is left behind.
    """
    if vector.numel() != num_parameters(config):
        raise ConfigError(
            f"{path}: the model has {num_parameters(config):,} parameters, the vector {vector.numel():,} numbers. They "
            "belong to different configs."
        )
    with whole_folder(path, last=_CONFIG) as partial:
        came = came_with or CameWith()
        tree = config_to_hf(config, dtype=dtype, stop_id=stop_id) | came.ids.below(config.vocab_size)
        write_json(partial / _CONFIG, tree)
        came.write(partial)
        write_tokenizer(partial, tree, tokenizer_json, stop_id, came)
        _write_weights(partial, hf_tensors(config), vector.detach(), dtype, on_written)


def require_free(path: Path) -> None:
    """Accept a place for a folder: for who works long before it is written.

    Raises:
        ConfigError: something is there.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path}: exists; weft overwrites no folder. Remove it or choose another place.")


@contextmanager
def whole_folder(path: Path, last: str) -> Iterator[Path]:
    """Yield a folder to be filled, which becomes `path` once that is done, or is removed.

    Args:
        path: is made, or is empty.
        last: the file by which the folder is known.

    Raises:
        ConfigError: the folder is taken, or cannot be written.
        DiskFull: no room.
    """
    require_free(path)
    path = path.resolve()
    partial: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
        with suppress(OSError):  # a disk that knows no modes
            partial.chmod(0o755)
        yield partial
        if path.exists():  # empty, and perhaps a link, or where somebody stands: it is filled, not replaced
            for file in sorted(partial.iterdir(), key=lambda file: file.name == last):
                file.rename(path / file.name)
        else:
            partial.rename(path)
    except OSError as error:
        raise not_exported(path, error) from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def write_tokenizer(
    folder: Path, config: dict[str, Any], tokenizer_json: bytes | None, stop_id: int | None, came_with: CameWith
) -> None:
    """Write what programs want of a tokenizer, beside what came with the model."""
    ids = {
        name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(name) is not None
    }
    if ids and GENERATION_CONFIG not in came_with.files:
        write_json(folder / GENERATION_CONFIG, ids)
    if tokenizer_json is None:
        return
    (folder / _TOKENIZER).write_bytes(tokenizer_json)
    if TOKENIZER_CONFIG in came_with.files:
        return
    length = config["max_position_embeddings"]
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length}
    for token in reading.json_of(tokenizer_json).get("added_tokens") or []:
        if token["id"] == stop_id:
            settings["eos_token"] = token["content"]
    write_json(folder / TOKENIZER_CONFIG, settings)


def _write_weights(
    folder: Path, tensors: Sequence[HfTensor], vector: Tensor, dtype: FileDtype, on_written: Callable[[int], None]
) -> None:
    nbytes_each = _TORCH_DTYPES[dtype][0].itemsize
    shards: list[list[HfTensor]] = [[]]
    room = MAX_SHARD_NBYTES
    for tensor in tensors:
        nbytes = (tensor.stop - tensor.offset) * nbytes_each
        if shards[-1] and nbytes > room:
            shards.append([])
            room = MAX_SHARD_NBYTES
        shards[-1].append(tensor)
        room -= nbytes
    if len(shards) == 1:
        _write_safetensors(folder / _SINGLE, tensors, vector, dtype, on_written)
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_safetensors(folder / name, shard, vector, dtype, on_written)
        weight_map.update({tensor.name: name for tensor in shard})
    write_json(folder / _INDEX, {"metadata": {"total_size": vector.numel() * nbytes_each}, "weight_map": weight_map})


def _write_safetensors(
    file: Path, tensors: Sequence[HfTensor], vector: Tensor, dtype: FileDtype, on_written: Callable[[int], None]
) -> None:
    """Write one file tensor by tensor: u64 length of the header, header in JSON, tensors in little-endian bytes."""
    torch_dtype, tag = _TORCH_DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        stop = position + (tensor.stop - tensor.offset) * torch_dtype.itemsize
        header[tensor.name] = {"dtype": tag, "shape": tensor.shape, "data_offsets": [position, stop]}
        position = stop
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)  # tensors begin aligned, as the format asks
    integers = {4: torch.int32, 2: torch.int16}[torch_dtype.itemsize]
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            part = vector[tensor.offset : tensor.stop].to("cpu", torch_dtype)
            out.write(part.view(integers).numpy().astype(f"<i{torch_dtype.itemsize}", copy=False).data)
            on_written(part.nbytes)
        out.flush()
        os.fsync(out.fileno())


def write_json(file: Path, tree: Any) -> None:
    """Write a tree, or a record, as JSON that people can read."""
    file.write_bytes(msgspec.json.format(msgspec.json.encode(tree), indent=2) + b"\n")
