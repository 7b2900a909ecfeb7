"""Noise levels against the standard library's normal distribution in float64, preconditioning against EDM's table."""

from math import exp, isclose, log, sqrt
from statistics import NormalDist

import pytest
import torch

from weft.compose.blocks.noise import SIGMA_DATA, NoiseConfig, NoiseLevels, c_in, c_out, c_skip, loss_weight, normals
from weft.errors import ConfigError

WIDTH = 16
CONFIGS = (
    NoiseConfig(),
    NoiseConfig(low=0.002, high=80.0),  # EDM's, and DiffusionBlocks'
    NoiseConfig(mean=0.5, std=0.7, low=0.5, high=20.0),
)


def reference_share(config: NoiseConfig, length: float) -> float:
    """Return the share of draws of ln sigma ~ N(mean, std), cut off at both ends, that lie above a length of a row."""
    normal = NormalDist(config.mean, config.std)
    low, high, here = (normal.cdf(log(each)) for each in (config.low, config.high, length))
    return (high - here) / (high - low)


def reference_cuts(config: NoiseConfig, num_blocks: int) -> list[float]:
    normal = NormalDist(config.mean, config.std)
    low, high = normal.cdf(log(config.low)), normal.cdf(log(config.high))
    quantiles = [high - number / num_blocks * (high - low) for number in range(num_blocks + 1)]
    return [sqrt(WIDTH) * exp(normal.inv_cdf(each)) for each in quantiles]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("num_blocks", [1, 4, 7])
def test_blocks_have_equal_parts_of_all_draws(config: NoiseConfig, num_blocks: int) -> None:
    noise = NoiseLevels(config, WIDTH)
    cuts = noise.cuts(num_blocks).tolist()
    assert cuts == pytest.approx(reference_cuts(config, num_blocks), rel=1e-6)
    assert cuts[0] == pytest.approx(config.high * sqrt(WIDTH))
    assert cuts[-1] == pytest.approx(config.low * sqrt(WIDTH))
    shares = [reference_share(config, cut / sqrt(WIDTH)) for cut in cuts]
    assert shares == pytest.approx([number / num_blocks for number in range(num_blocks + 1)], abs=1e-9)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_level_is_told_by_its_share_and_back(config: NoiseConfig) -> None:
    noise, share = NoiseLevels(config, WIDTH), torch.linspace(0, 1, 33, dtype=torch.float64)
    sigma = noise.sigma_of(share)
    torch.testing.assert_close(noise.share_of(sigma), share, atol=1e-9, rtol=0)
    expected = [reference_share(config, float(each) / sqrt(WIDTH)) for each in sigma]
    torch.testing.assert_close(noise.share_of(sigma), torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=0)
    beyond = torch.tensor([1e-9, config.high * sqrt(WIDTH) * 1.01, float("inf")], dtype=torch.float64)
    assert noise.share_of(beyond).tolist() == [1.0, 0.0, 0.0]


def test_draws_of_a_block_lie_in_its_part_and_fill_it_evenly() -> None:
    noise = NoiseLevels(NoiseConfig(), WIDTH)
    cuts = noise.cuts(4).tolist()
    for block in range(4):
        sigma, numbers = noise.draw(block, 4, 7, 0, (32, 64))
        assert cuts[block + 1] * (1 - 1e-6) <= sigma.min()
        assert sigma.max() <= cuts[block] * (1 + 1e-6)
        shares = noise.share_of(sigma) * 4 - block
        counts = torch.histc(shares.float(), 4, 0.0, 1.0)
        assert counts.min() > 0.8 * counts.mean()
        assert numbers.shape == (32, 64, WIDTH)
        assert abs(float(numbers.mean())) < 0.02
        assert isclose(float(numbers.std()), 1.0, abs_tol=0.02)


def test_draws_belong_to_seed_block_and_step() -> None:
    noise = NoiseLevels(NoiseConfig(), WIDTH)

    def draw(block: int, seed: int, step: int) -> torch.Tensor:
        sigma, numbers = noise.draw(block, 2, seed, step, (2, 3))
        return torch.cat((noise.share_of(sigma).float().flatten(), numbers.flatten()))

    first = draw(0, 1, 5)
    assert torch.equal(first, draw(0, 1, 5))
    assert not any(torch.isin(draw(*other), first).any() for other in [(1, 1, 5), (0, 2, 5), (0, 1, 6)])
    assert torch.equal(normals((3,), 1, "a"), normals((3,), 1, "a"))


def test_preconditioning_is_edms() -> None:
    sigma = torch.logspace(-3, 3, 25, dtype=torch.float64)
    for each in sigma.tolist():
        here, square = torch.tensor(each, dtype=torch.float64), each**2 + SIGMA_DATA**2
        assert float(c_skip(here)) == pytest.approx(SIGMA_DATA**2 / square)
        assert float(c_out(here)) == pytest.approx(each * SIGMA_DATA / sqrt(square))
        assert float(c_in(here)) == pytest.approx(1 / sqrt(square))
        assert float(loss_weight(here)) == pytest.approx(square / (each * SIGMA_DATA) ** 2)


def test_preconditioned_inputs_and_targets_have_variance_one() -> None:
    """EDM's reason for its choice (appendix B.6): F reads and learns numbers of one scale, whatever the level."""
    y, n = normals((200_000,), 0, "y"), normals((200_000,), 0, "n")
    for each in (0.1, 1.0, 30.0):
        sigma = torch.tensor(each)
        z = SIGMA_DATA * y + sigma * n
        assert float((c_in(sigma) * z).std()) == pytest.approx(1.0, abs=0.01)
        assert float(((SIGMA_DATA * y - c_skip(sigma) * z) / c_out(sigma)).std()) == pytest.approx(1.0, abs=0.01)


def test_what_a_noisy_target_tells_is_bounded_whatever_the_width() -> None:
    for width in (16, 128, 4096):
        noise = NoiseLevels(NoiseConfig(), width)
        assert noise.most_told(sqrt(width)) == pytest.approx(0.5, abs=0.02)  # at one length of a row
        assert noise.most_told(10 * sqrt(width)) == pytest.approx(0.005, rel=0.01)
        assert noise.most_told(0.1 * sqrt(width)) > log(256)  # any byte


@pytest.mark.parametrize(
    ("fields", "message"), [({"low": 2.0, "high": 2.0}, "not below"), ({"low": 1e4, "high": 1e5}, "hardly a draw")]
)
def test_levels_without_draws_are_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NoiseConfig(**fields)
