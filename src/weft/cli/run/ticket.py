"""`weft ticket`: the fresh ticket that a member on this machine keeps while it runs.

A member that was killed leaves its ticket behind, which leads nowhere: a ticket is printed only while a process holds
the identity it belongs to. An identity outside the home (--key) cannot be looked at, and is taken to be alive.
"""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.home import (
    called,
    command_for,
    find_run,
    find_tickets,
    home_of,
    last_trained,
    no_run_yet,
    no_such_run,
    runs_of,
)
from weft.errors import KeyLocked, NoSuchRun, TicketError, WeftError
from weft.ids import short
from weft.library.home import default_home


def ticket(
    context: typer.Context,
    run: Annotated[
        str | None, typer.Argument(help='Name of the run, its first digits, or "last"; default: the one begun last.')
    ] = None,
) -> None:
    """Print a ticket that lets another machine join. It is a secret: show it only to people you invite."""
    from weft.net.ticket import why_long

    text = ticket_here(run, home_of(context))
    typer.echo(text)
    with suppress(TicketError):  # whoever reads it says what is wrong with it
        if (why := why_long(text)) is not None:
            typer.echo(why, err=True)


def ticket_here(run: str | None, home: Path, verb: str = "") -> str:
    """Return the newest ticket that a member on this machine keeps; say of which run it is where there are several.

    Args:
        verb: as of `nobody_here`.

    Raises:
        NoSuchRun: there is none; TicketError: it cannot be read.
    """
    file = kept_ticket(run, home, verb)
    text = read_kept(file)
    if len({each.parents[1] for each in find_tickets(run, home)}) > 1:
        typer.echo(f"this is run {called(file.parents[1])}", err=True)
    return text


def nobody_here(home: Path, verb: str = "") -> str:
    """Return that nothing trains here now, or ever has, and what to do.

    Args:
        verb: that takes a run's logs, too; empty: it takes a ticket of somebody who trains.
    """
    weft = command_for(home)
    last = max(runs_of(home), key=last_trained, default=None)
    if last is None:
        return no_run_yet(home)
    where = "nothing trains here now" if home == default_home() else f"nothing trains in {home} now"
    if verb:
        return f"{where}; `{weft} {verb} last` tells of the last run, {called(last)}, and `{weft} runs` lists all."
    return (
        f"{where}, so there is no ticket. `{weft} runs` says how each run here goes on; the last was {called(last)}. "
        "Or ask a member elsewhere for its ticket."
    )


def kept_ticket(run: str | None, home: Path, verb: str = "") -> Path:
    """Return the file of the newest ticket that a member on this machine keeps, of `run` where that is given.

    Raises:
        NoSuchRun: there is none.
    """
    files = find_tickets(run, home)
    file = next((each for each in files if is_kept(each, home)), None)
    if file is None and files:
        left, weft = files[0].parents[1], command_for(home)
        told = f" `{weft} {verb} last` tells what it logged until then." if verb else ""
        raise NoSuchRun(
            f"no member here has a ticket of run {called(left)} now: the one that had it was killed, or its machine "
            f"went down.{told} To start it again: {weft} train {short(left.name)}, or {weft} join - with a ticket of "
            "another member."
        )
    if file is None and run is not None and (found := find_run(run, home)) is not None:
        raise NoSuchRun(
            f"nobody here trains run {called(found)} now, so there is no ticket of it. `{command_for(home)} runs` says "
            "how it goes on. Or ask a member elsewhere for its ticket."
        )
    if file is None and run is not None:
        raise no_such_run(run, home)
    if file is None:
        raise NoSuchRun(nobody_here(home, verb))
    return file


def read_kept(file: Path) -> str:
    """Return the ticket in a file of this home.

    Raises:
        TicketError: it cannot be read.
    """
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise TicketError(f"cannot read the ticket in {file}: {error}. Start the member again.") from error


def is_kept(ticket: Path, home: Path) -> bool:
    """Return whether the member that wrote a ticket runs, as far as this home can tell."""
    from weft.keys import open_identity, read_peer

    for key in sorted((home / "keys").glob("*.pem")):
        try:
            if read_peer(key) != ticket.parent.name:
                continue
            open_identity(key).close()
        except KeyLocked:
            return True
        except WeftError:  # not a key that this command can say anything about
            continue
        return False
    return True
