"""What a text is about, as a short vector: tf-idf of its words, put on few directions.

    documents ──sampled──► texts ──learnt──► Tfidf: words, how rare each is, and directions
    text ──weigh──► tf-idf, length 1 ──directions──► vector, length 1

One machine learns it from a sample and shares the record, some 2 MB. With it each peer gives its own documents their
vectors, and no document leaves the peer. Who computes alone may differ from others in last bits: a document as near to
one centre as to another may then lie in either cluster.

c-BTM (arXiv:2303.14177, section 2.1): tf-idf, a truncated singular value decomposition to 100 directions, and length 1;
words that begin with a digit are left out. In place of the paper's list of English words the words of more than half
of the documents are left out: other languages, and source, have others. The decomposition is randomized, as the
paper's library has it (Halko et al., arXiv:0909.4061, algorithm 4.4).
"""

import heapq
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import log

import numpy as np
from jaxtyping import Float32, Int32, Int64

from weft import rng, wire
from weft.data.documents import Document
from weft.errors import DataError, WireError
from weft.ids import Digest

FORMAT = 1
MOST_LETTERS = 1 << 14  # of a text are read: what it is about is clear by then, and a sample is bounded
MOST_WORDS = 1 << 13  # with MOST_DIRECTIONS in two bytes each, the record stays below 2 MiB
MOST_DIRECTIONS = 100
SAMPLE = 1 << 12  # documents: 64 MiB of letters at most
MOST_SHARE = 0.5  # of documents: a word that is in more tells few apart
LEAST_DOCUMENTS = 2  # a word of one document tells nothing of others
_MORE = 10  # directions that the decomposition finds beside those asked for (Halko et al., section 4.2)
_TURNS = 4  # of its power iteration

_WORD = re.compile(r"\b[^\W\d]\w{1,39}\b")  # no digit first, two letters or more; longer ones are no words


class TfidfRecord(wire.Record, frozen=True, kw_only=True):
    """What all share who cluster.

    Args:
        words: in ascending order.
        idf: of each word, fp32, little-endian.
        directions: a row for each word, fp16, little-endian.
    """

    format: int = FORMAT
    words: tuple[str, ...]
    idf: bytes
    directions: bytes


@dataclass(frozen=True)
class Sparse:
    """A matrix of few numbers that are not 0: those of row i stand at `starts[i] ..< starts[i + 1]`."""

    starts: Int64[np.ndarray, " borders"]
    columns: Int32[np.ndarray, " numbers"]
    values: Float32[np.ndarray, " numbers"]
    num_columns: int

    @property
    def num_rows(self) -> int:
        return len(self.starts) - 1

    def times(self, dense: Float32[np.ndarray, "columns width"]) -> Float32[np.ndarray, "rows width"]:
        """Return its product with a matrix: no more memory than that, whatever its size."""
        product = np.empty((self.num_rows, dense.shape[1]), np.float32)
        for row, (start, stop) in enumerate(pairwise(self.starts)):
            product[row] = self.values[start:stop] @ dense[self.columns[start:stop]]
        return product

    def transposed(self) -> "Sparse":
        order = np.argsort(self.columns, kind="stable")
        rows = np.repeat(np.arange(self.num_rows, dtype=np.int32), np.diff(self.starts))
        counts = np.bincount(self.columns, minlength=self.num_columns)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return Sparse(starts, rows[order], self.values[order], self.num_rows)


@dataclass(frozen=True, eq=False)
class Tfidf:
    """
    Args:
        words: in ascending order.
        idf: how rare each is.
        directions: what a word adds to a vector.
    """

    words: tuple[str, ...]
    idf: Float32[np.ndarray, " words"]
    directions: Float32[np.ndarray, "words directions"]

    @classmethod
    def of(cls, record: TfidfRecord) -> "Tfidf":
        """
        Raises:
            WireError: the record is of another format, too large, or not whole.
        """
        num = len(record.words)
        if record.format != FORMAT:
            raise WireError(f"tf-idf of format {record.format}; this weft reads {FORMAT}")
        if not 0 < num <= MOST_WORDS or list(record.words) != sorted(set(record.words)):
            raise WireError(f"tf-idf of {num} words, which are none, too many, or not in order")
        if len(record.idf) != 4 * num or len(record.directions) % (2 * num):
            raise WireError("tf-idf whose numbers are not one, and one row, for each word")
        idf = np.frombuffer(record.idf, "<f4").astype(np.float32)
        directions = np.frombuffer(record.directions, "<f2").astype(np.float32).reshape(num, -1)
        if not 0 < directions.shape[1] <= MOST_DIRECTIONS or not np.isfinite(idf).all():
            raise WireError("tf-idf of no direction, of too many, or of numbers that are not finite")
        if not np.isfinite(directions).all():
            raise WireError("tf-idf whose directions are not finite")
        return cls(record.words, idf, directions)

    @cached_property
    def record(self) -> TfidfRecord:
        idf, directions = self.idf.astype("<f4").tobytes(), self.directions.astype("<f2").tobytes()
        return TfidfRecord(words=self.words, idf=idf, directions=directions)

    @cached_property
    def digest(self) -> Digest:
        return wire.digest_of(self.record)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {word: place for place, word in enumerate(self.words)}

    def weigh(self, texts: Iterable[str]) -> Sparse:
        """Return the tf-idf of texts: a row each, of length 1; of 0, where none of the words is in it."""
        starts, columns, values = [0], [np.empty(0, np.int32)], [np.empty(0, np.float32)]
        for text in texts:
            counts = Counter(filter(self._places.__contains__, words_of(text)))
            columns.append(np.array([self._places[word] for word in counts], np.int32))
            row = np.fromiter(counts.values(), np.float32, len(counts)) * self.idf[columns[-1]]
            values.append(_at_length_1(row[None])[0])
            starts.append(starts[-1] + len(row))
        return Sparse(np.array(starts, np.int64), np.concatenate(columns), np.concatenate(values), len(self.words))

    def vectors(self, texts: Iterable[str]) -> Float32[np.ndarray, "texts directions"]:
        """Return a vector for each text, of length 1; of 0, where nothing is known of it."""
        return _at_length_1(self.weigh(texts).times(self.directions))


def words_of(text: str) -> list[str]:
    """Return the words that the beginning of a text has, as often as it has them."""
    return _WORD.findall(text[:MOST_LETTERS].lower())


def sampled(documents: Iterable[Document], num: int, seed: int) -> list[Document]:
    """Return the beginnings of so many documents, drawn by their names: whatever their order, the same ones.

    At most `num` of them are held at a time.
    """
    written = (Document(each.name, each.text[:MOST_LETTERS]) for each in documents if each.text)
    return heapq.nsmallest(num, written, key=lambda document: rng.order_key("sampled", seed, document.name))


def learnt(texts: Sequence[str], seed: int, num_directions: int = MOST_DIRECTIONS) -> Tfidf:
    """Return words, how rare they are, and directions, from a sample of texts.

    Raises:
        DataError: no word is in two texts and not in most of them.
    """
    spread = Counter(word for text in texts for word in set(words_of(text)))
    known = (word for word, num in spread.items() if LEAST_DOCUMENTS <= num <= MOST_SHARE * len(texts))
    words = tuple(sorted(heapq.nsmallest(MOST_WORDS, known, key=lambda word: (-spread[word], word))))
    if not words:
        raise DataError(
            f"{len(texts)} documents have no words by which they could be told apart: a word counts that is in "
            f"{LEAST_DOCUMENTS} or more, and not in more than half of them. Give more documents."
        )
    # idf = ln((1 + documents) / (1 + documents with the word)) + 1
    idf = np.array([log((1 + len(texts)) / (1 + spread[word])) + 1 for word in words], np.float32)
    weighed = Tfidf(words, idf, np.empty((len(words), 0), np.float32)).weigh(texts)
    directions = _directions(weighed, num_directions, seed)
    return Tfidf(words, idf, directions.astype(np.float16).astype(np.float32))  # as who is sent the record has it


def _directions(matrix: Sparse, num: int, seed: int) -> Float32[np.ndarray, "columns num"]:
    """Return the right singular vectors of the largest singular values, the largest element of each positive."""
    num = min(num, matrix.num_rows, matrix.num_columns)
    width = min(num + _MORE, matrix.num_rows, matrix.num_columns)
    transposed = matrix.transposed()
    drawn = rng.stream(seed, "tfidf").standard_normal((matrix.num_columns, width), np.float32)
    # Q spans what A Omega does, then A (A^T Q) and so on; B = Q^T A is small, and has the singular vectors of A.
    q = np.linalg.qr(matrix.times(drawn)).Q
    for _ in range(_TURNS):
        q = np.linalg.qr(matrix.times(np.linalg.qr(transposed.times(q)).Q)).Q
    found: Float32[np.ndarray, "columns num"] = np.linalg.svd(transposed.times(q), full_matrices=False).U[:, :num]
    largest = found[np.abs(found).argmax(0), np.arange(num)]
    return found * np.where(largest < 0, np.float32(-1), np.float32(1))


def _at_length_1(rows: Float32[np.ndarray, "rows width"]) -> Float32[np.ndarray, "rows width"]:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths == 0, np.float32(1), lengths)
