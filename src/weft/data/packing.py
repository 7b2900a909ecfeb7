"""Turns a corpus into shards and their index, one document at a time. Done once, by the maker of a run.

Documents follow one another with the tokenizer's end-of-text between them, training and held-out text in
streams of their own; a stream is cut into shards wherever one is full. The same corpus and tokenizer give the
same digests on every machine.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, assert_never

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from weft.config import Config
from weft.data import corpus
from weft.data.corpus import BinSource, ConversationsSource, CorpusConfig, Split
from weft.data.store import (
    MAX_SHARD_NBYTES,
    MAX_SHARDS,
    SHARD_NBYTES,
    DataIndex,
    Dtype,
    ShardInfo,
    ShardStore,
    dtype_for,
)
from weft.data.tokenizer import ByteTokenizer, CharTokenizer, JsonTokenizer, Tokenizer
from weft.errors import DataError, TokenizerMismatch

# A document is tokenized in pieces of at most this many characters, cut after a line: bounds the library's memory,
# which is some hundred bytes per character.
_PIECE_CHARACTERS = 1 << 20
_BIN_TOKENS_AT_ONCE = 1 << 20


class BytesConfig(Config, frozen=True, kw_only=True, tag="bytes"):
    """Every byte is a token: 257 ids with end-of-text."""


class CharactersConfig(Config, frozen=True, kw_only=True, tag="characters"):
    """Every character of the corpus is a token."""


class JsonConfig(Config, frozen=True, kw_only=True, tag="json"):
    """A tokenizer.json: one's own (`weft tokenizer train`) or a published model's."""

    path: Annotated[str, Meta(min_length=1, description="the file or its folder, relative to the run file")]


TokenizerConfig = BytesConfig | CharactersConfig | JsonConfig


def make_tokenizer(config: TokenizerConfig, data: CorpusConfig, base: Path) -> Tokenizer:
    """Return the tokenizer that `config` describes.

    Args:
        data: the corpus: an alphabet is taken from all its text, held-out text included.
        base: the folder that relative paths start from: the run file's.

    Raises:
        DataError: a file is missing or malformed, or characters are asked of a corpus without text.
    """
    match config:
        case BytesConfig():
            return ByteTokenizer()
        case CharactersConfig():
            if isinstance(data.source, BinSource):
                raise DataError("a bin source holds tokens, not text: name the tokenizer.json that produced them.")
            if isinstance(data.source, ConversationsSource):
                raise DataError(
                    'conversations are written with a model\'s control tokens, which tokenizer = "characters" has not. '
                    'Name the tokenizer.json of a chat model: tokenizer = {type = "json", path = "MODEL"}.'
                )
            return CharTokenizer.of(document.text for document in corpus.documents(data.source, base))
        case JsonConfig(path=path):
            return JsonTokenizer.from_file(base / Path(path))
        case _:
            assert_never(config)


def pack(
    store: ShardStore,
    data: CorpusConfig,
    tokenizer: Tokenizer,
    base: Path,
    *,
    shard_nbytes: int = SHARD_NBYTES,
    on_packed: Callable[[int], None] = lambda _nbytes: None,
    on_empty: Callable[[], None] = lambda: None,
) -> DataIndex:
    """Write the corpus into `store` and return its index.

    Args:
        base: the folder that relative paths start from: the run file's.
        shard_nbytes: the size of every shard but the last, at most `MAX_SHARD_NBYTES`.
        on_packed: told how many bytes of text were packed since it was told last.
        on_empty: told of each document without text, which is left out.

    Raises:
        DataError: the corpus is missing, empty or malformed, or yields more than `MAX_SHARDS` shards.
        TokenizerMismatch: token files hold ids beyond the tokenizer's.
        DiskFull: no room for the shards.
    """
    if not 4 <= shard_nbytes <= MAX_SHARD_NBYTES:
        raise DataError(f"shards of {shard_nbytes} bytes: allowed are 4 to {MAX_SHARD_NBYTES}.")
    source = data.source
    assert not isinstance(source, ConversationsSource), "weft.chat packs those"
    dtype = dtype_for(tokenizer.vocab_size)
    streams = {split: Stream(store, dtype, shard_nbytes) for split in ("train", "heldout")}
    if isinstance(source, BinSource):
        for side, ids in _bin_tokens(source, base, data.heldout_fraction, tokenizer):
            nbytes = len(tokenizer.decode(ids).encode())
            streams[side].write(ids, nbytes)
            on_packed(nbytes)
    else:
        for side, text in corpus.split(source, base, data.heldout_fraction, on_empty):
            stream = streams[side]
            if stream.text_nbytes and tokenizer.end_of_text is not None:
                stream.write(np.array([tokenizer.end_of_text], dtype=np.uint32))
            for piece in _pieces(text):
                nbytes = len(piece.encode("utf-8", errors="replace"))
                stream.write(tokenizer.encode(piece), nbytes)
                on_packed(nbytes)
    train, heldout = streams["train"], streams["heldout"]
    return DataIndex(
        dtype=dtype,
        train=train.finish(),
        heldout=heldout.finish(),
        train_text_nbytes=train.text_nbytes,
        heldout_text_nbytes=heldout.text_nbytes,
        tokenizer=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
    )


class Stream:
    """Collects ids and puts a shard into the store whenever one is full.

    Raises:
        DataError: more than `MAX_SHARDS` shards.
        DiskFull: no room for them.
    """

    def __init__(self, store: ShardStore, dtype: Dtype, shard_nbytes: int) -> None:
        self.text_nbytes = 0
        self._store = store
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._shard_nbytes = shard_nbytes - shard_nbytes % self._dtype.itemsize
        self._buffer = bytearray()
        self._infos: list[ShardInfo] = []

    def write(self, ids: NDArray[np.integer], text_nbytes: int = 0) -> None:
        self.text_nbytes += text_nbytes
        self._buffer += ids.astype(self._dtype).tobytes()
        while len(self._buffer) >= self._shard_nbytes:
            self._flush(self._shard_nbytes)

    def finish(self) -> tuple[ShardInfo, ...]:
        if self._buffer:
            self._flush(len(self._buffer))
        return tuple(self._infos)

    def _flush(self, nbytes: int) -> None:
        if len(self._infos) == MAX_SHARDS:
            raise DataError(
                f"the corpus needs more than {MAX_SHARDS} shards of {self._shard_nbytes} bytes. Make them larger."
            )
        data = bytes(self._buffer[:nbytes])
        del self._buffer[:nbytes]
        digest = self._store.put(data)
        self._infos.append(ShardInfo(digest=digest, num_tokens=nbytes // self._dtype.itemsize, nbytes=nbytes))


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        stop = text.rfind("\n", start, start + _PIECE_CHARACTERS) + 1 or start + _PIECE_CHARACTERS
        yield text[start:stop]
        start = stop
    yield text[start:]


def _bin_tokens(
    source: BinSource, base: Path, heldout_fraction: float, tokenizer: Tokenizer
) -> Iterator[tuple[Split, NDArray[np.integer]]]:
    tokens = _map(base / Path(source.path), source.dtype)
    if source.heldout_path is None:
        border = int(len(tokens) * (1 - heldout_fraction))
        sides: dict[Split, NDArray[np.integer]] = {"train": tokens[:border], "heldout": tokens[border:]}
    else:
        sides = {"train": tokens, "heldout": _map(base / Path(source.heldout_path), source.dtype)}
    for side, ids in sides.items():
        for start in range(0, len(ids), _BIN_TOKENS_AT_ONCE):
            some = np.asarray(ids[start : start + _BIN_TOKENS_AT_ONCE])
            largest = int(some.max())
            if largest >= tokenizer.vocab_size:
                raise TokenizerMismatch(
                    f"{source.path} holds token id {largest}, but the tokenizer has {tokenizer.vocab_size} ids. "
                    f"Name the tokenizer.json that made the file, and check dtype = {source.dtype!r}."
                )
            yield side, some


def _map(path: Path, dtype: Dtype) -> NDArray[np.integer]:
    itemsize = np.dtype(dtype).itemsize
    try:
        nbytes = path.stat().st_size
        if nbytes == 0 or nbytes % itemsize:
            raise DataError(f"{path} has {nbytes} bytes: not a whole, positive number of {dtype} tokens.")
        return np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}.") from error
