"""`weft doctor`: what this machine is, can reach and can hold; what blocks, and the exact fix.

With a ticket it tries every way that the ticket names, and ends with the exit code that a join would have.
"""

import sys
from itertools import chain
from typing import Annotated

import typer

from weft.cli import settings
from weft.cli.place import home_of

_MARKS = {"ok": ("ok   ", "green"), "note": ("note ", "yellow"), "block": ("BLOCK", "bold red")}


def doctor(
    context: typer.Context,
    ticket: Annotated[
        str | None, typer.Argument(help='A ticket whose ways are to be tried; "-" reads it.', show_default=False)
    ] = None,
    machine: settings.Machine = None,
    port: Annotated[int, typer.Option(help="The port you mean to listen on; 0: any.", min=0, max=65535)] = 0,
) -> None:
    """Examine this machine, and the ways that a ticket names; exits 0 if nothing blocks."""
    from rich.console import Console
    from rich.text import Text

    from weft.cli.findings import examine
    from weft.cli.paragraph import wrapped

    console = Console()
    num_blocking, failure = 0, None
    findings = examine(home_of(context), port)
    if ticket is not None:
        from weft.cli.findings_ticket import examine_ticket
        from weft.net.ticket import MAX_CHARS, read

        named = read(sys.stdin.readline(MAX_CHARS + 1) if ticket == "-" else ticket)
        tried, failure = examine_ticket(named, settings.machine_settings(machine, {}))
        findings = chain(findings, tried)
    for finding in findings:
        mark, style = _MARKS[finding.level]
        num_blocking += finding.level == "block"
        width = console.width if console.is_terminal else None
        said = wrapped(f"{mark}  {finding.topic:<9} {finding.text}", width, " " * 17)
        console.print(Text.assemble((mark, style), said.removeprefix(mark)), soft_wrap=True)
        if finding.fix:
            console.print(Text.assemble("       fix       ", (finding.fix, "cyan")), soft_wrap=True)
    if num_blocking:
        what = "weft from running here" if failure is None else "this machine from that run"
        console.print(f"\n{num_blocking} of these keep {what}.")
        raise typer.Exit(1 if failure is None else failure.exit_code)
