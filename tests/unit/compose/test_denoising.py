"""A member that learns to tell what is masked, and what it is worth below a causal one, token by token."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from unit.compose.stacks.small import CONFIG, SEQ_LEN, TRAINING, VOCAB, batch, draw, member, space, text, vector
from weft.compose.blocks.denoise import BertConfig, bert, denoising_loss, mask_row, see_all, spans
from weft.compose.denoising import Denoising, DenoisingDescent, Masks, below
from weft.compose.descent import DescentConfig, windows
from weft.compose.space import normed
from weft.compose.stacks.body import body
from weft.data.rows import Batch
from weft.model.transformer import SectionModule


def descent(masks: Masks, training: DescentConfig = TRAINING, seed: int = 5) -> DenoisingDescent:
    return DenoisingDescent(masks, training, space(), (CONFIG, vector(1)), draw(), seed)


@pytest.mark.parametrize("masks", ["bert", "spans"])
def test_a_step_asks_for_what_is_masked_by_seed_and_step(masks: Masks) -> None:
    made = descent(masks)
    for number in range(3):
        module, tokens = body(CONFIG, made.vector.clone()), draw()(number).tokens
        drawn = bert(BertConfig(), tokens, VOCAB, 5, number) if masks == "bert" else spans(tokens, 5, number)
        assert made.step() == pytest.approx(float(denoising_loss(space(), module, drawn)), abs=1e-5)


def test_a_denoiser_that_was_stopped_goes_on_to_the_same_bits() -> None:
    whole, first, second, other = descent("spans"), descent("spans"), descent("spans"), descent("spans", seed=6)
    whole.run()
    other.run()
    first.run(until=3)
    second.load(first.state())
    second.run()
    assert torch.equal(second.vector, whole.vector)
    assert not torch.equal(other.vector, whole.vector)


def test_a_member_learns_to_tell_what_is_masked() -> None:
    training, held = DescentConfig(steps=80, lr=1e-2, warmup_steps=5), windows(text(), SEQ_LEN, 16, 99)(0)
    work = Denoising(
        space=space(), body=member(1), masks="spans", training=training, batch_size=4, seq_len=SEQ_LEN, seed=5
    )
    assert work.tokens == 80 * 4 * SEQ_LEN
    made = descent("spans", training)
    made.run()
    before, after = (work.told(each, held) for each in (work.body, body(CONFIG, made.vector)))
    assert after < before - 0.5
    small, large = (work.told(body(CONFIG, made.vector), held, size) for size in (16, 64))
    assert small == pytest.approx(large, abs=1e-5)


def reference(tokens: Tensor, place: int) -> dict[str, Tensor]:
    """Return logits of the token after a place of tokens up to there: nothing that comes later is even in memory."""
    ends, lower, top = space(), member(1), member(2)
    so_far = ends.begin(tokens[None, : place + 1])
    on = top(normed(see_all(lower, so_far), ends.norm_eps))
    causal = top(normed(lower(so_far), ends.norm_eps))
    asked = see_all(lower, torch.cat((so_far, mask_row(ends)[None, None]), dim=1))
    found = {"stack": on, "masked": causal, "top": top(so_far), "denoiser": asked}
    logits = {name: ends.logits(x[0, -1]) for name, x in found.items()}
    return logits | {"ensemble": ((logits["top"].softmax(-1) + logits["denoiser"].softmax(-1)) / 2).log()}


@pytest.mark.parametrize(("num", "places"), [(1, [10]), (3, [2, 6, 10]), (99, list(range(11)))])
def test_each_token_is_asked_for_by_those_before_it_alone(num: int, places: list[int]) -> None:
    found = below(space(), member(1), member(2), batch(), num)
    for row, tokens in enumerate(batch().tokens):
        wanted = [(reference(tokens, place), tokens[place + 1]) for place in places]
        for name, losses in found._asdict().items():
            slow = torch.stack([cross_entropy(logits[name], target) for logits, target in wanted]).mean()
            assert float(losses[row]) == pytest.approx(float(slow), abs=1e-4), name


def test_of_many_places_a_few_are_asked_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, rows = below(space(), member(1), member(2), batch(), 9), list[int]()

    def noted(module: SectionModule, x: Tensor, num_seen: Tensor | None = None) -> Tensor:
        rows.append(len(x))
        return see_all(module, x, num_seen)

    monkeypatch.setattr("weft.compose.blocks.denoise.see_all", noted)
    monkeypatch.setattr("weft.compose.denoising.AT_ONCE", 4 * SEQ_LEN)
    parts = below(space(), member(1), member(2), batch(), 9)
    assert rows == 2 * len(batch().tokens) * [4, 4, 1]
    for one, other in zip(whole, parts, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_what_both_hold_for_all_but_impossible_has_a_loss_when_asked_together() -> None:
    ends, sure = space(), [body(CONFIG, 60 * vector(number)) for number in (1, 2)]
    ends = replace(ends, head=1e4 * ends.head)
    found = below(ends, *sure, batch(), 3)
    assert bool((found.denoiser > 1e3).all())
    assert bool(found.ensemble.isfinite().all())


def test_later_tokens_change_nothing() -> None:
    found = batch()
    later = found.tokens.clone()
    later[:, -1] = (later[:, -1] + 1) % VOCAB  # what the last place is asked for
    one, other = (below(space(), member(1), member(2), Batch(each, each), 1) for each in (found.tokens, later))
    assert not torch.equal(one.stack, other.stack)
    cut = below(space(), member(1), member(2), Batch(found.tokens[:, :-1], found.tokens[:, :-1]), SEQ_LEN)
    whole = below(space(), member(1), member(2), found, SEQ_LEN)
    last = below(space(), member(1), member(2), found, 1)
    assert torch.allclose(whole.stack * (SEQ_LEN - 1), cut.stack * (SEQ_LEN - 2) + last.stack, atol=1e-4)
