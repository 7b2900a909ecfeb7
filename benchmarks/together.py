"""Training and drawing text at once: what texts cost training, and what training costs texts.

    python -m benchmarks.together                       # a quarter of an hour; wants an idle machine
    python -m benchmarks.together --shares 0.3 --times 2

`recipes/pipeline.toml` as people make it: three processes, a stage each, over TLS on loopback, and `weft serve` on
their ticket. In each run, by turns: training alone, training beside four texts, and four texts alone while training is
paused. A turn counts once texts have spent what they may take at once (`texts.beside.share`).
"""

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple
from urllib.parse import urlsplit

from benchmarks._crew import used_s
from benchmarks.report import load, load_line, table, write
from weft.events import Entry, Notice, RoundCommitted
from weft.log import read_jsonl
from weft.texts.beside.share import WINDOW_S

RECIPE = Path(__file__).parents[1] / "recipes" / "pipeline.toml"
LASTS = {
    "tokens = 4_000_000\n": "tokens = 4_000_000_000\n",  # and the total of its schedule
    "evaluate_every = 50\n": "evaluate_every = 0\n",
}  # it goes on until it is ended, and measures nothing meanwhile
MACHINE = ("--transports", "tls", "--host", "127.0.0.1", "--device", "cpu", "--threads", "1", "--quiet")
NUM, NUM_TEXTS, NUM_TOKENS = 3, 4, 100
NBYTES = 64_000_000
SETTLE_S, FOR_S = 2 * WINDOW_S, 40.0
LEAST_ROUNDS = 4  # of a turn in which is trained
WAIT_S = 300.0
SLACK, AIM_GAP = 0.05, 3.0
ABOUT = f"""
A turn takes {SETTLE_S:.0f} s that do not count and {FOR_S:.0f} that do, or as long as {LEAST_ROUNDS} rounds take;
what is trained is of rounds from the first one's end on. Each process trains with one thread and has
another for text. Ratios are of turns that follow each other; what stands here are medians. A gap is the time from one
piece of a text to the next, of {NUM_TEXTS} texts of {NUM_TOKENS} tokens at a time.
"""


class Turn(NamedTuple):
    """
    Args:
        rate: tokens that were trained, a second.
        gap_s: from token to token: median, and 99th percentile; 0: nothing was drawn.
        drawn: tokens a second.
    """

    rate: float
    gap_s: tuple[float, float]
    drawn: float


class Process:
    """A command in a home of its own, and what it prints."""

    def __init__(self, folder: Path, name: str, words: list[str], given: str = "") -> None:
        self.home = folder / name
        self._printed, self._said = folder / f"{name}.out", folder / f"{name}.err"
        with self._printed.open("wb") as printed, self._said.open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "weft", "--home", str(self.home), *words],
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=said,
            )
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(given.encode())
            self.process.stdin.close()

    def line(self) -> str:
        """Return the first line that it prints."""
        return self.until(lambda: self._printed.read_text().partition("\n")[0])

    def entries(self) -> list[Entry]:
        return [entry for path in self.home.glob("runs/*/*/log.jsonl") for entry in read_jsonl(path)]

    def until(self, found: "object", within_s: float = WAIT_S) -> str:
        deadline = time.monotonic() + within_s
        while not (answer := found()):  # type: ignore[operator]
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"it did not happen within {within_s:.0f} s: {self._said.read_text()[-2000:]}")
            time.sleep(0.5)
        return str(answer)

    def cpu_s(self) -> float:
        """Return the CPU-seconds that it has used."""
        return used_s(self.process.pid)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def started(stack: ExitStack, folder: Path, name: str, words: list[str], given: str = "") -> Process:
    """Return a command that ends with the stack."""
    process = Process(folder, name, words, given)
    stack.callback(process.end)
    return process


def crew(stack: ExitStack, folder: Path, num: int, machine: list[str]) -> tuple[list[Process], str]:
    """Return so many peers that train by the folder's run.toml together, and their run's ticket.

    Args:
        machine: options of each.
    """
    first = started(stack, folder, "peer1", ["train", "run.toml", "--wait-for", str(num), *machine])
    ticket, joins = first.line(), ["join", "-", "--yes", *machine]
    return [first, *(started(stack, folder, f"peer{n}", joins, ticket) for n in range(2, num + 1))], ticket


class Texts:
    """Draws texts one after the other, several at a time, and notes when tokens come."""

    def __init__(self, address: str) -> None:
        self._at = urlsplit(address)
        self._is_over = threading.Event()
        self._gaps: list[tuple[float, float]] = []  # when, and how long; appending is safe among threads
        self._failed: list[Exception] = []

    @contextmanager
    def drawn(self) -> Iterator[list[tuple[float, float]]]:
        self._is_over.clear()
        self._gaps = []
        threads = [threading.Thread(target=self._draw, args=(number,)) for number in range(NUM_TEXTS)]
        for thread in threads:
            thread.start()
        try:
            yield self._gaps
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join()
        if self._failed:
            raise self._failed[0]

    def _draw(self, number: int) -> None:
        seed = number
        try:
            while not self._is_over.is_set():
                seed += NUM_TEXTS
                self._text(seed)
        except Exception as error:  # told by who waits for the thread
            self._failed.append(error)

    def _text(self, seed: int) -> None:
        line = http.client.HTTPConnection(self._at.hostname or "", self._at.port, timeout=120)
        asked = {"model": "pipeline", "prompt": f"Text {seed} ", "max_tokens": NUM_TOKENS, "seed": seed, "stream": True}
        line.request("POST", "/v1/completions", json.dumps(asked), {"content-type": "application/json"})
        reply = line.getresponse()
        if reply.status != 200:
            raise RuntimeError(reply.read().decode())
        before: float | None = None
        for told in reply:
            if self._is_over.is_set() or told.startswith(b"data: [DONE]"):
                break
            if told.startswith(b'data: {"error"'):
                raise RuntimeError(told.decode())
            if told.startswith(b"data: "):
                now = time.time()
                if before is not None:
                    self._gaps.append((now, now - before))
                before = now
        line.close()


def turn(first: Process, texts: Texts | None, *, is_training: bool = True) -> Turn:
    """Return what was trained and drawn in a turn."""
    with ExitStack() as stack:
        gaps = [] if texts is None else stack.enter_context(texts.drawn())
        time.sleep(SETTLE_S)
        began = time.time()
        time.sleep(FOR_S)
        if is_training:
            first.until(lambda: len(_committed(first, began)) >= LEAST_ROUNDS)
        ended = time.time()
    found = [gap_s for at, gap_s in gaps if began < at <= ended]
    gap_s = (median(found), quantiles(found, n=100)[-1]) if len(found) > 1 else (0.0, 0.0)
    rate = 0.0
    if is_training:
        (since, _), *rounds = [each for each in _committed(first, began) if each[0] <= ended]
        rate = sum(tokens for _, tokens in rounds) / (rounds[-1][0] - since)
    return Turn(rate, gap_s, len(found) / (ended - began))


def _committed(first: Process, began: float) -> list[tuple[float, int]]:
    """Return when the first stage's rounds ended since then, and how many tokens each counted."""
    return [
        (entry.at, entry.event.tokens)
        for entry in first.entries()
        if isinstance(entry.event, RoundCommitted) and entry.event.stage == 0 and began < entry.at
    ]


def measured(share: float, times: int, folder: Path) -> list[tuple[Turn, Turn, Turn]]:
    """Return turns of a run: training alone, both, texts alone."""
    recipe = RECIPE.read_text()
    for before, after in LASTS.items():
        assert before in recipe, before
        recipe = recipe.replace(before, after)
    (folder / "run.toml").write_text(recipe)
    (folder / "machine.toml").write_text(f"serve_nbytes = {NBYTES}\nserve_share = {share}\n")
    machine = [*MACHINE, "--machine", "machine.toml"]
    with ExitStack() as stack:
        peers, ticket = crew(stack, folder, NUM, machine)
        first = peers[0]
        for peer in peers:
            peer.until(lambda peer=peer: any(_draws(entry) for entry in peer.entries()))
        serves = started(stack, folder, "serves", ["serve", "-", "--port", "0", "--transports", "tls"], ticket)
        texts = Texts(serves.line())
        found = []
        for _ in range(times):
            alone, both = turn(first, None), turn(first, texts)
            _tell(peers, "pause")
            found.append((alone, both, turn(first, texts, is_training=False)))
            _tell(peers, "resume")
        return found


def _draws(entry: Entry) -> bool:
    return isinstance(entry.event, Notice) and entry.event.text.startswith("this peer draws text")


def _tell(peers: list[Process], word: str) -> None:
    for peer in peers:
        command = [sys.executable, "-P", "-m", "weft", "--home", str(peer.home), word]
        subprocess.run(command, check=True, capture_output=True, timeout=WAIT_S)


def row(share: float, found: list[tuple[Turn, Turn, Turn]]) -> list[object]:
    kept = [both.rate / alone.rate for alone, both, _ in found]
    slower = [both.gap_s[1] / texts.gap_s[1] for _, both, texts in found]
    least = 1 - share - SLACK
    return [
        share,
        median(alone.rate for alone, _, _ in found),
        f"{median(kept):.3f} ({min(kept):.3f} to {max(kept):.3f})",
        f"{least:.2f}: {'yes' if median(kept) >= least else 'no'}",
        *(1000 * median(each[1].gap_s[n] for each in found) for n in (0, 1)),
        1000 * median(each[2].gap_s[1] for each in found),
        f"{median(slower):.2f} ({min(slower):.2f} to {max(slower):.2f})",
        f"{AIM_GAP:.0f}: {'yes' if median(slower) <= AIM_GAP else 'no'}",
        median(both.drawn for _, both, _ in found),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.3, 0.5], help="serve_share of each run")
    parser.add_argument("--times", type=int, default=3, help="turns of each kind in a run")
    options = parser.parse_args()
    before = load()
    rows = []
    for share in options.shares:
        with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
            rows.append(row(share, measured(share, options.times, Path(folder))))
    header = (
        *("share", "alone, tokens/s", "beside texts, of that", "aim, at least"),
        *("gap beside training, ms: median", "99 %", "99 % without", "of that", "aim, at most", "drawn/s"),
    )
    write(
        "together",
        "Training and drawing text at once",
        "python -m benchmarks.together",
        [ABOUT.strip(), load_line(before), table(header, rows)],
    )


if __name__ == "__main__":
    main()
