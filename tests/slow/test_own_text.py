"""Somebody's text from the command line, as real processes: trained, gone on with, listed, deleted."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from slow.shell import LOCAL, START_S, Shell
from weft.config import load
from weft.events import Entry, RoundCommitted
from weft.run.config import RunFile

pytestmark = pytest.mark.slow

TEXT = "".join(f"It was day {n}, and the sea was calm.\n" for n in range(400))


def committed(at_least: int) -> Callable[[Entry], bool]:
    return lambda entry: isinstance(entry.event, RoundCommitted) and entry.event.round >= at_least


def test_own_text_is_trained_gone_on_with_listed_and_deleted(shells: Callable[..., Shell]) -> None:
    anna = shells("anna")
    (anna.folder / "notes.txt").write_text(TEXT)

    def weft(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-P", "-m", "weft", "--home", str(anna.home), *arguments]
        return subprocess.run(command, cwd=anna.folder, capture_output=True, text=True, timeout=START_S, check=False)

    anna.run("train", "notes.txt", "--yes", "--length", "5000passes", *LOCAL)
    anna.ticket()
    anna.wait(committed(2), within_s=START_S)
    assert anna.send(signal.SIGINT) == 0
    made = load(anna.folder / "notes.toml", RunFile)
    assert (made.name, made.data.source.paths) == ("notes", ("notes.txt",))  # type: ignore[union-attr]
    said = anna.said.read_text()
    assert "measured on cpu" in said
    assert "Traceback" not in said

    at = time.time()
    anna.run("train", "notes.txt", *LOCAL)
    anna.ticket()
    anna.wait(committed(3), after=at, within_s=START_S)
    assert "says how to train notes.txt" in " ".join(anna.said.read_text().split())
    (run,) = json.loads(weft("runs", "--json").stdout)["runs"]
    assert (run["name"], run["state"]) == ("notes", "running")
    assert weft("runs", "delete", "notes", "--yes").returncode == 13
    assert anna.send(signal.SIGINT) == 0

    (run,) = json.loads(weft("runs", "--json").stdout)["runs"]
    assert run["state"] == "stopped"
    assert run["round"] >= 3
    told = weft("status", "last", "--json")
    assert json.loads(told.stdout)["round"] >= 3
    gone = weft("runs", "delete", "notes", "--yes")
    assert gone.returncode == 0, gone.stderr
    assert json.loads(weft("runs", "--json").stdout)["runs"] == []
    assert (anna.folder / "notes.txt").read_text() == TEXT
