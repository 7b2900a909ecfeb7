"""Checkpoints: whole or not at all, whatever happens while they are written, and checked when they are read."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch

import weft
from unit.peer import snapshots
from unit.peer.snapshots import CONFIG, NUM, snapshot
from weft import wire
from weft.data.tokenizer import ByteTokenizer
from weft.errors import CheckpointError, ConfigError, TooLarge
from weft.ids import Digest
from weft.peer.state import checkpoint
from weft.peer.state.checkpoint import Snapshot, load, load_model, read_contents, save
from weft.store.chunks import raw, state_index
from weft.sync.records.index import CHUNK_NBYTES

FILES = [
    "checkpoint.json",
    "private-1.safetensors",
    "replicated-1.safetensors",
    "run-*.bin",
    "tokenizer-*.bin",
    "came-with-*.bin",
]
DEADLINE_S = 120.0  # of a process that saves; it takes a few seconds


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "checkpoint"
    save(folder, snapshot(1))
    return folder


@pytest.fixture
def saved(made: Path, tmp_path: Path) -> Path:
    """A checkpoint to tamper with."""
    folder = Path(shutil.copytree(made, tmp_path / "checkpoint"))
    for path in folder.iterdir():
        path.chmod(0o644)
    return folder


def bits(state: Snapshot) -> dict[str, bytes]:
    return {name: bytes(raw(vector)) for name, vector in {**state.replicated, **state.private}.items()}


def assert_same(found: Snapshot, wanted: Snapshot) -> None:
    assert bits(found) == bits(wanted)
    assert (found.config, found.tokenizer, found.head) == (wanted.config, wanted.tokenizer, wanted.head)
    assert found.came_with == wanted.came_with
    assert found.counters == wanted.counters
    assert set(found.replicated) == set(wanted.replicated)


def the(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


# --- the state comes back ---


@pytest.mark.parametrize("number", [0, 1])
def test_a_state_comes_back_bit_for_bit(tmp_path: Path, number: int) -> None:
    contents = save(tmp_path / "deep" / "checkpoint", snapshot(number))
    assert_same(load(tmp_path / "deep" / "checkpoint"), snapshot(number))
    assert contents == read_contents(tmp_path / "deep" / "checkpoint")
    assert contents.replicated == state_index(snapshot(number).replicated)
    assert (contents.software, contents.run) == (weft.__version__, CONFIG.run)


def test_the_model_is_read_without_the_rest(made: Path, saved: Path) -> None:
    the(saved, "private-*").unlink()
    config, tokenizer, outer = load_model(saved)
    assert (config, tokenizer) == (CONFIG, ByteTokenizer().to_bytes())
    assert bytes(raw(outer)) == bits(load(made))["outer"]


def test_the_files_are_safetensors(made: Path) -> None:
    found = safetensors.torch.load_file(the(made, "replicated-*"))
    assert {name: bytes(raw(vector)) for name, vector in found.items()} == {
        name: vector for name, vector in bits(snapshot(1)).items() if name in ("outer", "momentum")
    }


def test_a_person_can_read_what_is_in_it(made: Path) -> None:
    tree = json.loads((made / "checkpoint.json").read_text())
    assert tree["contents"]["head"]["committed_tokens"] == 7
    assert tree["contents"]["counters"] == {"uncounted_tokens": 101}
    assert [vector["name"] for vector in tree["contents"]["replicated"]["vectors"]] == ["momentum", "outer"]


def test_the_next_save_replaces_the_files_of_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("somebody's own")
    for number in (1, 2, 3):
        save(tmp_path, snapshot(number))
        names = [f"checkpoint.json notes.txt private-{number}.safetensors replicated-{number}.safetensors"]
        assert [" ".join(sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".bin"))] == names
        assert len(list(tmp_path.glob("*.bin"))) == 3
    assert_same(load(tmp_path), snapshot(3))


# --- what is not whole is refused, by name ---


@pytest.mark.parametrize(("kind", "tensor"), [("replicated", "outer"), ("private", "local"), ("private", "moment1")])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_one_changed_bit_is_refused_with_tensor_and_chunk(saved: Path, kind: str, tensor: str, where: str) -> None:
    path = the(saved, f"{kind}-*")
    data = bytearray(path.read_bytes())
    index = getattr(read_contents(saved), kind)
    start = len(data) - index.nbytes
    for vector in index.vectors:
        if vector.name == tensor:
            break
        start += vector.nbytes
    place = {"first": 0, "middle": CHUNK_NBYTES + 5, "last": 4 * NUM - 1}[where]
    data[start + place] ^= 1
    path.write_bytes(data)
    number, num = place // CHUNK_NBYTES, len(vector.chunks)
    assert num >= 3
    with pytest.raises(CheckpointError, match=rf"{path.name} is altered: chunk {number} of {num} of tensor '{tensor}'"):
        load(saved)


def test_an_altered_header_is_refused(saved: Path) -> None:
    path = the(saved, "replicated-*")
    path.write_bytes(path.read_bytes().replace(b'"outer"', b'"inner"', 1))
    with pytest.raises(CheckpointError, match=r"replicated-1.safetensors is altered: its header"):
        load(saved)


@pytest.mark.parametrize("kind", ["private", "replicated"])
@pytest.mark.parametrize("change", [-1, 1, -CHUNK_NBYTES, -(10**9)])
def test_a_file_cut_or_grown_is_refused_with_the_figures(saved: Path, kind: str, change: int) -> None:
    path = the(saved, f"{kind}-*")
    whole = path.read_bytes()
    path.write_bytes(whole[: max(0, len(whole) + change)] + bytes(max(0, change)))
    with pytest.raises(CheckpointError, match=rf"{path.name} has .* bytes instead of {len(whole):,}: half-written"):
        load(saved)


@pytest.mark.parametrize("pattern", FILES[1:])
def test_a_missing_file_is_named(saved: Path, pattern: str) -> None:
    path = the(saved, pattern)
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{path.name} is missing"):
        load(saved)


@pytest.mark.parametrize("pattern", FILES[3:])
def test_an_altered_config_or_tokenizer_is_refused(saved: Path, pattern: str) -> None:
    path = the(saved, pattern)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"{path.name} is altered"):
        load(saved)


def test_without_its_list_of_contents_a_checkpoint_is_half_written(saved: Path, tmp_path: Path) -> None:
    (saved / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match=r"half-written checkpoint: its checkpoint.json is missing"):
        load(saved)
    for folder in (tmp_path / "none", tmp_path):
        with pytest.raises(CheckpointError, match="there is no checkpoint in"):
            load(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot read .*Not a directory"):
        load(tmp_path / "file")


def rewritten(tree: Any, path: tuple[str | int, ...], value: Any) -> Any:
    inner = tree
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return tree


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        (("contents", "head", "committed_tokens"), 8, "altered: its contents do not match the digest"),
        (("contents", "head"), None, "altered: its contents do not match the digest"),
        (("contents", "counters", "uncounted_tokens"), 0, "altered: its contents do not match the digest"),
        (
            ("contents", "replicated", "vectors", 0, "chunks", 0),
            "00" * 32,
            "altered: its contents do not match the digest",
        ),
        (("digest",), "00" * 32, "altered: its contents do not match the digest"),
        (("contents", "replicated", "vectors", 0, "num"), 10**14, "altered"),
        (("contents", "run"), "../../etc/passwd", "altered"),
        (("contents", "serial"), -1, "altered"),
        (("contents", "format"), 2, "has format 2, this weft reads 1"),
        (("contents",), [], "altered"),
        (("contents", "extra"), 1, "altered"),
    ],
)
def test_an_altered_list_of_contents_is_refused(saved: Path, path: Any, value: Any, match: str) -> None:
    file = saved / "checkpoint.json"
    file.write_text(json.dumps(rewritten(json.loads(file.read_text()), path, value)))
    with pytest.raises(CheckpointError, match=match):
        load(saved)


@pytest.mark.parametrize("cut", [0, 1, 100, -1, -3])
def test_a_list_of_contents_cut_short_is_refused(saved: Path, cut: int) -> None:
    file = saved / "checkpoint.json"
    text = file.read_bytes()
    file.write_bytes(text[: cut or 0])
    if text[:cut].rstrip() == text.rstrip():
        assert_same(load(saved), snapshot(1))  # only the line's end is gone
    else:
        with pytest.raises(CheckpointError, match=r"cut short or altered.*If no other peer .*weft runs delete"):
            load(saved)


def forged(folder: Path, **changes: Any) -> None:
    """Write a list of contents that contradicts the rest but has the right digest: a wrong writer, not a bad disk."""
    contents = msgspec.structs.replace(read_contents(folder), **changes)
    text = msgspec.json.encode({"contents": contents, "digest": wire.digest_of(contents)})
    (folder / "checkpoint.json").write_bytes(text)


def test_vectors_of_another_model_are_refused_before_they_are_read(saved: Path) -> None:
    contents = read_contents(saved)
    huge = msgspec.structs.replace(
        contents.replicated.vectors[1], num=CHUNK_NBYTES * 1000, chunks=(Digest("00" * 32),) * 4000
    )
    replicated = msgspec.structs.replace(contents.replicated, vectors=(contents.replicated.vectors[0], huge))
    forged(saved, replicated=replicated)
    with pytest.raises(
        CheckpointError, match=rf"the run's model has {NUM:,} parameters, the vector 'outer' 1,048,576,000"
    ):
        load(saved)
    forged(saved, replicated=state_index({}))
    with pytest.raises(CheckpointError, match="the vector 'outer' 0"):
        load_model(saved)


def test_a_model_larger_than_this_machine_takes_is_refused(made: Path) -> None:
    with pytest.raises(TooLarge, match=f"has {NUM:,} parameters"):
        load(made, max_parameters=NUM - 1)
    load_model(made, max_parameters=NUM)


def test_a_saved_run_that_nobody_accepts_is_refused(saved: Path) -> None:
    data = b"no run"
    (saved / f"run-{wire.digest(data)[:16]}.bin").write_bytes(data)
    forged(saved, run=wire.digest(data))
    with pytest.raises(ConfigError, match="this run cannot be read"):
        load(saved)


# --- while another process saves ---


def test_a_reader_overtaken_by_a_save_reads_the_newer_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, snapshot(1))
    once: Iterator[int] = iter([1])
    real = checkpoint._read_blobs

    def overtaken(*args: Any) -> Any:
        if next(once, None):
            save(tmp_path, snapshot(2))
        return real(*args)

    monkeypatch.setattr(checkpoint, "_read_blobs", overtaken)
    assert_same(load(tmp_path), snapshot(2))


# --- while the system fails ---


def run(what: str, folder: Path, *rest: str, before: tuple[str, ...] = ()) -> list[str]:
    command = [*before, sys.executable, snapshots.__file__, what, str(folder), *rest]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(weft.__file__).parents[2])}


@pytest.mark.full
def test_where_no_file_may_grow_large_enough_the_earlier_checkpoint_stays(tmp_path: Path) -> None:
    (said,) = run("limited", tmp_path)
    assert said.startswith("DiskFull: the checkpoint was not saved, the earlier one after round 1 is intact: no room")
    assert_same(load(tmp_path), snapshot(1))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name.partition("-")[0] for name in names] == [
        "came",
        "checkpoint.json",
        "private",
        "replicated",
        "run",
        "tokenizer",
    ]


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    probe = ["unshare", "--mount", "--map-root-user", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(probe, capture_output=True, timeout=DEADLINE_S, check=False).returncode == 0


@pytest.mark.full
def test_on_a_full_disk_the_earlier_checkpoint_stays_until_there_is_room(tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("this machine lets us mount no small disk; the limit on file size is tested in its place")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs -o size=40m none {disk} && exec "$@"'
    before = ("unshare", "--mount", "--map-root-user", "sh", "-c", mount, "sh")
    said, names, after_failure, after_success = run("full", disk / "checkpoint", before=before)
    assert said.startswith("DiskFull: the checkpoint was not saved, the earlier one after round 1 is intact: no room")
    assert "part-" not in names
    assert "-2.safetensors" not in names
    assert (after_failure, after_success) == ("101", "103")


def test_a_first_checkpoint_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="was not saved, and there is no earlier one: cannot write"):
        save(tmp_path / "file" / "checkpoint", snapshot(1))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.full
def test_a_kill_around_any_system_call_leaves_the_old_or_the_new_state(tmp_path: Path) -> None:
    """Once a save has ended by itself, each of its calls has been the last of another process."""
    num_moments = 32
    outcomes = run("killed", tmp_path, str(num_moments))
    num_killed = outcomes.count("killed")
    assert outcomes == ["killed"] * num_killed + ["ended 0"] * (num_moments - num_killed)
    assert 16 <= num_killed < num_moments
    found = []
    for moment, outcome in enumerate(outcomes):
        state = load(tmp_path / f"{moment:03}")
        number = state.counters["uncounted_tokens"] - 100
        assert_same(state, snapshot(number))
        assert number == 2 or outcome == "killed"
        found.append(number)
    assert found == sorted(found)
    assert found[0] == 1
    folder = tmp_path / "010"
    assert len(list(folder.iterdir())) > len(FILES)
    save(folder, snapshot(3))
    assert_same(load(folder), snapshot(3))
    assert len(list(folder.iterdir())) == len(FILES), "what the dead process left is gone"


@pytest.mark.full
def test_a_kill_at_any_moment_leaves_a_state_that_was_saved(tmp_path: Path) -> None:
    command = [sys.executable, snapshots.__file__, "forever", str(tmp_path)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(3)]
        process.kill()
        said += process.stdout.readlines()
    last = int(said[-1].split()[1])
    state = load(tmp_path)
    number = state.counters["uncounted_tokens"] - 100
    assert number in (last - 1, last)
    assert_same(state, snapshot(number))
