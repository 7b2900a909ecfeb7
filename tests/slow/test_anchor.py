"""`weft anchor` as a real process in which torch cannot be imported: a run outlives all who trained it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slow.shell import LOCAL, START_S, STOP_S, Shell
from weft.events import BranchOpened, Entry, PeerStopped, RoundCommitted, StateJoined
from weft.ids import is_named
from weft.keys import read_peer
from weft.net.ticket import read

pytestmark = pytest.mark.slow

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from weft.cli.main import main; main()"
NETWORK = ("--host", "127.0.0.1", "--transports", "tls")
FOLLOW_S = 60.0
TAKEN_UP_S = 120.0  # 15 s or 60 s without a majority, and what a process needs to start on a busy machine


class Anchor(Shell):
    def run(self, *arguments: str, given: str = "") -> None:
        self.end()
        command = [sys.executable, "-P", "-c", WITHOUT_TORCH, "--home", str(self.home), *arguments]
        with self.said.open("a") as said:
            self.process = subprocess.Popen(
                command, cwd=self.folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said
            )
        assert self.process.stdin is not None
        self.process.stdin.write(given)
        self.process.stdin.close()


def ticket_of(shell: Shell) -> str:
    return subprocess.run(
        [sys.executable, "-P", "-m", "weft", "--home", str(shell.home), "ticket"],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip


def last_commit(shell: Shell) -> RoundCommitted:
    return [entry.event for entry in shell.entries() if isinstance(entry.event, RoundCommitted)][-1]


def is_commit(entry: Entry) -> bool:
    return isinstance(entry.event, RoundCommitted)


def test_a_run_goes_on_from_an_anchor_after_every_trainer_was_killed(
    shells: Callable[..., Shell], run_file: Path, tmp_path: Path
) -> None:
    anna, bert, clara = shells("anna"), shells("bert"), shells("clara")
    anchor = Anchor(tmp_path / "anchor")
    try:
        train = ("train", str(run_file), "--set", "orphan_after_s=20.0", "--name", "anna", *LOCAL)
        anna.run(*train, "--wait-for", "2")
        ticket = anna.ticket()
        bert.run("join", "-", "--yes", "--name", "bert", *LOCAL, given=ticket + "\n")
        anna.wait(is_commit, within_s=START_S)
        anchor.run("anchor", "-", "--name", "rock", *NETWORK, given=ticket + "\n")
        anchor.wait(lambda entry: isinstance(entry.event, StateJoined), within_s=START_S)
        (key,) = (anchor.home / "keys").glob("anchor-*.pem")
        rock = read_peer(key)
        deadline = time.monotonic() + FOLLOW_S
        while not any(is_named(rock, contact.peer) for contact in read(ticket).contacts):
            assert time.monotonic() < deadline
            time.sleep(0.5)
            ticket = ticket_of(anna)

        # Everybody who trains is killed at the same moment.
        at = time.time()
        for shell in (anna, bert):
            assert shell.process is not None
            os.kill(shell.process.pid, signal.SIGKILL)
        for shell in (anna, bert):
            assert shell.process is not None
            shell.process.wait(STOP_S)
        reached = last_commit(anna).committed_tokens

        # A newcomer with a ticket of before finds data, tokenizer and state at the anchor, and goes on.
        clara.run("join", "-", "--yes", "--name", "clara", *LOCAL, given=ticket)
        opened = clara.wait(
            lambda entry: isinstance(entry.event, BranchOpened), after=at, within_s=TAKEN_UP_S + START_S
        )
        assert isinstance(opened.event, BranchOpened)
        branch = opened.event.branch
        first = clara.wait(
            lambda entry: isinstance(entry.event, RoundCommitted) and entry.event.branch == branch, after=at
        )
        assert isinstance(first.event, RoundCommitted)
        assert first.event.committed_tokens >= 0.5 * reached  # from the anchor's state, not from the start
        assert list(anchor.home.glob("runs/*/*/anchored/state.bin"))

        # Those that were killed come back, with their checkpoints, and all agree again.
        again = time.time()
        anna.run(*train)
        bert.run("join", "-", "--yes", "--name", "bert", *LOCAL, given=ticket_of(clara))
        together = clara.wait(
            lambda entry: isinstance(entry.event, RoundCommitted) and len(entry.event.contributors) == 3,
            after=again,
            within_s=START_S + TAKEN_UP_S,
        ).event
        assert isinstance(together, RoundCommitted)
        for shell in (anna, bert):
            found = shell.wait(
                lambda entry: is_commit(entry) and entry.event.manifest == together.manifest, after=again
            )  # type: ignore[attr-defined]
            assert found.event.committed_tokens == together.committed_tokens  # type: ignore[attr-defined]

        # The anchor leaves with a goodbye, and said nothing that looks like a fault.
        assert anchor.send(signal.SIGINT) == 0
        assert any(isinstance(entry.event, PeerStopped) for entry in anchor.entries())
        assert "Traceback" not in anchor.said.read_text()
        assert "torch" not in anchor.said.read_text()
    finally:
        anchor.end()


def test_an_anchor_comes_up_alone_with_what_it_kept(
    shells: Callable[..., Shell], run_file: Path, tmp_path: Path
) -> None:
    anna, anchor = shells("anna"), Anchor(tmp_path / "anchor")
    try:
        anna.run("train", str(run_file), "--name", "anna", *LOCAL)
        ticket = anna.ticket()
        anchor.run("anchor", "-", *NETWORK, given=ticket + "\n")
        anchor.wait(lambda entry: isinstance(entry.event, StateJoined), within_s=START_S)
        for shell in (anchor, anna):
            assert shell.process is not None
            shell.process.kill()
            shell.process.wait(STOP_S)
        anchor.run("anchor", "-", *NETWORK, given=ticket + "\n")
        deadline = time.monotonic() + START_S
        while "anchor of two shells" not in anchor.said.read_text().split("\n", 3)[-1]:
            assert anchor.process is not None
            assert anchor.process.poll() is None, anchor.said.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        fresh = ticket_of(anchor)
        bert = shells("bert")
        bert.run("join", "-", "--yes", "--name", "bert", *LOCAL, given=fresh)
        bert.wait(lambda entry: isinstance(entry.event, StateJoined), within_s=START_S)
        bert.wait(is_commit, within_s=START_S + TAKEN_UP_S)
    finally:
        anchor.end()
