"""The maker of a run leaves for good, as real processes: its tickets, the run, and those that come back."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slow.shell import LOCAL, START_S, STOP_S, Shell
from slow.test_anchor import NETWORK, TAKEN_UP_S, Anchor, last_commit, ticket_of
from weft.events import Entry, RoundCommitted, StateJoined
from weft.ids import PeerId, start_of
from weft.keys import read_peer
from weft.net.ticket import MAX_LETTERS, read

pytestmark = pytest.mark.slow

UNREACHABLE = 22  # docs/exit_codes.md


def ticket_that_names(shell: Shell, *peers: PeerId) -> str:
    """Return the maker's kept ticket once it names all of `peers`."""
    deadline = time.monotonic() + START_S
    while True:
        text = ticket_of(shell)
        if {start_of(peer) for peer in peers} <= {contact.peer for contact in read(text).contacts}:
            assert len(text.strip()) <= MAX_LETTERS
            return text
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_a_newcomer_joins_by_the_ticket_of_a_maker_that_was_killed(
    shells: Callable[..., Shell], run_file: Path
) -> None:
    anna, bert, clara, dora = (shells(name) for name in ("anna", "bert", "clara", "dora"))
    anna.run("train", str(run_file), "--name", "anna", *LOCAL, "--wait-for", "3")
    first = anna.ticket()
    for shell in (bert, clara):
        shell.run("join", "-", "--yes", "--name", shell.folder.name, *LOCAL, given=first)
    ids = {}
    for shell in (anna, bert, clara):
        shell.wait(lambda entry: isinstance(entry.event, RoundCommitted), within_s=START_S)
        ids[shell] = read_peer(shell.home / "keys" / "peer-0.pem")
    later = ticket_that_names(anna, *ids.values())
    assert anna.process is not None
    os.kill(anna.process.pid, signal.SIGKILL)
    anna.process.wait(STOP_S)

    at = time.time()
    dora.run("join", "-", "--yes", "--name", "dora", *LOCAL, given=later)
    dora.wait(lambda entry: isinstance(entry.event, StateJoined), within_s=START_S)
    bert.wait(is_counted(read_peer(dora.home / "keys" / "peer-0.pem")), after=at, within_s=START_S)
    for shell in (bert, clara, dora):
        assert shell.send(signal.SIGINT) == 0
        assert "Traceback" not in shell.said.read_text()


def is_counted(*names: str) -> Callable[[Entry], bool]:
    return lambda entry: isinstance(entry.event, RoundCommitted) and set(names) <= set(entry.event.contributors)


def test_a_run_and_its_tickets_outlive_its_maker(shells: Callable[..., Shell], run_file: Path, tmp_path: Path) -> None:
    anna, bert, clara = shells("anna"), shells("bert"), shells("clara")
    rock = Anchor(tmp_path / "rock")
    try:
        anna.run("train", str(run_file), "--set", "orphan_after_s=20.0", "--name", "anna", *LOCAL, "--wait-for", "2")
        first = anna.ticket()
        bert.run("join", "-", "--yes", "--name", "bert", *LOCAL, given=first + "\n")
        anna.wait(lambda entry: isinstance(entry.event, RoundCommitted), within_s=START_S)
        rock.run("anchor", "-", "--name", "rock", *NETWORK, given=first + "\n")
        rock.wait(lambda entry: isinstance(entry.event, StateJoined), within_s=START_S)
        (rock_key,) = (rock.home / "keys").glob("anchor-*.pem")
        bert_is = read_peer(bert.home / "keys" / "peer-0.pem")
        later = ticket_that_names(anna, read_peer(rock_key), bert_is)

        # The maker leaves for good, and its disk with it. The other goes on.
        at = time.time()
        assert anna.send(signal.SIGINT) == 0
        shutil.rmtree(anna.home)
        bert.wait(is_counted(bert_is), after=at)

        # Its first ticket names nobody else: that is said, with what to do. Its later one leads to the anchor.
        refused = subprocess.run(
            [sys.executable, "-P", "-m", "weft", "--home", str(tmp_path / "x"), "join", "-", "--yes", *LOCAL],
            input=first, capture_output=True, text=True, timeout=START_S, check=False,
        )  # fmt: skip
        assert refused.returncode == UNREACHABLE
        said = " ".join(refused.stderr.split())
        assert f"Tried {read(first).contacts[0].peer[:8]}: " in said
        assert "Ask a member for a fresh ticket, which `weft ticket` prints there" in said
        at = time.time()
        clara.run("join", "-", "--yes", "--name", "clara", *LOCAL, given=later)
        clara.wait(lambda entry: isinstance(entry.event, StateJoined), within_s=START_S)
        clara_is = read_peer(clara.home / "keys" / "peer-0.pem")
        bert.wait(is_counted(bert_is, clara_is), after=at, within_s=START_S)

        # All who train are killed; each comes back with a ticket of the maker that left, and they agree.
        for shell in (bert, clara):
            assert shell.process is not None
            os.kill(shell.process.pid, signal.SIGKILL)
        for shell in (bert, clara):
            assert shell.process is not None
            shell.process.wait(STOP_S)
        at = time.time()
        reached = max(last_commit(bert).committed_tokens, last_commit(clara).committed_tokens)
        bert.run("join", "-", "--yes", "--name", "bert", *LOCAL, given=first + "\n")  # it remembers the anchor
        clara.run("join", "-", "--yes", "--name", "clara", *LOCAL, given=later)
        together = bert.wait(
            lambda entry: is_counted(bert_is, clara_is)(entry) and entry.event.committed_tokens > reached,  # type: ignore[attr-defined]
            after=at,
            within_s=START_S + TAKEN_UP_S,
        ).event
        assert isinstance(together, RoundCommitted)
        clara.wait(
            lambda entry: isinstance(entry.event, RoundCommitted) and entry.event.manifest == together.manifest,
            after=at,
        )
        for shell in (bert, clara):
            assert shell.send(signal.SIGINT) == 0
            assert "Traceback" not in shell.said.read_text()
    finally:
        rock.end()
