"""Averages of weights: of what, how exactly, and of what not."""

import pytest
import torch
from torch import Tensor

from weft.compose.experts import soup
from weft.compose.experts.soup import Ingredient, greedy, mean, uniform, weighted
from weft.errors import ConfigError
from weft.ids import Digest

PARENT = Digest("a" * 64)


def ingredients(num: int, size: int = 100) -> list[Ingredient]:
    generator = torch.Generator().manual_seed(0)
    return [Ingredient(f"m{number}", torch.randn(size, generator=generator), PARENT) for number in range(num)]


def test_averages_are_those_of_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soup, "_CHUNK", 7)
    given = ingredients(4)
    vectors = torch.stack([each.vector for each in given])
    torch.testing.assert_close(uniform(given), vectors.mean(0))
    weights = torch.tensor([1.0, 0.0, 3.0, 0.5])
    torch.testing.assert_close(weighted(given, weights.tolist()), (weights @ vectors) / weights.sum())


@pytest.mark.parametrize("num", [1, 2, 3, 7])
def test_the_mean_of_equal_weights_is_those_weights(num: int) -> None:
    vector = ingredients(1)[0].vector
    assert torch.equal(mean([vector] * num, [0.3] * num), vector)
    assert torch.equal(uniform([Ingredient("m", vector, PARENT)] * num), vector)


def test_the_greedy_soup_takes_from_the_best_on_what_does_no_harm() -> None:
    aim = torch.zeros(2)
    given = {
        "near": torch.tensor([1.0, 0.0]),
        "opposite": torch.tensor([-1.1, 0.0]),
        "far": torch.tensor([0.0, 9.0]),
        "counter": torch.tensor([-0.2, -1.2]),
    }
    asked = list[Tensor]()

    def loss(vector: Tensor) -> float:
        asked.append(vector)
        return float((vector - aim).norm())

    found = greedy([Ingredient(name, vector, PARENT) for name, vector in given.items()], loss)
    # By loss: near 1.0, opposite 1.1, counter 1.22, far 9. Of near and opposite the mean has 0.05.
    assert found.names == ("near", "opposite")
    torch.testing.assert_close(found.vector, torch.tensor([-0.05, 0.0]))
    assert found.loss == pytest.approx(0.05)
    assert len(asked) == 2 * len(given) - 1


def test_the_greedy_soup_is_never_worse_than_the_best_alone() -> None:
    given = ingredients(5)
    best = min(given, key=lambda each: float(each.vector.norm()))
    found = greedy(given, lambda vector: float(vector.norm()))
    assert found.loss <= float(best.vector.norm())
    assert found.names[0] == best.name
    alone = greedy(given[:1], lambda vector: float(vector.norm()))
    assert torch.equal(alone.vector, given[0].vector)
    assert alone.vector is not given[0].vector


@pytest.mark.parametrize("make", [uniform, lambda given: weighted(given, [1, 1]), lambda given: greedy(given, len)])
def test_models_of_several_beginnings_are_refused_with_what_to_do(make: object) -> None:
    one, other = ingredients(2)
    with pytest.raises(ConfigError, match=r"m0 began at .*aaaaaaaa, m1 at bbbbbbbb: .*an ensemble.*branch"):
        make([one, Ingredient("m1", other.vector, Digest("b" * 64))])  # type: ignore[operator]
    with pytest.raises(ConfigError, match="several sizes have no average"):
        make([one, Ingredient("m1", other.vector[1:], PARENT)])  # type: ignore[operator]
    with pytest.raises(ConfigError, match="name one or more"):
        make([])  # type: ignore[operator]


@pytest.mark.parametrize("weights", [[0.0, 0.0], [-1.0, 2.0], [float("inf"), 1.0], [float("nan"), 1.0]])
def test_weights_that_make_no_mean_are_refused(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="weights of an average"):
        weighted(ingredients(2), weights)
