"""The lines of a bench: whole, or not there."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from weft.bench.log import COLUMNS, MAX_OUTCOME, BenchLine, BenchLog, held
from weft.errors import ConfigError

LINE = BenchLine(
    digest="ab" * 8,
    row="diloco, int8",
    grid='{"method.every":10,"method.codec":{"type":"int8"}}',
    seed=0,
    peers=4,
    outcome="complete",
    rounds=50,
    steps=500.0,
    committed_tokens=1_024_000,
    trained_tokens=1_024_000,
    parameters=1_000_000,
    train_loss=1.5,
    heldout_loss=1.75,
    nats_per_byte=1.75,
    sent_mean=1e7,
    sent_max=11_000_000,
    received_mean=1e7,
    received_max=11_000_000,
    bits=0.16,
    payload_bits=0.15,
    ratio_bf16=0.0067,
    ratio_fp32=0.0033,
    virtual_s=250.5,
    cpu_s=130.0,
    software="weft 0",
)


def line(**changes: Any) -> BenchLine:
    return msgspec.structs.replace(LINE, **changes)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "out" / "points.csv"
    diverged = line(digest="cd" * 8, outcome="diverged", heldout_loss=None, train_loss=None, nats_per_byte=None)
    log = BenchLog(path)
    log.append(LINE)
    log.append(diverged)
    assert BenchLog(path).lines == log.lines == {LINE.digest: LINE, diverged.digest: diverged}
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)


def test_a_half_line_is_dropped_and_the_next_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    log = BenchLog(path)
    log.append(LINE)
    with path.open("ab") as file:
        file.write(b'cd,"half of a li')
    resumed = BenchLog(path)
    assert resumed.lines == {LINE.digest: LINE}
    resumed.append(line(digest="ef" * 8))
    assert list(BenchLog(path).lines) == [LINE.digest, "ef" * 8]
    assert path.read_bytes().count(b"\n") == 3


def test_a_head_that_was_cut_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_bytes(b"digest,ro")
    BenchLog(path).append(LINE)
    assert BenchLog(path).lines == {LINE.digest: LINE}


def test_lines_are_only_added(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    log = BenchLog(path)
    log.append(LINE)
    before = path.read_bytes()
    log.append(line(digest="ef" * 8))
    assert path.read_bytes().startswith(before)


@pytest.mark.parametrize(
    "outcome", ["failed: a\nb", "failed: a\rb", "failed: a\x0cb", "failed: a\x85b", "failed: a\u2028b", 'failed: a",b']
)
def test_a_reason_of_any_letters_is_one_line(tmp_path: Path, outcome: str) -> None:
    path = tmp_path / "points.csv"
    log = BenchLog(path)
    log.append(line(outcome=outcome))
    log.append(line(digest="ef" * 8))
    assert BenchLog(path).lines == log.lines
    assert path.read_bytes().count(b"\n") == 3
    assert log.lines[LINE.digest].outcome in ("failed: a b", 'failed: a",b')


def test_a_reason_steers_no_terminal_and_is_cut(tmp_path: Path) -> None:
    log = BenchLog(tmp_path / "points.csv")
    log.append(line(outcome="failed: \x1b[2J" + "x" * 1_000_000))
    outcome = log.lines[LINE.digest].outcome
    assert outcome.startswith("failed: ?[2Jxx")
    assert len(outcome) == MAX_OUTCOME
    assert BenchLog(tmp_path / "points.csv").lines == log.lines


def test_of_a_point_that_failed_the_later_line_counts(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    log = BenchLog(path)
    log.append(line(outcome="failed: no room"))
    log.append(line(outcome="failed: no room again"))
    assert not BenchLog(path).lines[LINE.digest].is_final
    log.append(LINE)
    assert BenchLog(path).lines == log.lines == {LINE.digest: LINE}
    assert path.read_bytes().count(b"\n") == 4


@pytest.mark.parametrize("later", ["complete", "diverged", "failed: no room"])
def test_a_line_after_a_final_one_of_the_same_point_is_refused(tmp_path: Path, later: str) -> None:
    path = tmp_path / "points.csv"
    log = BenchLog(path)
    log.append(LINE)
    log.append(line(digest="ef" * 8))
    log.append(line(outcome=later))
    with pytest.raises(ConfigError, match=r"lines 2 and 4 are both of point abab.* of row diloco, int8"):
        BenchLog(path)


def test_a_quote_that_is_never_closed_spoils_one_line(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    log = BenchLog(path)
    log.append(LINE)
    with path.open("a") as file:
        file.write('cd,"never closed\n')
    log.append(line(digest="ef" * 8))
    with pytest.raises(ConfigError, match=r"points\.csv, line 3: "):
        BenchLog(path)


def test_one_process_at_a_time_writes_lines(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    with held(path), pytest.raises(ConfigError, match="another bench plays and writes there"), held(path):
        pass
    with held(path):
        pass


def test_a_lock_file_that_cannot_be_is_said(tmp_path: Path) -> None:
    (tmp_path / "points.lock").mkdir()
    with pytest.raises(ConfigError, match=r"points\.lock: cannot be locked"), held(tmp_path / "points.csv"):
        pass


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("digest,row\nab,x\n", "its columns are not those of this version"),
        (",".join(COLUMNS) + "\nab,x\n", "line 2"),
        (",".join(COLUMNS) + "\n" + ",".join("x" for _ in COLUMNS) + "\n", "line 2"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "points.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        BenchLog(path)
