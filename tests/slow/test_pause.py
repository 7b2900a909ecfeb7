"""`weft pause`, `weft resume`, `--until` and `--hours` on real processes: the device is free within 5 s."""

import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import psutil
import pytest

from slow.shell import LOCAL, START_S, STOP_S, Shell
from weft.events import MemberProgress, Notice, Paused, PeerStopped, Resumed, RoundCommitted, StepDone
from weft.keys import read_peer
from weft.launch.control import Wish, put_wish, read_answer
from weft.store.home import PeerFolder

pytestmark = pytest.mark.slow

# Steps of about half a second: what ends is the step under way.
HEAVY = ("--set", "model.width=256", "--set", "model.ffn_width=1024", "--set", "model.num_layers=4",
         "--set", "train.seq_len=256", "--set", "train.batch_size=8", "--set", "method.every=4")  # fmt: skip
FREE_S = 5.0


def weft(shell: Shell, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "weft", "--home", str(shell.home), *arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def busy(process: psutil.Process, seconds: float) -> float:
    """Return the CPU-seconds per second that a process takes over a while."""
    before, began = process.cpu_times(), time.monotonic()
    time.sleep(seconds)
    after, passed = process.cpu_times(), time.monotonic() - began
    return (after.user + after.system - before.user - before.system) / passed


def steps_after(shell: Shell, at: float) -> list[float]:
    return [entry.at for entry in shell.entries() if isinstance(entry.event, StepDone) and entry.at > at]


def test_a_pause_frees_the_machine_within_five_seconds_and_nobody_waits(
    shells: Callable[..., Shell], run_file: Path
) -> None:
    anna, bert = shells("anna"), shells("bert")
    anna.run("train", str(run_file), "--wait-for", "2", *HEAVY, *LOCAL, "--name", "anna")
    ticket = anna.ticket()
    bert.run("join", "-", "--yes", "--name", "bert", *LOCAL, given=ticket + "\n")
    bert.wait(lambda entry: isinstance(entry.event, StepDone), within_s=START_S)
    bert.wait(lambda entry: isinstance(entry.event, RoundCommitted), within_s=START_S)
    bert_is = read_peer(bert.home / "keys" / "peer-0.pem")
    assert bert.process is not None
    process = psutil.Process(bert.process.pid)
    before = busy(process, 5.0)

    # As `weft pause` does, without the seconds that a Python needs to start on a busy machine.
    (ticket_file,) = bert.home.glob("runs/*/*/ticket")
    folder = PeerFolder(ticket_file.parent)
    asked_at = time.time()
    put_wish(folder, Wish(word="pause", number="1"))
    while (said := read_answer(folder, "1")) is None:
        time.sleep(0.05)
        assert time.time() - asked_at < FREE_S
    assert "paused: the device is free" in said
    bert.wait(lambda entry: isinstance(entry.event, Paused), after=asked_at)
    time.sleep(max(asked_at + FREE_S - time.time(), 0.0))
    assert busy(process, 6.0) < min(0.15, 0.5 * before)  # it hears heartbeats, and makes outer steps
    assert steps_after(bert, asked_at + FREE_S) == []

    # The others go on, and it follows.
    anna.wait(lambda entry: isinstance(entry.event, RoundCommitted) and bert_is in entry.event.left_out, after=asked_at)
    bert.wait(lambda entry: isinstance(entry.event, RoundCommitted), after=time.time())
    anna.wait(lambda entry: isinstance(entry.event, MemberProgress) and entry.event.state == "paused", after=asked_at)

    again = weft(bert, "pause")  # is what it is
    assert again.returncode == 0, again.stderr
    assert "(two shells): paused" in again.stdout
    asked_at = time.time()
    again = weft(bert, "resume", "two shells")
    assert "training again" in again.stdout
    bert.wait(lambda entry: isinstance(entry.event, Resumed), after=asked_at)
    bert.wait(lambda entry: isinstance(entry.event, StepDone), after=asked_at)
    anna.wait(
        lambda entry: isinstance(entry.event, RoundCommitted) and bert_is in entry.event.contributors, after=asked_at
    )
    assert "Traceback" not in bert.said.read_text() + anna.said.read_text()


def test_where_nothing_runs_or_another_run_is_meant_it_is_said(shells: Callable[..., Shell], run_file: Path) -> None:
    alone = shells("alone")
    said = weft(alone, "pause")
    assert said.returncode == 17
    assert "nothing trains in" in said.stderr
    alone.run("train", str(run_file), *LOCAL)
    alone.ticket()
    said = weft(alone, "pause", "other")
    assert said.returncode == 17
    assert "two shells" in said.stderr


def test_a_peer_leaves_when_it_was_to_and_trains_at_its_hours_only(
    shells: Callable[..., Shell], run_file: Path
) -> None:
    alone = shells("alone")
    alone.run("train", str(run_file), *LOCAL, "--until", "20s")
    alone.ticket()
    assert alone.process is not None
    assert alone.process.wait(20 + STOP_S) == 0
    events = [entry.event for entry in alone.entries()]
    assert any(isinstance(event, Notice) and event.text.startswith("this peer leaves on") for event in events)
    (stopped,) = [event for event in events if isinstance(event, PeerStopped)]
    assert "the time at which it was to leave" in stopped.reason

    alone.run("train", str(run_file), *LOCAL, "--until", "5rounds")
    alone.ticket()
    assert alone.process.wait(START_S) == 0
    assert "contributed 5 rounds" in alone.said.read_text() + "".join(str(entry.event) for entry in alone.entries())

    now = datetime.now()
    hours = f"{now + timedelta(hours=3):%H:%M}-{now + timedelta(hours=4):%H:%M}"
    began = time.time()
    alone.run("train", str(run_file), *LOCAL, "--hours", hours)
    alone.ticket()
    paused = alone.wait(lambda entry: isinstance(entry.event, Paused), after=began, within_s=START_S)
    assert isinstance(paused.event, Paused)
    assert paused.event.reason == f"outside its hours, until {now + timedelta(hours=3):%H:%M}"
    time.sleep(5.0)
    assert steps_after(alone, paused.at + FREE_S) == []
    said = weft(alone, "resume")
    assert "still paused: outside its hours" in said.stdout
