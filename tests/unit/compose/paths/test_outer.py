"""Outer steps of modules: equations 2 and 3 of the paper, whoever comes, in whatever order."""

from itertools import permutations
from math import sqrt

import pytest
import torch
from torch import Tensor

from weft.compose.paths.levels import Path
from weft.compose.paths.outer import OuterStepConfig, merged, nesterov, shares, step
from weft.errors import ConfigError
from weft.sync.merge import outer

NUM = 50
PATHS: list[Path] = [(0, 0), (0, 1), (1, 0), (1, 1)]
SIZES = {(0, 0): 5, (0, 1): 1, (1, 0): 13, (1, 1): 2}


def deltas(seed: int, paths: list[Path] = PATHS) -> dict[Path, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {path: torch.randn(NUM, generator=generator) for path in paths}


def reference(rounds: list[dict[Path, Tensor]], sizes: dict[Path, int], lr: float, mu: float) -> Tensor:
    """Return where a module comes to from zero, in fp64: 2403.10616, equations 2 and 3, and Nesterov's momentum."""
    theta, m = torch.zeros(NUM, dtype=torch.float64), torch.zeros(NUM, dtype=torch.float64)
    for came in rounds:
        total = sum(sizes[path] for path in came)
        delta = torch.zeros(NUM, dtype=torch.float64)
        for path, each in came.items():
            alpha = sizes[path] / total
            delta += alpha * each.double()
        delta *= sqrt(len(came))
        m = mu * m + delta
        theta = theta - lr * (delta + mu * m)
    return theta


def stepped(config: OuterStepConfig, rounds: list[dict[Path, Tensor]], sizes: dict[Path, int]) -> Tensor:
    vector, momentum = torch.zeros(NUM), torch.zeros(NUM)
    for came in rounds:
        step(config, vector, momentum, merged(config, came, sizes))
    return vector


def test_steps_are_those_of_the_equations() -> None:
    rounds = [deltas(seed) for seed in range(6)]
    found = stepped(OuterStepConfig(lr=0.7, momentum=0.9), rounds, SIZES)
    torch.testing.assert_close(found.double(), reference(rounds, SIZES, 0.7, 0.9), rtol=1e-5, atol=1e-5)


def test_a_path_that_is_missing_leaves_the_mean_of_the_others() -> None:
    config, came = OuterStepConfig(), deltas(1)
    without = {path: delta for path, delta in came.items() if path != (1, 0)}
    found = merged(config, without, SIZES)
    weights = {path: SIZES[path] / 8 for path in without}
    mean = sum(weights[path] * without[path].double() for path in without)
    torch.testing.assert_close(found, (sqrt(3) * mean).float())
    rounds = [came, without, came]
    torch.testing.assert_close(
        stepped(config, rounds, SIZES).double(), reference(rounds, SIZES, 0.7, 0.9), rtol=1e-5, atol=1e-5
    )


def test_one_path_makes_the_outer_step_of_diloco() -> None:
    rounds = [deltas(seed, [(0, 0)]) for seed in range(4)]
    parameter = torch.nn.Parameter(torch.zeros(NUM))
    diloco = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for came in rounds:
        parameter.grad = came[(0, 0)].clone()
        diloco.step()
    assert torch.allclose(stepped(OuterStepConfig(), rounds, SIZES), parameter.detach(), rtol=1e-6, atol=1e-6)


def test_the_order_in_which_paths_come_changes_no_bit() -> None:
    came = deltas(2)
    found = [
        merged(OuterStepConfig(), {path: came[path] for path in order}, {path: SIZES[path] for path in reversed(order)})
        for order in permutations(PATHS)
    ]
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("rescale", ["root", "none"])
def test_a_run_of_the_modules_own_makes_the_same_steps_at_another_rate(rescale: str) -> None:
    config, plain = OuterStepConfig(rescale=rescale), OuterStepConfig(rescale="none")  # type: ignore[arg-type]
    rounds, vector = [deltas(seed) for seed in range(5)], torch.zeros(NUM)
    run = outer.Nesterov(nesterov(config, len(PATHS)))
    state = run.init(NUM)
    for number, came in enumerate(rounds, 1):
        run.apply(vector, state, merged(plain, came, SIZES), outer.StepContext(number=number))
    torch.testing.assert_close(stepped(config, rounds, SIZES), vector, rtol=1e-5, atol=1e-5)


def test_a_path_counts_by_its_documents() -> None:
    assert shares({(0,): 1, (1,): 3}) == {(0,): 0.25, (1,): 0.75}
    with pytest.raises(ConfigError, match=r"the shards of the paths \(0,\), \(1,\) are empty"):
        shares({(1,): 0, (0,): 0})
