"""`weft`: the table of verbs, and the one place where an error becomes words and an exit code.

A verb's file is imported whether or not it is asked for, so it imports nothing heavy at its top; `weft --help` and
most mistakes are answered before torch is loaded.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import weft
from weft.cli import streams
from weft.cli.chat import chat
from weft.cli.compose import compose
from weft.cli.demo import demo
from weft.cli.doctor import doctor
from weft.cli.failure import explain, explain_usage
from weft.cli.home import Place
from weft.cli.model import eval, export, generate, inspect, patch, tokenizer
from weft.cli.options import given
from weft.cli.plan import bench, methods, plan, simulate
from weft.cli.run import act, anchor, gather, join, keys, pause, runs, ticket, train
from weft.cli.serve import key, serve
from weft.cli.terminal import tell
from weft.cli.watch import ledger, report, status, watch
from weft.errors import ConfigError
from weft.library.home import default_home

_EPILOGS = {"train": train.EXAMPLE, "serve": "API keys: weft serve key --help"}
_GROUPS = {  # as `weft --help` shows the verbs
    "Train together": ("demo", "train", "join", "ticket", "pause", "resume", "anchor", "act"),
    "Use the model": (
        "generate",
        "serve",
        "chat",
        "eval",
        "export",
        "patch",
        "inspect",
        "gather",
        "tokenizer",
        "compose",
    ),
    "Look": ("status", "watch", "report", "compare", "ledger"),
    "Plan and compare": ("plan", "methods", "simulate", "bench"),
    "This machine": ("doctor", "runs", "keys"),
}
_WITHOUT_HOME = "chat"  # home is given with it out of habit: to say each time that nothing of it is used helps nobody
_HELP = {"-h", "--help"}
# oneDNN compiles a matmul for each shape that it meets, and keeps the last thousand; what torch puts above it keeps a
# thousand more. Texts come in as many shapes, and a server grew by half a gigabyte. With fewer it was no slower.
#
# Threads that wait for each other at the end of a product sleep. Else they spin: where another program has one of the
# cores, all of them spin until it is given back, and a product takes up to sixty times as long.
#
# Both in docs/log.md. Whoever sets a variable is left it.
_FOR_TORCH = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "128", "OMP_WAIT_POLICY": "PASSIVE"}
_USAGE: type[BaseException] = typer.BadParameter.__mro__[1]  # UsageError, which lies elsewhere in every typer


def main() -> None:
    """Run the command line of this process and exit."""
    streams.prepare()
    for name, value in _FOR_TORCH.items():
        os.environ.setdefault(name, value)
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except streams.Unwritten as error:
        code = explain(error, Place().home)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; what went wrong is said on standard error."""
    place = Place()
    try:
        _require_folder()
        code = make_app(place)(args=list(arguments), prog_name="weft", standalone_mode=False)
        place.is_idle = place.is_idle and not _HELP.intersection(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    except _USAGE as error:
        return explain_usage(error)
    except BaseException as error:
        return explain(error, place.home)
    if place.is_idle:
        tell("--home has no effect here, since nothing was read from a home or written to one")
    return code if isinstance(code, int) else 0  # of typer.Exit


def _require_folder() -> None:
    """Refuse to run in a folder that is removed: relative paths lead nowhere there, and torch cannot be loaded.

    Raises:
        ConfigError: with what to do.
    """
    try:
        Path.cwd()
    except OSError:
        raise ConfigError(
            "the folder in which weft was started is gone. Change to another (`cd`), and try again."
        ) from None


class _Grouped(TyperGroup):
    """Shows verbs by what they are for."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        named = {name for verbs in _GROUPS.values() for name in verbs}
        others = {"Others": tuple(name for name in self.list_commands(ctx) if name not in named)}
        width = max(map(len, self.commands))
        for title, verbs in (_GROUPS | others).items():
            room = formatter.width - 6 - width
            rows = [(f"{verb:<{width}}", self.commands[verb].get_short_help_str(room)) for verb in verbs]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def make_app(place: Place) -> typer.Typer:
    """Return the command line; `place` is told where home is before a verb runs."""
    app = typer.Typer(
        name="weft",
        cls=_Grouped,
        help="Train one transformer on machines of many owners, over ordinary internet lines.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # plain help, that can be copied and read at any width
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def top(
        context: typer.Context,
        home: Annotated[
            Path | None,
            typer.Option(envvar="WEFT_HOME", help="Folder of identities, data and runs.", show_default=False),
        ] = None,
        _version: Annotated[
            bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
        ] = False,
    ) -> None:
        if home is not None and os.path.isfile(home):
            raise ConfigError(f"--home {home}: a file has that name, and home is a folder. Name one; weft makes it.")
        place.home = default_home() if home is None else home.absolute()
        place.is_idle = "home" in given(context) and context.invoked_subcommand != _WITHOUT_HOME
        context.obj = place

    for verb in (
        demo.demo,
        train.train,
        join.join,
        anchor.anchor,
        status.status,
        watch.watch,
        report.report,
        report.compare,
        ticket.ticket,
        pause.pause,
        pause.resume,
        gather.gather,
        generate.generate,
        serve.serve,
        chat.chat,
        eval.eval,
        export.export,
        inspect.inspect,
        doctor.doctor,
        plan.plan,
        methods.methods,
        simulate.simulate,
    ):
        kind = key.WithKeys if verb is serve.serve else None
        app.command(verb.__name__, cls=kind, epilog=_EPILOGS.get(verb.__name__))(verb)
    app.add_typer(act.make_app(), name="act")
    app.add_typer(bench.make_app(), name="bench")
    app.add_typer(compose.make_app(), name="compose")
    app.add_typer(keys.make_app(), name="keys")
    app.add_typer(ledger.make_app(), name="ledger")
    app.add_typer(patch.make_app(), name="patch")
    app.add_typer(runs.make_app(), name="runs")
    app.add_typer(tokenizer.make_app(), name="tokenizer")
    return app


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"weft {weft.__version__}")
        raise typer.Exit
