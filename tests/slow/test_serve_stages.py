"""A model in three stages of two members each, as real processes: answers come whole and alike, whoever is killed.

At each moment of an answer, by -9 and by a stop that nobody hears of. Each time a member is killed that computes the
answer just then, of each stage in turn: the answer itself says who that is, and who went on in its place. Tokens are
compared, and their log-probabilities with those of the 20 likeliest others, to the bit: all logits are in each of them.

`WEFT_KILLS=100` kills so many members in one run.
"""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from slow.shell import LOCAL, START_S, Shell
from slow.test_stages import stage_of, wait
from weft.events import Entry, Notice
from weft.ids import short

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
KILLS = (signal.SIGKILL, signal.SIGSTOP)
NUM_KILLS = int(os.environ.get("WEFT_KILLS", "12"))


class Asked(NamedTuple):
    prompt: str
    num_tokens: int


CODE = Asked("def answer(number):\n    return number * 6\n" * 3, 120)
SHORT, NUM_AT_ONCE = Asked("Who is there?", 16), 8
PROSE = Asked("The members of a stage", 120)
READ = Asked("def answer(number):\n    return number * 6\n" * 15, 40)  # it is read in several steps
LONG = Asked(READ.prompt, 640)
FORM = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 3, "maxItems": 3}
IN_PREFILL = -1  # once its path is known, and before a token is
MOMENTS = {IN_PREFILL: READ, 0: PROSE, 1: CODE, 5: PROSE, 64: CODE, 512: LONG}  # after the token of this number
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

    def pieces(self, asks: Asked, number: int) -> Iterator[dict[str, Any]]:
        """Yield an answer's choices as they come; a stream that does not end as streams end fails the test.

        Args:
            number: of the answer: no other one shares pages with it, so its prompt is read.
        """
        line = http.client.HTTPConnection(self._at.hostname or "", self._at.port, timeout=ANSWER_S)
        asked = {"model": "answers", "prompt": asks.prompt, "max_tokens": asks.num_tokens, "logprobs": 20}
        asked |= {"temperature": 0.8, "seed": 7, "stream": True, "ignore_eos": True}
        asked["cache_salt"] = str(number)
        line.request("POST", "/v1/completions", json.dumps(asked), {"content-type": "application/json"})
        reply = line.getresponse()
        assert reply.status == 200, reply.read()
        try:
            for told in reply:
                if told.startswith(b"data: [DONE]"):
                    return
                if told.startswith(b"data: "):
                    event = json.loads(told[6:])
                    assert "error" not in event, event
                    yield from event["choices"]
            raise AssertionError("the stream ended without an end")
        finally:
            line.close()

    def texts(self, asks: Asked) -> Iterator[str]:
        """Yield the same piece by piece, of an answer that may share pages with others."""
        return (choice["text"] for choice in self.pieces(asks, 0))

    def of_form(self, schema: dict[str, Any]) -> str:
        """Return an answer that is held to a schema."""
        line = http.client.HTTPConnection(self._at.hostname or "", self._at.port, timeout=ANSWER_S)
        format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        asked = {"model": "answers", "messages": [{"role": "user", "content": "Who?"}], "response_format": format}
        asked |= {"temperature": 0.8, "seed": 7, "max_tokens": 200}
        line.request("POST", "/v1/chat/completions", json.dumps(asked), {"content-type": "application/json"})
        reply = line.getresponse()
        told = reply.read()
        line.close()
        assert reply.status == 200, told
        (choice,) = json.loads(told)["choices"]
        assert choice["finish_reason"] == "stop"
        return str(choice["message"]["content"])

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def draws(entry: Entry) -> bool:
    return isinstance(entry.event, Notice) and entry.event.text.startswith(DRAWS)


class Told:
    """An answer as far as it has come."""

    def __init__(self) -> None:
        self.text = ""
        self.likely = list[Any]()
        self.course: dict[str, Any] = {}

    def take(self, choice: dict[str, Any]) -> None:
        self.course = choice.get("weft", self.course)
        self.text += choice["text"]
        if (likely := choice["logprobs"]) is not None:
            self.likely += zip(likely["tokens"], likely["token_logprobs"], likely["top_logprobs"], strict=True)

    @property
    def is_whole(self) -> bool:
        return bool(self.text and self.likely and self.course)


def peer_of(shell: Shell) -> str:
    return short(shell.entries()[-1].peer)


def by_stage(shells: list[Shell]) -> list[dict[str, Shell]]:
    """Return who is in each stage, by the first digits of its key."""
    stages = [stage_of(each) for each in shells]
    return [{peer_of(each): each for each, at in zip(shells, stages, strict=True) if at == stage} for stage in range(3)]


def in_path(course: dict[str, Any], there: list[dict[str, Shell]], stays: Shell, stage: int) -> Shell:
    """Return a member of the path, of this stage or the next that has one who may be killed: nobody who is alone in its
    stage, and not who stays."""
    for at in (stage, (stage + 1) % 3, (stage + 2) % 3):
        found = there[at].get(course["members"][at])
        if found is not None and found is not stays and len(there[at]) > 1:
            return found
    raise AssertionError(f"nobody of {course['members']} can be killed; in the stages are {list(map(list, there))}")


def is_back(served: Answers, member: str) -> bool:
    """Return whether answers come by a member again: some are asked at once, so that they are shared out."""

    def members(number: int) -> list[str]:
        told = Told()
        for choice in served.pieces(SHORT, number):
            told.take(choice)
        return list(told.course["members"])

    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        return any(member in found for found in list(pool.map(members, range(NUM_AT_ONCE))))


def test_answers_come_whole_and_the_same_though_a_member_of_their_path_is_killed_in_the_middle_of_each(tmp_path):
    shells = [Shell(tmp_path / f"peer{number}") for number in range(6)]
    served: Answers | None = None
    first, *others = shells
    for shell in shells:
        (shell.folder / "machine.toml").write_text("serve_nbytes = 200_000_000\n")
    (first.folder / "text.txt").write_text("".join(f"def f{n}(x):\n    return x * {n}\n" for n in range(20_000)))
    (first.folder / "run.toml").write_text(RUN)
    machine = (*LOCAL, "--machine", "machine.toml")
    try:
        first.run("train", "run.toml", "--wait-for", "6", *machine)
        ticket = first.ticket()
        for shell in others:
            shell.run("join", "-", "--yes", *machine, given=ticket)
        for shell in shells:
            shell.wait(draws, within_s=START_S)
        assert "no effect" not in first.said.read_text()
        served = Answers(tmp_path / "serves", ticket)
        expected = {asks: Told() for asks in MOMENTS.values()}
        for number, (asks, told) in enumerate(expected.items()):
            for choice in served.pieces(asks, -1 - number):
                told.take(choice)
            assert told.is_whole
            assert told.course["mends"] == []
        formed = {served.of_form(FORM) for _ in range(2)}
        assert [len(json.loads(each)) for each in formed] == [3]
        # The founder stays: with it the run's ticket would go.
        cases = [(kill, moment) for kill in KILLS for moment in MOMENTS]
        for number, (kill, moment) in enumerate(islice(cycle(cases), NUM_KILLS)):
            wait(lambda: all(len(each) > 1 for each in by_stage(shells)), BACK_S)
            asks, told, there, killed = MOMENTS[moment], Told(), by_stage(shells), None
            for choice in served.pieces(asks, number):
                told.take(choice)
                if killed is None and told.course and len(told.likely) > moment:
                    assert moment != IN_PREFILL or not told.likely, "its path was told later than its first token"
                    killed = in_path(told.course, there, first, (number + number // len(cases)) % 3)
                    assert killed.process is not None
                    killed.process.send_signal(kill)
            case = number, kill, moment, told.course
            assert killed is not None, f"nobody was killed: the answer has too few tokens: {case}"
            assert killed.process is not None
            assert (told.text, told.likely) == (expected[asks].text, expected[asks].likely), case
            gone = peer_of(killed)
            (mend,) = [each for each in told.course["mends"] if each["before"] == gone]
            assert mend["why"] in ("parted", "silent", "declined"), case
            assert 0 < mend["pause_s"] < ANSWER_S, case
            assert gone not in told.course["members"], case
            began = time.time()
            if kill == signal.SIGKILL:
                killed.run("join", "-", "--yes", *machine, given=ticket)
                killed.wait(draws, after=began, within_s=BACK_S)
            else:
                killed.process.send_signal(signal.SIGCONT)
            wait(partial(is_back, served, gone), BACK_S)
        assert served.said.read_text().count("an answer goes on with ") >= min(2, NUM_KILLS)
    finally:
        for shell in shells:
            shell.end()
        if served is not None:
            served.end()
