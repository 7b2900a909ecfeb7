"""`weft doctor`: what this machine is, can reach and can hold; what blocks, and the exact fix.

With a ticket it tries every way that the ticket names, and ends with the exit code that a join would have.
"""

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from weft.cli import settings
from weft.cli.home import home_of
from weft.cli.options import ticket_text
from weft.cli.terminal import wrapped

if TYPE_CHECKING:
    from weft.cli.doctor.findings import Finding

FORMAT = 1  # of --json: raised when a name there changes or ends; new ones may come

_MARKS = {"ok": ("ok   ", "green"), "note": ("note ", "yellow"), "block": ("BLOCK", "bold red")}


def doctor(
    context: typer.Context,
    ticket: Annotated[
        str | None, typer.Argument(help='A ticket whose addresses weft tries; "-" reads it.', show_default=False)
    ] = None,
    machine: settings.Machine = None,
    port: Annotated[int, typer.Option(help="The port you want to listen on; 0: any.", min=0, max=65535)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs: docs/doctor.md.")] = False,
) -> None:
    """Check this machine, and the addresses on a ticket; exits 0 if nothing blocks."""
    from weft.cli.doctor.findings import examine

    failure = None
    findings: Iterable[Finding] = examine(home_of(context), port)
    if ticket is not None:
        from weft.cli.doctor.ticket import examine_ticket
        from weft.net.ticket import read

        tried, failure = examine_ticket(read(ticket_text(ticket)), settings.machine_settings(machine, {}))
        findings = chain(findings, tried)
    if as_json:
        findings = list(findings)
        num_blocking = sum(finding.level == "block" for finding in findings)
    else:
        num_blocking = _show(findings)
    code = 0 if not num_blocking else 1 if failure is None else failure.exit_code
    if as_json:
        typer.echo(_spell(list(findings), code))
    elif num_blocking:
        what = "weft from running here" if failure is None else "this machine from that run"
        typer.echo(f"\n{num_blocking} of these keep {what}.")
    if code:
        raise typer.Exit(code)


def _show(findings: "Iterable[Finding]") -> int:
    from rich.console import Console
    from rich.text import Text

    console, num_blocking = Console(), 0
    for finding in findings:
        mark, style = _MARKS[finding.level]
        num_blocking += finding.level == "block"
        width = console.width if console.is_terminal else None
        said = wrapped(f"{mark}  {finding.topic:<9} {finding.text}", width, " " * 17)
        console.print(Text.assemble((mark, style), said.removeprefix(mark)), soft_wrap=True)
        if finding.fix:
            console.print(Text.assemble("       fix       ", (finding.fix, "cyan")), soft_wrap=True)
    return num_blocking


def _spell(findings: "list[Finding]", code: int) -> str:
    told: dict[str, Any] = {
        "format": FORMAT,
        "is_blocked": any(finding.level == "block" for finding in findings),
        "exit_code": code,
        "findings": findings,
    }
    return msgspec.json.encode(told).decode()
