"""`weft inspect`: what a checkpoint, ticket, key, backup or run file is. Secrets in them are never printed.

Of conversations it shows one as a model reads it, and what of it is trained on; of tasks one, and what answers it.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.home import CHECKPOINT_FILE, SECTIONS, WHOLE, find_checkpoint, home_of, run_instead
from weft.cli.options import ASKED, ticket_of
from weft.cli.settings import run_file
from weft.config import dump
from weft.dashboard import figures
from weft.errors import ConfigError
from weft.ids import is_start, several

if TYPE_CHECKING:
    from weft.model.came_with import CameWith
    from weft.model.config import ModelConfig

_START_NBYTES = 4096  # as much as tells files apart


def inspect(
    context: typer.Context,
    thing: Annotated[
        str | None,
        typer.Argument(
            help=f"Checkpoint, key or run file, conversations or tasks (--model), or a ticket; {ASKED}",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="For conversations and tasks (.jsonl, .json, .parquet): run, checkpoint or Hugging Face folder whose "
            "chat template and tokenizer they are read with.",
        ),
    ] = None,
    number: Annotated[
        int | None, typer.Option(min=1, help="Of which conversation or task, from 1. Default: the first.")
    ] = None,
) -> None:
    """Say what a file, a folder or a ticket is."""
    if model is None and number is not None:
        raise ConfigError(
            "--number: it is of conversations or tasks, which --model MODEL reads. Give both, or neither."
        )
    for line in _described_by(thing, home_of(context)) if model is None else _shown(thing, model, number or 1, context):
        typer.echo(line)


def _shown(thing: str | None, model: str, number: int, context: typer.Context) -> Iterator[str]:
    from weft.cli.model.conversations import shown

    if thing is None or _looks_like_ticket(thing):  # which is never printed
        raise ConfigError("--model: name a file of conversations or tasks (.jsonl, .json, .parquet) for it to read.")
    return shown(thing, model, number, home_of(context))


def _described_by(given: str | None, home: Path) -> Iterator[str]:
    thing = ticket_of(given)
    if _looks_like_ticket(thing):
        return _ticket(thing)
    if len(thing) < 1024 and Path(thing).is_file():
        return _file(thing, home)
    return _checkpoint(thing, home)


def _looks_like_ticket(thing: str) -> bool:
    return re.match(r"\s*weft\d", thing) is not None and not Path(thing[:255].strip()).exists()


def _ticket(text: str) -> Iterator[str]:
    from weft.net.ticket import read

    found = read(text)
    yield "ticket"
    yield f"run      {found.run}"
    if found.issuer is not None:
        yield f"issuer   {found.issuer}"
    yield f"secret   {'none: the run admits by key, or anybody' if found.secret is None else 'inside, not shown'}"
    for contact in found.contacts:
        cut = "..." if is_start(contact.peer) else ""
        yield f"member   {contact.peer}{cut}  {contact.name}".rstrip()
        for address in contact.addresses:
            yield f"         {address}"


def _file(given: str, home: Path) -> Iterator[str]:
    """Describe a file by how it begins, or by its ending where it is TOML."""
    from weft.data.documents import LINES
    from weft.data.files import has_ending
    from weft.data.tables import TABLES
    from weft.keys import is_backup, read_peer

    path = Path(given)
    try:
        with path.open("rb") as file:
            start = file.read(_START_NBYTES)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}.") from error
    if is_backup(start):
        yield "an encrypted backup of an identity"
        yield f"restore it with: weft keys restore {path}"
    elif start.startswith(b"-----BEGIN "):
        yield "identity"
        yield f"public key   {read_peer(path)}"
        yield "private key  in the file, not shown"
    elif path.name == "checkpoint.json":
        yield from _checkpoint(str(path.absolute().parent), home)
    elif re.match(rb"\s*weft\d", start):
        yield from _ticket(path.read_text(encoding="ascii", errors="replace"))
    elif start.startswith(b"GGUF"):
        yield "GGUF file, as llama.cpp and Ollama read it; weft writes such files (weft export --gguf) and reads none"
    elif path.suffix == ".toml":
        yield from _run_file(path)
    elif run_instead(given, home, "checkpoint, ticket, key or run file", having=(WHOLE, SECTIONS)) is not None:
        yield from _checkpoint(given, home)
    else:
        more = " To see conversations as a model reads them: --model MODEL." * has_ending(path.name, (*LINES, *TABLES))
        raise ConfigError(
            f"{path} is not a checkpoint, a ticket, a key, a backup of one or a run file (.toml). A checkpoint is a "
            f"folder that holds checkpoint.json.{more}"
        )


def _run_file(path: Path) -> Iterator[str]:
    described = run_file(path, ())
    yield "run file"
    yield f"start it with: weft train {path}"
    yield ""
    yield "every field; those that the file leaves out have their defaults:"
    yield dump(described).rstrip()


def _checkpoint(given: str, home: Path) -> Iterator[str]:
    from weft.cli.model.trained import beside, kept_beside
    from weft.model.weights import read_config

    folder = find_checkpoint(given, home)
    if not (folder / CHECKPOINT_FILE).exists():
        yield "Hugging Face folder"
        config = read_config(folder)
        yield f"model       {_described(config)}"
        yield from _beside(beside(folder, config.vocab_size))
        return
    from weft.peer.state.checkpoint import load, read_contents
    from weft.run.config import RunConfig
    from weft.run.staged import StagedConfig
    from weft.store.chunks import replica_digest
    from weft.sync.merge.method import OUTER

    contents, snapshot = read_contents(folder), load(folder)
    run, head = snapshot.config, contents.head
    yield "checkpoint, every byte checked"
    yield f"folder      {folder}"
    yield f"written by  weft {contents.software}"
    yield f"run         {run.name}  {run.run}"
    yield f"round       {'none yet' if head is None else head.round}"
    if isinstance(run, RunConfig):
        yield f"model       {_described(run.model)}"
        if isinstance(run, StagedConfig) and run.section is not None and run.section.is_table:
            yield "matrix      only the one that is both embedding and head is here"
        elif isinstance(run, StagedConfig) and run.section is not None:
            first, last = run.section.layers[0] + 1, run.section.layers[-1] + 1
            yield f"section     {run.section.number + 1} of {run.stages}: layers {first} to {last} are here"
        yield f"tokenizer   {run.data.vocab_size} ids  {contents.tokenizer}"
        yield from _beside(kept_beside(folder))
    else:
        yield f"trains      {figures.amount(run.num_parameters)} numbers in {len(run.tensors)} tensors"
    outer = snapshot.replicated[OUTER]
    rest = {name: vector for name, vector in snapshot.replicated.items() if name != OUTER}
    yield f"replica     {replica_digest(outer, rest)}"
    sizes = {**snapshot.replicated, **snapshot.private}
    yield f"vectors     {', '.join(f'{name} ({figures.amount(vector.numel())})' for name, vector in sizes.items())}"
    for name, value in sorted(snapshot.counters.items()):
        yield f"counter     {name} = {value}"


def _beside(came_with: "CameWith") -> Iterator[str]:
    if came_with.files:
        yield f"beside      {', '.join(sorted(came_with.files))}: an export includes them"


def _described(config: "ModelConfig") -> str:
    from weft.model.config import num_parameters, plain

    adapter = f"an adapter of {figures.amount(num_parameters(config))}, beside " if config.adapter else ""
    return (
        f"{adapter}{figures.amount(num_parameters(plain(config)))} parameters: {several(config.num_layers, 'layer')}, "
        f"width {config.width}, {several(config.num_heads, 'head')}, context {config.max_seq_len}, vocabulary "
        f"{config.vocab_size}"
    )
