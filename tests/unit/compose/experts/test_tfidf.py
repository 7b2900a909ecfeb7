"""Vectors of texts against the formulas written out, and what all who share the record can count on."""

import math
import re
from collections import Counter

import numpy as np
import pytest

from unit.compose.experts.texts import documents, kind_of
from weft import wire
from weft.compose.experts import tfidf as module
from weft.compose.experts.tfidf import MOST_LETTERS, Sparse, Tfidf, TfidfRecord, learnt, sampled, words_of
from weft.data.documents import Document
from weft.errors import DataError, WireError
from weft.rng import stream


def reference(texts: list[str]) -> tuple[list[str], np.ndarray]:
    """Return the words and the tf-idf of texts, element by element, as scikit-learn's TfidfVectorizer defines it."""
    split = [[word for word in re.findall(r"\b\w\w+\b", text.lower()) if not word[0].isdigit()] for text in texts]
    spread = Counter(word for words in split for word in set(words))
    known = sorted(word for word, num in spread.items() if 2 <= num <= len(texts) / 2)
    rows = np.zeros((len(texts), len(known)))
    for row, words in enumerate(split):
        for column, word in enumerate(known):
            idf = math.log((1 + len(texts)) / (1 + spread[word])) + 1
            rows[row, column] = words.count(word) * idf
        rows[row] /= np.linalg.norm(rows[row]) or 1.0
    return known, rows


def dense(matrix: Sparse) -> np.ndarray:
    return matrix.times(np.eye(matrix.num_columns, dtype=np.float32))


TEXTS = [document.text for document in documents(12, num_words=9)]


def test_tf_idf_is_that_of_the_formula() -> None:
    words, rows = reference(TEXTS)
    found = learnt(TEXTS, seed=1)
    assert list(found.words) == words
    np.testing.assert_allclose(dense(found.weigh(TEXTS)), rows, atol=1e-6)


def test_directions_are_the_first_right_singular_vectors() -> None:
    _, rows = reference(TEXTS)
    exact = np.linalg.svd(rows).Vh[:4].T
    found = learnt(TEXTS, seed=1, num_directions=4).directions
    assert found.shape == exact.shape
    np.testing.assert_allclose(found @ found.T, exact @ exact.T, atol=2e-3)  # fp16
    assert (found[np.abs(found).argmax(0), np.arange(4)] > 0).all()


def test_vectors_are_of_length_1_and_texts_of_one_kind_lie_together() -> None:
    given = documents(20)
    vectors = learnt([document.text for document in given], seed=1).vectors([document.text for document in given])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    near = vectors @ vectors.T
    alike = np.array([[kind_of(one.name) == kind_of(other.name) for other in given] for one in given])
    assert near[alike].min() > near[~alike].max() + 0.5


def test_a_text_of_no_known_word_has_no_direction() -> None:
    found = learnt(TEXTS, seed=1)
    assert not found.vectors(["", "42 0x1f 7up", "zebra", "the and with"]).any()
    assert found.vectors([]).shape == (0, found.directions.shape[1])


def test_words_are_those_of_the_beginning_that_begin_with_no_digit() -> None:
    assert words_of("The 2nd Café's self_test x über a1 1a") == ["the", "café", "self_test", "über", "a1"]
    assert words_of(f"{'a' * 41} {'b' * 40}") == ["b" * 40]
    assert words_of(" " * MOST_LETTERS + "beyond") == []


def test_of_too_many_words_those_of_most_documents_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WORDS", 2)
    texts = ["pear plum fig", "pear plum", "pear", "plum", "fig", *(f"alone{number}" for number in range(4))]
    assert learnt(texts, seed=0).words == ("pear", "plum")


def test_a_record_gives_others_the_same_vectors() -> None:
    found = learnt(TEXTS, seed=1)
    again = Tfidf.of(wire.decode(wire.encode(found.record), TfidfRecord))
    assert again.digest == found.digest == learnt(TEXTS, seed=1).digest
    assert learnt(TEXTS[1:], seed=1).digest != found.digest
    assert np.array_equal(again.vectors(TEXTS), found.vectors(TEXTS))


def test_the_largest_record_fits() -> None:
    words = tuple(f"a{number:039}" for number in range(module.MOST_WORDS))
    most = Tfidf(
        words, np.ones(len(words), np.float32), np.ones((len(words), module.MOST_DIRECTIONS), np.float32)
    ).record
    assert Tfidf.of(wire.decode(wire.encode(most), TfidfRecord)).words == words


GOOD = TfidfRecord(words=("a1", "b1"), idf=bytes(8), directions=bytes(8))


@pytest.mark.parametrize(
    "fields",
    [
        {"format": 2},
        {"words": ()},
        {"words": ("b1", "a1")},
        {"words": ("a1", "a1")},
        {"idf": bytes(4)},
        {"idf": np.array([1, np.nan], "<f4").tobytes()},
        {"directions": b""},
        {"directions": bytes(6)},
        {"directions": np.array([1, np.inf], "<f2").tobytes()},
        {"directions": bytes(4 * (module.MOST_DIRECTIONS + 1))},
    ],
)
def test_a_record_that_is_not_whole_is_refused(fields: dict[str, object]) -> None:
    Tfidf.of(GOOD)
    tree = {name: getattr(GOOD, name) for name in GOOD.__struct_fields__} | fields
    with pytest.raises(WireError):
        Tfidf.of(TfidfRecord(**tree))


def test_documents_that_have_no_word_in_common_teach_nothing() -> None:
    with pytest.raises(DataError, match="2 documents have no words"):
        learnt(["pear plum", "mast keel"], seed=0)


def test_a_sample_is_drawn_by_names_whatever_the_order() -> None:
    given = documents(40)
    found = sampled(given, 10, seed=3)
    assert len(found) == 10
    assert sampled(given[::-1], 10, seed=3) == found
    assert sampled(given, 10, seed=4) != found
    # Who is drawn among more documents is drawn among fewer, too.
    assert {each.name for each in found} & {each.name for each in given[:60]} <= {
        each.name for each in sampled(given[:60], 10, seed=3)
    }
    assert sampled([Document("empty", ""), Document("long", "a" * (MOST_LETTERS + 5))], 9, seed=0) == [
        Document("long", "a" * MOST_LETTERS)
    ]


def test_a_sparse_matrix_multiplies_as_the_dense_one() -> None:
    generator = stream(1, "sparse")
    full = (generator.random((7, 5)) * (generator.random((7, 5)) < 0.4)).astype(np.float32)
    full[2] = 0
    rows, columns = np.nonzero(full)
    starts = np.searchsorted(rows, np.arange(8)).astype(np.int64)
    matrix = Sparse(starts, columns.astype(np.int32), full[rows, columns], 5)
    other = generator.random((5, 3)).astype(np.float32)
    np.testing.assert_allclose(matrix.times(other), full @ other, atol=1e-6)
    assert np.array_equal(dense(matrix.transposed()), full.T)
    assert np.array_equal(dense(matrix.transposed().transposed()), full)
