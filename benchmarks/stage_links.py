"""A model in sections on slow lines: tokens a second against `weft plan`, beside methods that train it whole.

    python -m benchmarks.stage_links        # a quarter of an hour; needs root

Real processes, each in a network namespace on a line of its own and with its share of the cores, as in `slow_links`.
Four of them train one model: whole with `ddp` and `sparseloco`, and in two sections of two members each, with either
inside a stage. What a machine does alone, the planner is told, and what part of a core it has; the
rest it says itself.
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks._company import Company, Machine, until
from benchmarks._slow_runs import machines_at, share_of_a_core
from benchmarks.report import load, load_line, table, write
from weft.cli.plan.question import Method, Named, Own, Prices
from weft.cli.plan.question import run as ask
from weft.events import Entry, RoundCommitted, StepDone
from weft.plan.cut import planned
from weft.plan.forecast import pace_of
from weft.plan.timing import Line

NUM = 4
RUN = """
name = "stage links"
peers = 4
stages = {stages}
model = {{type = "shape", num_layers = 4, num_heads = 4, width = 192, ffn_width = 512, is_tied = false}}
pipeline = {{micro_batch = {micro_batch}, activations = {{type = "int8"}}}}
train = {{seq_len = 64, batch_size = {batch}, tokens = 1000000000, schedule = {{type = "constant", lr = 2e-3}}, \
evaluate_every = 0, evaluate_windows = 16}}
method = {method}
"""
METHODS = {"ddp": '{type = "ddp"}', "sparseloco": '{type = "sparseloco", every = 15}'}
ALONE = '{type = "fedavg", every = 100000}'  # no round before the end
BATCH, MICRO_BATCH = 32, 4
RATES = (100.0, 20.0)
SETTLE_S, FOR_S, MOST_S = 20.0, 60.0, 240.0
LEAST_ROUNDS = 4
AIM = 0.2


class Row(NamedTuple):
    method: str
    stages: int

    @property
    def name(self) -> str:
        return self.method if self.stages == 1 else f"{self.stages} stages, {self.method}"


ROWS = tuple(Row(method, stages) for stages in (1, 2) for method in METHODS)


def main() -> None:
    if os.geteuid() != 0:
        print("skipped: network namespaces need root")
        return
    before = load()
    # Of whole models with an optimizer's steps; of sections as many samples at a time as pass, gradients alone.
    speeds = {1: _speed(ALONE, BATCH), 2: _speed(METHODS["ddp"], MICRO_BATCH)}
    rows = []
    for mbit in RATES:
        for row in ROWS:
            run = _run(row.stages, METHODS[row.method])
            found, said = _tokens_per_s(run, mbit), _said(run, mbit, speeds[row.stages])
            rows.append((f"{mbit:.0f}", row.name, f"{found:,.0f}", f"{said:,.0f}", f"{said / found - 1:+.0%}"))
            print(*rows[-1], file=sys.stderr, flush=True)
    head = ("Mbit/s", "run", "tokens/s", "planner", "difference")
    write(
        "stage_links",
        "A model in sections on slow lines",
        "python -m benchmarks.stage_links",
        [
            f"Four machines, each with 0.4 of a core; 1.9 million parameters in all, batches of {BATCH} windows of 64, "
            f"micro-batches of {MICRO_BATCH}, int8 between sections. A machine's inner steps make {speeds[1]:,.0f} "
            f"tokens a second, and {speeds[2]:,.0f} where {MICRO_BATCH} windows are computed at a time: the planner is "
            "told the first of whole models, the second of sections. The aim is a planner within "
            f"{AIM:.0%}. {load_line(before)}",
            table(head, rows),
        ],
    )


@contextmanager
def _running(run: str, mbit: float, num: int) -> Iterator[Machine]:
    """The first of so many machines that train."""
    with (
        TemporaryDirectory(prefix="weft-links-") as place,
        machines_at(mbit) as machines,
        Company(machines, Path(place), run) as company,
    ):
        company.found(num)
        yield company.machines[0]


def _speed(method: str, batch: int) -> float:
    """Return the tokens a second of a machine's inner steps, while the others make theirs."""
    with _running(_run(1, method, batch), RATES[0], NUM) as machine:
        until(lambda: machine.said(StepDone), "a first step")
        time.sleep(SETTLE_S)
        steps = [each.event for each in machine.said(StepDone) if isinstance(each.event, StepDone)]
    return sum(each.num_tokens for each in steps) / sum(each.duration_s for each in steps)


def _run(stages: int, method: str, batch: int = BATCH) -> str:
    """Return the text of a run file."""
    return RUN.format(stages=stages, method=method, batch=batch, micro_batch=MICRO_BATCH)


def _tokens_per_s(run: str, mbit: float) -> float:
    """Return the tokens a second that a run counts, once it has settled."""
    with _running(run, mbit, NUM) as first:
        until(lambda: _rounds(first), "a first round")
        time.sleep(SETTLE_S)
        began, since = time.monotonic(), len(_rounds(first))
        while time.monotonic() - began < FOR_S or (
            len(_rounds(first)) - since < LEAST_ROUNDS and time.monotonic() - began < MOST_S
        ):
            time.sleep(0.5)
        rounds = _rounds(first)[since - 1 :]
    return _rate(rounds)


def _rounds(machine: Machine) -> list[Entry]:
    """Return the rounds of the whole model, or of its first section."""
    found = machine.said(RoundCommitted)
    return [each for each in found if not isinstance(each.event.stage, int) or each.event.stage == 0]


def _rate(rounds: Sequence[Entry]) -> float:
    if len(rounds) < 2:
        raise RuntimeError("no two rounds were made in time")
    tokens = sum(each.event.tokens for each in rounds[1:] if isinstance(each.event, RoundCommitted))
    return tokens / (rounds[-1].at - rounds[0].at)


def _said(run: str, mbit: float, tokens_per_s: float) -> float:
    """Return the tokens a second that the planner says of a run, on machines of less than a core each."""
    bps = 1e6 * mbit
    own = Own(
        device=None,
        tokens_per_s=tokens_per_s,
        efficiency=None,
        watts=None,
        price_per_hour=0.0,
        line=Named(Line(up_bps=bps, down_bps=bps, delay_s=0.0), False, "a namespace's"),
    )
    with TemporaryDirectory(prefix="weft-links-") as place:
        path = Path(place) / "run.toml"
        path.write_text(run)
        found = ask(path, (), NUM, own, Method(method=None, every=None, codec=None), Prices(*4 * [None]))
    machines = replace(found.question.machines[0], crowding=1 / share_of_a_core())
    question = replace(found.question, machines=(machines,))
    if found.stages > 1:
        return planned(question, found.pipeline, found.stages).tokens_per_s
    return pace_of(question).tokens_per_s


if __name__ == "__main__":
    main()
