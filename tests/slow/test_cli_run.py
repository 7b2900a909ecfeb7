"""Real processes from the command line: two shells, goodbyes, kills, several peers in one home."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slow.shell import LOCAL, START_S, STOP_S, Shell
from weft.events import Entry, MemberGone, MemberLeft, MemberSuspected, RoundCommitted
from weft.ids import PeerId
from weft.keys import read_peer
from weft.net.ticket import read

pytestmark = pytest.mark.slow


def commit_of(*peers: PeerId) -> Callable[[Entry], bool]:
    """Return a test for a commit that counts exactly these peers."""
    return lambda entry: isinstance(entry.event, RoundCommitted) and set(entry.event.contributors) == set(peers)


def tells_of(member: PeerId, *kinds: type) -> Callable[[Entry], bool]:
    return lambda entry: isinstance(entry.event, kinds) and getattr(entry.event, "member", None) == member


def test_two_shells_train_part_meet_again_and_survive_a_kill(
    shells: Callable[..., Shell], run_file: Path, tmp_path: Path
) -> None:
    anna, bert = shells("anna"), shells("bert")
    anna.run("train", str(run_file), "--wait-for", "2", "--name", "anna", *LOCAL)
    ticket = anna.ticket()
    anna_is = read(ticket).contacts[0].peer

    # Another directory, another home: nothing is shared but the ticket.
    bert.run("join", "-", "--yes", "--name", "bert", *LOCAL, given=ticket + "\n")
    bert.wait(lambda entry: isinstance(entry.event, RoundCommitted), within_s=START_S)
    bert_is = read_peer(bert.home / "keys" / "peer-0.pem")
    anna.wait(commit_of(anna_is, bert_is))
    assert ticket not in anna.said.read_text() + "".join(
        log.read_text() for log in anna.home.glob("runs/*/*/log.jsonl")
    )

    # Ctrl-C: a goodbye, exit 0, and the other goes on.
    at = time.time()
    assert bert.send(signal.SIGINT) == 0
    anna.wait(tells_of(bert_is, MemberLeft), after=at)
    anna.wait(commit_of(anna_is), after=at)

    # It comes back with the ticket any member prints.
    fresh = subprocess.run(
        [sys.executable, "-P", "-m", "weft", "--home", str(anna.home), "ticket"],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    at = time.time()
    bert.run("join", "-", "--yes", "--name", "bert", *LOCAL, given=fresh)
    anna.wait(commit_of(anna_is, bert_is), after=at, within_s=START_S)

    # kill -9: said within 8 s, and committed again once the branch is open.
    at = time.time()
    bert.send(signal.SIGKILL)
    told = anna.wait(tells_of(bert_is, MemberSuspected, MemberGone), after=at)
    assert told.at - at <= 8.0
    anna.wait(commit_of(anna_is), after=at)

    # The killed one restarts and joins that branch.
    at = time.time()
    bert.run("join", "-", "--yes", "--name", "bert", *LOCAL, given=fresh)
    anna.wait(commit_of(anna_is, bert_is), after=at, within_s=START_S)

    # SIGTERM on the maker: the other commits on.
    at = time.time()
    assert anna.send(signal.SIGTERM) == 0
    bert.wait(commit_of(bert_is), after=at)
    assert bert.send(signal.SIGINT) == 0
    for shell in (anna, bert):
        assert (next(shell.home.glob("runs/*/*/checkpoint/checkpoint.json"))).exists()
        assert "Traceback" not in shell.said.read_text()


def test_two_signals_within_a_moment_are_one(shells: Callable[..., Shell], run_file: Path) -> None:
    alone = shells("alone")
    alone.run("train", str(run_file), *LOCAL)
    alone.ticket()
    alone.wait(lambda entry: isinstance(entry.event, RoundCommitted), within_s=START_S)
    assert alone.process is not None
    os.kill(alone.process.pid, signal.SIGSTOP)  # so that both signals are there when it goes on
    os.kill(alone.process.pid, signal.SIGINT)
    os.kill(alone.process.pid, signal.SIGTERM)
    os.kill(alone.process.pid, signal.SIGCONT)
    assert alone.process.wait(STOP_S) == 0
    assert (next(alone.home.glob("runs/*/*/checkpoint/checkpoint.json"))).exists()
    assert "again" not in alone.said.read_text()


def test_a_signal_before_the_run_begins_is_no_failure(shells: Callable[..., Shell], run_file: Path) -> None:
    early = shells("early")
    early.run("train", str(run_file), "--wait-for", "9", *LOCAL)
    early.ticket()
    assert early.send(signal.SIGINT) == 0
