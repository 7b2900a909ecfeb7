"""The line of work: rewritten on a terminal and wiped at the end, seldom printed elsewhere."""

import io
import sys

import pytest

from unit.hands import Hands
from weft.cli.terminal import PRINTED_EVERY_S, WorkLine, agrees, say_loading
from weft.events import Notice, Working


class Stream(io.StringIO):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def working(done: int, what: str = "reading", *, is_over: bool = False) -> Working:
    return Working(what=what, unit="B", done=done, total=100, rate=10.0, left_s=1.0, is_over=is_over)


def test_a_terminal_shows_one_line_and_keeps_none() -> None:
    stream = Stream(is_terminal=True)
    line = WorkLine(stream)
    for done in (10, 20):
        line(working(done))
    line(working(20, is_over=True))
    text = stream.getvalue()
    assert "\n" not in text
    assert text.split("\r\x1b[2K") == ["", "reading: 10 % of 100 B, 10 B/s, 0:01 left", text.split("\r\x1b[2K")[2], ""]
    assert text.split("\r\x1b[2K")[2].startswith("reading: 20 %")


def test_elsewhere_lines_come_now_and_then() -> None:
    stream, clock = Stream(is_terminal=False), Hands()
    line = WorkLine(stream, clock)
    for done in (1, 2, 3):
        line(working(done))
        clock.at += PRINTED_EVERY_S / 2
    assert [said.split(" %")[0] for said in stream.getvalue().splitlines()] == ["reading: 1", "reading: 3"]


def test_other_work_is_said_at_once() -> None:
    stream, clock = Stream(is_terminal=False), Hands()
    line = WorkLine(stream, clock)
    line(working(1))
    line(working(1, "writing"))
    line(Notice(text="a thing"))
    assert len(stream.getvalue().splitlines()) == 2


def test_what_nobody_was_shown_needs_no_wiping() -> None:
    stream = Stream(is_terminal=True)
    WorkLine(stream).close()
    assert stream.getvalue() == ""


def test_a_question_says_what_it_takes_as_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("maybe\nY\n\n\nno\n"))
    assert agrees("join?", default=True)
    assert "'maybe' is no answer here. Type y for yes or n for no; Enter alone is yes." in capsys.readouterr().err
    assert agrees("join?", default=True)
    assert not agrees("delete it?", default=False)
    assert not agrees("join?", default=True)


def test_that_pytorch_is_loaded_is_said_before_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say_loading()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    say_loading(is_quiet=True)
    assert capsys.readouterr().err == ""
    say_loading()
    assert "loading PyTorch" in capsys.readouterr().err
