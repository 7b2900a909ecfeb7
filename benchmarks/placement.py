"""How much of a pipeline's throughput placement keeps while peers come and go, and how many bytes that moves.

    python -m benchmarks.placement       # a quarter of an hour of one core

A fluid model (`benchmarks.rig.placement`): 16 stages, 400 peers, later 150, 32 hours, ten seeds. SWARM's authors played
traces of preempted T4s, which are not public; here the mean stay is chosen so that placement without moves comes to
what they saw. Their rule, played beside ours, then comes to what they saw of it as well.

Then what the fluid model leaves out: an hour of 40 peers is played again micro-batch by micro-batch, with the workers,
senders and routes of production on a virtual clock (`benchmarks.rig.stages_play`), from the same trace and with the
same moves. And once more with peers that all stay, and none moves, so that what queues cost can be told from what
coming and going costs.
"""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import mean, stdev

from benchmarks import report
from benchmarks.rig.placement import (
    Joins,
    Rule,
    Trace,
    anywhere,
    at_the_weakest,
    nobody,
    ours,
    played,
    preemptions,
    swarms,
)
from benchmarks.rig.stages import Shape
from benchmarks.rig.stages_device import Script
from benchmarks.rig.stages_play import Outcome, play

SEEDS = range(10)
UNEQUAL = (1.0, 2.0, 3.0, 4.0)
STATE_GB = 0.75  # of a 16th of a billion parameters: themselves and two moments, fp32
MOVE_S = 60.0  # at 100 Mbit/s
PUBLISHED = {"nobody moves": "82.7", "SWARM, 300 s": "95.8", "SWARM, 60 s": "97.6"}  # 2301.11913, table 3
RULES: dict[str, tuple[Joins, Rule, float]] = {
    "nobody moves": (anywhere, nobody, 300.0),
    "SWARM, 300 s": (anywhere, swarms, 300.0),
    "SWARM, 60 s": (anywhere, swarms, 60.0),
    "newcomers to the weakest, nobody moves": (at_the_weakest, nobody, 300.0),
    "newcomers anywhere, weft's moves, 300 s": (anywhere, ours, 300.0),
    "weft, 300 s": (at_the_weakest, ours, 300.0),
    "weft, 60 s": (at_the_weakest, ours, 60.0),
}

HOUR_S = 3600.0
HOUR_SEEDS = range(2)
NUM_PROCESSES = 2
HOUR_RULES = ("nobody moves", "SWARM, 300 s", "weft, 300 s")
HOUR_HEAD = (
    "placement",
    "fluid, % of even",
    "micro-batches, % of even",
    "difference",
    "% in vain",
    "explained",
    "moves",
    "finished",
    "sent again",
    "lost",
)
SHAPE = Shape(num_stages=4, script=Script(forward_s=2.0, input_s=2.0, weights_s=2.0), line_bps=330e3)
FILL_S = 300.0  # from the first micro-batch until queues are as they stay


def rows(rates: tuple[float, ...]) -> list[tuple[str, ...]]:
    traces = [preemptions(seed, rates=rates) for seed in SEEDS]
    found = []
    for name, (joins, rule, every_s) in RULES.items():
        outcomes = [played(trace, joins, rule, every_s=every_s, move_s=MOVE_S) for trace in traces]
        ratios, moved = [100 * each.ratio for each in outcomes], mean(each.num_moves for each in outcomes)
        hours = (f"{100 * mean(each.by_hour[hour] for each in outcomes):.1f}" for hour in (0, -1))
        figures = (f"{mean(ratios):.1f} +- {stdev(ratios):.1f}", *hours, f"{moved:.0f}", f"{STATE_GB * moved:.0f}")
        found.append((name, *figures, PUBLISHED.get(name, "") if len(rates) == 1 else ""))
        print(*found[-1], flush=True)
    return found


def trace_of_an_hour(seed: int) -> Trace:
    return preemptions(seed, num_stages=4, num_peers=40, num_last=15, hours=1.0, stay_h=1.0)


def hour_rows() -> list[tuple[str, ...]]:
    """Return an hour of 40 peers in both models."""
    traces = [trace_of_an_hour(seed) for seed in HOUR_SEEDS]
    still = Trace(num_stages=4, hours=1 / 3, stays=((0.0, HOUR_S, 1.0),) * 40)
    todo = [(still, HOUR_RULES[0]), *((trace, name) for name in HOUR_RULES for trace in traces)]
    with ProcessPoolExecutor(NUM_PROCESSES) as pool:
        stayed, *outcomes = pool.map(_played_out, *zip(*todo, strict=True))
    queues = stayed.ratio(FILL_S, HOUR_S / 3)
    found = [_hour_row("all stay, none moves: minutes 5 to 20", [1.0], [stayed], queues)]
    for number, name in enumerate(HOUR_RULES):
        joins, rule, every_s = RULES[name]
        fluid = [played(trace, joins, rule, every_s=every_s, move_s=MOVE_S).ratio for trace in traces]
        begin = number * len(traces)
        found.append(_hour_row(name, fluid, outcomes[begin : begin + len(traces)], queues))
    return found


def _played_out(trace: Trace, name: str) -> Outcome:
    joins, rule, every_s = RULES[name]
    return play(trace, joins, rule, SHAPE, every_s=every_s, move_s=MOVE_S)


def _hour_row(name: str, fluid: Sequence[float], outcomes: Sequence[Outcome], queues: float) -> tuple[str, ...]:
    is_hour = len(outcomes) == len(HOUR_SEEDS)
    ratios = [each.ratio(0.0, HOUR_S) if is_hour else queues for each in outcomes]
    useful = [each.useful_s / each.busy_s for each in outcomes]
    explained = [one * queues * other for one, other in zip(fluid, useful, strict=True)]
    figures = (
        _percent(fluid),
        _percent(ratios),
        f"{100 * mean(one - other for one, other in zip(ratios, fluid, strict=True)):+.1f}",
        f"{100 * mean(1 - each for each in useful):.1f}",
        _percent(explained) if is_hour else "",
        f"{mean(each.num_moves for each in outcomes):.1f}",
        f"{mean(min(map(len, each.finished)) for each in outcomes):.0f}",
        f"{mean(each.num_again for each in outcomes):.0f}",
        f"{mean(each.num_lost for each in outcomes):.0f}",
    )
    print(name, *figures, flush=True)
    return (name, *figures)


def _percent(ratios: Sequence[float]) -> str:
    return ", ".join(f"{100 * each:.1f}" for each in ratios)


def main() -> None:
    before = report.load()
    head = ("placement", "% of even", "first hour", "last hour", "moves", "GB moved", "published")
    report.write(
        "placement",
        "What placement keeps of a pipeline while peers come and go",
        "python -m benchmarks.placement",
        [
            f"16 stages, 400 peers for 16 hours, then fewer, at last 150; {len(SEEDS)} seeds, standard deviation "
            f"behind +-. {report.load_line(before)}",
            "*Even*: all rates shared out over the stages to a hair, which no placement of whole peers reaches. A move "
            f"costs its peer {MOVE_S:.0f} s, in which it fetches {STATE_GB} GB: a stage of a model of 1 billion "
            "parameters, with its moments. *Published*: SWARM's table 3, on a trace of its authors'.",
            "Peers that are equally fast:",
            report.table(head, rows((1.0,))),
            "A quarter each of rates 1, 2, 3 and 4:",
            report.table(head, rows(UNEQUAL)),
            "## An hour, micro-batch by micro-batch",
            f"4 stages, 40 peers of one rate, in the second half hour fewer, at last 15; each stays an hour in the "
            f"mean, so that as much happens as in 32 hours above; seeds {', '.join(map(str, HOUR_SEEDS))}. The fluid "
            "model beside workers, senders and routes of production on a virtual clock, with the same trace and the "
            f"same moves. A forward pass, an input gradient and weights' gradients take {SHAPE.script.forward_s:.0f} s "
            f"each; activations are on the line for {8 * SHAPE.script.nbytes / (SHAPE.line_bps or 1):.1f} s, and a "
            f"peer is {1000 * SHAPE.delay_s:.0f} ms from another; a round each {SHAPE.pace.every_s:.0f} s.",
            report.table(HOUR_HEAD, hour_rows()),
            "*In vain*: of the time that machines computed, what went into micro-batches that did not count there: "
            "sent again after a death, computed by two, or still on their way at the end. *Explained*: what the fluid "
            "model says, times what peers that stay have of their capacity (queues and links), times what is not in "
            "vain. What is left of the difference is in the time until the first micro-batches are through, in the "
            "turns in which newcomers are sent less, and in queues that stages which are not the weakest lend to it. "
            "*Lost*: micro-batches that a member had counted, and no round, when it died, over all stages.",
        ],
    )


if __name__ == "__main__":
    main()
