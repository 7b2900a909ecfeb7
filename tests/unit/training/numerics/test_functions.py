"""The parts of a decoder in exact numbers: to the bit as they are defined, and their gradients near the plain ones."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, linear, rms_norm, scaled_dot_product_attention, silu

from unit.training.numerics import reference
from unit.training.numerics.test_grids import randn
from weft.training.numerics import functions, grids
from weft.training.numerics.decoder import seen
from weft.training.numerics.functions import Attention, CrossEntropy, Embedding, Gate, Linear, Norm, total_by

Part = Callable[..., Tensor]


def apply(part: Any, *given: Any) -> Tensor:
    found: Tensor = part.apply(*given)
    return found


def test_a_norm_is_that_of_its_definition() -> None:
    x, weight = 10 ** randn(6, 24, seed=1) * randn(6, 24, seed=2), randn(24, seed=3)
    found = apply(Norm, x, weight, 1e-5)
    assert np.array_equal(found.numpy(), [reference.norm(row, weight.numpy(), 1e-5) for row in x.numpy()])


def test_a_gate_is_that_of_its_definition() -> None:
    x = torch.cat((randn(3, 10, seed=1) * 5, torch.tensor([[-200.0, 200.0, -87.0, 0.0, 30.0] * 2])))
    gate, up = x.numpy()[:, :5], x.numpy()[:, 5:]
    assert np.array_equal(apply(Gate, x).numpy(), np.vectorize(reference.silu)(gate) * up)


def test_cross_entropy_is_that_of_its_definition() -> None:
    logits, targets = randn(7, 19, seed=1) * 6, torch.tensor([0, 18, 3, 3, 9, 1, 2])
    found = apply(CrossEntropy, logits, targets)
    assert found.item() == reference.cross_entropy(logits.numpy(), targets.tolist())
    more = torch.cat((logits, randn(2, 19, seed=2)))
    assert apply(CrossEntropy, more, torch.cat((targets, torch.tensor([-100, -100])))) == found
    assert apply(CrossEntropy, logits, torch.full((7,), -100)) == 0.0


@pytest.mark.parametrize("num", [5, 23])
def test_attention_is_that_of_its_definition(num: int) -> None:
    q, k, v = (randn(1, 1, num, 6, seed=seed) * 3 for seed in (1, 2, 3))
    found = apply(Attention, q, k, v, seen(num, None, None))
    assert np.array_equal(found[0, 0].numpy(), reference.attention(*(each[0, 0].numpy() for each in (q, k, v))))


def test_rows_of_one_place_are_added_in_any_order() -> None:
    x, places, order = 10 ** randn(300, 4, seed=1), torch.arange(300) % 7, torch.randperm(300)
    assert torch.equal(total_by(x[order], places[order], 7), total_by(x, places, 7))
    assert (total_by(x, places, 7)[2] / x[places == 2].double().sum(0) - 1).abs().max() < 1e-6


# --- gradients ---


def mixed(q: Tensor, k: Tensor, v: Tensor, looks: functions.Seen) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=looks.mask[:, None], enable_gqa=True)


NUM = 100  # tokens: more than are computed at a time
TEXTS = torch.cat((torch.arange(60), torch.arange(NUM - 60))).repeat(2, 1)
QKV = (randn(2, 4, NUM, 8, seed=1), randn(2, 2, NUM, 8, seed=2), randn(2, 2, NUM, 8, seed=3))
CASES: dict[str, tuple[Any, Part, tuple[Any, ...]]] = {
    "linear": (Linear, linear, (randn(50, 24, seed=1), randn(30, 24, seed=2), randn(30, seed=3))),
    "no bias": (Linear, linear, (randn(50, 24, seed=1), randn(30, 24, seed=2), None)),
    "norm": (
        Norm,
        lambda x, weight, eps: rms_norm(x, weight.shape, weight, eps),
        (randn(5, 9, 3, 12, seed=1), randn(12, seed=2), 1e-5),
    ),
    "gate": (Gate, lambda x: silu(x[:, :20]) * x[:, 20:], (randn(30, 40, seed=1) * 4,)),
    "embedding": (Embedding, lambda table, at: embedding(at, table), (randn(9, 5), torch.arange(24).view(4, 6) % 7)),
    "cross entropy": (CrossEntropy, cross_entropy, (randn(30, 19) * 4, torch.arange(30) % 19)),
    "targets left out": (CrossEntropy, cross_entropy, (randn(3, 9), torch.tensor([-100, 2, -100]))),
    "attention": (Attention, mixed, (*QKV, seen(NUM, None, None))),
    "window": (Attention, mixed, (*QKV, seen(NUM, 9, None))),
    "texts": (Attention, mixed, (*QKV, seen(NUM, None, TEXTS))),
    "texts and a window": (Attention, mixed, (*QKV, seen(NUM, 9, TEXTS))),
}


def gradients(part: Part, given: tuple[Any, ...]) -> list[Tensor]:
    """Return a value and its gradients by each tensor of floats."""
    held = [
        each.clone().requires_grad_() if isinstance(each, Tensor) and each.is_floating_point() else each
        for each in given
    ]
    y = part(*held)
    y.backward(randn(*y.shape, seed=99))  # type: ignore[no-untyped-call]
    return [y.detach(), *(each.grad for each in held if isinstance(each, Tensor) and each.grad is not None)]


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_near_the_plain_ones(case: str) -> None:
    exact, plain, given = CASES[case]
    found, expected = gradients(exact.apply, given), gradients(plain, given)
    assert len(found) == len(expected) >= 2
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 5e-6 * other.norm()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("piece", "tokens"), [(64, 7), (1 << 12, 32), (1 << 20, 1 << 12)])
def test_how_much_is_computed_at_a_time_changes_no_bit(
    case: str, piece: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, _, given = CASES[case]
    usual = gradients(exact.apply, given)
    for module in (functions, grids):
        monkeypatch.setattr(module, "PIECE", piece)
    monkeypatch.setattr(functions, "TOKENS", tokens)
    assert all(map(torch.equal, gradients(exact.apply, given), usual))


def test_rows_of_a_linear_layer_may_come_in_another_order() -> None:
    x, weight, order = 10 ** randn(64, 12, seed=1), randn(9, 12, seed=2), torch.randperm(64)
    up = 10 ** randn(64, 9, seed=3)

    def gradient(at: Tensor) -> Tensor:
        held = weight.clone().requires_grad_()
        apply(Linear, x[at], held, None).backward(up[at])  # type: ignore[no-untyped-call]
        assert held.grad is not None
        return held.grad

    assert torch.equal(gradient(order), gradient(torch.arange(64)))
