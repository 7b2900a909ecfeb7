"""`weft train`: make the run a file describes, or of somebody's own text, or go on with one, and print a ticket."""

import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import settings
from weft.cli.home import SECTIONS, WHOLE, command_for, find_run, home_of, no_such_run, on_disk
from weft.cli.options import spread, until
from weft.cli.own.after import Learnt, learnt, model_beside, run_file_after
from weft.cli.own.run_file import Asked, Wishes, kind_of, run_file_for
from weft.cli.run.torchrun import served
from weft.cli.signals import undone
from weft.cli.terminal import TO_SCREEN, say_loading, tell
from weft.clock import SystemClock
from weft.dashboard.scalars import split_place
from weft.errors import ConfigError, DataError, WeftError
from weft.ids import RunId, short

if TYPE_CHECKING:
    from weft.events import Emit
    from weft.launch.kept import Wish
    from weft.run.machine import PeerConfig

EXAMPLE = """For your own text (a file, packed or not, or a folder; JSON lines and tables, too) it asks four questions,
or none with --yes, and writes a run file beside the text: `weft train notes.txt`. The same command again goes on with
the run.

A run file may be as short as this, saved as first.toml:

\b
  name = "first"
  [train]
  tokens = 1_000_000
  [train.schedule]
  type = "constant"

It trains a small model on Python's own library. More to start from: the folder recipes/ of weft's sources, and the
demo.toml that `weft demo` leaves in its folder."""


@spread
def train(
    context: typer.Context,
    what: Annotated[
        str,
        typer.Argument(
            help="Run file (TOML), or your own text: a file or a folder. Or a run of this home to continue: its name, "
            'its digits, or "last".',
            metavar="FILE|FOLDER|RUN",
            show_default=False,
        ),
    ],
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change the file: --set train.tokens=1e6.")
    ] = None,
    go_on: Annotated[
        bool,
        typer.Option("--go-on", help="If you changed the file: go on with the run kept here, with the new settings."),
    ] = False,
    new: Annotated[
        bool, typer.Option("--new", help="Start a new run, although one of this name, or of this text, is kept here.")
    ] = False,
    after: Annotated[
        str | None,
        typer.Option(
            "--after",
            metavar="RUN",
            help='Begin a new run with what a run of this home has learnt: its name, its digits, or "last". A new run '
            "file is written beside the given one, or beside the text.",
        ),
    ] = None,
    wait_for: Annotated[
        int | None,
        typer.Option(
            help="Start once this many peers are here, this one included. Default: 1; for your own text, --peers.",
            min=1,
        ),
    ] = None,
    *,
    own: Wishes,
    here: settings.Here,
    hardware: settings.Hardware,
    stay: settings.Stay,
    report: settings.Report = None,
    log: settings.Log = None,
) -> None:
    """Start a run and print its ticket on standard output; progress goes to standard error."""
    chosen = settings.machine_settings(here.machine, here.fields() | hardware.fields())
    if served(chosen):
        return
    for where in log or ():
        split_place(where)
    if go_on and (new or after is not None):
        raise ConfigError(f"--go-on and {'--new' if new else '--after'} exclude each other. Give one.")
    stays = until(stay.until, SystemClock().wall())
    wish: Wish = "go on" if go_on else "new" if new else "ask"
    kind, changed = kind_of(what), list(changes or ())
    path, kept, is_made = Path(what), None, False
    if kind == "run":
        idle = {"--set": bool(changed), "--go-on": go_on, "--new": new, **dict.fromkeys(own.all_given, True)}
        kept = None if after else _kept(what, home_of(context), idle)
    elif kind == "text":
        _require_place(home_of(context), chosen)
    say_loading(is_quiet=stay.quiet or TO_SCREEN in (log or ()))
    before = None if after is None else _before(after, kind, what, home_of(context))
    if kind == "text":
        asked = Asked(changes=changed, is_new=new, is_longer=go_on, before=before, home=home_of(context))
        found = run_file_for(path, own, asked, chosen)
        path, changed, is_made = found.path, list(found.changes), found.is_made
        wait_for = wait_for or found.peers
    elif kind == "run file":
        own.refuse_for_run_file()
    if kind == "run file" and before is not None:
        path, changed, is_made = run_file_after(path, changed, before, is_new=new)
    with _made_for(path if is_made else None, has_model=before is not None) as begun:
        from weft.cli.run.running import Manner, run
        from weft.launch.corpus import Corpus
        from weft.launch.session import Names, Options
        from weft.stages.launch import prepare
        from weft.store.home import Home

        names = Names()
        if kind == "text" and not (is_made and before is not None):  # that is said of the same command
            # Of the text another run would be made without what its run file says; one made now is taken away again.
            of, sets = (what, changes or ()) if is_made else (str(path), changed)
            typed = shlex.join([of, *(part for change in sets for part in ("--set", change))])
            names = Names(train=f"{command_for(home_of(context))} train {typed}")
        options = Options(home=Home(home_of(context)), key=here.key, settings=chosen, names=names)
        described = None if kept else (settings.run_file(path, changed), path.absolute().parent)
        run(
            lambda _ask, trainers: Corpus(
                described=described,
                named=tuple(settings.changes_of(changed)),
                kept=kept,
                trainers=trainers,
                stages=prepare,
                wish=wish,
            ),
            options,
            Manner(
                is_quiet=stay.quiet,
                until=stays,
                report=report,
                parent=stay.parent,
                wait_for=wait_for or 1,
                logs=tuple(log or ()),
                source="" if kind == "run" else shlex.quote(what if after is None else str(path)),
                is_text=kind == "text" and after is None,
            ),
            on_started=begun,
        )


def _require_place(home: Path, chosen: "PeerConfig") -> None:
    """Refuse what could not begin anyway, before anything is asked or timed.

    Raises:
        DataError: the home cannot be written; NetError: there is no such address here.
    """
    from weft.net.transport import tcp

    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            pass
    except OSError as error:
        raise DataError(
            f"weft cannot write into its home {home}: {error.strerror or error}. Choose another: --home FOLDER."
        ) from error
    if "tls" in chosen.transports and chosen.tls.host:
        tcp.listen(chosen.tls.host, 0).close()


@contextmanager
def _made_for(path: Path | None, *, has_model: bool) -> Iterator[Callable[["Emit"], None]]:
    """Take a run file that was made for this start away again, where no peer begins: it is refused, or ended before.
    Yield what is to be called once one has begun.

    Args:
        path: None: none was made.
        has_model: the model beside it was made with it, and goes, too.
    """
    is_over = path is None

    def begun(_emit: "Emit") -> None:
        nonlocal is_over
        is_over = True

    def take_away() -> str:
        nonlocal is_over
        if is_over or path is None:
            return ""
        is_over = True
        with suppress(OSError):
            path.unlink()
        if has_model:
            shutil.rmtree(model_beside(path), ignore_errors=True)
        return f"nothing was begun, so {path} is removed again"

    with undone(take_away):
        try:
            yield begun
        except (WeftError, typer.Exit):
            if said := take_away():
                tell(said)
            raise


def _before(after: str, kind: str, what: str, home: Path) -> Learnt:
    """Return what `--after` names.

    Raises:
        ConfigError: it has no effect on what is trained; or as `learnt`, like CheckpointError.
    """
    if kind == "run":
        is_run = find_run(what, home, having=(WHOLE, SECTIONS)) is not None
        fault = "is a run" if is_run else f"is not here: there is no such file or folder in {Path.cwd()}"
        raise ConfigError(
            f"--after {after[:80]}: it begins a new run on a text, or from a run file, and {what[:200]} {fault}. Name "
            "the text or the run file of the new run."
        )
    return learnt(after, home)


def _kept(given: str, home: Path, changing: dict[str, bool]) -> RunId:
    """Return the run of this home that is gone on with.

    Args:
        changing: options that have no effect on one, and whether each was given.

    Raises:
        NoSuchRun: there is none, or several are called so; ConfigError: such an option was given.
    """
    run = find_run(given, home, having=(WHOLE, SECTIONS))
    if run is None:
        raise no_such_run(given, home, f"a file or a folder (paths start from {Path.cwd()})")
    if idle := [option for option, is_given in changing.items() if is_given]:
        raise ConfigError(
            f"{', '.join(idle)}: {given[:64]} is a run of this home, and one that is named so goes on as it is. "
            f"{_how_to_change(run)}"
        )
    return RunId(run.name)


def _how_to_change(run: Path) -> str:
    """Return how a run of this home is changed, made longer or begun anew: by what it was made of."""
    stands, after = on_disk(run).standing, f"--after {short(run.name)}"
    if stands is not None and stands.num_members > 1:
        return (
            f"{stands.num_members} members hold it, and none may change it alone. To begin another run with what it "
            f"has learnt: weft train FILE {after}"
        )
    return (
        "To train it longer, name what it was made of. If that was a text: weft train TEXT --go-on --length "
        "10Mtokens. If that was a run file, raise train.tokens in it, or change what else you want; then: weft train "
        f"FILE.toml --go-on. To begin another run with what it has learnt: weft train FILE {after}"
    )
