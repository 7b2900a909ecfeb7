"""A run that tunes a chat model on somebody's conversations, or on pairs of answers: how long its rows are, how many
there are, and the run file.

    row       the least power of two that holds the longest conversation, at most MAX_SEQ_LEN and what the model takes
    step      so few rows that a pass has some steps
    length    three passes, unless more is asked for: with more, the held-out loss of few conversations rises again

Sources: Hu et al., arXiv:2106.09685, and Rafailov et al., arXiv:2305.18290, for the rates; recipes/chat-lora.toml and
recipes/prefer.toml have the same.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from weft.chat.packing import renderer_of, split
from weft.chat.template import Template, TextTooLong
from weft.data.corpus import ConversationsSource, PreferencesSource, Split
from weft.data.rows import Packer
from weft.data.tokenizer import Tokenizer
from weft.errors import DataError
from weft.ids import several
from weft.plan.own_text import HELDOUT, outer, rounded

PASSES = 3
LEAST_SEQ_LEN, MAX_SEQ_LEN = 64, 2048
BATCH_SIZES = (8, 4, 2, 1)
STEPS_A_PASS = 4
RANK = 16
LRS = {"conversations": 2e-4, "preferences": 5e-5}
EVALUATION = 0.1  # of the time that training takes, at most: a row that is only read takes a third


@dataclass(frozen=True, kw_only=True)
class Chats:
    """What is trained on, as far as it decides how.

    Args:
        num: conversations, or pairs, of both sides.
        num_tokens: of all of them.
        num_answered: of those, how many are trained on.
        num_too_long: that are longer than a row.
        seq_len: tokens of a row.
        train_rows, heldout_rows: that they fill.
        num_too_large: others, of which a template makes no text.
    """

    most_passes: ClassVar = PASSES
    to_keep_it: ClassVar = "If they must stay on this machine: --set is_private=true, docs/tuning.md"
    source: ConversationsSource
    num: int
    num_tokens: int
    num_answered: int
    num_too_long: int
    seq_len: int
    train_rows: int
    heldout_rows: int
    num_too_large: int = 0

    @property
    def kind(self) -> str:
        """What a pass is over."""
        return f"{self.called}s"

    @property
    def called(self) -> str:
        return "pair" if isinstance(self.source, PreferencesSource) else "conversation"

    @property
    def train_tokens(self) -> int:
        """Return the tokens of a pass: what is left of a row counts, too."""
        return self.train_rows * self.seq_len

    @property
    def packed_nbytes(self) -> int:
        return 4 * (self.train_rows + self.heldout_rows) * self.seq_len

    def batch_size(self, peers: int) -> int:
        """Return rows of a step of each peer.

        Raises:
            DataError: there are too few rows for so many peers.
        """
        for size in BATCH_SIZES:
            if self.train_rows >= STEPS_A_PASS * size * peers:
                return size
        if self.train_rows >= peers:
            return 1
        raise DataError(
            f"too few {self.kind} to train on: {several(self.num, self.called)} fill "
            f"{several(self.train_rows, 'row')} of {self.seq_len} tokens, and {several(peers, 'peer')} need as many. "
            "Give more of them, or fewer peers."
        )


def read_chats(
    source: ConversationsSource,
    base: Path,
    template: Template,
    tokenizer: Tokenizer,
    context: int,
    on_read: Callable[[int], None] = lambda _nbytes: None,
    *,
    seq_len: int | None = None,
    heldout: float = HELDOUT,
) -> Chats:
    """Read all conversations once, as a model reads them.

    Args:
        base: the folder that relative paths start from.
        context: tokens that the model takes.
        on_read: told how many bytes of text were read since it was told last.
        seq_len: of a row; None: what holds the longest.
        heldout: share that is held out.

    Raises:
        DataError: as `weft.chat.packing.split`, or the template refuses one.
    """
    renderer = renderer_of(source, template, tokenizer)
    lengths: dict[Split, list[int]] = {"train": [], "heldout": []}
    num_answered, num_too_large = 0, 0
    for side, each in split(source, heldout, base):
        try:
            texts = [renderer.render(text) for text in each.texts]
        except TextTooLong as error:
            num_too_large, last = num_too_large + 1, str(error)
            continue
        lengths[side].append(sum(len(text.ids) for text in texts))
        num_answered += sum(int(text.is_trained.sum()) for text in texts)
        on_read(sum(len(text.text.encode()) for text in texts))
    every = [*lengths["train"], *lengths["heldout"]]
    if not every:
        raise DataError(f"all are too long to be read, the last one, too: {last}")
    seq_len = seq_len_of(max(every), context) if seq_len is None else seq_len
    if source.too_long == "leave_out":
        lengths = {side: [length for length in there if length <= seq_len] for side, there in lengths.items()}
    return Chats(
        source=source,
        num=len(every),
        num_tokens=sum(every),
        num_answered=num_answered,
        num_too_long=sum(length > seq_len for length in every),
        num_too_large=num_too_large,
        seq_len=seq_len,
        train_rows=num_rows(lengths["train"], seq_len),
        heldout_rows=num_rows(lengths["heldout"], seq_len),
    )


def seq_len_of(longest: int, context: int) -> int:
    """Return the tokens of a row."""
    found = LEAST_SEQ_LEN
    while found < min(longest, MAX_SEQ_LEN):
        found *= 2
    return min(found, context)


def num_rows(lengths: Iterable[int], seq_len: int) -> int:
    """Return how many rows conversations of these lengths fill, packed as a run packs them."""
    packer, num = Packer(seq_len, 0), 0
    for length in lengths:
        num += sum(1 for _ in packer.add(np.zeros(min(length, seq_len), np.uint32)))
    return num + sum(1 for _ in packer.finish()) - 1  # the word after the last row


def usual_tokens(chats: Chats, tokens_per_s: float, at_most_s: float) -> int:
    """Return how many tokens to train on: three passes, or what takes `at_most_s`."""
    return rounded(max(1, min(PASSES * chats.train_tokens, int(at_most_s * tokens_per_s))))


def run_tree(chats: Chats, *, name: str, model: str, tokens: int, peers: int) -> dict[str, Any]:
    """Return the run file, as `RunFile` has it.

    Args:
        model: a Hugging Face folder.

    Raises:
        DataError: too few conversations for so many peers.
    """
    kind = "preferences" if isinstance(chats.source, PreferencesSource) else "conversations"
    batch_size = chats.batch_size(peers)
    method, evaluate_every = outer(tokens, batch_size * chats.seq_len * peers)
    windows = int(3 * EVALUATION * tokens / 10 / chats.seq_len)
    return {
        "name": name,
        "peers": peers,
        "model": {"type": "folder", "path": model},
        "adapter": {"type": "lora", "rank": RANK},
        "data": {"heldout_fraction": HELDOUT, "source": {"type": kind, "paths": list(chats.source.paths)}},
        "tokenizer": {"type": "json", "path": model},
        "train": {
            "seq_len": chats.seq_len,
            "batch_size": batch_size,
            "tokens": tokens,
            "evaluate_every": evaluate_every,
            "evaluate_windows": max(8, min(256, windows)),
            **({"loss": {"type": "dpo"}} if kind == "preferences" else {}),
            "schedule": {
                "type": "cosine",
                "lr": LRS[kind],
                "warmup_tokens": min(100_000, tokens // 20),
                "total_tokens": tokens,
            },
        },
        "method": method,
    }
