import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.config import Config, from_tree
from weft.errors import ConfigError
from weft.sync.method.schedule import ConstantConfig, CosineConfig, ScheduleConfig, WsdConfig, cos_pi, lr, missed


@st.composite
def schedules(draw: st.DrawFn) -> ScheduleConfig:
    peak = draw(st.floats(1e-6, 1.0))
    warmup = draw(st.integers(0, 10**6))
    kind = draw(st.sampled_from(["constant", "cosine", "wsd"]))
    if kind == "constant":
        return ConstantConfig(lr=peak, warmup_tokens=warmup)
    floor, decay = draw(st.floats(0, 1)), draw(st.integers(0, 10**6))
    total = warmup + decay + draw(st.integers(1, 10**6))
    if kind == "cosine":
        return CosineConfig(lr=peak, warmup_tokens=warmup, total_tokens=total, floor=floor)
    return WsdConfig(lr=peak, warmup_tokens=warmup, decay_tokens=decay, total_tokens=total, floor=floor)


@given(config=schedules(), tokens=st.integers(0, 10**7))
def test_rate_is_between_zero_and_the_peak(config: ScheduleConfig, tokens: int) -> None:
    assert 0 <= lr(config, tokens) <= config.lr * (1 + 1e-15)


@given(config=schedules(), tokens=st.lists(st.integers(0, 4 * 10**6), min_size=2, max_size=20))
def test_rate_rises_in_the_warm_up_and_never_after(config: ScheduleConfig, tokens: list[int]) -> None:
    tokens = sorted(tokens)
    for before, after in itertools.pairwise(tokens):
        if after <= config.warmup_tokens:
            assert lr(config, before) <= lr(config, after) * (1 + 1e-12)
        elif before >= config.warmup_tokens:
            assert lr(config, before) >= lr(config, after) * (1 - 1e-12)


@given(config=schedules())
def test_warm_up_starts_at_zero_and_ends_at_the_peak(config: ScheduleConfig) -> None:
    if config.warmup_tokens:
        assert lr(config, 0) == 0
        assert lr(config, config.warmup_tokens // 2) == pytest.approx(
            config.lr * (config.warmup_tokens // 2) / config.warmup_tokens
        )
    assert lr(config, config.warmup_tokens) == pytest.approx(config.lr)


@given(config=schedules(), beyond=st.integers(0, 10**9))
def test_decay_ends_at_the_floor_and_stays_there(config: ScheduleConfig, beyond: int) -> None:
    if not isinstance(config, ConstantConfig):
        assert lr(config, config.total_tokens + beyond) == pytest.approx(config.lr * config.floor, abs=1e-15)


def test_cosine_is_half_way_in_the_middle() -> None:
    config = CosineConfig(lr=2.0, warmup_tokens=100, total_tokens=300, floor=0.1)
    assert lr(config, 200) == pytest.approx(2.0 * 0.55)
    assert lr(config, 150) == pytest.approx(2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2))


def test_wsd_is_flat_and_then_linear() -> None:
    config = WsdConfig(lr=1.0, warmup_tokens=10, decay_tokens=100, total_tokens=1000, floor=0.2)
    assert {lr(config, tokens) for tokens in (10, 500, 900)} == {1.0}
    assert lr(config, 950) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("config", "tokens", "words"),
    [
        (ConstantConfig(), 1, None),
        (WsdConfig(decay_tokens=5, total_tokens=10), 10, "has 10, and by then the learning rate is 0"),
        (WsdConfig(decay_tokens=5, total_tokens=11), 11, None),
        (WsdConfig(decay_tokens=5, total_tokens=10, floor=0.1), 10, None),
        (ConstantConfig(warmup_tokens=100), 99, "all of it is warm-up"),
        (ConstantConfig(warmup_tokens=100), 100, None),
        (CosineConfig(warmup_tokens=100, total_tokens=500), 101, "before the rate has come down"),
        (WsdConfig(warmup_tokens=100, decay_tokens=100, total_tokens=500), 499, "before the rate has come down"),
        (WsdConfig(warmup_tokens=100, decay_tokens=100, total_tokens=500), 500, None),
    ],
)
def test_what_a_shorter_run_does_not_come_to(config: ScheduleConfig, tokens: int, words: str | None) -> None:
    found = missed(config, tokens, 10)
    assert found is None if words is None else words in str(found)


def test_polynomial_cosine_is_the_cosine() -> None:
    assert max(abs(cos_pi(i / 5000) - math.cos(math.pi * i / 5000)) for i in range(5001)) < 1e-15


class Holder(Config, frozen=True, kw_only=True):
    schedule: ScheduleConfig


@pytest.mark.parametrize(
    "tree",
    [
        {"type": "cosine", "warmup_tokens": 11, "total_tokens": 10},
        {"type": "wsd", "warmup_tokens": 6, "decay_tokens": 5, "total_tokens": 10},
    ],
)
def test_a_horizon_before_the_end_of_the_warm_up_is_refused(tree: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="total_tokens: 10 is less than the 11"):
        from_tree({"schedule": tree}, Holder, where="run.toml")
