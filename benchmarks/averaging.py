"""Processes average a vector on loopback: weft against hivemind's averager and gloo's all_reduce.

    python -m benchmarks.averaging

Each library has four processes (`--peers`), kept alive; they take turns, round by round, so all see the same machine.
A round's seconds run from the word to go until the last process holds the mean. Every result is checked.

hivemind is measured where it is installed (`make bench` does), or with `--hivemind` naming the Python that has it:

    python3 -m venv .venv-hivemind && .venv-hivemind/bin/pip install torch==2.13.0 hivemind==1.1.12

Where it can (root on Linux), the benchmark moves itself to a network namespace that has loopback only.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._crew import Crew
from benchmarks._isolated import isolate
from benchmarks.report import load, load_line, table, write

HERE = Path(__file__).parent
WARM_UP = 6  # weft keeps the results of five such rounds: from then on it uses their memory again
AIM = 4.0  # times hivemind's speed
TOLERANCE = 1e-4  # of values up to 20, summed in fp32 in any order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    here = Path(sys.executable) if find_spec("hivemind") else None
    parser.add_argument("--hivemind", type=Path, default=here, help="python of the environment that holds hivemind")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--num", type=int, default=25_000_000, help="elements of the vector")
    parser.add_argument("--peers", type=int, default=4, help="processes; two on two cores are like four on four")
    parser.add_argument("--part-size", type=int, default=1 << 19, help="hivemind's part_size_bytes; 2**19 is its own")
    parser.add_argument("--isolated", action="store_true", help=argparse.SUPPRESS)
    options, before = parser.parse_args(), load()
    if not options.isolated:
        isolate("benchmarks.averaging")
    libraries = {"weft": sys.executable, "gloo": sys.executable}
    if options.hivemind:
        libraries["hivemind"] = str(options.hivemind)
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder, ExitStack() as stack:
        crews = {
            name: stack.enter_context(_crew(name, python, options, Path(folder))) for name, python in libraries.items()
        }
        for name, crew in crews.items():
            _meet(name, crew, options)
        measured: dict[str, list[dict[str, Any]]] = {name: [] for name in crews}
        for number in range(WARM_UP + options.rounds):
            for name, crew in crews.items():
                figures = _round(name, crew, options.peers)
                print(f"{name:9} {figures}", file=sys.stderr, flush=True)
                if number >= WARM_UP:
                    measured[name].append(figures)
    _report(options, measured, before)


def _crew(name: str, python: str, options: argparse.Namespace, folder: Path) -> Crew:
    place = folder / name
    place.mkdir()
    members = str(HERE / "_averaging_members.py")
    commands = [
        [python, members, name, str(rank), str(options.num), str(place / str(rank)), str(options.peers)]
        for rank in range(options.peers)
    ]
    # One thread of arithmetic per process: with four processes on few cores more threads only wait for each other.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    if name == "hivemind":
        env.pop("PYTHONPATH")
    return Crew(commands, env, (folder / f"{name}.log").open("w"))


def _meet(name: str, crew: Crew, options: argparse.Namespace) -> None:
    if name == "hivemind":
        (first,) = crew.ask([{"do": "start", "initial_peers": None}], only=[0])
        initial = {"do": "start", "initial_peers": first["addresses"]}
        crew.ask([initial] * (options.peers - 1), only=range(1, options.peers))
        crew.ask([{"do": "meet", "part_size": options.part_size}] * options.peers)
        return
    started = crew.ask([{"do": "start"}] * options.peers)
    addresses = {each["peer"]: each["addresses"] for each in started if "peer" in each}
    crew.ask([{"do": "meet", "addresses": addresses}] * options.peers)


def _round(name: str, crew: Crew, group: int) -> dict[str, Any]:
    """Do one round and check it; return its figures."""
    prepared = crew.ask([{"do": "prepare"}] * group)
    cpu_s, began = crew.cpu_s(), time.monotonic()
    done = crew.ask([{"do": "round"}] * group)
    took_s = max(each["at"] for each in done) - began
    cpu_s = crew.cpu_s() - cpu_s
    checked = crew.ask([{"do": "check"}] * group)
    worst = max(each["error"] for each in checked)
    if worst > TOLERANCE or any(each["counted"] != group for each in done):
        raise RuntimeError(f"{name}: a round that did not average all: {done}, {checked}")
    figures = {"s": took_s, "cpu_s": cpu_s, "is_equal": len({each["digest"] for each in checked}) == 1}
    if name == "hivemind":
        figures["matchmaking_s"] = max(each["matchmaking_s"] for each in prepared)
    return figures


def _report(options: argparse.Namespace, measured: dict[str, list[dict[str, Any]]], before: float | None) -> None:
    gigabytes = 2 * (options.peers - 1) * 4 * options.num / 1e9
    seconds = {name: median(each["s"] for each in rounds) for name, rounds in measured.items()}
    cpu = {name: sum(each["cpu_s"] for each in rounds) / len(rounds) for name, rounds in measured.items()}
    what = (
        f"{options.num:,} fp32 numbers in each of {options.peers} processes; {options.rounds} rounds of each library "
        f"in turn, after {WARM_UP} that warm up. All processes together send {gigabytes:.2f} GB a round, 2 (n - 1) / n "
        "of the vector each: weft and hivemind encrypted, gloo in the clear. weft checks every payload and result by "
        "its digest and commits by majority with signed messages; hivemind forms its group before the clock starts."
    )
    header = (
        "library",
        "median s",
        "min s",
        "max s",
        "CPU-s a round",
        "CPU-s per GB sent",
        "of weft's time",
        "equal bits",
    )
    rows = [
        (
            name,
            *(f"{figure:.2f}" for figure in (seconds[name], *_extremes(rounds), cpu[name], cpu[name] / gigabytes)),
            f"{seconds[name] / seconds['weft']:.2f}",
            "yes" if all(each["is_equal"] for each in rounds) else "no",
        )
        for name, rounds in measured.items()
    ]
    each = [(name, *(f"{figures['s']:.2f}" for figures in rounds)) for name, rounds in measured.items()]
    sections = [
        load_line(before),
        what,
        table(header, rows),
        _against_hivemind(options, measured),
        "Seconds of each round, in the order measured:",
        table(("library", *map(str, range(1, options.rounds + 1))), each),
    ]
    is_elsewhere = options.hivemind and options.hivemind != Path(sys.executable)
    command = "python -m benchmarks.averaging" + " --hivemind .venv-hivemind/bin/python" * bool(is_elsewhere)
    command += f" --peers {options.peers}" * (options.peers != 4)
    name = "averaging" if options.peers == 4 else f"averaging_{options.peers}"
    write(name, f"Averaging a vector among {options.peers} processes", command, sections)


def _extremes(rounds: list[dict[str, Any]]) -> tuple[float, float]:
    return min(each["s"] for each in rounds), max(each["s"] for each in rounds)


def _against_hivemind(options: argparse.Namespace, measured: dict[str, list[dict[str, Any]]]) -> str:
    if "hivemind" not in measured:
        return "hivemind was not measured: no `--hivemind` was given."
    ratios = [h["s"] / w["s"] for h, w in zip(measured["hivemind"], measured["weft"], strict=True)]
    found = median(each["matchmaking_s"] for each in measured["hivemind"])
    return (
        f"hivemind {_hivemind_version(options.hivemind)}, part_size_bytes {options.part_size}, takes "
        f"**{median(ratios):.1f} times** as long as weft (median of the rounds' ratios; {min(ratios):.1f} to "
        f"{max(ratios):.1f}; the aim is {AIM:g}). Not counted: its matchmaking before each round, {found:.1f} s in the "
        "median."
    )


def _hivemind_version(python: Path) -> str:
    code = "import importlib.metadata as m; print(m.version('hivemind'), 'with torch', m.version('torch'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
