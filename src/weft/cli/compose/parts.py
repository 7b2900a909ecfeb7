"""What verbs of `weft compose` begin with: members by name, opened, and text as samples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.home import home_of
from weft.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from weft.compose.descent import DescentConfig
    from weft.compose.member import Member
    from weft.data.rows import Batch
    from weft.data.tokenizer import Tokenizer
    from weft.ids import Digest
    from weft.model.config import ModelConfig

USUAL_SEQ_LEN = 512
USUAL_STEPS, USUAL_BATCH, USUAL_LR = 400, 8, 1e-3
DEV_SHARE = 10  # of text that is given, one part is not trained on: by it the best member is chosen
DEV_WINDOWS = 64  # of it, at most
MOST_CHOSEN = 256  # samples by which stacks or experts are chosen: spread evenly over what is given

Members = Annotated[list[str], typer.Argument(help="Names of members, or their folders.", show_default=False)]
ModelName = Annotated[str, typer.Argument(help="Name of a composed model, or its folder.", show_default=False)]
SeqLen = Annotated[
    int | None,
    typer.Option(
        "--seq-len",
        help=f"Tokens of a sample. [default: {USUAL_SEQ_LEN}, or what members read]",
        show_default=False,
        min=2,
    ),
]
HeldOut = Annotated[
    list[str],
    typer.Option(help="Files of text that nobody trained on, folders or globs; may be repeated.", show_default=False),
]
TrainedOn = Annotated[
    list[str],
    typer.Option(
        help="Files of text to train on, folders or globs; may be repeated. A tenth is not trained on: by it the best "
        "member is chosen.",
        show_default=False,
    ),
]
OneMember = Annotated[str, typer.Argument(help="Name of a member, or its folder.", show_default=False)]
TaughtOn = Annotated[
    list[str],
    typer.Option(
        help="Files of text to train on, folders or globs; may be repeated. A tenth is not trained on: its losses are "
        "told.",
        show_default=False,
    ),
]
NewMember = Annotated[str, typer.Option(help="What the new member is called.", show_default=False)]
Steps = Annotated[int, typer.Option(help="Training steps.", min=1)]
PeakRate = Annotated[float, typer.Option(help="Peak learning rate.", min=1e-9, max=10.0)]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Samples in each step.", min=1)]
NewName = Annotated[str, typer.Option(help="What the composed model is called.", show_default=False)]
Device = Annotated[str, typer.Option(help="Where torch runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs: one object.")]


@dataclass(frozen=True)
class Known:
    """A member, of which the weights are not read."""

    folder: Path
    member: "Member"


def known(context: typer.Context, given: Sequence[str]) -> list[Known]:
    """
    Raises:
        NoSuchRun: one is no member.
        ConfigError: one cannot be read, or is named twice, or is alone.
    """
    from weft.compose.composed import require_names

    found = [known_one(context, each) for each in given]
    if len(found) < 2:
        raise ConfigError("this takes two members or more. Name another: `weft compose list` shows them.")
    names = [each.member.name for each in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"{', '.join(twice)}: two members of that name. Name others, or give one another name: weft compose member "
            "FOLDER --name NAME."
        )
    require_names(names)
    require_one_tokenizer(home_of(context), found)
    sizes = {each.member.model.vocab_size for each in found}
    if len(sizes) > 1:
        raise ConfigError(
            f"these members have one tokenizer, and {' and '.join(f'{size:,}' for size in sorted(sizes))} tokens in "
            "their tables. Choose members of one size."
        )
    return found


def known_one(context: typer.Context, given: str) -> Known:
    from weft.compose.member import read_member
    from weft.compose.registry import Registry

    folder = Registry(home_of(context)).find(given)
    return Known(folder, read_member(folder))


def require_one_tokenizer(home: Path, found: Sequence[Known]) -> None:
    """
    Raises:
        ConfigError: members read text in different tokens.
    """
    first, *others = found
    if unlike := [each for each in others if each.member.tokenizer != first.member.tokenizer]:
        from weft.cli.model.trained import open_words
        from weft.data.tokenizer import work_alike

        words, _ = open_words(str(first.folder), home)
        for each in unlike:  # as of a run and of an exported folder
            if not work_alike(words, open_words(str(each.folder), home)[0]):
                raise ConfigError(
                    f"{first.member.name} and {each.member.name} have different tokenizers, so their tokens cannot be "
                    "compared. Choose members of one tokenizer."
                )


def new_place(context: typer.Context, name: str) -> Path:
    """Return where a composed model will lie.

    Raises:
        ConfigError: it is no name, or it is taken.
    """
    from weft.compose.composed import place
    from weft.compose.member import require_name

    folder = place(home_of(context), require_name(name))
    if folder.exists():
        raise ConfigError(f"{folder}: exists; a composed model is never written over. Choose another --name.")
    return folder


def seq_len_of(members: "Sequence[Member]", given: int | None) -> int:
    longest = min(each.model.max_seq_len for each in members)
    if given is not None and given > longest:
        raise ConfigError(f"--seq-len {given}: a member reads {longest} tokens at most. Choose that or less.")
    return given or min(USUAL_SEQ_LEN, longest)


def training_of(steps: int, lr: float) -> "DescentConfig":
    from weft.compose.descent import DescentConfig

    return DescentConfig(steps=steps, lr=lr, warmup_steps=min(40, steps // 10))


def reader(home: Path, device: str) -> "Callable[[Path], tuple[ModelConfig, Tensor]]":
    """Return what reads the model in a member's folder."""
    from weft.cli.model.trained import open_trained, place

    def read(folder: Path) -> "tuple[ModelConfig, Tensor]":
        trained = open_trained(str(folder), home, may_denoise=True)
        return trained.config, trained.vector.to(place(device))

    return read


# --- text ---


@dataclass(frozen=True, eq=False)
class Texts:
    """
    Args:
        train: tokens, one after the other.
        dev: other text, by which something is chosen.
        digest: names both.
    """

    train: "Tensor"
    dev: "Batch"
    digest: "Digest"


def texts(tokenizer: "Tokenizer", paths: Sequence[str], seq_len: int) -> Texts:
    """Return text to train on, and a tenth of it to choose by.

    Raises:
        DataError: there is none.
        ConfigError: it is too short.
    """
    import numpy as np
    import torch

    from weft.cli.model.eval import text_of
    from weft.data import rows

    ids = text_of(tokenizer, paths, seq_len).ids.astype(np.int64)
    size = seq_len + 1
    num = len(ids) // size
    if num < 2:
        raise ConfigError(
            f"--data: {len(ids):,} tokens are too few for samples of {seq_len}. Give more, or a lower --seq-len."
        )
    pieces = ids[: num * size].reshape(num, size)
    is_dev = np.arange(num) % DEV_SHARE == min(num, DEV_SHARE) - 1  # from all of it: files may be of several kinds
    dev = pieces[is_dev]
    chosen = dev[np.arange(min(len(dev), DEV_WINDOWS)) * len(dev) // min(len(dev), DEV_WINDOWS)]
    train = np.concatenate([pieces[~is_dev].ravel(), ids[num * size :]])
    return Texts(torch.from_numpy(train), rows.batch_of(torch.from_numpy(chosen), has_rows=False), _digest(ids))


def samples(
    tokenizer: "Tokenizer", paths: Sequence[str], seq_len: int, most: int, unlike: str | None = None
) -> "tuple[Batch, Digest]":
    """Return text as samples, spread evenly over it, and what names it.

    Args:
        most: samples; 0: all.
        unlike: what names text that something was chosen by or trained on, and that says nothing any more.

    Raises:
        DataError: there is none.
        ConfigError: it is that text, or a single sample.
    """
    import numpy as np

    from weft.cli.model.eval import text_of

    ids = text_of(tokenizer, paths, seq_len).ids.astype(np.int64)
    if (found := _digest(ids)) == unlike:
        raise ConfigError(
            "--data: this text was trained on, or chosen by: what is measured on it says little. Name other text."
        )
    batch = _cut(ids, seq_len, most)
    if len(batch.tokens) < 2:
        raise ConfigError(
            "--data: a single sample, from which no error can be told. Give more text, or a lower --seq-len."
        )
    return batch, found


def _digest(ids: Any) -> "Digest":
    from weft.wire import digest

    return digest(ids.tobytes())


def _cut(ids: Any, seq_len: int, most: int) -> "Batch":
    import numpy as np
    import torch

    from weft.data import rows

    seq_len = min(seq_len, len(ids) - 1)
    there = (len(ids) - 1) // seq_len
    num = min(most or there, there)
    starts = np.arange(num) * there // num * seq_len
    return rows.batch_of(torch.from_numpy(ids[starts[:, None] + np.arange(seq_len + 1)]), has_rows=False)


def halves(batch: "Batch", device: "torch.device") -> "tuple[Batch, Batch]":
    """Return every second sample, by which something is chosen, and the others, on which it is told."""
    from weft.data.rows import Batch

    one, other = (Batch(batch.tokens[at::2], batch.targets[at::2]).to(device) for at in (0, 1))
    return one, other


# --- what is told ---


def beside_first(rows: "Sequence[tuple[str, Tensor]]", it_is: str) -> list[str]:
    """Return a line of each row of losses, of which the first is held against all others.

    Args:
        it_is: the beginning of what is said of the first: "the stack is".
    """
    from weft.compose.controls import paired, verdict

    width, (_, first) = max(len(name) for name, _ in rows), rows[0]
    lines = []
    for name, each in rows:
        line = f"{name:{width}}  {float(each.double().mean()):.3f} nats a token"
        if each is not first:
            away, error = paired(first, each)
            line += f"; {it_is} {verdict(first, each)}: {away:+.3f} ± {error:.3f}"
        lines.append(line)
    return lines
