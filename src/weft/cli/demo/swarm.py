"""Several peers of one machine as processes of their own, started, followed and stopped by the one that shows them.

The first makes the run and prints a ticket, which the others read from their standard input; no ticket is on a command
line or in a file of this folder. Each writes its log below the shared home; `news` returns what was added.

Failure:
- a peer ends with an error: `check` raises, with the code and the last words of that peer.
- this process ends, however: the peers stop by themselves (`weft.cli.process`).
"""

import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO

from weft.errors import PeerError, WeftError
from weft.events import Entry
from weft.ids import RunId
from weft.log import LogTail
from weft.net.ticket import read

DEVICE = "cpu"  # that all have: a demo comes out the same everywhere
_TICKET_WITHIN_S = 300.0  # packing the corpus comes first
_STOP_WITHIN_S = 26.0  # a peer ends by itself before that
_LAST_WORDS = 1500  # characters of what a failed peer said


class PeerFailed(WeftError):
    """A peer of the swarm ended with an error; the exit code is that peer's."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # per instance: the peer's own


class Swarm:
    """Processes in `folder`, which holds their shared home, their reports and what each says."""

    def __init__(self, folder: Path, names: tuple[str, ...], num_threads: int) -> None:
        self.home = folder / "home"
        self.names = names
        self._folder = folder
        self._num_threads = num_threads
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._followed: dict[Path, LogTail] = {}
        self._run: RunId | None = None

    def start(self, run_file: Path) -> RunId:
        """Start all peers and return the run's name once there is one.

        Raises:
            PeerFailed: the first peer ended, or said nothing for minutes.
        """
        first, *others = self.names
        founder = self._spawn(first, "train", str(run_file), "--wait-for", str(len(self.names)))
        ticket = self._first_line(founder)
        for number, name in enumerate(others, 1):
            key = self.home / "keys" / f"peer-{number}.pem"  # several of one home: each says which it is
            process = self._spawn(name, "join", "-", "--yes", "--key", str(key))
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it ended: `check` says why
                process.stdin.write(ticket + "\n")
                process.stdin.close()
        return self.take_up(read(ticket).run)

    def take_up(self, run: RunId) -> RunId:
        """Follow the logs of `run`, which the peers of this folder keep or kept."""
        self._run = run
        return run

    def report(self, name: str) -> Path:
        """Return the file in which a peer says how it ended."""
        return self._folder / f"{name.replace(' ', '-')}.json"

    @property
    def is_running(self) -> bool:
        return any(process.poll() is None for process in self._processes.values())

    def check(self) -> None:
        """
        Raises:
            PeerFailed: a peer ended with an error.
        """
        for name, process in self._processes.items():
            code = process.poll()
            if code:
                raise self._failed(name, code)

    def news(self) -> list[Entry]:
        """Return what the peers logged since the last call, in the order of their clocks."""
        found: list[Entry] = []
        if self._run is not None:
            for log in sorted((self.home / "runs" / self._run).glob("*/log.jsonl")):
                found += self._followed.setdefault(log, LogTail(log)).read()
        return sorted(found, key=lambda entry: entry.at)

    def stop(self) -> None:
        """Ask every peer to say goodbye and save."""
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()

    def end(self) -> None:
        """Leave no process behind: those still running are asked once more, then killed."""
        self.stop()
        for process in self._processes.values():
            try:
                process.wait(_STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()

    def kill(self) -> None:
        for process in self._processes.values():
            process.kill()

    def _spawn(self, name: str, verb: str, *arguments: str) -> "subprocess.Popen[str]":
        self.report(name).unlink(missing_ok=True)
        # -P: nothing in the current folder is mistaken for a module. tls on loopback: no packet leaves the machine.
        command = [sys.executable, "-P", "-m", "weft", "--home", str(self.home), verb, *arguments]
        command += ["--name", name, "--host", "127.0.0.1", "--transports", "tls", "--device", DEVICE, "--quiet"]
        command += ["--threads", str(self._num_threads), "--report", str(self.report(name))]
        command += ["--parent", str(os.getpid())]
        with self._said(name).open("w", encoding="utf-8") as said:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if verb == "train" else subprocess.DEVNULL,
                stderr=said,
                text=True,
                start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on once
            )
        self._processes[name] = process
        return process

    def _first_line(self, process: "subprocess.Popen[str]") -> str:
        lines: queue.Queue[str] = queue.Queue()
        assert process.stdout is not None

        def drain(pipe: IO[str]) -> None:
            with suppress(ValueError, OSError):  # closed at the end
                for line in pipe:
                    lines.put(line)
            lines.put("")

        threading.Thread(target=drain, args=(process.stdout,), daemon=True, name="peer-output").start()
        try:
            line = lines.get(timeout=_TICKET_WITHIN_S).strip()
        except queue.Empty:
            line = ""
        if not line:
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            raise self._failed(self.names[0], process.poll() or PeerError.exit_code)
        return line

    def _failed(self, name: str, code: int) -> PeerFailed:
        words = self._said(name).read_text(encoding="utf-8", errors="replace")[-_LAST_WORDS:].strip()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        said = f"it said: {words}" if words else "it said nothing"
        return PeerFailed(f"{name} {how}; {said}", 128 - code if code < 0 else code)

    def _said(self, name: str) -> Path:
        return self._folder / f"{name.replace(' ', '-')}.log"
