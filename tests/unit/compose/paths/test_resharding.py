"""Re-sharding: the router of least loss, and nothing that it learns from is trained on."""

import numpy as np
import pytest
from numpy.typing import NDArray

from unit.compose.paths.tiny import LEVELS
from weft.compose.paths import resharding
from weft.compose.paths.resharding import ReshardingConfig, apart, discriminative, labels, minimum, softmax_regression
from weft.errors import ConfigError
from weft.ids import Digest

Array = NDArray[np.float64]


def newton(z: Array, chosen: NDArray[np.int64], num: int, l2: float) -> tuple[Array, Array]:
    """Return softmax regression on features as they are, by Newton's method with the whole curvature."""
    x = np.hstack([z, np.ones((len(z), 1))])
    w, y = np.zeros((num, x.shape[1])), np.eye(num)[chosen]
    for _ in range(50):
        p = np.exp(x @ w.T)
        p /= p.sum(1, keepdims=True)
        gradient = ((p - y).T @ x / len(x) + l2 * w).ravel()
        curvature = np.zeros((w.size, w.size))
        for row, mine in zip(x, p, strict=True):
            curvature += np.kron(np.diag(mine) - np.outer(mine, mine), np.outer(row, row)) / len(x)
        w = w - np.linalg.solve(curvature + l2 * np.eye(w.size), gradient).reshape(w.shape)
    return w[:, :-1], w[:, -1]


def documents(num: int = 60, width: int = 3) -> tuple[Array, NDArray[np.int64]]:
    generator = np.random.default_rng(0)
    z = generator.normal(size=(num, width))
    z = (z - z.mean(0)) / z.std(0)  # so that scaling leaves them
    return z, (z @ generator.normal(size=(width, 4)) + generator.normal(size=(num, 4))).argmax(1)


def test_the_regression_is_that_of_newtons_method() -> None:
    z, chosen = documents()
    weights, biases = softmax_regression(z, chosen, 4, l2=1e-2, tolerance=1e-9)
    for mine, theirs in zip((weights, biases), newton(z, chosen, 4, 1e-2), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


def test_how_features_are_shifted_and_scaled_decides_nothing() -> None:
    z, chosen = documents()
    stretched = z * np.array([1e-3, 1.0, 50.0]) + np.array([5.0, 0.0, -1e3])
    weights, biases = softmax_regression(z, chosen, 4, l2=1e-3)
    others, beside = softmax_regression(stretched, chosen, 4, l2=1e-3)
    np.testing.assert_allclose(z @ weights.T + biases, stretched @ others.T + beside, atol=1e-4)


def test_a_feature_that_never_changes_says_nothing() -> None:
    z, chosen = documents()
    weights, _ = softmax_regression(np.hstack([z, np.full((len(z), 1), 7.0)]), chosen, 4, l2=1e-3)
    assert np.array_equal(weights[:, -1], np.zeros(4))


def test_it_is_the_same_each_time() -> None:
    z, chosen = documents()
    one, other = (softmax_regression(z, chosen, 4, l2=1e-3) for _ in range(2))
    assert all(np.array_equal(mine, again) for mine, again in zip(one, other, strict=True))


def test_a_minimum_that_bends_differently_is_found() -> None:
    bends = np.array([1e-2, 1.0, 1e3])
    found = minimum(lambda x: (float((bends * (x - 1) ** 2).sum() / 2), bends * (x - 1)), np.zeros(3), 1e-9)
    np.testing.assert_allclose(found, np.ones(3), atol=1e-6)


def test_a_router_that_does_not_settle_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resharding, "MAX_STEPS", 3)
    z, chosen = documents()
    with pytest.raises(ConfigError, match="l2: the router has not settled after 3 steps"):
        softmax_regression(z, chosen, 4, l2=1e-9)


def test_the_router_learns_under_which_path_the_loss_is_least() -> None:
    generator = np.random.default_rng(2)
    z = generator.normal(size=(400, 8))
    losses = -z[:, :4] + 3.0  # path n is best where feature n is largest
    router = discriminative(ReshardingConfig(), LEVELS, z[:300], losses[:300], Digest("ab" * 32))
    assert (router.best(z[300:]) == labels(losses[300:])).mean() > 0.9
    assert router.record.kind == "softmax"


def test_of_equal_losses_the_first_path_is_the_label() -> None:
    assert labels(np.array([[2.0, 1.0, 1.0], [3.0, 3.0, 3.0]])).tolist() == [1, 0]


def test_a_path_that_is_best_at_nothing_is_chosen_for_nothing() -> None:
    z, chosen = documents()
    weights, biases = softmax_regression(z, np.minimum(chosen, 2), 4, l2=1e-3)
    assert 3 not in (z @ weights.T + biases).argmax(1)


def test_what_the_router_learns_from_no_path_is_trained_on() -> None:
    mine, rest = apart(200, 0.05, seed=1)
    assert len(mine) == 10
    assert sorted([*mine, *rest]) == list(range(200))
    assert np.array_equal(mine, apart(200, 0.05, seed=1)[0])
    assert not np.array_equal(mine, apart(200, 0.05, seed=2)[0])


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_a_share_that_leaves_nothing_on_one_side_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="Both need some"):
        apart(100, share, seed=1)
