"""The loss of answers that a model drew itself, some of them better than others.

    A_i = (r_i - mean r) / (std r + 1e-4)              of the answers to one task, and of all tokens of answer i

    loss = - mean over tokens of min(q A, clip(q, 1 - e, 1 + e) A),        q = p(token) / p(token as it was drawn)

Where all answers to a task are worth the same, it teaches nothing and is left out.

GRPO: Shao et al., 2402.03300, equations 3 and 10, without a divergence from a reference; one mean over all tokens, so
that long answers are not worth less: DAPO, Yu et al., 2503.14476, equation 8.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import cross_entropy

from weft.data.rows import UNTRAINED
from weft.model.transformer import SectionModule
from weft.training.preference import Sums

LEAST_STD = 1e-4


@dataclass(frozen=True)
class Answer:
    """
    Args:
        tokens: that were drawn, with the one that ended it.
        logprobs: of each, nats.
        reward: 0 to 1.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reward: float


@dataclass(frozen=True)
class Group:
    """The answers to one task."""

    prompt: tuple[int, ...]
    answers: tuple[Answer, ...]

    @property
    def teaches(self) -> bool:
        return len({answer.reward for answer in self.answers}) > 1

    def advantages(self) -> list[float]:
        rewards = torch.tensor([answer.reward for answer in self.answers], dtype=torch.float64)
        std = rewards.std()  # of a sample, as the paper's authors compute it
        found: list[float] = ((rewards - rewards.mean()) / (std + LEAST_STD)).tolist()
        return found


class Answers(NamedTuple):
    """Answers behind their tasks, one in a row.

    Args:
        targets: `UNTRAINED` but for the answer's tokens.
        advantages: of each token's answer.
        drawn: the log-probability with which each token was drawn.
    """

    tokens: Int64[Tensor, "batch seq"]
    targets: Int64[Tensor, "batch seq"]
    advantages: Float[Tensor, "batch seq"]
    drawn: Float[Tensor, "batch seq"]

    @property
    def num_predicted(self) -> int:
        return int((self.targets != UNTRAINED).sum())

    def part(self, start: int, stop: int) -> "Answers":
        return self._each(lambda tensor: tensor[start:stop])

    def to(self, device: torch.device) -> "Answers":
        return self._each(lambda tensor: tensor.to(device))

    def share_of(self, whole: "Answers") -> float:
        """Return the weight of this part's mean loss in that of all."""
        return self.num_predicted / max(whole.num_predicted, 1)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Answers":
        return Answers(*map(change, self))


def blank(num: int, seq_len: int) -> Answers:
    """Return answers that mean nothing: what computing is tried on."""
    zeros, nothing = torch.zeros(num, seq_len, dtype=torch.int64), torch.zeros(num, seq_len)
    return Answers(zeros, zeros, nothing, nothing)


def answers_of(groups: Sequence[Group], seq_len: int) -> Answers | None:
    """Return the answers to those tasks that teach something; None: there are none.

    Args:
        seq_len: tokens of a row, at most; rows are as long as the longest.
    """
    rows = [
        (group.prompt, answer, advantage)
        for group in groups
        if group.teaches
        for answer, advantage in zip(group.answers, group.advantages(), strict=True)
        if answer.tokens
    ]
    if not rows:
        return None
    longest = min(max(len(prompt) + len(answer.tokens) - 1 for prompt, answer, _ in rows), seq_len)
    ids, nats = torch.zeros(len(rows), longest, dtype=torch.int64), torch.zeros(len(rows), longest)
    found = Answers(ids, torch.full_like(ids, UNTRAINED), nats, nats.clone())
    for row, (prompt, answer, advantage) in enumerate(rows):
        whole = torch.tensor([*prompt, *answer.tokens])
        begin, stop = len(prompt) - 1, min(len(whole) - 1, longest)
        found.tokens[row, :stop] = whole[:stop]
        found.targets[row, begin:stop] = whole[begin + 1 : stop + 1]
        found.advantages[row, begin:stop] = advantage
        found.drawn[row, begin:stop] = torch.tensor(answer.logprobs[: stop - begin])
    return found


class Policy:
    """
    Args:
        clip: e.
    """

    def __init__(self, clip: float) -> None:
        self._clip = clip

    def loss(
        self,
        module: SectionModule,
        tokens: Int64[Tensor, "batch seq"],
        targets: Int64[Tensor, "batch seq"],
        advantages: Float[Tensor, "batch seq"],
        drawn: Float[Tensor, "batch seq"],
    ) -> Float[Tensor, ""]:
        """Return the mean over all tokens of answers; 0 where there are none."""
        logits = module(tokens)
        losses = cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        is_drawn = targets != UNTRAINED
        ratio = torch.exp(torch.where(is_drawn, -losses.view(targets.shape) - drawn, 0.0))
        clipped = ratio.clamp(1 - self._clip, 1 + self._clip)
        gains = torch.minimum(ratio * advantages, clipped * advantages)
        return -(gains * is_drawn).sum() / is_drawn.sum().clamp(min=1)

    def sums(self, module: SectionModule, batch: Answers) -> Sums:
        """Return the loss of a batch: what computing is tried on."""
        return Sums(float(self.loss(module, *batch)))
