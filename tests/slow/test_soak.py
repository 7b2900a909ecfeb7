"""Eight real peers, killed, frozen, stopped and replaced for as long as one likes: one history, and nobody grows.

    WEFT_SOAK_S=1800 pytest -m slow tests/slow/test_soak.py           # half an hour, and the figures of each peer

What befalls whom is drawn from a seed; when exactly it happens depends on the machine. Two of the eight are frozen at
times and never ended, so that there is somebody whose memory is watched from one end to the other.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import psutil
import pytest
from benchmarks.rig.real import RealMachine, RealStage

from weft.events import CheckpointSaved, FellBack, MemberGone, MemberSuspected, RoundCommitted, StepDone
from weft.rng import stream
from weft.sim.scenario import Fault, Freeze, Kill, Kind, Scenario, Stop

pytestmark = pytest.mark.slow

SOAK_S = float(os.environ.get("WEFT_SOAK_S", "300"))
CALM_S = float(os.environ.get("WEFT_CALM_S", "120"))
NUM_PEERS, NUM_STEADY = 8, 2
FAULT_EVERY_S = 20.0
YOUNG_S = 45.0  # who started so recently is left alone: it may still be loading torch
# Of a process, in which memory is first used: who has evaluated, saved and answered newcomers once has used all of it.
WARM_S = max(60.0, SOAK_S / 5)
WINDOW_S = 30.0  # at the beginning and the end of what is compared
GROWTH = 0.05
WRONG = ("Traceback", "Warning", "warning", "Exception", "Error", "weft: ")  # in what a process says to a person
Tell = Callable[[str], None]
QUIET_S = 90.0  # without a commit: longer than any fault that was played takes
RUN = """
name = "soak"
peers = 8
model = {type = "shape", num_layers = 1, num_heads = 2, width = 32, ffn_width = 64}
data = {source = {type = "text", paths = ["text.txt"]}}
train = {seq_len = 128, batch_size = 16, tokens = 1_000_000_000_000, schedule = {type = "constant", lr = 1e-3}, \
evaluate_every = 20, evaluate_windows = 16}
method = {type = "diloco", every = 20}
"""


def script(seed: int) -> Scenario:
    """Return eight machines, the newcomers that replace those that do not return, and what befalls all of them."""
    luck = stream(seed, "soak")
    there = {f"peer-{number}": -YOUNG_S for number in range(NUM_PEERS)}
    steady = list(there)[1 : 1 + NUM_STEADY]  # not the maker: it is to be ended like others
    kinds, faults = [Kind(name=name) for name in there], list[Fault]()
    at_s = FAULT_EVERY_S
    while at_s < SOAK_S - 2 * FAULT_EVERY_S:
        settled = [name for name, came_s in there.items() if at_s - came_s >= YOUNG_S]
        victim = settled[int(luck.integers(len(settled)))]
        what = ("freeze", "kill", "replace", "stop", "leave")[int(luck.integers(5))]
        away_s = float(luck.integers(5, 21))
        if what == "freeze" or victim in steady:
            faults.append(Freeze(peer=victim, at_s=at_s, lasts_s=away_s))
            there[victim] = at_s + away_s - YOUNG_S / 2
        elif what in ("kill", "stop"):  # and comes back as itself
            faults.append((Kill if what == "kill" else Stop)(peer=victim, at_s=at_s, returns_after_s=away_s))
            there[victim] = at_s + away_s
        else:
            faults.append((Kill if what == "replace" else Stop)(peer=victim, at_s=at_s))
            del there[victim]
            kinds.append(Kind(name=f"peer-{len(kinds)}", joins_at_s=at_s))
            there[kinds[-1].name] = at_s
        at_s += FAULT_EVERY_S
    return Scenario(run="", kind=tuple(kinds), fault=tuple(faults), seed=seed, limit_s=SOAK_S)


@pytest.fixture
def tell(capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Tell:
    """Return what shows a line to who waits for the test."""
    writer = request.config.get_terminal_writer()

    def show(line: str) -> None:
        with capfd.disabled():
            writer.line("\n" + line)

    return show


class Scales:
    """Weighs all processes every few seconds."""

    def __init__(self, stage: RealStage) -> None:
        self._stage = stage
        self._num_calls = 0
        self.weights: dict[int, list[tuple[float, int]]] = {}  # by process: seconds since it began, bytes
        self.names: dict[int, str] = {}

    def __call__(self) -> None:
        self._num_calls += 1
        if self._num_calls % 4:
            return
        for machine in self._stage.living:
            process = psutil.Process(machine.lives[-1].process.pid)
            self.names[process.pid] = machine.name
            since = time.time() - process.create_time()
            self.weights.setdefault(process.pid, []).append((since, process.memory_info().rss))

    def growths(self) -> Iterator[tuple[str, float, float, float]]:
        """Yield of each process that was there long enough: whose it was, for how long, bytes then, and its growth."""
        for pid, weights in self.weights.items():
            first = [nbytes for since, nbytes in weights if WARM_S <= since < WARM_S + WINDOW_S]
            lasts_s = weights[-1][0]
            if lasts_s >= WARM_S + 3 * WINDOW_S:
                last = [nbytes for since, nbytes in weights if since > lasts_s - WINDOW_S]
                yield self.names[pid], lasts_s, median(first), median(last) / median(first) - 1


def commits(machine: RealMachine) -> list[tuple[float, RoundCommitted]]:
    return [(entry.at, entry.event) for entry in machine.entries if isinstance(entry.event, RoundCommitted)]


def require_sound(stage: RealStage, folder: Path) -> list[float]:
    """Check what holds of any play: nothing broke, nothing is left over, one history; return when commits were made."""
    assert stage.broken == []
    for machine in stage.machines.values():
        if machine.said.exists():
            assert [word for word in WRONG if word in machine.said.read_text()] == [], machine.said.read_text()
    left = [each for each in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(each.info["cmdline"] or ())]
    assert left == []
    manifests: dict[tuple[str, int], set[str]] = {}
    times = []
    for machine in stage.machines.values():
        for at, event in commits(machine):
            manifests.setdefault((event.branch, event.round), set()).add(event.manifest)
            times.append(at)
    assert {where: named for where, named in manifests.items() if len(named) > 1} == {}
    assert len({branch for branch, _ in manifests}) == 1  # a majority was always there
    return sorted(times)


def write_run(folder: Path) -> Path:
    (folder / "text.txt").write_text("".join(f"def f{n}(x):\n    return x * {n * n} + {n}\n" for n in range(20_000)))
    path = folder / "run.toml"
    path.write_text(RUN)
    return path


@pytest.mark.parametrize("seed", [1])
async def test_kills_freezes_and_returns_leave_one_history_and_nobody_grows(
    tmp_path: Path, tell: Tell, seed: int
) -> None:
    scenario = script(seed)
    stage = RealStage(scenario, write_run(tmp_path), tmp_path)
    scales = Scales(stage)
    await stage.play(scales)
    times = require_sound(stage, tmp_path)
    longest = max(np.diff([stage.began_at, *(at for at in times if at > stage.began_at)]))
    assert longest < QUIET_S

    # Who was there at the end had made the same last steps, up to the goodbyes of the others.
    ends_at = stage.began_at + SOAK_S
    settled = [
        machine for machine in stage.machines.values() if machine.lives and machine.lives[-1].ended_at >= ends_at
    ]
    assert len(settled) >= NUM_PEERS - 1
    heads = {machine.name: max(event.round for at, event in commits(machine) if at < ends_at) for machine in settled}
    assert max(heads.values()) - min(heads.values()) <= 1, heads

    grown = list(scales.growths())
    kinds = [type(fault).__name__ for fault in scenario.fault]
    played = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    tell(f"{SOAK_S:.0f} s: {played}; longest without a commit {longest:.1f} s")
    for name, lasts_s, nbytes, growth in sorted(grown):
        tell(f"{name}: {lasts_s:.0f} s, {nbytes / 1e6:.0f} MB, {100 * growth:+.2f} %")
    assert {name for name, *_ in grown} >= {"peer-1", "peer-2"}
    assert max(growth for *_, growth in grown) < GROWTH, grown


async def test_nobody_is_falsely_removed_while_one_compiles_and_one_saves(tmp_path: Path, tell: Tell) -> None:
    compiling, saving = tmp_path / "compiling.toml", tmp_path / "saving.toml"
    compiling.write_text("is_compiled = true\n")
    saving.write_text("checkpoint_every_s = 0.5\n")
    again = range(30, int(CALM_S) - 30, 60)  # each of its processes compiles anew
    scenario = Scenario(
        run="",
        kind=(Kind(name="peer", count=NUM_PEERS - 2), Kind(name="saver"), Kind(name="compiler")),
        fault=tuple(Stop(peer="compiler", at_s=float(at_s), returns_after_s=1.0) for at_s in again),
        limit_s=CALM_S,
    )
    options = {"compiler": ("--machine", str(compiling)), "saver": ("--machine", str(saving))}
    stage = RealStage(scenario, write_run(tmp_path), tmp_path, options)
    await stage.play()
    require_sound(stage, tmp_path)
    ends_at = stage.began_at + CALM_S
    told = [entry for machine in stage.machines.values() for entry in machine.entries if entry.at < ends_at]
    assert [entry for entry in told if isinstance(entry.event, MemberGone)] == []
    compiler = stage.machines["compiler"].entries
    assert sum(isinstance(entry.event, StepDone) for entry in compiler) > 0
    assert not any(isinstance(entry.event, FellBack) for entry in compiler)  # it did compile
    suspected = [entry.event for entry in told if isinstance(entry.event, MemberSuspected)]
    saved = [entry for entry in stage.machines["saver"].entries if isinstance(entry.event, CheckpointSaved)]
    assert len(saved) > CALM_S / 20
    longest = max(itertools.chain([0.0], (event.silent_s for event in suspected)))
    tell(f"{CALM_S:.0f} s: {len(saved)} checkpoints of one; another compiled {len(again) + 1} times")
    tell(f"suspected {len(suspected)} times, after {longest:.1f} s of silence at most")
