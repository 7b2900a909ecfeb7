"""Logs on this machine: all parts of one that grew too large, in order, at once or while it grows."""

from pathlib import Path

from unit.dashboard.test_history import A, said
from weft.cli.process import run_loop
from weft.cli.watch.sources import follow_logs
from weft.dashboard.logs import logged, older
from weft.events import Entry, Notice
from weft.log import JsonlSink, LogTail

LINE_NBYTES = 200  # more than one here


def told(number: int) -> Entry:
    return said(A, Notice(text=f"number {number}"), float(number))


def numbers(entries: list[Entry]) -> list[float]:
    return [entry.at for entry in entries]


def test_a_log_that_was_renamed_twice_is_read_whole_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    sink = JsonlSink(path, max_nbytes=3 * LINE_NBYTES)
    for number in range(9):
        sink.write(told(number))
    sink.close()
    assert [part.name for part in older(path)] == ["log.jsonl.2", "log.jsonl.1"]
    assert numbers(list(logged([path]))) == list(range(9))
    followed: list[Entry] = []
    run_loop(follow_logs([path], followed.append, lambda: True))
    assert numbers(followed) == list(range(9))


def test_what_was_written_before_a_log_was_renamed_is_not_missed_while_it_grows(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "log.jsonl", max_nbytes=3 * LINE_NBYTES)
    tail = LogTail(tmp_path / "log.jsonl")
    found: list[Entry] = []
    for number in range(20):
        sink.write(told(number))
        if number % 2:
            found += tail.read()
    sink.close()
    assert older(tmp_path / "log.jsonl")
    assert numbers(found) == list(range(20))
