"""`weft simulate`: play a run on machines and links that are not there, and tell how it went."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from weft.cli import settings
from weft.config import from_tree, load_tree
from weft.dashboard import figures
from weft.errors import ConfigError
from weft.ids import several

if TYPE_CHECKING:
    from weft.sim.play import Machine, Played
    from weft.sim.scenario import Fault
    from weft.sim.serving.play import Served, Spans

MAX_HELD = 4  # stages that a machine's line names


def simulate(
    scenario: Annotated[
        Path,
        typer.Argument(
            help="TOML file: a run, or texts, and machines, links, faults; see docs/simulate.md.", show_default=False
        ),
    ],
    events: Annotated[
        Path | None,
        typer.Option(help="Write the events of all peers to this file, one JSON line each.", show_default=False),
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change the run file.")
    ] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Run production peers in one process, on a virtual clock: hours take minutes, equal files give equal results."""
    tree = load_tree(scenario)
    if "texts" in tree:
        _serve(scenario, tree, events, changes or (), is_json=is_json)
    else:
        _train(scenario, tree, events, changes or (), is_json=is_json)


def _train(scenario: Path, tree: dict[str, Any], events: Path | None, changes: Sequence[str], *, is_json: bool) -> None:
    from weft.sim.play import play
    from weft.sim.scenario import Scenario

    described = from_tree(tree, Scenario, where=str(scenario))
    path = scenario.parent / described.run
    run_file = settings.run_file(path, changes)
    with _writing(events) as write, tempfile.TemporaryDirectory(prefix="weft-simulate-") as folder:
        played = play(described, run_file, path.absolute().parent, Path(folder), write)
    _tell(replace(played, manifests=()) if is_json else report(played), played.broken)


def _serve(scenario: Path, tree: dict[str, Any], events: Path | None, changes: Sequence[str], *, is_json: bool) -> None:
    from weft.sim.serving.play import play
    from weft.sim.serving.scenario import ServingScenario

    if changes:
        raise ConfigError(
            f"--set {changes[0]}: it changes a run file, and {scenario} has texts in place of a run. Leave it out."
        )
    described = from_tree(tree, ServingScenario, where=str(scenario))
    with _writing(events) as write:
        served = play(described, write)
    _tell(served if is_json else report_served(served), served.broken)


def _tell(told: "Iterator[str] | Played | Served", broken: Sequence[str]) -> None:
    for line in told if isinstance(told, Iterator) else [msgspec.json.format(msgspec.json.encode(told)).decode()]:
        typer.echo(line)
    if broken:
        raise RuntimeError(f"errors that nobody handled: {'; '.join(broken)}")


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
    loss = "" if (told := played.evaluated) is None else f", held-out {figures.brief(told)}"
    yield (
        f"{several(played.num_rounds, 'round')}, {several(played.committed_tokens, 'token')} counted{loss}, "
        f"in {figures.duration(played.took_s)} of virtual time"
    )
    if out := [machine for machine in played.machines if machine.struck_out is not None]:
        yield f"struck out: {', '.join(f'{machine.name} in round {machine.struck_out}' for machine in out)}"
    done = [machine for machine in played.machines if machine.end == "complete"]
    if done:
        yield f"{several(len(done), 'machine')} completed the run with {_in_parts(done) if is_cut else _same(done)}"
    yield from _unplayed(played.unplayed)


def report_served(served: "Served") -> Iterator[str]:
    """Yield what to tell of a play of texts, line by line."""
    yield f"{'machine':<16}{'stage':>6}{'step':>10}{'tokens':>10}{'busy':>7}{'processes':>11}"
    for each in served.machines:
        step, tokens = f"{each.step_ms:.1f} ms", figures.amount(each.num_tokens)
        away = "" if each.is_there else "  gone"
        yield f"{each.name:<16}{each.stage:>6}{step:>10}{tokens:>10}{each.busy:>7.0%}{each.num_lives:>11}{away}"
    yield f"{'':<16}{'50 %':>10}{'95 %':>10}{'99 %':>10}{'mean':>10}"
    yield _spans("between tokens", served.gap)
    yield _spans("first token", served.first)
    yield (
        f"{several(served.num_done, 'text')} came whole in {figures.duration(served.took_s)} of virtual time, "
        f"{served.tokens_per_s:.1f} tokens a second; {served.num_mended:,} of all went on after a break, "
        f"{several(served.num_moved, 'time')} another member took a place"
    )
    ends = {"came wrong": served.num_wrong, "had not ended": served.num_unended} | served.failures
    for why, num in ends.items():
        if num:
            yield f"{several(num, 'text')}: {why}"
    yield from _unplayed(served.unplayed)


def _spans(name: str, spans: "Spans | None") -> str:
    if spans is None:
        return f"{name:<16}{'-':>10}"
    each = (spans.p50, spans.p95, spans.p99, spans.mean)
    return f"{name:<16}" + "".join(f"{f'{ms:.0f} ms':>10}" for ms in each)


def _unplayed(faults: "Sequence[Fault]") -> Iterator[str]:
    for fault in faults:
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
