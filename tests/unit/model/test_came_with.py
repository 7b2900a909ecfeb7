"""What came with a Hugging Face folder: read, bounded, and written as it came."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from weft import wire
from weft.errors import WireError
from weft.model.came_with import MAX_FILE_NBYTES, CameWith, Ids, decode, read, tokenizer_folder
from weft.model.config import ModelConfig
from weft.model.initial import initial_vector
from weft.model.weights import write_folder

Make = Callable[..., ModelConfig]

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
FILES = {
    "tokenizer_config.json": b'{"chat_template": "x",   "eos_token": "</s>"}',
    "special_tokens_map.json": b"{}",
    "added_tokens.json": b"{}",
    "chat_template.jinja": TEMPLATE.encode(),
    "generation_config.json": b'{"temperature": 0.6, "eos_token_id": [2, 3]}',
    "LICENSE": b"Some licence",
    "LICENSE-MODEL.md": b"Another",
    "NOTICE.txt": b"\xa9 latin",
    "USE_POLICY.md": b"Be kind",
    "README.md": b"<html> in a page of text",
}
IDS = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "theirs"
    path.mkdir()
    for name, data in FILES.items():
        (path / name).write_bytes(data)
    for name in ("model.safetensors", "pytorch_model.bin", "tokenizer.model", "modeling_x.py", "vocab.json", ".env"):
        (path / name).write_bytes(b"{}")
    (path / "config.json").write_text(json.dumps(IDS))
    return path


def found(folder: Path, vocab_size: int = 100) -> tuple[CameWith, list[str]]:
    said: list[str] = []
    return read(folder, folder, vocab_size, said.append), said


def test_files_and_ids_are_taken_and_nothing_else(folder: Path) -> None:
    came, said = found(folder)
    assert came.files == FILES
    assert came.ids.below(100) == {**IDS, "eos_token_id": (2, 3)}
    assert said == []
    assert decode(wire.encode(came)) == came


def test_of_a_model_without_a_folder_only_the_tokenizers_files_are_taken(folder: Path) -> None:
    came = read(None, folder, 100, lambda _text: None)
    assert set(came.files) == set(list(FILES)[:4])
    assert came.ids == Ids()
    assert read(None, None, 100, lambda _text: None).is_empty


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("README.md", b"x" * (MAX_FILE_NBYTES + 1), r"README.md is left out: it has more than 1,048,576 bytes"),
        ("generation_config.json", b"[1]", r"generation_config.json is left out: it is not a JSON object"),
        ("generation_config.json", b"[" * 100_000, r"generation_config.json is left out: it is not a JSON object"),
        ("LICENSE", b"version https://git-lfs.github.com/spec/v1\n", r"LICENSE is left out: it is a Git LFS pointer"),
        ("chat_template.jinja", b"\xff\xff", r"chat_template.jinja is left out: it is not UTF-8 text"),
    ],
)
def test_what_cannot_be_handed_on_is_named(folder: Path, name: str, data: bytes, why: str) -> None:
    (folder / name).write_bytes(data)
    came, said = found(folder)
    assert len(said) == 1
    assert why in said[0]
    assert came.files == {each: data for each, data in FILES.items() if each != name}


def test_files_are_bounded_together(folder: Path) -> None:
    for n in range(5):
        (folder / f"LICENSE-{n}").write_bytes(b"x" * MAX_FILE_NBYTES)
    came, said = found(folder)
    assert sum(map(len, came.files.values())) <= 4 << 20
    assert any("exports include at most 4 MiB" in text for text in said)
    decode(wire.encode(came))


def test_keys_that_lead_to_code_or_files_of_elsewhere_stay_behind(folder: Path) -> None:
    tree = {"auto_map": {"AutoTokenizer": "evil/repo--x.Y"}, "vocab_file": "/etc/passwd", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tree))
    came, said = found(folder)
    assert json.loads(came.files["tokenizer_config.json"]) == {"eos_token": "</s>"}
    assert "auto_map, vocab_file is left out" in said[0]


@pytest.mark.parametrize(
    ("ids", "kept"),
    [
        ({"bos_token_id": None, "eos_token_id": 2}, {"eos_token_id": 2}),
        ({"pad_token_id": -1}, {"pad_token_id": -1}),
        ({"pad_token_id": 100, "eos_token_id": 99}, {"eos_token_id": 99}),
        ({"eos_token_id": "</s>"}, {}),
    ],
)
def test_ids_are_those_that_the_model_has(folder: Path, ids: dict[str, Any], kept: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(ids))
    came, said = found(folder)
    assert msgspec.to_builtins(came.ids) == kept
    assert bool(said) == (kept != {name: value for name, value in ids.items() if value is not None})


class Anything(wire.Record, frozen=True, kw_only=True):
    files: dict[str, bytes]
    ids: dict[str, Any]


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": b"{}"},
        {"model.safetensors": b""},
        {"tokenizer.json": b"{}"},
        {"modeling_x.py": b""},
        {"LICENSE.py": b""},
        {"../LICENSE": b""},
        {"/LICENSE": b""},
        {"LICENSE-/x": b""},
        {"LICENSE\n": b""},
        {"": b""},
        {"tokenizer_config.json": b'{"auto_map": {}}'},
        {"tokenizer_config.json": b'{"tokenizer_file": "/etc/passwd"}'},
        {"generation_config.json": b"no json"},
        {"README.md": b"x" * (MAX_FILE_NBYTES + 1)},
        {f"LICENSE-{n}": b"" for n in range(33)},
    ],
    ids=lambda files: next(iter(files)),
)
def test_a_strangers_record_is_refused(files: dict[str, bytes]) -> None:
    with pytest.raises(WireError, match="what came with its model cannot be used"):
        decode(wire.encode(Anything(files=files, ids={})))


def test_a_strangers_bytes_are_refused() -> None:
    for data in (b"\x00", b"\x80" * 9, wire.encode(Anything(files={}, ids={"eos_token_id": 1 << 40}))):
        with pytest.raises(WireError):
            decode(data)


def test_an_export_has_files_as_they_came_and_ids_again(small: Make, tmp_path: Path, folder: Path) -> None:
    came, _ = found(folder, small().vocab_size)
    blob = b'{"added_tokens": [{"id": 4, "content": "<end>"}], "model": {}}'
    write_folder(tmp_path / "ours", small(), initial_vector(small(), 1), blob, stop_id=4, came_with=came)
    for name, data in FILES.items():
        assert (tmp_path / "ours" / name).read_bytes() == data
    config = json.loads((tmp_path / "ours" / "config.json").read_bytes())
    assert {name: config[name] for name in IDS} == IDS


def test_where_no_generation_config_came_wefts_own_has_the_ids(small: Make, tmp_path: Path, folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    came, _ = found(folder, small().vocab_size)
    write_folder(tmp_path / "ours", small(), initial_vector(small(), 1), None, stop_id=4, came_with=came)
    assert json.loads((tmp_path / "ours" / "generation_config.json").read_bytes()) == IDS


def test_the_tokenizers_settings_are_those_beside_it_or_of_the_same_one(tmp_path: Path, folder: Path) -> None:
    bare = tmp_path / "tokenizer.json"
    bare.write_bytes(b'{"a": 1}')
    (folder / "tokenizer.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert tokenizer_folder(folder, None, b"other") == folder
    assert tokenizer_folder(folder / "tokenizer.json", None, b"other") == folder
    assert tokenizer_folder(bare, folder, b'{"a": 1}') == folder
    assert tokenizer_folder(None, folder, b'{"a": 1}') == folder
    assert tokenizer_folder(None, folder, b'{"a": 2}') is None
    assert tokenizer_folder(bare, None, b'{"a": 1}') is None
