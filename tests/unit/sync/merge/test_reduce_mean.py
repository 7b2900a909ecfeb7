"""The rules by which vectors are merged."""

import pytest
import torch

from weft.sync.merge.mean import merge
from weft.sync.merge.reduce import empty_mean
from weft.sync.method.choices import Rule


def mean(rule: Rule, *weighted: tuple[int, list[float]], awaited: int = 0) -> list[float]:
    found = empty_mean(rule, len(weighted[0][1]))
    for weight, values in weighted:
        found.add(weight, torch.tensor(values))
    return [float(value) for value in found.result(awaited)]


@pytest.mark.parametrize("rule", ["peers_mean", "senders_mean"])
def test_the_mean_of_equal_vectors_is_that_vector(rule: Rule) -> None:
    vector = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    found = empty_mean(rule, 100_000)
    for weight in (3, 7, 11):
        found.add(weight, vector)
    assert found.result().equal(vector)


def test_an_element_that_one_of_two_sends_is_half_as_large_over_peers_as_over_senders() -> None:
    sent = (1, [2.0, 0.0, 4.0]), (1, [0.0, 0.0, 2.0])
    assert mean("peers_mean", *sent) == [1.0, 0.0, 3.0]
    assert mean("senders_mean", *sent) == [2.0, 0.0, 3.0]


def test_disjoint_elements_are_summed_over_senders_and_averaged_over_peers() -> None:
    sent = (5, [1.0, 0.0, 0.0]), (5, [0.0, 2.0, 0.0]), (5, [0.0, 0.0, 3.0])
    assert mean("senders_mean", *sent) == [1.0, 2.0, 3.0]
    assert mean("peers_mean", *sent) == [pytest.approx(each / 3) for each in (1, 2, 3)]


def test_senders_are_weighted_by_tokens() -> None:
    assert mean("senders_mean", (3, [1.0, 5.0]), (1, [5.0, 0.0])) == [2.0, 5.0]


def test_what_is_late_makes_room_for_itself_over_peers_only() -> None:
    assert mean("peers_mean", (2, [3.0]), awaited=1) == [2.0]
    assert mean("senders_mean", (2, [3.0]), awaited=1) == [3.0]


def test_nobody_sent_anything_of_weight() -> None:
    assert mean("senders_mean", (0, [3.0, 0.0])) == [0.0, 0.0]


def test_the_mean_over_peers_is_what_merging_vectors_one_by_one_makes() -> None:
    vectors = [(weight, torch.randn(70_000, generator=torch.Generator().manual_seed(weight))) for weight in (5, 9, 1)]
    found = empty_mean("peers_mean", 70_000)
    for weight, vector in vectors:
        found.add(weight, vector)
    assert found.result().equal(merge(vectors))
