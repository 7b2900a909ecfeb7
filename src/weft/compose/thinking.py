"""Training a member to think in what it writes (`stacks.thoughts`), and its controls. All go on where they stopped.

texts with steps ──stage 0──► vector ──stage 1──► ... ──last stage──► vector       thoughts
                 └─ the same stages, the same batches ─────────────────────►       pauses, nothing
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from jaxtyping import Float32
from torch import Tensor

from weft import wire
from weft.compose.descent import DescentConfig
from weft.compose.shelf import Shelf, through
from weft.compose.space import Space, numbers_digest
from weft.compose.stacks.align import head_flops, member_flops
from weft.compose.stacks.body import body, vector_of
from weft.compose.stacks.stack import Stack
from weft.compose.stacks.thoughts import (
    Answered,
    Curriculum,
    Marks,
    Thought,
    ThoughtDescent,
    Thoughts,
    answered,
    staged,
    together,
)
from weft.data.documents import LINES, json_objects
from weft.data.files import find
from weft.data.tokenizer import Tokenizer
from weft.errors import ConfigError, DataError
from weft.ids import Digest
from weft.model.transformer import SectionModule
from weft.rng import integers64, stream

Filling = Literal["thoughts", "pauses", "nothing"]
"""What stands in place of steps that are left out: latents, tokens that say nothing, or no positions."""
CONTROLS: tuple[Filling, ...] = ("pauses", "nothing")


@dataclass(frozen=True, eq=False)
class Thinking:
    """What is asked for.

    Args:
        body: of the member.
        texts: to train on.
        lr: after a warm-up of a tenth of each stage's steps, forty at most, it stays.
        seed: of the order in which texts are read.
    """

    space: Space
    body: SectionModule
    texts: Sequence[Thought]
    marks: Marks
    curriculum: Curriculum
    lr: float
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if not self.texts:
            raise ConfigError("thinking: no texts to train on. Give one at least.")

    @property
    def stages(self) -> list[tuple[int, int]]:
        """Return each stage and how many steps it has."""
        epochs = [self.curriculum.stage(epoch) for epoch in range(self.curriculum.num_epochs)]
        return [(stage, len(list(each)) * self._steps_per_epoch) for stage, each in groupby(epochs)]

    @property
    def num_steps(self) -> int:
        return sum(steps for _, steps in self.stages)

    def tokens(self, filling: Filling) -> int:
        """Return how many positions are read, each as often as passes reach it; fillings up are not counted."""
        return self._counted(filling, lambda num, latents, before: num + sum(before + k for k in range(1, latents + 1)))

    def read(self, filling: Filling) -> int:
        """Return how many positions texts have, each read once."""
        return self._counted(filling, lambda num, _latents, _before: num)

    def flops(self, filling: Filling) -> int:
        """Return the operations of a training."""
        member, longest = Stack(self.space, (self.body,)), max(self._longest(each) for each in self.texts)
        through_body = member_flops(member, 0, longest).total
        return int(self.tokens(filling) * through_body + self.read(filling) * head_flops(member))

    def digest(self) -> Digest:
        """Return what names all that the trainings depend on."""
        parts = [self.space.digest, numbers_digest(vector_of(self.body))]
        told = (self.texts, self.marks, self.curriculum, self.lr, self.batch_size, self.seed)
        return wire.digest(msgspec.json.encode([parts, msgspec.to_builtins(told)]))

    def make(self, filling: Filling, shelf: Shelf, on_step: Callable[[], None]) -> Float32[Tensor, " num"]:
        """Return the vector of the member's body after all stages; arguments as of `making.make`.

        Raises:
            NotFinite: it has diverged.
        """
        vector, device = vector_of(self.body), self.space.embed.device
        for stage, steps in self.stages:
            begin = self._beginning(filling, stage, steps, vector)
            made = through(f"{filling}.{stage}", steps, begin, lambda each: {"vector": each.vector}, shelf, on_step)
            vector = made["vector"].to(device)
        return vector

    def told(self, vector: Float32[Tensor, " num"], filling: Filling, texts: Sequence[Thought]) -> Answered:
        """Return how a member answers texts whose steps are all left out."""
        return answered(self.space, body(self.body.config, vector), self._batch(filling, self.curriculum.last, texts))

    # --- batches ---

    def draw(self, filling: Filling, stage: int) -> Callable[[int], Thoughts]:
        """Return what draws the texts of a step: all of them once in an epoch, in an order of that epoch's own."""

        def drawn(number: int) -> Thoughts:
            epoch, place = divmod(number, self._steps_per_epoch)
            keys = integers64(stream(self.seed, "thoughts", stage, epoch), len(self.texts))
            order = np.argsort(keys, kind="stable")[place * self.batch_size : (place + 1) * self.batch_size]
            return self._batch(filling, stage, [self.texts[at] for at in order])

        return drawn

    def _beginning(
        self, filling: Filling, stage: int, steps: int, vector: Float32[Tensor, " num"]
    ) -> Callable[[], ThoughtDescent]:
        training = DescentConfig(steps=steps, lr=self.lr, warmup_steps=min(40, steps // 10), floor=1.0)
        member = self.body.config, vector
        return lambda: ThoughtDescent(training, self.space, member, self.draw(filling, stage))

    def _batch(self, filling: Filling, stage: int, texts: Sequence[Thought]) -> Thoughts:
        curriculum = self._curriculum(filling)
        found = together([staged(curriculum, each, stage, self.marks) for each in texts], self.marks.filler)
        return (found if filling == "thoughts" else found.paused()).to(self.space.embed.device)

    @property
    def _steps_per_epoch(self) -> int:
        return ceil(len(self.texts) / self.batch_size)

    def _curriculum(self, filling: Filling) -> Curriculum:
        if filling != "nothing":
            return self.curriculum
        return msgspec.structs.replace(self.curriculum, latents_per_step=0)

    def _counted(self, filling: Filling, of: Callable[[int, int, int], int]) -> int:
        """Return a sum over all texts that are read: of their tokens, latents, and tokens before the first latent."""
        total, curriculum = 0, self._curriculum(filling)
        for stage, steps in self.stages:
            for text in self.texts:
                num = length(curriculum, text, stage)
                latents = curriculum.left_out(stage, len(text.steps))[1] if filling == "thoughts" else 0
                total += steps // self._steps_per_epoch * of(num, latents, len(text.question))
        return total

    def _longest(self, text: Thought) -> int:
        return longest(self.curriculum, text)


def length(curriculum: Curriculum, text: Thought, stage: int) -> int:
    """Return how many tokens a text has in a stage."""
    skipped, num = curriculum.left_out(stage, len(text.steps))
    return len(text.question) + 2 + num + sum(map(len, text.steps[skipped:])) + len(text.answer)


def longest(curriculum: Curriculum, text: Thought) -> int:
    """Return how many tokens a text has in the stage where it has most."""
    return max(length(curriculum, text, stage) for stage in range(curriculum.last + 1))


# --- files ---


def marks_of(tokenizer: Tokenizer) -> Marks:
    """Return what stands around thoughts, and in their place until they are there: the end of a text, since a space has
    no token that means nothing yet.

    Raises:
        ConfigError: the tokenizer has none.
    """
    if (end := tokenizer.end_of_text) is None:
        raise ConfigError("the member's tokenizer has no end of text, which marks where thoughts begin and end.")
    return Marks(end, end, end)


def texts_of(paths: Sequence[str], base: Path, tokenizer: Tokenizer) -> list[Thought]:
    """Return texts of JSON lines: {"question": "...", "steps": ["...", ...], "answer": "..."}.

    A line ends the question and each step, and the end of text the answer.

    Raises:
        DataError: nothing is there, or something is no such text; names the file and the line.
    """
    rows = (row for file in find(paths, base, LINES) for row in json_objects(file.path))
    return [_thought(place, row, tokenizer) for _, place, row in rows]


def _thought(place: str, row: dict[str, Any], tokenizer: Tokenizer) -> Thought:
    question, steps, answer = row.get("question"), row.get("steps"), row.get("answer")
    texts = [question, *steps, answer] if isinstance(steps, list) else []
    if not texts or not all(isinstance(each, str) and each for each in texts):
        raise DataError(
            f'{place}: no question with steps and an answer. Write {{"question": "...", "steps": ["...", "..."], '
            '"answer": "..."}, all of them text.'
        )
    *ended, last = (tokenizer.encode(each).tolist() for each in (*(each + "\n" for each in texts[:-1]), texts[-1]))
    end = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    return Thought(ended[0], ended[1:], [*last, *end])
