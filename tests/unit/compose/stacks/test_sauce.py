"""The special sauce: its gradient is that of backprop, what is stale is refused, and the answer stays inside."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from unit.compose.stacks.small import CONFIG, TRAINING, batch, draw, space, stacked, vector
from weft.compose.space import normed
from weft.compose.stacks.align import Aim, Synchronous
from weft.compose.stacks.body import body, vector_of
from weft.compose.stacks.sauce import Cache, Sauce, SauceConfig, corrected
from weft.compose.stacks.stack import PostConfig, Stack, uniform
from weft.data.rows import Batch
from weft.errors import ConfigError

CONFIGURED = SauceConfig(training=TRAINING, per_round=4)
POST = PostConfig()


def in_double(*seeds: int) -> Stack:
    return Stack(space(), tuple(body(CONFIG, vector(seed).double()) for seed in seeds), uniform(POST, len(seeds)))


def gradient(loss: Tensor, stack: Stack) -> Tensor:
    found = torch.autograd.grad(loss, list(stack.bodies[0].parameters()))
    return torch.cat([each.flatten() for each in found])


def backprop(stack: Stack, found: Batch) -> Tensor:
    """Return the gradient of the stack's loss to its lowest member, all above frozen."""
    return gradient(stack.space.loss(stack.exits(found.tokens, found.positions)[-1], found.targets), stack)


def by_sauce(stack: Stack, found: Batch, eta: float, num: int = 1) -> Tensor:
    """Return that of the regression to corrected latents, without grounding."""
    config = SauceConfig(training=TRAINING, eta=eta, corrections=num, grounding=0.0)
    z = corrected(config, stack, found)
    h = normed(stack.exits(found.tokens, found.positions, num=1)[-1], stack.space.norm_eps)
    return gradient((h - z).square().sum() / (2 * eta * num * found.num_predicted), stack)


@pytest.mark.parametrize("seeds", [(1, 2), (1, 2, 3)], ids=["two", "three"])
def test_one_small_correction_is_backprop_through_the_frozen_members(seeds: Sequence[int]) -> None:
    stack, found = in_double(*seeds), batch()
    stack.bodies[0].requires_grad_(True)
    expected, mine = backprop(stack, found), by_sauce(stack, found, 1e-4)
    assert cosine_similarity(mine, expected, dim=0) > 0.9999
    assert mine.norm() / expected.norm() == pytest.approx(1.0, abs=0.01)
    assert cosine_similarity(by_sauce(stack, found, 4.0, 2), expected, dim=0) < 0.99  # long ones lead elsewhere


def test_what_is_not_predicted_counts_nothing() -> None:
    stack, found = in_double(1, 2), batch()
    targets = found.targets.clone()
    targets[:, 5:] = -100
    positions = torch.arange(targets.shape[1]).expand_as(targets)
    masked = Batch(found.tokens, targets, positions)
    stack.bodies[0].requires_grad_(True)
    assert cosine_similarity(by_sauce(stack, masked, 1e-4), backprop(stack, masked), dim=0) > 0.9999
    first = Batch(found.tokens[:, :5], targets[:, :5])
    assert torch.allclose(by_sauce(stack, masked, 1e-4), by_sauce(stack, first, 1e-4), atol=1e-4)


def test_the_first_step_is_that_of_its_synchronous_twin() -> None:
    """Which has the true gradient: the same parameters move, nearly as far."""
    config = SauceConfig(training=TRAINING, eta=1e-2, per_round=4)
    sauce = Sauce(config, stacked(POST, 1, 2), draw())
    twin = Synchronous(TRAINING, stacked(POST, 1, 2), draw(), Aim(members={0}, weights={1: 1.0, 0: config.grounding}))
    moved = []
    for each in (sauce, twin):
        each._loss(0).backward()
        (trained,) = each._trained.values()
        moved.append(trained.gradient)
    assert cosine_similarity(*moved, dim=0) > 0.999


def test_corrected_latents_are_read_more_easily() -> None:
    stack, found = stacked(POST, 1, 2), batch()
    z = corrected(CONFIGURED, stack, found)
    h = normed(stack.exits(found.tokens, num=1)[-1], stack.space.norm_eps)
    before, after = (float(stack.space.loss(stack.member(1, each), found.targets)) for each in (h, z))
    assert after < before
    assert torch.allclose(z.square().mean(-1), torch.ones(z.shape[:-1]), atol=1e-3)


def test_a_round_trains_on_latents_of_the_member_as_it_began() -> None:
    sauce = Sauce(CONFIGURED, stacked(POST, 1, 2), draw())
    caches = list[Cache]()
    for number in range(TRAINING.steps):
        if number % 4 == 0:
            began = sauce.stack
            latents = [corrected(CONFIGURED, began, draw()(step)) for step in range(number, min(number + 4, 6))]
            caches.append(sauce.collect())
            assert all(torch.equal(a, b) for a, b in zip(caches[-1].latents, latents, strict=True))
        sauce.step()
        now = sauce.collect()
        if (number + 1) % 4:
            assert now.members == caches[-1].members  # of the round, though the member has changed
            assert torch.equal(now.latents[0], caches[-1].latents[0])
    assert [each.first for each in caches] == [0, 4]
    assert caches[0].members[0] != caches[1].members[0]
    assert caches[0].members[1] == caches[1].members[1]


def test_latents_of_somebody_else_train_alike() -> None:
    mine, theirs = (Sauce(CONFIGURED, stacked(POST, 1, 2), draw()) for _ in range(2))
    mine.take(theirs.collect())
    assert mine.run() == theirs.run()
    assert torch.equal(vector_of(mine.stack.bodies[0]), vector_of(theirs.stack.bodies[0]))


def test_stale_latents_are_refused() -> None:
    sauce = Sauce(CONFIGURED, stacked(POST, 1, 2), draw())
    old = sauce.collect()
    sauce.run(until=2)
    sauce.take(old)  # of the same round
    sauce.run(until=4)
    with pytest.raises(ConfigError, match="are stale"):
        sauce.take(old)
    other = Sauce(CONFIGURED, stacked(POST, 1, 3), draw()).collect()
    with pytest.raises(ConfigError, match="are stale"):
        Sauce(CONFIGURED, stacked(POST, 1, 2), draw()).take(other)
    renamed = Cache(old.members, 4, old.latents)  # by the member as it was, and named for this round
    with pytest.raises(ConfigError, match="are stale"):
        sauce.take(renamed)


def test_corrected_latents_reach_no_loss_that_is_told() -> None:
    """They hold the answer: a stack that read them would know it."""
    sauce = Sauce(CONFIGURED, stacked(POST, 1, 2), lambda _number: batch())
    sauce.run(until=3)
    before = sauce.stack.losses(batch())
    alone = Stack(space(), tuple(body(CONFIG, vector_of(each)) for each in sauce.stack.bodies), uniform(POST, 2))
    assert torch.equal(before, alone.losses(batch()))
    held = sauce.collect().latents[0]
    assert float(sauce.stack.space.loss(sauce.stack.member(1, held), batch().targets)) < float(before.mean())
    poisoned = sauce.collect()
    for each in poisoned.latents:
        each.fill_(float("nan"))
    sauce.take(poisoned)
    assert torch.equal(sauce.stack.losses(batch()), before)


def test_one_optimizer_goes_through_all_rounds() -> None:
    """What the first round brought is still in the moments after a step of the next."""
    sauce, old = Sauce(CONFIGURED, stacked(POST, 1, 2), draw()), "member.moment2"
    sauce.run(until=4)
    before = sauce.state().tensors[old]
    sauce.step()
    after = sauce.state().tensors[old]
    assert (after >= TRAINING.optimizer.beta2 * before - 1e-9).all()
    assert before.any()
