"""Stacks: alone a member is itself, raw handovers make a decoder, and nothing looks ahead."""

from dataclasses import replace

import msgspec
import pytest
import torch
from torch.nn.functional import cross_entropy

from unit.compose.stacks.small import CONFIG, SEQ_LEN, VOCAB, WIDTH, batch, member, space, stacked
from weft.compose.stacks.body import body, identity, layers_of
from weft.compose.stacks.stack import (
    AffineConfig,
    Handover,
    PostConfig,
    PreConfig,
    ScaledConfig,
    Seam,
    Stack,
    handed_over,
    identity_map,
    losses_of,
    uniform,
    whole,
)
from weft.data.rows import Batch
from weft.errors import ConfigError
from weft.model.config import Llama3Scaling, ModelConfig
from weft.model.flat import assemble

HANDOVERS = (PostConfig(), PreConfig(), ScaledConfig(alpha=3.0), AffineConfig())


def with_handover(handover: Handover, *seeds: int) -> Stack:
    """Return a stack whose maps, where it has any, are no identities."""
    found, map_ = space(), identity_map(WIDTH).cumsum(1)
    maps = tuple(map_ if isinstance(handover, AffineConfig) else None for _ in seeds[1:])
    return Stack(found, tuple(map(member, seeds)), uniform(handover, len(seeds)), maps)


def test_a_stack_of_one_member_is_the_decoder_that_the_member_is() -> None:
    stack = stacked(PreConfig(), 1)
    config, found = whole(stack)
    assert torch.allclose(stack.logits(batch().tokens), assemble(config, found)(batch().tokens), atol=1e-5)


@pytest.mark.parametrize("handover", [PostConfig(), PreConfig()], ids=["post", "pre"])
def test_an_identity_on_top_changes_no_logits(handover: Handover) -> None:
    alone = stacked(PreConfig(), 1)
    grown = Stack(alone.space, (*alone.bodies, body(CONFIG, identity(CONFIG, 2))), uniform(handover, 2))
    tokens = batch().tokens
    assert (grown.logits(tokens) - alone.logits(tokens)).abs().max() < 1e-4
    other = Stack(alone.space, (*alone.bodies, member(2)), uniform(handover, 2))
    assert (other.logits(tokens) - alone.logits(tokens)).abs().max() > 1e-2


@pytest.mark.parametrize("loops", [(1, 1), (2, 3)])
@pytest.mark.parametrize("handover", HANDOVERS, ids=lambda each: type(each).__name__)
def test_tokens_to_come_change_no_logits(handover: Handover, loops: tuple[int, int]) -> None:
    stack, tokens = replace(with_handover(handover, 1, 2), loops=loops), batch().tokens
    place = SEQ_LEN // 2
    later = tokens.clone()
    later[:, place + 1 :] = (later[:, place + 1 :] + 1) % VOCAB
    before, after = stack.logits(tokens), stack.logits(later)
    assert torch.allclose(before[:, : place + 1], after[:, : place + 1], atol=1e-6)
    assert not torch.allclose(before[:, place + 1 :], after[:, place + 1 :], atol=1e-2)


def test_what_is_handed_over_is_what_the_handover_says() -> None:
    x = 5 * space().begin(batch().tokens).cumsum(1)
    n = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    map_ = torch.randn(WIDTH + 1, WIDTH, generator=torch.Generator().manual_seed(1))
    assert handed_over(PreConfig(), x, 1e-5) is x
    assert torch.allclose(handed_over(PostConfig(), x, 1e-5), n, atol=1e-5)
    assert torch.allclose(handed_over(ScaledConfig(alpha=2.5), x, 1e-5), 2.5 * n, atol=1e-5)
    affine = handed_over(AffineConfig(), x, 1e-5, map_)
    assert torch.allclose(affine, n @ map_[:WIDTH] + map_[WIDTH], atol=1e-4)
    assert torch.allclose(handed_over(AffineConfig(), x, 1e-5, identity_map(WIDTH)), n, atol=1e-5)


@pytest.mark.parametrize("handover", HANDOVERS, ids=lambda each: type(each).__name__)
def test_a_stack_computes_what_its_members_do_one_after_the_other(handover: Handover) -> None:
    stack, tokens = with_handover(handover, 1, 2, 3), batch().tokens
    x, expected = stack.space.begin(tokens), []
    for number, module in enumerate(stack.bodies):
        if number:
            x = handed_over(handover, x, stack.space.norm_eps, stack.maps[number - 1])
        x = module(x)
        expected.append(x)
    exits = stack.exits(tokens)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(exits, expected, strict=True))
    assert len(stack.exits(tokens, num=2)) == 2
    for exit in (0, 1, 2, -1):
        assert torch.equal(stack.logits(tokens, exit=exit), stack.space.logits(expected[exit]))


def test_layers_that_are_cut_off_do_not_compute() -> None:
    stack = stacked(PostConfig(), 1, 2)
    cut = Stack(stack.space, stack.bodies, (Seam(handover=PostConfig(), cut_last=1, cut_first=1),))
    one = msgspec.structs.replace(CONFIG, num_layers=1)
    short = [module.layers[layer] for module, layer in zip(stack.bodies, "01", strict=True)]
    assert cut.kept(0) == range(1)
    assert cut.kept(1) == range(1, 2)
    parts = [body(one, torch.cat([each.flatten() for each in _in_order(layer)])) for layer in short]
    expected = Stack(stack.space, tuple(parts), uniform(PostConfig(), 2))
    tokens = batch().tokens
    assert torch.equal(cut.logits(tokens), expected.logits(tokens))
    assert not torch.equal(cut.logits(tokens), stack.logits(tokens))


def _in_order(layer: torch.nn.Module) -> list[torch.Tensor]:
    """Return the tensors of a layer as a body of one layer has them: matrices first."""
    found = dict(layer.named_parameters())
    matrices = ("attention.qkv.weight", "attention.out.weight", "ffn.gate_up.weight", "ffn.down.weight")
    return [*(found[name] for name in matrices), found["attention_norm.weight"], found["ffn_norm.weight"]]


def test_a_member_that_loops_reads_what_it_wrote_at_the_same_position() -> None:
    stack, tokens = stacked(PostConfig(), 1, 2), batch().tokens
    looped = Stack(stack.space, stack.bodies, stack.seams, loops=(1, 3))
    twice = Stack(stack.space, (stack.bodies[0], *[stack.bodies[1]] * 3), uniform(PostConfig(), 4))
    assert torch.equal(looped.logits(tokens), twice.logits(tokens))
    assert not torch.equal(looped.logits(tokens), stack.logits(tokens))


def test_texts_of_a_row_do_not_see_each_other() -> None:
    stack, tokens = stacked(PostConfig(), 1, 2), batch().tokens
    half = SEQ_LEN // 2
    positions = torch.arange(SEQ_LEN).remainder(half).expand_as(tokens)
    apart = torch.cat((stack.logits(tokens[:, :half]), stack.logits(tokens[:, half:])), dim=1)
    assert torch.allclose(stack.logits(tokens, positions), apart, atol=1e-5)


def test_losses_are_those_of_each_sequence() -> None:
    stack = stacked(PostConfig(), 1, 2)
    tokens, targets, _ = batch()
    targets = targets.clone()
    targets[1, 3:] = -100
    mixed = Batch(tokens, targets)
    found = stack.losses(mixed, size=3)
    logits = stack.logits(tokens)
    each = [float(cross_entropy(logits[row], targets[row])) for row in range(len(tokens))]
    assert torch.allclose(found, torch.tensor(each), atol=1e-6)
    assert torch.allclose(stack.losses(mixed, exit=0), losses_of(stack.logits(tokens, exit=0), targets), atol=1e-6)


# --- as one decoder ---


def test_a_stack_with_raw_handovers_is_one_deeper_decoder() -> None:
    made = stacked(PreConfig(), 1, 2)
    seam = Seam(handover=PreConfig(), cut_last=1)
    deeper = msgspec.structs.replace(CONFIG, num_layers=3, max_seq_len=32)
    bodies = (*made.bodies, member(3, deeper))
    stack = Stack(made.space, bodies, (*made.seams, seam))
    config, found = whole(stack)
    assert (config.num_layers, config.is_tied, config.max_seq_len) == (6, False, 32)
    model, tokens = assemble(config, found), batch().tokens
    assert torch.allclose(model(tokens), stack.logits(tokens), atol=1e-4)
    assert torch.equal(model.embed.weight, stack.space.embed)
    last = layers_of(bodies[2])[2]["ffn.down.weight"]
    assert torch.equal(model.get_parameter("layers.5.ffn.down.weight"), last)


@pytest.mark.parametrize(
    "handover", [PostConfig(), ScaledConfig(alpha=2.0), AffineConfig()], ids=lambda e: type(e).__name__
)
def test_a_norm_between_members_is_in_no_decoder(handover: Handover) -> None:
    with pytest.raises(ConfigError, match="seam 0: a decoder norms nothing between its layers"):
        whole(with_handover(handover, 1, 2))


def test_loops_are_in_no_decoder() -> None:
    made = stacked(PreConfig(), 1, 2)
    with pytest.raises(ConfigError, match="no loops"):
        whole(Stack(made.space, made.bodies, made.seams, loops=(1, 2)))


SCALING = Llama3Scaling(factor=8.0, original_seq_len=16)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ffn_width", 40),
        ("num_kv_heads", 1),
        ("head_width", 4),
        ("rope_theta", 500_000.0),
        ("rope_scaling", SCALING),
        ("norm_eps", 1e-6),
        ("has_qk_norm", True),
        ("has_qkv_bias", True),
        ("window", 4),
    ],
)
def test_layers_of_another_shape_are_refused_by_name(field: str, value: object) -> None:
    other: ModelConfig = msgspec.structs.replace(CONFIG, **{field: value})
    stack = Stack(space(), (member(1), member(2, other)), uniform(PreConfig(), 2))
    assert stack.logits(batch().tokens).isfinite().all()  # as a stack it is fine
    with pytest.raises(ConfigError, match=f"member 1 has others: {field}"):
        whole(stack)


def test_a_space_of_another_norm_is_in_no_decoder() -> None:
    other = msgspec.structs.replace(CONFIG, norm_eps=1e-3)
    with pytest.raises(ConfigError, match="member 0 has others: norm_eps"):
        whole(Stack(space(), (member(1, other),)))


# --- what does not belong together ---


def test_what_does_not_belong_together_is_refused() -> None:
    ends, one, two = space(), member(1), member(2)
    wide = msgspec.structs.replace(CONFIG, width=32)
    seams = uniform(PostConfig(), 2)
    for wrong, word in (
        (lambda: Stack(ends, ()), "no members"),
        (lambda: Stack(ends, (one, two)), "a seam between each two"),
        (lambda: Stack(ends, (member(1, wide),)), "width 32"),
        (lambda: Stack(ends, (one, two), seams, loops=(1,)), "loops"),
        (lambda: Stack(ends, (one, two), seams, loops=(0, 1)), "loops"),
        (lambda: Stack(ends, (one, two), uniform(AffineConfig(), 2)), "affine"),
        (lambda: Stack(ends, (one, two), seams, (identity_map(WIDTH),)), "affine"),
        (lambda: Stack(ends, (one, two), (Seam(handover=PostConfig(), cut_first=2),)), "all are cut off"),
    ):
        with pytest.raises(ConfigError, match=word):
            wrong()


def test_a_seam_survives_a_file() -> None:
    seams = [Seam(handover=each, cut_last=2, cut_first=1) for each in HANDOVERS]
    assert msgspec.json.decode(msgspec.json.encode(seams), type=list[Seam]) == seams
