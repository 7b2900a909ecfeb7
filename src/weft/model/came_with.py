"""What a Hugging Face folder holds beside weights and tokenizer.json, and an export hands on: chat template, licence.

    folder ──read──► CameWith ──wire.encode──► a blob that peers of a run share ──decode──► CameWith ──write──► export

A stranger may have written the blob. So its files have names of a closed list: none is a path, code, weights or
config.json. Each is bounded, and what is JSON names neither code nor files of elsewhere.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from weft import reading, wire
from weft.errors import ConfigError, WireError
from weft.model.config import MAX_VOCAB

MAX_FILE_NBYTES = 1 << 20  # the largest published tokenizer_config.json, of thousands of special tokens, has half of it
MAX_FILES_NBYTES = 4 << 20  # together
MAX_BLOB_NBYTES = MAX_FILES_NBYTES + (64 << 10)  # with names and ids
MAX_FILES = 32
TOKENIZER_CONFIG, GENERATION_CONFIG = "tokenizer_config.json", "generation_config.json"
_TEMPLATE = "chat_template.jinja"
_OF_TOKENIZER = (TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", _TEMPLATE, "chat_template.json")
_LICENCE = re.compile(r"(LICEN[SC]E|NOTICE|COPYING|USE_POLICY)([-_][A-Za-z0-9_-]{1,40})?(\.(txt|md|rst))?")
_README = "README.md"
# Keys of JSON by which a program that loads it would run code of elsewhere, or read another file.
_LEADS_AWAY = re.compile(r"auto_map|_?name_or_path|\w+_file")

_Id = Annotated[int, Meta(ge=-1, lt=MAX_VOCAB)]  # -1: none, as old llamas have it for padding


class Ids(wire.Record, frozen=True, kw_only=True):
    """Control tokens as a config.json names them; what it leaves out, or has as null, is unset."""

    bos_token_id: _Id | UnsetType = UNSET
    eos_token_id: _Id | Annotated[tuple[_Id, ...], Meta(max_length=64)] | UnsetType = UNSET
    pad_token_id: _Id | UnsetType = UNSET

    def below(self, vocab_size: int) -> dict[str, Any]:
        """Return those that a model of so many tokens has, by name."""
        tree: dict[str, Any] = msgspec.to_builtins(self)
        return {name: value for name, value in tree.items() if _highest(value) < vocab_size}


class CameWith(wire.Record, frozen=True, kw_only=True):
    """Files by name, and ids of config.json."""

    files: dict[str, bytes] = {}  # noqa: RUF012  # msgspec gives each its own
    ids: Ids = Ids()

    def __post_init__(self) -> None:
        if len(self.files) > MAX_FILES or sum(map(len, self.files.values())) > MAX_FILES_NBYTES:
            raise ValueError(f"more than {MAX_FILES} files, or {MAX_FILES_NBYTES} bytes")
        for name, data in self.files.items():
            if (fault := _fault(name, data)) is not None:
                raise ValueError(f"{name[:80]!r} {fault}")

    @property
    def is_empty(self) -> bool:
        return not self.files and self.ids == Ids()

    def write(self, folder: Path) -> None:
        for name, data in self.files.items():
            (folder / name).write_bytes(data)


def decode(data: wire.Buffer) -> CameWith:
    """Return what the blob holds, which anybody may have written; empty bytes hold nothing.

    Raises:
        WireError: malformed, too large, or a file in it is none that an export may have.
    """
    if not data:
        return CameWith()
    try:
        found: CameWith = wire.decode(data, CameWith, max_nbytes=MAX_BLOB_NBYTES)
    except WireError as error:
        raise WireError(f"what came with its model cannot be used: {error}") from None
    return found


def read(model: Path | None, tokenizer: Path | None, vocab_size: int, on_left_out: Callable[[str], None]) -> CameWith:
    """Return what an export of the model should have again.

    Args:
        model: the folder of its weights, of which licence, generation config and ids are taken; None: made of a seed.
        tokenizer: the folder of its tokenizer, of which chat template and special tokens are taken; None: of weft's.
        vocab_size: of the model.
        on_left_out: told in words what stays behind, and why.
    """
    files: dict[str, bytes] = {}
    for path in [*_of_tokenizer(tokenizer), *_of_model(model)]:
        data = _read(path, on_left_out)
        if data is None:
            continue
        if sum(map(len, files.values())) + len(data) > MAX_FILES_NBYTES or len(files) == MAX_FILES:
            on_left_out(f"{path} is left out: exports include at most {MAX_FILES_NBYTES >> 20} MiB of such files")
        else:
            files[path.name] = data
    return CameWith(files=files, ids=Ids() if model is None else _ids(model / "config.json", vocab_size, on_left_out))


def with_template(found: CameWith, path: Path) -> CameWith:
    """Return the same with another chat template, of a file.

    Raises:
        ConfigError: it cannot be read, or is no text.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the chat template {path} cannot be read: {error.strerror or error}.") from None
    if (fault := _fault(_TEMPLATE, data)) is not None:
        raise ConfigError(f"the chat template {path} {fault}.")
    others = {name: each for name, each in found.files.items() if name != "chat_template.json"}
    return msgspec.structs.replace(found, files={**others, _TEMPLATE: data})


def tokenizer_folder(named: Path | None, model: Path | None, tokenizer_json: bytes) -> Path | None:
    """Return the folder whose chat template and special tokens are those of the tokenizer; None: neither.

    Args:
        named: the tokenizer.json that is used, or its folder; None: it is one of weft's.
        model: the folder of the weights; its settings are meant where its tokenizer is the same.
        tokenizer_json: of the tokenizer that is used.
    """
    if named is not None:
        folder = named if named.is_dir() else named.parent
        if any(_of_tokenizer(folder)):
            return folder
    try:
        is_same = (
            model is not None and reading.text_of((model / "tokenizer.json").read_bytes()) == tokenizer_json.decode()
        )
    except (OSError, UnicodeDecodeError):
        return None
    return model if is_same else None


def _of_tokenizer(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        yield from (folder / name for name in _OF_TOKENIZER if (folder / name).is_file())


def _of_model(folder: Path | None) -> Iterator[Path]:
    if folder is not None and folder.is_dir():
        licences = sorted(path.name for path in folder.iterdir() if _LICENCE.fullmatch(path.name))
        yield from (folder / name for name in (GENERATION_CONFIG, *licences, _README) if (folder / name).is_file())


def _read(path: Path, on_left_out: Callable[[str], None]) -> bytes | None:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_NBYTES + 1)
    except OSError as error:
        on_left_out(f"{path} is left out: it cannot be read: {error.strerror or error}")
        return None
    kind = reading.what_else(data[: reading.HEAD_NBYTES], is_page_text=path.name == _README)
    if kind is None and path.suffix == ".json" and len(data) <= MAX_FILE_NBYTES:
        data, keys = _without_leads(data)
        if keys:
            on_left_out(f"{path}: {', '.join(keys)} is left out: exports name no code and no files from elsewhere")
    fault = f"is {kind}" if kind is not None else _fault(path.name, data)
    if fault is None:
        return data
    on_left_out(f"{path} is left out: it {fault}")
    return None


def _without_leads(data: bytes) -> tuple[bytes, list[str]]:
    """Return JSON without the keys that lead away, and those; as it is where it has none."""
    keys = _leads(data) or []
    if not keys:
        return data, keys
    tree = {key: value for key, value in reading.json_of(data).items() if key not in keys}
    return json.dumps(tree, indent=2).encode() + b"\n", keys


def _leads(data: bytes) -> list[str] | None:
    """Return the keys of a JSON object that lead away; None: it is no such object."""
    try:
        tree = reading.json_of(data)
    except ValueError:
        return None
    return [key for key in tree if _LEADS_AWAY.fullmatch(key)] if isinstance(tree, dict) else None


def _fault(name: str, data: bytes) -> str | None:
    """Return why no export may have such a file; None: it may."""
    if name not in (*_OF_TOKENIZER, GENERATION_CONFIG, _README) and not _LICENCE.fullmatch(name):
        return "is not one of the files that an export includes"
    if len(data) > MAX_FILE_NBYTES:
        return f"has more than {MAX_FILE_NBYTES:,} bytes"
    if name.endswith(".json"):
        leads = _leads(data)
        if leads is None:
            return "is not a JSON object"
        if leads:
            return f"names code or files from elsewhere: {', '.join(leads)[:200]}"
    if name.endswith(".jinja"):
        try:
            data.decode()
        except UnicodeDecodeError:
            return "is not UTF-8 text"
    return None


def _ids(file: Path, vocab_size: int, on_left_out: Callable[[str], None]) -> Ids:
    try:
        tree = reading.json_of(file.read_bytes())
        named = {name: tree[name] for name in Ids.__struct_fields__ if tree.get(name) is not None}
        found = msgspec.convert(named, Ids)
    except (OSError, ValueError, AttributeError) as error:  # a ValidationError is a ValueError
        on_left_out(f"{file}: ids of control tokens are left out: {error}")
        return Ids()
    kept = found.below(vocab_size)
    if beyond := [name for name in named if name not in kept]:
        on_left_out(f"{file}: {', '.join(beyond)} is left out: the model has {vocab_size} tokens")
    return msgspec.convert(kept, Ids)


def _highest(value: int | tuple[int, ...]) -> int:
    return value if isinstance(value, int) else max(value, default=-1)
