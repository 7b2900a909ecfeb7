"""The documents of a folder of paths: which each path reads, what is held out, and what routers learn from.

    path-0.1.jsonl            a path trains on them
    path-0.1.heldout.jsonl    it is measured by them while it trains (`stopping`)
    router.jsonl              routers learn from them which path is best (`resharding`)

On what is held out, and on what routers learn from, no path trains. A line is a document: its name and its text. Where
shards overlap, a document stands in several files.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as Folder

import msgspec
import numpy as np

from weft.compose.paths.features import Text
from weft.compose.paths.folder import FOR_ROUTER, path_called, shard_of
from weft.compose.paths.levels import Levels
from weft.compose.paths.routing import PREFIX, Features, Router, RoutingConfig, Shards, shards
from weft.data.documents import Document
from weft.data.tokenizer import Tokenizer
from weft.errors import ConfigError
from weft.ids import several

LETTERS = 1 << 10  # of a document, in which its first tokens surely are


@dataclass(frozen=True)
class Documents:
    """
    Args:
        router: kept apart: routers learn from them.
    """

    train: Sequence[Document]
    heldout: Sequence[Document]
    router: Sequence[Document]


def prefixes(words: Tokenizer, given: Sequence[Document]) -> list[Text]:
    """Return the tokens of each document that decide its path."""
    return [words.encode(each.text[:LETTERS])[:PREFIX] for each in given]


def tokens_of(words: Tokenizer, document: Document) -> Text:
    """Return a document as it stands in samples: with what ends it, where the tokenizer has that."""
    end = [] if words.end_of_text is None else [words.end_of_text]
    return np.concatenate([words.encode(document.text).astype(np.int64), np.array(end, dtype=np.int64)])


def require_samples(given: Sequence[Document], train: Shards, cut: Levels, words: Tokenizer, seq_len: int) -> None:
    """Accept shards of which each has a sample at least.

    Args:
        train: which documents of `given` are each path's.

    Raises:
        ConfigError: a path has no whole sample.
    """
    for path, mine in zip(cut.paths, train, strict=True):
        num_tokens = 0
        for number in mine.tolist():
            num_tokens += len(tokens_of(words, given[number]))
            if num_tokens > seq_len:
                break
        else:
            raise ConfigError(
                f"path {path_called(path)} has {several(len(mine), 'document')} of {num_tokens:,} tokens, and a sample "
                f"takes {seq_len + 1:,}. Route more documents, with fewer levels, or with a smaller --seq-len."
            )


def heldout_shards(router: Router, z: Features, overlap: int) -> Shards:
    """Return what is held out for each path: a document at least, where there are as many as paths."""
    scores = router.scores(z)
    one = (scores.shape[1] + 0.5) / max(1, len(z))
    return shards(scores, overlap=overlap, least=max(RoutingConfig().least, one))


def write_documents(folder: Folder, cut: Levels, given: Documents, train: Shards, heldout: Shards) -> tuple[int, ...]:
    """Write the files of a folder; return how many documents each path trains on, in the order of `Levels.paths`.

    Args:
        train, heldout: which documents of `given` are each path's.
    """
    counted = []
    for path, mine, held in zip(cut.paths, train, heldout, strict=True):
        _write(folder / shard_of(path), [given.train[number] for number in mine.tolist()])
        _write(folder / shard_of(path, is_heldout=True), [given.heldout[number] for number in held.tolist()])
        counted.append(len(mine))
    _write(folder / FOR_ROUTER, given.router)
    return tuple(counted)


def read_documents(folder: Folder, cut: Levels, overlap: int) -> Documents:
    """Return all documents of a folder, each once.

    Args:
        overlap: paths that each document is of.

    Raises:
        ConfigError: a file is missing, or cannot be read.
    """
    train, heldout = (
        Counter(each for path in cut.paths for each in read_lines(folder / shard_of(path, is_heldout=is_heldout)))
        for is_heldout in (False, True)
    )
    return Documents(_once(train, overlap), _once(heldout, overlap), read_for_router(folder))


def read_for_router(folder: Folder) -> list[Document]:
    """Return what is kept apart for routers.

    Raises:
        ConfigError: nothing is, or it cannot be read.
    """
    if not (folder / FOR_ROUTER).exists() or not (found := read_lines(folder / FOR_ROUTER)):
        raise ConfigError(
            f"{folder}: no documents are kept apart for routers, which learn only from what no path was trained on. "
            "Route again, with a --router-share above 0."
        )
    return found


def read_lines(file: Folder) -> list[Document]:
    """
    Raises:
        ConfigError: the file is missing, or cannot be read.
    """
    try:
        return msgspec.json.Decoder(Document).decode_lines(file.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}. Copy the folder of the paths again.") from None


def _once(counts: Counter[Document], overlap: int) -> list[Document]:
    """Return documents of which each stands in `overlap` files; one that was given twice in as many more."""
    return [each for each, num in counts.items() for _ in range(max(1, num // overlap))]


def _write(file: Folder, given: Sequence[Document]) -> None:
    encoder = msgspec.json.Encoder()
    with file.open("wb") as out:
        for document in given:
            out.write(encoder.encode(document) + b"\n")
