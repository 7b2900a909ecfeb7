"""Rows of whole texts: each text whole in one row, and read as it was written."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.data.rows import UNTRAINED, Batch, Packer, batch_of, words, written
from weft.data.store import BEGINS, TRAINED

LENGTH, PADDING = 16, 99

texts = st.lists(
    st.lists(st.tuples(st.integers(0, 90), st.booleans()), min_size=1, max_size=LENGTH), min_size=1, max_size=200
)


def stream(given_texts: list[list[tuple[int, bool]]]) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
    packer, rows = Packer(LENGTH, PADDING), []
    for text in given_texts:
        ids, is_trained = (np.array(side) for side in zip(*text, strict=True))
        rows += packer.add(words(ids.astype(np.uint32), is_trained.astype(bool)))
    rows += packer.finish()
    assert all(len(row) == LENGTH for row in rows[:-1])
    return np.concatenate(rows)


def windows(found: "np.ndarray[tuple[int], np.dtype[np.uint32]]") -> torch.Tensor:
    num = (len(found) - 1) // LENGTH
    places = np.arange(num)[:, None] * LENGTH + np.arange(LENGTH + 1)
    return torch.from_numpy(found[places].astype(np.int64))


@given(texts)
def test_each_text_lies_whole_in_one_row_and_the_rest_is_padding(given_texts: list[list[tuple[int, bool]]]) -> None:
    found = windows(stream(given_texts))[:, :-1]
    segments = []
    for row in found.tolist():
        starts = [place for place, word in enumerate(row) if word & BEGINS]
        assert starts[0] == 0
        segments += [row[start:stop] for start, stop in zip(starts, [*starts[1:], LENGTH], strict=True)]
    ids = [tuple(word & (BEGINS - 1) for word in segment) for segment in segments]
    padding = [each for each in ids if set(each) == {PADDING}]
    assert sorted(each for each in ids if PADDING not in each) == sorted(
        tuple(token for token, _ in text) for text in given_texts
    )
    assert len(padding) + len(given_texts) == len(segments)


def test_the_fullest_row_with_room_is_taken() -> None:
    packer = Packer(10, PADDING)
    texts = [np.full(num, num, np.uint32) for num in (6, 7, 3, 4)]  # 6 | 7 | 3 fits beside 7 best | 4 beside 6
    rows = [row.tolist() for text in texts for row in packer.add(text)]
    assert rows == [[7] * 7 + [3] * 3, [6] * 6 + [4] * 4]
    assert [row.tolist() for row in packer.finish()] == [[PADDING | BEGINS]]


@given(texts)
def test_targets_are_trained_tokens_of_the_same_text_and_positions_count_in_it(
    given_texts: list[list[tuple[int, bool]]],
) -> None:
    found = windows(stream(given_texts))
    batch = batch_of(found, has_rows=True)
    num = 0
    for row in range(len(found)):
        at = -1
        for place in range(LENGTH):
            word, after = int(found[row, place]), int(found[row, place + 1])
            at = 0 if word & BEGINS else at + 1
            assert batch.positions is not None
            assert batch.positions[row, place] == at
            assert batch.tokens[row, place] == word & (BEGINS - 1)
            is_target = bool(after & TRAINED) and not after & BEGINS
            assert batch.targets[row, place] == (after & (BEGINS - 1) if is_target else UNTRAINED)
            num += is_target
    # Nothing is lost but what nothing can predict: the first token of each text.
    assert num == sum(is_trained for text in given_texts for _, is_trained in text[1:]) == batch.num_predicted


@given(texts)
def test_what_stages_pass_on_is_read_as_the_same_batch(given_texts: list[list[tuple[int, bool]]]) -> None:
    batch = batch_of(windows(stream(given_texts)), has_rows=True)
    again = batch_of(written(batch), has_rows=True)
    assert all(torch.equal(one, other) for one, other in zip(batch, again, strict=True))


def test_of_running_text_words_are_tokens_and_all_is_predicted() -> None:
    ids = torch.arange(22).view(2, 11)
    batch = batch_of(ids, has_rows=False)
    assert batch.positions is None
    assert torch.equal(batch.targets, batch.tokens + 1)
    assert batch.num_predicted == 20
    assert torch.equal(written(batch), ids)


def test_a_part_weighs_as_much_as_is_predicted_in_it() -> None:
    targets = torch.tensor([[1, UNTRAINED, UNTRAINED], [1, 2, UNTRAINED], [UNTRAINED] * 3])
    zeros = torch.zeros_like(targets)
    batch = Batch(zeros, targets, zeros)
    assert [batch.part(row, row + 1).share_of(batch) for row in range(3)] == pytest.approx([1 / 3, 2 / 3, 0])
    assert batch.part(2, 3).share_of(batch.part(2, 3)) == 0
    text = Batch(zeros, zeros)
    assert text.part(0, 1).share_of(text) == pytest.approx(1 / 3)
