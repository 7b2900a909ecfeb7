"""What kills and replacements cost in loss: production peers with real models on the simulator's virtual clock.

The same script as that of the real processes, at as many rounds a kill; see `benchmarks/churn.py`.
"""

import math
import multiprocessing
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import mean

import msgspec

from benchmarks.report import commit, table
from benchmarks.robustness import EVERY, ROUND_S, SEEDS, Row, run_file_of
from weft.peer.loop import evaluate as evaluation
from weft.rng import stream
from weft.run.config import RunFile
from weft.sim.play import play
from weft.sim.scenario import Fault, Kill, Kind, Scenario
from weft.sync.method.presets import DdpConfig, DiLoCoConfig

NUM_PEERS, FEWER = 8, 6
START_S = 5 * ROUND_S  # from a kill to the newcomer's first request
KILL_EVERY_S = {"60": 10 * ROUND_S, "15": 2.5 * ROUND_S}
METHODS = {"diloco": DiLoCoConfig(every=EVERY, lr=0.7, momentum=0.5), "ddp": DdpConfig()}
# Times `EVERY` inner steps of all. In short runs the number of outer steps decides, not who makes them: see `ABOUT`.
NUM_ROUNDS = {"diloco": 120, "ddp": 40}
MOST_APART = 1.0  # percent, the aim: of the loss of as many committed tokens of whom nobody dies

ABOUT = f"""
## Loss

Whole peers with real models in the simulator: {NUM_PEERS} of them, the model and text of `robustness`. Where nobody
dies `diloco` makes {NUM_ROUNDS["diloco"]} rounds of {EVERY} inner steps, `ddp` {EVERY * NUM_ROUNDS["ddp"]} of one.
As happens above every 60 s and 15 s, one peer is killed every {10 * EVERY} or every {25 * EVERY // 10} inner steps, and
a newcomer asks to join {5 * EVERY} inner steps later. All runs of a method end with the same committed tokens, to 1 %.
Held-out loss of the outer parameters at the end, nats per byte, seed by seed.

The aim: a loss within {MOST_APART:g} % of that of {NUM_PEERS} of whom nobody dies, with the same committed tokens.
""".strip()

WHY = f"""
At equal tokens fewer peers in a round make more rounds, and in runs as short as these each outer step lowers the loss:
{FEWER} peers of whom nobody dies end lower still. The column "against as many rounds" makes another comparison, not
that of the aim: with as many rounds, on a line between {NUM_PEERS} and {FEWER} peers of whom nobody dies.
""".strip()


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """How one play ended."""

    method: str
    num_peers: int
    kill_every: str  # "": never
    seed: int
    loss: float
    committed: int
    num_rounds: int
    num_killed: int
    commit: str

    @property
    def job(self) -> "Job":
        return Job(self.method, self.num_peers, self.kill_every, self.seed)


class Job(msgspec.Struct, frozen=True):
    method: str
    num_peers: int
    kill_every: str
    seed: int


ROWS = ((NUM_PEERS, ""), (FEWER, ""), *((NUM_PEERS, every) for every in KILL_EVERY_S))


def scenario_of(job: Job) -> Scenario:
    """Return who comes, and who is killed when."""
    length_s = NUM_ROUNDS[job.method] * ROUND_S
    speed = _run_file_of(job).train.tokens / (NUM_PEERS * length_s)
    names = [f"peer-{number}" for number in range(job.num_peers)]
    kinds, faults = [Kind(name=name, tokens_per_s=speed) for name in names], list[Fault]()
    luck, every_s = stream(job.seed, "churn"), KILL_EVERY_S.get(job.kill_every, math.inf)
    at_s = every_s
    while at_s < length_s:
        settled = [kind.name for kind in kinds if kind.name in names and kind.joins_at_s <= at_s]
        victim = settled[int(luck.integers(len(settled)))]
        names[names.index(victim)] = newcomer = f"peer-{len(kinds)}"
        faults.append(Kill(peer=victim, at_s=at_s))
        kinds.append(Kind(name=newcomer, tokens_per_s=speed, joins_at_s=at_s + START_S))
        at_s += every_s
    return Scenario(run="", kind=tuple(kinds), fault=tuple(faults), seed=job.seed, limit_s=100 * length_s)


def run(job: Job) -> Loss:
    evaluation.SAMPLE_TOKENS = 1  # nobody reads these texts
    run_file, scenario = _run_file_of(job), scenario_of(job)
    with tempfile.TemporaryDirectory() as folder:
        played = play(scenario, run_file, Path(folder), Path(folder), lambda _line: None)
    if played.broken or played.nats_per_byte is None:
        raise RuntimeError(f"{job}: {played.broken or 'the run was not completed'}")
    found = Loss(
        method=job.method,
        num_peers=job.num_peers,
        kill_every=job.kill_every,
        seed=job.seed,
        loss=played.nats_per_byte,
        committed=played.committed_tokens,
        num_rounds=played.num_rounds,
        num_killed=len(scenario.fault) - len(played.unplayed),
        commit=commit(),
    )
    print(found, flush=True)
    return found


def _run_file_of(job: Job) -> RunFile:
    same = Row("", (NUM_PEERS,) * NUM_ROUNDS[job.method])  # tokens
    return msgspec.structs.replace(run_file_of(same, job.seed), peers=job.num_peers, method=METHODS[job.method])


def measure_loss(method: str, known: Iterable[Loss], keep: Callable[[Loss], object], num_jobs: int = 2) -> None:
    """Play a method with all numbers of peers, frequencies of kills and seeds, so many plays at a time.

    Args:
        known: what was found before, and is not played again.
        keep: takes each play's end.
    """
    missing = set(_jobs(method)) - {each.job for each in known}
    with ProcessPoolExecutor(num_jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(run, job) for job in _jobs(method) if job in missing]
        for ended in as_completed(running):
            keep(ended.result())


def _jobs(method: str) -> list[Job]:
    return [Job(method, num, every, seed) for num, every in ROWS for seed in SEEDS]


def losses_told(losses: Iterable[Loss]) -> list[str]:
    found = {each.job: each for each in losses}
    rows, unfinished, means = [], [], []
    for method in METHODS:
        jobs = _jobs(method)
        if missing := [job for job in jobs if job not in found]:
            unfinished.append(f"`{method}`: {len(jobs) - len(missing)} of {len(jobs)} plays are made.")
            continue
        of = {(num, every): {seed: found[Job(method, num, every, seed)] for seed in SEEDS} for num, every in ROWS}
        for (num, every), those in of.items():
            compared = ("", "", "")
            if every:
                apart = _apart(those, {seed: each.loss for seed, each in of[NUM_PEERS, ""].items()})
                means.append(mean(apart))
                alike = _apart(those, _expected(those, of[NUM_PEERS, ""], of[FEWER, ""]))
                compared = _told(apart), _verdict(mean(apart)), _told(alike)
            rows.append(
                (
                    method,
                    num,
                    f"as every {every} s" if every else "nobody",
                    mean(each.num_killed for each in those.values()),
                    round(mean(each.committed for each in those.values())),
                    mean(each.num_rounds for each in those.values()),
                    f"{mean(each.loss for each in those.values()):.4f}",
                    *compared,
                    ", ".join(sorted({each.commit for each in those.values()})),
                )
            )
    of_play = ("method", "peers", "killed", "in all", "committed tokens", "rounds", "loss")
    head = (*of_play, f"against {NUM_PEERS}, nobody killed", f"aim: within {MOST_APART:g} %", "against as many rounds")
    return [*([table((*head, "commits"), rows), _missed(means)] if rows else []), *unfinished]


def _verdict(apart: float) -> str:
    if abs(apart) <= MOST_APART:
        return "met"
    return "missed, lower" if apart < 0 else "missed, higher"


def _missed(means: list[float]) -> str:
    """Return how many rows with kills miss the aim, which way, and why."""
    higher, lower = sum(each > MOST_APART for each in means), sum(each < -MOST_APART for each in means)
    ways = [f"{num} {way}" for num, way in ((lower, "downwards, with a lower loss"), (higher, "upwards")) if num]
    missed = f"{higher + lower} of {len(means)} rows with kills differ by more than {MOST_APART:g} %"
    return f"{missed} and miss the aim: {', '.join(ways)}.\n{WHY}" if ways else f"{missed}."


def _expected(those: dict[int, Loss], many: dict[int, Loss], few: dict[int, Loss]) -> dict[int, float]:
    """Return, seed by seed, the loss of as many rounds as `those` have, on a line between two undisturbed runs."""
    found = {}
    for seed, each in those.items():
        one, other = many[seed], few[seed]
        share = (each.num_rounds - one.num_rounds) / (other.num_rounds - one.num_rounds)
        found[seed] = one.loss + share * (other.loss - one.loss)
    return found


def _apart(those: dict[int, Loss], usual: dict[int, float]) -> list[float]:
    """Return how much higher a loss is, in percent, seed by seed."""
    return [100 * (each.loss / usual[seed] - 1) for seed, each in those.items()]


def _told(apart: list[float]) -> str:
    return f"{mean(apart):+.2f} % ({', '.join(f'{each:+.2f}' for each in apart)})"
