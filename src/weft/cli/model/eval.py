"""`weft eval`: the loss of a checkpoint on held-out text, the run's own or another.

held-out shards       of the run; of a private run those that this machine packed of its own files
text                  all of it is predicted
conversations         written by the chat template, as a run writes them: their answers are predicted
pairs of answers      as of a run that learns from pairs
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.home import find_checkpoint, home_of
from weft.cli.options import own_documents, own_nbytes, own_source
from weft.cli.settings import refuse_idle
from weft.cli.terminal import WorkLine, say_loading, tell
from weft.clock import SystemClock
from weft.dashboard import figures
from weft.data.store import NOTHING_HELD_OUT
from weft.errors import DataError, NotFinite
from weft.ids import several
from weft.progress import Meter

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from weft.cli.model.trained import Trained
    from weft.data.rows import Batch
    from weft.data.store import DataIndex, ShardStore
    from weft.data.tokenizer import Tokenizer
    from weft.model.transformer import Transformer
    from weft.run.config import RunConfig
    from weft.training.learner import Measured
    from weft.training.preference import Preference

_TOKENS_AT_ONCE = 4096  # of one forward pass
_MAX_WINDOW = 2048  # of a model that says nothing of its training: the logits of its whole context may fill memory


def eval(
    context: typer.Context,
    checkpoint: Annotated[
        str, typer.Argument(help='Folder, or a run: its name, its digits, or "last".', show_default=False)
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Files of text or conversations, folders or globs; may be repeated. Default: what the run holds out."
        ),
    ] = None,
    windows: Annotated[int, typer.Option(help="Number of samples, spread evenly over the text; 0: all.", min=0)] = 0,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="Questions with answers, in place of text: JSON lines or tables (docs/your_files.md); may be repeated."
        ),
    ] = None,
    before: Annotated[
        bool, typer.Option("--before", help="With --tasks: ask what the run began with, too, for comparison.")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="With --tasks: do not use the chat template.")] = False,
    max_tokens: Annotated[
        int, typer.Option(help="With --tasks: an answer that is drawn has at most so many tokens.", min=1)
    ] = 256,
    answers: Annotated[
        Path | None, typer.Option(help="With --tasks: a new file for what was answered, as JSON lines.", metavar="FILE")
    ] = None,
    device: Annotated[str, typer.Option(help="Where torch runs.")] = "auto",
) -> None:
    """Print the loss on held-out text, in nats per byte; or how many tasks are answered rightly."""
    if tasks:
        refuse_idle(context, "--tasks asks questions, and measures no loss", "data", "windows")
    else:
        refuse_idle(context, "there are no --tasks", "before", "plain", "max_tokens", "answers")
    folder = find_checkpoint(checkpoint, home_of(context))  # what is not there is said at once
    say_loading()
    from weft.cli.model.trained import open_trained, say_which

    trained = open_trained(str(folder), home_of(context))
    say_which(trained, checkpoint)
    if tasks:
        from weft.cli.model.tasks import Way, ask

        way = Way(max_tokens, has_template=not plain)
        for line in ask(trained, tasks, way, device, home_of(context), answers, has_before=before):
            typer.echo(line)
        return
    text = _given(trained, data, checkpoint, home_of(context)) if data else heldout_of(trained, home_of(context))
    there = text.num_windows
    measured = min(windows or there, there)
    with Meter("evaluating", "samples", WorkLine(), SystemClock(), measured) as meter:
        batches = meter.over(text.batches(measured), lambda batch: len(batch.tokens))
        found = measure(trained.on(device), batches, text.preference(device) if text.preference else None)
    per_byte = found.loss * text.num_tokens / text.nbytes if text.nbytes else None
    share = f"{measured} of {there}" if measured < there else f"all {there}" if there > 1 else "1"
    over = f"{several(found.num, 'pair' if found.preferred else 'token')} ({several(share, 'sample')}) of {text.name}"
    typer.echo(f"{figures.heldout(found.loss, per_byte, found.preferred)}, over {over}")


@dataclass(frozen=True)
class Text:
    """Tokens to evaluate on, cut into windows."""

    name: str
    ids: "NDArray[np.integer]"  # the whole stream
    nbytes: int  # of the UTF-8 text they were
    seq_len: int
    num_tokens: int  # of that text
    has_rows: bool = False  # of whole conversations
    preference: "Callable[[str], Preference] | None" = None  # of pairs of answers: makes their loss, on a device

    @property
    def num_windows(self) -> int:
        return (len(self.ids) - 1) // self.seq_len

    def batches(self, num_windows: int) -> "Iterator[Batch]":
        """Yield so many windows, at most all, spread evenly."""
        import numpy as np
        import torch

        from weft.data import rows

        numbers = np.arange(num_windows) * self.num_windows // max(num_windows, 1)
        at_once = max(1, _TOKENS_AT_ONCE // self.seq_len)
        for start in range(0, num_windows, at_once):
            places = numbers[start : start + at_once, None] * self.seq_len + np.arange(self.seq_len + 1)
            words, is_paired = torch.from_numpy(self.ids[places].astype(np.int64)), self.preference is not None
            yield rows.batch_of(words, has_rows=self.has_rows, is_paired=is_paired)


def measure(model: "Transformer", batches: "Iterator[Batch]", preference: "Preference | None" = None) -> "Measured":
    """Return the mean loss in nats per token, or of a loss of pairs per pair.

    Raises:
        NotFinite: the loss is NaN or infinite.
    """
    import torch

    from weft.training.preference import Sums, mean_of

    total, num = Sums(0.0), 0
    with torch.inference_mode():
        for batch in batches:
            here = batch.to(model.embed.weight.device)
            if preference is None:
                found = Sums(float(model.loss(*here)) * batch.num_predicted)
            else:
                found = preference.sums(model, here)
            total, num = total.plus(found), num + batch.num_predicted
    if not num:
        raise DataError(NOTHING_HELD_OUT)
    if not math.isfinite(total.loss):
        raise NotFinite("the loss is NaN or infinite: the weights are broken. Use an earlier checkpoint.")
    return mean_of(total, num, is_paired=preference is not None)


def heldout_of(trained: "Trained", home: Path) -> Text:
    """Return the held-out text of a model's run.

    Raises:
        DataError: it has none, or that is not here.
    """
    from msgspec import UNSET

    from weft.store.home import Home, PeerFolder
    from weft.store.tickets import read_own_data

    run = trained.run
    if run is None:
        raise DataError(f"{trained.folder} comes from no run of weft: it has no held-out text. Name text with --data.")
    store, index = Home(home).shards, run.data
    if run.is_private and (own := read_own_data(PeerFolder(trained.folder.parent))) is not None:
        store, index = Home(home).private, own
    if index.has_tasks:
        raise DataError(
            f"run {run.name} learns from tasks: nothing in them is predicted. weft eval --tasks FILE asks "
            "a model such tasks, and the run's log and report say how many of those held out it answered."
        )
    missing = [info for info in store.missing(index) if info in index.heldout]
    if missing or not index.heldout:
        lacks = f"{store.folder} lacks {several(len(missing), 'shard')} of it"
        why = "its files are private, and this machine has packed none" if not index.heldout else lacks
        what = "text" if index.rows is UNSET else index.rows.what
        raise DataError(f"the held-out {what} of run {run.name} is not here: {why}. Name {what} with --data.")
    whose = "this machine's" if run.is_private else "the"
    preference = partial(_preference, run, home) if index.is_paired else None
    return _of_shards(f"{whose} held-out text of run {run.name}", store, index, run.train.seq_len, preference)


def _of_shards(
    name: str, store: "ShardStore", index: "DataIndex", seq_len: int, preference: "Callable[[str], Preference] | None"
) -> Text:
    """Return the held-out text of an index."""
    import numpy as np

    return Text(
        name,
        _enough(np.concatenate([store.open(index, info) for info in index.heldout]), seq_len),
        0 if index.is_paired else index.heldout_text_nbytes,
        seq_len,
        index.num_predicted("heldout"),
        has_rows=index.has_rows,
        preference=preference,
    )


def _preference(run: "RunConfig", home: Path, device: str) -> "Preference":
    from weft.model.config import plain
    from weft.model.flat import assemble
    from weft.model.peft import merged
    from weft.run.frozen import base_of, reference_of
    from weft.run.machine import PeerConfig
    from weft.store.home import Home
    from weft.training.device import choose
    from weft.training.preference import Preference

    assert run.train.loss
    base, reference = base_of(run, Home(home)), reference_of(run, Home(home))
    if reference is None:
        return Preference(run.train.loss, None)
    whole = reference if base is None else merged(run.model, base, reference)
    on = choose(PeerConfig(device=device)).torch
    return Preference(run.train.loss, assemble(plain(run.model), whole.to(on)))


def _given(trained: "Trained", paths: Sequence[str], given: str, home: Path) -> Text:
    """Return what files hold, as the model reads it."""
    from weft.chat.conversations import kind_of_rows
    from weft.data.corpus import TextSource

    seq_len = min(trained.config.max_seq_len, _MAX_WINDOW) if trained.run is None else trained.run.train.seq_len
    if isinstance(own_source(paths), TextSource):
        return text_of(trained.tokenizer, paths, seq_len)
    has_text = trained.run is None or not trained.run.data.has_rows
    kind = kind_of_rows(paths, Path.cwd(), has_text=has_text)
    if kind is None:
        return text_of(trained.tokenizer, paths, seq_len)
    return _conversations(trained, paths, seq_len, given, home, are_pairs=kind == "preferences")


def text_of(tokenizer: "Tokenizer", paths: Sequence[str], seq_len: int) -> Text:
    import numpy as np

    end = tokenizer.end_of_text
    parts: list[NDArray[np.integer]] = []
    nbytes = 0
    with Meter("tokenizing", "B", WorkLine(), SystemClock(), own_nbytes(paths)) as meter:
        for document in own_documents(paths):
            if not document.text:
                continue
            if parts and end is not None:
                parts.append(np.array([end], dtype=np.uint32))
            parts.append(tokenizer.encode(document.text))
            nbytes += (read := len(document.text.encode("utf-8", errors="replace")))
            meter.add(read)
    if not parts:
        raise DataError(f"--data {', '.join(paths)}: no document has any text.")
    ids = np.concatenate(parts)
    seq_len = min(seq_len, max(1, len(ids) - 1))
    return Text(", ".join(paths), _enough(ids, seq_len), nbytes, seq_len, len(ids))


def _conversations(
    trained: "Trained", paths: Sequence[str], seq_len: int, given: str, home: Path, *, are_pairs: bool
) -> Text:
    """Return conversations, or pairs of answers, as the run packs its own: by its template, on its day, cut or left
    out as there."""
    import tempfile

    from msgspec import UNSET

    from weft.chat.packing import pack_conversations
    from weft.cli.model.conversations import template_for
    from weft.cli.model.trained import date_of
    from weft.data.corpus import ConversationsSource, PreferencesSource
    from weft.data.store import ShardStore

    run, name = trained.run, ", ".join(paths)
    if are_pairs and (run is None or not run.data.is_paired):
        raise DataError(
            f"--data {name}: these are pairs of answers, which only a run that learns from pairs has a loss of. Name "
            "conversations or text."
        )
    template = template_for(given, trained.came_with)
    rows = UNSET if run is None else run.data.rows
    kind = PreferencesSource if are_pairs else ConversationsSource
    source = kind(paths=tuple(paths), too_long="cut" if rows is UNSET else rows.too_long, date=date_of(run))
    how = template, trained.tokenizer, seq_len, Path.cwd()
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:  # only its owner can read it
        store = ShardStore(Path(folder))
        with Meter("reading conversations", "B", WorkLine(), SystemClock(), None) as meter:
            index, told = pack_conversations(store, source, 1.0, *how, on_packed=meter.add)
        if words := str(told):
            tell(words)
        if not index.num_predicted("heldout"):
            raise DataError(f"--data {name}: none of them has an answer to measure.")
        found = _of_shards(name, store, index, seq_len, partial(_preference, run, home) if are_pairs and run else None)
        store.close()  # a file that is open cannot be removed everywhere
    return found


def _enough(ids: "NDArray[np.integer]", seq_len: int) -> "NDArray[np.integer]":
    if len(ids) <= seq_len:
        raise DataError(f"the text is too small: {several(len(ids), 'token')}, and one sample needs {seq_len + 1}.")
    return ids
