"""Latent loops: what stands at a position and what it is asked for; COCONUT against a slow version of its paper."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from unit.compose.stacks.small import CONFIG, SEQ_LEN, TRAINING, VOCAB, batch, draw, member, space, text, vector
from weft.compose.descent import DescentConfig, State, windows
from weft.compose.space import Space, normed
from weft.compose.stacks.align import head_flops, member_flops
from weft.compose.stacks.body import body
from weft.compose.stacks.latents import (
    Curriculum,
    EntropyConfig,
    LatentConfig,
    LatentDescent,
    Marks,
    Thought,
    entropy,
    loop_flops,
    loop_loss,
    looped,
    reads_itself,
    replaceable,
    staged,
    thinking,
)
from weft.compose.stacks.stack import Stack
from weft.data.rows import Batch
from weft.errors import ConfigError
from weft.model.transformer import SectionModule

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


# --- COCONUT as published ---

MARKS = Marks(begin=29, end=30, filler=31)
THOUGHT = Thought(question=(1, 2, 3), steps=((4, 5), (6,), (7, 8, 9)), answer=(10, 11))


def test_stage_after_stage_a_step_more_is_left_out() -> None:
    curriculum = Curriculum(latents_per_step=2, epochs_per_stage=3, num_stages=2)
    assert [curriculum.stage(epoch) for epoch in (0, 2, 3, 5, 6, 8, 9, 50)] == [0, 0, 1, 1, 2, 2, 3, 3]
    texts = [staged(curriculum, THOUGHT, stage, MARKS) for stage in range(4)]
    assert [each.tokens for each in texts] == [
        [1, 2, 3, 29, 30, 4, 5, 6, 7, 8, 9, 10, 11],
        [1, 2, 3, 29, 31, 31, 30, 6, 7, 8, 9, 10, 11],
        [1, 2, 3, 29, 31, 31, 31, 31, 30, 7, 8, 9, 10, 11],
        [1, 2, 3, 29, 31, 31, 31, 31, 30, 10, 11],
    ]
    assert texts[1].targets == [-100] * 6 + [6, 7, 8, 9, 10, 11, -100]
    assert [place for place, latent in enumerate(texts[1].is_latent) if latent] == [4, 5]
    for each in texts:
        assert len(each.tokens) == len(each.targets) == len(each.is_latent)
        assert sum(each.is_latent) == each.tokens.count(MARKS.filler)


@pytest.mark.parametrize(("is_padded", "num"), [(True, 6), (False, 2)])
def test_texts_with_few_steps_have_as_many_latents_if_asked_for(is_padded: bool, num: int) -> None:
    curriculum = Curriculum(latents_per_step=2, num_stages=3, is_padded=is_padded)
    short = Thought((1,), ((2, 3),), (4,))
    assert curriculum.left_out(4, 1) == (1, num)
    assert sum(staged(curriculum, short, 4, MARKS).is_latent) == num


def reference(ends: Space, module: SectionModule, tokens: list[int], is_latent: list[bool]) -> Tensor:
    """COCONUT's forward pass of one text, after section 3 of 2412.06769: position after position, nothing reused.

    At a latent position the input is the last hidden state of the position before it, elsewhere the token's embedding.
    """
    inputs = list[Tensor]()
    for token, latent in zip(tokens, is_latent, strict=True):
        if not latent:
            inputs.append(ends.embed[token])
            continue
        so_far = torch.stack(inputs)[None]
        hidden = module(so_far)[0, -1]
        inputs.append(hidden / (hidden.square().mean() + ends.norm_eps).sqrt())
    return module(torch.stack(inputs)[None])[0]


def test_thinking_is_that_of_the_paper_gradients_and_all() -> None:
    ends, curriculum = space(), Curriculum(latents_per_step=2, num_stages=2)
    texts = [staged(curriculum, THOUGHT, 2, MARKS), staged(curriculum, Thought((1,) * 6, ((4,),), (7, 8, 9)), 1, MARKS)]
    assert [sum(each.is_latent) for each in texts] == [4, 2]
    num = min(len(each.tokens) for each in texts)
    tokens, is_latent, targets = (
        torch.tensor([list(part)[:num] for part in kind]) for kind in zip(*texts, strict=True)
    )
    module = body(CONFIG, vector(1).double()).requires_grad_(True)
    mine = thinking(ends, module, tokens, is_latent)
    theirs = torch.stack(
        [reference(ends, module, row.tolist(), at.tolist()) for row, at in zip(tokens, is_latent, strict=True)]
    )
    assert torch.allclose(mine, theirs, atol=1e-4)
    plain = module(ends.begin(tokens))
    assert not torch.allclose(mine, plain, atol=1e-2)
    grads = [torch.autograd.grad(ends.loss(x, targets), list(module.parameters())) for x in (mine, theirs)]
    assert all((a - b).norm() < 1e-4 * b.norm() for a, b in zip(*grads, strict=True))


def test_without_latents_thinking_is_one_pass() -> None:
    ends, module, found = space(), member(1), batch()
    nowhere = torch.zeros_like(found.tokens, dtype=torch.bool)
    assert torch.equal(thinking(ends, module, found.tokens, nowhere), module(ends.begin(found.tokens)))


def test_a_text_that_begins_with_a_latent_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing came out before it"):
        thinking(space(), member(1), batch().tokens, EVERYWHERE)
