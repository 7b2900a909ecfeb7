"""`weft ticket`: the fresh ticket that a member on this machine keeps while it runs."""

from typing import Annotated

import typer

from weft.cli.place import home_of


def ticket(
    context: typer.Context,
    run: Annotated[str | None, typer.Argument(help="First digits of the run; default: the last one here.")] = None,
) -> None:
    """Print a ticket that lets another machine join. It is a secret: show it to whom you invite."""
    from weft.cli.locate import find_ticket
    from weft.errors import TicketError

    home = home_of(context)
    file = find_ticket(run, home)
    if file is None:
        which = "" if run is None else f" of a run that begins with {run[:64]}"
        raise TicketError(
            f"no member{which} keeps a ticket in {home}. Start one with weft train, or ask the machine of another "
            f"member; another home is named with --home."
        )
    try:
        typer.echo(file.read_text(encoding="ascii").strip())
    except (OSError, UnicodeDecodeError) as error:
        raise TicketError(f"cannot read the ticket in {file}: {error}. Start the member again.") from error
