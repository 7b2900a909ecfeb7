"""Mixing matrices: what all must have, what each is, and how fast it mixes."""

import numpy as np
import pytest
from numpy.typing import NDArray

from weft.sync.method.graph import GraphName, Mixing, is_static, mixing, spectral_gap

GRAPHS: tuple[GraphName, ...] = ("ring", "torus", "random", "exponential", "one_peer", "pairs", "complete")
SIZES = (1, 2, 3, 4, 5, 8, 12, 16, 31, 32)


def matrix(rows: Mixing) -> NDArray[np.float64]:
    whole = np.zeros((len(rows), len(rows)))
    for i, row in enumerate(rows):
        whole[i, list(row)] = list(row.values())
    return whole + np.diag(1 - whole.sum(axis=1))


@pytest.mark.parametrize("num", SIZES)
@pytest.mark.parametrize("graph", GRAPHS)
def test_mixing_keeps_the_mean(graph: GraphName, num: int) -> None:
    for round in range(6):
        whole = matrix(mixing(graph, num, 4, "run", round))
        assert np.allclose(whole.sum(axis=0), 1)
        assert (whole >= -1e-12).all()
        assert all(i not in row for i, row in enumerate(mixing(graph, num, 4, "run", round)))


@pytest.mark.parametrize("num", SIZES)
@pytest.mark.parametrize("graph", GRAPHS)
def test_all_come_to_the_mean_as_fast_as_the_gap_says(graph: GraphName, num: int) -> None:
    values = np.random.default_rng(0).normal(size=num)
    values, gap, num_rounds = values - values.mean(), spectral_gap(graph, num, 4, "run"), 60
    if num > 1:
        assert 0 < gap <= 1
    length = float(np.linalg.norm(values))
    for round in range(num_rounds):
        values = matrix(mixing(graph, num, 4, "run", round)) @ values
    # Random pairs keep to their rate in expectation only; 4 stands for what a matrix that is not symmetric may add.
    slack = 1e4 if graph == "pairs" else 4.0
    shrinks = (1 - gap) ** (num_rounds / (2 if graph == "pairs" else 1))
    assert float(np.linalg.norm(values)) <= slack * shrinks * length + 1e-12


@pytest.mark.parametrize(
    ("graph", "num", "gap"),
    [
        ("ring", 8, 0.195),
        ("ring", 16, 0.0508),
        ("ring", 32, 0.0128),
        ("torus", 16, 0.400),
        ("exponential", 8, 2 / 4),
        ("exponential", 16, 2 / 5),
        ("exponential", 32, 2 / 6),
        ("complete", 8, 1.0),
        ("one_peer", 16, 1.0),
    ],
)
def test_the_gaps_are_those_that_are_known(graph: GraphName, num: int, gap: float) -> None:
    assert spectral_gap(graph, num) == pytest.approx(gap, abs=6e-4)


@pytest.mark.parametrize(("num", "is_exact"), [(2, True), (8, True), (16, True), (12, False)])
def test_one_peer_after_the_other_gives_the_mean_where_their_number_is_a_power_of_two(num: int, is_exact: bool) -> None:
    product = np.eye(num)
    for round in range((num - 1).bit_length()):
        product = matrix(mixing("one_peer", num, round=round)) @ product
    assert np.allclose(product, 1 / num) == is_exact


def test_pairs_are_drawn_anew_and_one_of_an_odd_number_is_left_alone() -> None:
    rounds = [mixing("pairs", 7, key="run", round=round) for round in range(20)]
    assert len({str(each) for each in rounds}) > 15
    for each in rounds:
        assert sorted(map(len, each)) == [0] + 6 * [1]
        assert all(next(iter(each[j])) == i for i, row in enumerate(each) for j in row)


def test_a_random_graph_has_its_degree_and_is_the_same_for_a_run() -> None:
    one = mixing("random", 32, 4, "run")
    assert one == mixing("random", 32, 4, "run", 9)
    assert one != mixing("random", 32, 4, "another run")
    degrees = [len(row) for row in one]
    assert max(degrees) == 4
    assert sum(degrees) >= 120  # of 128: few edges are in both cycles


def test_one_neighbour_for_ever_mixes_nothing() -> None:
    assert spectral_gap("random", 8, 1, "run") == pytest.approx(0, abs=1e-9)
    assert spectral_gap("random", 8, 3, "run") > 0.05


def test_what_changes_from_round_to_round_is_known() -> None:
    for graph in GRAPHS:
        first = mixing(graph, 8, 4, "run", 0)
        is_same = all(mixing(graph, 8, 4, "run", round) == first for round in range(1, 6))
        assert is_static(graph) == is_same
