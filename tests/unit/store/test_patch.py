"""A patch of a model's folder makes the newer folder of the older one to the bit, or nothing at all."""

import errno
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from weft.errors import ConfigError, DiskFull
from weft.store.patch import MAGIC, Changed, Copied, Given, Index, Made, apply, write
from weft.wire import decode, digest, encode

Tensors = dict[str, Tensor]
_HEADER = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,3]}}'
HALF = struct.pack("<Q", len(_HEADER)) + _HEADER + b"abc"  # a file of a number that is cut


def tensors(seed: int = 0) -> Tensors:
    luck = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(300, 40, generator=luck).bfloat16(),
        "norm": torch.randn(40, generator=luck),
        "half": torch.randn(64, 40, generator=luck).half(),
        "ids": torch.arange(10),
        "empty": torch.zeros(0, 4, dtype=torch.bfloat16),
    }


def moved(before: Tensors, share: float = 0.01) -> Tensors:
    """Return what training makes of tensors: some numbers are the next ones."""
    luck, after = torch.Generator().manual_seed(9), dict(before)
    for name in ("embed", "half"):
        words = before[name].view(torch.int16).clone()
        is_moved = torch.rand(words.shape, generator=luck) < share
        after[name] = (words + is_moved.short()).view(before[name].dtype)
    return after


def folder(path: Path, of: Tensors, config: object = None) -> Path:
    path.mkdir()
    save_file(of, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    (path / "tokenizer.json").write_text("x" * 5000)
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in path.iterdir()}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return folder(tmp_path / "old", tensors())


def test_the_newer_folder_comes_back_and_takes_little(old: Path, tmp_path: Path) -> None:
    new = folder(tmp_path / "new", moved(tensors()), {"model_type": "llama", "more": 1})
    told = write(old, new, tmp_path / "p")
    num = sum(each.numel() for name, each in tensors().items() if name in ("embed", "half", "norm"))
    assert told.num_words == num
    assert 0.005 * num < told.num_changed < 0.015 * num
    assert told.new_nbytes == sum(map(len, contents(new).values()))
    assert (tmp_path / "p").stat().st_size < 0.08 * told.new_nbytes
    seen = list[int]()
    apply(old, tmp_path / "p", tmp_path / "again", seen.append)
    assert contents(tmp_path / "again") == contents(new)
    assert sum(seen) == told.new_nbytes


Change = Callable[[Tensors], Tensors]
CHANGES: dict[str, Change] = {
    "nothing": lambda before: before,
    "all numbers": lambda _before: tensors(1),
    "one more tensor": lambda before: before | {"more": torch.ones(7)},
    "one tensor less": lambda before: {name: each for name, each in before.items() if name != "norm"},
    "another shape": lambda before: before | {"norm": torch.ones(41)},
    "another kind": lambda before: before | {"embed": before["embed"].float()},
    "signs": lambda before: before | {"embed": -before["embed"]},
    "no numbers": lambda before: before | {"norm": torch.full((40,), float("nan"))},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_changed_it_comes_back(old: Path, tmp_path: Path, change: Change) -> None:
    new = folder(tmp_path / "new", change(tensors()))
    write(old, new, tmp_path / "p")
    apply(old, tmp_path / "p", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(new)
    assert (tmp_path / "p").stat().st_size < sum(map(len, contents(new).values())) + 2000


def test_files_may_be_split_otherwise_and_only_what_is_read_must_be_as_it_was(old: Path, tmp_path: Path) -> None:
    new, of = folder(tmp_path / "new", {"embed": tensors()["embed"]}), moved(tensors())
    save_file({name: of[name] for name in ("half", "norm")}, new / "model-2.safetensors")
    write(old, new, tmp_path / "p")
    (old / "config.json").write_text("of nobody's interest")
    (new / "config.json").unlink()
    (new / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match=r"config\.json: it is not what p was made from"):
        apply(old, tmp_path / "p", tmp_path / "again")
    (old / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (old / "notes.txt").write_text("new here")
    apply(old, tmp_path / "p", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(new)


@pytest.mark.full
def test_a_damaged_patch_makes_nothing(old: Path, tmp_path: Path) -> None:
    write(old, folder(tmp_path / "new", moved(tensors(), 0.1)), tmp_path / "p")
    data = (tmp_path / "p").read_bytes()
    spoiled = [data[:-1], data + b"\0", data[:50], b"", MAGIC, b"\0" * 100, data.replace(b"old", b"odd")]
    spoiled += [data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :] for at in range(0, len(data), 7)]
    for number, each in enumerate(spoiled):
        file = tmp_path / f"p{number}"
        file.write_bytes(each)
        with pytest.raises(ConfigError):
            apply(old, file, tmp_path / "again")
        assert not (tmp_path / "again").exists()
        assert not list(tmp_path.glob(".again*"))


def forged(path: Path, index: bytes, given: bytes = b"") -> Path:
    body = MAGIC + given + index + struct.pack("<Q", len(index))
    path.write_bytes(body + bytes.fromhex(digest(body)))
    return path


def test_a_forged_patch_reaches_nothing_and_fills_no_disk(old: Path, tmp_path: Path) -> None:
    model = old / "model.safetensors"
    named, size = {model.name: digest(model.read_bytes())}, model.stat().st_size

    def of(*pieces: Given | Copied | Changed, name: str = "out", old_files: dict[str, str] = named) -> Index:
        return Index(old=old_files, files=(Made(name=name, digest=digest(b"abc"), pieces=pieces),))

    copied = Copied(file=model.name, begin=0, nbytes=size)
    cases = [
        (of(*[copied] * 9), "would make more than"),
        (of(Copied(file=model.name, begin=1, nbytes=size)), "lies in no old file"),
        (of(Copied(file="config.json", begin=0, nbytes=1)), "lies in no old file"),
        (of(Given(nbytes=4)), "the patch does not hold"),
        (of(Given(nbytes=2)), "comes out otherwise"),
        (of(copied), "comes out otherwise"),
        (of(Changed(file=model.name, begin=0, nbytes=9, width=2, patch_nbytes=1)), "a width that there is not"),
        (of(Changed(file=model.name, begin=0, nbytes=9, width=3, patch_nbytes=1)), "a width that there is not"),
        (of(Changed(file=model.name, begin=0, nbytes=8, width=2, patch_nbytes=1)), "cut off"),
        (of(Changed(file=model.name, begin=0, nbytes=8, width=2, patch_nbytes=3)), "more values than there are"),
        (Index(old={}, files=()), "makes no file"),
        (Index(old={}, files=(Made(name="a", digest=digest(b""), pieces=()),) * 2), "or one twice"),
        (Index(old={}, files=tuple(Made(name=each, digest=digest(b""), pieces=()) for each in "aA")), "or one twice"),
        (of(old_files={"nothing": digest(b"")}), "it has no nothing"),
    ]
    for index, said in cases:
        with pytest.raises(ConfigError, match=said):
            apply(old, forged(tmp_path / "p", encode(index), b"abc"), tmp_path / "again")
    good = Index(old={}, files=(Made(name="out", digest=digest(b"ab"), pieces=(Given(nbytes=2),)),))
    with pytest.raises(ConfigError, match="names nowhere"):
        apply(old, forged(tmp_path / "p", encode(good), b"abc"), tmp_path / "again")
    apply(old, forged(tmp_path / "p", encode(good), b"ab"), tmp_path / "again")
    assert contents(tmp_path / "again") == {"out": b"ab"}
    for name in ("../out", "/tmp/out", ".hidden", "a/b", ""):
        tree = msgspec.msgpack.decode(encode(good))
        tree["files"][0]["name"] = name
        with pytest.raises(ConfigError, match="it is damaged"):
            apply(old, forged(tmp_path / "p", msgspec.msgpack.encode(tree), b"ab"), tmp_path / "other")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: (path / "sub").mkdir(), "a patch is of files"),
        (lambda path: (path / "my file").write_text(""), "a patch takes names of letters"),
        (lambda path: (path / "Config.json").write_text(""), "Config.json and config.json are one name on some disks"),
        (lambda path: (path / "model.safetensors").write_bytes(b"\xff" * 40), "no safetensors file"),
        (lambda path: (path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0[]"), "no safetensors file"),
        (lambda path: (path / "model.safetensors").write_bytes(HALF), "a ends in the middle of a number"),
        (lambda path: [each.unlink() for each in path.iterdir()], "it is empty"),
    ],
)
def test_folders_that_no_patch_can_be_of_are_refused(
    old: Path, tmp_path: Path, spoil: Callable[[Path], object], said: str
) -> None:
    new = folder(tmp_path / "new", tensors())
    spoil(new)
    with pytest.raises(ConfigError, match=said):
        write(old, new, tmp_path / "p")
    assert not (tmp_path / "p").exists()
    with pytest.raises(ConfigError, match="no such folder"):
        write(old, tmp_path / "nowhere", tmp_path / "p")


def test_nothing_is_overwritten(old: Path, tmp_path: Path) -> None:
    new = folder(tmp_path / "new", moved(tensors()))
    write(old, new, tmp_path / "p")
    with pytest.raises(ConfigError, match="overwrites no patch"):
        write(old, new, tmp_path / "p")
    with pytest.raises(ConfigError, match="overwrites no folder"):
        apply(old, tmp_path / "p", new)
    assert torch.equal(load_file(new / "model.safetensors")["embed"], moved(tensors())["embed"])


def test_a_patch_lies_in_neither_folder(old: Path, tmp_path: Path) -> None:
    new = folder(tmp_path / "new", moved(tensors()))
    for where in (old, new):
        with pytest.raises(ConfigError, match="would be a file of the model's folder"):
            write(old, new, where / "p")
        assert not (where / "p").exists()


def test_what_a_download_left_beside_a_model_is_passed_over_and_told(old: Path, tmp_path: Path) -> None:
    new = folder(tmp_path / "new", moved(tensors()))
    for where in (old, new):
        (where / ".gitattributes").write_text("*.safetensors filter=lfs")
        (where / ".cache").mkdir()
    assert write(old, new, tmp_path / "p").left_out == [".cache", ".gitattributes"]
    apply(old, tmp_path / "p", tmp_path / "made")
    assert set(contents(tmp_path / "made")) == {"model.safetensors", "config.json", "tokenizer.json"}


def test_a_full_disk_is_no_file_that_cannot_be_read(old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match="no room on the disk"):
        write(old, folder(tmp_path / "new", moved(tensors())), tmp_path / "p")
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("which", ["old", "new"])
def test_a_file_that_cannot_be_read_is_named(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    new, opened = folder(tmp_path / "new", moved(tensors())), Path.open
    write(old, new, tmp_path / "p")

    def refuse(path: Path, *args: object) -> object:
        if path.parent.name == which:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *args)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=rf"{which}/.*: cannot be read: Permission denied"):
        write(old, new, tmp_path / "q")
    if which == "old":
        with pytest.raises(ConfigError, match=r"old/.*: cannot be read: Permission denied"):
            apply(old, tmp_path / "p", tmp_path / "made")
    assert {each.name for each in tmp_path.iterdir()} == {"old", "new", "p"}


def test_its_bytes_follow_from_the_folders(old: Path, tmp_path: Path) -> None:
    new = folder(tmp_path / "new", moved(tensors()))
    write(old, new, tmp_path / "p")
    write(old, new, tmp_path / "q")
    data = (tmp_path / "p").read_bytes()
    assert data == (tmp_path / "q").read_bytes()
    (length,) = struct.unpack("<Q", data[-40:-32])
    index = decode(data[-40 - length : -40], Index)
    kinds = {each.name: [type(piece).__name__ for piece in each.pieces] for each in index.files}
    assert kinds["tokenizer.json"] == ["Copied"]
    assert kinds["model.safetensors"].count("Changed") == 2
