"""`weft pause` and `weft resume`: ask peers that run on this machine to free its device, and to train again."""

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.home import LAST, called, find_run, home_of, meant, no_such_run
from weft.cli.run.ticket import is_kept
from weft.cli.settings import refuse_idle
from weft.errors import DeadlineExceeded, NoSuchRun
from weft.rng import fresh_secret

if TYPE_CHECKING:
    from weft.launch.control import Word
    from weft.store.home import PeerFolder

ANSWER_S = 15.0  # a step under way has to end, and a large model to leave the device
LOOK_S = 0.1

Run = Annotated[
    str | None,
    typer.Argument(
        help='Name of the run, its first digits, or "last". Not needed if only one runs here.', show_default=False
    ),
]
All = Annotated[bool, typer.Option("--all", help="All runs that are trained here.")]


def pause(context: typer.Context, run: Run = None, every: All = False) -> None:
    """Free the device within 5 s; the peer stays a member that votes and follows, and nobody waits for it."""
    _ask(context, run, "pause", every)


def resume(context: typer.Context, run: Run = None, every: All = False) -> None:
    """Train again after `weft pause`."""
    _ask(context, run, "resume", every)


def _ask(context: typer.Context, run: str | None, word: "Word", every: bool) -> None:
    from weft.launch.control import Wish, put_wish, read_answer, take_wish

    folders = running_peers(home_of(context), run, every)
    if run is not None and len({folder.root.parent for folder in folders}) == 1:
        refuse_idle(context, f"{called(folders[0].root.parent)} is named, and only that run is meant", "every")
    number = fresh_secret(8).hex()
    for folder in folders:
        put_wish(folder, Wish(word=word, number=number))
    waiting, patience = dict.fromkeys(folders), threading.Event()
    for _ in range(round(ANSWER_S / LOOK_S)):
        for folder in list(waiting):
            if (text := read_answer(folder, number)) is not None:
                del waiting[folder]
                typer.echo(f"{called(folder.root.parent)}: {text}")
        if not waiting:
            return
        patience.wait(LOOK_S)
    for folder in waiting:
        take_wish(folder)
    names = ", ".join(called(folder.root.parent) for folder in waiting)
    raise DeadlineExceeded(
        f"no answer within {ANSWER_S:.0f} s from the peer that trains {names}: it is busy with a long step, or it "
        "hangs. It may still do what you asked. Ctrl-C in its window stops it."
    )


def running_peers(home: Path, run: str | None, every: bool) -> "list[PeerFolder]":
    """Return the folders of the peers that run in this home, of the run that is meant.

    Raises:
        NoSuchRun: none runs, none is called so, or several runs are trained here and none is named.
    """
    from weft.store.home import PeerFolder

    tickets = sorted((home / "runs").glob("*/*/ticket"))
    runs: dict[Path, list[PeerFolder]] = {}
    for ticket in tickets:
        if is_kept(ticket, home):
            runs.setdefault(ticket.parents[1], []).append(PeerFolder(ticket.parent))
    if run is not None and run != LAST and not runs and find_run(run, home) is None:
        raise no_such_run(run, home)
    if not runs:
        raise NoSuchRun(
            f"nothing trains in {home} now. If a peer runs in another home: weft --home FOLDER pause, or resume."
        )
    names = {path: called(path) for path in runs}
    chosen = list(runs) if run is None else meant(run, list(runs))
    if not chosen:
        raise NoSuchRun(
            f"no peer here trains a run called {(run or '')[:64]!r}. What is trained here now: "
            f"{', '.join(names.values())}."
        )
    if len(chosen) > 1 and not every:
        listed = ", ".join(names[path] for path in chosen)
        raise NoSuchRun(f"{len(chosen)} runs match: {listed}. Name one by its first digits, or add --all.")
    return [folder for path in chosen for folder in runs[path]]
