"""Training by AdamW: torch's steps, and the same bits after it was stopped."""

from math import cos, pi

import pytest
import torch
from torch import Tensor

from unit.compose.stacks.small import CONFIG, SEQ_LEN, TRAINING, draw, space, text, vector
from weft.compose.descent import Descent, DescentConfig, State, Trained, windows
from weft.compose.stacks.body import unattached
from weft.errors import CheckpointError, ConfigError, DataError, NotFinite
from weft.model.flat import FlatModel, over


class OfBody(Descent):
    """Plain training of a body."""

    def __init__(self, config: DescentConfig = TRAINING) -> None:
        self.flat: FlatModel = over(unattached(CONFIG), vector(1))
        self.ends = space()
        super().__init__(config, draw(), {"member": Trained.of(self.flat)})

    def _loss(self, number: int) -> Tensor:
        tokens, targets, _ = self._draw(number)
        return self.ends.loss(self.flat.module(self.ends.begin(tokens)), targets)


def test_steps_are_those_of_torch() -> None:
    mine, module, ends = OfBody(), over(unattached(CONFIG), vector(1)).module, space()
    parameters = list(module.parameters())
    groups = [
        {"params": [each for each in parameters if each.dim() == 2], "weight_decay": 0.01},
        {"params": [each for each in parameters if each.dim() == 1], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for number in range(TRAINING.steps):
        tokens, targets, _ = draw()(number)
        theirs.zero_grad(set_to_none=False)
        ends.loss(module(ends.begin(tokens)), targets).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in theirs.param_groups:
            group["lr"] = TRAINING.rate(number)
        theirs.step()
        mine.step()
    found = dict(module.named_parameters())
    for name, parameter in mine.flat.module.named_parameters():
        assert torch.allclose(parameter, found[name], atol=2e-5), name
    assert not torch.allclose(mine.flat.vector, vector(1), atol=1e-3)


def test_the_rate_rises_and_falls_along_a_cosine() -> None:
    config = DescentConfig(steps=12, lr=2.0, warmup_steps=2, floor=0.1)
    expected = [1.0, 2.0, *(2 * (0.1 + 0.9 * (1 + cos(pi * done / 10)) / 2) for done in range(1, 11))]
    assert [config.rate(number) for number in range(12)] == pytest.approx(expected)


def test_what_was_stopped_goes_on_to_the_same_bits() -> None:
    whole, first, second = OfBody(), OfBody(), OfBody()
    losses = whole.run()
    begun = first.run(until=2)
    state = first.state()
    first.run()  # what is done after a state was taken does not change it
    second.flat.vector.zero_()
    second.load(state)
    assert begun + second.run() == losses
    assert torch.equal(second.flat.vector, whole.flat.vector)
    ends = (whole.state(), second.state())
    assert all(torch.equal(ends[0].tensors[name], ends[1].tensors[name]) for name in ends[0].tensors)


def test_a_state_without_its_moments_would_go_elsewhere() -> None:
    """What the test before would not find, if they made no difference."""
    whole, other = OfBody(), OfBody()
    whole.run(until=2)
    state = whole.state()
    whole.run()
    other.load(State(state.num_steps, {**state.tensors, "member.moment1": torch.zeros_like(vector(1))}))
    other.run()
    assert not torch.equal(other.flat.vector, whole.flat.vector)


def test_a_state_of_something_else_is_refused_and_changes_nothing() -> None:
    mine = OfBody()
    state = mine.state()
    for wrong, name in (
        ({**state.tensors, "member.vector": vector(2)[:-1]}, "member.vector"),
        ({key: each for key, each in state.tensors.items() if key != "member.moment2"}, "member.moment2"),
        ({**state.tensors, "more": vector(2)}, "more"),
    ):
        with pytest.raises(CheckpointError, match=name):
            mine.load(State(4, wrong))
    assert mine.num_steps == 0
    assert torch.equal(mine.flat.vector, vector(1))


def test_a_loss_that_is_not_finite_ends_it_before_anything_changes() -> None:
    mine = OfBody()
    mine.ends.head.fill_(float("nan"))
    with pytest.raises(NotFinite, match="step 0"):
        mine.run()
    assert torch.equal(mine.flat.vector, vector(1))
    assert not mine.state().tensors["member.moment1"].any()


def test_windows_are_drawn_by_number_and_targets_are_a_token_further() -> None:
    tokens = torch.arange(100)
    made = windows(tokens, SEQ_LEN, 5, 1)
    batch = made(3)
    assert torch.equal(batch.targets, batch.tokens + 1)
    assert batch.tokens.shape == (5, SEQ_LEN)
    assert torch.equal(windows(tokens, SEQ_LEN, 5, 1)(3).tokens, batch.tokens)
    assert not torch.equal(made(4).tokens, batch.tokens)
    assert not torch.equal(windows(tokens, SEQ_LEN, 5, 2)(3).tokens, batch.tokens)
    starts = {int(row[0]) for number in range(200) for row in made(number).tokens}
    assert (min(starts), max(starts)) == (0, 100 - SEQ_LEN - 1)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="warmup_steps: 7 of 6 steps"):
        DescentConfig(steps=6, warmup_steps=7)
    with pytest.raises(DataError, match="12 tokens, and a window takes 13"):
        windows(text(SEQ_LEN), SEQ_LEN, 1, 1)
