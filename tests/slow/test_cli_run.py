"""Real processes from the command line: two shells, goodbyes, kills, several peers in one home."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from weft.events import Entry, MemberGone, MemberLeft, MemberSuspected, RoundCommitted, read_jsonl
from weft.ids import PeerId
from weft.keys import read_peer
from weft.net.ticket import read

pytestmark = pytest.mark.slow

RUN = """
name = "two shells"
peers = 2
orphan_after_s = 5.0
[model]
type = "shape"
num_layers = 1
num_heads = 2
width = 32
ffn_width = 64
[data.source]
type = "text"
paths = ["text.txt"]
[train]
seq_len = 64
batch_size = 4
tokens = 4_000_000_000
evaluate_every = 1000
evaluate_windows = 4
[train.schedule]
type = "constant"
[method]
type = "diloco"
every = 20
"""
LOCAL = ("--threads", "1", "--host", "127.0.0.1", "--transports", "tls", "--device", "cpu")
START_S, COMMIT_S, STOP_S = 120.0, 90.0, 25.0


class Shell:
    """One person's shell: a folder, a home, and the commands typed there."""

    def __init__(self, folder: Path, home: Path | None = None) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.home = home or folder / "home"
        self.said = folder / "said"
        self.process: subprocess.Popen[str] | None = None

    def run(self, *arguments: str, given: str = "") -> None:
        self.end()
        command = [sys.executable, "-P", "-m", "weft", "--home", str(self.home), *arguments]
        with self.said.open("a") as said:
            self.process = subprocess.Popen(
                command, cwd=self.folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said
            )
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(given)
            self.process.stdin.close()

    def ticket(self) -> str:
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line.startswith("weft1"), self.said.read_text()
        return line

    def send(self, number: signal.Signals) -> int:
        """Send a signal and return the exit code; a process that does not end in time fails the test."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(STOP_S)

    def entries(self) -> list[Entry]:
        return [entry for log in self.home.glob("runs/*/*/log.jsonl") for entry in read_jsonl(log)]

    def wait(self, is_there: Callable[[Entry], bool], *, after: float = 0.0, within_s: float = COMMIT_S) -> Entry:
        """Return the first event after the wall time `after` for which `is_there` holds."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            for entry in self.entries():
                if entry.at > after and is_there(entry):
                    return entry
            assert self.process is None or self.process.poll() is None, self.said.read_text()
            time.sleep(0.2)
        raise AssertionError(f"it did not happen within {within_s} s; said:\n{self.said.read_text()}")

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            if self.process.stdout is not None:
                self.process.stdout.close()


@pytest.fixture
def shells(tmp_path: Path) -> Iterator[Callable[..., Shell]]:
    opened: list[Shell] = []

    def shell(name: str, home: Path | None = None) -> Shell:
        opened.append(Shell(tmp_path / name, home))
        return opened[-1]

    yield shell
    for each in opened:
        each.end()


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(20_000)))
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


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
    anna_is = read(ticket).issuer

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


def test_a_second_signal_ends_at_once(shells: Callable[..., Shell], run_file: Path) -> None:
    alone = shells("alone")
    alone.run("train", str(run_file), *LOCAL)
    alone.ticket()
    alone.wait(lambda entry: isinstance(entry.event, RoundCommitted), within_s=START_S)
    assert alone.process is not None
    os.kill(alone.process.pid, signal.SIGSTOP)  # so that both signals are there when it goes on
    os.kill(alone.process.pid, signal.SIGINT)
    os.kill(alone.process.pid, signal.SIGTERM)
    os.kill(alone.process.pid, signal.SIGCONT)
    assert alone.process.wait(STOP_S) in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    assert "again" in alone.said.read_text()


def test_a_signal_before_the_run_begins_is_no_failure(shells: Callable[..., Shell], run_file: Path) -> None:
    early = shells("early")
    early.run("train", str(run_file), "--wait-for", "9", *LOCAL)
    early.ticket()
    assert early.send(signal.SIGINT) == 0
