"""Exact optimizers against references in float64 numpy, and Nesterov and AdamW against torch.optim."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from weft.errors import ConfigError
from weft.sync.merge import outer as optimizers
from weft.sync.merge.outer import CHUNK, StepContext, build, clip_factor, fp32, norm, power
from weft.sync.method.choices import (
    AdamWConfig,
    DelayedNesterovConfig,
    InnerSgdConfig,
    NesterovConfig,
    OuterConfig,
    SgdConfig,
    SignSgdConfig,
)

NUM = CHUNK + 1000  # more than one chunk
NUM_DECAYED = CHUNK - 300


def vectors(num_steps: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(NUM, generator=generator), [torch.randn(NUM, generator=generator) for _ in range(num_steps)]


def rates(step: int) -> float:
    return 1e-3 * (1 + step % 3)


def reference(config: OuterConfig, x: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
    """The papers' formulas, in float64 on whole vectors."""
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t, g in enumerate(gradients, start=1):
        match config:
            case SgdConfig(lr=lr):
                x = x - lr * g
            case SignSgdConfig(weight_decay=wd):
                x[:NUM_DECAYED] *= 1 - rates(t) * wd
                x = x - rates(t) * np.sign(g)
            case DelayedNesterovConfig(lr=lr, momentum=mu, delay=delay, activation=c):
                v = v + g  # the buffer
                if t % delay == 0:
                    m, v = mu * m + v, 0 * v
                    x = x - lr * ((1 - c * delay + c) * mu * m + g)
                else:
                    x = x - lr * (c * mu * m + g)
            case InnerSgdConfig(momentum=mu):
                m = mu * m + g
                x = x - rates(t) * m
            case NesterovConfig(lr=lr, momentum=mu):
                m = mu * m + g
                x = x - lr * (g + mu * m)
            case AdamWConfig(beta1=b1, beta2=b2, eps=eps, weight_decay=wd):
                lr = rates(t)
                x[:NUM_DECAYED] *= 1 - lr * wd
                m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
                x = x - lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
    return x


CONFIGS: list[OuterConfig] = [
    SgdConfig(lr=1.0),
    SgdConfig(lr=0.1),
    NesterovConfig(lr=0.7, momentum=0.9),
    NesterovConfig(lr=0.3, momentum=0.0),
    DelayedNesterovConfig(lr=0.5, delay=3),
    DelayedNesterovConfig(lr=0.5, momentum=0.6, delay=4, activation=0.1),
    SignSgdConfig(),
    SignSgdConfig(weight_decay=0.5),
    InnerSgdConfig(),
    InnerSgdConfig(momentum=0.9),
    AdamWConfig(),
    AdamWConfig(beta1=0.8, beta2=0.99, eps=1e-3, weight_decay=1.0),
]


def run(config: OuterConfig, x: torch.Tensor, gradients: list[torch.Tensor]) -> optimizers.State:
    optimizer = build(config)
    state = optimizer.init(NUM)
    for t, g in enumerate(gradients, start=1):
        optimizer.apply(x, state, g, StepContext(number=t, lr=rates(t), num_decayed=NUM_DECAYED))
    return state


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_ten_steps_follow_the_reference(config: OuterConfig) -> None:
    x, gradients = vectors(10)
    expected = reference(config, x.double().numpy().copy(), [g.double().numpy() for g in gradients])
    state = run(config, x, gradients)
    np.testing.assert_allclose(x.double().numpy(), expected, rtol=1e-5, atol=2e-5)
    assert all(tensor.shape == (NUM,) and tensor.dtype == torch.float32 for tensor in state.values())


def test_nesterov_is_torchs_nesterov() -> None:
    x, gradients = vectors(10)
    other = torch.nn.Parameter(x.clone())
    torch_optimizer = torch.optim.SGD([other], lr=0.7, momentum=0.9, nesterov=True)
    for g in gradients:
        other.grad = g
        torch_optimizer.step()
    run(NesterovConfig(lr=0.7, momentum=0.9), x, gradients)
    torch.testing.assert_close(x, other.detach(), rtol=1e-5, atol=1e-5)


def test_adamw_is_torchs_adamw() -> None:
    x, gradients = vectors(10)
    decayed, plain = (torch.nn.Parameter(half.clone()) for half in (x[:NUM_DECAYED], x[NUM_DECAYED:]))
    torch_optimizer = torch.optim.AdamW(
        [{"params": [decayed], "weight_decay": 0.1}, {"params": [plain], "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for t, g in enumerate(gradients, start=1):
        for group in torch_optimizer.param_groups:
            group["lr"] = rates(t)
        decayed.grad, plain.grad = g[:NUM_DECAYED], g[NUM_DECAYED:]
        torch_optimizer.step()
    run(AdamWConfig(), x, gradients)
    torch.testing.assert_close(x, torch.cat([decayed, plain]).detach(), rtol=1e-5, atol=1e-6)


def test_adamw_is_ieee_754_bit_for_bit() -> None:
    x, gradients = vectors(3)
    expected, m, v = x.numpy().copy(), np.zeros(NUM, np.float32), np.zeros(NUM, np.float32)
    for t, g in enumerate([each.numpy() for each in gradients], start=1):
        expected[:NUM_DECAYED] -= expected[:NUM_DECAYED] * np.float32(rates(t) * 0.1)
        m = m * np.float32(0.9) + g * np.float32(1 - 0.9)
        v = v * np.float32(0.95) + g * g * np.float32(1 - 0.95)
        long = np.sqrt(v) * np.float32(1 / math.sqrt(1 - power(0.95, t))) + np.float32(1e-8)
        expected = expected - m / long * np.float32(rates(t) / (1 - power(0.9, t)))
    run(AdamWConfig(), x, gradients)
    assert np.array_equal(x.numpy(), expected)


def test_square_roots_are_rounded_once() -> None:
    bits = torch.randint(0, 0x7F800000, (1 << 20,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    x = bits.view(torch.float32)  # of all magnitudes; the smallest without a leading bit
    out = torch.empty_like(x)
    optimizers.roots(x, out)
    # The root of a number of 24 bits is nowhere near the middle of two: rounding it twice is rounding it once.
    assert np.array_equal(out.numpy(), np.sqrt(x.numpy().astype(np.float64)).astype(np.float32))


def test_gains_do_not_decay() -> None:
    x = torch.ones(NUM)
    build(AdamWConfig()).apply(
        x, build(AdamWConfig()).init(NUM), torch.zeros(NUM), StepContext(number=1, lr=0.1, num_decayed=NUM_DECAYED)
    )
    assert torch.equal(x[:NUM_DECAYED], torch.full((NUM_DECAYED,), fp32(1 - fp32(0.01))))
    assert torch.equal(x[NUM_DECAYED:], torch.ones(NUM - NUM_DECAYED))


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_the_merged_vector_is_only_read(config: OuterConfig) -> None:
    x, (g,) = vectors(1)
    before = g.clone()
    optimizer = build(config)
    optimizer.apply(x, optimizer.init(NUM), g, StepContext(number=1, lr=1e-3, max_norm=0.5))
    assert torch.equal(g, before)


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_clipping_is_stepping_on_the_scaled_vector(config: OuterConfig) -> None:
    x, (g,) = vectors(1)
    other, optimizer = x.clone(), build(config)
    optimizer.apply(x, optimizer.init(NUM), g, StepContext(number=1, lr=1e-3, max_norm=0.5))
    optimizer.apply(other, optimizer.init(NUM), g * fp32(0.5 / norm(g)), StepContext(number=1, lr=1e-3))
    assert torch.equal(x, other)


def test_a_state_of_another_size_is_refused() -> None:
    optimizer = build(NesterovConfig())
    with pytest.raises(ValueError, match="another size"):
        optimizer.apply(torch.zeros(8), optimizer.init(7), torch.zeros(8), StepContext(number=1))


@pytest.mark.parametrize("num", [0, 1, 5, CHUNK - 1, CHUNK, 2 * CHUNK + 17])
def test_norm_is_the_euclidean_norm(num: int) -> None:
    vector = torch.randn(num, generator=torch.Generator().manual_seed(num))
    assert norm(vector) == pytest.approx(math.sqrt(math.fsum(value**2 for value in vector.tolist())), rel=1e-14)


def test_norm_of_large_values_does_not_overflow() -> None:
    assert norm(torch.full((4,), 3e38)) == pytest.approx(6e38, rel=1e-6)


def test_a_short_vector_is_not_clipped() -> None:
    assert clip_factor(torch.tensor([3.0, 4.0]), 5.0) == 1.0
    assert clip_factor(torch.tensor([3.0, 4.0]), None) == 1.0
    assert clip_factor(torch.tensor([3.0, 4.0]), 2.5) == 0.5


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 10, 1000, 123_457])
@pytest.mark.parametrize("base", [0.9, 0.95, 0.999])
def test_power_is_right_to_a_few_ulps(base: float, exponent: int) -> None:
    exact = float(Fraction(base) ** min(exponent, 1000)) if exponent <= 1000 else base**exponent
    assert power(base, exponent) == pytest.approx(exact, rel=1e-11, abs=1e-300)


def test_power_multiplies_and_never_asks_the_c_library() -> None:
    base = 0.95
    squared = base * base
    fourth = squared * squared
    assert power(base, 7) == (base * squared) * fourth  # 7 = 1 + 2 + 4, lowest bit first


def test_fp32_rounds_once() -> None:
    assert fp32(0.1) == float(np.float32(0.1)) != 0.1


def test_a_momentum_without_delay_is_nesterovs() -> None:
    x, gradients = vectors(6)
    other = x.clone()
    run(DelayedNesterovConfig(lr=0.7, momentum=0.9, delay=1), x, gradients)
    run(NesterovConfig(lr=0.7, momentum=0.9), other, gradients)
    torch.testing.assert_close(x, other, rtol=1e-6, atol=1e-6)


def test_more_than_the_whole_momentum_is_refused() -> None:
    with pytest.raises(ConfigError, match="activation"):
        DelayedNesterovConfig(delay=4, activation=0.3)
