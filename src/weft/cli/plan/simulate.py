"""`weft simulate`: play a run on machines and links that are not there, and tell how it went."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import settings
from weft.config import load
from weft.dashboard import figures
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.sim.play import Machine, Played

MAX_HELD = 4  # stages that a machine's line names


def simulate(
    scenario: Annotated[
        Path,
        typer.Argument(help="TOML file: a run, machines, links, faults; see docs/simulate.md.", show_default=False),
    ],
    events: Annotated[
        Path | None,
        typer.Option(help="Write the events of all peers to this file, one JSON line each.", show_default=False),
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change the run file.")
    ] = None,
) -> None:
    """Run production peers in one process, on a virtual clock: hours take minutes, equal files give equal results."""
    from weft.sim.play import play
    from weft.sim.scenario import Scenario

    described = load(scenario, Scenario)
    path = scenario.parent / described.run
    run_file = settings.run_file(path, changes or ())
    with _writing(events) as write, tempfile.TemporaryDirectory(prefix="weft-simulate-") as folder:
        played = play(described, run_file, path.absolute().parent, Path(folder), write)
    for line in report(played):
        typer.echo(line)
    if played.broken:
        raise RuntimeError(f"errors that nobody handled: {'; '.join(played.broken)}")


@contextmanager
def _writing(path: Path | None) -> Iterator[Callable[[bytes], object]]:
    if path is None:
        yield lambda _line: None
        return
    try:
        file = path.open("wb")
    except OSError as error:
        raise ConfigError(f"--events {path}: cannot be written: {error.strerror or error}.") from error
    with file:
        yield file.write


def report(played: "Played") -> Iterator[str]:
    """Yield what to tell of a play, line by line."""
    is_cut = any(machine.stages for machine in played.machines)
    stages = f"{'stages':<12}" if is_cut else ""
    yield f"{'machine':<16}{stages}{'trained':>10}{'counted':>10}{'missed':>8}  {'replica':<10}end"
    for machine in played.machines:
        yield _row(machine, is_cut=is_cut)
    loss = "" if played.nats_per_byte is None else f", held-out {figures.nats_per_byte(played.nats_per_byte)}"
    yield (
        f"{played.num_rounds} rounds, {played.committed_tokens:,} tokens counted{loss}, "
        f"in {figures.duration(played.took_s)} of virtual time"
    )
    done = [machine for machine in played.machines if machine.end == "complete"]
    if done:
        yield f"{len(done)} machines completed the run with {_in_parts(done) if is_cut else _same(done)}"
    for fault in played.unplayed:
        when = f"{fault.at_s:g} s" if fault.at_s is not None else f"round {fault.at_round}"
        who = ", ".join(fault.named())
        yield f"not played: {type(fault).__name__.lower()} of {who} at {when}, which never began or never ended"


def _same(machines: Sequence["Machine"]) -> str:
    replicas = {machine.replica for machine in machines}
    return "one replica" if len(replicas) == 1 else f"{len(replicas)} different replicas"


def _in_parts(machines: Sequence["Machine"]) -> str:
    """Return whether those who held the same stage at the end have the same of it."""
    found: dict[int, set[str]] = {}
    for machine in machines:
        for stage, replica in machine.sections.items():
            found.setdefault(stage, set()).add(replica)
    apart = {stage: len(each) for stage, each in sorted(found.items()) if len(each) > 1}
    told = (f"{num} different replicas of stage {stage + 1}" for stage, num in apart.items())
    return ", ".join(told) or "one replica of each stage"


def _row(machine: "Machine", *, is_cut: bool) -> str:
    replica = "-" if machine.replica is None else machine.replica[:8]
    trained, counted = figures.amount(machine.trained), figures.amount(machine.counted)
    stages = f"{_held(machine):<12}" if is_cut else ""
    return f"{machine.name:<16}{stages}{trained:>10}{counted:>10}{machine.num_missed:>8}  {replica:<10}{machine.end}"


def _held(machine: "Machine") -> str:
    """Return the stages that a machine has held, in order; of many, the last ones."""
    names = [str(stage + 1) for stage in machine.stages]
    return "-" if not names else ", ".join(names) if len(names) <= MAX_HELD else f"..., {', '.join(names[-2:])}"
