"""`weft doctor`: what this machine is, can reach and can hold; what blocks, and the exact fix."""

from typing import Annotated

import typer

from weft.cli.place import home_of

_MARKS = {"ok": ("ok   ", "green"), "note": ("note ", "yellow"), "block": ("BLOCK", "bold red")}


def doctor(
    context: typer.Context,
    port: Annotated[int, typer.Option(help="The port you mean to listen on; 0: any.", min=0, max=65535)] = 0,
) -> None:
    """Examine this machine; exits 0 if nothing blocks."""
    from rich.console import Console
    from rich.text import Text

    from weft.cli.findings import examine
    from weft.cli.paragraph import wrapped

    console = Console()
    num_blocking = 0
    for finding in examine(home_of(context), port):
        mark, style = _MARKS[finding.level]
        num_blocking += finding.level == "block"
        width = console.width if console.is_terminal else None
        said = wrapped(f"{mark}  {finding.topic:<9} {finding.text}", width, " " * 17)
        console.print(Text.assemble((mark, style), said.removeprefix(mark)), soft_wrap=True)
        if finding.fix:
            console.print(Text.assemble("       fix       ", (finding.fix, "cyan")), soft_wrap=True)
    if num_blocking:
        console.print(f"\n{num_blocking} of these keep weft from running here.")
        raise typer.Exit(1)
