"""A model in three stages of two members each, as real processes: answers come whole and alike, whoever is killed.

At each moment of an answer, by -9 and by a stop that nobody hears of.
"""

import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from threading import Timer
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from slow.shell import LOCAL, START_S, Shell
from slow.test_stages import stage_of, wait
from weft.events import Entry, Notice

pytestmark = pytest.mark.slow

# It trains all the while, at a rate at which no weight changes: answers of all rounds are the same.
RUN = """
name = "answers"
peers = 6
stages = 3
model = {type = "shape", num_layers = 6, num_heads = 4, width = 64, ffn_width = 128, is_tied = false}
pipeline = {micro_batch = 1, activations = {type = "fp32"}}
data = {source = {type = "text", paths = ["text.txt"]}}
train = {seq_len = 2048, batch_size = 1, tokens = 4_000_000_000, schedule = {type = "constant", lr = 1e-30}, \
evaluate_every = 0, evaluate_windows = 4}
method = {type = "ddp"}
"""
IN_PREFILL_S = 0.1  # after it is asked
KILLS = (signal.SIGKILL, signal.SIGSTOP)


class Asked(NamedTuple):
    prompt: str
    num_tokens: int


CODE = Asked("def answer(number):\n    return number * 6\n" * 3, 120)
PROSE = Asked("The members of a stage", 120)
LONG = Asked("def answer(number):\n    return number * 6\n" * 15, 1300)  # it is read in several steps
MOMENTS = {"in prefill": LONG, 0: PROSE, 1: CODE, 5: PROSE, 64: CODE, 512: LONG}  # after so many pieces
DRAWS = "this peer draws text"
ANSWER_S, BACK_S = 60.0, 90.0


class Answers:
    """`weft serve` on the ticket of a run: a process of its own, which trains nothing."""

    def __init__(self, folder: Path, ticket: str) -> None:
        folder.mkdir()
        command = [sys.executable, "-P", "-m", "weft", "--home", str(folder / "home"), "serve", "-", "--port", "0"]
        self.said = folder / "said"
        with self.said.open("w") as said:
            self.process = subprocess.Popen(
                [*command, "--transports", "tls"], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(ticket)
        self.process.stdin.close()
        address = self.process.stdout.readline().strip()
        assert address.startswith("http"), self.said.read_text()
        self._at = urlsplit(address)

    def pieces(self, asks: Asked, once_asked: Callable[[], object] | None = None) -> Iterator[str]:
        """Yield an answer as it comes; a stream that does not end as streams end fails the test."""
        line = http.client.HTTPConnection(self._at.hostname or "", self._at.port, timeout=ANSWER_S)
        asked = {"model": "answers", "prompt": asks.prompt, "max_tokens": asks.num_tokens}
        asked |= {"temperature": 0.8, "seed": 7, "stream": True, "ignore_eos": True}
        line.request("POST", "/v1/completions", json.dumps(asked), {"content-type": "application/json"})
        if once_asked is not None:
            once_asked()
        reply = line.getresponse()
        assert reply.status == 200, reply.read()
        try:
            for told in reply:
                if told.startswith(b"data: [DONE]"):
                    return
                if told.startswith(b"data: "):
                    event = json.loads(told[6:])
                    assert "error" not in event, event
                    yield from (each["text"] for each in event["choices"] if each["text"])
            raise AssertionError("the stream ended without an end")
        finally:
            line.close()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def draws(entry: Entry) -> bool:
    return isinstance(entry.event, Notice) and entry.event.text.startswith(DRAWS)


def test_answers_come_whole_and_the_same_though_each_member_is_killed_in_the_middle_of_one(tmp_path):
    shells = [Shell(tmp_path / f"peer{number}") for number in range(6)]
    served: Answers | None = None
    first, *others = shells
    for shell in shells:
        (shell.folder / "machine.toml").write_text("serve_nbytes = 200_000_000\n")
    (first.folder / "text.txt").write_text("".join(f"def f{n}(x):\n    return x * {n}\n" for n in range(20_000)))
    (first.folder / "run.toml").write_text(RUN)
    machine = (*LOCAL, "--machine", "machine.toml")
    hits = 0
    try:
        first.run("train", "run.toml", "--wait-for", "6", *machine)
        ticket = first.ticket()
        for shell in others:
            shell.run("join", "-", "--yes", *machine, given=ticket)
        for shell in shells:
            shell.wait(draws, within_s=START_S)
        assert "no effect" not in first.said.read_text()
        served = Answers(tmp_path / "serves", ticket)
        expected = {asks: "".join(served.pieces(asks)) for asks in (CODE, PROSE, LONG)}
        assert all(expected.values())
        # The founder stays: with it the run's ticket would go.
        cases = [(kill, moment) for kill in KILLS for moment in MOMENTS]
        for (kill, moment), shell in zip(cases, cycle(others), strict=False):
            assert shell.process is not None
            ends = partial(shell.process.send_signal, kill)
            soon = Timer(IN_PREFILL_S, ends)
            asks = MOMENTS[moment]
            text, gaps, at = "", list[float](), time.monotonic()
            for place, piece in enumerate(served.pieces(asks, soon.start if moment == "in prefill" else None)):
                gaps.append(time.monotonic() - at)
                if place == moment:
                    ends()
                text, at = text + piece, time.monotonic()
            assert text == expected[asks], (kill, moment)
            assert not isinstance(moment, int) or len(gaps) > moment, "nobody was killed: the answer has too few pieces"
            hits += max(gaps[1 + moment :] if isinstance(moment, int) else gaps) > 0.25
            began = time.time()
            if kill == signal.SIGKILL:
                shell.run("join", "-", "--yes", *machine, given=ticket)
                shell.wait(draws, after=began, within_s=BACK_S)
            else:
                shell.process.send_signal(signal.SIGCONT)
                time.sleep(5.0)
            wait(lambda: len({stage_of(each) for each in shells}) == 3, BACK_S)
        assert hits >= 2, "of two members of a stage one was in the path each time"
        assert served.said.read_text().count("an answer goes on with ") >= 2
    finally:
        for shell in shells:
            shell.end()
        if served is not None:
            served.end()
