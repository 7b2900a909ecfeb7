"""`weft serve key`: who may ask a server, and how much: add, list and remove API keys of a file.

    weft serve key add anna --tokens-per-day 1000000      prints the key, once
    weft serve last --host 0.0.0.0 --keys HOME/serve.keys

A server that runs reads the file again once it has changed.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from weft.cli.home import home_of
from weft.cli.options import later, spread
from weft.cli.terminal import tell
from weft.clock import SystemClock
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.serve.keys import Key

FILE = "serve.keys"  # in the home

File = Annotated[Path | None, typer.Option("--keys", help=f"The file. Default: {FILE} of the home.")]
Name = Annotated[str, typer.Argument(help="Whose key it is.", show_default=False)]


class WithKeys(TyperCommand):
    """`weft serve MODEL`, and below it `weft serve key`, which is a group of its own."""

    @cached_property
    def commands(self) -> Mapping[str, Any]:
        return {"key": typer.main.get_command(make_app())}

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        if args[:1] == ["key"]:
            return self.commands["key"].make_context(f"{info_name} key", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


def make_app() -> typer.Typer:
    app = typer.Typer(
        help="API keys: who may ask a server, and how much.",
        no_args_is_help=True,
        rich_markup_mode=None,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command("add")(add)
    app.command("list")(list_all)
    app.command("remove")(remove)
    return app


class Priority(StrEnum):
    low = "low"
    normal = "normal"
    high = "high"


@dataclass(frozen=True)
class Limits:
    """Of a key; what is left out has no limit."""

    requests_per_minute: Annotated[int | None, typer.Option(help="Requests that are begun in a minute.", min=1)] = None
    tokens_per_minute: Annotated[int | None, typer.Option(help="Tokens read and drawn in a minute.", min=1)] = None
    tokens_per_day: Annotated[int | None, typer.Option(help="Tokens read and drawn in a day.", min=1)] = None
    concurrent: Annotated[int | None, typer.Option(help="Requests under way at a time.", min=1)] = None
    model: Annotated[list[str] | None, typer.Option(help="A model that it may ask; may be repeated. Default: all.")] = (
        None
    )
    priority: Annotated[
        Priority,
        typer.Option(help="While many wait, low is refused at a quarter of the queue, normal at three quarters."),
    ] = Priority.normal
    expires: Annotated[
        str | None, typer.Option(help="From when on it is refused: after a while (30d), or a date.", metavar="WHEN")
    ] = None

    def fields(self) -> dict[str, Any]:
        """Return what a file says of them.

        Raises:
            ConfigError: `--expires` is no moment, or has passed.
        """
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        found |= {"models": tuple(found.pop("model") or ()), "priority": self.priority.value}
        if self.expires is not None:
            found["expires"] = later("--expires", self.expires, SystemClock().wall()).replace(microsecond=0)
        return found


@spread
def add(context: typer.Context, name: Name, limits: Limits, keys: File = None) -> None:
    """Make a key and print it. It is shown once: the file holds what it is known by, and its limits."""
    from weft.serve.keys import new_key

    wanted = limits.fields()
    with _changing(context, keys) as (path, known):
        if name in known:
            raise ConfigError(f"{path}: there is a key named {name} already. Choose another name, or remove that one.")
        try:
            secret, known[name] = new_key(name, **wanted)
        except ValueError:
            raise ConfigError(
                f"{name[:80]}: a key's name has 1 to 64 of the letters A to Z, digits, and _ . @ -"
            ) from None
    tell(f"the key of {name}, shown this once; serve with --keys {path}")
    typer.echo(secret)


def list_all(context: typer.Context, keys: File = None) -> None:
    """Print the names of all keys, and their limits."""
    from weft.serve.keys import load_keys

    path = _path(context, keys)
    found = load_keys(path) if path.exists() else ()
    for key in found:
        typer.echo(f"{key.name}  {', '.join(_limits(key)) or 'no limits'}")
    if not found:
        tell(f"no keys in {path} yet; make one with: weft serve key add NAME")


def remove(context: typer.Context, name: Name, keys: File = None) -> None:
    """Remove a key: a server that runs refuses it from now on."""
    with _changing(context, keys) as (path, known):
        if name not in known:
            raise ConfigError(f"{path}: there is no key named {name[:80]}. See: weft serve key list")
        del known[name]
    tell(f"removed the key of {name} from {path}")


def _path(context: typer.Context, keys: Path | None) -> Path:
    return home_of(context) / FILE if keys is None else keys.absolute()


@contextmanager
def _changing(context: typer.Context, keys: Path | None) -> "Iterator[tuple[Path, dict[str, Key]]]":
    """Yield the file and its keys by name, which are written back; nobody else changes them meanwhile.

    Raises:
        ConfigError: the file cannot be read or written.
    """
    from filelock import FileLock

    from weft.serve.keys import load_keys, save_keys

    path = _path(context, keys)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f"{path.name}.lock")):
            known = {key.name: key for key in (load_keys(path) if path.exists() else ())}
            yield path, known
            save_keys(path, list(known.values()))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}. Name another file: --keys.") from None


def _limits(key: "Key") -> Iterator[str]:
    for count, what in (
        (key.requests_per_minute, "requests a minute"),
        (key.tokens_per_minute, "tokens a minute"),
        (key.tokens_per_day, "tokens a day"),
        (key.concurrent, "at a time"),
    ):
        if count is not None:
            yield f"{count:,} {what}"
    if key.models:
        yield f"models {' '.join(key.models)}"
    if key.priority != "normal":
        yield f"{key.priority} priority"
    if key.expires is not None:
        has_ended = key.expires.timestamp() <= SystemClock().wall()
        yield f"{'ended' if has_ended else 'until'} {key.expires:%Y-%m-%d %H:%M %Z}".rstrip()
