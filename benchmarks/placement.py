"""How much of a pipeline's throughput placement keeps while peers come and go, and how many bytes that moves.

    python -m benchmarks.placement       # two minutes of one core

A fluid model (`weft.sim.placement`): 16 stages, 400 peers, later 150, 32 hours, ten seeds. SWARM's authors played
traces of preempted T4s, which are not public; here the mean stay is chosen so that placement without moves comes to
what they saw. Their rule, played beside ours, then comes to what they saw of it as well.
"""

from statistics import mean, stdev

from benchmarks import report
from weft.sim.placement import Joins, Rule, anywhere, at_the_weakest, nobody, ours, played, preemptions, swarms

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
        ],
    )


if __name__ == "__main__":
    main()
