"""`weft keys`: make, show, list, back up and restore identities. No private key is ever printed."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.home import home_of
from weft.cli.settings import refuse_idle
from weft.errors import ConfigError, KeyFileError, KeyLocked, WeftError

_Key = Annotated[Path, typer.Argument(help="Key file.", show_default=False)]
_Passphrase = Annotated[
    Path | None,
    typer.Option("--passphrase-file", help="File whose first line is the passphrase; without it you are asked."),
]


def make_app() -> typer.Typer:
    app = typer.Typer(
        help="Identities: make, show, list, back up, restore.", no_args_is_help=True, rich_markup_mode=None
    )
    app.command("new")(new)
    app.command("show")(show)
    app.command("list")(list_all)
    app.command("backup")(backup)
    app.command("restore")(restore)
    return app


def new(
    context: typer.Context,
    path: Annotated[Path | None, typer.Argument(help="File to write. Default: the next number in the home.")] = None,
) -> None:
    """Make an identity and print its public key."""
    from weft.keys import open_identity

    target = path or _next(home_of(context) / "keys")
    if target.exists():
        raise KeyFileError(f"{target} exists; weft never overwrites an identity. Move it away first.")
    with open_identity(target, create=True) as identity:
        typer.echo(f"{identity.peer}  {target}")


def show(key: _Key) -> None:
    """Print the public key of a key file: what others put on their list to admit this peer."""
    from weft.keys import read_peer

    typer.echo(read_peer(key))


def list_all(context: typer.Context) -> None:
    """Print the public key of every identity in the home, its file, and whether it is in use."""
    from weft.keys import open_identity, read_peer

    folder = home_of(context) / "keys"
    for path in sorted(folder.glob("*.pem")):
        try:
            open_identity(path).close()
            use = "free"
        except KeyLocked:
            use = "in use"
        except WeftError as error:
            typer.echo(f"unusable: {error}")
            continue
        typer.echo(f"{read_peer(path)}  {path}  {use}")
    if not any(folder.glob("*.pem")):
        typer.echo(f"no identities in {folder} yet; the first run makes one, or: weft keys new", err=True)


def backup(
    context: typer.Context,
    key: _Key,
    target: Annotated[Path, typer.Argument(help="File for the backup.", show_default=False)],
    passphrase_file: _Passphrase = None,
    plain: Annotated[bool, typer.Option("--plain", help="Do not encrypt.")] = False,
) -> None:
    """Copy an identity, encrypted with a passphrase."""
    from weft.keys import back_up, read_peer

    if plain:
        refuse_idle(context, "--plain encrypts nothing", "passphrase_file")
    read_peer(key)  # what is missing is said before anything is asked
    if target.exists():
        raise KeyFileError(f"{target} exists; weft never overwrites an identity. Move it away first.")
    passphrase = None if plain else _passphrase(passphrase_file, is_new=True)
    typer.echo(f"{back_up(key, target, passphrase)} backed up to {target}")


def restore(
    context: typer.Context,
    backup: Annotated[Path, typer.Argument(help="The backup.", show_default=False)],
    target: Annotated[Path | None, typer.Argument(help="File to write. Default: the next number in the home.")] = None,
    passphrase_file: _Passphrase = None,
    plain: Annotated[bool, typer.Option("--plain", help="Take only a backup that is not encrypted.")] = False,
) -> None:
    """Write the identity of a backup."""
    from weft import keys

    if plain:
        refuse_idle(context, "--plain takes a backup that has no passphrase", "passphrase_file")
    place = target or _next(home_of(context) / "keys")
    is_asked = not plain and (passphrase_file is not None or keys.needs_passphrase(backup))
    passphrase = _passphrase(passphrase_file, is_new=False) if is_asked else None
    held = () if target is not None else sorted(place.parent.glob("peer-*.pem"))
    typer.echo(f"{keys.restore(backup, place, passphrase, held)} restored to {place}")


def _next(folder: Path) -> Path:
    number = 0
    while (path := folder / f"peer-{number}.pem").exists():
        number += 1
    return path


def _passphrase(file: Path | None, *, is_new: bool) -> bytes:
    if file is None:
        if not sys.stdin.isatty():
            raise ConfigError(
                "weft has no terminal to ask you for a passphrase. Write it into a file and add --passphrase-file FILE"
                + (", or add --plain to keep the identity unencrypted." if is_new else ".")
            )
        answer: str = typer.prompt("passphrase", hide_input=True, confirmation_prompt=is_new)
        return answer.encode()
    try:
        return file.read_bytes().split(b"\n", 1)[0].rstrip(b"\r")
    except OSError as error:
        raise KeyFileError(f"cannot read the passphrase in {file}: {error.strerror or error}.") from error
