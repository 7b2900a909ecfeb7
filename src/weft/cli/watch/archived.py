"""`weft ledger check RUN --segments N`: training steps of a run made again, from what an anchor has kept of it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from weft.cli.home import called, find_run, no_such_run
from weft.cli.terminal import say_loading, tell
from weft.clock import SystemClock
from weft.errors import DataError
from weft.events import Event, Notice
from weft.ids import RunId, several, short

if TYPE_CHECKING:
    from weft.launch.replays import Found, Report

_TURN_ON = "An anchor keeps all of a run from when it is started so: weft anchor --keep all"
MAX_SAID = 5  # faults
_WORDS = {"equal": "equal to the bit", "near": "as near as honest machines are", "unknown": "not told"}


@dataclass(frozen=True)
class Asked:
    """
    Args:
        num: leases that are drawn; None: all.
        founder: the key of who began the run, or its first digits; None: whoever.
    """

    num: int | None
    founder: str | None
    device: str
    threads: int


def check_run(given: str, home: Path, asked: Asked, *, as_json: bool) -> None:
    """Make training steps of a run of this home again, and say what came of it.

    Raises:
        DataError: something differs, or is altered; or nothing could be checked.
    """
    run = find_run(given, home, having=("*/archive",))
    if run is None:
        raise no_such_run(given, home)
    folders = sorted(run.glob("*/archive"))
    if not folders:
        raise DataError(f"no archive of run {called(run)} is here. {_TURN_ON}.")
    say_loading()
    from weft.launch.replays import replay
    from weft.run.machine import PeerConfig
    from weft.store.home import Home

    def emit(event: Event) -> None:
        if isinstance(event, Notice):
            tell(event.text)

    settings = PeerConfig(device=asked.device, threads=asked.threads)
    on_found = (lambda _found: None) if as_json else (lambda found: typer.echo(_line(found)))
    for folder in folders:
        report = replay(Home(home), RunId(run.name), folder, asked.num, settings, SystemClock(), emit, on_found)
        if as_json:
            typer.echo(json.dumps(_tree(report)))
        else:
            typer.echo(_summary(report))
        _judge(report, folder, asked.founder)


def _line(found: "Found") -> str:
    of = found.of
    where = f"round {found.round:>6,}  {short(found.peer)}  {several(of.num_steps, 'step'):>9}"
    if of.outcome == "differs":
        return f"{where}  differs: {of.why}"
    distance = f" ({of.distance:.1e})" if of.outcome == "near" else ""
    return f"{where}  {_WORDS[of.outcome]}{distance}{': ' + of.why if of.why else ''}"


def _summary(report: "Report") -> str:
    num = report.outcomes
    begun = "rests on a state that members gave"
    if report.founder is not None:
        begun = f"was begun by {report.founder}"
    said = [f"{count} {_WORDS.get(outcome, outcome)}" for outcome, count in sorted(num.items())]
    drawn = f"{report.num_drawn} of {report.num_segments} leases of {several(report.num_rounds, 'round')}"
    return f"{drawn} made again: {', '.join(said) or 'none'}. What is archived {begun}."


def _judge(report: "Report", folder: Path, founder: str | None) -> None:
    if founder is not None and not (report.founder or "").startswith(founder.lower()):
        began = report.founder or "nobody knows whom: it rests on a state that members gave"
        raise DataError(f"{folder} is of a run that was begun by {began}, and not {founder}.")
    if report.faults:
        more = f"; and {len(report.faults) - MAX_SAID} more" if len(report.faults) > MAX_SAID else ""
        said = "; ".join(report.faults[:MAX_SAID])
        raise DataError(f"{said}{more}. Take the archive again from where it was made.")
    if report.differing:
        who = sorted({(each.round, each.peer) for each in report.differing})
        named = ", ".join(f"{peer} in round {round}" for round, peer in who)
        raise DataError(f"what these peers have signed is not what their training steps come to: {named}.")
    if not report.outcomes["equal"] + report.outcomes["near"]:
        raise DataError(f"nothing of {folder} could be made again.")


def _tree(report: "Report") -> dict[str, object]:
    found = [
        {
            "round": each.round,
            "peer": each.peer,
            "segment": each.of.segment,
            "steps": each.of.num_steps,
            "outcome": each.of.outcome,
            "why": each.of.why,
            "distance": each.of.distance,
        }
        for each in report.found
    ]
    counts = {"rounds": report.num_rounds, "segments": report.num_segments, "drawn": report.num_drawn}
    return {"founder": report.founder, **counts, "found": found, "altered": report.faults}
