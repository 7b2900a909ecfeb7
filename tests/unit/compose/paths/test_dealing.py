"""Documents of a folder of paths: none is lost where shards overlap, and each path can be measured and trained."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from unit.compose.paths.tiny import LEVELS
from weft.compose.paths.dealing import (
    Documents,
    heldout_shards,
    read_documents,
    require_samples,
    tokens_of,
    write_documents,
)
from weft.compose.paths.routing import made, shards
from weft.data.documents import Document
from weft.data.tokenizer import ByteTokenizer
from weft.errors import ConfigError
from weft.ids import Digest

NUM = len(LEVELS.paths)
SCORES = np.random.default_rng(0).normal(size=(20, NUM))
WORDS = ByteTokenizer()


def given(num: int) -> list[Document]:
    return [Document(f"{number}", "abc") for number in range(num)]


@pytest.mark.parametrize("overlap", [1, 2, NUM])
def test_what_was_given_twice_is_read_twice_however_many_paths_it_is_of(tmp_path: Path, overlap: int) -> None:
    train, held = [*given(17), *given(3)], [*given(30)[20:], *given(30)[20:]]
    dealt = shards(SCORES, overlap=overlap)
    counted = write_documents(tmp_path, LEVELS, Documents(train, held, given(5)), dealt, dealt)
    assert sum(counted) == overlap * len(train)
    found = read_documents(tmp_path, LEVELS, overlap)
    assert (Counter(found.train), Counter(found.heldout)) == (Counter(train), Counter(held))
    assert found.router == given(5)


@pytest.mark.parametrize("num", [NUM - 1, NUM, 20])
def test_each_path_has_a_document_to_be_measured_by_where_there_are_as_many(num: int) -> None:
    """Of a router that sends all to one path."""
    weights, biases = np.zeros((NUM, 3)), np.eye(NUM)[0]
    router = made("softmax", LEVELS.config, Digest("ab" * 32), weights, biases)
    found = heldout_shards(router, np.zeros((num, 3)), overlap=1)
    assert sum(map(len, found)) == num
    assert sum(len(each) > 0 for each in found) == min(num, NUM)


def test_a_path_needs_a_whole_sample() -> None:
    """Of three documents with three letters each, and what ends them, a sample of 11 tokens and the next is made."""
    assert WORDS.end_of_text is not None
    assert tokens_of(WORDS, given(1)[0]).tolist() == [*b"abc", WORDS.end_of_text]
    mine = tuple(np.arange(3) for _ in range(NUM))
    require_samples(given(3), mine, LEVELS, WORDS, 11)
    with pytest.raises(ConfigError, match=r"path 0\.0 has 3 documents of 12 tokens, and a sample takes 13"):
        require_samples(given(3), mine, LEVELS, WORDS, 12)
    with pytest.raises(ConfigError, match=r"path 1\.1 has 0 documents of 0 tokens"):
        require_samples(given(3), (*mine[:-1], np.arange(0)), LEVELS, WORDS, 11)
