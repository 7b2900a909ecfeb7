"""`weft runs`: the runs of this home, how far each is, what it takes of the disk, how it goes on; and delete one."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from weft.cli.home import (
    OnDisk,
    Standing,
    called,
    command_for,
    home_of,
    meant,
    no_run_yet,
    no_such_run,
    on_disk,
    own_name,
    several_runs,
)
from weft.cli.run.ticket import is_kept
from weft.cli.terminal import agrees
from weft.clock import SystemClock
from weft.dashboard import figures
from weft.errors import ConfigError, KeyLocked
from weft.ids import several, short

if TYPE_CHECKING:
    from weft.launch.runs import Held
    from weft.store.home import Home

_NO_NAME = "(no name)"
State = Literal["running", "complete", "ended", "stopped", "damaged", "empty", "unknown"]


def make_app() -> typer.Typer:
    app = typer.Typer(
        help="Runs of this home: list them, with their size on disk and how to continue them; delete one.",
        rich_markup_mode=None,
    )
    app.callback(invoke_without_command=True)(list_all)
    app.command("delete")(delete)
    return app


def list_all(
    context: typer.Context, as_json: Annotated[bool, typer.Option("--json", help="For programs: one object.")] = False
) -> None:
    if context.invoked_subcommand is not None:
        if as_json:
            raise ConfigError(f"--json has no effect before {context.invoked_subcommand}. Leave it out.")
        return
    root = home_of(context)
    found = _known(root)
    if as_json:
        typer.echo(json.dumps({"home": str(root), "runs": [as_tree(each) for each in found]}, ensure_ascii=False))
        return
    if not found:
        typer.echo(no_run_yet(root), err=True)
        return
    width = max(len(each.name or _NO_NAME) for each in found)
    for each in found:
        typer.echo(f"{short(each.held.run)}  {each.name or _NO_NAME:<{width}}  {_line(each)}")
        typer.echo(f"{'':<8}  {each.how}")
    many = several(len(found), "run")
    typer.echo(f"{many} in {root}; {command_for(root)} runs delete RUN removes one", err=True)


def delete(
    context: typer.Context,
    run: Annotated[str, typer.Argument(help='Name of the run, its first digits, or "last".', show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a run from this home: checkpoints, logs, data that no other run here needs. Other peers keep theirs."""
    from weft.launch import runs
    from weft.store.home import Home

    root = home_of(context)
    home = Home(root)
    there = {held.folder: held for held in runs.held_by(home)}
    found = meant(run, list(there))
    if not found:
        raise no_such_run(run, root)
    if len(found) > 1:
        raise several_runs(run, found)
    held = there[found[0]]
    if _is_anchored(held, home):
        raise KeyLocked(f"an anchor of run {called(held.folder)} runs here. Stop it first, with Ctrl-C in its window.")
    runs.require_idle(held, home)  # before anybody is asked
    typer.echo(_what_goes(held, on_disk(held.folder)), err=True)
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(
                "weft has no terminal to ask you whether to delete it. Add --yes, or delete from a terminal."
            )
        if not agrees("delete it?", default=False):
            typer.echo("nothing was deleted", err=True)
            return
    name = called(held.folder)
    typer.echo(f"run {name} is deleted: {figures.nbytes(runs.delete(held, home))} are free again")


def _what_goes(held: "Held", kept: OnDisk) -> str:
    has_any = kept.trained[0]
    at = "with a damaged checkpoint" if has_any else "without a checkpoint"
    at = at if kept.standing is None else f"at round {kept.standing.round}"
    what = "checkpoints and logs" if has_any else "logs"
    more = f" and {figures.nbytes(held.alone_nbytes)} of data and settings" if held.alone_nbytes else ""
    stay = (
        f"; {figures.nbytes(held.shared_nbytes)} stay, because other runs here need them" if held.shared_nbytes else ""
    )
    return (
        f"run {called(held.folder)}, {at}: {figures.nbytes(held.own_nbytes)} of {what}{more}{stay}. Run "
        "files, texts and keys stay. If no other machine holds this run, nobody can restore it."
    )


# --- what a line says ---


@dataclass(frozen=True, kw_only=True)
class Known:
    """A run of a home, for people."""

    held: "Held"
    name: str | None  # None: its config is not here
    stands: Standing | None
    trained_at: float  # wall seconds; 0: it was not
    is_damaged: bool  # its checkpoint is
    state: State
    how: str  # what a person types to go on, or why it does not

    @property
    def total_tokens(self) -> int | None:
        if self.stands is not None and self.stands.total_tokens is not None:
            return self.stands.total_tokens
        return None if self.held.outline is None else self.held.outline.total_tokens


def _known(root: Path) -> Sequence[Known]:
    """Return the runs of a home, the one trained last first."""
    from weft.launch.runs import held_by
    from weft.store.home import Home

    home = Home(root)
    found = []
    pairs = [(held, on_disk(held.folder)) for held in held_by(home)]
    for held, kept in sorted(pairs, key=lambda pair: pair[1].trained, reverse=True):
        state, how = _goes_on(held, kept, home)
        found.append(
            Known(
                held=held,
                name=own_name(held.folder),
                stands=kept.standing,
                trained_at=kept.trained[1],
                is_damaged=kept.is_damaged,
                state=state,
                how=how,
            )
        )
    return found


def _goes_on(held: "Held", kept: OnDisk, home: "Home") -> tuple[State, str]:
    """Return in which state a run is here, and how it goes on."""
    from weft.launch.runs import at_work_here, missing_shards
    from weft.launch.session import usual_name, who_keep
    from weft.store.tickets import last_name, read_name

    outline, stands, weft = held.outline, kept.standing, command_for(home.root)
    train = f"{weft} train {short(held.run)}"
    if (peer := at_work_here(home, held.run)) is not None:
        name = read_name(home.folder(held.run, peer)) or last_name(home, peer) or usual_name(peer)
        return "running", f"{name} trains it now"
    if _is_anchored(held, home):
        return "running", "an anchor keeps it now"
    if outline is None and not _is_known(held, home):
        return "empty", f"a join that nobody answered; to remove it: {weft} runs delete {short(held.run)}"
    if outline is None:
        return "unknown", "another version of weft made it, or its config is damaged"
    if kept.is_damaged:
        return "damaged", f"to remove it: {weft} runs delete {short(held.run)}; then join it again, if others have it"
    if stands is None and any(held.folder.glob("*/anchored")):
        return "stopped", f"go on: {weft} anchor -"
    if stands is None:
        return "empty", "nothing of it is saved here: begin with its run file, or join it"
    if stands.successor is not None:
        return "ended", f"run {short(stands.successor)} goes on in its place"
    total = outline.total_tokens if stands.total_tokens is None else stands.total_tokens
    if stands.committed_tokens >= total:
        return "complete", f"complete; use it: {weft} generate {short(held.run)}"
    if outline.data is None:
        return "stopped", "go on: start the script that trains it again (weft.Sync)"
    if outline.is_private:
        return "stopped", f"go on: {weft} train and its run file, or {weft} join - --data FILES"
    if missing := missing_shards(home, outline):
        return "stopped", f"go on: {weft} join -, which fetches {several(missing, 'missing piece')} of its data"
    if not who_keep(held.run, home):
        return "stopped", f"go on: {train} --key FILE, with the key that trained it: it is not in this home"
    return "stopped", f"go on: {train}"


def _is_known(held: "Held", home: "Home") -> bool:
    """Return whether anything here says what the run is, or of its state."""
    return (
        (home.blobs.folder / held.run).exists()
        or any(held.folder.glob("*/*/checkpoint"))
        or any(held.folder.glob("*/checkpoint"))
    )


def _is_anchored(held: "Held", home: "Home") -> bool:
    """Return whether an anchor keeps the run now: it takes no lock of the run's, but its key's."""
    tickets = held.folder.glob("*/ticket")
    return any((each.parent / "anchored").exists() and is_kept(each, home.root) for each in tickets)


def _line(known: Known) -> str:
    parts = []
    is_waiting = known.state == "running" and not known.trained_at  # for its first checkpoint since it trains here
    if known.stands is not None and (known.stands.round or not is_waiting):
        share = f", {figures.percent(known.stands.committed_tokens, known.total_tokens)}" if known.total_tokens else ""
        parts.append(f"round {known.stands.round}{share}")
    elif known.stands is None:
        parts.append("its checkpoint is damaged" if known.is_damaged else "no checkpoint")
    if known.trained_at:
        ago = max(0.0, SystemClock().wall() - known.trained_at)
        parts.append(f"trained {figures.duration(ago)} ago")
    elif known.stands is not None:
        parts.append("nothing trained here is saved yet" if is_waiting else "not trained here yet")
    shared = f" (and {figures.nbytes(known.held.shared_nbytes)} shared)" if known.held.shared_nbytes else ""
    parts.append(f"{figures.nbytes(known.held.nbytes)}{shared}")
    return ", ".join(parts)


def as_tree(known: Known) -> dict[str, Any]:
    """Return a run for programs; times are seconds since 1970."""
    held, stands = known.held, known.stands
    return {
        "run": held.run,
        "name": known.name,
        "state": known.state,
        "how": known.how,
        "round": None if stands is None else stands.round,
        "committed_tokens": None if stands is None else stands.committed_tokens,
        "total_tokens": known.total_tokens,
        "trained_at": known.trained_at or None,
        "has_checkpoint": stands is not None,
        "nbytes": held.nbytes,
        "shared_nbytes": held.shared_nbytes,
    }
