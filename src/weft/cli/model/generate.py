"""`weft generate`: text from a checkpoint, shown as it is made."""

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from weft import rng
from weft.cli.home import find_checkpoint, home_of
from weft.cli.options import text_of_input
from weft.cli.settings import refuse_idle
from weft.cli.terminal import say_loading, tell
from weft.config import from_tree
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.data.tokenizer import Tokenizer

_MAX_PROMPT = 4_000_000  # bytes of standard input
_UNFINISHED = "\ufffd"  # what a character shows as while only some of its bytes are there
_MAX_LINES, _LINE = 8, 80  # of a sample that is shown with other things
_MAX_CHARACTER_TOKENS = 4  # bytes of the longest character: after so many the mark is real


def generate(
    context: typer.Context,
    checkpoint: Annotated[
        str, typer.Argument(help='Folder, or a run: its name, its digits, or "last".', show_default=False)
    ],
    prompt: Annotated[str, typer.Argument(help="The beginning of the text; - reads it from standard input.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Write at most this many tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="Randomness; 0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens whose probabilities add up to this.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    device: Annotated[str, typer.Option(help="Where torch runs.")] = "auto",
) -> None:
    """Let a trained model continue a prompt."""
    if temperature == 0:
        refuse_idle(context, "--temperature 0 always takes the likeliest token", "top_k", "top_p", "seed")
    if top_k == 1:
        refuse_idle(context, "--top-k 1 always takes the likeliest token", "temperature", "top_p", "seed")
    folder = find_checkpoint(checkpoint, home_of(context))  # what is not there is said at once
    say_loading()
    from weft.cli.model.trained import open_trained, say_which
    from weft.inference.sample import Sampling
    from weft.inference.sample import generate as generate_tokens

    fields = {"max_new_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    _check(fields)  # said before anything is loaded
    if prompt == "-":
        if sys.stdin.isatty():
            tell("Type the beginning of the text; Ctrl-D at the start of a line ends it:")
        prompt = text_of_input("the beginning of a text", _MAX_PROMPT).removesuffix("\n")
    trained = open_trained(str(folder), home_of(context))
    say_which(trained, checkpoint)
    end = trained.tokenizer.end_of_text
    sampling = from_tree(fields if end is None else {**fields, "stop_id": end}, Sampling, where="command line")
    ids = [int(token) for token in trained.tokenizer.encode(prompt)] or [0 if end is None else end]
    if len(ids) > (context_tokens := trained.config.max_seq_len):
        tell(
            f"the prompt has {len(ids):,} tokens and the model's context {context_tokens:,}: the model reads at most "
            f"the last {context_tokens:,} of them"
        )
    tokens = generate_tokens(trained.on(device), ids, sampling, rng.stream(seed, "generate"))
    stream = pieces(trained.tokenizer, tokens)
    typer.echo(prompt + legible(next(stream, "")), nl=False)  # together: a model that is broken prints nothing
    for text in stream:
        typer.echo(legible(text), nl=False)
    typer.echo()


def _check(fields: dict[str, float]) -> None:
    from weft.inference.sample import Sampling

    try:
        from_tree(fields, Sampling, where="command line")
    except ConfigError as error:
        field, _, rest = str(error).removeprefix("command line: ").partition(" ")
        option = "--max-tokens" if field == "max_new_tokens" else f"--{field.replace('_', '-')}"
        raise ConfigError(f"{option} {rest}") from None


def legible(text: str) -> str:
    """Return what a model wrote as a terminal may have it, a dot for whatever cannot be shown."""
    return "".join(
        letter if (letter.isprintable() and letter != _UNFINISHED) or letter in "\n\t" else "." for letter in text
    )


def excerpt(text: str) -> str:
    """Return the first few lines of what a model wrote."""
    lines = [line[at : at + _LINE] for line in legible(text).split("\n") for at in range(0, len(line) or 1, _LINE)]
    return "\n".join(lines if len(lines) <= _MAX_LINES else [*lines[:_MAX_LINES], "..."])


def pieces(tokenizer: "Tokenizer", tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of `tokens` as it grows; a character whose bytes are not all there yet waits for them.

    New tokens are decoded behind those shown last: many tokenizers write a token otherwise at the start of a text.
    """
    shown: list[int] = []
    held: list[int] = []
    for token in tokens:
        held.append(token)
        text = _behind(tokenizer, shown, held)
        if text and (not text.endswith(_UNFINISHED) or len(held) > _MAX_CHARACTER_TOKENS):
            yield text
            shown, held = held, []
    if held:
        yield _behind(tokenizer, shown, held)


def _behind(tokenizer: "Tokenizer", shown: list[int], held: list[int]) -> str:
    return tokenizer.decode(shown + held)[len(tokenizer.decode(shown)) :]
