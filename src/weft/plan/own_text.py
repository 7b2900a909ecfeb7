"""A run for somebody's own text: which sizes it fills, how long to train, and the run file of both.

Text is read as bytes: 257 ids, of any language, with nothing to train before. What a text can teach is bounded:

    passes      up to 4 over the same text teach almost as much as so much new text, 16 as much as about 10
    tokens      20 for each parameter: with more a larger model learns more

Sources: Muennighoff et al., arXiv:2305.16264, section 5; Hoffmann et al., arXiv:2203.15556, table 3.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, ClassVar

from msgspec import UNSET

from weft.chat.packing import rows_of
from weft.config import alike, from_tree
from weft.cost import training as cost
from weft.data import corpus
from weft.data.corpus import ConversationsSource, JsonlSource, ParquetSource, TextSource
from weft.data.packing import make_tokenizer
from weft.data.store import DataIndex, dtype_for
from weft.data.tokenizer import ByteTokenizer
from weft.errors import DataError
from weft.ids import Digest, several
from weft.model.config import ModelConfig, Size, has_base, num_base_parameters, num_parameters
from weft.run.config import RunConfig, RunFile
from weft.run.genesis import resolve
from weft.run.trust import of_run as trust_of_run
from weft.sync.method.presets import spell_out

HELDOUT = 0.1  # of the text: of less than a megabyte, a twentieth says little
PASSES, PER_PARAMETER = 16, 20  # at most, unless more is asked for
LEAST_SEQ_LEN = 32
BATCH_SIZE = 8
WHOLE = 0.1  # of a run, that its last round may add to it
MANY_ROUNDS = 400  # so many let the outer momentum of long runs settle

# Peak learning rate and context. Larger models want less of the one (6e-4 at 125M parameters: arXiv:2005.14165, table
# 2.1; recipes/nano.toml has 3e-3) and gain by more of the other.
_SETTINGS: dict[Size, tuple[float, int]] = {
    "nano": (3e-3, 128),
    "tiny": (2e-3, 256),
    "35m": (1e-3, 256),
    "150m": (6e-4, 512),
    "400m": (4e-4, 512),
}

# Of the peak rate, where a run begins with what another has learnt: at the whole of it, much of that would be lost at
# first (arXiv:2403.08763: a lower peak keeps more of what was learnt before, and learns less that is new).
FURTHER = 1 / 3

Source = TextSource | JsonlSource | ParquetSource


@dataclass(frozen=True, kw_only=True)
class Text:
    """What is trained on, as far as it decides how.

    Args:
        num_documents: that hold any text.
        train_nbytes, heldout_nbytes: with one between documents.
        begins: its first words.
        tokens_per_byte: of the tokenizer.
    """

    source: Source
    num_documents: int
    train_nbytes: int
    heldout_nbytes: int
    begins: str
    tokens_per_byte: float = 1.0

    kind: ClassVar = "text"
    most_passes: ClassVar = PASSES
    to_keep_it: ClassVar = "If the text must stay on this machine: recipes/private.toml"

    @property
    def nbytes(self) -> int:
        return self.train_nbytes + self.heldout_nbytes

    @property
    def packed_nbytes(self) -> int:
        """Return what it takes as tokens."""
        return 2 * (self.train_tokens + self.heldout_tokens)

    @property
    def train_tokens(self) -> int:
        return int(self.train_nbytes * self.tokens_per_byte)

    @property
    def heldout_tokens(self) -> int:
        return int(self.heldout_nbytes * self.tokens_per_byte)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What the maker of a run decides."""

    name: str
    size: Size
    tokens: int
    peers: int
    context: int | None = None  # tokens that the model takes, where the run begins with one; None: as of its size

    @property
    def lr(self) -> float:
        """Return the peak learning rate: a third of a new model's, in two digits, where the run begins with a model."""
        lr = _SETTINGS[self.size][0]
        return lr if self.context is None else float(f"{FURTHER * lr:.1e}")


def read_text(source: Source, base: Path, on_read: Callable[[int], None] = lambda _nbytes: None) -> Text:
    """Read all of a text once.

    Args:
        on_read: told how many bytes were read since it was told last.

    Raises:
        DataError: missing, unreadable, malformed or empty.
    """
    nbytes, pieces, begins = {"train": 0, "heldout": 0}, {"train": 0, "heldout": 0}, ""
    for side, text in corpus.split(source, base, HELDOUT):
        size = len(text.encode("utf-8", errors="replace"))
        nbytes[side] += size
        pieces[side] += 1
        begins = begins or first_words(text)
        on_read(size)
    between = {side: max(0, count - 1) for side, count in pieces.items()}
    # Of few documents the end of each is held out, so that both sides have a piece of it.
    num = pieces["train"] if pieces["train"] == pieces["heldout"] else sum(pieces.values())
    return Text(
        source=source,
        num_documents=num,
        train_nbytes=nbytes["train"] + between["train"],
        heldout_nbytes=nbytes["heldout"] + between["heldout"],
        begins=begins,
    )


def first_words(text: str, at_most: int = 24) -> str:
    """Return words that a text begins with: what a sample is to go on from."""
    line = next((each.strip() for each in text.splitlines() if each.strip()), "")
    start = "".join(letter for letter in line[:at_most] if letter.isprintable())
    is_cut = len(line) > at_most
    if is_cut and " " not in start:
        return start
    words = start.rpartition(" ")[0] if is_cut else start
    return f"{words} " if words else ""


def run_name(path: Path) -> str:
    """Return what a run on that text is called: the file's name without endings, as far as a run may have it."""
    stem = path.name.partition(".")[0] or path.name.strip(".")
    return re.sub(r"[^\w .-]+", "-", stem).strip(" -")[:64] or "mytext"


# --- size ---


def sizes_for(text: Text, fits: Callable[[ModelConfig, Size], bool]) -> tuple[Size, ...]:
    """Return the sizes that are worth offering: they fit this machine, and the text can teach them anything.

    Args:
        fits: whether a model of that size can be trained here.
    """
    found: list[Size] = []
    for size in _SETTINGS:
        model = model_of(text, size)
        if found and (num_parameters(model) > 5 * text.train_tokens or not fits(model, size)):
            break
        found.append(size)
    return tuple(found)


def usual_size(text: Text, sizes: Iterable[Size], *, is_gpu: bool) -> Size:
    """Return the largest of `sizes` that this text fills with 20 tokens for each parameter; on a CPU the smallest."""
    first, *others = sizes
    chosen = first
    for size in others if is_gpu else ():
        if PER_PARAMETER * num_parameters(model_of(text, size)) <= PASSES * text.train_tokens:
            chosen = size
    return chosen


def size_like(text: Text, num: int) -> Size:
    """Return the size whose rates suit a model of `num` parameters: the largest that has no more, or the smallest."""
    first, *others = _SETTINGS
    return max(
        (each for each in others if num_parameters(model_of(text, each)) <= num),
        key=list(_SETTINGS).index,
        default=first,
    )


def model_of(text: Text, size: Size) -> ModelConfig:
    """Return the model of that size for this text."""
    tree = run_tree(text, Answers(name="text", size=size, tokens=1 << 20, peers=1))
    return resolve(from_tree(tree, RunFile, where="own text"), ByteTokenizer(), Path())


# --- length ---


def usual_tokens(text: Text, num_parameters: int, tokens_per_s: float, at_most_s: float) -> int:
    """Return how many tokens to train on: no more than teach anything, or take this machine `at_most_s`."""
    found = min(PASSES * text.train_tokens, PER_PARAMETER * num_parameters, int(at_most_s * tokens_per_s))
    return rounded(max(found, 1))


def rounded(tokens: int) -> int:
    """Return about as many, in two digits."""
    size = int(10 ** max(0, len(str(tokens)) - 2))
    return max(1, tokens // size * size)


def rounded_up(tokens: int) -> int:
    """Return as many or more, in two digits."""
    size = int(10 ** max(0, len(str(tokens)) - 2))
    return -(-tokens // size) * size


def least_tokens(run_file: RunFile) -> int:
    """Return how many tokens a run must have to learn: a round of them, and more than a step, at whose end a rate that
    falls to 0 is there."""
    return max(round_tokens(run_file), step_tokens(run_file) + 1)


def step_tokens(run_file: RunFile) -> int:
    """Return the tokens of a step of all peers."""
    return run_file.train.batch_size * run_file.train.seq_len * run_file.peers


def round_tokens(run_file: RunFile) -> int:
    """Return the tokens of a round of all peers."""
    return spell_out(run_file.method, run_file.peers).every * step_tokens(run_file)


def whole_rounds(tokens: int, run_file: RunFile) -> int:
    """Return as many tokens, or those of the nearest whole number of rounds where a last round for the rest of them
    would add more than a tenth: for however few tokens it begins, a round is trained to its end."""
    each = round_tokens(run_file)
    added, whole = -tokens % each, round(tokens / each) * each
    return whole if added > WHOLE * tokens and whole >= least_tokens(run_file) else tokens


# --- the run file ---


def run_tree(text: Text, answers: Answers) -> dict[str, Any]:
    """Return the run file, as `RunFile` has it.

    Raises:
        DataError: too little text for even the shortest context.
    """
    longest = _SETTINGS[answers.size][1]
    seq_len = _seq_len(text, min(longest, answers.context or longest), answers.peers)
    method, evaluate_every = outer(answers.tokens, BATCH_SIZE * seq_len * answers.peers)
    source = {"type": text.source.__struct_config__.tag, **_given(text.source)}
    return {
        "name": answers.name,
        "peers": answers.peers,
        "model": {"type": "size", "size": answers.size},
        "data": {"heldout_fraction": HELDOUT, "source": source},
        "tokenizer": {"type": "bytes"},
        "train": {
            "seq_len": seq_len,
            "batch_size": BATCH_SIZE,
            "tokens": answers.tokens,
            "evaluate_every": evaluate_every,
            "evaluate_windows": 256,
            "sample_prompt": text.begins,
            "schedule": {
                "type": "wsd",
                "lr": answers.lr,
                "warmup_tokens": min(100_000, answers.tokens // 20),
                "decay_tokens": answers.tokens // 4,
                "total_tokens": answers.tokens,
            },
        },
        "method": method,
    }


def outer(tokens: int, per_step: int) -> tuple[dict[str, Any], int]:
    """Return the method of a run, and after how many rounds it is evaluated: ten times in all, or more.

    Args:
        per_step: tokens of all peers.
    """
    rounds = tokens // (20 * per_step)
    if rounds >= MANY_ROUNDS:
        return {"type": "diloco", "every": 20}, max(1, min(20, rounds // 10))
    return {"type": "diloco", "every": 10, "lr": 0.7, "momentum": 0.3}, max(1, min(20, rounds * 2 // 10))


def _seq_len(text: Text, longest: int, peers: int) -> int:
    """Return the longest context of which the text holds enough: four batches for everybody, four held-out samples."""
    seq_len, num_samples = longest, BATCH_SIZE * peers
    while seq_len > LEAST_SEQ_LEN and (
        text.train_tokens <= 4 * num_samples * seq_len or text.heldout_tokens <= 4 * seq_len
    ):
        seq_len //= 2
    if text.train_tokens <= num_samples * seq_len or text.heldout_tokens <= seq_len:
        tokens = max((num_samples * seq_len + 1) / (1 - HELDOUT), (seq_len + 1) / HELDOUT)
        needed, heldout = ceil(tokens / text.tokens_per_byte), several(text.heldout_nbytes, "byte")
        raise DataError(
            f"too little text to train on: {several(text.nbytes, 'byte')} in "
            f"{several(text.num_documents, 'document')}, of which {heldout} would be held out to measure the loss. "
            f"For {several(peers, 'peer')} the text must have about {several(needed, 'byte')}. Give more text, such as "
            "a folder of files."
        )
    return seq_len


def _given(source: Source) -> dict[str, Any]:
    more = {"field": source.field} if isinstance(source, JsonlSource) else {}
    more |= {"column": source.column} if isinstance(source, ParquetSource) else {}
    return {"paths": list(source.paths), **more}


# --- what it takes ---


def unsealed(run_file: RunFile, base: Path, home: Path | None = None) -> RunConfig:
    """Return the run of a file whose text is not packed yet: it tells what memory and rounds it takes.

    Args:
        base: the folder that relative paths start from.
        home: where members lie by name; None: none do.
    """
    nothing, tokenizer = Digest("0" * 64), make_tokenizer(run_file.tokenizer, run_file.data, base)
    index = DataIndex(
        dtype="uint32" if isinstance(run_file.data.source, ConversationsSource) else dtype_for(tokenizer.vocab_size),
        train=(),
        heldout=(),
        train_text_nbytes=0,
        heldout_text_nbytes=0,
        tokenizer=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
        rows=rows_of(run_file.data.source, run_file.train.seq_len),
    )
    model = resolve(run_file, tokenizer, base, home)
    resolved = {
        "model": model,
        "base": nothing if has_base(model) else UNSET,
        "base_nbytes": cost.vector_nbytes(num_base_parameters(model)) or UNSET,
        "initial": nothing,
        "is_seeded": True,
        "data": index,
        "reward": run_file.reward or UNSET,
        "trust": UNSET if run_file.stages > 1 else trust_of_run(run_file.trust),
        "method": spell_out(run_file.method, run_file.peers),
        "stewards": (),
    }
    return RunConfig(**alike(RunConfig, run_file) | resolved)
