"""Fragments: each number is in one, they are about as large, and what is taken can be put back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import ConfigError
from weft.sync.merge.method import PIECES, Scope


@given(st.integers(1, 20_000), st.integers(1, 9))
def test_each_number_is_in_one_fragment(num: int, fragments: int) -> None:
    try:
        scope = Scope(num, fragments)
    except ConfigError:
        assert num <= 64 * fragments * PIECES
        return
    vector = torch.arange(float(num))
    taken = [scope.take(vector, round) for round in range(fragments)]
    assert torch.equal(torch.cat(taken).sort().values, vector)
    assert [len(each) for each in taken] == [scope.num_sent(round) for round in range(fragments)]
    assert scope.most_sent == max(map(len, taken))
    assert torch.equal(scope.take(vector, fragments + 1), scope.take(vector, 1))


@given(st.integers(10_000, 20_000), st.integers(2, 9), st.integers(0, 8))
def test_what_is_put_back_changes_that_fragment_alone(num: int, fragments: int, round: int) -> None:
    scope, vector = Scope(num, fragments), torch.zeros(num)
    scope.put(vector, round, torch.ones(scope.num_sent(round)))
    for other in range(fragments):
        expected = float(other == round % fragments)
        assert set(scope.take(vector, other).tolist()) == {expected}


def test_fragments_of_a_large_vector_are_equal_and_from_all_depths() -> None:
    scope, vector = Scope(10_000_000, 3), torch.arange(10_000_000)
    sizes = [scope.num_sent(round) for round in range(3)]
    assert max(sizes) - min(sizes) < 0.06 * max(sizes)
    for round in range(3):
        places = scope.take(vector, round)
        assert int(places[0]) < 2_000_000 < 8_000_000 < int(places[-1])


def test_one_fragment_is_the_vector_itself() -> None:
    vector = torch.arange(10.0)
    assert Scope(10).take(vector, 7).data_ptr() == vector.data_ptr()
    Scope(10).put(vector, 7, torch.zeros(10))
    assert not vector.any()


def test_more_fragments_than_there_are_numbers_for_are_refused() -> None:
    with pytest.raises(ConfigError, match="fragments"):
        Scope(100, 5)
