"""Tokenizers: exact both ways, canonical as blobs, and equal to what transformers makes of their tokenizer.json."""

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft import wire
from weft.data import tokenizer as tok
from weft.data.tokenizer import ByteTokenizer, CharTokenizer, JsonTokenizer, Tokenizer, from_bytes, train_bpe
from weft.errors import DataError, TokenizerMismatch, WireError

TEXT = "def weave(thread: str) -> None:\n\t'''Füge Fäden zusammen: 織る \U0001f9f5.'''\r\n    return  None\n\n" * 3
PROSE = "the quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 20


@pytest.fixture(scope="module")
def bpe() -> JsonTokenizer:
    return train_bpe([TEXT, PROSE], 300)


@pytest.fixture(params=["bytes", "characters", "bpe"])
def tokenizer(request: pytest.FixtureRequest, bpe: JsonTokenizer) -> Tokenizer:
    made: dict[str, Tokenizer] = {"bytes": ByteTokenizer(), "characters": CharTokenizer.of([TEXT, PROSE]), "bpe": bpe}
    return made[request.param]


def test_encoding_and_decoding_gives_the_text_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    assert ids.dtype == np.uint32
    assert int(ids.max()) < tokenizer.vocab_size
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode(ids.tolist()) == TEXT
    assert tokenizer.decode([]) == ""
    assert len(tokenizer.encode("")) == 0


def test_a_blob_gives_an_equal_tokenizer_and_the_same_digest(tokenizer: Tokenizer) -> None:
    again = from_bytes(tokenizer.to_bytes())
    assert type(again) is type(tokenizer)
    assert again.to_bytes() == tokenizer.to_bytes()
    assert again.digest == tokenizer.digest == wire.digest(tokenizer.to_bytes())
    assert (again.vocab_size, again.end_of_text) == (tokenizer.vocab_size, tokenizer.end_of_text)
    assert np.array_equal(again.encode(TEXT), tokenizer.encode(TEXT))


def test_different_tokenizers_have_different_digests(bpe: JsonTokenizer) -> None:
    digests = {t.digest for t in (ByteTokenizer(), CharTokenizer("ab"), CharTokenizer("abc"), bpe)}
    assert len(digests) == 4


def test_transformers_encodes_and_decodes_alike(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    file = tmp_path / "tokenizer.json"
    file.write_bytes(tokenizer.to_json())
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file))
    assert len(theirs) == tokenizer.vocab_size
    for text in (TEXT, PROSE, " a  b.\n\n c ' s , ?", "the dog ."):
        if isinstance(tokenizer, CharTokenizer):
            text = "".join(c for c in text if c in TEXT + PROSE)
        ours = tokenizer.encode(text)
        assert theirs.encode(text, add_special_tokens=False) == ours.tolist()
        assert theirs.decode(ours.tolist(), skip_special_tokens=True) == tokenizer.decode(ours) == text
    assert theirs.convert_tokens_to_ids("<|endoftext|>") == tokenizer.end_of_text


def test_the_exported_json_is_a_tokenizer_of_the_same_ids(tokenizer: Tokenizer) -> None:
    exported = JsonTokenizer(tokenizer.to_json(), tokenizer.end_of_text)
    assert exported.vocab_size == tokenizer.vocab_size
    assert np.array_equal(exported.encode(TEXT), tokenizer.encode(TEXT))
    scrambled = np.random.default_rng(0).integers(0, tokenizer.vocab_size, 2000)
    assert exported.decode(scrambled) == tokenizer.decode(scrambled)


@given(st.text())
def test_bytes_hold_every_text(text: str) -> None:
    ids = ByteTokenizer().encode(text)
    assert ids.tolist() == list(text.encode())
    assert ByteTokenizer().decode(ids) == text


@settings(max_examples=200)
@given(st.lists(st.integers(0, 256), max_size=40))
def test_bytes_that_are_no_text_decode_like_the_exported_json(ids: list[int]) -> None:
    assert EXPORTED_BYTES.decode(ids) == ByteTokenizer().decode(ids)


EXPORTED_BYTES = JsonTokenizer(ByteTokenizer().to_json(), 256)


@given(st.text(min_size=1))
def test_characters_hold_the_text_their_alphabet_is_from(text: str) -> None:
    tokenizer = CharTokenizer.of([text])
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == len(set(text)) + 1


def test_an_unknown_character_is_named() -> None:
    tokenizer = CharTokenizer.of(["hello"])
    for text, name in (("help", "'p'"), ("a", "'a'"), ("hellö", r"U\+00F6")):
        with pytest.raises(DataError, match=name):
            tokenizer.encode(text)


def test_half_a_surrogate_pair_is_no_text(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="character 3"):
        tokenizer.encode("de\ud800")


@pytest.mark.parametrize("alphabet", ["", "ba", "aab", "a\ud800"])
def test_an_alphabet_that_is_not_canonical_is_refused(alphabet: str) -> None:
    with pytest.raises(DataError):
        CharTokenizer(alphabet)


def test_control_tokens_cannot_be_written_into_text(tokenizer: Tokenizer) -> None:
    if isinstance(tokenizer, CharTokenizer):
        tokenizer = CharTokenizer.of(["<|endoftext|>"])
    ids = tokenizer.encode("<|endoftext|>")
    assert tokenizer.end_of_text not in ids.tolist()
    assert tokenizer.decode(ids) == "<|endoftext|>"
    assert tokenizer.decode([*ids.tolist(), tokenizer.end_of_text]) == "<|endoftext|>"


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\xc1garbage",
        wire.encode(tok.CharactersBlob(alphabet="ba")),
        wire.encode(tok.CharactersBlob(alphabet="")),
        wire.encode(tok.JsonBlob(json=b"{}", end_of_text=None)),
        wire.encode(tok.JsonBlob(json=b"\xff", end_of_text=None)),
        wire.encode(tok.JsonBlob(json=ByteTokenizer().to_json(), end_of_text=257)),
        wire.encode(tok.JsonBlob(json=ByteTokenizer().to_json(), end_of_text=-1)),
        msgspec.msgpack.encode({"type": "path", "path": "/etc/passwd"}),
        msgspec.msgpack.encode({"type": "bytes", "path": "/etc/passwd"}),
    ],
)
def test_a_malformed_blob_is_the_remotes_fault(blob: bytes) -> None:
    with pytest.raises(WireError):
        from_bytes(blob)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_tokenizer_or_a_wire_error(blob: bytes) -> None:
    try:
        tokenizer = from_bytes(blob)
    except WireError:
        return
    assert tokenizer.to_bytes() == blob


def test_a_blob_beyond_its_bound_is_dropped_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tok, "MAX_BLOB_NBYTES", 100)
    with pytest.raises(WireError, match="exceeds the bound of 100"):
        from_bytes(ByteTokenizer().to_bytes() + bytes(100))


def test_bpe_compresses_and_has_the_size_asked_for(bpe: JsonTokenizer) -> None:
    assert bpe.vocab_size == 300
    assert bpe.end_of_text == 0
    assert len(bpe.encode(PROSE)) < 0.6 * len(PROSE)


def test_bpe_is_the_same_in_every_process(bpe: JsonTokenizer) -> None:
    code = (
        "import sys; from weft.data.tokenizer import train_bpe; "
        "print(train_bpe(sys.stdin.buffer.read().decode().split('\\0'), 300).digest)"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=f"{TEXT}\0{PROSE}".encode(),
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(tok.__file__).parents[2])},
            capture_output=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.decode().strip() == bpe.digest


def test_bpe_says_when_it_cannot_have_that_many_pieces() -> None:
    with pytest.raises(DataError, match="at least 257"):
        train_bpe([TEXT], 256)
    with pytest.raises(DataError, match=r"yield \d+ pieces, not 5000"):
        train_bpe(["a b c"], 5000)


def test_a_file_is_read_with_the_end_of_text_its_config_names(bpe: JsonTokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(ByteTokenizer().to_json())
    assert JsonTokenizer.from_file(tmp_path).end_of_text == 256
    for eos in ('"b"', '{"content": "b", "special": true}'):
        (tmp_path / "tokenizer_config.json").write_text(f'{{"eos_token": {eos}}}')
        assert JsonTokenizer.from_file(tmp_path / "tokenizer.json").end_of_text == ord("b")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json"):
        JsonTokenizer.from_file(tmp_path)


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.json: no such file"):
        JsonTokenizer.from_file(tmp_path / "none.json")
    broken = tmp_path / "broken.json"
    broken.write_text('{"model": 3}')
    with pytest.raises(DataError, match=r"broken\.json.*not a tokenizer\.json"):
        JsonTokenizer.from_file(broken)


def test_truncation_asked_for_in_the_file_does_not_cut_documents(tmp_path: Path) -> None:
    tree = msgspec.json.decode(ByteTokenizer().to_json())
    tree["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    assert len(JsonTokenizer(msgspec.json.encode(tree), None).encode("longer than four")) == 16


@pytest.mark.parametrize("vocab_size", [257, 264, 320, 512])
def test_a_padded_vocabulary_is_accepted(vocab_size: int) -> None:
    tok.check_vocabulary(ByteTokenizer(), vocab_size)


@pytest.mark.parametrize("vocab_size", [1, 66, 256, 513, 50257])
def test_a_vocabulary_of_another_tokenizer_is_refused(vocab_size: int) -> None:
    with pytest.raises(TokenizerMismatch, match=f"257 ids.*{vocab_size}"):
        tok.check_vocabulary(ByteTokenizer(), vocab_size)


def tokenizer_json(model: dict[str, object], **more: object) -> bytes:
    empty = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding"))
    return msgspec.json.encode({"version": "1.0", "added_tokens": [], **empty, "model": model, **more})


WORDS = {"the": 0, "quick": 1}
SPACES = {"type": "Whitespace"}
LETTERS = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}
UNIGRAM = {"type": "Unigram", "unk_id": None, "vocab": [["the", -1.0], ["quick", -2.0]], "byte_fallback": False}
WORDPIECE = {"type": "WordPiece", "vocab": WORDS, "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}


@pytest.mark.parametrize(
    "json",
    [
        tokenizer_json({"type": "WordLevel", "vocab": WORDS, "unk_token": "<unk>"}, pre_tokenizer=SPACES),
        tokenizer_json({**WORDPIECE, "unk_token": "[UNK]"}, pre_tokenizer=SPACES),
        tokenizer_json(UNIGRAM, pre_tokenizer=SPACES),
        tokenizer_json({"type": "BPE", "vocab": WORDS, "merges": [], "unk_token": "<unk>"}),
    ],
    ids=["WordLevel", "WordPiece", "Unigram", "BPE"],
)
def test_a_tokenizer_without_a_token_for_the_unknown_says_so(json: bytes) -> None:
    made = JsonTokenizer(json, None)
    with pytest.raises(DataError, match="no piece for some of this text"):
        made.encode("the quick fox")


def test_text_that_a_tokenizer_would_drop_is_refused() -> None:
    bare = JsonTokenizer(tokenizer_json({"type": "BPE", "vocab": LETTERS, "merges": []}), None)
    assert bare.decode(bare.encode("the fox")) == "t h e   f o x"
    with pytest.raises(DataError, match=r"character '\\n' \(U\+000A\), number 8 of this text, has no piece"):
        bare.encode("the fox\nand")
    for _ in range(2):  # what was known before stays known, and what was not stays unknown
        assert len(bare.encode("the fox")) == 7
        with pytest.raises(DataError, match="character 'T'"):
            bare.encode("The fox")
    lower = {"type": "Lowercase"}
    lowered = JsonTokenizer(tokenizer_json({"type": "BPE", "vocab": LETTERS, "merges": []}, normalizer=lower), None)
    assert len(lowered.encode("THE fox")) == 7
    spaced = JsonTokenizer(tokenizer_json({"type": "BPE", "vocab": LETTERS, "merges": []}, pre_tokenizer=SPACES), None)
    assert len(spaced.encode("the\n\tfox")) == 6


def test_our_own_alphabet_refuses_the_same_text_after_its_export() -> None:
    ours = CharTokenizer.of(["the quick brown fox"])
    again = JsonTokenizer(ours.to_json(), ours.end_of_text)
    assert again.encode("the fox").tolist() == ours.encode("the fox").tolist()
    for each in (ours, again):
        with pytest.raises(DataError, match="character 'T'"):
            each.encode("the Tox")


@pytest.mark.parametrize("kind", ["bytes", "fallback", "unknown"])
def test_a_tokenizer_that_knows_every_text_drops_nothing(kind: str, bpe: JsonTokenizer) -> None:
    made = {
        "bytes": bpe.to_json(),
        "fallback": tokenizer_json(
            {
                **{"type": "BPE", "merges": [], "byte_fallback": True},
                "vocab": {**{f"<0x{byte:02X}>": byte for byte in range(256)}, "a": 256},
            }
        ),
        "unknown": tokenizer_json({"type": "BPE", "merges": [], "unk_token": "?", "vocab": {"?": 0, "a": 1}}),
    }[kind]
    assert len(JsonTokenizer(made, None).encode("a織")) >= 2


@pytest.mark.parametrize(
    ("whole", "message"),
    [
        (b"", "not a tokenizer"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "is a Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "is an HTML page"),
        (ByteTokenizer().to_json()[:900], "not a tokenizer"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (tokenizer_json({"type": "BPE", "vocab": {}, "merges": []}), "its vocabulary is empty"),
    ],
)
def test_what_is_no_tokenizer_is_refused_with_its_file(whole: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(whole)
    with pytest.raises(DataError, match=rf"tokenizer\.json.*{message}"):
        JsonTokenizer.from_file(tmp_path)


def test_a_mark_before_a_tokenizer_is_not_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"\xef\xbb\xbf" + ByteTokenizer().to_json())
    assert JsonTokenizer.from_file(tmp_path).to_json() == ByteTokenizer().to_json()


@pytest.mark.parametrize(
    "config",
    [
        '\ufeff{"eos_token": "b"}',
        '{"model_max_length": 1000000000000000019884624838656, "eos_token": "b"}',
        '{"model_max_length": 1e30, "scale": NaN, "eos_token": "b", "additional": [1.5, null]}',
    ],
)
def test_settings_that_public_tokenizers_have_are_read(config: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(ByteTokenizer().to_json())
    (tmp_path / "tokenizer_config.json").write_text(config, encoding="utf-8")
    assert JsonTokenizer.from_file(tmp_path).end_of_text == ord("b")


@pytest.mark.parametrize("config", ["[]", "1.5", "null"])
def test_settings_that_are_no_object_say_nothing(config: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(ByteTokenizer().to_json())
    (tmp_path / "tokenizer_config.json").write_text(config)
    assert JsonTokenizer.from_file(tmp_path).end_of_text == 256


def test_a_folder_with_sentencepiece_alone_says_how_to_convert_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e")
    with pytest.raises(DataError, match=r"tokenizer\.model beside it is SentencePiece's: make a tokenizer\.json"):
        JsonTokenizer.from_file(tmp_path)


def test_tokenizers_work_alike_where_their_files_say_the_same() -> None:
    for one in (ByteTokenizer(), CharTokenizer("abc")):
        as_file = JsonTokenizer(one.to_json(), one.end_of_text)
        again = JsonTokenizer(msgspec.json.format(one.to_json(), indent=4), one.end_of_text)  # as others write it
        assert len({one.digest, as_file.digest, again.digest}) == 3
        assert tok.work_alike(one, as_file)
        assert tok.work_alike(as_file, again)
        assert not tok.work_alike(one, JsonTokenizer(one.to_json(), None))
    assert not tok.work_alike(ByteTokenizer(), CharTokenizer("abc"))
