"""Alignment: what is trained and what is frozen, on which loss; stopped and gone on; what it takes."""

from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import Tensor

from unit.compose.stacks.small import CONFIG, SEQ_LEN, TRAINING, VOCAB, WIDTH, batch, draw, stacked
from weft.compose.stacks.align import (
    AlignConfig,
    ContinueConfig,
    JointConfig,
    OnewayConfig,
    Plan,
    StitchConfig,
    aim_of,
    begin,
    plan,
)
from weft.compose.stacks.body import vector_of
from weft.compose.stacks.sauce import SauceConfig
from weft.compose.stacks.stack import AffineConfig, PostConfig, PreConfig, ScaledConfig, Seam, Stack, uniform
from weft.errors import ConfigError
from weft.model.config import num_layer_parameters

POST = PostConfig()
STITCH, ONEWAY, JOINT = StitchConfig(training=TRAINING), OnewayConfig(training=TRAINING), JointConfig(training=TRAINING)
ALL = JointConfig(training=TRAINING, exits="all")
SAUCE = SauceConfig(training=TRAINING, per_round=4)
CONTINUE = ContinueConfig(training=TRAINING)
# What is trained, the number of members, and which of them change.
KINDS: dict[str, tuple[AlignConfig, int, set[int]]] = {
    "stitch": (STITCH, 2, set()),
    "oneway": (ONEWAY, 2, {1}),
    "sauce": (SAUCE, 2, {0}),
    "joint": (JOINT, 2, {0, 1}),
    "all exits": (ALL, 2, {0, 1}),
    "continue": (CONTINUE, 1, {0}),
    "oneway of three": (OnewayConfig(training=TRAINING, member=2), 3, {2}),
    "sauce of three": (SauceConfig(training=TRAINING, member=1, per_round=4), 3, {1}),
}


def made(num: int) -> Stack:
    return stacked(POST, *range(1, num + 1))


@pytest.mark.parametrize(("config", "num", "changed"), KINDS.values(), ids=KINDS)
def test_what_is_frozen_stays_as_it_is(config: AlignConfig, num: int, changed: set[int]) -> None:
    stack, before = made(num), [vector_of(each) for each in made(num).bodies]
    space = stack.space.digest
    aligned = begin(config, stack, draw())
    aligned.run()
    found = [not torch.equal(vector_of(each), old) for each, old in zip(aligned.stack.bodies, before, strict=True)]
    assert {number for number, is_other in enumerate(found) if is_other} == changed
    assert all(torch.equal(vector_of(each), old) for each, old in zip(stack.bodies, before, strict=True))
    fresh = type(stack.space)(
        stack.space.embed, stack.space.norm, stack.space.head, stack.space.norm_eps, stack.space.tokenizer
    )
    assert fresh.digest == space  # hashed anew
    assert aligned.stack.space is stack.space
    assert not any(parameter.requires_grad for each in aligned.stack.bodies for parameter in each.parameters())


@pytest.mark.parametrize(("config", "num", "changed"), KINDS.values(), ids=KINDS)
def test_tokens_to_come_change_no_logits_after_alignment(config: AlignConfig, num: int, changed: set[int]) -> None:
    aligned = begin(config, made(num), draw())
    aligned.run()
    tokens = batch().tokens
    place, later = SEQ_LEN // 2, tokens.clone()
    later[:, place + 1 :] = (later[:, place + 1 :] + 1) % VOCAB
    before, after = aligned.stack.logits(tokens), aligned.stack.logits(later)
    assert torch.allclose(before[:, : place + 1], after[:, : place + 1], atol=1e-5)
    assert not torch.allclose(before[:, place + 1 :], after[:, place + 1 :], atol=1e-2)


@pytest.mark.parametrize(("config", "num", "changed"), KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("stop", [2, 4, 5])  # of a sauce inside a round, between two, inside the next
def test_what_was_killed_goes_on_to_the_same_bits(config: AlignConfig, num: int, changed: set[int], stop: int) -> None:
    whole, first, second = (begin(config, made(num), draw()) for _ in range(3))
    losses = whole.run()
    begun = first.run(until=stop)
    second.load(first.state())
    assert begun + second.run() == losses
    ends = whole.state().tensors, second.state().tensors
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize("config", [STITCH, ONEWAY, JOINT, ALL], ids=["stitch", "oneway", "joint", "all exits"])
def test_the_loss_falls(config: AlignConfig) -> None:
    training = msgspec.structs.replace(TRAINING, steps=30)
    aligned = begin(msgspec.structs.replace(config, training=training), made(2), lambda _number: batch())
    losses = aligned.run()
    assert losses[-1] < losses[0] - 0.1


def test_the_loss_of_all_exits_is_their_mean() -> None:
    stack, found = made(3), batch()
    exits = stack.exits(found.tokens)
    each = [float(stack.space.loss(x, found.targets)) for x in exits]

    def first_loss(config: AlignConfig) -> float:
        return begin(config, stack, lambda _number: found).step()

    assert first_loss(JOINT) == pytest.approx(each[2], abs=1e-5)
    assert first_loss(ALL) == pytest.approx(sum(each) / 3, abs=1e-5)
    assert first_loss(OnewayConfig(training=TRAINING, member=1)) == pytest.approx(each[1], abs=1e-5)


@pytest.mark.parametrize("handover", [POST, ScaledConfig(alpha=3.0)])
def test_a_stitch_begins_with_what_the_seam_did_and_is_a_map_afterwards(handover: PostConfig | ScaledConfig) -> None:
    stack, tokens = stacked(handover, 1, 2), batch().tokens
    begun = begin(STITCH, stack, draw())
    assert torch.allclose(begun.stack.logits(tokens), stack.logits(tokens), atol=1e-4)
    begun.run()
    matrix = begun.stack.maps[0]
    assert begun.stack.seams == uniform(AffineConfig(), 2)
    assert matrix is not None
    assert matrix.shape == (WIDTH + 1, WIDTH)
    assert matrix[-1].any()
    again = begin(STITCH, begun.stack, draw())
    assert torch.equal(again.stack.logits(tokens), begun.stack.logits(tokens))


def test_one_way_is_the_gradient_with_all_below_frozen() -> None:
    """It is that of the joint loss, to the upper member's parameters."""
    stack, found = made(2), batch()
    oneway, joint = (begin(each, stack, lambda _number: found) for each in (ONEWAY, JOINT))

    def upper(of: object, name: str) -> Tensor:
        alone = of._trained[name]  # type: ignore[attr-defined]
        return alone.gradient.clone()

    for each in (oneway, joint):
        each._loss(0).backward()
    assert torch.allclose(upper(oneway, "member 1"), upper(joint, "member 1"), atol=1e-6)


def refused(config: AlignConfig, stack: Stack) -> Callable[[], object]:
    return lambda: begin(config, stack, draw())


def test_what_does_not_fit_the_stack_is_refused() -> None:
    pre = stacked(PreConfig(), 1, 2)
    for wrong, word in (
        (refused(StitchConfig(training=TRAINING, seam=1), made(2)), "seam: 1"),
        (refused(STITCH, pre), 'of type "pre"'),
        (refused(OnewayConfig(training=TRAINING, member=0), made(2)), "member: 0"),
        (refused(OnewayConfig(training=TRAINING, member=2), made(2)), "member: 2"),
        (refused(CONTINUE, made(2)), "a single member"),
        (refused(SauceConfig(training=TRAINING, member=1), made(2)), "none above it"),
        (refused(SAUCE, pre), "root mean square 1"),
    ):
        with pytest.raises(ConfigError, match=word):
            wrong()


def test_configs_survive_a_file() -> None:
    configs = [config for config, _, _ in KINDS.values()]
    assert msgspec.json.decode(msgspec.json.encode(configs), type=list[AlignConfig]) == configs


# --- what it takes ---

A_LAYER = num_layer_parameters(CONFIG)
MATRICES = A_LAYER - 2 * WIDTH  # but its two norms
FORWARD = 2 * (2 * MATRICES + 4 * WIDTH * SEQ_LEN)  # of two layers, a token
BACK = 2 * (2 * MATRICES + 8 * WIDTH * SEQ_LEN)
WEIGHTS = 2 * 2 * MATRICES
HEAD = 4 * VOCAB * WIDTH


@pytest.mark.parametrize(
    ("config", "flops"),
    [
        (STITCH, 2 * FORWARD + BACK + HEAD),
        (ONEWAY, 2 * FORWARD + BACK + WEIGHTS + HEAD),
        (JOINT, 2 * (FORWARD + BACK + WEIGHTS) + HEAD),
        (ALL, 2 * (FORWARD + BACK + WEIGHTS) + 2 * HEAD),
        # latents; one correction; a step with a loss of its own
        (SAUCE, FORWARD + (FORWARD + BACK + HEAD) + (FORWARD + BACK + WEIGHTS + HEAD)),
    ],
    ids=["stitch", "oneway", "joint", "all exits", "sauce"],
)
def test_a_plan_says_steps_bytes_and_operations(config: AlignConfig, flops: float) -> None:
    found, tokens = plan(config, made(2), 4, SEQ_LEN), 6 * 4 * SEQ_LEN
    assert (found.num_steps, found.num_tokens) == (6, tokens)
    assert found.received_nbytes == 4 * 2 * A_LAYER  # the other member
    assert found.latents_nbytes == 4 * tokens * WIDTH
    assert found.flops == pytest.approx(flops * tokens)
    trained = {"StitchConfig": (WIDTH + 1) * WIDTH, "JointConfig": 4 * A_LAYER}
    assert found.num_trained == trained.get(type(config).__name__, 2 * A_LAYER)


def test_a_single_member_needs_nobody() -> None:
    found = plan(CONTINUE, made(1), 4, SEQ_LEN)
    assert (found.received_nbytes, found.latents_nbytes) == (0, 0)
    assert found.flops == pytest.approx((FORWARD + BACK + WEIGHTS + HEAD) * found.num_tokens)


def test_layers_that_are_cut_off_cost_nothing() -> None:
    whole = made(2)
    cut = Stack(whole.space, whole.bodies, (Seam(handover=POST, cut_first=1),))
    found: tuple[Plan, ...] = tuple(plan(JOINT, each, 4, SEQ_LEN) for each in (whole, cut))
    assert found[0].flops - found[1].flops == pytest.approx((FORWARD + BACK + WEIGHTS) / 2 * found[0].num_tokens)


def test_what_lies_above_the_last_exit_does_not_compute() -> None:
    below = OnewayConfig(training=TRAINING, member=1)
    assert plan(below, made(3), 4, SEQ_LEN).flops == plan(below, made(2), 4, SEQ_LEN).flops
    assert aim_of(below, made(3)).num == 2
