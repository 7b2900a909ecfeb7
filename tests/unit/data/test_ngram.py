"""The n-gram yardstick: equal to a plain reference, a proper distribution, and hard to beat by cheating it."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.ngram import NgramModel, _discounts

Gram = tuple[int, ...]


def reference(train: list[int], order: int, vocab_size: int, heldout: list[int]) -> list[float]:
    """Interpolated modified Kneser-Ney from dictionaries, as in Chen and Goodman 1998."""
    counts: dict[int, Counter[Gram]] = {
        order: Counter(tuple(train[at : at + order + 1]) for at in range(len(train) - order))
    }
    for length in range(order - 1, -1, -1):
        counts[length] = Counter(gram[1:] for gram in counts[length + 1])
    taken, totals, backoffs = {}, {}, {}
    for length, table in counts.items():
        discounts = _discounts(np.array(list(table.values())))
        taken[length] = {gram: float(discounts[min(count, 3) - 1]) for gram, count in table.items()}
        totals[length], backoffs[length] = defaultdict(int), defaultdict(float)
        for gram, count in table.items():
            totals[length][gram[:-1]] += count
            backoffs[length][gram[:-1]] += taken[length][gram]

    def probability(gram: Gram) -> float:
        length = len(gram) - 1
        shorter = probability(gram[1:]) if length else 1 / vocab_size
        total = totals[length].get(gram[:-1], 0)
        if not total:
            return shorter
        own = counts[length][gram] - taken[length].get(gram, 0.0)
        return (own + backoffs[length][gram[:-1]] * shorter) / total

    return [probability(tuple(heldout[max(0, at - order) : at + 1])) for at in range(1, len(heldout))]


def words(num: int, seed: int, vocab_size: int = 6) -> list[int]:
    """A stream in which each token mostly follows from the two before it."""
    draw = np.random.default_rng(seed)
    stream = [0, 1]
    while len(stream) < num:
        likely = (3 * stream[-1] + stream[-2] + 1) % vocab_size
        stream.append(likely if draw.random() < 0.7 else int(draw.integers(vocab_size)))
    return stream


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 4), min_size=5, max_size=120),
    st.lists(st.integers(0, 5), min_size=2, max_size=40),
    st.integers(0, 4),
)
def test_probabilities_are_those_of_the_reference(train: list[int], heldout: list[int], order: int) -> None:
    model = NgramModel.fit(np.array(train), order, 6)
    expected = reference(train, order, 6, heldout)
    assert model.probabilities(np.array(heldout)) == pytest.approx(expected, rel=1e-12)
    assert model.loss(np.array(heldout)) == pytest.approx(-sum(map(math.log, expected)) / len(expected))


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_probabilities_of_all_tokens_sum_to_one(order: int) -> None:
    vocab_size = 9  # three of which never occur
    model = NgramModel.fit(np.array(words(2000, seed=0), dtype=np.uint16), order, vocab_size)
    for context in ([0, 1, 2], [5, 5, 5], [8, 8, 8], [8, 0, 1], [3]):
        each = [float(model.probabilities(np.array([*context, token]))[-1]) for token in range(vocab_size)]
        assert min(each) > 0
        assert sum(each) == pytest.approx(1.0, abs=1e-12)


def test_more_context_predicts_better_until_it_is_noise() -> None:
    train, heldout = np.array(words(30_000, seed=0)), np.array(words(5_000, seed=1))
    losses = [NgramModel.fit(train, order, 6).loss(heldout) for order in range(6)]
    entropy = -(0.75 * math.log(0.75) + 5 * 0.05 * math.log(0.05))
    assert min(losses[0], losses[1]) > losses[2] + 0.3  # the stream follows from two tokens, not from one
    assert losses[2] == pytest.approx(entropy, abs=0.03)
    assert max(losses[3:]) < losses[2] + 0.1  # smoothing: longer contexts hardly hurt


def test_discounts_are_those_of_the_paper_where_they_are_defined() -> None:
    counts = np.repeat([1, 2, 3, 4, 9], [40, 12, 6, 4, 3])
    y = 40 / (40 + 24)
    assert _discounts(counts) == pytest.approx([1 - 2 * y * 12 / 40, 2 - 3 * y * 6 / 12, 3 - 4 * y * 4 / 6])
    assert _discounts(np.array([5, 5, 5])) == pytest.approx([0.5, 0.5, 0.5])
    strange = _discounts(np.repeat([1, 2, 3, 4], [1, 90, 1, 90]))
    assert (strange > 0).all()
    assert (strange <= [1, 2, 3]).all()


def test_what_cannot_be_counted_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        NgramModel.fit(np.zeros(10, dtype=int), 7, 257)
    with pytest.raises(ValueError, match="does not fit"):
        NgramModel.fit(np.zeros(10, dtype=int), -1, 257)
    with pytest.raises(ValueError, match="3 tokens hold no gram of 4"):
        NgramModel.fit(np.zeros(3, dtype=int), 3, 257)
    with pytest.raises(ValueError, match="at least two"):
        NgramModel.fit(np.zeros(10, dtype=int), 1, 257).loss(np.zeros(1, dtype=int))
