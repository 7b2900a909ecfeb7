"""What a flood takes from a run, and what it costs whoever floods: rounds a minute, and CPU a round.

    python -m benchmarks.floods                       # all, half a minute each
    python -m benchmarks.floods 10 requests calls     # seconds of a stretch, and attacks whose names begin so

Three members, real processes, train as fast as they can, and one machine attacks one of them (`rig.floods`), all in
network namespaces. After a quiet stretch comes one with the attack, as long. The members share all cores but one, which
the attacker has: what it computes takes nothing from them, what they compute for it does. Then all of it again with
members that bound nothing (`_unbounded`). What was found is kept in reports/floods.json.

A virtual machine has slow minutes, in which the same work takes up to twice the processor's time. So a fixed piece of
computing is timed on the members' cores all the while, and stretches are compared by how many pieces a round takes.
"""

import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import psutil

from benchmarks import report
from benchmarks._company import Company, Machine, until
from benchmarks.rig.floods import NAMES, Done, Flood
from benchmarks.rig.namespaces import Lines
from weft.events import ConnectionDropped, Entry, RoundCommitted

STRETCH_S, BETWEEN_S, ROUNDS_BEFORE = 30.0, 5.0, 5
PIECE_EVERY_S, PIECE_SIZE = 0.5, 20_000  # some 5 ms
MOST_LOST = 0.2  # the aim: of the rounds
NUM_MEMBERS, ATTACKER = 3, 3
MBIT = 1000.0
RUN = """
name = "floods"
model = {type = "shape", num_layers = 2, num_heads = 4, width = 128, ffn_width = 384}
data = {source = {type = "text", paths = ["text.txt"]}}
has_even_leases = true
train = {seq_len = 64, batch_size = 4, tokens = 100000000000, schedule = {type = "constant", lr = 1e-4}, \
evaluate_every = 0, evaluate_windows = 1}
method = {type = "diloco", every = 20}
"""
WITH, WITHOUT = "with bounds", "without"
PROGRAMS = {WITH: ("-P", "-m", "weft"), WITHOUT: ("-m", "benchmarks._unbounded")}
FIGURES = report.FOLDER / "floods.json"
ABOUT = """
Three members, real processes, train as fast as they can, on all cores but one, which one machine has that attacks one
of them. Each attack has a quiet stretch before it, to which it is compared, and which begins once all three are in the
rounds. Members that compute all the time lose as many rounds as a round takes more of the processor ("lost by that").
"Slower" is how much more a fixed piece of computing took while they were attacked, on the same cores: the machine's own
slow and fast minutes, which "lost" and "times" leave out.
`handshakes` needs no ticket, all others one. "Without" are members that bound nothing of what others cost them in
computing.
""".strip()


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """What members did in some seconds."""

    num_rounds: int
    num_members: float  # whose work a round counted, on the mean
    rounds_per_min: float
    cpu_per_round: float | None  # seconds, of all members; None: there was no round
    victim_cpu: float  # cores that the attacked member used
    victim_nbytes: int  # of its memory, at the end
    piece_s: float  # CPU time of a fixed piece of computing, the median


class Attacked(msgspec.Struct, frozen=True, kw_only=True):
    """One attack, and the quiet before."""

    commit: str
    load: float | None
    seconds: float
    quiet: Stretch
    flooded: Stretch
    done: Done
    num_dropped: int  # connections that the victim says it has dropped

    @property
    def lost(self) -> float:
        if not self.quiet.num_rounds:
            return 0.0
        return 1 - self.flooded.rounds_per_min * self.slower / self.quiet.rounds_per_min

    @property
    def slower(self) -> float:
        """Return how much longer the same computing took while it was attacked."""
        return self.flooded.piece_s / self.quiet.piece_s

    @property
    def times_cpu(self) -> float:
        """Return how much more CPU a round took, of one speed; NaN where there was none."""
        before, after = self.quiet.cpu_per_round, self.flooded.cpu_per_round
        return math.nan if before is None or after is None else after / before / self.slower

    @property
    def lost_by_cpu(self) -> float:
        """Return the part of the rounds that members lose who compute all the time; other programs change nothing."""
        return 1 - 1 / self.times_cpu


Found = dict[str, dict[str, Attacked]]  # by PROGRAMS, and attack


def on_cores(cores: Sequence[int]) -> None:
    """Let processes that are started from now on run on these cores."""
    os.sched_setaffinity(0, cores)


def stretch(members: Sequence[Machine], seconds: float, cores: Sequence[int]) -> Stretch:
    """Watch for so long. The members are on these cores."""
    on_cores(cores)
    processes = [psutil.Process(member.process.pid) for member in members]
    began, used = time.time(), [_cpu_s(process) for process in processes]
    pieces = list[float]()
    while (left := began + seconds - time.time()) > 0:
        pieces.append(piece_s())
        time.sleep(min(left, PIECE_EVERY_S))
    spent = [_cpu_s(process) - before for process, before in zip(processes, used, strict=True)]
    ended = time.time()
    rounds = [entry for entry in members[0].said(RoundCommitted) if began <= entry.at <= ended]
    at = sorted(entry.at for entry in rounds)
    # From one commit to another, so that parts of rounds do not count; a stretch of one round or none tells little.
    per_s = (len(at) - 1) / (at[-1] - at[0]) if len(at) > 2 else len(at) / (ended - began)
    return Stretch(
        num_rounds=len(at),
        num_members=sum(map(num_counted, rounds)) / max(1, len(rounds)),
        rounds_per_min=60 * per_s,
        cpu_per_round=sum(spent) / (ended - began) / per_s if per_s else None,
        victim_cpu=spent[0] / (ended - began),
        victim_nbytes=processes[0].memory_info().rss,
        piece_s=statistics.median(pieces),
    )


def piece_s() -> float:
    """Return the CPU time that a fixed piece of computing takes here and now, in seconds."""
    began, table = time.thread_time(), dict[int, str]()
    for number in range(PIECE_SIZE):
        table[number % 1000] = str(number)
    return time.thread_time() - began


def num_counted(entry: Entry) -> int:
    """Return how many members' work a round has counted."""
    return len(entry.event.contributors) if isinstance(entry.event, RoundCommitted) else 0


def all_are_counted(members: Sequence[Machine]) -> bool:
    """Return whether the newest round has counted everybody's work, and is one of the last moments."""
    last = members[0].said(RoundCommitted)[-1]
    return num_counted(last) == len(members) and time.time() - last.at < BETWEEN_S


def _cpu_s(process: psutil.Process) -> float:
    used = process.cpu_times()
    return used.user + used.system


def attacked(lines: Lines, company: Company, attack: str, seconds: float, cores: Sequence[int]) -> Attacked:
    members = company.machines[:NUM_MEMBERS]
    until(lambda: all_are_counted(members), "everybody in one round")
    load = report.load()
    quiet = stretch(members, seconds, cores[:-1] or cores)
    on_cores(cores[-1:])
    num_before = len(members[0].said(ConnectionDropped))
    with Flood(attack, company.ticket, seconds + 1.0, partial(lines.command, ATTACKER)) as flood:
        flooded = stretch(members, seconds, cores[:-1] or cores)
        done = flood.done()
    time.sleep(BETWEEN_S)
    if broken := [member.number for member in members if member.process.poll() is not None]:
        raise RuntimeError(f"{attack}: members {broken} have ended")
    return Attacked(
        commit=report.commit(),
        load=load,
        seconds=seconds,
        quiet=quiet,
        flooded=flooded,
        done=done,
        num_dropped=len(members[0].said(ConnectionDropped)) - num_before,
    )


def measured(found: Found, program: str, attacks: Sequence[str], seconds: float) -> None:
    """Add to what is known, and keep it after each attack."""
    cores = sorted(os.sched_getaffinity(0))
    with TemporaryDirectory() as name, Lines("weft-floods", NUM_MEMBERS + 1, mbit=MBIT) as lines:
        folder = Path(name)
        (folder / "text.txt").write_text("the warp holds and the weft goes over and under\n" * 4000)
        with Company(lines, folder, RUN, PROGRAMS[program]) as company:
            on_cores(cores[:-1] or cores)
            company.found(NUM_MEMBERS)
            until(lambda: len(company.machines[0].said(RoundCommitted)) >= ROUNDS_BEFORE, "rounds")
            try:
                for attack in attacks:
                    found.setdefault(program, {})[attack] = one = attacked(lines, company, attack, seconds, cores)
                    FIGURES.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
                    print(f"{program}, {attack}: {one.lost:.0%} of the rounds lost, {one.times_cpu:.2f} times the CPU")
            finally:
                on_cores(cores)


def told(found: Found) -> list[str]:
    header = (
        *("attack", "", "rounds a minute", "attacked", "lost", "members in a round, attacked"),
        *("slower", "CPU a round, times", "lost by that"),
        *("cores of the victim", "attacked"),
        *("sent a second", "cores of the attacker", "links", "turned away or ended", "dropped"),
    )
    rows = [
        (
            attack,
            program,
            one.quiet.rounds_per_min,
            one.flooded.rounds_per_min,
            f"{100 * one.lost:.0f} %",
            one.flooded.num_members,
            one.slower,
            one.times_cpu,
            f"{100 * one.lost_by_cpu:.0f} %",
            one.quiet.victim_cpu,
            one.flooded.victim_cpu,
            one.done.num_sent / one.done.wall_s,
            one.done.cpu_s / one.done.wall_s,
            one.done.num_links,
            one.done.num_refused,
            one.num_dropped,
        )
        for attack in NAMES
        for program in PROGRAMS
        if (one := found.get(program, {}).get(attack)) is not None
    ]
    bounded = found.get(WITH, {})
    by_clock = _verdict([attack for attack, one in bounded.items() if one.lost > MOST_LOST])
    by_cpu = _verdict([attack for attack, one in bounded.items() if not one.lost_by_cpu <= MOST_LOST])
    verdict = (
        f"The aim, at most {100 * MOST_LOST:.0f} % of the rounds, is {by_clock} by the clock, and {by_cpu} by what "
        "rounds took of the processor."
    )
    every = [one for by_attack in found.values() for one in by_attack.values()]
    commits = sorted({one.commit for one in every})
    loads = [one.load for one in every if one.load is not None]
    stretches = ", ".join(f"{seconds:g}" for seconds in sorted({one.seconds for one in every}))
    load = f"load before each {min(loads):.1f} to {max(loads):.1f}" if loads else "load not known"
    of = f"Of commits {', '.join(commits)}; stretches of {stretches} s; {load}."
    return [ABOUT, report.table(header, rows), verdict, of]


def _verdict(missed: Sequence[str]) -> str:
    return f"**missed** with {', '.join(missed)}" if missed else "met by all that were measured"


def main(words: Sequence[str]) -> None:
    seconds = float(words[0]) if words and words[0].replace(".", "").isdigit() else STRETCH_S
    asked = [word for word in words if not word.replace(".", "").isdigit()]
    attacks = [name for name in NAMES if not asked or any(name.startswith(word) for word in asked)]
    found: Found = msgspec.json.decode(FIGURES.read_bytes(), type=Found) if FIGURES.exists() else {}
    for program in PROGRAMS:
        measured(found, program, attacks, seconds)
    report.write(
        "floods", "What floods take from a run", " ".join(["python -m benchmarks.floods", *words]), told(found)
    )


if __name__ == "__main__":
    main(sys.argv[1:])
