"""`weft runs`: what a home holds of each run, how each goes on, and that a deletion takes what is that run's alone."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from unit.cli.small import RUN, TEXT, Kept, Weft, as_trained
from unit.cli.test_bad_input import refused
from weft.cli.home import find_run
from weft.config import from_tree
from weft.errors import NoSuchRun
from weft.keys import open_identity, read_peer, take_lock
from weft.launch.runs import held_by
from weft.launch.session import usual_name
from weft.peer.state.checkpoint import Snapshot, load, save
from weft.run.config import RunConfig, RunFile
from weft.run.genesis import initial, seal
from weft.store.home import Home


def keep(home: Path, base: Path, peer: str = "cd" * 32, **changes: Any) -> RunConfig:
    """Keep a checkpoint of another run in the home."""
    import tomllib

    (base / "text.txt").write_text(TEXT)
    run_file: RunFile = from_tree(tomllib.loads(RUN), RunFile, where="run.toml")
    place = Home(home)
    sealed = seal(msgspec.structs.replace(run_file, **changes), base, place, lambda _event: None)
    vector = initial(sealed.config, place)
    assert vector is not None
    folder = home / "runs" / sealed.config.run / peer / "checkpoint"
    blob = sealed.tokenizer.to_bytes()
    save(folder, Snapshot(config=sealed.config, tokenizer=blob, head=None, replicated={"outer": vector}))
    return sealed.config


def told(weft: Weft) -> dict[str, dict[str, Any]]:
    answer = weft("runs", "--json")
    assert answer.code == 0, answer.err
    return {run["run"]: run for run in json.loads(answer.out)["runs"]}


def files(home: Path) -> dict[str, int]:
    return {
        str(path.relative_to(home)): path.stat().st_size
        for path in home.rglob("*")
        if path.is_file() and path.parent.name != "keys"
    }


# --- the list ---


def test_an_empty_home_has_no_runs(weft: Weft, home: Path) -> None:
    answer = weft("runs")
    assert (answer.code, answer.out) == (0, "")
    assert f"There is no run in {home} yet" in answer.err
    assert told(weft) == {}


def test_each_run_is_listed_with_its_size_and_how_it_goes_on(weft: Weft, kept: Kept, home: Path) -> None:
    as_trained(kept.folder, 3, 5_000)
    key = Path(weft("keys", "new").out.split()[1])
    kept.folder.parent.rename(kept.folder.parents[1] / read_peer(key))
    (run,) = told(weft).values()
    assert (run["run"], run["name"], run["round"], run["trained_at"]) == (kept.run.run, "small", 3, 5.0)
    assert (run["has_checkpoint"], run["total_tokens"], run["state"]) == (True, 320, "stopped")
    assert run["nbytes"] == sum(size for name, size in files(home).items())
    assert run["shared_nbytes"] == 0
    assert run["how"].endswith(f"train {kept.run.run[:8]}")
    lines = weft("runs").out.splitlines()
    assert lines[0].startswith(f"{kept.run.run[:8]}  small  round 3, 0 %, trained ")
    assert lines[1].strip() == f"go on: weft --home {home} train {kept.run.run[:8]}"


def test_the_list_reads_each_checkpoint_once(weft: Weft, kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept.folder.is_dir()
    read, names = Path.read_bytes, list[str]()

    def counted(path: Path) -> bytes:
        names.append(path.name)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", counted)
    assert weft("runs").code == 0
    assert names.count("checkpoint.json") == 1


def test_how_a_run_goes_on_depends_on_what_of_it_is_here(weft: Weft, kept: Kept, home: Path, tmp_path: Path) -> None:
    def how() -> tuple[str, str]:
        run = told(weft)[kept.run.run]
        return run["state"], run["how"]

    as_trained(kept.folder, 1, 1_000)
    assert how()[0] == "stopped"
    assert "--key FILE" in how()[1]  # who trained it has no key in this home
    (home / "shards" / kept.run.data.train[0].digest).rename(tmp_path / "shard")
    assert "join -" in how()[1]
    (tmp_path / "shard").rename(home / "shards" / kept.run.data.train[0].digest)
    snapshot = load(kept.folder)
    assert snapshot.head is not None
    done = msgspec.structs.replace(snapshot.head, committed_tokens=320)
    save(kept.folder, replace(snapshot, head=done, replicated=dict(snapshot.replicated)))
    assert how()[0] == "complete"
    (kept.folder / "checkpoint.json").unlink()
    assert how()[0] == "empty"
    private = keep(home, tmp_path, is_private=True)
    assert "--data FILES" in told(weft)[private.run]["how"]
    config = home / "blobs" / kept.run.run
    config.chmod(0o600)
    config.write_bytes(b"of another version")
    for each in kept.folder.glob("run-*.bin"):
        each.unlink()
    assert how()[0] == "unknown"


def test_a_damaged_checkpoint_is_listed_as_that_with_what_to_do(weft: Weft, kept: Kept, home: Path) -> None:
    as_trained(kept.folder, 3, 5_000)
    (kept.folder / "checkpoint.json").write_text("abc\n")
    first, how = weft("runs").out.splitlines()
    run = kept.run.run[:8]
    assert first.startswith(f"{run}  small  its checkpoint is damaged, ")
    assert how.strip() == f"to remove it: weft --home {home} runs delete {run}; then join it again, if others have it"
    assert told(weft)[kept.run.run]["state"] == "damaged"
    answer = weft("runs", "delete", run, "--yes")
    assert answer.code == 0
    assert "with a damaged checkpoint" in " ".join(answer.err.split())


def test_a_join_that_nobody_answered_is_called_that_and_can_be_removed(weft: Weft, home: Path) -> None:
    run = "9" * 64
    (home / "runs" / run / ("ab" * 32)).mkdir(parents=True)
    (home / "runs" / run / ("ab" * 32) / "log.jsonl").write_text("")
    first, how = weft("runs").out.splitlines()
    assert first.startswith("99999999  (no name)  no checkpoint")
    assert how.strip() == f"a join that nobody answered; to remove it: weft --home {home} runs delete 99999999"
    assert weft("runs", "delete", "99999999", "--yes").code == 0
    assert told(weft) == {}


def test_a_run_that_is_trained_now_is_listed_so_and_not_deleted(weft: Weft, kept: Kept, home: Path) -> None:
    lock = take_lock(kept.folder.parent / "lock")
    assert lock is not None
    try:
        assert told(weft)[kept.run.run]["state"] == "running"
        before = files(home)
        answer = weft("runs", "delete", "small", "--yes")
        assert answer.code == 13
        assert "is being trained from" in answer.err
        unsaid = weft("runs", "delete", "small")
        assert (unsaid.code, "--yes" in unsaid.err) == (13, False), "what is of no use is not offered"
        assert files(home) == before
    finally:
        lock.release()
    assert weft("runs", "delete", "small", "--yes").code == 0


@pytest.mark.parametrize(("round", "stands"), [(0, ""), (45, "round 45, 100 %, ")])
def test_of_a_run_that_is_trained_now_it_is_not_said_that_it_was_not(
    weft: Weft, kept: Kept, round: int, stands: str
) -> None:
    if round:
        as_trained(kept.folder, round, 0, 320)  # it was joined
    lock = take_lock(kept.folder.parent / "lock")
    assert lock is not None
    try:
        first, how = weft("runs").out.splitlines()
    finally:
        lock.release()
    assert first.startswith(f"{kept.run.run[:8]}  small  {stands}nothing trained here is saved yet, ")
    peer = kept.folder.parent.name
    assert how.strip() == f"{usual_name(peer)} trains it now"
    assert "not trained here yet" in weft("runs").out


def test_a_run_that_an_anchor_keeps_is_not_deleted(weft: Weft, kept: Kept, home: Path) -> None:
    key = Path(weft("keys", "new").out.split()[1])
    folder = home / "runs" / kept.run.run / read_peer(key)
    (folder / "anchored").mkdir(parents=True)
    (folder / "ticket").write_text("weft1a")
    with open_identity(key):
        assert told(weft)[kept.run.run]["how"] == "an anchor keeps it now"
        refused(weft, 13, "an anchor of run", "runs", "delete", "small", "--yes")
    assert weft("runs", "delete", "small", "--yes").code == 0


# --- deletion ---


def test_a_deletion_leaves_nothing_of_the_only_run_and_says_what_came_free(weft: Weft, kept: Kept, home: Path) -> None:
    nbytes = sum(files(home).values())
    answer = weft("runs", "delete", kept.run.run[:8], "--yes")
    assert answer.code == 0, answer.err
    assert f"run {kept.run.run[:8]} (small) is deleted: {nbytes / 1e3:.3g} kB are free again" in answer.out
    assert "Run files, texts and keys stay" in " ".join(answer.err.split())
    assert files(home) == {}
    assert not (home / "runs" / kept.run.run).exists()
    assert told(weft) == {}


def test_what_another_run_needs_stays(weft: Weft, kept: Kept, home: Path, tmp_path: Path) -> None:
    before = files(home)
    other = keep(home, tmp_path, name="other")
    assert other.data == kept.run.data
    listed = told(weft)
    assert listed[other.run]["shared_nbytes"] == listed[kept.run.run]["shared_nbytes"] > 0
    assert weft("runs", "delete", "other", "--yes").code == 0
    assert files(home) == before
    assert load(kept.folder).config == kept.run


def test_private_files_go_with_the_last_private_run(weft: Weft, kept: Kept, home: Path, tmp_path: Path) -> None:
    first = keep(home, tmp_path, name="first", is_private=True)
    second = keep(home, tmp_path, name="second", is_private=True, seed=3)
    assert any(name.startswith("private/") for name in files(home))
    assert weft("runs", "delete", first.run[:8], "--yes").code == 0
    assert any(name.startswith("private/") for name in files(home))
    assert weft("runs", "delete", second.run[:8], "--yes").code == 0
    assert not any(name.startswith("private/") for name in files(home))
    assert load(kept.folder).config == kept.run


def test_where_a_run_cannot_be_read_nothing_that_it_may_need_is_removed(
    weft: Weft, kept: Kept, home: Path, tmp_path: Path
) -> None:
    stranger = home / "runs" / ("e" * 64) / ("f" * 64)
    stranger.mkdir(parents=True)
    (home / "blobs" / ("e" * 64)).write_bytes(b"of another version")
    before = {name for name in files(home) if name.startswith(("shards/", "blobs/"))}
    assert weft("runs", "delete", "small", "--yes").code == 0
    after = set(files(home))
    assert before - after == {f"blobs/{kept.run.run}"}


def test_a_run_that_was_never_begun_is_listed_and_deleted(weft: Weft, kept: Kept, home: Path) -> None:
    import shutil

    shutil.rmtree(home / "runs")
    assert told(weft)[kept.run.run]["state"] == "empty"
    answer = weft("runs", "delete", "small", "--yes")
    assert answer.code == 0
    assert "without a checkpoint: 0 B of logs and" in " ".join(answer.err.split())
    assert files(home) == {}


def test_a_deletion_that_broke_off_is_completed_by_another(
    weft: Weft, kept: Kept, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name == "checkpoint.json":
            raise PermissionError(13, "Permission denied", str(path))
        own(path, missing_ok)

    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", unlink)
        answer = weft("runs", "delete", "small", "--yes")
    assert answer.code == 11
    assert "Permission denied" in answer.err
    assert kept.run.run in {held.run for held in held_by(Home(home))}
    assert weft("runs", "delete", kept.run.run[:8], "--yes").code == 0
    assert files(home) == {}


def test_a_deletion_asks_and_a_no_deletes_nothing(
    weft: Weft, kept: Kept, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    before = files(home)
    without = weft("runs", "delete", "small")
    assert without.code == 2
    assert "Add --yes" in without.err
    monkeypatch.setattr("sys.stdin", Terminal("\n"))
    assert "nothing was deleted" in weft("runs", "delete", "small").err
    assert files(home) == before
    refused(weft, 17, "is not a run of this home", "runs", "delete", "nothing", "--yes")
    refused(weft, 2, "--json has no effect before delete", "runs", "--json", "delete", "small", "--yes")
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert "are free again" in weft("runs", "delete", "small").out


# --- which run is meant ---


def test_a_run_is_meant_by_its_name_its_digits_or_as_the_last(kept: Kept, home: Path, tmp_path: Path) -> None:
    other = keep(home, tmp_path, name="Other one")
    folder = home / "runs" / kept.run.run
    assert find_run("small", home) == find_run("SMALL", home) == find_run(kept.run.run[:4], home) == folder
    assert find_run("other ONE", home) == home / "runs" / other.run
    as_trained(kept.folder, 1, 7_000)
    assert find_run("last", home) == folder
    assert find_run("nothing", home) is None
    assert find_run(kept.run.run[:3], home) is None  # would be hit by accident


def test_a_name_that_two_runs_have_is_not_guessed_at(weft: Weft, kept: Kept, home: Path, tmp_path: Path) -> None:
    other = keep(home, tmp_path, seed=8)
    with pytest.raises(NoSuchRun, match="2 runs match") as caught:
        find_run("small", home)
    assert kept.run.run[:8] in str(caught.value)
    assert other.run[:8] in str(caught.value)
    refused(weft, 17, "2 runs match", "runs", "delete", "small", "--yes")
