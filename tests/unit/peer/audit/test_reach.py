"""Where training leads: optimizers and parameters that gradients leave, and such as none do."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unit.verify.evidence.forge import ME, done, rules
from weft.peer.audit.reach import is_possible, is_within, longest, rates, steepest
from weft.peer.audit.steps import distance, held_of, why_beyond
from weft.sync.merge import outer
from weft.sync.method.choices import AdamWConfig, InnerSgdConfig, MuonConfig
from weft.verify.judge import MOMENTS

NUM, CLIP = 16, 1.0
OPTIMIZERS: list[Any] = [
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


def test_a_little_in_moments_would_let_a_whole_lease_pass_for_one_honest_step() -> None:
    """In bf16: both steps are within what is held for honest, and all numbers but the last are anything."""
    num, rate, luck = 10_000, 3e-4, torch.Generator().manual_seed(0)
    optimizer, local = outer.build(AdamWConfig()), torch.zeros(num)
    held = optimizer.init(num)

    def step(number: int) -> torch.Tensor:
        """Make one by gradients that ask nothing of the last number; return what was before."""
        before, gradient = local.clone(), torch.randn(num, generator=luck)
        gradient[-1] = 0.0
        gradient /= gradient.norm()
        optimizer.apply(local, held, gradient, outer.StepContext(number=number, lr=rate, num_decayed=0))
        return before

    for number in range(1, 20):
        step(number)
    before = held["moment1"].clone()
    honest = float((step(20) - local).norm())
    mine = held["moment1"].clone()
    held["moment1"][-1] += 0.9 * MOMENTS["bf16"] * float((mine - before).norm())
    assert why_beyond({"moment1": distance(before, mine, held["moment1"])}, held_of("bf16", 1, ("moment1",))) is None
    state = {name: vector.numpy() for name, vector in held.items()}
    assert not is_possible(AdamWConfig(), CLIP, 20, state)
    start, anything = step(21), local + 50 * honest * num**-0.5
    anything[-1] = local[-1]
    assert why_beyond({"local": distance(start, local, anything)}, held_of("bf16", 1, ("local",))) is None


def test_momentum_is_no_longer_than_gradients_make_it() -> None:
    config, longest = InnerSgdConfig(momentum=0.9), np.full(NUM, 2.5, np.float32)
    assert is_possible(config, CLIP, 100, {"momentum": longest})
    assert not is_possible(config, CLIP, 100, {"momentum": 1.1 * longest})
    assert is_possible(config, float("inf"), 100, {"momentum": 1.1 * longest})


# --- parameters ---


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


places = st.floats(-2, 2, width=32)


@settings(max_examples=40)
@given(
    config=st.sampled_from([*OPTIMIZERS, AdamWConfig(beta2=0.999, weight_decay=1.0)]),
    start=st.lists(places, min_size=NUM, max_size=NUM),
    gradients=st.lists(st.lists(places, min_size=NUM, max_size=NUM), min_size=1, max_size=20),
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
