"""Who cheats members that audit each other, or helps those who do: when it is out, what was counted until then, and
whether anybody honest ever is. Writes reports/cheats.md.

    python -m benchmarks.cheats                       # half an hour of one core
    python -m benchmarks.cheats --seeds 20 --plays 0  # two minutes: fewer games, and no whole run beside them

Twenty-four peers play the game of audits (`rig.audit_game`): all that is decided, production code decides, on signed
records; messages and training are left out. Beside it the simulator plays whole runs of twelve machines, of which
four make no steps and look at none of each other's, and the game plays the same.

    out in rounds    from the first work with steps that were not made, to the round that strikes its key out or
                     removes it; of those that are out within the game
    counted          works with steps that were not made, which rounds have counted until then
    share            of what an honest peer counts in the game's rounds, all that the seat counts, less what was taken
                     out again; of false works alone
"""

import argparse
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from math import sqrt
from pathlib import Path
from statistics import mean, median, stdev
from typing import NamedTuple

from benchmarks.report import load, load_line, table, write
from benchmarks.rig.audit_game import TRUST, Game, Outcomes, Seen, Way
from weft.codec.config import Int8Config
from weft.data.corpus import CorpusConfig, TextSource
from weft.run.config import RunFile, ShapedModel, TrainConfig
from weft.run.trust import AuditedTrust
from weft.sim.memo import shared
from weft.sim.play import history, play
from weft.sim.scenario import Audits, Cheat, Kind, Scenario
from weft.sync.method.presets import DiLoCoConfig
from weft.sync.method.schedule import ConstantConfig

NUM_PEERS, NUM_ROUNDS = 24, 100
RATES = (0.05, 0.1, 0.3)
LATE = 12  # the round in which newcomers come: nobody else is new any more
HONEST_LEASES = TRUST.quarantine
WAYS: dict[str, Way] = {
    "no work, one": Way(num=1),
    "no work, a third": Way(num=8),
    "half of the steps, one": Way(num=1, idles=0.5),
    "one step of twenty, one": Way(num=1, idles=0.05),
    "none after ten works": Way(num=1, after=10),
    "none after quarantine": Way(num=1, after=HONEST_LEASES, comes=LATE),
    "newcomers one after another": Way(num=1, after=HONEST_LEASES, comes=LATE, again=True),
    "a third of such newcomers": Way(num=8, after=HONEST_LEASES, comes=LATE, again=True),
    "no work, a third; a third look at nothing": Way(num=8, looks="never"),
    "a third collude": Way(num=8, looks="at no friend", accuses=True),
    "11 of 24 collude": Way(num=11, looks="at no friend", accuses=True),
    "12 of 24 collude": Way(num=12, looks="at no friend", accuses=True),
    "12 of 24 collude, after quarantine": Way(
        num=12, after=HONEST_LEASES, comes=LATE, looks="at no friend", accuses=True
    ),
    "13 of 24 collude": Way(num=13, looks="at no friend", accuses=True),
    "a third accuse, and work": Way(num=8, idles=0.0, accuses=True),
    "a third look at nothing, and work": Way(num=8, idles=0.0, looks="never"),
    "no work, shows nothing": Way(num=1, is_silent=True),
    "shows nothing, again and again": Way(num=1, after=HONEST_LEASES, is_silent=True, again=True),
    "a third show nothing, again and again": Way(num=8, after=HONEST_LEASES, is_silent=True, again=True),
}

# --- the game ---


class Row(NamedTuple):
    """What a way comes to over many games."""

    name: str
    rate: float
    seen: tuple[Seen, ...]
    num_games: int
    num_honest: int  # seats
    num_honest_out: int


def played(name: str, rate: float, seeds: Iterable[int]) -> Row:
    way, all_outcomes = WAYS[name], list[Outcomes]()
    with shared():
        for seed in seeds:
            all_outcomes.append(Game(way, seed, rate=rate, num=NUM_PEERS).play(NUM_ROUNDS))
    return Row(
        name,
        rate,
        tuple(seen for each in all_outcomes for seen in each.cheats),
        len(all_outcomes),
        (NUM_PEERS - way.num) * len(all_outcomes),
        sum(each.num_honest_out for each in all_outcomes),
    )


def cells(row: Row) -> list[object]:
    outs = [each.out_after for each in row.seen if each.out_after is not None]
    before = [each.before for each in row.seen]
    return [
        row.name,
        row.rate,
        f"{len(outs)} of {len(row.seen)}",
        f"{median(outs):g}" if outs else "",
        max(outs) if outs else "",
        f"{median(before):g}",
        max(before),
        f"{mean(each.share for each in row.seen):.3f}",
        f"{mean(each.false_share for each in row.seen):.3f}",
        f"{mean(each.num_keys for each in row.seen):.2f}",
        f"{row.num_honest_out} of {row.num_honest}",
    ]


HEADER = [
    "of 24",
    "rate",
    "out",
    "in rounds, median",
    "most",
    "counted, median",
    "most",
    "share",
    "of false works",
    "keys",
    "honest ones out",
]


# --- the same in whole runs ---

SIM_PEERS, SIM_CHEATS, SIM_ROUNDS, SIM_STEPS = 12, 4, 24, 20
SIM_WAY = Way(num=SIM_CHEATS, looks="at no friend")
SEQ, BATCH, ROUND_S = 16, 2, 10.0


class Fate(NamedTuple):
    """Of one machine that makes no steps."""

    out_after: int
    before: int


def whole_runs(seeds: Iterable[int]) -> Iterator[tuple[list[Fate], int, float]]:
    """Yield, of each run, how its cheats fare, how many honest machines were struck out, and its CPU seconds."""
    for seed in seeds:
        began = time.process_time()
        with tempfile.TemporaryDirectory() as name:
            fates, num_honest_out = _whole_run(Path(name), seed)
        yield fates, num_honest_out, time.process_time() - began


def _whole_run(folder: Path, seed: int) -> tuple[list[Fate], int]:
    (folder / "text.txt").write_text(" ".join(str(number * number) for number in range(8000)), "utf-8")
    lease = SIM_STEPS * BATCH * SEQ
    run_file = RunFile(
        name="cheats",
        seed=seed,
        peers=SIM_PEERS,
        model=ShapedModel(num_layers=1, num_heads=2, width=32, ffn_width=48),
        data=CorpusConfig(source=TextSource(paths=("text.txt",))),
        train=TrainConfig(
            seq_len=SEQ,
            batch_size=BATCH,
            tokens=SIM_ROUNDS * SIM_PEERS * lease,
            schedule=ConstantConfig(lr=1e-2),
            evaluate_every=0,
        ),
        method=DiLoCoConfig(every=SIM_STEPS, codec=Int8Config()),
        trust=AuditedTrust(),
    )
    speed = lease / ROUND_S
    scenario = Scenario(
        run="",
        kind=(
            Kind(name="home", count=SIM_PEERS - SIM_CHEATS, tokens_per_s=speed),
            Kind(name="gang", count=SIM_CHEATS, tokens_per_s=speed),
        ),
        fault=(Cheat(peer="gang", work="none", at_s=0.0), Audits(peer="gang", how="collude", at_s=0.0)),
        seed=seed,
        compute="cost",
        limit_s=100 * SIM_ROUNDS * ROUND_S,
    )
    found = play(scenario, run_file, folder, folder / "home", lambda _line: None)
    if found.broken:
        raise RuntimeError(f"seed {seed}: {found.broken}")
    chain, fates = history(found.manifests), list[Fate]()
    for machine in found.machines:
        if not machine.name.startswith("gang"):
            continue
        rounds = sorted(one.round for one in chain if any(each.peer == machine.peer for each in one.contributions))
        if machine.struck_out is None:
            raise RuntimeError(f"seed {seed}: {machine.name} was not found in {found.num_rounds} rounds; play more")
        fates.append(Fate(machine.struck_out - rounds[0], len(rounds)))
    return fates, sum(each.struck_out is not None for each in found.machines if each.name.startswith("home"))


def beside(num_plays: int, num_games: int) -> tuple[list[list[object]], bool]:
    """Return a table's rows that compare whole runs with games, and whether they agree."""
    fates, num_honest_out = list[Fate](), 0
    for number, (some, num_out, cpu_s) in enumerate(whole_runs(range(num_plays))):
        print(f"whole run {number}: {[tuple(each) for each in some]}, {cpu_s:.0f} CPU s", flush=True)
        fates += some
        num_honest_out += num_out
    with shared():
        games = [Game(SIM_WAY, seed, num=SIM_PEERS, links=SIM_STEPS).play(NUM_ROUNDS) for seed in range(num_games)]
    seen = [each for game in games for each in game.cheats]
    pairs: dict[str, tuple[list[int], list[int]]] = {
        "out in rounds": ([each.out_after for each in fates], [each.out_after or 0 for each in seen]),
        "counted": ([each.before for each in fates], [each.before for each in seen]),
    }
    rows, agree = list[list[object]](), num_honest_out == 0
    for what, (runs, many) in pairs.items():
        apart, error = mean(runs) - mean(many), _error(runs, many)
        agree = agree and abs(apart) <= 3 * error
        rows.append([what, len(runs), mean(runs), max(runs), len(many), mean(many), max(many), f"{apart / error:+.1f}"])
    return rows, agree


def _error(one: Sequence[int], other: Sequence[int]) -> float:
    return sqrt(sum(stdev(each) ** 2 / len(each) for each in (one, other)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200, help="games of each row")
    parser.add_argument("--plays", type=int, default=6, help="whole runs beside them; 0: none")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="of audits")
    options, before = parser.parse_args(), load()
    rows = list[Row]()
    for name in WAYS:
        for rate in options.rates:
            began = time.process_time()
            rows.append(played(name, rate, range(options.seeds)))
            print(cells(rows[-1]), f"{time.process_time() - began:.0f} CPU s", flush=True)
    honest = [each for each in rows if 2 * WAYS[each.name].num <= NUM_PEERS]
    are_safe = not any(each.num_honest_out for each in honest)
    sections = [
        (__doc__ or "").split("\n\n", 1)[1].strip(),
        f"{load_line(before)} {options.seeds} games of {NUM_PEERS} peers and {NUM_ROUNDS} rounds in each row; "
        f"leases of 100 steps; quarantine {TRUST.quarantine}. Of who is struck out for "
        "training steps one work is taken out again.",
        table(HEADER, [cells(each) for each in rows]),
        "Aim: where at most half cheat, nobody honest is ever out: " + ("met." if are_safe else "**missed**."),
    ]
    if options.plays:
        compared, agree = beside(options.plays, options.seeds)
        sections += [
            f"Whole runs of {SIM_PEERS} machines on the simulator, and games of as many, at a rate of "
            f"{TRUST.audit_rate:g}: means, of each cheat.",
            table(
                ["", "cheats in runs", "mean", "most", "in games", "mean", "most", "apart, in standard errors"],
                compared,
            ),
            "Within three standard errors, and nobody honest struck out: " + ("yes." if agree else "**no**."),
        ]
        are_safe = are_safe and agree
    write("cheats", "Members that cheat, and how long they can", "python -m benchmarks.cheats", sections)
    return 0 if are_safe else 1


if __name__ == "__main__":
    raise SystemExit(main())
