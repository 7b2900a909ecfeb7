"""Examples in processes of their own, on loopback.

a = Process(tmp_path, "a", "plain_loop.py", "--wait-for", "2")
with ending(a):
    ticket = a.ticket()
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from example import EXAMPLES

ENDS_S = 120.0
SETTINGS = 'transports = ["tls"]\ndevice = "cpu"\n[tls]\nhost = "127.0.0.1"\n'


class Process:
    """One process of an example, and what it says."""

    def __init__(self, folder: Path, name: str, example: str, *arguments: str, ticket: str = "") -> None:
        self.home = folder / name
        (folder / "machine.toml").write_text(SETTINGS)
        command = [sys.executable, str(EXAMPLES / example), "--home", str(self.home)]
        command += ["--machine", str(folder / "machine.toml"), *arguments]
        # Several processes on few cores: threads that wait for each other take all of them.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WEFT_TICKET": ticket}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=environment
        )

    def ticket(self) -> str:
        """Return the ticket that it prints, once it does."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"ticket='(weft2[^']+)'", line):
                return found[1]
        raise AssertionError("it ended without a ticket")

    def done(self) -> str:
        """Return what it printed, once it has ended well."""
        said, complaints = self.process.communicate(timeout=ENDS_S)
        assert self.process.returncode == 0, complaints
        return said

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=ENDS_S)


@contextmanager
def ending(*processes: Process) -> Iterator[None]:
    try:
        yield
    finally:
        for each in processes:
            each.kill()


def replica(said: str) -> str:
    found = re.search(r"^replica ([0-9a-f]{64})$", said, re.MULTILINE)
    assert found, said
    return found[1]
