"""How long a newcomer takes to be in sync over slow lines, what its members pay for it, and what donors bring.

Real processes, `weft train` and `weft join`, each in a network namespace on a line of its own. First four members train
a model of 30 million parameters on lines of 20 Mbit/s and a fifth joins. Then a newcomer fetches the state of a smaller
model from one member on a line of 10 Mbit/s, from two, and from two of which one is killed half way.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from benchmarks import report
from weft.events import Entry, Event, PeerStarted, RoundCommitted, StateJoined, StepDone, read_jsonl
from weft.sim.namespaces import Lines

SOURCE = Path(__file__).parents[1] / "src"
SEQ_LEN, BATCH = 16, 1
LARGE = "{type = 'shape', num_layers = 7, num_heads = 8, width = 512, ffn_width = 2048}"  # 29.5 million
SMALL = "{type = 'shape', num_layers = 4, num_heads = 8, width = 512, ffn_width = 1536}"  # 13.8 million
MBIT, DONOR_MBIT = 20.0, 10.0
EVERY = int(os.environ.get("WEFT_JOIN_EVERY", "32"))
NO_ROUND = 100_000  # inner steps: the first round comes long after
ROUNDS_BEFORE = 3  # the first of them, in which the system reads everything from disk, is not counted
DEADLINE_S = 900.0
RUN = """
name = "join"
model = {model}
data = {{source = {{type = "text", paths = ["text.txt"]}}}}
train = {{seq_len = {seq_len}, batch_size = {batch}, tokens = 1000000000, schedule = {{type = "constant", lr = 1e-4}}, \
evaluate_every = 0, evaluate_windows = 1}}
method = {{type = "diloco", every = {every}}}
"""


@dataclass
class Machine:
    """One process on one machine, and what it says."""

    number: int
    home: Path
    process: "subprocess.Popen[bytes]"

    def entries(self) -> list[Entry]:
        return [entry for path in self.home.glob("runs/*/*/log.jsonl") for entry in read_jsonl(path)]

    def said(self, kind: type[Event]) -> list[Entry]:
        return [entry for entry in self.entries() if isinstance(entry.event, kind)]

    def cpu_s(self) -> float:
        used = psutil.Process(self.process.pid).cpu_times()
        return used.user + used.system

    def tokens(self) -> int:
        return sum(entry.event.num_tokens for entry in self.said(StepDone) if isinstance(entry.event, StepDone))


class Company:
    """Machines that take part in one run."""

    def __init__(self, lines: Lines, folder: Path, model: str, every: int) -> None:
        self._lines = lines
        self._folder = folder
        self.machines: list[Machine] = []
        (folder / "text.txt").write_text("the warp holds and the weft goes over and under\n" * 4000)
        (folder / "run.toml").write_text(RUN.format(model=model, seq_len=SEQ_LEN, batch=BATCH, every=every))

    def found(self, num: int) -> None:
        first = self._start(0, ["train", "run.toml", "--wait-for", str(num)])
        ticket = until(lambda: (first.home.with_suffix(".out").read_text() or "").partition("\n")[0], "a ticket")
        self._ticket = str(ticket)
        for number in range(1, num):
            self.join(number)

    def join(self, number: int) -> Machine:
        return self._start(number, ["join", self._ticket, "--yes"])

    def _start(self, number: int, words: Sequence[str]) -> Machine:
        home = self._folder / f"home{number}"
        where = ["--transports", "tls", "--host", self._lines.address(number), "--device", "cpu", "--threads", "1"]
        command = [sys.executable, "-P", "-m", "weft", "--home", str(home), *words, *where, "--quiet"]
        with home.with_suffix(".out").open("wb") as out, home.with_suffix(".err").open("wb") as err:
            env = os.environ | {"PYTHONPATH": str(SOURCE)}
            process = self._lines.start(number, command, self._folder, stdout=out, stderr=err, env=env)
        machine = Machine(number, home, process)
        self.machines.append(machine)
        return machine

    def end(self, *machines: Machine, how: int = signal.SIGKILL) -> None:
        for machine in machines or self.machines:
            if machine.process.poll() is None:
                machine.process.send_signal(how)
                machine.process.wait()


def until(found: "object", what: str) -> object:
    """Wait until a function returns something."""
    deadline = time.monotonic() + DEADLINE_S
    while not (answer := found()):  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {DEADLINE_S:.0f} s for {what}")
        time.sleep(0.5)
    return answer


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


def usage(members: Sequence[Machine]) -> tuple[float, int]:
    return sum(member.cpu_s() for member in members), sum(member.tokens() for member in members)


class Borders:
    """What members have used at each commit: a stretch from one to another holds as many exchanges as rounds."""

    def __init__(self, members: Sequence[Machine]) -> None:
        self._members = members
        self.found: list[tuple[float, float, int]] = []  # at, CPU-seconds, tokens

    def look(self) -> int:
        """Return how many commits have been seen."""
        if len(rounds(self._members[0])) > len(self.found):
            self.found.append((time.time(), *usage(self._members)))
        return len(self.found)

    def cpu_per_token(self, first: int, last: int) -> float:
        (_, cpu_s, tokens), (_, more_s, more) = self.found[first], self.found[last]
        return (more_s - cpu_s) / max(more - tokens, 1)


def large(folder: Path) -> list[str]:
    """Four members train, a fifth joins."""
    with Lines("weft-join", 5, mbit=MBIT) as lines:
        company = Company(lines, folder, LARGE, EVERY)
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
            per_token = borders.cpu_per_token(0, ROUNDS_BEFORE - 1), borders.cpu_per_token(ROUNDS_BEFORE - 1, -1)
            rows = [
                ("state fetched", f"{joined.fetched_nbytes / 1e6:.1f} MB, from {len(joined.donors)} members"),
                ("results committed meanwhile", f"{results} rounds, {results * result_nbytes / 1e6:.1f} MB"),
                ("both over the line", f"{line_s:.1f} s"),
                ("in sync after", f"{sync_at - started_at:.1f} s, {(sync_at - started_at) / line_s:.2f} times that"),
                ("of that, the state", f"{joined.duration_s:.1f} s"),
                (
                    "exchange of a round before, mean",
                    f"{_mean(each[2] for each in quiet):.1f} s of {len(quiet)} rounds",
                ),
                (
                    "exchange of a round meanwhile, mean",
                    f"{_mean(each[2] for each in beside):.1f} s of {len(beside)} rounds",
                ),
                ("members' CPU-seconds per token before", f"{per_token[0]:.5f}"),
                (
                    "members' CPU-seconds per token meanwhile",
                    f"{per_token[1]:.5f}, {per_token[1] / per_token[0] - 1:+.1%}",
                ),
            ]
            return [report.table(("what", "measured"), rows)]
        finally:
            company.end()


def _mean(values: "object") -> float:
    found = list(values)  # type: ignore[call-overload]
    return sum(found) / len(found) if found else float("nan")


def donors(folder: Path) -> list[str]:
    """Two members that do not exchange meanwhile, and newcomers that fetch from one of them, or both."""
    rows = []
    with Lines("weft-donor", 5, mbit=200) as lines:
        company = Company(lines, folder, SMALL, NO_ROUND)
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
                mbit = 8 * joined.fetched_nbytes / joined.duration_s / 1e6
                figures = f"{joined.fetched_nbytes / 1e6:.1f} MB", f"{joined.duration_s:.1f} s", f"{mbit:.2f} Mbit/s"
                rows.append((what, *figures))
                company.end(newcomer)
        finally:
            company.end()
    return [report.table((f"donors at {DONOR_MBIT:.0f} Mbit/s", "fetched", "took", "that is"), rows)]


def _has_half(home: Path) -> bool:
    """Return whether about half of a state, whose momentum is zero, is on disk."""
    return any(512 * path.stat().st_blocks > 0.5 * 4 * 13.8e6 for path in home.glob("runs/*/*/arriving/chunks.bin"))


def main() -> None:
    before = report.load()
    sections = [__doc__ or "", report.load_line(before)]
    with TemporaryDirectory(prefix="weft-join-") as folder:
        for name, part in (("large", large), ("donors", donors)):
            if len(sys.argv) > 1 and name not in sys.argv[1:]:
                continue
            (place := Path(folder) / name).mkdir()
            try:
                sections += part(place)
            except BaseException:
                for path in sorted(place.glob("*.err")):
                    print(path.name, path.read_text()[-2000:], file=sys.stderr)
                raise
    report.write("join", "A newcomer on slow lines", "python -m benchmarks join", sections)


if __name__ == "__main__":
    main()
