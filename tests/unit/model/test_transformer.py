from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import cross_entropy, rms_norm

from weft.model.config import ModelConfig
from weft.model.layers import KVCache, RMSNorm, project, rotate, rotation
from weft.model.transformer import Transformer

Make = Callable[..., ModelConfig]
CPU = torch.device("cpu")


def tokens_of(config: ModelConfig, batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(0, config.vocab_size, (batch, length))


def test_no_token_sees_what_comes_after_it(variant: ModelConfig) -> None:
    model, tokens = Transformer(variant), tokens_of(variant)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % variant.vocab_size
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert (before[:, 7:] - after[:, 7:]).abs().amax(-1).gt(1e-6).all()


@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 8), (2, 5, 3, 8)])
@pytest.mark.parametrize("is_autocast", [False, True])
def test_the_norm_and_its_gradient_are_those_of_torch(shape: tuple[int, ...], is_autocast: bool) -> None:
    norm = RMSNorm(8, eps=1e-3)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(shape, requires_grad=True)
    grad = torch.randn(shape)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        found = torch.autograd.grad(norm(x), (x, norm.weight), grad)
    expected = torch.autograd.grad(rms_norm(x, (8,), norm.weight, 1e-3), (x, norm.weight), grad)
    torch.testing.assert_close(norm(x), rms_norm(x, (8,), norm.weight, 1e-3))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("has_bias", [False, True])
def test_cutting_the_weight_equals_cutting_the_result(has_bias: bool) -> None:
    layer, x = torch.nn.Linear(8, 10, bias=has_bias), torch.randn(2, 3, 8)
    with torch.no_grad():
        whole = project(layer, x, [7, 3])
    parts = project(layer, x, [7, 3])
    assert [part.shape[-1] for part in parts] == [7, 3]
    torch.testing.assert_close(parts, whole)
    weights = list(layer.parameters())
    grads = torch.randn(2, 3, 7), torch.randn(2, 3, 3)
    found = torch.autograd.grad(parts, weights, grads)
    torch.testing.assert_close(found, torch.autograd.grad(layer(x), weights, torch.cat(grads, -1)))


def test_attention_knows_distances_not_positions(small: Make) -> None:
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
    inverse = torch.tensor([1.0, 0.3, 0.1, 0.03])

    def score(q_at: int, k_at: int) -> float:
        return (rotate(q, rotation(inverse, q_at, 1)) * rotate(k, rotation(inverse, k_at, 1))).sum().item()

    assert score(5, 3) == pytest.approx(score(105, 103), abs=1e-4)
    assert abs(score(5, 3) - score(5, 4)) > 1e-3


@pytest.mark.parametrize("cut", [(1,) * 12, (5, 1, 1, 5), (12,), (3, 4, 5)])
def test_cached_logits_equal_uncached_however_the_text_is_cut(variant: ModelConfig, cut: tuple[int, ...]) -> None:
    model, tokens = Transformer(variant), tokens_of(variant)
    cache = KVCache(variant, batch=2, capacity=12, device=CPU)
    parts = [model(part, cache) for part in tokens.split(cut, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), atol=1e-5, rtol=1e-4)
    assert cache.length == 12


def test_a_cache_refuses_more_than_it_holds_and_can_be_cleared(small: Make) -> None:
    model = Transformer(small())
    cache = KVCache(small(), batch=1, capacity=4, device=CPU)
    tokens = tokens_of(small(), 1, 4)
    first = model(tokens, cache)
    with pytest.raises(ValueError, match="holds 4 tokens; 5 were given"):
        model(tokens[:, :1], cache)
    cache.clear()
    assert torch.equal(model(tokens, cache), first)


def test_next_logits_are_the_last_of_all_logits(variant: ModelConfig) -> None:
    model, tokens = Transformer(variant), tokens_of(variant)
    torch.testing.assert_close(model.next_logits(tokens), model(tokens)[:, -1])


def test_loss_is_the_mean_cross_entropy_in_nats(small: Make) -> None:
    model, tokens, targets = Transformer(small()), tokens_of(small()), tokens_of(small())
    probabilities = model(tokens).softmax(-1)
    picked = probabilities.gather(-1, targets[..., None])
    torch.testing.assert_close(model.loss(tokens, targets), -picked.log().mean())


def test_recomputed_activations_give_the_same_gradient(variant: ModelConfig) -> None:
    kept, recomputed = Transformer(variant), Transformer(variant, has_recompute=True)
    recomputed.load_state_dict(kept.state_dict())
    tokens, targets = tokens_of(variant), tokens_of(variant)
    for model in (kept, recomputed):
        model.loss(tokens, targets).backward()
    for a, b in zip(kept.parameters(), recomputed.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_recompute_keeps_fewer_activations(small: Make) -> None:
    def kept_numbers(model: Transformer) -> int:
        kept = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.loss(tokens_of(small(), 4, 32), tokens_of(small(), 4, 32))
        return kept

    config = small(num_layers=6)
    assert kept_numbers(Transformer(config, has_recompute=True)) < kept_numbers(Transformer(config)) / 2


def test_autocast_computes_in_bf16_close_to_fp32(variant: ModelConfig) -> None:
    model, tokens, targets = Transformer(variant), tokens_of(variant), tokens_of(variant)
    expected = model.loss(tokens, targets)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(tokens).dtype == torch.bfloat16
        found = model.loss(tokens, targets)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.02)
    found.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_a_few_steps_learn_a_repeating_text(variant: ModelConfig) -> None:
    model = Transformer(variant)
    text = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6] * 3])
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = model.loss(tokens, targets).item()
    for _ in range(30):
        optimizer.zero_grad()
        model.loss(tokens, targets).backward()
        optimizer.step()
    assert model.loss(tokens, targets).item() < first / 4


def test_the_head_of_a_tied_model_is_its_embedding(small: Make) -> None:
    tied, untied = Transformer(small(is_tied=True)), Transformer(small())
    assert tied.head_weight is tied.embed.weight
    assert untied.head_weight is not untied.embed.weight
    logits = tied(tokens_of(small()))
    assert logits.shape == (2, 12, small().vocab_size)
    assert cross_entropy(logits.flatten(0, 1), tokens_of(small()).flatten()).isfinite()


def test_a_model_without_memory_draws_no_values(variant: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each process that trains would load torch's compiler for it."""

    def refused(*_args: object) -> None:
        raise AssertionError("drawn")

    expected = Transformer(variant)
    monkeypatch.setattr(torch.nn.init, "normal_", refused)
    with torch.device("meta"):
        model = Transformer(variant)
    assert [(name, each.shape) for name, each in model.named_parameters()] == [
        (name, each.shape) for name, each in expected.named_parameters()
    ]
