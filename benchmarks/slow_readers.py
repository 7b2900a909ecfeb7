"""Clients that ask for long answers and do not read them: what they take from those who do, and when they are let go.

    python -m benchmarks.slow_readers                    # ten minutes; wants an idle machine
    python -m benchmarks.slow_readers FOLDER             # of a Hugging Face model; else one of random weights

A real `weft serve` on loopback, with a key for each honest client. They stream short answers, one after the other, and
note when pieces come: `quiet` alone, then beside slow clients that came at once, each with a key of its own, so that no
limit refuses them. Of the slow ones half read nothing, and half a few bytes a second. Turns alternate:

    quiet     no slow client is there
    coming    from when they connect: the server reads their prompts and draws until their lines are full
    held      later, while the server holds them all
    leaving   while they are let go; whoever is has all of it behind it, and none comes back

Then the same number of slow clients with one key whose entry bounds it, as entries should. Beside all of it a key that
has spent its requests asks on: it is to be refused, and at once.
"""

import argparse
import asyncio
import json
import select
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, get_args

import numpy as np

from benchmarks import report
from benchmarks.rig.served import NAME, Served, make_model
from weft.model.config import Size

NUM_SLOW, NUM_HONEST = 500, 8
NUM_TOKENS, NUM_LONG = 64, 3900  # of an honest answer, and asked for by a slow client
RECEIVES_NBYTES = 4096  # a slow client's system takes no more by itself
SIP_NBYTES, SIP_S = 8, 2.0  # what half of them read
QUIET_S, COMING_S, HELD_S = 15.0, 15.0, 12.0
GONE_S = 150.0  # by then all have been let go
AGAIN_S = 1.0  # an honest client that is sent away asks again after so long, as it is told to
REFUSED_S = 0.05  # from one request of the spent key to the next
WINDOWS = ("quiet", "coming", "held", "leaving")
AIM, AIM_REFUSED_S = 1.2, 5e-3
ONE_KEY = {"concurrent": 4}


@dataclass
class Found:
    """What honest clients saw: moments, and seconds until then from what came before."""

    first: list[tuple[float, float]] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    refused: list[tuple[float, float]] = field(default_factory=list)
    sent_away: list[tuple[float, float]] = field(default_factory=list)  # honest ones, with 429 or 503

    def within(self, kind: str, begin: float, end: float) -> list[float]:
        return [took_s for at, took_s in getattr(self, kind) if begin <= at < end]


@dataclass
class Turn:
    """
    Args:
        marks: when each of `WINDOWS` began, and the last one ended.
        statuses: what slow clients were answered, in numbers of clients.
        gone_s: after how long each was let go, as far as they were.
        nbytes: that the server holds before, while they are held, and at the end.
    """

    found: Found
    marks: list[float]
    statuses: dict[str, int]
    gone_s: list[float]
    nbytes: list[int]

    def seconds(self, kind: str, window: str, share: float) -> float:
        at = WINDOWS.index(window)
        return _quantile(self.found.within(kind, *self.marks[at : at + 2]), share)


def _quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share)) if values else float("nan")


# --- honest clients ---


def request(served: Served, key: str, fields: dict[str, Any]) -> bytes:
    body = json.dumps({"model": NAME, "stream": True, "ignore_eos": True, **fields}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {served.host}\r\nauthorization: Bearer {served.secrets[key]}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def answers(served: Served, key: str, number: int, found: Found) -> None:
    """Stream answers, one after the other; who is sent away waits for its first token all the longer."""
    for turn in count():
        began = time.perf_counter()
        prompt = f"Honest client {number} asks for the {turn}th time, "
        asked = request(served, key, {"prompt": prompt, "max_tokens": NUM_TOKENS})
        while not await _answer(served, asked, began, found):
            now = time.perf_counter()
            found.sent_away.append((now, now - began))
            await asyncio.sleep(AGAIN_S)


async def _answer(served: Served, asked: bytes, before: float, found: Found) -> bool:
    """Read an answer; return whether there was one, or it should be asked for again."""
    read, write = await asyncio.open_connection(served.host, served.port)
    try:
        write.write(asked)
        if (status := (await read.readline())[9:12]) in {b"429", b"503"}:
            return False
        if status != b"200":
            raise RuntimeError(f"an honest client is answered {status.decode()}: {(await read.read(2000)).decode()}")
        kept = found.first
        while not (line := await read.readline()).startswith(b"data: [DONE]"):
            if line.startswith(b'data: {"error"') and b"overloaded" in line:
                return False
            if not line or line.startswith(b'data: {"error"'):
                raise RuntimeError(f"an honest client's answer ends: {line.decode()}")
            if line.startswith(b"data: "):
                now = time.perf_counter()
                kept.append((now, now - before))
                kept, before = found.gaps, now
        return True
    finally:
        write.close()


async def refusals(served: Served, found: Found) -> None:
    """Ask with a key that has spent its requests, on one connection."""
    read, write = await asyncio.open_connection(served.host, served.port)
    asked = request(served, "spent", {"prompt": "Once more", "max_tokens": 1, "stream": False})
    try:
        while True:
            began = time.perf_counter()
            write.write(asked)
            head = (await read.readuntil(b"\r\n\r\n")).lower()
            await read.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
            now = time.perf_counter()
            if b" 429 " in head.partition(b"\r\n")[0]:  # one a minute is within the budget
                found.refused.append((now, now - began))
            await asyncio.sleep(REFUSED_S)
    finally:
        write.close()


@asynccontextmanager
async def honest(served: Served) -> AsyncIterator[Found]:
    """Let them ask meanwhile.

    Raises:
        RuntimeError: an answer failed.
    """
    found = Found()
    tasks = [asyncio.ensure_future(answers(served, f"honest{each}", each, found)) for each in range(NUM_HONEST)]
    tasks.append(asyncio.ensure_future(refusals(served, found)))
    try:
        yield found
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# --- slow ones ---


class Slow:
    """So many clients that read nothing, or next to nothing."""

    def __init__(self, num: int) -> None:
        self._num = num
        self.lines: list[socket.socket] = []
        self.statuses: dict[int, bytes] = {}  # by the line's number
        self.gone_s: dict[int, float] = {}
        self.all_gone = asyncio.Event()
        self._began: list[float] = []
        self._poll = select.poll()

    async def come(self, served: Served, keys: Sequence[str]) -> None:
        loop = asyncio.get_running_loop()
        for number, key in enumerate(keys):
            line = socket.socket()
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVES_NBYTES)
            line.setblocking(False)
            await loop.sock_connect(line, (served.host, served.port))
            asked = {"prompt": f"Slow client {number} wants all of it: ", "max_tokens": NUM_LONG}
            await loop.sock_sendall(line, request(served, key, asked))
            self._poll.register(line, 0)  # it is told what has failed
            self.lines.append(line)
            self._began.append(time.perf_counter())

    async def stay(self) -> None:
        """Sip, and notice who is let go, until it is cancelled."""
        for turn in count():
            now = time.perf_counter()
            failed = {fd for fd, _ in self._poll.poll(0)}
            for number, line in enumerate(self.lines):
                if number in self.gone_s:
                    continue
                with suppress(BlockingIOError, OSError):
                    if number not in self.statuses and (status := line.recv(12, socket.MSG_PEEK)):
                        self.statuses[number] = status[9:12]
                is_gone = line.fileno() in failed
                is_refused = self.statuses.get(number, b"200") != b"200"
                if number % 2 and not is_gone and turn % round(SIP_S / 0.5) == 0:
                    try:
                        is_gone = line.recv(SIP_NBYTES) == b""
                    except BlockingIOError:
                        pass
                    except OSError:
                        is_gone = True
                if is_gone or is_refused:
                    self.gone_s[number] = now - self._began[number]
                    self._poll.unregister(line)
            if len(self.gone_s) == self._num:
                self.all_gone.set()
            await asyncio.sleep(0.5)

    def leave(self) -> None:
        for line in self.lines:
            line.close()


async def beside(served: Served, keys: Sequence[str]) -> Turn:
    """Play a turn: quiet, then with a slow client for each of `keys`."""
    slow = Slow(len(keys))
    async with honest(served) as found:
        await asyncio.sleep(1.0)
        nbytes = [served.nbytes()]
        marks = [time.perf_counter()]
        await asyncio.sleep(QUIET_S)
        marks.append(time.perf_counter())
        staying = asyncio.ensure_future(slow.stay())
        try:
            await slow.come(served, keys)
            await asyncio.sleep(marks[1] + COMING_S - time.perf_counter())
            marks.append(time.perf_counter())
            await asyncio.sleep(HELD_S)
            marks.append(time.perf_counter())
            nbytes.append(served.nbytes())
            with suppress(TimeoutError):
                await asyncio.wait_for(slow.all_gone.wait(), marks[1] + GONE_S - time.perf_counter())
            marks.append(time.perf_counter())
            nbytes.append(served.nbytes())
        finally:
            staying.cancel()
            slow.leave()
    given = [slow.statuses.get(number, b"none").decode() for number in range(len(keys))]
    statuses = {status: given.count(status) for status in sorted(set(given))}
    gone_s = [took_s for number, took_s in slow.gone_s.items() if given[number] == "200"]
    return Turn(found, marks, statuses, gone_s, nbytes)


# --- what is told ---


def table(turns: Sequence[Turn], windows: Sequence[str] = WINDOWS) -> str:
    rows = list[list[object]]()
    for kind, what in (("first", "first token"), ("gaps", "gap"), ("refused", "429")):
        for share in (0.5, 0.95):
            each = {window: [turn.seconds(kind, window, share) for turn in turns] for window in windows}
            row: list[object] = [f"{what}, {round(100 * share)} %"]
            for window in windows:
                row.append(1000 * statistics.median(each[window]))
                if window != "quiet":
                    ratios = [b / a for a, b in zip(each["quiet"], each[window], strict=True)]
                    row.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
            rows.append(row)
    header = ["ms", "quiet", *(each for window in windows[1:] for each in (window, "/ quiet"))]
    return report.table(header, rows)


def told(turns: Sequence[Turn], what: str) -> str:
    lines = [f"{what}:"]
    for turn in turns:
        statuses = ", ".join(f"{num} x {status}" for status, num in turn.statuses.items())
        taken = turn.statuses.get("200", 0)
        gone = "none was let go"
        if turn.gone_s:
            gone = (
                f"{len(turn.gone_s)} of {taken} that it took were let go, after {min(turn.gone_s):.0f} to "
                f"{max(turn.gone_s):.0f} s (median {statistics.median(turn.gone_s):.0f})"
            )
        sizes = ", ".join(f"{each / 1e6:.0f}" for each in turn.nbytes)
        sent_away = len(turn.found.within("sent_away", turn.marks[1], turn.marks[-1]))
        gone += f"; honest clients were sent away {sent_away} times"
        lines.append(f"- answered {statuses}; {gone}; the server held {sizes} MB before, meanwhile and at the end.")
    return "\n".join(lines)


def verdict(turns: Sequence[Turn]) -> str:
    found = list[str]()
    for kind, what in (("first", "first token"), ("gaps", "gap")):
        ratio = statistics.median(
            turn.seconds(kind, "held", 0.95) / turn.seconds(kind, "quiet", 0.95) for turn in turns
        )
        found.append(f"p95 of the {what} while they are held, at most {AIM}: {ratio:.2f}, {_met(ratio <= AIM)}")
    for window in ("quiet", "held"):
        took_s = statistics.median(turn.seconds("refused", window, 0.95) for turn in turns)
        aim = f"at most {1000 * AIM_REFUSED_S:.0f} ms"
        found.append(f"p95 of a 429, {window}, {aim}: {1000 * took_s:.1f} ms, {_met(took_s <= AIM_REFUSED_S)}")
    return "Aims: " + "; ".join(found) + "."


def _met(is_met: bool) -> str:
    return "met" if is_met else "**missed**"


async def play(served: Served, num_turns: int, num_slow: int) -> tuple[list[Turn], list[Turn]]:
    many, one = list[Turn](), list[Turn]()
    for _ in range(num_turns):
        many.append(await beside(served, [f"slow{each}" for each in range(num_slow)]))
        one.append(await beside(served, ["one"] * num_slow))
    return many, one


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--size", choices=get_args(Size), default="tiny")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--slow", type=int, default=NUM_SLOW)
    options, before = parser.parse_args(), report.load()
    keys: dict[str, dict[str, object]] = {f"honest{each}": {} for each in range(NUM_HONEST)}
    keys |= {f"slow{each}": {} for each in range(options.slow)}
    keys |= {"spent": {"requests_per_minute": 1}, "one": dict(ONE_KEY)}
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as name:
        folder = Path(name)
        model = folder / "model" if options.folder is None else options.folder.resolve()
        if options.folder is None:
            make_model(model, options.size)
        with Served(folder, model, keys, ["--device", "cpu", "--threads", "1"]) as served:
            many, one = asyncio.run(play(served, options.turns, options.slow))
    of = f"random weights of size {options.size}" if options.folder is None else options.folder.name
    about = (
        f"{NUM_HONEST} honest clients stream answers of {NUM_TOKENS} tokens; model: {of}, one thread. Medians of "
        f"{options.turns} turns; ratios are turn by turn, with the least and the largest."
    )
    report.write(
        "slow_readers",
        "Clients that do not read what they asked for",
        "python -m benchmarks.slow_readers" + ("" if options.folder is None else " FOLDER"),
        [
            about,
            report.load_line(before),
            verdict(many),
            told(many, f"{options.slow} slow clients, each with a key of its own"),
            table(many),
            told(one, f"{options.slow} slow clients with one key, that may have {ONE_KEY['concurrent']} at a time"),
            table(one),
        ],
        ["uvicorn"],
    )


if __name__ == "__main__":
    main()
