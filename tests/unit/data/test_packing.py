"""Packing: the corpus comes back out of the shards, and only the run's maker needs to have it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft import wire
from weft.config import from_tree
from weft.data import corpus, packing
from weft.data.corpus import BinSource, CorpusConfig, JsonlSource, StdlibSource, TextSource
from weft.data.packing import BytesConfig, CharactersConfig, JsonConfig, TokenizerConfig, make_tokenizer, pack
from weft.data.store import DataIndex, ShardStore
from weft.data.tokenizer import ByteTokenizer, CharTokenizer, JsonTokenizer, train_bpe
from weft.errors import DataError, TokenizerMismatch


def stream(store: ShardStore, index: DataIndex, split: corpus.Split) -> list[int]:
    return [token for info in index.shards(split) for token in store.open(index, info).tolist()]


def texts(tmp_path: Path, count: int = 60) -> CorpusConfig:
    (tmp_path / "texts").mkdir()
    for number in range(count):
        (tmp_path / "texts" / f"{number:03}.txt").write_text(f"document number {number}: " + "naïve " * (number % 5))
    return CorpusConfig(source=TextSource(paths=("texts",)))


@pytest.mark.parametrize("shard_nbytes", [4, 100, 101, 1 << 20])
def test_the_corpus_comes_back_out_of_its_shards(tmp_path: Path, shard_nbytes: int) -> None:
    data, tokenizer, store = texts(tmp_path), ByteTokenizer(), ShardStore(tmp_path / "shards")
    index = pack(store, data, tokenizer, tmp_path, shard_nbytes=shard_nbytes)
    pieces = list(corpus.split(data.source, tmp_path, data.heldout_fraction))  # type: ignore[arg-type]
    for split, text_nbytes in (("train", index.train_text_nbytes), ("heldout", index.heldout_text_nbytes)):
        documents = [text for side, text in pieces if side == split]
        tokens = stream(store, index, split)  # type: ignore[arg-type]
        parts = bytes(token if token < 256 else 0 for token in tokens).split(b"\0")
        assert [part.decode() for part in parts] == documents
        assert tokens.count(256) == len(documents) - 1
        assert text_nbytes == sum(len(text.encode()) for text in documents)
        assert all(info.nbytes == shard_nbytes - shard_nbytes % 2 for info in index.shards(split)[:-1])  # type: ignore[arg-type]


def test_packing_twice_gives_the_same_index(tmp_path: Path) -> None:
    data = texts(tmp_path)
    first = pack(ShardStore(tmp_path / "a"), data, ByteTokenizer(), tmp_path)
    assert pack(ShardStore(tmp_path / "b"), data, ByteTokenizer(), tmp_path) == first
    assert first.tokenizer == ByteTokenizer().digest


def test_one_document_has_no_end_of_text(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("to be or not to be" * 10)
    data = CorpusConfig(source=TextSource(paths=("input.txt",)), heldout_fraction=0.1)
    tokenizer = make_tokenizer(CharactersConfig(), data, tmp_path)
    store = ShardStore(tmp_path / "shards")
    index = pack(store, data, tokenizer, tmp_path)
    assert (index.num_tokens("train"), index.num_tokens("heldout")) == (162, 18)
    assert tokenizer.decode(stream(store, index, "train")) == ("to be or not to be" * 10)[:162]
    assert tokenizer.end_of_text not in stream(store, index, "train")


def test_a_long_document_is_tokenized_in_pieces_cut_after_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_PIECE_CHARACTERS", 50)
    text = "".join(f"line {number} of many\n" for number in range(100)) + "x" * 200
    (tmp_path / "a.txt").write_text(text)
    store, tokenizer = ShardStore(tmp_path / "shards"), train_bpe([text], 300)
    data = CorpusConfig(source=TextSource(paths=("a.txt",)), heldout_fraction=0.5)
    index = pack(store, data, tokenizer, tmp_path)
    both = [stream(store, index, split) for split in ("train", "heldout")]  # type: ignore[arg-type]
    assert "".join(map(tokenizer.decode, both)) == text
    assert index.train_text_nbytes + index.heldout_text_nbytes == len(text)


def test_a_joiner_whose_own_library_differs_gets_the_makers_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines, two Pythons: what is trained on is named by digest, so the joiner never packs."""
    libraries = {}
    for machine in ("maker", "joiner"):
        libraries[machine] = tmp_path / machine / "python3"
        libraries[machine].mkdir(parents=True)
        for number in range(40):
            (libraries[machine] / f"m{number:02}.py").write_text(f"# module {number} of {machine}\n" * 20)

    def run_on(machine: str) -> None:
        monkeypatch.setattr(corpus.files.sysconfig, "get_paths", lambda: {"stdlib": str(libraries[machine])})

    run_on("maker")
    maker = ShardStore(tmp_path / "maker" / "shards")
    index = pack(maker, CorpusConfig(), ByteTokenizer(), tmp_path, shard_nbytes=4096)
    genesis = wire.encode(index)

    run_on("joiner")
    joiner = ShardStore(tmp_path / "joiner" / "shards")
    own = pack(ShardStore(tmp_path / "joiner" / "own"), CorpusConfig(), ByteTokenizer(), tmp_path, shard_nbytes=4096)
    received: DataIndex = wire.decode(genesis, DataIndex)
    assert own != received
    assert len(joiner.missing(received)) == len({info.digest for info in (*index.train, *index.heldout)}) > 2
    for info in joiner.missing(received):
        data = maker.read(info.digest)
        assert data is not None
        joiner.add(received, info.digest, data)
    assert joiner.missing(received) == ()
    for split in ("train", "heldout"):
        assert stream(joiner, received, split) == stream(maker, index, split)  # type: ignore[arg-type]


def test_the_default_corpus_packs_into_a_few_shards(tmp_path: Path) -> None:
    index = pack(ShardStore(tmp_path), CorpusConfig(source=StdlibSource()), ByteTokenizer(), tmp_path)
    assert index.dtype == "uint16"
    assert 2 <= len(index.train) <= 10
    assert index.train_text_nbytes <= index.num_tokens("train") < index.train_text_nbytes * 1.001


# --- token files ---


def write_bin(path: Path, tokens: list[int], dtype: str = "<u2") -> None:
    np.array(tokens, dtype=dtype).tofile(path)


def test_token_files_are_taken_as_they_are(tmp_path: Path) -> None:
    write_bin(tmp_path / "train.bin", [1, 2, 3, 256] * 25)
    write_bin(tmp_path / "val.bin", [5, 6])
    store = ShardStore(tmp_path / "shards")
    both = CorpusConfig(source=BinSource(path="train.bin", heldout_path="val.bin"))
    index = pack(store, both, ByteTokenizer(), tmp_path)
    assert stream(store, index, "train") == [1, 2, 3, 256] * 25
    assert stream(store, index, "heldout") == [5, 6]
    assert (index.train_text_nbytes, index.heldout_text_nbytes) == (75, 2)
    cut = pack(store, CorpusConfig(source=BinSource(path="train.bin")), ByteTokenizer(), tmp_path)
    assert (cut.num_tokens("train"), cut.num_tokens("heldout")) == (95, 5)


@pytest.mark.parametrize(
    ("content", "dtype", "error", "message"),
    [
        (b"", "uint16", DataError, "0 bytes: not a whole"),
        (b"abc", "uint16", DataError, "3 bytes: not a whole"),
        (b"abcdef", "uint32", DataError, "6 bytes: not a whole"),
        (b"\x01\x01" * 10, "uint16", TokenizerMismatch, "token id 257, but the tokenizer has 257"),
    ],
)
def test_a_token_file_that_does_not_fit_is_named(
    tmp_path: Path, content: bytes, dtype: Any, error: type[DataError], message: str
) -> None:
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(error, match=message):
        pack(
            ShardStore(tmp_path / "s"),
            CorpusConfig(source=BinSource(path="a.bin", dtype=dtype)),
            ByteTokenizer(),
            tmp_path,
        )
    with pytest.raises(DataError, match=r"cannot read .*none\.bin"):
        pack(ShardStore(tmp_path / "s"), CorpusConfig(source=BinSource(path="none.bin")), ByteTokenizer(), tmp_path)


# --- which tokenizer ---


def test_an_alphabet_covers_the_heldout_text_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 99 + "z")
    data = CorpusConfig(source=TextSource(paths=("a.txt",)))
    tokenizer = make_tokenizer(CharactersConfig(), data, tmp_path)
    assert isinstance(tokenizer, CharTokenizer)
    assert tokenizer.decode([0, 1]) == "az"
    index = pack(ShardStore(tmp_path / "s"), data, tokenizer, tmp_path)
    assert index.vocab_size == 3


def test_the_run_file_names_its_tokenizer_by_type(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(ByteTokenizer().to_json())
    for tree, kind in (
        ({"type": "bytes"}, ByteTokenizer),
        ({"type": "json", "path": "tokenizer.json"}, JsonTokenizer),
        ({"type": "json", "path": str(tmp_path)}, JsonTokenizer),
    ):
        config = from_tree(tree, TokenizerConfig, where="run.toml")  # type: ignore[type-var]
        assert isinstance(make_tokenizer(config, CorpusConfig(), tmp_path), kind)
    with pytest.raises(DataError, match=r"none\.json"):
        make_tokenizer(JsonConfig(path="none.json"), CorpusConfig(), tmp_path)
    with pytest.raises(DataError, match="holds tokens, not text"):
        make_tokenizer(CharactersConfig(), CorpusConfig(source=BinSource(path="a.bin")), tmp_path)
    assert isinstance(make_tokenizer(BytesConfig(), CorpusConfig(), tmp_path), ByteTokenizer)


def test_documents_of_lines_are_parted_by_end_of_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{number}"}}\n' for number in range(100)))
    store = ShardStore(tmp_path / "shards")
    index = pack(store, CorpusConfig(source=JsonlSource(paths=("a.jsonl",))), ByteTokenizer(), tmp_path)
    assert stream(store, index, "train").count(256) + stream(store, index, "heldout").count(256) == 98


def test_shards_of_an_impossible_size_are_refused(tmp_path: Path) -> None:
    for shard_nbytes in (0, 3, (64 << 20) + 1):
        with pytest.raises(DataError, match="shards of"):
            pack(ShardStore(tmp_path), CorpusConfig(), ByteTokenizer(), tmp_path, shard_nbytes=shard_nbytes)


def test_too_many_shards_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MAX_SHARDS", 3)
    with pytest.raises(DataError, match="more than 3 shards"):
        pack(ShardStore(tmp_path / "shards"), texts(tmp_path), ByteTokenizer(), tmp_path, shard_nbytes=10)
