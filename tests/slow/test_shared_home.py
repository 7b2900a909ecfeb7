"""Several peers of one machine, as real processes: one home, an identity each; one key, one peer."""

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from unit.cli.small import RUN, TEXT
from weft.cli.run.running import Report

pytestmark = pytest.mark.slow

ENDS_S = 240
LOCAL = ("--transports", "tls", "--host", "127.0.0.1", "--threads", "1", "--quiet")


def weft(folder: Path, name: str, *arguments: str) -> "subprocess.Popen[bytes]":
    """Start a command whose output goes to files, and which ends with this process."""
    with (folder / f"{name}.out").open("wb") as out, (folder / f"{name}.err").open("wb") as err:
        return subprocess.Popen(
            [sys.executable, "-m", "weft", *arguments, "--parent", str(os.getpid())], cwd=folder, stdout=out, stderr=err
        )


def test_four_joins_that_share_a_home_hold_four_identities(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "run.toml").write_text(
        RUN.replace("tokens = 320", "tokens = 1600") + '\n[method]\ntype = "fedavg"\nevery = 5\n'
    )
    ends_at = time.monotonic() + ENDS_S
    started = [
        weft(tmp_path, "maker", "--home", "maker", "train", "run.toml", "--wait-for", "5", "--report", "0.json", *LOCAL)
    ]
    try:
        while not (ticket := (tmp_path / "maker.out").read_text().strip()):
            assert started[0].poll() is None, (tmp_path / "maker.err").read_text()
            assert time.monotonic() < ends_at
            time.sleep(0.2)
        (tmp_path / "ticket.txt").write_text(ticket)
        started += [
            weft(
                tmp_path,
                f"{n}",
                "--home",
                "shared",
                "join",
                "@ticket.txt",
                "--yes",
                "--key",
                f"{n}.pem",
                "--report",
                f"{n}.json",
                *LOCAL,
            )
            for n in range(1, 5)
        ]
        for process in started:
            assert process.wait(ends_at - time.monotonic()) == 0, [path.read_text() for path in tmp_path.glob("*.err")]
        reports = [msgspec.json.decode((tmp_path / f"{n}.json").read_bytes(), type=Report) for n in range(5)]
        assert [report.reason for report in reports] == ["complete"] * 5
        assert len({report.peer for report in reports}) == 5
        assert len({report.replica for report in reports}) == 1
        (run,) = (tmp_path / "shared" / "runs").iterdir()
        assert {folder.name for folder in run.iterdir()} == {report.peer for report in reports[1:]}
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_a_second_peer_with_the_same_key_is_refused_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "run.toml").write_text(RUN)
    train = ("train", "run.toml", "--wait-for", "2", "--key", "key.pem", *LOCAL)
    first = weft(tmp_path, "first", "--home", "one", *train)
    try:
        ends_at = time.monotonic() + ENDS_S
        while not (tmp_path / "first.out").read_text():
            assert first.poll() is None, (tmp_path / "first.err").read_text()
            assert time.monotonic() < ends_at
            time.sleep(0.2)
        second = weft(tmp_path, "second", "--home", "two", *train)
        try:
            assert second.wait(ENDS_S) == 13
        finally:
            second.kill()
            second.wait()
        said = (tmp_path / "second.err").read_text()
        assert "--key" in said
        assert "Traceback" not in said
    finally:
        first.kill()
        first.wait()
