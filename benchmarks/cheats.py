"""Who cheats members that audit each other, or helps those who do: when it is out, what was counted until then, and
whether anybody honest ever is. Writes reports/cheats.md.

    python -m benchmarks.cheats                        # an hour and a half of one core
    python -m benchmarks.cheats --seeds 20 --plays 0  # eight minutes: fewer games, and no whole run beside them

Twenty-four peers play the game of audits (`rig.audit_game`): all that is decided, production code decides, on signed
records; messages and training are left out. Beside it the simulator plays whole runs of twelve machines, of which
four cheat, and the game plays the same.

    out in rounds    from the first work with steps that were not made, to the round that strikes its key out or
                     removes it; of those that are out within the game
    counted          works with steps that were not made, which rounds have counted until then
    share            of what an honest peer counts in the game's rounds, all that the seat counts, less what was taken
                     out again; of false works alone
"""

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable
from math import sqrt
from pathlib import Path
from statistics import mean, median, stdev
from typing import Literal, NamedTuple

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

NUM_PEERS, NUM_ROUNDS = 24, 60
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


BESIDE = ["four of twelve", "rate", "", "runs", "mean", "most", "games", "mean", "most", "apart, in standard errors"]
BESIDE += ["honest ones out"]

# --- the same in whole runs ---

SIM_PEERS, SIM_STEPS = 12, 20
SEQ, BATCH, ROUND_S = 16, 2, 10.0
LEASE = SIM_STEPS * BATCH * SEQ


class Play(NamedTuple):
    """What is played both ways: by the game, and by machines that are called a gang."""

    name: str
    way: Way
    how: Literal["collude", "deaf"]
    rate: float
    num_rounds: int


PLAYS = (
    Play("make no steps, look at none of each other's", Way(num=4, looks="at no friend"), "collude", 0.1, 24),
    Play("make no steps, show nothing", Way(num=4, is_silent=True), "deaf", 0.3, 40),
)


class Fate(NamedTuple):
    """Of one machine that makes no steps."""

    out_after: int
    before: int


def whole_run(what: Play, seed: int) -> tuple[list[Fate], int]:
    """Return how the cheats of one run fare, and how many honest machines it has struck out or removed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text(" ".join(str(number * number) for number in range(8000)), "utf-8")
        run_file = RunFile(
            name="cheats",
            seed=seed,
            peers=SIM_PEERS,
            model=ShapedModel(num_layers=1, num_heads=2, width=32, ffn_width=48),
            data=CorpusConfig(source=TextSource(paths=("text.txt",))),
            train=TrainConfig(
                seq_len=SEQ,
                batch_size=BATCH,
                tokens=what.num_rounds * SIM_PEERS * LEASE,
                schedule=ConstantConfig(lr=1e-2),
                evaluate_every=0,
            ),
            method=DiLoCoConfig(every=SIM_STEPS, codec=Int8Config()),
            trust=AuditedTrust(audit_rate=what.rate),
        )
        honest = Kind(name="home", count=SIM_PEERS - what.way.num, tokens_per_s=LEASE / ROUND_S)
        scenario = Scenario(
            run="",
            kind=(honest, Kind(name="gang", count=what.way.num, tokens_per_s=LEASE / ROUND_S)),
            fault=(Cheat(peer="gang", work="none", at_s=0.0), Audits(peer="gang", how=what.how, at_s=0.0)),
            seed=seed,
            compute="cost",
            limit_s=100 * what.num_rounds * ROUND_S,
        )
        found = play(scenario, run_file, folder, folder / "home", lambda _line: None)
    if found.broken:
        raise RuntimeError(f"{what.name}, seed {seed}: {found.broken}")
    chain, fates, num_honest_out = history(found.manifests)[::-1], list[Fate](), 0
    for machine in found.machines:
        out = next((one.round for one in chain if machine.peer in one.left), None)
        if machine.name.startswith("home"):
            num_honest_out += out is not None
            continue
        if out is None:
            raise RuntimeError(f"{what.name}, seed {seed}: {machine.name} stays for {found.num_rounds} rounds")
        rounds = [one.round for one in chain if any(each.peer == machine.peer for each in one.contributions)]
        fates.append(Fate(out - rounds[0], len(rounds)))
    return fates, num_honest_out


def games_of(what: Play, seeds: Iterable[int]) -> list[list[Fate]]:
    """Return how the cheats of each game fare."""
    found = list[list[Fate]]()
    with shared():
        for seed in seeds:
            cheats = Game(what.way, seed, rate=what.rate, num=SIM_PEERS, links=SIM_STEPS).play(NUM_ROUNDS).cheats
            outs = [(NUM_ROUNDS if each.out_after is None else each.out_after, each.before) for each in cheats]
            found.append([Fate(*each) for each in outs])
    return found


def beside(num_plays: int, num_games: int) -> tuple[list[list[object]], bool]:
    """Return a table's rows that compare whole runs with games, and whether they agree."""
    rows, agree = list[list[object]](), True
    for what in PLAYS:
        runs, num_honest_out = list[list[Fate]](), 0
        for seed in range(num_plays):
            began = time.process_time()
            fates, num_out = whole_run(what, seed)
            runs.append(fates)
            num_honest_out += num_out
            print(
                what.name, seed, [tuple(each) for each in fates], f"{time.process_time() - began:.0f} CPU s", flush=True
            )
        games = games_of(what, range(num_games))
        agree = agree and not num_honest_out
        for number, field in enumerate(("out in rounds", "counted")):
            # Of one run a mean: those that are found in one round are struck out one after the other.
            one, other = ([mean(fate[number] for fate in fates) for fates in some] for some in (runs, games))
            most = [max(fate[number] for fates in some for fate in fates) for some in (runs, games)]
            apart, error = mean(one) - mean(other), sqrt(sum(stdev(each) ** 2 / len(each) for each in (one, other)))
            agree = agree and abs(apart) <= 3 * error
            figures = [len(one), f"{mean(one):.2f}", most[0], len(other), f"{mean(other):.2f}", most[1]]
            rows.append([what.name, what.rate, field, *figures, f"{apart / error:+.1f}", num_honest_out])
    return rows, agree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200, help="games of each row")
    parser.add_argument("--plays", type=int, default=12, help="whole runs beside them, two or more; 0: none")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="of audits")
    options, before = parser.parse_args(), load()
    compared, agree = beside(options.plays, options.seeds) if options.plays else ([], True)
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
        f"leases of 100 steps; quarantine {TRUST.quarantine}. Works that "
        "somebody is struck out for are taken out again.",
        table(HEADER, [cells(each) for each in rows]),
        "Aim: where at most half cheat, nobody honest is ever out: " + ("met." if are_safe else "**missed**."),
    ]
    if compared:
        sections += [
            f"Whole runs of {SIM_PEERS} machines on the simulator, of which four cheat, and games of as many: means "
            "over runs, and over games.",
            table(BESIDE, compared),
            "Within three standard errors, and nobody honest struck out: " + ("yes." if agree else "**no**."),
        ]
        are_safe = are_safe and agree
    command = shlex.join(["python", "-m", "benchmarks.cheats", *sys.argv[1:]])
    write("cheats", "Members that cheat, and how long they can", command, sections)
    return 0 if are_safe else 1


if __name__ == "__main__":
    raise SystemExit(main())
