"""How far steps can have moved parameters: as far as any have, and not as far as somebody likes."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unit.verify.evidence.forge import ME, done, rules
from weft.sync.merge import outer
from weft.sync.method.choices import AdamWConfig, InnerSgdConfig, MuonConfig
from weft.verify.reach import is_within, longest, rates

NUM, CLIP = 16, 1.0
OPTIMIZERS = [
    AdamWConfig(),
    AdamWConfig(beta2=0.999, weight_decay=1.0),
    AdamWConfig(beta1=0.95, beta2=0.9),
    InnerSgdConfig(),
    InnerSgdConfig(momentum=0.9),
]


def trained(config: Any, start: torch.Tensor, gradients: list[list[float]], rate: float) -> list[torch.Tensor]:
    """Return the parameters after each step."""
    optimizer, local = outer.build(config), start.clone()
    state, passed = optimizer.init(NUM), list[torch.Tensor]()
    for number, each in enumerate(gradients, start=1):
        gradient = torch.tensor(each)
        gradient = gradient * min(1.0, CLIP / max(float(gradient.norm()), 1e-30))
        optimizer.apply(local, state, gradient, outer.StepContext(number=number, lr=rate, num_decayed=NUM // 2))
        passed.append(local.clone())
    return passed


numbers = st.floats(-2, 2, width=32)


@settings(max_examples=40)
@given(
    config=st.sampled_from(OPTIMIZERS),
    start=st.lists(numbers, min_size=NUM, max_size=NUM),
    gradients=st.lists(st.lists(numbers, min_size=NUM, max_size=NUM), min_size=1, max_size=20),
    rate=st.sampled_from([1e-4, 1e-2, 0.3]),
    first=st.integers(0, 19),
)
def test_wherever_training_leads_is_within_reach(
    config: Any, start: list[float], gradients: list[list[float]], rate: float, first: int
) -> None:
    passed = [torch.tensor(start), *trained(config, torch.tensor(start), gradients, rate)]
    first = min(first, len(gradients) - 1)
    num = len(gradients) - first
    assert is_within(config, CLIP, [rate] * num, first, passed[first].numpy(), passed[-1].numpy())


def test_gradients_that_do_not_change_move_a_parameter_as_far_as_the_rate_says() -> None:
    start = torch.zeros(NUM)
    (*_, last) = trained(AdamWConfig(weight_decay=0.0), start, [[0.1] * NUM] * 20, 0.01)
    assert 0.199 < float(last.abs().max()) < 0.201
    bound = sum(longest(AdamWConfig(), number) for number in range(1, 21))
    assert 20 <= bound < 25


@pytest.mark.parametrize("config", [AdamWConfig(), InnerSgdConfig(momentum=0.9)])
def test_a_model_of_zeros_lies_beyond_until_steps_could_have_led_there(config: Any) -> None:
    start, zeros = np.full(NUM, 0.25, np.float32), np.zeros(NUM, np.float32)
    assert not is_within(config, CLIP, [3e-4] * 100, 5000, start, zeros)
    assert is_within(config, CLIP, [3e-3] * 100, 5000, start, zeros)


def test_what_is_no_number_lies_beyond() -> None:
    start = np.zeros(NUM, np.float32)
    end = np.array([np.nan, *start[1:]], np.float32)
    assert not any(is_within(config, CLIP, [0.1], 0, start, end) for config in (AdamWConfig(), InnerSgdConfig()))
    assert is_within(MuonConfig(), CLIP, [0.1], 0, start, end), "of it nothing is said"


def test_learning_rates_are_those_of_training() -> None:
    made = done(rules=rules())
    (manifest,) = made.heads
    found = list(rates(manifest, made.charter, ME.peer, 2))
    start, end = made.states[0]["local"].numpy(), made.states[-1]["local"].numpy()
    assert is_within(AdamWConfig(), CLIP, found, 0, start, end)
    assert not is_within(AdamWConfig(), CLIP, [0.9 * each for each in found], 0, start, end)
