"""Persons' shells on one machine: a folder, a home, and the commands typed there, as real processes."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from weft.events import Entry
from weft.log import read_jsonl


def run_of(head: str, train: str) -> str:
    """Return a run file of a small model on text.txt.

    Args:
        head: lines of the file's top.
        train: lines of [train], beside the size of a batch.
    """
    return f"""
{head}
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
{train}
[train.schedule]
type = "constant"
[method]
type = "diloco"
every = 20
"""


RUN = run_of(
    'name = "two shells"\npeers = 2\norphan_after_s = 5.0',
    "tokens = 4_000_000_000\nevaluate_every = 1000\nevaluate_windows = 4",
)
LOCAL = ("--threads", "1", "--host", "127.0.0.1", "--transports", "tls", "--device", "cpu")
START_S, COMMIT_S, STOP_S = 120.0, 90.0, 25.0
TYPED_S = 240.0  # within which a command that trains a little ends


def typed(home: Path, folder: Path, *arguments: str | Path, enter: tuple[str, ...] = ()) -> str:
    """Return what a command prints; one that fails, or does not end, fails the test.

    Args:
        folder: where it is typed.
        enter: what runs it in a network of its own.
    """
    command = [*enter, sys.executable, "-P", "-m", "weft", "--home", str(home), *map(str, arguments)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=TYPED_S, check=False, cwd=folder)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


class Shell:
    """One person's shell: a folder, a home, and the commands typed there."""

    def __init__(self, folder: Path, home: Path | None = None) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.home = home or folder / "home"
        self.said = folder / "said"
        self.enter: tuple[str, ...] = ()  # what runs a command in a network of its own
        self.python: tuple[str, ...] = (sys.executable, "-P")
        self.program: tuple[str, ...] = (*self.python, "-m", "weft")
        self.process: subprocess.Popen[str] | None = None

    def run(self, *arguments: str, given: str = "", ranks: int = 0) -> None:
        """Type a command.

        Args:
            ranks: processes that torchrun starts for it; 0: it is started as it is.
        """
        self.end()
        program = self.program
        if ranks:
            several = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
            program = (sys.executable, *several, "-m", "weft")
        command = [*self.enter, *program, "--home", str(self.home), *arguments]
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
        assert line.startswith("weft2"), self.said.read_text()
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
            with suppress(psutil.NoSuchProcess):  # the ranks of a site outlive who started them
                for child in psutil.Process(self.process.pid).children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        child.kill()
            self.process.kill()
            self.process.wait()
            if self.process.stdout is not None:
                self.process.stdout.close()
