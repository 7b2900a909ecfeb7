"""Sentences for a terminal."""

import sys
from pathlib import Path

import pytest

from weft.cli.failure import explain
from weft.cli.terminal import wrapped
from weft.errors import ConfigError

PATH = "/home/somebody/" + "a-long-folder/" * 6


def test_words_are_kept_whole_and_a_long_path_has_a_line_of_its_own() -> None:
    lines = wrapped(f"there is no such folder as {PATH} here, which is a pity for who-ever wanted it", 40).split("\n")
    assert PATH in lines
    assert max(len(line) for line in lines if line != PATH) <= 40
    assert (
        " ".join(lines).split()
        == f"there is no such folder as {PATH} here, which is a pity for who-ever wanted it".split()
    )


def test_what_is_no_terminal_gets_one_line() -> None:
    assert wrapped("word " * 99, None) == "word " * 99


def test_an_error_on_a_terminal_breaks_no_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert (
        explain(ConfigError(f"cannot use {PATH} for what was asked. Choose another place with --home."), tmp_path) == 2
    )
    lines = capsys.readouterr().err.splitlines()
    assert any(PATH in line for line in lines)
    assert len(lines) > 2
