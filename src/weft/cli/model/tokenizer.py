"""`weft tokenizer`: train a byte-level BPE on text, and look at any tokenizer."""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.options import own_documents, own_nbytes
from weft.cli.terminal import WorkLine
from weft.clock import SystemClock
from weft.errors import ConfigError
from weft.progress import Meter


def make_app() -> typer.Typer:
    app = typer.Typer(help="Tokenizers: train one, look at one.", no_args_is_help=True, rich_markup_mode=None)
    app.command("train")(train)
    app.command("show")(show)
    return app


def train(
    target: Annotated[Path, typer.Argument(help="The tokenizer.json to write.", show_default=False)],
    vocab_size: Annotated[int, typer.Option(help="Number of pieces, including the 256 bytes and end-of-text.")] = 4096,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Text files, folders or globs; may be repeated. Default: Python's own library."),
    ] = None,
) -> None:
    """Train byte-level BPE; the same text gives the same tokenizer."""
    from weft.data.corpus import StdlibSource, documents, text_nbytes
    from weft.data.store import write_atomically
    from weft.data.tokenizer import train_bpe

    if target.exists():
        raise ConfigError(f"{target} exists; weft overwrites no tokenizer. Remove it or choose another place.")
    texts = own_documents(data) if data else documents(StdlibSource(), Path.cwd())
    nbytes = own_nbytes(data) if data else text_nbytes(StdlibSource(), Path.cwd())
    with Meter("reading", "B", WorkLine(), SystemClock(), nbytes) as meter:
        made = train_bpe(
            meter.over((each.text for each in texts), lambda text: len(text.encode("utf-8", errors="replace"))),
            vocab_size,
        )
    write_atomically(target, [made.to_json()])
    typer.echo(f"{target}: {made.vocab_size} pieces, digest {made.digest}")
    typer.echo(f'in a run file: tokenizer = {{type = "json", path = "{target}"}}', err=True)


def show(
    file: Annotated[Path, typer.Argument(help="A tokenizer.json or the folder that holds one.", show_default=False)],
    text: Annotated[str | None, typer.Argument(help="A text to cut into pieces.")] = None,
) -> None:
    """Print a tokenizer's size and digest, and how it cuts a text."""
    from weft.data.tokenizer import JsonTokenizer

    found = JsonTokenizer.from_file(file)
    end = "none" if found.end_of_text is None else str(found.end_of_text)
    typer.echo(f"{found.vocab_size} pieces, end of text {end}, digest {found.digest}")
    if text is not None:
        ids = found.encode(text)
        nbytes = len(text.encode("utf-8", errors="replace"))
        typer.echo(" ".join(f"{token}:{found.decode([int(token)])!r}" for token in ids))
        typer.echo(f"{len(ids)} tokens for {nbytes} bytes")
