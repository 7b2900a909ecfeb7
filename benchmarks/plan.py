"""What `weft plan` says of four peers on this machine against four that train: writes benchmarks/reports/plan.md.

    python -m benchmarks.plan

Each case is timed as `weft plan --device here --line loopback` does, by one process for each core that makes inner
steps; then four processes train (`benchmarks._shells`), over TLS on loopback, a thread each, and their logs tell how
long rounds took. What one process does is shared out among the four: here they share two cores.

Other programs make both slower, and not alike, so CPU time is measured beside: of inner steps alone, and of the threads
of all four processes from commit to commit. On an idle machine that four processes fill, the two agree. On an idle
machine of two cores it takes some three minutes.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import torch

from benchmarks._shells import run as run_shells
from benchmarks._threads import Threads
from benchmarks.report import load, load_line, table, write
from weft.cli.plan.question import Method, Named, Own, Prices
from weft.cli.plan.question import run as ask
from weft.cli.plan.speed_here import Timed, measure
from weft.events import RoundCommitted
from weft.log import read_jsonl
from weft.plan.forecast import Pace, load_of, pace_of
from weft.plan.processor import ProcessorTime, processor_time
from weft.plan.timing import Line
from weft.run.host import num_cores

HOUSE = Path(__file__).parents[1]
PEERS = 4
SKIPPED = 3  # rounds: streams open, caches are cold
RUN = """
name = "planned"
peers = 4
[model]
{model}
[data.source]
type = "text"
paths = ["text.txt"]
[train]
seq_len = 128
batch_size = {batch}
tokens = {tokens}
evaluate_every = 0
evaluate_windows = 16
[train.schedule]
type = "constant"
[method]
{method}
"""
DEMO = 'type = "shape"\nnum_layers = 2\nnum_heads = 4\nwidth = 128\nffn_width = 344\nhas_qk_norm = true'
NANO = 'type = "size"\nsize = "nano"'
TITLE = "What a plan says against what processes do"
ABOUT = """
Four processes on this machine, a thread each, over TLS on loopback, and the text is weft's own source. The plan knows
one process's inner steps, timed for three seconds just before while as many others as there are cores make the same,
and nothing of the run. Aim: 15 %.

Seconds per round are the median over rounds after the first three, as the members' logs tell; bytes the mean that a
member sends in one. Where other programs want the cores, wall time says how many they were: then CPU time is the
fairer figure. Planned it is one process's usual step, timed likewise, and what `weft.plan.processor` adds up beside
it, of rounds as long as they were; measured it is that of the thread that makes inner steps, and of all others.
""".strip()


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    batch: int
    method: str
    every: int
    num_rounds: int

    def text(self) -> str:
        tokens = self.num_rounds * PEERS * self.every * self.batch * 128
        return RUN.format(model=self.model, batch=self.batch, tokens=tokens, method=self.method)


CASES = (
    Case("the demo's model, diloco, H = 10", DEMO, 4, 'type = "diloco"\nevery = 10', 10, 16),
    Case("nano, diloco, H = 20", NANO, 8, 'type = "diloco"\nevery = 20', 20, 8),
    Case("nano, ddp", NANO, 8, 'type = "ddp"', 1, 40),
)


@dataclass(frozen=True)
class Measured:
    wall_s: float  # of a usual round
    mean_s: float  # of a round
    steps_cpu_s: float  # of a round and process
    beside_cpu_s: float
    sent_nbytes: float
    num_short: int  # rounds that left somebody out


def median_cpu_s(step: Callable[[], None]) -> float:
    """Return the CPU-seconds of a usual step of this process."""
    took_s: list[float] = []
    while len(took_s) < 8 or sum(took_s) < 3.0:
        began = time.process_time()
        step()
        took_s.append(time.process_time() - began)
    return median(took_s[3:])


@dataclass(frozen=True)
class Planned:
    """What a plan says of a round, and of what it takes of one process."""

    pace: Pace
    processor: ProcessorTime
    steps_cpu_s: float

    def beside_cpu_s(self, wall_s: float) -> float:
        """Return the CPU-seconds beside inner steps, where a round took so long."""
        return self.processor.total_s + self.processor.upkeep * wall_s


def planned(path: Path, timed: Timed | None) -> Planned:
    """Return the plan of a run file among all peers on this machine."""
    line = Named(Line(), True, "loopback")
    own = Own(device=None, tokens_per_s=1.0, efficiency=None, watts=None, price_per_hour=0.0, line=line)
    question = ask(path, (), PEERS, own, Method(method=None, every=None, codec=None), Prices(*4 * [None])).question
    here = measure(question.model, question.train, PEERS, timed)
    peers = replace(question.machines[0], tokens_per_s=here.tokens_per_s, crowding=here.crowding)
    question = replace(question, machines=(peers,))
    pace = pace_of(question)
    return Planned(pace, processor_time(question, load_of(question)), pace.round.train_s / here.crowding)


def measured(folder: Path) -> Measured:
    with Threads() as threads:
        run_shells("run.toml", PEERS, folder)
    entries = [entry for log in folder.glob("home*/runs/*/*/log.jsonl") for entry in read_jsonl(log)]
    commits = [(entry.at, entry.event) for entry in entries if isinstance(entry.event, RoundCommitted)]
    numbers = sorted({event.round for _, event in commits})[SKIPPED - 1 :]
    at = [min(at for at, event in commits if event.round == number) for number in numbers]
    used, num = threads.used([at[0], at[-1]]), len(at) - 1
    late = [event for _, event in commits if event.round > SKIPPED]
    return Measured(
        wall_s=median(after - before for before, after in pairwise(at)),
        mean_s=(at[-1] - at[0]) / num,
        steps_cpu_s=float(used.steps_s[0]) / num,
        beside_cpu_s=float(used.beside_s[0]) / num,
        sent_nbytes=fmean(event.sent_nbytes for event in late),
        num_short=len({event.round for event in late if len(event.contributors) < PEERS}),
    )


def row(case: Case, text: str) -> Sequence[object]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text(text, encoding="utf-8")
        (folder / "run.toml").write_text(case.text(), encoding="utf-8")
        by_wall, by_cpu = planned(folder / "run.toml", None), planned(folder / "run.toml", median_cpu_s)
        found = measured(folder)
    round_s, beside_s = by_wall.pace.round.total_s, by_cpu.beside_cpu_s(found.mean_s)
    cpu_s, planned_cpu_s = found.steps_cpu_s + found.beside_cpu_s, by_cpu.steps_cpu_s + beside_s
    cells = (
        case.name,
        f"{round_s:.3f}",
        f"{found.wall_s:.3f}",
        f"{found.wall_s / round_s - 1:+.0%}",
        f"{1e3 * by_cpu.steps_cpu_s:.1f} + {1e3 * beside_s:.1f}",
        f"{1e3 * found.steps_cpu_s:.1f} + {1e3 * found.beside_cpu_s:.1f}",
        f"{cpu_s / planned_cpu_s - 1:+.0%}",
        f"{by_wall.pace.traffic.sent_nbytes / found.sent_nbytes - 1:+.1%}",
        found.num_short,
    )
    print(*cells, by_cpu.processor, sep=" | ", flush=True)
    return cells


def main() -> None:
    torch.set_num_threads(1)
    before = load()
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((HOUSE / "src").rglob("*.py")))
    rows = [row(case, text) for case in CASES]
    header = (
        "run",
        "s a round, planned",
        "measured",
        "longer by",
        "CPU ms of one process, steps + beside: planned",
        "measured",
        "more by",
        "bytes, planned / measured",
        "short rounds",
    )
    sections = [ABOUT, f"{num_cores()} cores. {load_line(before)}", table(header, rows)]
    write("plan", TITLE, "python -m benchmarks.plan", sections)


if __name__ == "__main__":
    main()
