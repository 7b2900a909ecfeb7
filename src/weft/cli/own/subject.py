"""What a run of one's own is about: what it learns from, and which model it begins with.

OwnText     text, and a new model of a size, or what a run has learnt
OwnChats    conversations or pairs of answers, and a chat model, which an adapter tunes
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from weft.chat.conversations import kind_of_rows
from weft.chat.packing import TOO_LARGE
from weft.chat.tasks import are_tasks
from weft.cli.model.conversations import template_for
from weft.cli.model.trained import open_words
from weft.cli.own.after import Learnt, model_beside
from weft.cli.own.ask import Asks
from weft.cli.plan.speed_here import Here
from weft.cli.plan.this_machine import Sizes, ThisMachine
from weft.cli.settings import changes_of
from weft.cli.terminal import WorkLine, tell
from weft.clock import SystemClock
from weft.config import fault_of, from_tree, replace_field
from weft.dashboard import figures
from weft.data.corpus import ConversationsSource, PreferencesSource, TextSource, source_of, text_nbytes
from weft.data.tokenizer import Tokenizer
from weft.errors import ConfigError, DataError
from weft.ids import several
from weft.model.came_with import CameWith, with_template
from weft.model.config import Size
from weft.model.weights import read_config
from weft.plan import own_chats, own_text
from weft.plan.own_chats import Chats
from weft.plan.own_text import HELDOUT, Answers, Source, Text
from weft.progress import Meter
from weft.run.config import RunFile

N = TypeVar("N")
D = TypeVar("D")
_DRAFT_TOKENS = 1 << 20
Rows = Literal["conversations", "preferences"]


@dataclass(frozen=True, kw_only=True)
class Given:
    """What was typed.

    Args:
        what: the file or folder, from the root.
        changes: of `--set`.
        before: what the run begins with; None: with nothing, or with `model`.
        path: of the run file, where a model to begin with lies beside it.
        size, model: of the options that are called so.
        home: where runs are.
    """

    what: Path
    changes: Sequence[str]
    before: Learnt | None
    path: Path | None
    size: str | None
    model: str | None
    home: Path

    @property
    def changed(self) -> dict[str, Any]:
        return changes_of(self.changes)

    def begins(self, *, is_compared: bool = False) -> dict[str, Any]:
        """Return the fields of a run file that begins with what another run has learnt.

        Args:
            is_compared: as of `Learnt.fields`.
        """
        if self.before is None or self.path is None:
            return {}
        return self.before.fields(model_beside(self.path).name, is_compared=is_compared)

    @property
    def base(self) -> Path:
        return self.what.parent if self.path is None else self.path.parent


class Subject(Protocol):
    @property
    def found(self) -> Text | Chats:
        """What is trained on."""

    @property
    def base(self) -> Path:
        """The folder that relative paths of a draft start from."""

    @property
    def said(self) -> str:
        """What was read, in words."""

    def choose(self, asks: Asks, machine: ThisMachine, /) -> Here:
        """Ask for what else decides which model is trained, and return how fast this machine trains it."""

    def tree(self, name: str, tokens: int, peers: int) -> dict[str, Any]:
        """Return the run file, as `RunFile` has it, but for what `--set` changes."""

    def usual_tokens(self, tokens_per_s: float, at_most_s: float) -> int:
        """Return how many tokens to train on, unless more is asked for."""

    def notes(self, described: RunFile) -> Iterator[str]:
        """Yield what else there is to say of the run."""


def kind_of_file(text: Path, *, has_model: bool) -> Rows | None:
    """Return what the rows of files hold if they are no text.

    Args:
        has_model: a model is named, so that rows which have a text, too, are not meant as text.

    Raises:
        DataError: nothing is there, or the first row cannot be read.
    """
    if isinstance(source_of([text.name], text.parent), TextSource):
        return None
    kind = kind_of_rows([text.name], text.parent, has_text=not has_model)
    if kind is None and has_model and are_tasks([text.name], text.parent):
        raise DataError(
            f"{text}: it holds tasks, from which a model learns by rewards. That needs a run file: recipes/reward.toml "
            "is one, docs/your_files.md tells of it."
        )
    return kind


def changed_tree(tree: dict[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    for dotted, value in changes_of(changes).items():
        replace_field(tree, dotted, value)
    return tree


def _check(tree: dict[str, Any], changes: Sequence[str]) -> None:
    """Refuse what no run file may hold before anything is timed or asked.

    Raises:
        ConfigError: names the field.
    """
    if changes and (fault := fault_of(changed_tree(tree, changes), RunFile)) is not None:
        raise ConfigError(f"{' '.join(f'--set {change}' for change in changes)}: {fault}")


class OwnText:
    def __init__(self, given: Given, machine: ThisMachine) -> None:
        source = text_source(given.what, given.changed)
        with Meter("reading", "B", WorkLine(), SystemClock(), text_nbytes(source, given.what.parent)) as meter:
            self.found = own_text.read_text(source, given.what.parent, meter.add)
        if given.before is not None:
            self.found = replace(self.found, tokens_per_byte=given.before.tokens_per_byte)
        self._given, self.base, self._begins = given, given.base, given.begins()
        self._context = given.before.model.max_seq_len if given.before is not None else None
        self._size: Size = "nano"
        self._num_parameters = 0
        _check(self.tree("text", _DRAFT_TOKENS, 1), given.changes)
        self._sizes = Sizes(self.found, machine)  # too little text is refused before anything is asked

    @property
    def said(self) -> str:
        documents = several(self.found.num_documents, "document")
        return f"{figures.nbytes(self.found.nbytes)} of text in {documents}; a tenth is held out, to measure the loss"

    def choose(self, asks: Asks, machine: ThisMachine) -> Here:
        sizes, before = self._sizes, self._given.before
        if before is None:
            usual = own_text.usual_size(self.found, sizes.all, is_gpu=machine.is_gpu)
            offered = ", ".join(
                f"{each} ({figures.amount(sizes.num_parameters(each))} parameters)" for each in sizes.all
            )
            self._size = asks.ask(f"size of the model: {offered}", self._given.size, usual, sizes.size_of)
            self._num_parameters = sizes.num_parameters(self._size)
            return sizes.pace(self._size)
        self._num_parameters = before.num_parameters
        self._size = own_text.size_like(self.found, before.num_parameters)
        tell(f"model: what {before}, {figures.amount(before.num_parameters)} parameters")
        return machine.pace_of(_draft(self, self._given.changes), self.base)

    def tree(self, name: str, tokens: int, peers: int) -> dict[str, Any]:
        return own_text.run_tree(self.found, self._answers(name, tokens, peers)) | self._begins

    def usual_tokens(self, tokens_per_s: float, at_most_s: float) -> int:
        return own_text.usual_tokens(self.found, self._num_parameters, tokens_per_s, at_most_s)

    def notes(self, described: RunFile) -> Iterator[str]:
        if self._begins and described.train.schedule.lr == self._answers("", 1, 1).lr:
            yield "learning rate: a third of that of a new model of this size, so that less is forgotten"

    def _answers(self, name: str, tokens: int, peers: int) -> Answers:
        return Answers(name=name, size=self._size, tokens=tokens, peers=peers, context=self._context)


class OwnChats:
    """
    Raises:
        ConfigError: the model is no chat model's folder.
        DataError: something is no conversation, the template refuses one, or there are too few.
    """

    def __init__(self, given: Given, rows: Rows, asks: Asks) -> None:
        are_pairs = rows == "preferences"
        self.base, self._begins, self._changes = given.base, given.begins(is_compared=are_pairs), given.changes
        self._loses_dropout = are_pairs and given.before is not None and given.before.has_dropout
        if given.before is None:
            question = "chat model to tune, a Hugging Face folder"
            model = asks.ask(question, given.model, None, lambda answer: _ChatModel.of_folder(answer, given.home))
        else:
            model = _ChatModel.of_run(given.before)
            tell(f"model: what {given.before}")
        self._model = model
        source = _chat_source(given.what, rows, given.changed)
        came_with = model.came_with
        if source.template is not None:
            came_with = with_template(came_with, given.what.parent / source.template)
        template = template_for(model.called, came_with)
        with Meter("reading conversations", "B", WorkLine(), SystemClock(), None) as meter:
            self.found = own_chats.read_chats(
                source,
                given.what.parent,
                template,
                model.tokenizer,
                model.context,
                meter.add,
                seq_len=_number(given.changed.get("train.seq_len"), int, None),
                heldout=_number(given.changed.get("data.heldout_fraction"), float, HELDOUT),
            )
        _check(self.tree("text", _DRAFT_TOKENS, 1), given.changes)

    @property
    def said(self) -> str:
        found = self.found
        how = "cut" if found.source.too_long == "cut" else "left out"
        long = f", of which {found.num_too_long:,} are longer than {found.seq_len} tokens and are {how}"
        cut = long if found.num_too_long else ""
        large = f"; {several(found.num_too_large, found.called)} more {TOO_LARGE}" if found.num_too_large else ""
        return (
            f"{several(found.num, found.called)}{cut}{large}; {figures.amount(found.num_tokens)} tokens, of which "
            f"answers are {found.num_answered / found.num_tokens:.0%}; a tenth is held out, to measure the loss"
        )

    def choose(self, _asks: Asks, machine: ThisMachine) -> Here:
        return machine.pace_of(_draft(self, self._changes), self.base)

    def tree(self, name: str, tokens: int, peers: int) -> dict[str, Any]:
        tree = own_chats.run_tree(self.found, name=name, model=self._model.path, tokens=tokens, peers=peers)
        return tree | self._begins

    def usual_tokens(self, tokens_per_s: float, at_most_s: float) -> int:
        return own_chats.usual_tokens(self.found, tokens_per_s, at_most_s)

    def notes(self, described: RunFile) -> Iterator[str]:
        if described.adapter is not None:
            yield (
                "what it learns is an adapter beside the model: weft export writes both as one model, weft export "
                "--adapter the adapter alone"
            )
        if self._loses_dropout:
            yield "adapter.dropout of the run before is left out: pairs of answers are compared with all of the model"


@dataclass(frozen=True)
class _ChatModel:
    """A model that conversations are written for.

    Args:
        path: for a run file; empty: said by what the run begins with.
        context: tokens that it takes.
    """

    called: str
    path: str
    tokenizer: Tokenizer
    came_with: CameWith
    context: int

    @classmethod
    def of_folder(cls, given: str, home: Path) -> "_ChatModel":
        """
        Raises:
            ConfigError: it is no folder of a chat model that weft can train.
        """
        folder = Path(given).expanduser()
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"--model {given[:200]}: no such model. Name a Hugging Face folder, with config.json, the weights as "
                "safetensors, and tokenizer.json. To begin with what a run here has learnt: --after RUN."
            )
        config = read_config(folder)
        tokenizer, came_with = open_words(str(folder), home)
        called = f"--model {given}"
        template_for(called, came_with)
        return cls(called, os.path.abspath(folder), tokenizer, came_with, config.max_seq_len)

    @classmethod
    def of_run(cls, before: Learnt) -> "_ChatModel":
        trained = before.trained
        return cls(f"run {before.name}", "", trained.tokenizer, trained.came_with, before.model.max_seq_len)


def _draft(subject: Subject, changes: Sequence[str]) -> RunFile:
    tree = changed_tree(subject.tree("draft", _DRAFT_TOKENS, 1), changes)
    found: RunFile = from_tree(tree, RunFile, where=" ".join(f"--set {change}" for change in changes) or "own text")
    return found


def _number(given: Any, kind: Callable[[Any], N], otherwise: D) -> N | D:
    """Return what --set says, if it is a number above 0; what is none is refused with its name later."""
    is_number = isinstance(given, int | float) and not isinstance(given, bool) and given > 0
    return kind(given) if is_number else otherwise


def text_source(text: Path, changed: Mapping[str, Any]) -> Source:
    """Return how a text is read: by the names of its files, and by what --set says of its source."""
    found = source_of([text.name], text.parent)
    fields = {"data.source.field", "data.source.column"}
    own = {dotted.rpartition(".")[2]: value for dotted, value in changed.items() if dotted in fields}
    own = {name: value for name, value in own.items() if name in found.__struct_fields__}
    return msgspec.structs.replace(found, **own)


def _chat_source(text: Path, rows: Rows, changed: Mapping[str, Any]) -> ConversationsSource:
    """Return how conversations are read: by what --set says of their source."""
    kind = PreferencesSource if rows == "preferences" else ConversationsSource
    fields = {f"data.source.{name}" for name in ("template", "too_long", "date")}
    own = {dotted.rpartition(".")[2]: value for dotted, value in changed.items() if dotted in fields}
    found: ConversationsSource = from_tree({"paths": [text.name], **own}, kind, where="--set data.source")
    return found
