"""Routers: the nearest centre, as a matrix that all share; and shards in which no path starves."""

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from unit.compose.paths.tiny import LEVELS, MODEL
from weft import wire
from weft.compose.paths import routing
from weft.compose.paths.levels import Levels, LevelsConfig
from weft.compose.paths.routing import Kind, Router, RoutingConfig, generative, k_means, made, shards
from weft.errors import ConfigError, WireError
from weft.ids import Digest

FEATURES = Digest("ab" * 32)
Array = NDArray[np.float64]


def clouds(num: int, num_clouds: int, width: int = 4, seed: int = 0) -> tuple[Array, NDArray[np.int64]]:
    """Return points in clouds that lie apart, and the cloud of each."""
    generator = np.random.default_rng(seed)
    centres = generator.normal(size=(num_clouds, width)) * 10
    mine = np.arange(num) % num_clouds
    return centres[mine] + generator.normal(size=(num, width)) * 0.1, mine


def lloyd(z: Array, centres: Array) -> Array:
    """Return where centres come to, point by point."""
    while True:
        groups: list[list[Array]] = [[] for _ in centres]
        for point in z:
            groups[int(np.argmin([((point - centre) ** 2).sum() for centre in centres]))].append(point)
        after = np.array([np.mean(group, axis=0) for group in groups])
        if np.allclose(after, centres, atol=1e-12):
            return after
        centres = after


# --- k-means ---


@pytest.mark.parametrize("seed", range(5))
def test_clouds_that_lie_apart_are_the_clusters(seed: int) -> None:
    z, mine = clouds(60, 5, seed=seed)
    centres = k_means(z, 5, seed, num_tries=4)
    nearest = ((z[:, None] - centres) ** 2).sum(2).argmin(1)
    assert len({(a, b) for a, b in zip(mine.tolist(), nearest.tolist(), strict=True)}) == 5


def test_centres_come_to_where_they_come_point_by_point() -> None:
    z = np.random.default_rng(1).normal(size=(80, 3))
    begun = routing._seeded(z, 6, 1, 0)
    np.testing.assert_allclose(k_means(z, 6, 1, num_tries=1), lloyd(z, begun), atol=1e-9)


def test_centres_are_a_function_of_the_seed() -> None:
    z = np.random.default_rng(1).normal(size=(80, 3))
    assert np.array_equal(k_means(z, 6, 1), k_means(z, 6, 1))
    assert not np.array_equal(k_means(z, 6, 1), k_means(z, 6, 2))


def test_more_tries_lie_no_further_from_their_documents() -> None:
    z = np.random.default_rng(1).normal(size=(80, 3))
    spreads = [((z[:, None] - k_means(z, 8, 1, num_tries=num)) ** 2).sum(2).min(1).sum() for num in (1, 3, 9)]
    assert spreads == sorted(spreads, reverse=True)


def test_a_centre_that_nobody_is_near_goes_where_somebody_is() -> None:
    z = np.array([[0.0], [0.1], [5.0], [9.0]])
    found = routing._settled(z, np.array([[0.0], [100.0], [200.0]]))
    assert sorted(found.ravel().tolist()) == [0.05, 5.0, 9.0]


def test_as_many_clusters_as_different_documents_are_there() -> None:
    z = np.repeat(np.array([[0.0, 1.0], [2.0, 3.0]]), 5, axis=0)
    assert sorted(k_means(z, 2, 0).tolist()) == [[0.0, 1.0], [2.0, 3.0]]
    with pytest.raises(ConfigError, match="3 clusters of 2 different documents"):
        k_means(z, 3, 0)


# --- routers ---


def test_a_document_goes_to_the_nearest_centre() -> None:
    z = np.random.default_rng(3).normal(size=(60, 8)) + 2
    router = generative(RoutingConfig(), LEVELS, z, FEATURES, seed=0)
    centres = router.weights / 2
    assert np.array_equal(router.best(z), ((z[:, None] - centres) ** 2).sum(2).argmin(1))
    assert len(set(router.best(z).tolist())) == 4


def test_of_a_product_each_level_has_clusters_of_its_part_of_the_features() -> None:
    levels = Levels(LevelsConfig(levels=(3, 2)), MODEL)
    left, mine = clouds(60, 3, width=4, seed=1)
    right, others = clouds(60, 2, width=4, seed=2)  # of three clouds and of two each pair comes
    router = generative(RoutingConfig(kind="product_k_means"), levels, np.hstack([left, right]), FEATURES, seed=0)
    taken = np.array([levels.paths[number] for number in router.best(np.hstack([left, right]))])
    assert len({(a, path[0]) for a, path in zip(mine.tolist(), taken.tolist(), strict=True)}) == 3
    assert len({(b, path[1]) for b, path in zip(others.tolist(), taken.tolist(), strict=True)}) == 2
    for path, centre in zip(levels.paths, router.weights / 2, strict=True):
        np.testing.assert_allclose(centre[:4], left[taken[:, 0] == path[0]].mean(0), rtol=1e-5)
        np.testing.assert_allclose(centre[4:], right[taken[:, 1] == path[1]].mean(0), rtol=1e-5)


def test_a_router_is_its_bytes() -> None:
    z, _ = clouds(60, 4, width=8)
    router = generative(RoutingConfig(), LEVELS, z, FEATURES, seed=0)
    again = Router.from_bytes(router.to_bytes())
    assert again.digest == router.digest == wire.digest(router.to_bytes())
    assert np.array_equal(again.scores(z), router.scores(z))
    assert again.record.levels == LEVELS.config
    other = generative(RoutingConfig(), LEVELS, z, FEATURES, seed=1)
    assert other.digest != router.digest


@pytest.mark.parametrize(
    "wrong",
    [
        {"biases": bytes(12)},
        {"width": 9},
        {"width": 0, "weights": b""},
        {"prefix": 0},
        {"levels": LevelsConfig(levels=(3, 2))},
        {"biases": np.array([0, np.nan, 0, 0], "<f4").tobytes()},
    ],
)
def test_bytes_that_are_no_router_are_refused(wrong: dict[str, object]) -> None:
    record = made("softmax", LEVELS.config, FEATURES, np.zeros((4, 8)), np.zeros(4)).record
    data = wire.encode(msgspec.structs.replace(record, **wrong))
    with pytest.raises(WireError, match="router"):
        Router.from_bytes(data)
    with pytest.raises(WireError):
        Router.from_bytes(wire.encode(record)[:-1])


def test_features_of_another_width_are_refused() -> None:
    with pytest.raises(ConfigError, match="reads 8 features, found 7"):
        router("softmax").best(np.zeros((2, 7)))


def router(kind: Kind) -> Router:
    return made(kind, LEVELS.config, FEATURES, np.zeros((4, 8)), np.zeros(4))


# --- shards ---


def test_a_document_is_in_the_shards_of_its_best_paths() -> None:
    scores = np.random.default_rng(0).normal(size=(40, 6))
    for overlap in (1, 3, 6):
        found = shards(scores, overlap=overlap)
        for document, row in enumerate(scores):
            best = set(np.argsort(-row)[:overlap].tolist())
            assert {path for path, mine in enumerate(found) if document in mine} == best


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("least", [0.25, 0.9, 1.0])
def test_no_path_starves(overlap: int, least: float) -> None:
    for seed in range(10):
        scores = np.random.default_rng(seed).normal(size=(41, 5)) + np.array([9, 5, 0, 0, -9])
        found = shards(scores, overlap=overlap, least=least)
        assert min(map(len, found)) >= int(least * 41 * overlap / 5)
        assert sorted(np.concatenate(found).tolist()) == sorted([*range(41)] * overlap)
        assert all(np.array_equal(mine, np.unique(mine)) for mine in found)


def test_who_starves_gets_the_documents_that_lose_least() -> None:
    scores = np.array([[0.0, -3.0], [0.0, -1.0], [0.0, -4.0], [0.0, -2.0]])
    assert [mine.tolist() for mine in shards(scores, least=1.0)] == [[0, 2], [1, 3]]
    assert [mine.tolist() for mine in shards(scores, least=0.5)] == [[0, 2, 3], [1]]


def test_documents_that_are_all_alike_are_shared_out() -> None:
    assert [len(mine) for mine in shards(np.zeros((12, 4)), least=1.0)] == [3, 3, 3, 3]


def test_more_paths_for_a_document_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 paths for each document, and there are 2"):
        shards(np.zeros((4, 2)), overlap=3)
