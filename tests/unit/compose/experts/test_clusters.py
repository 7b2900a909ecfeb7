"""Balanced k-means: the assignment against all there are, the centres against the kinds that texts are of."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unit.compose.experts.texts import KINDS, documents, kind_of
from weft import wire
from weft.compose.experts.clusters import (
    MOST_CLUSTERS,
    Clusters,
    ClustersRecord,
    balanced,
    clustered,
    decode,
    squared_distances,
)
from weft.compose.experts.tfidf import Tfidf, learnt
from weft.errors import DataError, WireError
from weft.rng import stream

GIVEN = documents(30)
TEXTS = [document.text for document in GIVEN]


def found() -> Clusters:
    tfidf = learnt(TEXTS, seed=1)
    return clustered(tfidf, tfidf.vectors(TEXTS), len(KINDS), seed=1)


def least(costs: np.ndarray) -> float:
    """Return the least sum of costs of all balanced assignments, each tried."""
    num_points, num = costs.shape
    every = set(permutations([cluster for cluster in range(num) for _ in range(num_points // num)]))
    return min(sum(costs[point, cluster] for point, cluster in enumerate(each)) for each in every)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([(1, 3), (2, 2), (2, 3), (3, 2), (4, 1)]), st.booleans())
def test_no_balanced_assignment_costs_less(seed: int, shape: tuple[int, int], has_ties: bool) -> None:
    num, each = shape
    costs = stream(seed, "costs").random((num * each, num))
    if has_ties:
        costs = np.round(costs, 1)
    members = balanced(costs)
    assert np.bincount(members, minlength=num).tolist() == [each] * num
    assert costs[np.arange(len(costs)), members].sum() == pytest.approx(least(costs), abs=1e-9)
    assert np.array_equal(balanced(costs), members)


def test_points_that_all_want_one_cluster_are_shared_out() -> None:
    costs = stream(1, "costs").random((600, 6))
    costs[:, 2] -= costs[:, 2] * 0.99
    members = balanced(costs)
    assert np.bincount(members).tolist() == [100] * 6
    # No two points would rather change places.
    for one in range(6):
        for other in range(6):
            extra_there = (costs[members == one][:, other] - costs[members == one][:, one]).min()
            extra_back = (costs[members == other][:, one] - costs[members == other][:, other]).min()
            assert extra_there + extra_back >= -1e-9


@pytest.mark.parametrize("costs", [np.zeros((4, 2)), np.empty((0, 3)), np.full((2, 2), 1e300)])
def test_costs_that_are_all_alike_are_no_fault(costs: np.ndarray) -> None:
    assert (
        np.bincount(balanced(costs), minlength=costs.shape[1]).tolist()
        == [len(costs) // costs.shape[1]] * (costs.shape[1])
    )


def test_squared_distances_are_those_of_the_differences() -> None:
    generator = stream(1, "points")
    points, centres = generator.random((5, 3)).astype(np.float32), generator.random((2, 3))
    expected = ((points[:, None].astype(np.float64) - centres) ** 2).sum(-1)
    np.testing.assert_allclose(squared_distances(points, centres), expected, atol=1e-12)


def test_each_kind_of_text_is_a_cluster_and_new_texts_find_theirs() -> None:
    clusters = found()
    nearest = clusters.nearest(TEXTS).tolist()
    of_kind = {kind: {nearest[at] for at, each in enumerate(GIVEN) if kind_of(each.name) == kind} for kind in KINDS}
    assert sorted(map(len, of_kind.values())) == [1, 1, 1]
    assert set.union(*of_kind.values()) == {0, 1, 2}
    for kind, words in KINDS.items():
        (cluster,) = of_kind[kind]
        assert clusters.nearest([" ".join(words[:3])]) == cluster
        assert set(clusters.words(5)[cluster]) <= set(words)


def test_clusters_are_made_alike_from_a_seed_and_travel_as_bytes() -> None:
    clusters = found()
    again = decode(wire.encode(clusters.record))
    assert again.digest == clusters.digest == found().digest
    assert np.array_equal(again.nearest(TEXTS), clusters.nearest(TEXTS))
    tfidf = clusters.tfidf
    assert clustered(tfidf, tfidf.vectors(TEXTS)[1:], 3, seed=1).digest != clusters.digest


def test_clusters_of_a_sample_are_balanced_where_kinds_are_not() -> None:
    tfidf = learnt(TEXTS, seed=1)
    many = [each.text for each in GIVEN if kind_of(each.name) == "fruit"]
    few = [each.text for each in GIVEN if kind_of(each.name) != "fruit"][:6]
    vectors = tfidf.vectors([*many, *few])
    clusters = clustered(tfidf, vectors, 4, seed=1)
    counts = np.bincount(balanced(clusters.distances(vectors)), minlength=4)
    assert counts.tolist() == [9] * 4


def test_texts_of_which_nothing_is_known_make_no_cluster() -> None:
    tfidf = learnt(TEXTS, seed=1)
    with pytest.raises(DataError, match="3 clusters of 2 documents"):
        clustered(tfidf, tfidf.vectors([TEXTS[0], TEXTS[1], "zebra"]), 3, seed=1)
    with pytest.raises(DataError, match="Allowed: 1 to 256"):
        clustered(tfidf, np.repeat(tfidf.vectors(TEXTS), 9, axis=0), MOST_CLUSTERS + 1, seed=1)


def test_equal_documents_may_lie_in_several_clusters() -> None:
    tfidf = learnt(TEXTS, seed=1)
    clusters = clustered(tfidf, tfidf.vectors([TEXTS[0]] * 6), 3, seed=1)
    assert np.allclose(clusters.centres, clusters.centres[0])


@pytest.mark.parametrize("change", ["format", "num", "short", "nan"])
def test_a_record_that_is_not_whole_is_refused(change: str) -> None:
    tfidf = Tfidf(("a1", "b1"), np.ones(2, np.float32), np.eye(2, dtype=np.float32))
    good = Clusters(tfidf, np.eye(2, dtype=np.float32)).record
    fields = {
        "format": {"format": 2},
        "num": {"num": MOST_CLUSTERS + 1},
        "short": {"centres": good.centres[1:]},
        "nan": {"centres": np.full((2, 2), np.nan, "<f4").tobytes()},
    }[change]
    decode(wire.encode(good))
    tree = {name: getattr(good, name) for name in good.__struct_fields__} | fields
    with pytest.raises(WireError):
        decode(wire.encode(ClustersRecord(**tree)))  # type: ignore[arg-type]


def test_the_bytes_of_a_record_are_those_written_down() -> None:
    """Other bytes would name the same clusters otherwise: peers that share them would no longer know it."""
    tfidf = Tfidf(("anchor", "pear"), np.array([1.0, 1.5], np.float32), np.array([[1.0], [-0.5]], np.float32))
    clusters = Clusters(tfidf, np.array([[0.25], [-2.0]], np.float32))
    assert wire.encode(clusters.record).hex() == (
        "84a763656e74726573c4080000803e000000c0a6666f726d617401a36e756d02a5746669646684aa646972656374696f6e73c404003c00b8"
        "a6666f726d617401a3696466c4080000803f0000c03fa5776f72647392a6616e63686f72a470656172"
    )
    assert clusters.digest == "6060941915b207d5ed80628057feeac0fdba560f85a28f8603b6d8fabac5b889"
