"""`weft simulate`: play a run on machines and links that are not there, and tell how it went."""

import tempfile
from collections.abc import Callable, Iterator
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


def simulate(
    scenario: Annotated[
        Path,
        typer.Argument(help="TOML file: a run, machines, links, faults; see docs/simulate.md.", show_default=False),
    ],
    events: Annotated[
        Path | None, typer.Option(help="Write every peer's events there, one JSON line each.", show_default=False)
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change the run file.")
    ] = None,
) -> None:
    """Run production peers in one process, on a virtual clock: hours take minutes, and the same file plays the same."""
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
    yield f"{'machine':<16}{'trained':>10}{'counted':>10}{'missed':>8}  {'replica':<10}end"
    for machine in played.machines:
        yield _row(machine)
    loss = "" if played.nats_per_byte is None else f", held-out {played.nats_per_byte:.4f} nats per byte"
    yield (
        f"{played.num_rounds} rounds, {played.committed_tokens:,} tokens counted{loss}, "
        f"in {figures.duration(played.took_s)} of virtual time"
    )
    replicas = {machine.replica for machine in played.machines if machine.end == "complete"}
    if replicas:
        same = "one replica" if len(replicas) == 1 else f"{len(replicas)} different replicas"
        yield f"{sum(machine.end == 'complete' for machine in played.machines)} machines completed the run with {same}"
    for fault in played.unplayed:
        when = f"{fault.at_s:g} s" if fault.at_s is not None else f"round {fault.at_round}"
        who = ", ".join(fault.named())
        yield f"not played: {type(fault).__name__.lower()} of {who} at {when}, which never came or was not over"


def _row(machine: "Machine") -> str:
    replica = "-" if machine.replica is None else machine.replica[:8]
    trained, counted = figures.amount(machine.trained), figures.amount(machine.counted)
    return f"{machine.name:<16}{trained:>10}{counted:>10}{machine.num_missed:>8}  {replica:<10}{machine.end}"
