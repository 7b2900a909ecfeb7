"""DiLoCo's robustness in miniature: lost deltas, peers that come and go: writes benchmarks/reports/robustness.md.

    python -m benchmarks.robustness            # some twenty-five minutes of one idle core; --jobs 2 plays two at a time

Whole production peers with real models on the simulator's virtual clock. The questions are those of Douillard et al.,
2311.08105: what it costs that deltas are dropped (their section 3.2, "asynchronous communication"), and whether the
number of peers may vary during a run ("adaptive compute").
"""

import argparse
import math
import multiprocessing
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev

from benchmarks.report import load, load_line, table, write
from weft.data.corpus import CorpusConfig, TextSource
from weft.events import RoundCommitted
from weft.log import read_jsonl
from weft.peer.loop import evaluate as evaluation
from weft.run.config import RunFile, ShapedModel, TrainConfig
from weft.sim.play import Played, play
from weft.sim.scenario import Drop, Fault, Kind, Scenario, Stop
from weft.sync.method.presets import DiLoCoConfig
from weft.sync.method.schedule import CosineConfig

NUM_PEERS = 8  # as the paper has
NUM_ROUNDS = 40
EVERY, BATCH, SEQ_LEN = 10, 4, 64
LEASE = EVERY * BATCH * SEQ_LEN  # tokens of one peer in one round
ROUND_S = 10.0  # of inner steps, virtual
SEEDS = (0, 1, 2)
SHARES = (0.0, 0.1, 0.3, 0.5)
TEXT = ("asyncio", "email", "http", "json", "logging", "unittest", "xml")  # packages of Python's own library

ABOUT = f"""
A model of 2 layers, width 64, on bytes of Python's standard library; {NUM_PEERS} peers, diloco, H = {EVERY}, batch
{BATCH} x {SEQ_LEN} tokens, {NUM_ROUNDS} rounds where everybody is counted in each; inner AdamW with a cosine schedule
over the run's tokens, outer Nesterov (0.7, 0.5): momentum 0.9 needs more rounds than these to settle. Held-out loss of
the outer parameters at the end, in nats per byte; perplexity is that of a byte. Mean over seeds
{", ".join(map(str, SEEDS))} (of weights, data and luck), with the standard deviation between them.
""".strip()
DROPPED = """
## Deltas that are lost

In each round each peer's payload is lost with the probability in the first column, for all others at once. Its peer
keeps what it has trained, trains on, and brings all of it to the next round. What a round counted on average is beside
it: a leader always has its own. A run ends with the same committed tokens as without losses,
so it needs more rounds; what is still carried at the end was trained in vain. In the paper a lost delta costs at worst
2.1 % of perplexity (half of them lost, data not shuffled; 150M parameters, 8 peers, H = 500).
""".strip()
ADAPTIVE = """
## Peers that come and go

The paper's six schedules of compute. Peers join and say goodbye while the run goes on; a run is complete when it has
committed what its schedule gives it, {rounds} rounds' worth of the peers of each moment. The paper finds that the
quality follows from the compute in all, not from when it was there.
""".strip().format(rounds=NUM_ROUNDS)


@dataclass(frozen=True)
class Row:
    """A swarm: how many peers there are in each round, and what of their payloads is lost."""

    name: str
    peers: tuple[int, ...]
    share: float = 0.0


def ramp(first: int, last: int) -> tuple[int, ...]:
    """Return the number of peers in each round as it goes from one to the other in equal steps."""
    steps = range(first, last + (1 if last > first else -1), 1 if last > first else -1)
    return tuple(steps[round * len(steps) // NUM_ROUNDS] for round in range(NUM_ROUNDS))


HALF = NUM_ROUNDS // 2
DROPS = tuple(Row(f"{share:.0%}", (NUM_PEERS,) * NUM_ROUNDS, share) for share in SHARES)
SCHEDULES = (
    Row("constant local", (1,) * NUM_ROUNDS),
    Row("constant distributed", (NUM_PEERS,) * NUM_ROUNDS),
    Row("doubling", (NUM_PEERS // 2,) * HALF + (NUM_PEERS,) * HALF),
    Row("halving", (NUM_PEERS,) * HALF + (NUM_PEERS // 2,) * HALF),
    Row("ramping up", ramp(1, NUM_PEERS)),
    Row("ramping down", ramp(NUM_PEERS, 1)),
)


def scenario_of(row: Row, seed: int) -> Scenario:
    """Return the machines of a row, those that are there from the start first, and when the others come and all go."""
    comes = [next(round for round, num in enumerate(row.peers) if num > peer) for peer in range(max(row.peers))]
    goes = {
        peer: round for round, (before, after) in enumerate(pairwise(row.peers), 1) for peer in range(after, before)
    }
    kinds = tuple(
        Kind(name=f"peer-{peer}", tokens_per_s=LEASE / ROUND_S, joins_at_s=ROUND_S * round)
        for peer, round in enumerate(comes)
    )
    faults: list[Fault] = [Stop(peer=f"peer-{peer}", at_s=ROUND_S * round) for peer, round in goes.items()]
    if row.share:
        faults += [Drop(peer=kind.name, at_s=0.0, share=row.share) for kind in kinds]
    return Scenario(run="", kind=kinds, fault=tuple(faults), seed=seed, limit_s=100 * NUM_ROUNDS * ROUND_S)


def run_file_of(row: Row, seed: int) -> RunFile:
    tokens = sum(row.peers) * LEASE
    library = Path(sysconfig.get_path("stdlib"))
    return RunFile(
        name="robustness",
        seed=seed,
        peers=max(row.peers),
        model=ShapedModel(num_layers=2, num_heads=2, width=64, ffn_width=172),
        data=CorpusConfig(source=TextSource(paths=tuple(str(library / each / "*.py") for each in TEXT))),
        train=TrainConfig(
            seq_len=SEQ_LEN,
            batch_size=BATCH,
            tokens=tokens,
            schedule=CosineConfig(lr=4e-3, warmup_tokens=tokens // 20, total_tokens=tokens),
            evaluate_every=0,
            evaluate_windows=512,
        ),
        method=DiLoCoConfig(every=EVERY, lr=0.7, momentum=0.5),
    )


@dataclass(frozen=True)
class Found:
    """What came of one play."""

    played: Played
    counted: float  # payloads in a mean round
    cpu_s: float


def run(job: tuple[Row, int]) -> Found:
    row, seed = job
    evaluation.SAMPLE_TOKENS = 1  # nobody reads these texts
    began = time.process_time()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "log.jsonl").open("wb") as log:
            played = play(scenario_of(row, seed), run_file_of(row, seed), folder, folder, log.write)
        commits = [entry.event for entry in read_jsonl(folder / "log.jsonl") if isinstance(entry.event, RoundCommitted)]
    if played.broken or played.nats_per_byte is None:
        raise RuntimeError(f"{row.name}, seed {seed}: {played.broken or 'the run was not completed'}")
    counted = mean({event.round: len(event.contributors) for event in commits}.values())
    print(row.name, seed, f"{played.nats_per_byte:.4f}", played.num_rounds, f"{counted:.2f}", flush=True)
    return Found(played, counted, time.process_time() - began)


def rows_of(rows: Sequence[Row], found: dict[Row, list[Found]], usual: float) -> list[tuple[object, ...]]:
    """Return a table's rows.

    Args:
        usual: the loss that perplexities are compared with.
    """
    lines: list[tuple[object, ...]] = []
    for row in rows:
        played = [each.played for each in found[row]]
        losses = [each.nats_per_byte or math.nan for each in played]
        trained = mean(sum(machine.trained for machine in each.machines) for each in played)
        lines.append(
            (
                row.name,
                mean(each.num_rounds for each in played),
                f"{mean(each.counted for each in found[row]):.2f}",
                round(mean(each.committed_tokens for each in played)),
                f"{100 * trained / mean(each.committed_tokens for each in played) - 100:.1f} %",
                f"{mean(losses):.4f} +- {stdev(losses):.4f}",
                f"{100 * math.expm1(mean(losses) - usual):+.2f} %",
                round(mean(each.cpu_s for each in found[row]), 1),
            )
        )
    return lines


def run_all(rows: Iterable[Row], jobs: int) -> dict[Row, list[Found]]:
    jobs_to_do = [(row, seed) for row in dict.fromkeys(rows) for seed in SEEDS]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        found: dict[Row, list[Found]] = {}
        for (row, _), result in zip(jobs_to_do, pool.map(run, jobs_to_do), strict=True):
            found.setdefault(row, []).append(result)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="plays at a time")
    chosen, before = parser.parse_args(), load()
    found = run_all((*DROPS, *SCHEDULES), chosen.jobs)
    head = (
        "rounds",
        "counted in one",
        "committed tokens",
        "trained in vain",
        "held-out loss",
        "perplexity",
        "CPU-seconds",
    )
    usual = mean(each.played.nats_per_byte or math.nan for each in found[DROPS[0]])
    sections = [
        ABOUT,
        load_line(before),
        DROPPED,
        table(("lost", *head), rows_of(DROPS, found, usual)),
        ADAPTIVE,
        table(("schedule", *head), rows_of(SCHEDULES, found, usual)),
        "Perplexity: against the row without losses, of all peers all the time.",
    ]
    write("robustness", "Lost deltas, and peers that come and go", "python -m benchmarks.robustness", sections)


if __name__ == "__main__":
    main()
