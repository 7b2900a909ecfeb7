"""Trips through the source: which modules a reader meets who steps through what a process does between two events.

    python -m benchmarks.trips            # a minute
    python -m benchmarks.trips --list     # and the modules of each trip, in order of first entry

    a delta        from the last inner step of a round to the outer step made, by one of three peers: fedavg
    a newcomer     from the start of a process to the first round that counts it
    a micro-batch  from a member of the first of three stages, through all of them, and back

A profiler notes every entry into a function of `src/weft`, in the context of that process, while the run is played on
the virtual clock. What the process does beside (heartbeats, answers to others) is met as well; links are slow enough
that each delta meets heartbeats. A coroutine that goes on is entered again. The simulator's own modules do not count.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType

import msgspec

import weft
from benchmarks.report import table, write
from weft import clock
from weft.pipeline.sender import Returned
from weft.run.config import RunFile
from weft.sim.play import play
from weft.sim.scenario import Scenario
from weft.sim.world import Life

ROOT = str(Path(weft.__file__).parent) + "/"
PEERS = ("peer-0", "peer-1", "peer-2")
NEWCOMER = "late"
BEGINS = "Origin.begin"  # a micro-batch
ROUND = 3  # whose deltas are followed: the run has begun, and the newcomer is not here
BATCH = 20  # the micro-batch that is followed
TEXT = "the warp holds and the weft goes over and under until thread on thread makes one cloth\n" * 400
RUN = """
name = "trips"
peers = 3
model = { type = "shape", num_layers = 3, num_heads = 2, width = 16, ffn_width = 32, is_tied = false }
data = { source = { type = "text", paths = ["text"] } }

[train]
seq_len = 16
batch_size = 2
evaluate_every = 0
schedule = { type = "constant", lr = 3e-3 }
"""
WHOLE = RUN + 'tokens = 2_000\n[method]\ntype = "fedavg"\nevery = 2'
STAGED = "stages = 3" + RUN + 'tokens = 4_000\n[method]\ntype = "diloco"\nevery = 8\n[pipeline]\nmicro_batch = 2'
SLOW = "tokens_per_s = 30.0, delay_ms = 100.0"
FAST = "tokens_per_s = 3_000.0, delay_ms = 1.0"

Trip = list[tuple[str, str]]  # module and function of each entry


class Tracer:
    """Notes the entries of trips that have begun and not ended."""

    def __init__(self) -> None:
        self.trips: dict[str, Trip] = {}
        self._taken_by: dict[str, Collection[str]] = {}  # trips under way: processes, by name
        self._modules: dict[CodeType, str | None] = {}

    def begin(self, name: str, *processes: str) -> None:
        self.trips[name] = []
        self._taken_by[name] = processes

    def end(self, name: str) -> None:
        self._taken_by.pop(name, None)

    def note(self, frame: FrameType, kind: str, _result: object) -> None:
        """Take up a call, as `sys.setprofile` tells it."""
        module = self._module(frame.f_code)
        if kind == "call" and module is not None and (process := process_here()) is not None:
            for name, processes in self._taken_by.items():
                if process in processes:
                    self.trips[name].append((module, frame.f_code.co_qualname))

    def _module(self, code: CodeType) -> str | None:
        if code not in self._modules:
            path = code.co_filename.removeprefix(ROOT)
            is_counted = path != code.co_filename and not path.startswith("sim/")
            self._modules[code] = path.removesuffix(".py") if is_counted else None
        return self._modules[code]


def process_here() -> str | None:
    life = clock._process.get()
    return life.member.name if isinstance(life, Life) else None


def deltas(tracer: Tracer) -> None:
    """Play a run of whole models, and follow a delta at a leader and at another, and a newcomer."""

    def hear(line: bytes) -> None:
        entry, process = json.loads(line), process_here()
        peer, event = entry["peer"], entry["event"]
        if event["type"] == "StepDone" and process in PEERS:
            tracer.begin(process, process)
        elif event["type"] == "RoundCommitted" and process is not None:
            tracer.end(process)
            if event["round"] == ROUND:
                name = "a delta, at the leader" if event["leader"] == peer else "a delta, at a member"
                tracer.trips.setdefault(name, tracer.trips.pop(process))
            if process == NEWCOMER and peer in event["contributors"]:
                tracer.end("a newcomer")

    late = f'{{ name = "{NEWCOMER}", joins_at_s = 20.0, {SLOW} }}'
    tracer.begin("a newcomer", NEWCOMER)
    followed(tracer.note, WHOLE, f'run = "run"\nkind = [{{ name = "peer", count = 3, {SLOW} }}, {late}]', hear)
    for process in PEERS:
        tracer.trips.pop(process, None)


def micro_batches(tracer: Tracer) -> None:
    """Play a run with three stages, and follow a micro-batch."""
    name, num_returned = "a micro-batch", 0

    def note(frame: FrameType, kind: str, result: object) -> None:
        nonlocal num_returned
        if frame.f_code.co_qualname == BEGINS:
            if isinstance(result, Returned):
                num_returned += 1
                tracer.end(name)
            elif num_returned == BATCH and name not in tracer.trips:
                tracer.begin(name, *PEERS)
        tracer.note(frame, kind, result)

    followed(note, STAGED, f'run = "run"\nkind = [{{ name = "peer", count = 3, {FAST} }}]', lambda _line: None)


def followed(
    note: Callable[[FrameType, str, object], None], run: str, scenario: str, hear: Callable[[bytes], None]
) -> None:
    """Play a run, telling `note` of each call and `hear` of each event."""
    run_file = msgspec.toml.decode(run, type=RunFile)
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        (Path(folder) / "text").write_text(TEXT)
        sys.setprofile(note)
        try:
            play(msgspec.toml.decode(scenario, type=Scenario), run_file, Path(folder), Path(folder) / "home", hear)
        finally:
            sys.setprofile(None)


def figures(trip: Trip) -> tuple[int, str, int, int, int]:
    """Return how many modules, in which rooms, functions, changes of module, and pairs with changes both ways."""
    modules = dict.fromkeys(module for module, _ in trip)
    rooms = Counter(module.split("/")[0] if "/" in module else "weft" for module in modules)
    changes = [(before, after) for (before, _), (after, _) in pairwise(trip) if before != after]
    num_both = sum(before < after and (after, before) in set(changes) for before, after in set(changes))
    named = ", ".join(f"{room} {num}" for room, num in rooms.most_common())
    return len(modules), named, len(set(trip)), len(changes), num_both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the modules of each trip instead, as first met")
    options = parser.parse_args()
    tracer = Tracer()
    deltas(tracer)
    micro_batches(tracer)
    if options.list:
        for name, trip in tracer.trips.items():
            print(f"{name}\n")
            for module, num in Counter(module for module, _ in trip).items():  # in order of first entry
                print(f"{num:7,} {module}")
            print()
        return
    header = ("trip", "modules", "of them", "functions", "changes of module", "pairs of modules, there and back")
    write(
        "trips",
        "What a reader meets who follows a delta, a newcomer, a micro-batch",
        "python -m benchmarks.trips",
        [
            "Entries into functions of `src/weft` between two events, in the context of one process (of the "
            "micro-batch, of three), on the virtual clock. Heartbeats that pass meanwhile are met as well.",
            table(header, [(name, *figures(trip)) for name, trip in tracer.trips.items()]),
        ],
    )


if __name__ == "__main__":
    main()
