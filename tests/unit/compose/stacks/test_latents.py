"""Latent loops: what stands at a position and what it is asked for."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from unit.compose.stacks.small import CONFIG, SEQ_LEN, TRAINING, VOCAB, batch, draw, member, space, text, vector
from weft.compose.descent import DescentConfig, State, windows
from weft.compose.space import normed
from weft.compose.stacks.align import head_flops, member_flops
from weft.compose.stacks.body import body
from weft.compose.stacks.latents import (
    EntropyConfig,
    LatentConfig,
    LatentDescent,
    entropy,
    loop_flops,
    loop_loss,
    looped,
    reads_itself,
    replaceable,
)
from weft.compose.stacks.stack import Stack
from weft.data.rows import Batch

EVERYWHERE = torch.ones(4, SEQ_LEN, dtype=torch.bool)
SAME, PREV = LatentConfig(kind="same"), LatentConfig(kind="prev")


def second_pass(config: LatentConfig, found: Batch, chosen: Tensor) -> Tensor:
    """Return the loss of the second pass alone."""
    ends, module = space(), member(1)
    first = ends.loss(module(ends.begin(found.tokens), positions=found.positions), found.targets)
    both = loop_loss(config, ends, module, found, chosen)
    return (both - (1 - config.weight) * first) / config.weight


def slow_second_pass(kind: str, found: Batch, chosen: Tensor) -> float:
    """Return the same of each position by itself: inputs are made one by one, losses are summed where they were."""
    ends, module = space(), member(1)
    made = module(ends.begin(found.tokens))
    total, num = 0.0, 0
    for row in range(len(found.tokens)):
        x = ends.begin(found.tokens[row : row + 1]).clone()
        for t in range(SEQ_LEN):
            if chosen[row, t]:
                x[0, t] = normed(made[row, t if kind == "same" else t - 1], ends.norm_eps)
        logits = ends.logits(module(x))[0]
        for t in range(SEQ_LEN):
            if chosen[row, t]:
                total += float(cross_entropy(logits[t], found.targets[row, t]))
                num += 1
    return total / num


@pytest.mark.parametrize("kind", ["same", "prev"])
def test_the_loss_is_that_of_replaced_positions_alone(kind: str) -> None:
    chosen = torch.rand(4, SEQ_LEN, generator=torch.Generator().manual_seed(1)) < 0.4
    chosen[:, 0] = kind == "same"
    config = SAME if kind == "same" else PREV
    assert float(second_pass(config, batch(), chosen)) == pytest.approx(
        slow_second_pass(kind, batch(), chosen), abs=1e-4
    )


@pytest.mark.parametrize("config", [SAME, PREV], ids=["same", "prev"])
def test_targets_are_those_of_the_same_batch(config: LatentConfig) -> None:
    """Whoever scored the second pass by another batch's targets would not see which row has which."""
    found = batch()
    turned = Batch(found.tokens, found.targets.roll(1, 0))
    assert abs(second_pass(config, found, EVERYWHERE) - second_pass(config, turned, EVERYWHERE)) > 1e-2
    rows = torch.tensor([2, 0, 3, 1])
    together = Batch(found.tokens[rows], found.targets[rows])
    assert torch.allclose(second_pass(config, found, EVERYWHERE), second_pass(config, together, EVERYWHERE), atol=1e-5)


@pytest.mark.parametrize("config", [SAME, PREV], ids=["same", "prev"])
def test_what_is_looped_is_causal(config: LatentConfig) -> None:
    ends, module, found = space(), member(1), batch()
    place, later = SEQ_LEN // 2, found.tokens.clone()
    later[:, place + 1 :] = (later[:, place + 1 :] + 1) % VOCAB
    made = [looped(config.kind, module(ends.begin(tokens)), ends.norm_eps) for tokens in (found.tokens, later)]
    first = 0 if config.kind == "same" else 1
    assert torch.allclose(made[0][:, first : place + 1], made[1][:, first : place + 1], atol=1e-6)
    assert not torch.allclose(made[0][:, place + 2 :], made[1][:, place + 2 :], atol=1e-2)


def test_nothing_stands_where_nothing_came_out_before() -> None:
    ends, found = space(), batch()
    made = member(1)(ends.begin(found.tokens))
    assert replaceable(SAME, ends, made, found).all()
    before = replaceable(PREV, ends, made, found)
    assert before[:, 1:].all()
    assert not before[:, 0].any()
    positions = torch.arange(SEQ_LEN).remainder(5).expand_as(found.tokens)
    rows = replaceable(PREV, ends, made, Batch(found.tokens, found.targets, positions))
    assert torch.equal(rows, positions != 0)


@pytest.mark.parametrize("kind", ["same", "prev"])
def test_only_where_the_first_pass_is_unsure_is_anything_replaced(kind: str) -> None:
    ends, found = space(), batch()
    made = member(1)(ends.begin(found.tokens))
    unsure = entropy(ends.logits(made))
    threshold = float(unsure.median())
    config = LatentConfig(kind="same" if kind == "same" else "prev", select=EntropyConfig(threshold=threshold))
    expected = unsure > threshold
    if kind == "prev":
        expected = torch.cat((torch.zeros(4, 1, dtype=torch.bool), expected[:, :-1]), dim=1)
    assert torch.equal(replaceable(config, ends, made, found), expected)
    assert 0 < int(expected.sum()) < expected.numel()


def test_entropy_is_that_of_each_prediction() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [50.0, 0.0, 0.0, 0.0]])
    assert entropy(logits).tolist() == pytest.approx([1.3862944, 0.0], abs=1e-6)


def test_where_nothing_is_replaced_the_loss_is_that_of_the_first_pass() -> None:
    ends, module, found = space(), member(1), batch()
    first = ends.loss(module(ends.begin(found.tokens)), found.targets)
    assert torch.equal(loop_loss(SAME, ends, module, found, ~EVERYWHERE), first)
    only_padding = Batch(found.tokens, torch.full_like(found.targets, -100))
    only_padding.targets[0, 0] = 1
    chosen = EVERYWHERE.clone()
    chosen[0, 0] = False
    assert loop_loss(SAME, ends, module, only_padding, chosen).isfinite()


def test_no_gradient_goes_through_what_is_looped() -> None:
    ends, module, found = space(), member(1).requires_grad_(True), batch()
    config = LatentConfig(weight=1.0)
    grads = torch.autograd.grad(loop_loss(config, ends, module, found, EVERYWHERE), list(module.parameters()))
    latents = looped("same", module(ends.begin(found.tokens)).detach(), ends.norm_eps)
    alone = torch.autograd.grad(ends.loss(module(latents), found.targets), list(module.parameters()))
    assert all(torch.allclose(mine, theirs, atol=1e-6) for mine, theirs in zip(grads, alone, strict=True))


def test_the_probability_rises_from_one_end_to_the_other() -> None:
    config = LatentConfig(p0=0.2, p1=0.8, ramp=0.5)
    assert [config.probability(number, 100) for number in (0, 25, 50, 99)] == pytest.approx([0.2, 0.5, 0.8, 0.8])
    assert LatentConfig(p1=0.7, ramp=0.0).probability(0, 100) == pytest.approx(0.7)


def loop(config: LatentConfig, training: DescentConfig = TRAINING) -> LatentDescent:
    return LatentDescent(config, training, space(), (CONFIG, vector(1)), draw(), 5)


def test_a_loop_that_was_stopped_goes_on_to_the_same_bits() -> None:
    whole, first, second = loop(SAME), loop(SAME), loop(SAME)
    whole.run()
    first.run(until=3)
    second.load(first.state())
    second.run()
    assert torch.equal(second.vector, whole.vector)
    other = LatentDescent(SAME, TRAINING, space(), (CONFIG, vector(1)), draw(), 6)
    other.run()
    assert not torch.equal(other.vector, whole.vector)  # of a seed are the positions, too


def test_a_member_learns_to_read_what_it_wrote() -> None:
    training = DescentConfig(steps=60, lr=1e-2, warmup_steps=5)
    ends, held = space(), windows(text(), SEQ_LEN, 16, 99)(0)

    @torch.no_grad()
    def losses(of: LatentDescent) -> tuple[float, float]:
        module = body(CONFIG, of.vector)
        made = module(ends.begin(held.tokens))
        again = module(normed(made, ends.norm_eps))
        return float(ends.loss(made, held.targets)), float(ends.loss(again, held.targets))

    plain, taught = loop(LatentConfig(p0=0.0, p1=0.0), training), loop(SAME, training)
    plain.run()
    taught.run()
    (alone, twice), (alone_taught, twice_taught) = losses(plain), losses(taught)
    assert twice - alone > 1.0
    assert twice_taught - alone_taught < 0.5 * (twice - alone)


def test_where_all_is_replaced_a_member_is_told_as_a_stack_of_itself() -> None:
    module, held = body(CONFIG, vector(1)), windows(text(), SEQ_LEN, 5, 99)(0)
    alone, again = reads_itself(SAME, space(), module, held, seed=1, size=2)
    for loops, found in ((1, alone), (2, again)):
        wanted = Stack(space(), (module,), loops=(loops,)).losses(held)
        assert found == pytest.approx(float(wanted.mean()), abs=1e-5)


def test_a_second_pass_takes_as_much_as_the_first_but_for_the_head_where_nothing_is_replaced() -> None:
    single = Stack(space(), (member(1),))
    once, head = member_flops(single, 0, SEQ_LEN).total, head_flops(single)
    never, always = LatentConfig(p0=0.0, p1=0.0), LatentConfig(p0=1.0, p1=1.0)
    half, seldom = LatentConfig(p0=0.5, p1=0.5), LatentConfig(p0=1.0, p1=1.0, every=4)
    unsure = LatentConfig(p0=1.0, p1=1.0, select=EntropyConfig(threshold=1.0))
    found = [loop_flops(each, 8, single, SEQ_LEN) for each in (never, always, half, seldom, unsure)]
    wanted = [8 * (once + head), 16 * (once + head), 16 * once + 12 * head, 10 * (once + head), 16 * once + 20 * head]
    assert found == pytest.approx(wanted)


def test_both_passes_of_a_step_read_the_one_batch_of_its_number() -> None:
    """The code that went with the idea drew another batch between them, whose targets the latents then had."""
    asked = list[int]()

    def noted(number: int) -> Batch:
        asked.append(number)
        return draw()(number)

    LatentDescent(SAME, TRAINING, space(), (CONFIG, vector(1)), noted, 5).run()
    assert asked == list(range(TRAINING.steps))


def test_every_so_many_steps_there_is_a_second_pass() -> None:
    never, seldom = LatentConfig(p0=0.0, p1=0.0), LatentConfig(p0=1.0, p1=1.0, every=3)
    apart = [a != b for a, b in zip(first_losses(never), first_losses(seldom), strict=True)]
    assert apart == [True, False, False, True, False, False]


def first_losses(config: LatentConfig) -> list[float]:
    """Return the loss of each step as if it were the first: on the same parameters."""
    found, state = [], loop(config).state()
    for number in range(6):
        made = loop(config)
        made.load(State(number, state.tensors))
        found.append(made.step())
    return found
