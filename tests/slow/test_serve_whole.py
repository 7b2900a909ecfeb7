"""Members of a run without stages answer whoever has a ticket while they train, as real processes; one is killed."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slow.shell import COMMIT_S, LOCAL, START_S, Shell
from slow.test_serve_stages import ANSWER_S, Answers, Asked, draws
from slow.test_stages import wait
from weft.events import RoundCommitted

pytestmark = pytest.mark.slow

RUN = """
name = "answers"
peers = 2
orphan_after_s = 5.0
model = {type = "shape", num_layers = 4, num_heads = 4, width = 128, ffn_width = 256}
data = {source = {type = "text", paths = ["text.txt"]}}
train = {seq_len = 1024, batch_size = 1, tokens = 4_000_000_000, schedule = {type = "constant", lr = 1e-3}, \
evaluate_every = 0, evaluate_windows = 4}
method = {type = "diloco", every = 5}
"""
ASKED = Asked("def answer(number):\n    return number * 6\n", 600)
MOVED = "an answer goes on with "
NUM = 4  # answers at a time


def status_of(shell: Shell) -> str:
    command = [sys.executable, "-P", "-m", "weft", "--home", str(shell.home), "status", "last"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=START_S).stdout


def test_an_answer_goes_on_at_another_member_and_who_asks_is_no_peer(tmp_path: Path) -> None:
    shells = [Shell(tmp_path / name) for name in ("first", "second")]
    first, second = shells
    served: Answers | None = None
    for shell in shells:
        (shell.folder / "machine.toml").write_text("serve_nbytes = 200_000_000\n")
    (first.folder / "text.txt").write_text("".join(f"def f{n}(x):\n    return x * {n}\n" for n in range(20_000)))
    (first.folder / "run.toml").write_text(RUN)
    machine = (*LOCAL, "--machine", "machine.toml")
    try:
        first.run("train", "run.toml", "--wait-for", "2", *machine)
        ticket = first.ticket()
        second.run("join", "-", "--yes", *machine, given=ticket)
        for shell in shells:
            shell.wait(draws, within_s=START_S)
        served = Answers(tmp_path / "serves", ticket)
        assert len("".join(served.texts(ASKED))) >= ASKED.num_tokens // 2
        said = status_of(first)
        _, *rows = said.partition("watching: 1\n")[0].splitlines()
        assert len(rows) == len(shells), said

        began, texts = time.time(), [""] * NUM

        def ask(number: int) -> None:
            for piece in served.texts(ASKED._replace(prompt=f"def f{number}(x):")):
                texts[number] += piece

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(NUM)]
        for thread in threads:
            thread.start()
        wait(lambda: all(map(len, texts)), ANSWER_S)
        # Who stands still for a moment loses those that it draws; where it draws none, the other one draws all.
        first.process.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        before = [len(text) for text in texts]
        wait(
            lambda: (
                MOVED in served.said.read_text()
                or all(len(text) > num for text, num in zip(texts, before, strict=True))
            ),
            ANSWER_S,
        )
        first.process.send_signal(signal.SIGCONT)
        second.end()
        for thread in threads:
            thread.join()
        assert all(len(text) >= ASKED.num_tokens // 2 for text in texts)
        assert MOVED in served.said.read_text()
        first.wait(lambda entry: isinstance(entry.event, RoundCommitted), after=began, within_s=COMMIT_S)
    finally:
        for shell in shells:
            shell.end()
        if served is not None:
            served.end()
