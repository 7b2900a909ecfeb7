"""The demo as people run it, on few tokens: to its end, stopped and taken up again, and killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from weft.events import RoundCommitted
from weft.log import read_jsonl
from weft.model.weights import read_folder

pytestmark = pytest.mark.slow

DEADLINE_S = 400.0


def demo(folder: Path, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-P", "-m", "weft", "demo", str(folder), "--quiet", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: "subprocess.Popen[str]") -> str:
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    return out


def commits(folder: Path) -> int:
    logs = folder.glob("home/runs/*/*/log.jsonl")
    return sum(isinstance(entry.event, RoundCommitted) for log in logs for entry in read_jsonl(log))


def wait_for_commit(folder: Path, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not commits(folder):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.3)


def test_a_short_demo_ends_with_one_model_and_tells_again_what_it_made(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    out = finish(demo(folder, "--peers", "2", "--tokens", "45000"))
    assert "all 2 are equal, bit for bit" in out
    assert "nats per byte" in out
    assert "order-3 n-gram" in out
    config, vector = read_folder(folder / "export")
    assert config.vocab_size == 257
    assert vector.isfinite().all()
    digests = [line.split()[-1] for line in out.splitlines() if line.startswith("  peer ")]
    assert len(digests) == 2
    assert len(set(digests)) == 1
    num_commits = commits(folder)
    again = finish(demo(folder))
    assert digests[0] in again
    assert commits(folder) == num_commits  # it was finished: nothing was trained


def test_a_demo_that_is_stopped_before_anything_happened_is_no_failure(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    process = demo(folder, "--peers", "2", "--tokens", "45000")
    deadline = time.monotonic() + DEADLINE_S
    while not list(folder.glob("peer-1.log")):  # the first peer's process is there, and has said nothing yet
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert "stopped" in finish(process)


def test_a_demo_that_is_stopped_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    process = demo(folder, "--peers", "2", "--tokens", "150000")
    wait_for_commit(folder, process)
    process.send_signal(signal.SIGINT)
    assert "stopped" in finish(process)
    before = commits(folder)
    refused = demo(folder, "--tokens", "90000")
    _, err = refused.communicate(timeout=60)
    assert refused.returncode == 2
    assert "--fresh" in err
    out = finish(demo(folder))
    assert "all 2 are equal" in out
    assert commits(folder) > before


def test_no_peer_outlives_a_demo_that_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    process = demo(folder, "--peers", "2", "--tokens", "2000000")
    wait_for_commit(folder, process)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 2
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    _, alive = psutil.wait_procs(children, timeout=30)
    for child in alive:
        child.kill()
    assert alive == []


def test_a_peer_that_fails_fails_the_demo(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    process = demo(folder, "--peers", "2", "--tokens", "2000000")
    wait_for_commit(folder, process)
    victim = psutil.Process(process.pid).children()[-1]
    victim.kill()
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGKILL
    assert "was killed by SIGKILL" in err


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    process = demo(tmp_path, "--fresh")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "holds no demo" in err
    assert (tmp_path / "mine.txt").read_text() == "precious"
