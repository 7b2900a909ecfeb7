"""What is lost when peers are killed and replaced all the time: writes benchmarks/reports/churn.md.

    python -m benchmarks.churn                        # four runs of ten minutes, and the losses: three hours
    python -m benchmarks.churn diloco-60 loss-ddp     # some of it; what was found before stays in the report
    python -m benchmarks.churn report                 # writes the report anew from reports/churn.json
    WEFT_CHURN_S=120 python -m benchmarks.churn diloco-15     # a trial, which is printed and not kept

A play for the losses that churn.json holds is not made again, so what was stopped goes on.

Real processes, `weft train` and `weft join`, over TLS on loopback. One of them is killed with SIGKILL at regular times
and a newcomer takes its place: another key, another home, a ticket of somebody who lives. Who made the run is killed
like anybody.
"""

import asyncio
import os
import sys
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

import msgspec

from benchmarks import report
from benchmarks._churn_loss import ABOUT as ABOUT_LOSS
from benchmarks._churn_loss import Loss, losses_told, measure_loss
from benchmarks.rig.real import RealMachine, RealStage
from weft.events import Entry, MemberGone, RoundCommitted, RoundMissed, StepDone
from weft.rng import stream
from weft.sim.scenario import Fault, Kill, Kind, Scenario

RUN_S = 600.0
NUM_PEERS = 8
SETTLED_S = 30.0  # so long a peer has been there, if it is to be killed: half of those younger train nothing yet
SEQ_LEN, BATCH, EVERY = 128, 8, 20
METHODS = {"diloco": f'{{type = "diloco", every = {EVERY}}}', "ddp": '{type = "ddp"}'}
EVERY_S = {"60": 60.0, "15": 15.0}
AIMS = {"60": 0.98, "15": 0.92}
NAMES = tuple(f"{method}-{every}" for method in METHODS for every in EVERY_S)
LOSSES = {f"loss-{method}": method for method in METHODS}
RUN = """
name = "churn"
peers = {peers}
model = {{type = "shape", num_layers = 2, num_heads = 4, width = 128, ffn_width = 344}}
data = {{source = {{type = "text", paths = ["text.txt"]}}}}
train = {{seq_len = {seq_len}, batch_size = {batch}, tokens = 1_000_000_000_000, \
schedule = {{type = "constant", lr = 1e-3}}, evaluate_every = 0, evaluate_windows = 1}}
method = {method}
"""
FIGURES = Path(report.FOLDER) / "churn.json"

ABOUT = f"""
{NUM_PEERS} processes of one run; 430 thousand parameters, {BATCH * SEQ_LEN:,} tokens an inner step, `diloco` with
H = {EVERY} and `ddp`. Each time one of those that are there for {SETTLED_S:.0f} s is killed with SIGKILL and a newcomer
is started, at the same moment, for ten minutes. Nothing is prepared for the newcomer: its Python, torch and state take
the time that they take on these cores, from the others too.

*kept* = tokens in committed manifests / tokens of all inner steps that any process finished (`StepDone` in its log,
which is written at once, without a buffer), the killed included, until the last commit within the ten minutes. Aims:
98 % and 92 %. "with the dead" is the work that the killed had not handed in yet; "in hand" what the living had trained
at that last commit and nobody counted yet; "otherwise" the rest.

torchft publishes for failures every 60 s and every 15 s, of 30 groups of GPUs, an efficiency of 81 % and 13 %, defined
otherwise: the share of steps that committed, times the share of groups that were there, and in the second case times
the slowdown of a step. It is no yardstick for *kept*; beside it stand here the share of attempts that committed, and
how many peers a round counted.
""".strip()


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of the benchmark found."""

    commit: str
    load: float | None
    script_s: float
    committed: int
    computed: int
    with_the_dead: int
    in_hand: int
    num_rounds: int
    round_s: tuple[float, ...]  # between commits: median, mean, longest
    num_contributors: float  # a round, mean
    num_attempts: int
    num_killed: int
    counted_in_s: tuple[float, ...]  # from a newcomer's start to the first round that counts it
    missed: dict[str, int]  # why rounds were committed without a peer's payload, as that peer knew
    falsely_gone: int
    branches: int

    @property
    def kept(self) -> float:
        return self.committed / self.computed


def script(every_s: float, script_s: float, seed: int) -> Scenario:
    """Return who comes and who is killed, when."""
    luck = stream(seed, "churn")
    there = {f"peer-{number}": -SETTLED_S for number in range(NUM_PEERS)}
    kinds, faults = [Kind(name=name) for name in there], list[Fault]()
    for number in range(1, int((script_s - every_s / 2) / every_s) + 1):
        at_s = number * every_s
        settled = [name for name, came_s in there.items() if at_s - came_s >= SETTLED_S]
        victim = settled[int(luck.integers(len(settled)))]
        del there[victim]
        newcomer = f"peer-{NUM_PEERS + number - 1}"
        there[newcomer] = at_s
        faults.append(Kill(peer=victim, at_s=at_s))
        kinds.append(Kind(name=newcomer, joins_at_s=at_s))
    return Scenario(run="", kind=tuple(kinds), fault=tuple(faults), seed=seed, limit_s=script_s)


def run(name: str, script_s: float, folder: Path) -> Figures:
    method, _, every = name.partition("-")
    load = report.load()
    (folder / "text.txt").write_text("".join(f"def f{n}(x):\n    return x * {n * n} + {n}\n" for n in range(60_000)))
    (folder / "run.toml").write_text(
        RUN.format(peers=NUM_PEERS, seq_len=SEQ_LEN, batch=BATCH, method=METHODS[method]), encoding="utf-8"
    )
    stage = RealStage(script(EVERY_S[every], script_s, seed=1), folder / "run.toml", folder)
    asyncio.run(stage.play())
    said = {machine.name: machine.said.read_text() for machine in stage.machines.values() if machine.said.exists()}
    talkative = {name: words for name, words in said.items() if "Traceback" in words or "Warning" in words}
    if stage.broken or talkative:
        raise RuntimeError(f"{name}: {stage.broken or talkative}")
    found = judge(stage, load, script_s)
    if found.committed > found.computed:
        raise RuntimeError(f"{name}: {found.committed} tokens are counted and only {found.computed} were computed")
    return found


def judge(stage: RealStage, load: float | None, script_s: float) -> Figures:
    """Read from the logs of all processes how it went, until the last commit before the processes were stopped."""
    machines = [machine for machine in stage.machines.values() if machine.entries]
    commits: dict[tuple[str, int], list[Entry]] = {}
    for machine in machines:
        for entry in machine.entries:
            if isinstance(entry.event, RoundCommitted) and entry.at <= stage.began_at + script_s:
                commits.setdefault((entry.event.branch, entry.event.round), []).append(entry)
    firsts = sorted((min(told, key=lambda entry: entry.at) for told in commits.values()), key=lambda entry: entry.at)
    last = max(firsts, key=lambda entry: entry.event.committed_tokens)  # type: ignore[attr-defined]
    until = last.at
    history = [entry.event for entry in firsts if isinstance(entry.event, RoundCommitted)]
    assert isinstance(last.event, RoundCommitted)
    between = [b.at - a.at for a, b in pairwise(firsts) if a.at >= stage.began_at]
    open_tokens = {machine.name: uncounted(machine, history, until) for machine in machines}
    dead = {machine.name for machine in machines if (end := machine.lives[-1].ended_at) is not None and end <= until}
    missed: dict[str, int] = {}
    for machine in machines:
        for entry in machine.entries:
            if isinstance(entry.event, RoundMissed) and entry.at <= until:
                missed[entry.event.reason] = missed.get(entry.event.reason, 0) + 1
    return Figures(
        commit=report.commit(),
        load=load,
        script_s=script_s,
        committed=last.event.committed_tokens,
        computed=sum(tokens_of(machine.entries, until) for machine in machines),
        with_the_dead=sum(tokens for name, tokens in open_tokens.items() if name in dead),
        in_hand=sum(tokens for name, tokens in open_tokens.items() if name not in dead),
        num_rounds=last.event.round,
        round_s=(median(between), mean(between), max(between)),
        num_contributors=mean(len(event.contributors) for event in history),
        num_attempts=sum(event.attempt + 1 for event in history),
        num_killed=len(dead),
        counted_in_s=tuple(
            round(took_s, 1) for each in machines if (took_s := counted_in_s(each, firsts, stage.began_at)) is not None
        ),
        missed=missed,
        falsely_gone=falsely_gone(machines, until),
        branches=len({branch for branch, _ in commits}),
    )


def tokens_of(entries: list[Entry], until: float, since: float = 0.0) -> int:
    return sum(e.event.num_tokens for e in entries if isinstance(e.event, StepDone) and since < e.at <= until)


def uncounted(machine: RealMachine, history: list[RoundCommitted], until: float) -> int:
    """Return the tokens of inner steps that a machine made after the last round that counts it."""
    me = machine.entries[0].peer
    mine = [event for event in history if me in event.contributors]
    if not mine:
        return tokens_of(machine.entries, until)
    told = [e.at for e in machine.entries if isinstance(e.event, RoundCommitted) and e.event.round == mine[-1].round]
    return tokens_of(machine.entries, until, told[0]) if told else 0


def counted_in_s(machine: RealMachine, commits: list[Entry], began_at: float) -> float | None:
    """Return how long a newcomer took from its process's start to the first round that counts what it trained."""
    me, started_at = machine.entries[0].peer, machine.lives[0].began_at
    if started_at < began_at:
        return None
    counting = (e.at for e in commits if isinstance(e.event, RoundCommitted) and me in e.event.contributors)
    first = next(counting, None)
    return None if first is None else first - started_at


def falsely_gone(machines: list[RealMachine], until: float) -> int:
    """Return how often somebody was removed from a view that lived."""
    ends = {machine.entries[0].peer: machine.lives[-1].ended_at or float("inf") for machine in machines}
    return sum(
        entry.at < ends.get(entry.event.member, 0.0)
        for machine in machines
        for entry in machine.entries
        if isinstance(entry.event, MemberGone) and entry.at <= until
    )


class Found(msgspec.Struct, frozen=True):
    """All that is known, for the report."""

    runs: dict[str, Figures]
    losses: tuple[Loss, ...] = ()


def tables(found: Found) -> list[str]:
    sections = [ABOUT]
    rows, more = [], []
    for name in NAMES:
        if (each := found.runs.get(name)) is None:
            continue
        aim = AIMS[name.partition("-")[2]]
        rest = each.computed - each.committed - each.with_the_dead - each.in_hand
        lost = [f"{100 * tokens / each.computed:.2f} %" for tokens in (each.with_the_dead, each.in_hand, rest)]
        rows.append(
            (
                name,
                each.committed,
                each.computed,
                f"{100 * each.kept:.2f} %",
                f"{100 * aim:.0f} %",
                *lost,
                each.num_killed,
            )
        )
        joined = sorted(each.counted_in_s)
        took = f"{median(joined):.0f} s ({joined[0]:.0f} to {joined[-1]:.0f}), {len(joined)}" if joined else "nobody"
        more.append(
            (
                name,
                each.num_rounds,
                " / ".join(f"{value:.2f}" for value in each.round_s) + " s",
                f"{each.num_contributors:.1f}",
                f"{100 * each.num_rounds / each.num_attempts:.0f} %",
                took,
                each.falsely_gone,
                f"{each.commit}, load {'?' if each.load is None else f'{each.load:.1f}'}",
            )
        )
    if rows:
        head = (
            "run, kill every s",
            "committed",
            "computed",
            "kept",
            "aim",
            "lost with the dead",
            "in hand",
            "otherwise",
        )
        sections.append(report.table((*head, "killed"), rows))
        row = ("run", "rounds", "between commits: median / mean / longest", "counted in a round", "attempts committed")
        sections.append(
            report.table((*row, "newcomer: start to counted", "falsely removed", "commit, load before"), more)
        )
        for name, each in found.runs.items():
            why = "; ".join(f"{reason}: {num}" for reason, num in sorted(each.missed.items()))
            sections.append(f"{name}: rounds that a peer's payload missed, and why: {why or 'none'}.")
    if found.losses:
        sections += [ABOUT_LOSS, *losses_told(found.losses)]
    return sections


def save(found: Found) -> None:
    FIGURES.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    report.write("churn", "Peers killed and replaced all the time", "python -m benchmarks.churn", tables(found))


def main() -> None:
    parts = (*NAMES, *LOSSES)
    wanted = sys.argv[1:] or parts
    if unknown := set(wanted) - {*parts, "report"}:
        raise SystemExit(f"no such part: {', '.join(sorted(unknown))}. There are: {', '.join(parts)}; and report.")
    script_s = float(os.environ.get("WEFT_CHURN_S", RUN_S))
    found = msgspec.json.decode(FIGURES.read_bytes(), type=Found) if FIGURES.exists() else Found({})

    def keep(loss: Loss) -> None:
        nonlocal found
        found = Found(found.runs, (*found.losses, loss))
        save(found)

    for name in wanted:
        if name == "report":
            save(found)
        elif name in LOSSES:
            measure_loss(LOSSES[name], found.losses, keep)
        else:
            with TemporaryDirectory(prefix="weft-churn-") as folder:
                figures = run(name, script_s, Path(folder))
            print("\n\n".join(tables(Found({name: figures}))[1:]), flush=True)
            if script_s != RUN_S:
                continue  # a trial
            found = Found({**found.runs, name: figures}, found.losses)
            save(found)


if __name__ == "__main__":
    main()
