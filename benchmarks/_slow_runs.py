"""One run of four members on slow lines for `slow_links`, by weft or by torch's DistributedDataParallel.

    found = weft("auto", 20.0, seconds)
    found = ddp("fp32", 20.0, seconds)

All train the same model from the same weights on the same windows. What weft did is read from the logs of its members.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

import msgspec

from benchmarks import report
from benchmarks._company import SOURCE, Company, until
from benchmarks._machines import Machines
from benchmarks._simulation import read_run_file
from benchmarks._slow_ddp import GROUP, Ddp
from weft import wire
from weft.events import Entry, Evaluated, MethodTuned, PayloadOffered, RoundCommitted, StepDone
from weft.run.genesis import seal
from weft.store.home import Home

RUN = """
name = "slow links"
peers = 4
model = {{type = "shape", num_layers = 4, num_heads = 4, width = 192, ffn_width = 512}}
train = {{seq_len = 64, batch_size = 4, tokens = 1000000000, schedule = {{type = "constant", lr = 2e-3, \
warmup_tokens = 20000}}, evaluate_every = {evaluate_every}, evaluate_windows = 16}}
method = {method}
"""
METHODS = {
    "diloco": '{type = "diloco", codec = {type = "int8"}}',
    "streaming": '{type = "streaming"}',
    "sparseloco": '{type = "sparseloco"}',
    "auto": '{type = "auto"}',
    "alone": '{type = "fedavg", every = 100000}',  # no round before the end
}
EVALUATE_EVERY = {"diloco": 3, "streaming": 4, "sparseloco": 3, "auto": 1, "alone": 0}  # rounds: some ten seconds
ALL_CORES = 0.8  # of this machine, for all members together: the rest is the system's
PROCESS_S = 300.0  # to start, and to end


class Change(msgspec.Struct, frozen=True):
    """What `auto` went over to."""

    at_s: float
    round: int
    every: int
    codec: str
    reason: str


class Weft(msgspec.Struct, frozen=True, kw_only=True):
    """A run of weft, from the first inner step on."""

    commit: str
    load: float | None
    seconds: float
    utilisation: float  # share of it in inner steps, mean of the members
    settled: float  # the same after the last change of `auto`, or after the first round
    num_steps: float  # of each, mean
    num_rounds: int
    sent_nbytes: float  # by each, mean
    num_in_flight: float  # inner steps of each that ended while its payload was in flight, mean
    in_flight: float  # share of the time that a payload was
    waited: float  # share of the time that it was, and no inner step was made
    losses: tuple[tuple[float, float], ...]  # held out, after so many seconds
    changes: tuple[Change, ...]

    def seconds_to(self, loss: float) -> float | None:
        return next((at for at, each in self.losses if each <= loss), None)


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """A run of DistributedDataParallel."""

    commit: str
    load: float | None
    found: Ddp

    def steps_to(self, loss: float) -> int | None:
        return next((steps for steps, each in self.found.losses if each <= loss), None)


def weft(name: str, mbit: float, seconds: float) -> Weft:
    """Let four members train for so many seconds."""
    load = report.load()
    run = RUN.format(method=METHODS[name], evaluate_every=EVALUATE_EVERY[name])
    with TemporaryDirectory(prefix="weft-slow-") as place, machines_at(mbit) as machines:
        folder, company = Path(place), Company(machines, Path(place), run)
        _seal(folder, folder / "home")
        for number in range(GROUP):  # so that nobody fetches data meanwhile
            shutil.copytree(folder / "home", folder / f"home{number}")
        with company:
            company.found(GROUP)
            until(lambda: all(machine.said(StepDone) for machine in company.machines), "a first step")
            began = min(_began(machine.said(StepDone)[0]) for machine in company.machines)
            time.sleep(max(0.0, began + seconds - time.time()))
        logs = [[each for each in machine.entries() if each.at <= began + seconds] for machine in company.machines]
    return _read(logs, began, seconds, load)


def ddp(kind: str, mbit: float, seconds: float) -> Peer:
    """Let four processes of DistributedDataParallel train for about so many seconds."""
    load = report.load()
    with TemporaryDirectory(prefix="weft-slow-") as place, machines_at(mbit) as machines:
        folder = Path(place)
        (folder / "run.toml").write_text(RUN.format(method=METHODS["diloco"], evaluate_every=0))
        (folder / "run.bin").write_bytes(_seal(folder, folder / "home"))
        path = os.pathsep.join((str(SOURCE), str(SOURCE.parent)))
        env = os.environ | {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "line", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks._slow_ddp", kind]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(GROUP):
                words = [*command, str(rank), str(folder), str(seconds)]
                processes.append(machines.start(rank, words, folder, env=env))
            if any(process.wait(PROCESS_S + seconds) for process in processes):
                raise RuntimeError(f"{kind} at {mbit:g} Mbit/s: a process of DDP failed; what it said is above.")
        finally:
            for process in processes:
                process.kill()
                process.wait()
        found = msgspec.json.decode((folder / "found.json").read_bytes(), type=Ddp)
    return Peer(commit=report.commit(), load=load, found=found)


def share_of_a_core() -> float:
    """Return what each of the machines has."""
    return min(1.0, ALL_CORES * len(os.sched_getaffinity(0)) / GROUP)


def machines_at(mbit: float) -> Machines:
    return Machines("weft-slow", GROUP, mbit=mbit, cores=share_of_a_core())


def _seal(folder: Path, home: Path) -> bytes:
    """Put the run's data into a home; return the run."""
    keeper = Home(home)
    try:
        sealed = seal(read_run_file(folder / "run.toml", {}), folder, keeper, lambda _event: None)
        return wire.encode(sealed.config)
    finally:
        keeper.close()


def _began(entry: Entry) -> float:
    assert isinstance(entry.event, StepDone)
    return entry.at - entry.event.duration_s


def _read(logs: Sequence[Sequence[Entry]], began: float, seconds: float, load: float | None) -> Weft:
    first, end = logs[0], began + seconds
    changes = [(each.at, each.event) for each in first if isinstance(each.event, MethodTuned)]
    rounds = [each.at for each in first if isinstance(each.event, RoundCommitted)]
    settled_at = changes[-1][0] if changes else (rounds or [began])[0]
    flights = [_flights(log, seconds) for log in logs]
    return Weft(
        commit=report.commit(),
        load=load,
        seconds=seconds,
        utilisation=mean(_stepping(log, began) / seconds for log in logs),
        settled=mean(_stepping(log, settled_at) / (end - settled_at) for log in logs),
        num_steps=mean(sum(isinstance(each.event, StepDone) for each in log) for log in logs),
        num_rounds=len(rounds),
        sent_nbytes=mean(sum(e.event.sent_nbytes for e in log if isinstance(e.event, RoundCommitted)) for log in logs),
        num_in_flight=mean(each[0] for each in flights),
        in_flight=mean(each[1] for each in flights),
        waited=mean(each[2] for each in flights),
        losses=tuple((e.at - began, e.event.loss) for e in first if isinstance(e.event, Evaluated)),
        changes=tuple(
            Change(at_s=at - began, round=each.round, every=each.every, codec=each.codec, reason=each.reason)
            for at, each in changes
        ),
    )


def _stepping(log: Sequence[Entry], since: float) -> float:
    """Return the seconds in inner steps since then."""
    steps = [(each.at, each.event.duration_s) for each in log if isinstance(each.event, StepDone)]
    return sum(min(took_s, at - since) for at, took_s in steps if at > since)


def _flights(log: Sequence[Entry], seconds: float) -> tuple[int, float, float]:
    """Return how many inner steps ended while a payload was in flight, and the shares of the time that one was, and
    that one was and no step was made."""
    num, flying_s, stepping_s, offered_at = 0, 0.0, 0.0, None
    for entry in log:
        match entry.event:
            case PayloadOffered():
                offered_at = entry.at if offered_at is None else offered_at
            case StepDone(duration_s=duration_s) if offered_at is not None:
                num += 1
                stepping_s += min(duration_s, entry.at - offered_at)
            case RoundCommitted() if offered_at is not None:
                flying_s += entry.at - offered_at
                offered_at = None
    return num, flying_s / seconds, (flying_s - stepping_s) / seconds
