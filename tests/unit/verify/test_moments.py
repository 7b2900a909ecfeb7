"""What optimizers can hold: all that they are left with by gradients, and nothing that moves one number further."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.sync.merge import outer
from weft.sync.method.choices import AdamWConfig, InnerSgdConfig
from weft.verify.moments import is_possible, steepest

NUM, CLIP = 16, 1.0
OPTIMIZERS = [
    AdamWConfig(),
    AdamWConfig(beta2=0.999),
    AdamWConfig(beta1=0.0, beta2=0.5),
    AdamWConfig(beta1=0.95, beta2=0.9),
    InnerSgdConfig(momentum=0.9),
    InnerSgdConfig(),
]


def left_by(config: Any, gradients: list[list[float]]) -> dict[str, Any]:
    """Return what an optimizer holds after these gradients, each no longer than `CLIP`."""
    optimizer = outer.build(config)
    local, state = torch.zeros(NUM), optimizer.init(NUM)
    for number, each in enumerate(gradients, start=1):
        gradient = torch.tensor(each)
        gradient = gradient * min(1.0, CLIP / max(float(gradient.norm()), 1e-30))
        optimizer.apply(local, state, gradient, outer.StepContext(number=number, lr=1e-3, num_decayed=0))
    return {name: vector.numpy() for name, vector in state.items()}


numbers = st.one_of(st.just(0.0), st.floats(-2, 2, width=32), st.floats(0, 2**-60, width=32, allow_subnormal=False))


@settings(max_examples=40)
@given(
    config=st.sampled_from(OPTIMIZERS),
    gradients=st.lists(st.lists(numbers, min_size=NUM, max_size=NUM), min_size=1, max_size=30),
)
def test_whatever_gradients_leave_is_possible(config: Any, gradients: list[list[float]]) -> None:
    assert is_possible(config, CLIP, len(gradients), left_by(config, gradients))


def test_gradients_that_come_as_near_to_the_bound_as_any_are_possible() -> None:
    config = AdamWConfig()
    rising = [[0.3 * (config.beta1 / config.beta2) ** (40 - number)] * NUM for number in range(40)]
    held = left_by(config, rising)
    share = float((np.abs(held["moment1"]) / np.sqrt(held["moment2"])).max()) / steepest(0.9, 0.95, 40)
    assert 0.99 < share <= 1.0001
    assert is_possible(config, CLIP, 40, held)


@pytest.mark.parametrize(
    ("name", "number"),
    [("moment1", 1e-9), ("moment1", 2.0), ("moment2", 2.0), ("moment2", -1e-6), ("moment1", float("nan"))],
)
def test_what_no_gradients_leave_is_not(name: str, number: float) -> None:
    """The first moves its number by a tenth of the learning rate, though no gradient ever asked for it."""
    gradients = [[0.1] * (NUM - 1) + [0.0]] * 5
    held = left_by(AdamWConfig(), gradients)
    assert is_possible(AdamWConfig(), CLIP, 5, held)
    held[name][-1] = number
    assert not is_possible(AdamWConfig(), CLIP, 5, held)


def test_momentum_is_no_longer_than_gradients_make_it() -> None:
    config, longest = InnerSgdConfig(momentum=0.9), np.full(NUM, 2.5, np.float32)
    assert is_possible(config, CLIP, 100, {"momentum": longest})
    assert not is_possible(config, CLIP, 100, {"momentum": 1.1 * longest})
    assert is_possible(config, float("inf"), 100, {"momentum": 1.1 * longest})
