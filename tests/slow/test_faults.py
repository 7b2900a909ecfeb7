"""A file that the system refuses, at every place of a command where one is used: one paragraph, and nothing is lost."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unit.cli.small import RUN, TEXT

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
LOCAL = ("--host", "127.0.0.1", "--port", "0", "--transports", "tls", "--device", "cpu", "--threads", "1", "--quiet")
TRAIN = ("train", "HOME/run.toml", *LOCAL)
DOCUMENTED = {0, 2, 11, 14, 40, 41}
SHARDS = 4  # of the places of a long command: each is a test of its own
LIMITS = (6, 8, 10, 12, 14, 16, 18, 20, 24, 32, 48, 64)  # of open files


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None or sys.platform != "linux":
        pytest.skip("calls of the C library are made to fail by a library that gcc makes, on Linux")
    made = tmp_path_factory.mktemp("faults") / "faults.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", made, HERE / "faults.c", "-ldl"], check=True, timeout=60)
    return made


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run file, its text, and the home of its trained run in one."""
    home = tmp_path_factory.mktemp("trained") / "base"
    home.mkdir()
    (home / "run.toml").write_text(RUN)
    (home / "text.txt").write_text(TEXT)
    shutil.copytree(home, home.with_name("fresh"))
    command = [each.replace("HOME", str(home)) for each in TRAIN]
    subprocess.run(
        [sys.executable, "-m", "weft", "--home", home, *command], check=True, timeout=120, capture_output=True
    )
    return home


def played(library: Path, folder: Path, how: str, *command: str, shards: str = "0/1") -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, HERE / "faulty.py", folder, how, shards, *command],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=False,
        timeout=3000,
    )
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    for row in rows:
        assert row["code"] in DOCUMENTED, row
        assert "Traceback" not in row["said"], row
        if row["code"]:
            assert row["said"].count("weft: ") == 1, row
    return rows


@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_run_that_met_a_fault_anywhere_goes_on_to_its_end(library: Path, trained: Path, shard: int) -> None:
    rows = played(library, trained.with_name("fresh"), "once", *TRAIN, shards=f"{shard}/{SHARDS}")
    assert len(rows) > 100 // SHARDS
    assert {row["again"] for row in rows} == {0}, [row for row in rows if row["again"]]


@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_disk_that_refuses_everything_from_any_place_on_ends_a_run_with_a_paragraph(
    library: Path, trained: Path, shard: int
) -> None:
    assert (
        len(played(library, trained.with_name("fresh"), "for-good", *TRAIN, shards=f"{shard}/{SHARDS}")) > 100 // SHARDS
    )


def test_a_run_that_may_open_few_files_works_or_says_how_many_they_are(trained: Path, tmp_path: Path) -> None:
    fresh, codes = trained.with_name("fresh"), []
    for most in LIMITS:
        home = tmp_path / str(most)
        shutil.copytree(fresh, home)
        command = [each.replace("HOME", str(home)) for each in TRAIN]
        line = shlex.join([sys.executable, "-m", "weft", "--home", str(home), *command])
        done = subprocess.run(
            ["bash", "-c", f"ulimit -n {most}; exec {line}"], capture_output=True, text=True, timeout=300, check=False
        )
        codes.append(done.returncode)
        assert "Traceback" not in done.stderr, (most, done.stderr)
        if done.returncode:
            assert f"too many files are open: this process may have {most} at once" in done.stderr
        assert not (home / "errors").exists()
    assert codes[0]
    assert not codes[-1]


@pytest.mark.parametrize("how", ["once", "for-good"])
@pytest.mark.parametrize(
    "command",
    [
        ("keys", "new", "HOME/more/mine.pem"),
        ("export", "last", "HOME/out"),
        ("inspect", "last"),
        ("eval", "last"),
        ("generate", "last", "def", "--device", "cpu", "--max-tokens", "3"),
        ("tokenizer", "train", "HOME/bpe.json", "--data", "HOME/text.txt", "--vocab-size", "260"),
        ("report", "last"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_other_commands_name_the_file_that_is_refused(
    library: Path, trained: Path, command: tuple[str, ...], how: str
) -> None:
    assert len(played(library, trained, how, *command)) > 3
