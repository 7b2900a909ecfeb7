"""Caps against measured use: real sockets, real processes. Rates and bytes by the peer's own meters."""

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from slow.shell import COMMIT_S, LOCAL, START_S, STOP_S, Shell
from weft.clock import SystemClock
from weft.events import PeerStopped, RoundCommitted, StepDone
from weft.ids import RunId
from weft.keys import Identity
from weft.net.admission import Anyone
from weft.net.link.handshake import Passport
from weft.net.node import Node
from weft.net.transport.rate_limit import Throttled, Valve
from weft.net.transport.tls import TlsConfig, TlsTransport
from weft.wire import digest

pytestmark = pytest.mark.slow

UP_BPS = 20e6
# A model of two million parameters, every gradient exchanged: the line is all that a round takes.
WIDE = (
    "--set", "model.width=256", "--set", "model.ffn_width=1024", "--set", "model.num_layers=2",
    "--set", 'method={type="ddp"}', "--set", "train.seq_len=16", "--set", "train.batch_size=1",
)  # fmt: skip
DAY_NBYTES = 70_000_000


def node_of(identity: Identity, valve: Valve) -> Node:
    passport = Passport(identity=identity, run=RunId("7" * 64), name="", admission=Anyone())
    transport = Throttled(TlsTransport(identity, TlsConfig(host="127.0.0.1")), valve)
    return Node(passport, [transport], SystemClock(), lambda event: None)


@pytest.mark.parametrize("side", ["upload_bps", "download_bps"])
async def test_a_rate_holds_within_a_tenth_over_real_sockets(side: str) -> None:
    clock, data = SystemClock(), os.urandom(5_000_000)
    caps = {side: UP_BPS}
    capped, free = Identity.generate(), Identity.generate()
    here, there = Valve(clock, **caps), Valve(clock)
    sender, receiver = (here, there) if side == "upload_bps" else (there, here)
    async with node_of(capped, sender) as source, node_of(free, receiver) as target:
        source.serve_blobs(lambda peer, wanted: data if wanted == name else None)
        name = digest(data)
        target.remember(source.peer, source.addresses)
        await target.connect(source.peer)
        began = clock.now()
        before = source.traffic[target.peer].sent_nbytes
        await asyncio.gather(*(target.fetch(source.peer, name, bytearray(len(data))) for _ in range(4)))
        took_s = clock.now() - began
        sent = source.traffic[target.peer].sent_nbytes - before
        assert sent > 4 * len(data)
        assert sent * 8 / took_s == pytest.approx(UP_BPS, rel=0.1)


def commits(shell: Shell) -> list[tuple[float, RoundCommitted]]:
    return [(entry.at, entry.event) for entry in shell.entries() if isinstance(entry.event, RoundCommitted)]


def test_a_peer_keeps_its_rate_its_cores_its_memory_and_its_day(shells: Callable[..., Shell], run_file: Path) -> None:
    anna, bert = shells("anna"), shells("bert")
    anna.run(
        "train", str(run_file), "--wait-for", "2", *WIDE, *LOCAL,
        "--up", "10mbit", "--cores", "1", "--memory", "2GB",
    )  # fmt: skip
    ticket = anna.ticket()
    bert.run("join", "-", "--yes", "--per-day", f"{DAY_NBYTES}", *LOCAL, given=ticket + "\n")
    anna.wait(lambda entry: isinstance(entry.event, RoundCommitted) and entry.event.round >= 2, within_s=START_S)
    assert anna.process is not None
    process = psutil.Process(anna.process.pid)
    assert {len(os.sched_getaffinity(thread.id)) for thread in process.threads()} == {1}

    # The day's bytes of the other one are soon spent: it leaves by itself, in order.
    assert bert.process is not None
    while bert.process.poll() is None:
        memory = process.memory_info()
        assert memory.rss - memory.shared <= 2_000_000_000
        time.sleep(0.5)
    assert bert.process.wait(COMMIT_S) == 0
    (stopped,) = [entry.event for entry in bert.entries() if isinstance(entry.event, PeerStopped)]
    assert "moved today" in stopped.reason
    (kept,) = bert.home.glob("runs/*/*/moved")
    moved = json.loads(kept.read_text())["nbytes"]
    assert DAY_NBYTES <= moved <= 1.01 * DAY_NBYTES
    assert "Traceback" not in bert.said.read_text()

    # What it sent, as its commits tell, kept the rate that was allowed.
    told = commits(anna)
    together = [(at, event) for at, event in told if len(event.contributors) == 2]
    (began, _), *rest = together
    assert len(rest) >= 3
    sent = sum(event.sent_nbytes for _, event in rest)
    assert 0.5 * 10e6 < 8 * sent / (rest[-1][0] - began) <= 1.1 * 10e6

    # On the same day it does not start again.
    bert.run("join", "-", "--yes", "--per-day", f"{DAY_NBYTES}", *LOCAL, given=ticket + "\n")
    assert bert.process.wait(STOP_S) == 2
    assert "were moved today" in bert.said.read_text()


# Some 900 MB of activations where the batch is computed in one piece.
ROOMY = (
    "--set", "model.width=128", "--set", "model.ffn_width=512", "--set", "model.num_layers=2",
    "--set", "train.seq_len=512", "--set", "train.batch_size=32", "--set", 'method={type="diloco",every=4}',
)  # fmt: skip
LESS_NBYTES = 900_000_000


def most_taken(shell: Shell, num_steps: int) -> tuple[int, float]:
    """Return the most memory that a process has taken until it made so many inner steps, and then its cores at work."""
    assert shell.process is not None
    process, most, began = psutil.Process(shell.process.pid), 0, time.monotonic()
    steps: list[float] = []
    while len(steps) < num_steps:
        memory = process.memory_info()
        most = max(most, memory.rss - memory.shared)
        steps = [entry.at for entry in shell.entries() if isinstance(entry.event, StepDone)]
        assert shell.process.poll() is None, shell.said.read_text()
        assert time.monotonic() - began < START_S
        time.sleep(0.02)
    began, used = time.monotonic(), sum(process.cpu_times()[:2])
    time.sleep(3.0)
    return most, (sum(process.cpu_times()[:2]) - used) / (time.monotonic() - began)


def test_caps_on_memory_and_cores_hold_where_more_would_be_taken(shells: Callable[..., Shell], run_file: Path) -> None:
    free, capped = shells("free"), shells("capped")
    where = ("--host", "127.0.0.1", "--transports", "tls", "--device", "cpu", "--threads", "2")
    free.run("train", str(run_file), *ROOMY, *where)
    free.ticket()
    taken, _ = most_taken(free, 3)
    free.end()
    capped.run("train", str(run_file), *ROOMY, *where, "--memory", f"{LESS_NBYTES}", "--cores", "1")
    capped.ticket()
    less, num_cores = most_taken(capped, 3)
    assert less <= LESS_NBYTES < taken, (less, taken)
    assert num_cores <= 1.05  # two threads of torch, and those that serve
