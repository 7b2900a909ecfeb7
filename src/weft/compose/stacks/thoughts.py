"""COCONUT as published: a member learns to think in what it writes, where it wrote out its steps before.

    stage 0    question  |  |  step 1  step 2  step 3  answer
    stage 1    question  |  o o  |  step 2  step 3  answer             o: what came out at the position before
    last       question  |  o o o o o o  |  answer

Stage after stage more steps of a chain of thought are left out, and latent positions stand there in their place, each
filled by a pass of its own, through which gradients flow. Steps and answer are asked for, question and latents are not.
Each stage begins with a new optimizer.

Texts of a batch are filled up at their ends, which no position before sees. Two controls are trained alike: a pause in
place of each thought, where tokens stand that say nothing, and nothing in their place.

Hao et al., 2412.06769, section 3; the controls: section 4.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec
import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor
from torch.nn.functional import cross_entropy

from weft.compose.descent import DescentConfig
from weft.compose.space import Space, normed
from weft.compose.stacks.solo import MemberDescent, member_over
from weft.config import Config
from weft.data.rows import UNTRAINED, Batch
from weft.errors import ConfigError
from weft.model.config import ModelConfig
from weft.model.flat import FlatModel
from weft.model.transformer import SectionModule

_AT_A_TIME = 16  # texts that are told


class Curriculum(Config, frozen=True, kw_only=True):
    """In stage s the first s steps of each chain of thought are left out, and s c latent positions stand there."""

    latents_per_step: Annotated[int, msgspec.Meta(ge=0, le=64, description="c; 0: nothing stands there")] = 2
    epochs_per_stage: Annotated[int, msgspec.Meta(ge=1, le=10**4)] = 3
    num_stages: Annotated[int, msgspec.Meta(ge=1, le=64, description="with latents; after them one without steps")] = 3
    is_padded: bool = True
    """In the stage after them: as many latent positions as in the last; else no more than the text had steps."""

    @property
    def last(self) -> int:
        """Return the stage in which all steps are left out."""
        return self.num_stages + 1

    @property
    def num_epochs(self) -> int:
        return self.epochs_per_stage * (self.last + 1)

    def stage(self, epoch: int) -> int:
        """Return the stage of an epoch; each begins with a new optimizer. In stage 0 nothing is left out."""
        return min(epoch // self.epochs_per_stage, self.last)

    def left_out(self, stage: int, num_steps: int) -> tuple[int, int]:
        """Return how many steps of a text are left out, and how many latent positions stand there."""
        if stage <= self.num_stages:
            return min(stage, num_steps), stage * self.latents_per_step
        stages = self.num_stages if self.is_padded else min(num_steps, self.num_stages)
        return num_steps, stages * self.latents_per_step


class Thought(NamedTuple):
    """A text with a chain of thought, as tokens."""

    question: Sequence[int]
    steps: Sequence[Sequence[int]]
    answer: Sequence[int]


class Marks(NamedTuple):
    """Tokens around the latent positions, and the one that fills them until a latent does."""

    begin: int
    end: int
    filler: int


class Staged(NamedTuple):
    """A text of a stage: tokens, which positions are latent, and targets: -100 but for steps and answer."""

    tokens: list[int]
    is_latent: list[bool]
    targets: list[int]


def staged(curriculum: Curriculum, thought: Thought, stage: int, marks: Marks) -> Staged:
    """Return what a text is in a stage; the targets are one position ahead of the tokens."""
    skipped, num = curriculum.left_out(stage, len(thought.steps))
    said = [token for step in thought.steps[skipped:] for token in step] + list(thought.answer)
    before = [*thought.question, marks.begin, *[marks.filler] * num, marks.end]
    tokens = before + said
    first = len(thought.question) + 1
    is_latent = [first <= place < first + num for place in range(len(tokens))]
    targets = [UNTRAINED] * (len(before) - 1) + said + [UNTRAINED]
    return Staged(tokens, is_latent, targets)


def thinking(
    space: Space, body: SectionModule, tokens: Int64[Tensor, "batch tokens"], is_latent: Bool[Tensor, "batch tokens"]
) -> Float[Tensor, "batch tokens width"]:
    """Return the residual stream over texts whose latent positions hold what came out at the position before.

    As many passes as a text has latent positions, and one: the k-th fills the k-th of each text. Gradients flow through
    all of them.

    Raises:
        ConfigError: a text begins with a latent position: nothing came out before it.
    """
    if bool(is_latent[:, 0].any()):
        raise ConfigError("a text begins with a latent position, and nothing came out before it. Let a token begin it.")
    x, order = space.begin(tokens), is_latent.cumsum(1)
    for number in range(1, int(order.max()) + 1):
        here = is_latent & (order == number)
        stop = int(here.any(0).nonzero().max())  # all that this pass has to read lies before it
        made = normed(body(x[:, :stop]), space.norm_eps)
        filled = torch.where(here[:, 1 : stop + 1, None], made, x[:, 1 : stop + 1])
        x = torch.cat((x[:, :1], filled, x[:, stop + 1 :]), dim=1)
    left: Tensor = body(x)
    return left


class Thoughts(NamedTuple):
    """Texts of a stage together."""

    batch: Batch
    is_latent: Bool[Tensor, "batch tokens"]

    def to(self, device: torch.device) -> "Thoughts":
        return Thoughts(self.batch.to(device), self.is_latent.to(device))

    def paused(self) -> "Thoughts":
        """Return the same where the filler stays at latent positions: pauses that say nothing."""
        return Thoughts(self.batch, torch.zeros_like(self.is_latent))

    def part(self, start: int, stop: int) -> "Thoughts":
        return Thoughts(self.batch.part(start, stop), self.is_latent[start:stop])


def together(texts: Sequence[Staged], filler: int) -> Thoughts:
    """Return texts as a batch, filled up at their ends."""
    num = max(len(each.tokens) for each in texts)

    def filled(parts: Sequence[Sequence[int]], value: int) -> Int64[Tensor, "batch tokens"]:
        return torch.tensor([[*part, *[value] * (num - len(part))] for part in parts])

    tokens, targets = (
        filled([each.tokens for each in texts], filler),
        filled([each.targets for each in texts], UNTRAINED),
    )
    return Thoughts(Batch(tokens, targets), filled([each.is_latent for each in texts], False).bool())


class ThoughtDescent(MemberDescent[FlatModel]):
    """Training of one member in one stage.

    Args:
        member: its config, and the vector of its body, which is copied.
        draw: texts of the stage, by the number of the step.
    """

    def __init__(
        self,
        training: DescentConfig,
        space: Space,
        member: tuple[ModelConfig, Float32[Tensor, " num"]],
        draw: Callable[[int], Thoughts],
    ) -> None:
        super().__init__(training, space, member_over(space, member), lambda number: draw(number).batch)
        self._thoughts = draw

    def _loss(self, number: int) -> Tensor:
        batch, is_latent = self._thoughts(number)
        return self._space.loss(thinking(self._space, self._flat.module, batch.tokens, is_latent), batch.targets)


class Answered(NamedTuple):
    """Of each text: nats per token of its answer, and whether all of it is what the member would have written."""

    losses: Float32[Tensor, " texts"]
    are_right: Bool[Tensor, " texts"]


@torch.no_grad()
def answered(space: Space, body: SectionModule, thoughts: Thoughts) -> Answered:
    """Return how a member answers texts of which only answers are asked for.

    An answer is right where each of its tokens is the likeliest after those before it: where greedy drawing writes it.
    """
    parts = list(_answered(space, body, thoughts))
    return Answered(*(torch.cat(each).cpu() for each in zip(*parts, strict=True)))


def _answered(space: Space, body: SectionModule, thoughts: Thoughts) -> Iterator[Answered]:
    for start in range(0, len(thoughts.is_latent), _AT_A_TIME):
        (tokens, targets, _), is_latent = thoughts.part(start, start + _AT_A_TIME)
        logits = space.logits(thinking(space, body, tokens, is_latent))
        each = cross_entropy(logits.transpose(1, 2), targets, reduction="none")  # 0 where nothing is asked for
        is_asked = targets != UNTRAINED
        is_right = ((logits.argmax(-1) == targets) | ~is_asked).all(1)
        yield Answered(each.sum(1) / is_asked.sum(1), is_right)
