"""The loss of drawn answers is its papers', token by token, however a batch is cut up."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from unit.peer.tiny import MODEL
from weft.data.rows import UNTRAINED
from weft.model.flat import assemble, over
from weft.model.initial import initial_vector
from weft.model.transformer import Transformer
from weft.training.policy import Answer, Group, Policy, answers_of, blank

CLIP = 0.2
NOW = initial_vector(MODEL, 2)


def logprobs(module: torch.nn.Module, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> Tensor:
    whole = torch.tensor([[*prompt, *tokens]])
    told = log_softmax(module(whole)[0].float(), -1)
    return torch.stack([told[len(prompt) - 1 + at, token] for at, token in enumerate(tokens)])


def group(prompt: tuple[int, ...], shift: float = 0.0, rewards: tuple[float, ...] = (1.0, 0.0, 0.0)) -> Group:
    """Return a task's answers, drawn by a model that found each of their tokens `shift` nats likelier than now."""
    module = assemble(MODEL, NOW)
    answers = []
    for number, reward in enumerate(rewards):
        tokens = tuple((7 * number + 3 * at + sum(prompt)) % 90 for at in range(2 + number))
        told = logprobs(module, prompt, tokens).detach() + shift * (-1) ** torch.arange(len(tokens))
        answers.append(Answer(tokens, tuple(told.tolist()), reward))
    return Group(prompt, tuple(answers))


def grpo(module: torch.nn.Module, groups: list[Group]) -> Tensor:
    """GRPO's objective (2402.03300, equation 3), with DAPO's mean over tokens (2503.14476, equation 8)."""
    gains, num = torch.zeros(()), 0
    for each in groups:
        rewards = torch.tensor([answer.reward for answer in each.answers])
        if rewards.min() == rewards.max():
            continue
        for answer in each.answers:
            advantage = (answer.reward - rewards.mean()) / (rewards.std() + 1e-4)
            now = logprobs(module, each.prompt, answer.tokens)
            for token, before in zip(now, answer.logprobs, strict=True):
                ratio = torch.exp(token - before)
                gains = gains + torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
                num += 1
    return -gains / num


@pytest.mark.parametrize("shift", [0.0, 0.1, 0.5, -0.5])
def test_it_is_its_papers(shift: float) -> None:
    groups = [group((1, 2, 3), shift), group((4, 5), shift, (1.0, 1.0, 1.0)), group((9,), shift, (0.0, 0.5, 1.0, 0.0))]
    batch = answers_of(groups, 64)
    assert batch is not None
    assert len(batch.tokens) == 7  # of the second task all are worth the same
    gradients = []
    for loss in (lambda module: Policy(CLIP).loss(module, *batch), lambda module: grpo(module, groups)):
        with torch.device("meta"):
            module = Transformer(MODEL)
        model = over(module, NOW.clone())
        found = loss(model.module)
        found.backward()
        gradients.append((found.detach(), model.gradient))
    (loss_a, a), (loss_b, b) = gradients
    torch.testing.assert_close(loss_a, loss_b, rtol=1e-5, atol=1e-6)
    assert float(a.norm()) > 0
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def test_parts_add_up_to_the_whole() -> None:
    batch = answers_of([group((1, 2, 3), 0.1), group((9, 8), 0.1)], 64)
    assert batch is not None
    module, policy = assemble(MODEL, NOW), Policy(CLIP)
    parts = [batch.part(start, start + 2) for start in range(0, len(batch.tokens), 2)]
    summed = sum(float(policy.loss(module, *part)) * part.share_of(batch) for part in parts)
    assert summed == pytest.approx(float(policy.loss(module, *batch)), rel=1e-5)


def test_answers_that_are_all_alike_teach_nothing() -> None:
    assert answers_of([group((1,), 0.0, (0.0, 0.0, 0.0)), group((2,), 0.0, (1.0, 1.0))], 64) is None
    assert math.isfinite(float(Policy(CLIP).loss(assemble(MODEL, NOW), *blank(2, 8))))


def test_an_answer_is_cut_where_its_row_ends() -> None:
    long = Group((1, 2, 3), (Answer((4, 5, 6, 7), (-1.0,) * 4, 1.0), Answer((4,), (-1.0,), 0.0)))
    batch = answers_of([long], 5)
    assert batch is not None
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 0, 0]]
    assert batch.targets[0].tolist() == [UNTRAINED, UNTRAINED, 4, 5, 6]
    assert batch.targets[1].tolist() == [UNTRAINED, UNTRAINED, 4, UNTRAINED, UNTRAINED]


def test_advantages_are_the_same_whatever_rewards_are_multiplied_by() -> None:
    ones, halves = group((1,), 0.0, (1.0, 0.0, 0.0)), group((1,), 0.0, (0.5, 0.0, 0.0))
    assert ones.advantages() == pytest.approx(halves.advantages(), rel=1e-3)
    assert sum(ones.advantages()) == pytest.approx(0, abs=1e-9)
