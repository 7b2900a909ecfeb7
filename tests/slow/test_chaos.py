"""Six real peers of one run under random kill -9, freezes and stops until its very end, by five methods.

    WEFT_CHAOS_SEEDS=10 pytest -m slow tests/slow/test_chaos.py       # each method with two seeds; five by default

What befalls whom next is drawn from the seed; when exactly, and where in a round, depends on the machine. There are
never more than two away: at least four of six go on.
"""

import itertools
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any

import msgspec
import pytest
from benchmarks.rig.real import RealMachine, RealStage

from slow.test_soak import Tell, commits, require_sound, tell
from weft.events import (
    CheckpointSaved,
    Entry,
    LegacyCounted,
    PayloadOffered,
    PeerStarted,
    PeerStopped,
    RoundCommitted,
    StepDone,
)
from weft.ids import PeerId, Tokens
from weft.rng import stream
from weft.sim.scenario import Fault, Freeze, Kill, Kind, Scenario, Stop

pytestmark = pytest.mark.slow

__all__ = ["tell"]  # a fixture
NUM_SEEDS = int(os.environ.get("WEFT_CHAOS_SEEDS", "5"))
NUM_PEERS, MOST_AWAY = 6, 2
NUM_LAST = 2.5  # rounds from the end, when the last blow falls: what is read of logs is half a second old
# Who says goodbye is not waited for at the end, and would go on alone: it must be back in time. Who is killed is.
STOPS_UNTIL = 0.5
AGAIN = 0.2  # of the times that chance takes one that has not come back yet, it is struck: the others have their turn
LIMIT_S = 2400.0
BATCH, SEQ_LEN = 4, 64
METHODS = {  # and rounds of all six: as long as many a process takes to start, however busy the machine is
    "ddp": ('{type = "ddp"}', 360),
    "diloco": ('{type = "diloco", every = 10}', 120),
    "streaming": ('{type = "streaming", every = 40, overlap = 3}', 120),
    "async-diloco": ('{type = "async-diloco", every = 10}', 120),
    "noloco": ('{type = "noloco", every = 10, mean_every = 4}', 120),
}
RUN = f"""
name = "chaos"
peers = {NUM_PEERS}
model = {{type = "shape", num_layers = 1, num_heads = 2, width = 32, ffn_width = 64}}
data = {{source = {{type = "text", paths = ["text.txt"]}}}}
train = {{seq_len = {SEQ_LEN}, batch_size = {BATCH}, tokens = %d, schedule = {{type = "constant", lr = 1e-3}}, \
evaluate_every = 20, evaluate_windows = 8}}
method = %s
"""
SAVES_S = {0: 3.0, 1: 20.0}  # peers with even and odd numbers


class Report(msgspec.Struct):
    """What of `--report` is compared."""

    reason: str
    replica: str
    committed_tokens: int


class Chaos:
    """Draws the next faults while a run goes on."""

    def __init__(self, stage: RealStage, seed: int, tokens: int, round_tokens: int) -> None:
        self._stage = stage
        self._luck = stream(seed, "chaos")
        self._stops_until = STOPS_UNTIL * tokens
        self._last_from = tokens - NUM_LAST * round_tokens
        self._is_last = False
        self._next_at = 0.0
        self._under: dict[str, Any] = {}  # a task for each that something befalls
        self.told: list[str] = []

    def __call__(self) -> None:
        away = {machine.name for machine in self._stage.machines.values() if not self._is_back(machine)}
        if not self._is_last and self._reached() >= self._last_from:
            self._is_last, self._next_at = True, 0.0
        if time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + float(self._luck.uniform(1.0, 8.0))
        num = 2 if self._luck.random() < 0.3 else 1
        there = [each for each in self._stage.machines.values() if each.is_running and not self._is_under(each)]
        for place in self._luck.permutation(len(there)).tolist()[:num]:
            victim = there[place]
            if victim.name in away and self._luck.random() > AGAIN:
                continue
            if len(away | {victim.name}) <= MOST_AWAY:
                away.add(victim.name)
                self._befall(victim)

    def _befall(self, victim: RealMachine) -> None:
        what, by = self._luck.choice(["kill", "freeze", "stop"]), (SIGINT, SIGTERM)[int(self._luck.integers(2))]
        short_s, long_s = float(self._luck.uniform(0.0, 6.0)), float(self._luck.uniform(1.0, 15.0))
        fault: Fault
        if what == "freeze":
            fault = Freeze(peer=victim.name, at_s=0.0, lasts_s=long_s)
        elif what == "stop" and self._reached() < self._stops_until and _entries_of_life(victim, PeerStarted):
            fault = Stop(peer=victim.name, at_s=0.0, returns_after_s=short_s)
        else:
            fault = Kill(peer=victim.name, at_s=0.0, returns_after_s=short_s)
        self._under[victim.name] = self._stage.befall(fault, stop_by=by)
        kind = f"stop by {by.name}" if isinstance(fault, Stop) else type(fault).__name__.lower()
        lasts_s = long_s if isinstance(fault, Freeze) else short_s
        self.told.append(f"{time.time():.1f} at {self._reached()} tokens: {kind} {victim.name}, {lasts_s:.1f} s")

    def _is_under(self, machine: RealMachine) -> bool:
        return machine.name in self._under and not self._under[machine.name].done()

    def _is_back(self, machine: RealMachine) -> bool:
        """Return whether a machine makes outer steps again after what befell it, or has ended by itself."""
        if self._is_under(machine):
            return False
        return not machine.is_running or bool(_entries_of_life(machine, RoundCommitted))

    def _reached(self) -> int:
        return max(event.committed_tokens for each in self._stage.machines.values() for _, event in commits(each))


def _entries_of_life(machine: RealMachine, kind: type) -> list[Entry]:
    since = machine.lives[-1].began_at
    return [entry for entry in machine.entries if entry.at >= since and isinstance(entry.event, kind)]


# --- what was counted ---


@dataclass
class Life:
    """One process of a peer, by its own log.

    Args:
        made: when, and how many tokens.
        offers: when, for which round, and how many tokens.
        counted: tokens of each round.
        saved: when, and at which round its last checkpoint was written.
    """

    before: "Life | None"
    is_killed: bool = True
    made: list[tuple[float, Tokens]] = field(default_factory=list)
    offers: list[tuple[float, int, Tokens]] = field(default_factory=list)
    counted: dict[int, Tokens] = field(default_factory=dict)
    saved: tuple[float, int] | None = None

    def hands_on(self) -> int:
        """Return the tokens that the next process may still bring, at most: what was saved comes first."""
        if not self.is_killed:
            return self.held()
        at, round = self.saved or (0.0, 0)
        return max(self.held(at, round) - sum(num for each, num in self.counted.items() if each > round), 0)

    def held(self, at: float = float("inf"), round: int | None = None) -> int:
        """Return the tokens that it had made or taken over until `at`, and no round up to `round` has counted."""
        taken_over = 0 if self.before is None else self.before.hands_on()
        counted = sum(num for each, num in self.counted.items() if round is None or each <= round)
        return taken_over + sum(num for when, num in self.made if when <= at) - counted


def lives_of(entries: Iterable[Entry]) -> list[Life]:
    lives: list[Life] = []
    for entry in entries:
        match entry.event:
            case PeerStarted():
                lives.append(Life(lives[-1] if lives else None))
            case PeerStopped():
                lives[-1].is_killed = False
            case StepDone(num_tokens=num):
                lives[-1].made.append((entry.at, Tokens(num)))
            case PayloadOffered(round=round, tokens=tokens):
                lives[-1].offers.append((entry.at, round, tokens))
            case CheckpointSaved(round=round):
                lives[-1].saved = entry.at, round
            case _:
                pass
    return lives


def require_counted_once(machines: Iterable[RealMachine], tokens: int) -> None:
    """Check that rounds count what their members offered, none of it twice, and add up to `tokens`."""
    machines = list(machines)
    rounds = {event.round: event for each in machines for _, event in commits(each)}
    legacies = {
        (entry.event.round, entry.event.by)
        for each in machines
        for entry in each.entries
        if isinstance(entry.event, LegacyCounted)
    }
    lives = {each.entries[0].peer: lives_of(each.entries) for each in machines}
    reached = 0
    for round, event in sorted(rounds.items()):
        assert len(set(event.contributors)) == len(event.contributors) == len(event.contributed)
        reached += sum(event.contributed)
        assert event.committed_tokens == reached, round
        for peer, num in zip(event.contributors, event.contributed, strict=True):
            if (round, peer) not in legacies:
                _count(lives[peer], peer, round, num)
    assert reached == tokens


def _count(lives: list[Life], peer: PeerId, round: int, tokens: Tokens) -> None:
    """Check that a process of a peer had these tokens and offered them to the round."""
    offers = [(life, at) for life in lives for at, where, num in life.offers if (where, num) == (round, tokens)]
    assert offers, f"{peer[:8]} did not offer {tokens} tokens to round {round}"
    life, at = offers[-1]
    assert tokens <= life.held(at), f"{peer[:8]} had {life.held(at)} tokens, and round {round} counts {tokens}"
    life.counted[round] = tokens


def options_of(folder: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    for number in range(NUM_PEERS):
        machine = folder / f"machine-{number}.toml"
        machine.write_text(f"checkpoint_every_s = {SAVES_S[number % 2]}\n")
        yield f"peer-{number}", ("--machine", str(machine), "--report", str(folder / f"peer-{number}.json"))


@pytest.mark.parametrize(
    ("method", "seed"), [(method, seed) for seed, method in zip(range(NUM_SEEDS), itertools.cycle(METHODS))]
)
async def test_faults_until_the_very_end_leave_one_digest_and_nothing_counted_twice(
    method: str, seed: int, tmp_path: Path, tell: Tell
) -> None:
    settings, num_rounds = METHODS[method]
    round_tokens = NUM_PEERS * BATCH * SEQ_LEN * (1 if method == "ddp" else 10)
    tokens = num_rounds * round_tokens
    (tmp_path / "text.txt").write_text("".join(f"def f{n}(x):\n    return x * {n * n} + {n}\n" for n in range(20_000)))
    (tmp_path / "run.toml").write_text(RUN % (tokens, settings))
    scenario = Scenario(run="", kind=(Kind(name="peer", count=NUM_PEERS),), seed=seed, limit_s=LIMIT_S)
    stage = RealStage(scenario, tmp_path / "run.toml", tmp_path, dict(options_of(tmp_path)))
    chaos = Chaos(stage, seed, tokens, round_tokens)
    try:
        await stage.play_to_end(chaos)
    finally:
        (tmp_path / "told").write_text("\n".join(chaos.told))
    machines = list(stage.machines.values())
    require_sound(stage, tmp_path)
    assert [path for each in machines for path in each.home.glob("errors/*")] == []
    for machine in machines:  # asked to stop, and at the end: 0
        assert {life.process.returncode for life in machine.lives} <= {0, -9}
        assert machine.lives[-1].process.returncode == 0
    killed = [life for each in machines for life in each.lives if life.process.returncode == -9]
    assert len(killed) == sum(": kill " in each for each in chaos.told)
    ends = [msgspec.json.decode((tmp_path / f"{each.name}.json").read_bytes(), type=Report) for each in machines]
    assert {end.reason for end in ends} == {"complete"}
    assert len({(end.replica, end.committed_tokens) for end in ends}) == 1, ends
    require_counted_once(machines, ends[0].committed_tokens)
    tell(f"{method}, seed {seed}: {len(chaos.told)} faults in {machines[0].entries[-1].at - stage.began_at:.0f} s")
