"""Masks against their papers' numbers, bodies that see all, and the one honest way to ask a top above them."""

from collections.abc import Callable
from itertools import groupby

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from weft.compose.blocks.denoise import (
    EXTREME,
    REGULAR,
    SEQUENTIAL,
    UL2,
    BertConfig,
    Denoiser,
    Masked,
    StackedBody,
    bert,
    denoising_loss,
    logits,
    mask_row,
    prefix_logits,
    see_all,
    spans,
)
from weft.compose.blocks.noise import normals
from weft.compose.space import Space, normed
from weft.errors import ConfigError
from weft.ids import Digest
from weft.model.config import ModelConfig
from weft.model.flat import over
from weft.model.initial import initial_vector
from weft.model.layers import Block, rotate, rotation
from weft.model.sections import Section
from weft.model.transformer import SectionModule
from weft.sync.method.choices import AdamWConfig
from weft.training import optimizer

VOCAB, WIDTH, LENGTH = 13, 16, 8
CONFIG = ModelConfig(
    vocab_size=VOCAB, num_layers=2, num_heads=2, num_kv_heads=2, width=WIDTH, ffn_width=24, max_seq_len=64
)
SPACE = Space(
    normed(normals((VOCAB, WIDTH), 0, "embed"), 0.0),
    torch.ones(WIDTH),
    normals((VOCAB, WIDTH), 0, "head"),
    CONFIG.norm_eps,
    Digest("0" * 64),
)
TOKENS = torch.arange(2 * LENGTH).view(2, LENGTH) * 5 % VOCAB
LONG = torch.arange(40 * 200).view(40, 200) * 7 % VOCAB


def body_of(seed: int, config: ModelConfig = CONFIG) -> SectionModule:
    section = Section(1, 3, range(config.num_layers))
    vector = initial_vector(config, seed, section)
    vector += 0.2 * normals((len(vector),), seed, "moved")
    with torch.device("meta"):
        module = SectionModule(config, section)
    return over(module, vector).module


BODY, TOP = body_of(1), body_of(2)


# --- masks ---


def test_bert_asks_some_tokens_and_masks_most_of_those() -> None:
    found = bert(BertConfig(), LONG, VOCAB, 1, 2)
    is_asked = found.targets >= 0
    assert (is_asked.sum(1) == 30).all()  # 15 % of 200
    assert torch.equal(found.targets[is_asked], LONG[is_asked])
    assert (is_asked | ~found.is_masked).all()
    assert torch.equal(found.tokens[~is_asked], LONG[~is_asked])
    num, is_seen = int(is_asked.sum()), is_asked & ~found.is_masked
    assert int(found.is_masked.sum()) / num == pytest.approx(0.8, abs=0.05)
    is_other = is_seen & (found.tokens != LONG)  # of another token one in VOCAB is the same
    assert int(is_other.sum()) / num == pytest.approx(0.1 * (1 - 1 / VOCAB), abs=0.03)
    assert len(found.tokens[is_other].unique()) == VOCAB


def runs(mask: Tensor) -> list[tuple[bool, int]]:
    return [(is_masked, len(list(each))) for is_masked, each in groupby(mask.tolist())]


@pytest.mark.parametrize("denoiser", UL2)
def test_a_denoiser_masks_its_share_in_spans_of_its_length(denoiser: Denoiser) -> None:
    found = spans(LONG, 1, 2, [denoiser])
    assert torch.equal(found.tokens, LONG)
    assert torch.equal(found.targets, LONG.masked_fill(~found.is_masked, -100))
    assert (found.is_masked.sum(1) == round(denoiser.share * 200)).all()
    for row in found.is_masked:
        masked = [length for is_masked, length in runs(row) if is_masked]
        if denoiser.mean_length is None:
            assert runs(row) == [(False, 150), (True, 50)]
        else:
            assert len(masked) == max(1, round(denoiser.share * 200 / denoiser.mean_length))
            assert runs(row)[0][0] is False
            assert runs(row)[-1][0] is True


def test_ul2_has_seven_denoisers_and_takes_each_equally_often() -> None:
    assert [len(each) for each in (REGULAR, SEQUENTIAL, EXTREME)] == [2, 1, 4]
    assert {(each.share, each.mean_length) for each in UL2} == {
        (0.15, 3), (0.15, 8), (0.25, None), (0.5, 3), (0.5, 8), (0.15, 64), (0.5, 64)
    }  # fmt: skip
    texts = torch.zeros(700, 128, dtype=torch.int64)
    shares = spans(texts, 0, 0).is_masked.float().mean(1).round(decimals=2)
    counts = {share: int((shares == torch.tensor(share)).sum()) for share in (0.15, 0.25, 0.5)}
    assert sum(counts.values()) == 700
    for share, num in ((0.15, 3), (0.25, 1), (0.5, 3)):
        assert counts[share] == pytest.approx(100 * num, rel=0.3)


def test_all_cuts_into_spans_are_equally_likely() -> None:
    found = spans(torch.zeros(3000, 6, dtype=torch.int64), 0, 0, [Denoiser(0.5, 2)])
    kinds, counts = np.unique(found.is_masked.numpy(), axis=0, return_counts=True)
    assert len(kinds) == 4  # 3 kept in two pieces, 3 masked in two
    assert counts.min() > 0.85 * 750


@pytest.mark.parametrize(
    "draw", [lambda seed, step: bert(BertConfig(), LONG, VOCAB, seed, step), lambda seed, step: spans(LONG, seed, step)]
)
def test_masks_belong_to_seed_and_step(draw: Callable[[int, int], Masked]) -> None:
    first = draw(1, 2)
    assert all(torch.equal(*pair) for pair in zip(first, draw(1, 2), strict=True))
    assert not torch.equal(first.is_masked, draw(1, 3).is_masked)
    assert not torch.equal(first.is_masked, draw(2, 2).is_masked)
    assert len(first.is_masked.unique(dim=0)) > 20  # of 40 texts


def test_what_cannot_be_masked_is_refused() -> None:
    with pytest.raises(ConfigError, match="one token"):
        spans(torch.zeros(1, 1, dtype=torch.int64), 0, 0)
    with pytest.raises(ConfigError, match="at most 1"):
        BertConfig(other=0.6, same=0.6)
    assert spans(torch.zeros(1, 2, dtype=torch.int64), 0, 0).is_masked.tolist() == [[False, True]]
    assert bert(BertConfig(), torch.zeros(1, 1, dtype=torch.int64), VOCAB, 0, 0).targets.tolist() == [[0]]


# --- bodies ---


def reference_of_all(body: SectionModule, x: Tensor) -> Tensor:
    """Return an encoder's output, written out: attention without any mask."""
    turn = rotation(body.angle_bits.view(torch.float32), 0, x.shape[1])
    for layer in body.layers.values():
        assert isinstance(layer, Block)
        h = normed(x, CONFIG.norm_eps) * layer.attention_norm.weight
        q, k, v = (each.view(*x.shape[:2], 2, 8) for each in (h @ layer.attention.qkv.weight.T).chunk(3, -1))
        weights = (torch.einsum("bqhd,bkhd->bhqk", rotate(q, turn), rotate(k, turn)) / 8**0.5).softmax(-1)
        x = x + torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2) @ layer.attention.out.weight.T
        h = normed(x, CONFIG.norm_eps) * layer.ffn_norm.weight
        gate, up = (h @ layer.ffn.gate_up.weight.T).chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ layer.ffn.down.weight.T
    return x


def test_a_body_that_sees_all_is_an_encoder_of_the_same_layers() -> None:
    x = SPACE.begin(TOKENS)
    found = see_all(BODY, x)
    torch.testing.assert_close(found, reference_of_all(BODY, x), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(found, BODY(x), atol=1e-2)
    some = see_all(BODY, x, torch.tensor([3, LENGTH]))
    torch.testing.assert_close(some[1], found[1], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(some[:1, :3], see_all(BODY, x[:1, :3]), atol=1e-5, rtol=1e-4)


def test_a_masked_token_does_not_go_in() -> None:
    masked = spans(TOKENS, 0, 0, [Denoiser(0.4, 2)])
    other = masked._replace(tokens=torch.where(masked.is_masked, (TOKENS + 1) % VOCAB, TOKENS))
    assert torch.equal(denoising_loss(SPACE, BODY, masked), denoising_loss(SPACE, BODY, other))
    rows = torch.where(masked.is_masked[..., None], mask_row(SPACE), SPACE.begin(TOKENS))
    told = SPACE.logits(reference_of_all(BODY, rows))[masked.is_masked]
    torch.testing.assert_close(
        denoising_loss(SPACE, BODY, masked), cross_entropy(told, TOKENS[masked.is_masked]), atol=1e-5, rtol=1e-4
    )


def test_a_body_learns_to_tell_what_was_masked() -> None:
    texts = (torch.arange(8)[:, None] + torch.arange(24)) % VOCAB  # what is masked follows from what is beside it
    section = Section(1, 3, range(2))
    with torch.device("meta"):
        module = SectionModule(CONFIG, section)
    flat = over(module, initial_vector(CONFIG, 1, section))
    optimize, losses = optimizer.build(AdamWConfig(), flat), []
    for step in range(60):
        flat.zero_gradient()
        loss = denoising_loss(SPACE, flat.module, bert(BertConfig(), texts, VOCAB, 0, step))
        loss.backward()  # type: ignore[no-untyped-call]
        optimize.step(0.01)
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


# --- below a causal top ---

STACK = [StackedBody(BODY, sees_all=True), StackedBody(TOP, sees_all=False)]
PLACES = torch.arange(LENGTH)


def in_one_pass(tokens: Tensor) -> Tensor:
    """Return what must not be asked: the top's logits above a body that has seen the whole text."""
    return SPACE.logits(TOP(normed(see_all(BODY, SPACE.begin(tokens)), CONFIG.norm_eps)))


def test_above_a_body_that_sees_all_one_pass_leaks_and_is_refused() -> None:
    changed = TOKENS.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % VOCAB
    leaks = (in_one_pass(TOKENS) - in_one_pass(changed)).abs().amax(-1)
    assert (leaks[:, :5] > 1e-5).all()  # places before the change know of it
    with pytest.raises(ConfigError, match="member 0 sees all"):
        logits(SPACE, STACK, TOKENS)
    with pytest.raises(ConfigError, match="causal one on top"):
        prefix_logits(SPACE, STACK[::-1], TOKENS[0], PLACES)


def test_asked_by_prefixes_tokens_after_a_place_change_nothing_up_to_it() -> None:
    changed = TOKENS[0].clone()
    changed[5:] = (changed[5:] + 1) % VOCAB
    before, after = (prefix_logits(SPACE, STACK, each, PLACES) for each in (TOKENS[0], changed))
    torch.testing.assert_close(before[:5], after[:5])
    assert (before[5:] - after[5:]).abs().amax(-1).gt(1e-5).all()


def test_a_prefix_is_asked_as_a_text_of_its_own() -> None:
    found = prefix_logits(SPACE, STACK, TOKENS[0], PLACES)
    alone = [in_one_pass(TOKENS[:1, : place + 1])[0, -1] for place in range(LENGTH)]
    torch.testing.assert_close(found, torch.stack(alone), atol=1e-5, rtol=1e-4)
    some = prefix_logits(SPACE, STACK, TOKENS[0], torch.tensor([6, 2]))
    torch.testing.assert_close(some, found[[6, 2]], atol=1e-5, rtol=1e-4)


def test_causal_members_may_be_asked_in_one_pass() -> None:
    causal = [member._replace(sees_all=False) for member in STACK]
    found = logits(SPACE, causal, TOKENS)
    torch.testing.assert_close(found[0], prefix_logits(SPACE, causal, TOKENS[0], PLACES), atol=1e-5, rtol=1e-4)


def test_a_body_with_a_window_cannot_see_all() -> None:
    body = body_of(1, msgspec.structs.replace(CONFIG, window=4))
    with pytest.raises(ConfigError, match="see 4 at most"):
        see_all(body, SPACE.begin(TOKENS))
