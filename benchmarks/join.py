"""How long a newcomer takes to be in sync over slow lines, what its members pay for it, and what donors bring.

    python -m benchmarks.join                # all parts; `python -m benchmarks.join 150 donors` those, `report` none
    python -m benchmarks.join 32             # a part; what was found for others before stays in the report

Real processes, `weft train` and `weft join`, each in a network namespace on a line of its own. First four members train
a model of 30 million parameters on lines of 20 Mbit/s and a fifth joins: with 32 inner steps a round, then with 150.
Then a newcomer fetches the state of a smaller model from one member on a line of 10 Mbit/s, from two, and from two of
which one is killed half way. What was found is kept in reports/join.json, with the commit that it is of.
"""

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

import msgspec

from benchmarks import report
from benchmarks._company import Company, Machine, until
from benchmarks.rig.namespaces import Lines
from weft.events import PeerStarted, RoundCommitted, StateJoined, StepDone

SEQ_LEN, BATCH = 16, 1
LARGE = "{type = 'shape', num_layers = 7, num_heads = 8, width = 512, ffn_width = 2048}"  # 29.5 million
SMALL = "{type = 'shape', num_layers = 4, num_heads = 8, width = 512, ffn_width = 1536}"  # 13.8 million
MBIT, DONOR_MBIT = 20.0, 10.0
EVERY = ("32", "150")  # inner steps a round: members exchange nearly all the time, or train for longer than that
PARTS = (*EVERY, "donors")
MOST_TIMES, MOST_CPU = 1.2, 0.01  # the aims: of the time over the line, and more CPU time per token
NO_ROUND = 100_000  # inner steps: the first round comes long after
ROUNDS_BEFORE = 3  # the first of them, in which the system reads everything from disk, is not counted
RUN = """
name = "join"
model = {model}
data = {{source = {{type = "text", paths = ["text.txt"]}}}}
train = {{seq_len = {seq_len}, batch_size = {batch}, tokens = 1000000000, schedule = {{type = "constant", lr = 1e-4}}, \
evaluate_every = 0, evaluate_windows = 1}}
method = {{type = "diloco", every = {every}}}
"""

FIGURES = report.FOLDER / "join.json"
ABOUT = """
Real processes, `weft train` and `weft join`, each in a network namespace on a line of its own. First four members train
a model of 30 million parameters on lines of 20 Mbit/s and a fifth joins. Then a newcomer fetches the state of a smaller
model from one member on a line of 10 Mbit/s, from two, and from two of which one is killed half way.
""".strip()
WHY = """
Where a round trains for longer than it exchanges (150), a newcomer has the whole lines of its members most of the
time. Where they exchange nearly all the time (32) it has but a quarter of their lines: its state takes longer than it
would alone, and the results of more rounds must follow. A newcomer's start, until it asks for a state, is in both.
What members pay is compared from one commit to another, so that both stretches hold as many exchanges as rounds. It is
what goes on beside inner steps that a newcomer adds to: reading, hashing and sending the state. An inner step is the
same work before and after; but five processes share two cores here, and one that starts, and then trains, slows down
the others' caches: that changes their CPU time too, and in a run on machines of their own it would not.
""".strip()


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """How a fifth machine joined four."""

    commit: str
    load: float | None
    fetched_nbytes: int
    num_donors: int
    num_results: int  # rounds committed meanwhile
    results_nbytes: int
    line_s: float  # that state and results take over the newcomer's line
    in_sync_s: float
    state_s: float  # of that
    num_before: int  # rounds
    before_s: float  # an exchange, mean
    num_beside: int
    beside_s: float
    cpu_before: float  # members' seconds per token
    cpu_beside: float
    other_before: float | None = None  # of that, beside inner steps; None: not kept
    other_beside: float | None = None

    @property
    def times(self) -> float:
        return self.in_sync_s / self.line_s

    @property
    def more_cpu(self) -> float:
        return self.cpu_beside / self.cpu_before - 1

    @property
    def more_other(self) -> float | None:
        """What goes on beside inner steps grows by, as a share of all that a token took before."""
        if self.other_before is None or self.other_beside is None:
            return None
        return (self.other_beside - self.other_before) / self.cpu_before


class Fetch(msgspec.Struct, frozen=True, kw_only=True):
    """How one newcomer fetched a state. None: not kept."""

    what: str
    fetched_nbytes: int
    took_s: float
    nbytes: int | None = None  # of the whole state; chunks that are equal are fetched once
    round: int | None = None
    num_donors: int | None = None  # who delivered

    @property
    def mbit(self) -> float:
        return 8 * self.fetched_nbytes / self.took_s / 1e6


class Fetches(msgspec.Struct, frozen=True):
    commit: str
    load: float | None
    found: tuple[Fetch, ...]


class Found(msgspec.Struct, frozen=True):
    """All that is known, for the report."""

    joined: dict[str, Joined] = {}  # by inner steps a round
    fetches: Fetches | None = None


def company_on(lines: Lines, folder: Path, model: str, every: int) -> Company:
    (folder / "text.txt").write_text("the warp holds and the weft goes over and under\n" * 4000)
    return Company(lines, folder, RUN.format(model=model, seq_len=SEQ_LEN, batch=BATCH, every=every))


def rounds(machine: Machine) -> list[tuple[float, int, float]]:
    """Return when a machine made each outer step, its number, and the seconds from its payload to it."""
    told = [(entry.at, entry.event) for entry in machine.said(RoundCommitted)]
    return [(at, event.round, event.duration_s) for at, event in told if isinstance(event, RoundCommitted)]


def in_sync(newcomer: Machine, members: Sequence[Machine]) -> tuple[float, int] | None:
    """Return when a newcomer had made every outer step that any member had, and the round; None: not yet."""
    theirs = [(at, number) for member in members for at, number, _ in rounds(member)]
    joined = [
        (entry.at, entry.event.round) for entry in newcomer.said(StateJoined) if isinstance(entry.event, StateJoined)
    ]
    for at, number in [*joined, *((at, number) for at, number, _ in rounds(newcomer))]:
        if number >= max(each for when, each in theirs if when <= at):
            return at, number
    return None


class Borders:
    """What members have used at each commit: a stretch from one to another holds as many exchanges as rounds."""

    def __init__(self, members: Sequence[Machine]) -> None:
        self._members = members
        self.found: list[tuple[float, list[dict[int, float]], int]] = []  # at, each one's threads, tokens

    def look(self) -> int:
        """Return how many commits have been seen."""
        if len(rounds(self._members[0])) > len(self.found):
            threads = [member.threads() for member in self._members]
            self.found.append((time.time(), threads, sum(member.tokens() for member in self._members)))
        return len(self.found)

    def cpu_per_token(self, first: int, last: int) -> tuple[float, float]:
        """Return the members' CPU-seconds per token between two commits, and those beside inner steps.

        A member's busiest thread but the first makes inner steps.
        """
        (_, before, tokens), (_, after, more) = self.found[first], self.found[last]
        whole = other = 0.0
        for earlier, later in zip(before, after, strict=True):
            used = {thread: cpu_s - earlier.get(thread, 0.0) for thread, cpu_s in later.items()}
            steps = max((thread for thread in later if thread != min(later)), key=lambda thread: later[thread])
            whole += sum(used.values())
            other += sum(used.values()) - used[steps]
        return whole / max(more - tokens, 1), other / max(more - tokens, 1)


def large(folder: Path, every: int) -> Joined:
    """Four members train, a fifth joins."""
    load = report.load()
    with Lines("weft-join", 5, mbit=MBIT) as lines:
        company = company_on(lines, folder, LARGE, every)
        try:
            company.found(4)
            members = company.machines[:4]
            borders = Borders(members)
            until(lambda: borders.look() >= ROUNDS_BEFORE, "rounds before")
            at, joins_at = borders.found[0][0], time.time()
            newcomer = company.join(4)
            until(lambda: (borders.look(), in_sync(newcomer, members))[1], "the newcomer to be in sync")
            found = in_sync(newcomer, members)
            assert found is not None
            num = borders.look()
            until(lambda: borders.look() > num, "the end of the round in which it came to be")
            sync_at, last = found
            (joined,) = [e.event for e in newcomer.said(StateJoined) if isinstance(e.event, StateJoined)]
            started_at = newcomer.said(PeerStarted)[0].at
            results = last - joined.round
            result_nbytes = joined.nbytes // 8 * 33 // 32  # one byte a number, and a scale for each block
            need_nbytes = joined.fetched_nbytes + results * result_nbytes
            line_s = 8 * need_nbytes / (MBIT * 1e6)
            told = rounds(members[0])
            quiet = [each for each in told if at < each[0] < joins_at]
            beside = [each for each in told if joins_at < each[0] <= sync_at + 1]
            cpu_before, other_before = borders.cpu_per_token(0, ROUNDS_BEFORE - 1)
            cpu_beside, other_beside = borders.cpu_per_token(ROUNDS_BEFORE - 1, -1)
            return Joined(
                commit=report.commit(),
                load=load,
                fetched_nbytes=joined.fetched_nbytes,
                num_donors=len(joined.donors),
                num_results=results,
                results_nbytes=results * result_nbytes,
                line_s=line_s,
                in_sync_s=sync_at - started_at,
                state_s=joined.duration_s,
                num_before=len(quiet),
                before_s=mean(each[2] for each in quiet),
                num_beside=len(beside),
                beside_s=mean(each[2] for each in beside) if beside else 0.0,
                cpu_before=cpu_before,
                cpu_beside=cpu_beside,
                other_before=other_before,
                other_beside=other_beside,
            )
        finally:
            company.end()


def donors(folder: Path) -> Fetches:
    """Two members that do not exchange meanwhile, and newcomers that fetch from one of them, or both."""
    load, found = report.load(), []
    with Lines("weft-donor", 5, mbit=200) as lines:
        company = company_on(lines, folder, SMALL, NO_ROUND)
        try:
            company.found(2)
            members = company.machines[:2]
            until(lambda: all(member.said(StepDone) for member in members), "a first step")
            for machine in members:
                lines.set(machine.number, mbit=DONOR_MBIT)
            for number, (what, kills) in enumerate((("two", False), ("two, one killed", True), ("one", False)), 2):
                newcomer = company.join(number)
                if kills:
                    until(partial(_has_half, newcomer.home), "half of the state")
                    company.end(members[1])
                    what += f" {time.time() - newcomer.said(PeerStarted)[0].at:.1f} s after it began"
                until(partial(newcomer.said, StateJoined), "the state")
                (joined,) = [e.event for e in newcomer.said(StateJoined) if isinstance(e.event, StateJoined)]
                found.append(
                    Fetch(
                        what=what,
                        fetched_nbytes=joined.fetched_nbytes,
                        took_s=joined.duration_s,
                        nbytes=joined.nbytes,
                        round=joined.round,
                        num_donors=len(joined.donors),
                    )
                )
                company.end(newcomer)
        finally:
            company.end()
    return Fetches(report.commit(), load, tuple(found))


def _has_half(home: Path) -> bool:
    """Return whether about half of a state, whose momentum is zero, is on disk."""
    return any(512 * path.stat().st_blocks > 0.5 * 4 * 13.8e6 for path in home.glob("runs/*/*/arriving/chunks.bin"))


def _joined_told(joined: dict[str, Joined]) -> list[str]:
    known = [(every, joined[every]) for every in EVERY if every in joined]
    if not known:
        return []
    lines: dict[str, Callable[[Joined], str]] = {
        "state fetched": lambda of: f"{of.fetched_nbytes / 1e6:.1f} MB, from {of.num_donors} members",
        "results committed meanwhile": lambda of: f"{_rounds(of.num_results)}, {of.results_nbytes / 1e6:.1f} MB",
        "both over the line": lambda of: f"{of.line_s:.1f} s",
        "in sync after": lambda of: f"{of.in_sync_s:.1f} s, {of.times:.2f} times that",
        "of that, the state": lambda of: f"{of.state_s:.1f} s",
        "exchange of a round before, mean": lambda of: f"{of.before_s:.1f} s of {_rounds(of.num_before)}",
        "exchange of a round meanwhile, mean": lambda of: f"{of.beside_s:.1f} s of {_rounds(of.num_beside)}",
        "members' CPU-seconds per token before": lambda of: f"{of.cpu_before:.5f}",
        "members' CPU-seconds per token meanwhile": lambda of: f"{of.cpu_beside:.5f}, {100 * of.more_cpu:+.1f} %",
        "of that, beside inner steps, before": lambda of: _or_not_kept(of.other_before, 5),
        "of that, beside inner steps, meanwhile": lambda of: _other_told(of),
        "commit": lambda of: of.commit,
        "load before": lambda of: _or_not_kept(of.load),
    }
    rows = [(what, *(tell(of) for _, of in known)) for what, tell in lines.items()]
    verdicts = [
        f"{every} inner steps a round: in sync after {of.times:.2f} times what state and results take over the line "
        f"({_verdict(of.times <= MOST_TIMES)}), {_cost_told(of)}."
        for every, of in known
    ]
    aims = f"The aims: {MOST_TIMES:g} times, and {100 * MOST_CPU:g} % more CPU time per token, at most."
    return [
        report.table(("inner steps a round", *(every for every, _ in known)), rows),
        "\n".join([aims, *verdicts]),
        WHY,
    ]


def _rounds(num: int) -> str:
    return f"{num} round{'' if num == 1 else 's'}"


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "**missed**"


def _or_not_kept(value: float | None, digits: int = 1) -> str:
    return "not kept" if value is None else f"{value:.{digits}f}"


def _other_told(of: Joined) -> str:
    told = _or_not_kept(of.other_beside, 5)
    return told if of.more_other is None else f"{told}, {100 * of.more_other:+.1f} % of all"


def _cost_told(of: Joined) -> str:
    more = of.more_cpu if of.more_other is None else of.more_other
    what = "CPU time per token" if of.more_other is None else "CPU time per token beside inner steps"
    return f"{100 * more:+.1f} % {what} ({_verdict(more <= MOST_CPU)})"


def _fetches_told(fetches: Fetches) -> list[str]:
    rows = [
        (
            each.what,
            "not kept" if each.nbytes is None else f"{each.nbytes / 1e6:.1f} MB",
            f"{each.fetched_nbytes / 1e6:.1f} MB",
            f"{each.took_s:.1f} s",
            f"{each.mbit:.2f} Mbit/s",
            "not kept" if each.round is None else each.round,
            "not kept" if each.num_donors is None else each.num_donors,
        )
        for each in fetches.found
    ]
    header = (
        f"donors at {DONOR_MBIT:.0f} Mbit/s",
        "whole state",
        "fetched",
        "took",
        "that is",
        "of round",
        "delivered",
    )
    two, _, one = fetches.found
    return [
        report.table(header, rows),
        f"Two are {two.mbit / one.mbit:.2f} times as fast as one. Less than the whole is fetched where chunks are "
        "equal: a momentum that no round has changed is zero. "
        f"Commit {fetches.commit}, load before: {_or_not_kept(fetches.load)}.",
    ]


def save(found: Found) -> None:
    FIGURES.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    sections = [ABOUT, *_joined_told(found.joined), *(_fetches_told(found.fetches) if found.fetches else [])]
    report.write("join", "A newcomer on slow lines", "python -m benchmarks.join", sections)


def main() -> None:
    wanted = sys.argv[1:] or PARTS
    if unknown := set(wanted) - {*PARTS, "report"}:
        raise SystemExit(f"no such part: {', '.join(sorted(unknown))}. There are: {', '.join(PARTS)}; and report.")
    found = msgspec.json.decode(FIGURES.read_bytes(), type=Found) if FIGURES.exists() else Found()
    for name in wanted:
        with TemporaryDirectory(prefix="weft-join-") as folder:
            try:
                if name == "donors":
                    found = msgspec.structs.replace(found, fetches=donors(Path(folder)))
                elif name != "report":
                    joined = found.joined | {name: large(Path(folder), int(name))}
                    found = msgspec.structs.replace(found, joined=joined)
            except BaseException:
                for path in sorted(Path(folder).glob("*.err")):
                    print(path.name, path.read_text()[-2000:], file=sys.stderr)
                raise
        save(found)


if __name__ == "__main__":
    main()
