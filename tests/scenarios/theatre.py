"""Scenarios as files describe them, played with production peers and a model of some ten thousand parameters.

played = theatre(Freeze(peer="lab-2", at_round=3, lasts_s=5.0))
theatre.check(played)
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from scenarios import rules
from scenarios.swarm import BATCH, EVERY, FEDAVG, LEASE_TOKENS, MODEL, SEQ_LEN, write_corpus
from weft.data.corpus import CorpusConfig, TextSource
from weft.events import BranchLeft, Event, RoundCommitted
from weft.log import read_jsonl
from weft.run.config import RunFile, TrainConfig
from weft.sim.play import Machine, Played, play
from weft.sim.scenario import Fault, Kind, Scenario
from weft.sync.method.schedule import ConstantConfig

E = TypeVar("E", bound=Event)

SPEED = LEASE_TOKENS / 1.0  # a round's inner steps take a second
NUM_ROUNDS = 12
CALM: dict[tuple[tuple[str, Any], ...], Played] = {}
FIRST_ROUNDS = 3  # in which nothing is measured yet, and all wait long for each other


def make_run_file(root: Path) -> RunFile:
    return RunFile(
        name="scenario",
        model=MODEL,
        data=CorpusConfig(source=TextSource(paths=(str(write_corpus(root)),))),
        train=TrainConfig(
            seq_len=SEQ_LEN,
            batch_size=BATCH,
            tokens=NUM_ROUNDS * 4 * BATCH * SEQ_LEN * EVERY,
            schedule=ConstantConfig(lr=1e-2),
            evaluate_every=0,
            evaluate_windows=4,
        ),
        method=FEDAVG,
    )


class Theatre:
    """Plays scenarios, of four machines where nothing else is asked for, each in a folder of its own.

    Nothing is learnt, unless a scenario asks for real computing: it takes most of the time, and tests of parts do it.
    """

    def __init__(self, run_file: RunFile, root: Path) -> None:
        self.run_file = run_file
        self.root = root
        self.logs: list[bytes] = []

    def calm(self, **scripted: Any) -> Played:
        """Return how a scenario of a run as `make_run_file` makes it goes without faults: it is played once."""
        key = tuple(sorted(scripted.items()))
        if key not in CALM:
            CALM[key] = self(**scripted)
        return CALM[key]

    def __call__(
        self,
        *faults: Fault,
        seed: int = 1,
        more: tuple[Kind, ...] = (),
        scenario: dict[str, Any] | None = None,
        **kind: Any,
    ) -> Played:
        """Play a kind "lab" and `more` kinds. Every error that nobody handled fails the test.

        Args:
            scenario: its other fields.
            kind: fields of the first kind.
        """
        lab = Kind(name="lab", **({"tokens_per_s": SPEED, "count": 4} | kind))
        fields = {"limit_s": 3600.0, "compute": "cost"} | (scenario or {})
        described = Scenario(run="", kind=(lab, *more), fault=faults, seed=seed, **fields)
        lines: list[bytes] = []
        folder = self.root / f"play-{len(self.logs)}"
        played = play(described, self.run_file, self.root, folder, lines.append)
        self.logs.append(b"".join(lines))
        assert played.broken == ()
        return played

    def heard(self, kind: type[E], *machines: Machine) -> list[tuple[float, E]]:
        """Return what machines of the last play said of a kind (none named: all), and when."""
        path = self.root / "log.jsonl"
        path.write_bytes(self.logs[-1])
        peers = {machine.peer for machine in machines}
        return [
            (entry.at, entry.event)
            for entry in read_jsonl(path)
            if isinstance(entry.event, kind) and (not peers or entry.peer in peers)
        ]

    def commits(self, *machines: Machine) -> list[RoundCommitted]:
        """Return the outer steps that machines of the last play made."""
        return [event for _, event in self.heard(RoundCommitted, *machines)]

    def check(self, played: Played, *, longest_s: float | None = None, unhurt: Sequence[Machine] = ()) -> None:
        """Assert R1 to R4 of the last play, of all machines.

        Args:
            longest_s: between two commits of one of `unhurt`.
        """
        commits = self.commits()
        rules.one_history(commits)
        rules.everybody_is_named(commits, {(each.branch, each.round): each for each in played.manifests})
        complete = {machine.replica for machine in played.machines if machine.end == "complete"}
        assert len(complete) == 1, f"{len(complete)} replicas"
        has_left = {event.branch for _, event in self.heard(BranchLeft)}
        for machine in played.machines:
            assert machine.counted <= machine.trained, f"work of {machine.name} was counted twice"
            if machine.end == "complete" and machine.num_lives == 1 and not has_left:
                assert machine.trained - machine.counted == machine.carried, f"{machine.name} lost work in silence"
        for machine in unhurt:
            assert longest_s is not None
            rules.no_long_wait([at for at, _ in self.heard(RoundCommitted, machine)], longest_s)


def names(played: Played, *wanted: str) -> list[Machine]:
    """Return machines by name, in the order asked."""
    return [next(machine for machine in played.machines if machine.name == name) for name in wanted]
