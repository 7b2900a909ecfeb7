"""A signal to end at a moment when no peer runs: while modules are imported, and once the peer has ended."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from weft.cli.signals import NOTHING_TO_SAVE, verb_of

TERM, INT = signal.SIGTERM, signal.SIGINT
SLOW = "import time\nprint('here', flush=True)\ntime.sleep(60)\n"


def ended(command: list[str], sent: signal.Signals, **environment: str) -> tuple[int, str, str]:
    """Return the code of a process that is sent a signal once it says a word, what it says then, and of errors."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(sent)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err


@pytest.mark.parametrize("sent", [TERM, INT])
@pytest.mark.parametrize(
    ("verb", "code", "said"),
    [("train", 0, f"{NOTHING_TO_SAVE}\n"), ("join", 0, f"{NOTHING_TO_SAVE}\n"), ("plan", None, "")],
)
def test_a_signal_while_modules_are_imported(
    verb: str, code: int | None, said: str, sent: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "typer.py").write_text(SLOW)  # in the place of the first module that the command line imports
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-m", "weft", "--home", str(tmp_path / "train"), verb]
    assert ended(command, sent, PYTHONPATH=path) == (128 + sent if code is None else code, "", said)


AFTER = """
import asyncio, os, signal, sys, time
from weft.cli.process import Stopper, run_loop
from weft.cli.screen.screen import Screen
from weft.cli.signals import Outside

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid()):
        kill(pid, signal.SIGTERM)

Outside(["train"]).install()
stopper = Stopper(Screen())

async def main():
    stopper.install(asyncio.get_running_loop())

run_loop(main())
stopper.remove()
print("here", flush=True)
time.sleep(1.0)
print("how it ended", flush=True)
last = Last()  # goes when Python itself ends
"""


@pytest.mark.parametrize("sent", [TERM, INT])
def test_a_peer_that_has_ended_says_how_whatever_signal_comes(sent: signal.Signals) -> None:
    assert ended([sys.executable, "-c", AFTER], sent) == (0, "how it ended\n", "")


UNDOES = """
import asyncio, os, sys, time
from weft.cli import process
from weft.cli.screen.screen import Screen
from weft.cli.signals import Outside, undone

Outside(["train"]).install()
process._REST_S = 0.3

async def main():
    stopper.install(asyncio.get_running_loop())
    print("here", flush=True)
    await asyncio.to_thread(time.sleep, 30.0)  # what nobody can break off

def undo():
    os.unlink(sys.argv[1])
    return "it is removed again"

with undone(undo):
    if sys.argv[2] == "before":
        print("here", flush=True)
        time.sleep(30.0)
    stopper = process.Stopper(Screen())
    process.run_loop(main())
"""


@pytest.mark.parametrize("when", ["before", "while it is prepared"])
def test_what_was_made_for_a_peer_that_never_began_is_taken_back(when: str, tmp_path: Path) -> None:
    made = tmp_path / "notes.toml"
    made.write_text("name = 'notes'")
    code, _, said = ended([sys.executable, "-c", UNDOES, str(made), when], INT)
    assert code == 0
    assert said.endswith(f"{NOTHING_TO_SAVE}\nit is removed again\n")
    assert not made.exists()


@pytest.mark.parametrize(
    ("line", "verb"),
    [("train run.toml", "train"), ("--home train join x", "join"), ("--home=train --version", ""), ("--home", "")],
)
def test_the_verb_is_told_from_the_options_before_it(line: str, verb: str) -> None:
    assert verb_of(line.split()) == verb
