"""A model in three stages of two members each, as real processes: answers come whole and alike, whoever is killed.

At each moment of an answer, by -9 and by a stop that nobody hears of. Each time a member is killed that computes the
answer just then, of each stage in turn: the answer itself says who that is, and who went on in its place. Tokens are
compared, and their log-probabilities with those of the 20 likeliest others, to the bit: all logits are in each of them.
How long no token came is told in a table at the end (`-s` shows it), and bounded far on in a text. The last test puts
the model together, and lets one machine answer.

`WEFT_KILLS=100` kills so many members in one run; with 36 each stage's is killed at each moment in both ways.
"""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count, cycle, islice, pairwise, product
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from slow.shell import LOCAL, Shell
from slow.test_stages import stage_of, wait
from weft.events import Entry, Notice
from weft.ids import short
from weft.texts.asking.patience import GAPS, LEAST_S, NUM_GAPS
from weft.texts.asking.under_way import OPEN_S

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
    temperature: float = 0.8


LINES = "def answer(number):\n    return number * 6\n"
CODE = Asked(LINES * 3, 120)
SHORT, NUM_AT_ONCE = Asked("Who is there?", 16), 8
PROSE = Asked("The members of a stage", 120)
READ = Asked(LINES * 15, 40)  # it is read in several steps
LONG = Asked(READ.prompt, 640)
FAR = 512  # tokens of it that are there when a member is killed
AS_LONG = Asked((LINES * 30)[: len(LONG.prompt) + FAR], 1)
ONE_BYTE = Asked("x", 1)
SAME = [Asked(f"The answer of member {number}", 24, temperature=0.0) for number in range(50)]
FORM = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 3, "maxItems": 3}
IN_PREFILL = -1  # once its path is known, and before a token is
# After the token of this number.
MOMENTS = {FAR: LONG, IN_PREFILL: READ, 0: PROSE, 1: CODE, 5: PROSE, 64: CODE}
DRAWS = "this peer draws text"
ANSWER_S, BACK_S, DRAWS_S = 60.0, 180.0, 400.0  # on a machine that does much beside
MEND_S = 1.0  # that a mend may take, beside twice the reading of a section


class Answers:
    """`weft serve`, a process of its own, which trains nothing.

    Args:
        ticket: of the run whose members compute; empty: this machine has the model.
        given: what is typed behind `serve`.
    """

    def __init__(self, folder: Path, ticket: str, given: tuple[str, ...] = ("-", "--transports", "tls")) -> None:
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-P", "-m", "weft", "--home", str(folder / "home"), "serve", *given, "--port", "0"]
        self.said = folder / "said serving"
        with self.said.open("w") as said:
            self.process = subprocess.Popen(
                command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(ticket)
        self.process.stdin.close()
        address = self.process.stdout.readline().strip()
        assert address.startswith("http"), self.said.read_text()
        self._at = urlsplit(address)

    def pieces(self, asks: Asked, number: int) -> Generator[dict[str, Any], None, None]:
        """Yield an answer's choices as they come; a stream that does not end as streams end fails the test.

        Args:
            number: of the answer: no other one shares pages with it, so its prompt is read.
        """
        line = http.client.HTTPConnection(self._at.hostname or "", self._at.port, timeout=ANSWER_S)
        asked = {"model": "answers", "prompt": asks.prompt, "max_tokens": asks.num_tokens, "logprobs": 20}
        asked |= {"temperature": asks.temperature, "seed": 7, "stream": True, "ignore_eos": True}
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
    """An answer as far as it has come.

    Args:
        came_at: of each token, when it was here.
    """

    def __init__(self) -> None:
        self.text = ""
        self.likely = list[Any]()
        self.came_at = list[float]()
        self.course: dict[str, Any] = {}

    def take(self, choice: dict[str, Any]) -> None:
        self.course = choice.get("weft", self.course)
        self.text += choice["text"]
        if (likely := choice["logprobs"]) is not None:
            self.likely += zip(likely["tokens"], likely["token_logprobs"], likely["top_logprobs"], strict=True)
            self.came_at += [time.monotonic()] * (len(self.likely) - len(self.came_at))

    @property
    def is_whole(self) -> bool:
        return bool(self.text and self.likely and self.course)

    def patience_s(self, num: int) -> float:
        """Return how long its next token is waited for after so many, as docs/serving.md says."""
        gaps = [after - before for before, after in pairwise(self.came_at[:num])][-NUM_GAPS:]
        return max(LEAST_S, GAPS * quantiles(gaps, n=20)[-1])


class Pause(NamedTuple):
    """A mend, as the answer tells it.

    Args:
        patience_s: how long silence was waited for; 0: there was none.
    """

    kill: signal.Signals
    moment: int
    stage: int
    why: str
    pause_s: float
    patience_s: float

    @property
    def where(self) -> str:
        return "in prefill" if self.moment == IN_PREFILL else f"token {self.moment}"


def table(pauses: list[Pause], reading_s: float) -> str:
    """Return the pauses of mends by moment and signal, seconds, and of which stage a member was killed."""
    lines = ["", f"{'killed':<12}" + "".join(f"{kill.name:>34}" for kill in KILLS)]
    for moment in MOMENTS:
        row = ""
        for kill in KILLS:
            some = [each for each in pauses if (each.moment, each.kill) == (moment, kill)]
            row += f"{', '.join(f'{each.pause_s:.2f} (stage {each.stage + 1}, {each.why})' for each in some):>34}"
            where = some[0].where if some else ""
        lines.append(f"{where:<12}" + row)
    waited = [each for each in pauses if each.patience_s]
    lines += [f"patience at {each.where}, stage {each.stage + 1}: {each.patience_s:.2f} s" for each in waited]
    return "\n".join([*lines, f"one section reads {len(AS_LONG.prompt)} tokens in {reading_s:.2f} s"])


def peer_of(shell: Shell) -> str:
    return short(shell.entries()[-1].peer)


def by_stage(shells: list[Shell]) -> list[dict[str, Shell]]:
    """Return who is in each stage, by the first digits of its key."""
    stages = [stage_of(each) for each in shells]
    return [{peer_of(each): each for each, at in zip(shells, stages, strict=True) if at == stage} for stage in range(3)]


class Company:
    """Six peers that train, and `weft serve` on the ticket of their run. The founder stays: its ticket would go."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shells = [Shell(folder / f"peer{number}") for number in range(6)]
        self.machine = (*LOCAL, "--machine", "machine.toml")
        self.ticket = ""
        self.served: Answers
        self._ends = list[Shell | Answers](self.shells)
        self._numbers = count()  # no two answers share pages

    def start(self) -> None:
        first, *others = self.shells
        for shell in self.shells:
            (shell.folder / "machine.toml").write_text("serve_nbytes = 200_000_000\n")
        (first.folder / "text.txt").write_text("".join(f"def f{n}(x):\n    return x * {n}\n" for n in range(20_000)))
        (first.folder / "run.toml").write_text(RUN)
        first.run("train", "run.toml", "--wait-for", "6", *self.machine)
        self.ticket = first.ticket()
        for shell in others:
            shell.run("join", "-", "--yes", *self.machine, given=self.ticket)
        for shell in self.shells:
            shell.wait(draws, within_s=DRAWS_S)
        assert "no effect" not in first.said.read_text()
        self.served = Answers(self.folder / "serves", self.ticket)
        self._ends.append(self.served)

    def end(self) -> None:
        for each in self._ends:
            each.end()

    def whole(self, asks: Asked, served: Answers | None = None) -> Told:
        """Return an answer from its beginning to its end.

        Args:
            served: by whom; None: by the members.
        """
        told = Told()
        for choice in (served or self.served).pieces(asks, next(self._numbers)):
            told.take(choice)
        return told

    def unmended(self, asks: Asked) -> Told:
        """Return an answer in which nobody took over, but where it outlived its weights: on a machine that does much
        beside, members may fall silent."""
        for _ in range(3):
            told = self.whole(asks)
            if all(mend["why"] == "old weights" for mend in told.course["mends"]):
                return told
        raise AssertionError(told.course)

    def gathered(self) -> Answers:
        """Put the model together, and let one machine serve it, in the numbers that members have."""
        visitor = Shell(self.folder / "visitor")
        self._ends.append(visitor)
        visitor.run("gather", "-", "--transports", "tls", given=self.ticket)
        assert visitor.process is not None
        assert visitor.process.wait(BACK_S) == 0, visitor.said.read_text()
        found = Answers(visitor.folder, "", ("last", "--name", "answers", "--numbers", "exact", "--threads", "1"))
        self._ends.append(found)
        return found

    def reading_s(self) -> float:
        """Return how long one section takes to read the text in whose middle members are killed: a third of what all do
        before the first token, which also beside training takes longer than that of a text of one byte."""
        firsts = [[self._first_s(asks) for _ in range(5)] for asks in (AS_LONG, ONE_BYTE)]
        long_s, short_s = map(median, firsts)
        assert long_s > short_s
        return (long_s - short_s) / 3

    def _first_s(self, asks: Asked) -> float:
        began = time.monotonic()
        return self.whole(asks).came_at[0] - began

    def by(self, asks: Asked, stage: int) -> tuple[Generator[dict[str, Any], None, None], Told, Shell]:
        """Begin an answer whose path has a member of a stage that may be killed: not the founder, and nobody who is
        alone there. Return what is to come of it, what has come, and that member.

        Answers that come by others stay for as long: a path is dearer with each that takes it.
        """
        deadline = time.monotonic() + BACK_S
        while time.monotonic() < deadline:
            wait(lambda: all(len(each) > 1 for each in by_stage(self.shells)), BACK_S)
            there = by_stage(self.shells)[stage]
            others = list[Generator[dict[str, Any], None, None]]()
            try:
                for _ in range(NUM_AT_ONCE):
                    pieces, told = self.served.pieces(asks, next(self._numbers)), Told()
                    while not told.course:
                        told.take(next(pieces))
                    found = there.get(told.course["members"][stage])
                    if found is not None and found is not self.shells[0]:
                        return pieces, told, found
                    others.append(pieces)
            finally:
                for each in others:
                    each.close()
        raise AssertionError(f"no answer comes by a member of stage {stage + 1} that may be killed: {list(there)}")

    def is_back(self, member: str) -> bool:
        """Return whether answers come by a member again: some are asked at once, so that they are shared out."""
        with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
            found = pool.map(lambda asks: self.whole(asks).course["members"], [SHORT] * NUM_AT_ONCE)
            return any(member in members for members in list(found))

    def bring_back(self, shell: Shell, kill: signal.Signals) -> None:
        """Start a member again that was killed, or let it go on, until answers come by it."""
        gone, began = peer_of(shell), time.time()
        if kill == signal.SIGKILL:
            shell.run("join", "-", "--yes", *self.machine, given=self.ticket)
            shell.wait(draws, after=began, within_s=BACK_S)
        else:
            assert shell.process is not None
            shell.process.send_signal(signal.SIGCONT)
        wait(partial(self.is_back, gone), BACK_S)

    def _until(self, asks: Asked, moment: int, stage: int) -> tuple[Generator[dict[str, Any], None, None], Told, Shell]:
        """As `by`, once the answer is so far on; one whose path has changed by then does not count."""
        deadline = time.monotonic() + BACK_S
        while time.monotonic() < deadline:
            pieces, told, member = self.by(asks, stage)
            while len(told.likely) <= moment:
                told.take(next(pieces))
            if told.course["members"][stage] == peer_of(member):
                return pieces, told, member
            pieces.close()
        raise AssertionError(f"answers do not stay with a member of stage {stage + 1}: {told.course}")

    def killed(self, asks: Asked, kill: signal.Signals, moment: int, stage: int, expected: Told) -> Pause:
        """Kill a member of a stage in the middle of an answer, which is to be as expected; return how it was mended."""
        pieces, told, member = self._until(asks, moment, stage)
        gone = peer_of(member)
        assert moment != IN_PREFILL or not told.likely, "its path was told later than its first token"
        assert member.process is not None
        member.process.send_signal(kill)
        for choice in pieces:
            told.take(choice)
        case = kill, moment, stage, told.course
        assert (told.text, told.likely) == (expected.text, expected.likely), case
        (mend,) = [each for each in told.course["mends"] if each["before"] == gone]
        assert mend["stage"] == stage + 1, case
        assert mend["why"] in ("parted", "silent", "declined"), case
        assert 0 < mend["pause_s"] < ANSWER_S, case
        assert gone not in told.course["members"], case
        is_waited_for = mend["why"] == "silent" and mend["after_tokens"] > 2
        patience_s = told.patience_s(mend["after_tokens"]) if is_waited_for else 0.0
        self.bring_back(member, kill)
        return Pause(kill, moment, stage, mend["why"], mend["pause_s"], patience_s)


@pytest.fixture(scope="module")
def company(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Company]:
    company = Company(tmp_path_factory.mktemp("company"))
    try:
        company.start()
        yield company
    finally:
        company.end()


def test_answers_come_whole_and_the_same_though_a_member_of_their_path_is_killed_in_the_middle_of_each(
    company: Company,
) -> None:
    expected = dict[Asked, Told]()
    formed = {company.served.of_form(FORM) for _ in range(2)}
    assert [len(json.loads(each)) for each in formed] == [3]
    reading_s, pauses = company.reading_s(), list[Pause]()
    cases = list(enumerate(product(MOMENTS, KILLS)))
    try:
        for number, (case, (moment, kill)) in enumerate(islice(cycle(cases), NUM_KILLS)):
            stage = (case // 2 + case % 2 + number // len(cases)) % 3
            asks = MOMENTS[moment]
            if asks not in expected:
                expected[asks] = company.unmended(asks)
                assert expected[asks].is_whole
            pauses.append(company.killed(asks, kill, moment, stage, expected[asks]))
            print(pauses[-1], flush=True)  # noqa: T201  # what is there of a run that is cut off
    finally:
        print(table(pauses, reading_s))  # noqa: T201  # figures for docs/log.md
    assert company.served.said.read_text().count("an answer goes on with ") >= min(2, NUM_KILLS)
    for kill in KILLS:
        far = [each for each in pauses if (each.moment, each.kill) == (FAR, kill)]
        # Who was silent is asked once more. In the middle of them: one may fall into another program's minute.
        over_s = [each.pause_s - each.patience_s - (OPEN_S if each.patience_s else 0.0) for each in far]
        assert not far or median(over_s) <= 2 * reading_s + MEND_S, far


def test_members_answer_as_one_machine_that_has_the_whole_model(company: Company) -> None:
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        of_members = list(pool.map(company.whole, SAME))
    gathered = company.gathered()
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        of_one = list(pool.map(partial(company.whole, served=gathered), SAME))
    assert not any(told.course for told in of_one), "no member has drawn them"
    assert len({told.text for told in of_one}) > len(SAME) // 2
    for members, one in zip(of_members, of_one, strict=True):
        assert len({*members.course["members"]}) == 3
        assert len(one.likely) == SAME[0].num_tokens
        assert [token for token, *_ in members.likely] == [token for token, *_ in one.likely]
        assert members.likely == one.likely
