"""Text to token ids and back: bytes, characters, or any tokenizer.json.

A tokenizer is a value. `to_bytes` gives its canonical blob, which travels and is named by its digest in the
run's genesis; `from_bytes` reads one that a peer sent, bounded in size, and nothing in it is a path. `to_json`
gives a tokenizer.json that Hugging Face's fast tokenizers load and that encodes and decodes alike.

Text never makes a control token: where a document spells out "<|endoftext|>", it is encoded as the letters it
is made of. (Programs that load the exported tokenizer.json read it as the control token unless told otherwise:
`encode_special_tokens = True` tells them.)
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import assert_never

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from weft import reading, wire
from weft.errors import DataError, TokenizerMismatch, WireError
from weft.ids import Digest, short

Ids = NDArray[np.uint32]

END_OF_TEXT = "<|endoftext|>"
# The largest published tokenizer.json files (256k pieces) are about 35 MB.
MAX_BLOB_NBYTES = 64 << 20
# Models round their vocabulary up: to a multiple of 256, or by up to 2.4 % (deepseek-llm-7b: 102400 rows, 100015 ids).
MAX_PADDING_ROWS = 255
MAX_PADDING_SHARE = 0.05
# What tokenizer.json files call the end of a document when tokenizer_config.json does not say.
_USUAL_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")


class BytesBlob(wire.Record, frozen=True, kw_only=True, tag="bytes"):
    """The byte tokenizer has no settings."""


class CharactersBlob(wire.Record, frozen=True, kw_only=True, tag="characters"):
    """The alphabet in ascending order; a character's id is its place."""

    alphabet: str


class JsonBlob(wire.Record, frozen=True, kw_only=True, tag="json"):
    """A tokenizer.json as it lay on its maker's disk, and the id that ends a document."""

    json: bytes
    end_of_text: int | None


Blob = BytesBlob | CharactersBlob | JsonBlob


class Tokenizer(ABC):
    """Turns text into ids below `vocab_size` and back."""

    vocab_size: int
    end_of_text: int | None
    """The id between documents; None where the tokenizer has none."""

    @cached_property
    def digest(self) -> Digest:
        return wire.digest(self.to_bytes())

    @abstractmethod
    def encode(self, text: str) -> Ids:
        """Return the ids of `text`; no control token is added.

        Raises:
            DataError: `text` holds a character this tokenizer does not know.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Return the text of `ids`; control tokens and ids beyond the vocabulary have none."""

    @abstractmethod
    def to_bytes(self) -> bytes:
        """Return the canonical blob that `from_bytes` reads."""

    @abstractmethod
    def to_json(self) -> bytes:
        """Return an equivalent tokenizer.json."""


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes of UTF-8 text, 256 ends a document. Bytes that are no UTF-8 decode to U+FFFD."""

    vocab_size = 257
    end_of_text = 256

    def encode(self, text: str) -> Ids:
        return np.frombuffer(_encoded(text, "utf-8"), dtype=np.uint8).astype(np.uint32)

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        given = np.asarray(ids)
        return given[given < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def to_bytes(self) -> bytes:
        return wire.encode(BytesBlob())

    def to_json(self) -> bytes:
        # Byte-level BPE without merges: every byte is written as one printable character, and that is the piece.
        model = models.BPE(vocab={piece: byte for byte, piece in enumerate(_byte_pieces())}, merges=[])
        engine = tokenizers.Tokenizer(model)
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        engine.decoder = decoders.ByteLevel()
        engine.add_special_tokens([_control(END_OF_TEXT)])
        return _json_of(engine)


class CharTokenizer(Tokenizer):
    """Ids are places in a sorted alphabet; one more ends a document."""

    def __init__(self, alphabet: str) -> None:
        """
        Args:
            alphabet: distinct characters in ascending order.

        Raises:
            DataError: empty, not ascending, or holds a surrogate, which is not a character.
        """
        codes = _codes(alphabet)
        if not alphabet or (np.diff(codes.astype(np.int64)) <= 0).any():
            raise DataError(
                "an alphabet must hold distinct characters in ascending order; `CharTokenizer.of(texts)` makes one"
            )
        self._alphabet = alphabet
        self._codes = codes
        self.vocab_size = len(alphabet) + 1
        self.end_of_text = len(alphabet)

    @classmethod
    def of(cls, texts: Iterable[str]) -> "CharTokenizer":
        """Return the tokenizer of all characters in `texts`.

        Raises:
            DataError: there are none.
        """
        seen: set[str] = set()
        for text in texts:
            seen.update(text)
        return cls("".join(sorted(seen)))

    def encode(self, text: str) -> Ids:
        codes = _codes(text)
        places = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
        unknown = np.flatnonzero(self._codes[places] != codes)
        if unknown.size:
            at = int(unknown[0])
            raise DataError(
                f"character {text[at]!r} (U+{ord(text[at]):04X}), number {at + 1} of this text, is not in the alphabet "
                f"of {len(self._codes)} characters. The alphabet is that of the run's corpus: leave the character "
                f"out, or use the byte tokenizer, which knows every text."
            )
        return places.astype(np.uint32)

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        given = np.asarray(ids, dtype=np.int64)
        return self._codes[given[given < len(self._codes)]].tobytes().decode("utf-32-le")

    def to_bytes(self) -> bytes:
        return wire.encode(CharactersBlob(alphabet=self._alphabet))

    def to_json(self) -> bytes:
        # BPE without merges cuts text into characters; unknown ones are dropped, where this class raises.
        model = models.BPE(vocab={character: place for place, character in enumerate(self._alphabet)}, merges=[])
        engine = tokenizers.Tokenizer(model)
        engine.decoder = decoders.Fuse()
        engine.add_special_tokens([_control(END_OF_TEXT)])
        return _json_of(engine)


class JsonTokenizer(Tokenizer):
    """A tokenizer.json of any kind, run by the `tokenizers` library."""

    def __init__(self, json: bytes, end_of_text: int | None) -> None:
        """
        Args:
            json: the file's bytes.
            end_of_text: the id between documents; None if there is none.

        Raises:
            DataError: no tokenizer.json, or `end_of_text` is beyond its vocabulary.
        """
        self._json = json
        self._engine = _parse(json)
        self._letters = _letters(json)
        self._are_known: set[str] = set()
        self.vocab_size = max(self._engine.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not self.vocab_size:
            raise DataError("its vocabulary is empty")
        self.end_of_text = end_of_text
        if not 0 <= (0 if end_of_text is None else end_of_text) < self.vocab_size:
            raise DataError(f"end of text is id {end_of_text}, but the vocabulary has {self.vocab_size} ids")

    @classmethod
    def from_file(cls, path: Path) -> "JsonTokenizer":
        """Read `path`, a tokenizer.json or a folder that holds one.

        The end of a document is `eos_token` of the tokenizer_config.json beside it, else one of the usual names.

        Raises:
            DataError: missing, unreadable, too large, or no tokenizer.json.
        """
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            json = file.read_bytes()
        except FileNotFoundError:
            raise DataError(f"cannot read the tokenizer {file}: no such file.{_other_kind(file)}") from None
        except OSError as error:
            raise DataError(f"cannot read the tokenizer {file}: {error.strerror or error}.") from error
        if (kind := reading.what_else(json[: reading.HEAD_NBYTES])) is not None:
            raise DataError(f"the tokenizer {file} is {kind}.")
        if len(json) > MAX_BLOB_NBYTES - (1 << 10):
            raise DataError(f"{file} has {len(json)} bytes; a tokenizer may have {MAX_BLOB_NBYTES - (1 << 10)}.")
        try:
            json = reading.text_of(json).encode()  # without its byte order mark
            engine = _parse(json)
            named = _eos_of(file.with_name("tokenizer_config.json"))
            ends = (engine.token_to_id(name) for name in ((named,) if named else _USUAL_ENDS))
            return cls(json, next((end for end in ends if end is not None), None))
        except UnicodeDecodeError as error:
            raise DataError(f"{file}: not a tokenizer.json: byte {error.start + 1} is not UTF-8 text.") from None
        except DataError as error:
            raise DataError(f"{file}: {error}") from None

    def encode(self, text: str) -> Ids:
        self._refuse_dropped(text)
        try:
            return np.array(self._engine.encode(text, add_special_tokens=False).ids, dtype=np.uint32)
        except Exception as error:  # the library raises Exception itself
            _encoded(text, "utf-8")  # names the place, where the library does not
            raise DataError(
                f"the tokenizer has no piece for some of this text, and no token for unknown text: {_one_line(error)}. "
                "Choose a tokenizer that knows every text: bytes, or byte-level BPE (`weft tokenizer train`)."
            ) from None

    def _refuse_dropped(self, text: str) -> None:
        """Accept `text` unless the library would leave letters of it out in silence."""
        if self._letters is None or not (new := set(text) - self._are_known):
            return
        for letter in sorted(new):
            pieces = letter if self._engine.normalizer is None else self._engine.normalizer.normalize_str(letter)
            if self._engine.pre_tokenizer is not None:
                pieces = "".join(piece for piece, _ in self._engine.pre_tokenizer.pre_tokenize_str(pieces))
            if not self._letters.issuperset(pieces):
                raise DataError(
                    f"character {letter!r} (U+{ord(letter):04X}), number {text.index(letter) + 1} of this text, has no "
                    "piece in the tokenizer, so the tokenizer would drop it. Leave it out of the text, or choose a "
                    "tokenizer that knows every text: bytes, or byte-level BPE (`weft tokenizer train`)."
                )
        self._are_known |= new

    def keep_no_words(self) -> None:
        """Keep no word of what is encoded from now on (`keep_no_words`)."""
        keep_no_words(self._engine)

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        return self._engine.decode(np.asarray(ids, dtype=np.int64).tolist(), skip_special_tokens=True)

    def to_bytes(self) -> bytes:
        return wire.encode(JsonBlob(json=self._json, end_of_text=self.end_of_text))

    def to_json(self) -> bytes:
        return self._json


def from_bytes(blob: wire.Buffer) -> Tokenizer:
    """Return the tokenizer whose canonical blob is `blob`.

    Raises:
        WireError: too large, malformed, or describes no working tokenizer.
    """
    record: Blob = wire.decode(blob, Blob, max_nbytes=MAX_BLOB_NBYTES)
    try:
        match record:
            case BytesBlob():
                return ByteTokenizer()
            case CharactersBlob(alphabet=alphabet):
                return CharTokenizer(alphabet)
            case JsonBlob(json=json, end_of_text=end_of_text):
                return JsonTokenizer(json, end_of_text)
            case _:
                assert_never(record)
    except DataError as error:
        raise WireError(f"blob {short(wire.digest(blob))} is no tokenizer: {error}") from None


def keep_no_words(engine: tokenizers.Tokenizer) -> None:
    """Turn off the library's memory of words, which saves it a quarter of the time and is never emptied.

    What strangers write can fill it: 96 MB where each prompt is a word of 150 letters (docs/log.md).
    """
    model = engine.model
    if hasattr(model, "_resize_cache"):  # models of whole words have none
        model._resize_cache(0)


def train_bpe(texts: Iterable[str], vocab_size: int) -> JsonTokenizer:
    """Train byte-level BPE (GPT-2's cut into words) on `texts`; the same texts give the same tokenizer.

    Args:
        texts: the corpus, read once.
        vocab_size: pieces wanted, end-of-text and the 256 bytes included.

    Raises:
        DataError: `vocab_size` is below 257, or the texts are too few to yield that many pieces.
    """
    if vocab_size < 257:
        raise DataError(f"vocab_size = {vocab_size}: byte-level BPE needs at least 257, the 256 bytes and end-of-text.")
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_control(END_OF_TEXT)],
        initial_alphabet=_byte_pieces(),
        show_progress=False,
    )
    engine.train_from_iterator(iter(texts), trainer)
    found = engine.get_vocab_size()
    if found < vocab_size:
        raise DataError(
            f"these texts yield {found} pieces, not {vocab_size}. Give more text, or ask for at most {found}."
        )
    return JsonTokenizer(_json_of(engine), engine.token_to_id(END_OF_TEXT))


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Accept a model of `vocab_size` rows for `tokenizer`: equal, or padded as models usually are.

    Raises:
        TokenizerMismatch: the model has fewer rows than there are ids, or more than padding explains.
    """
    padding = vocab_size - tokenizer.vocab_size
    if not 0 <= padding <= max(MAX_PADDING_ROWS, MAX_PADDING_SHARE * tokenizer.vocab_size):
        raise TokenizerMismatch(
            f"the tokenizer {short(tokenizer.digest)} has {tokenizer.vocab_size} ids, but the model {vocab_size}. Use "
            f"the tokenizer that the model was made with."
        )


def has_same_tokens(one: Tokenizer, other: Tokenizer) -> bool:
    """Return whether a token means the same to both. They may cut text in other places."""
    first, second = (_parse(each.to_json()).get_vocab(with_added_tokens=True) for each in (one, other))
    return first == second


def work_alike(one: Tokenizer, other: Tokenizer) -> bool:
    """Return whether both make the same tokens of a text and end it alike. Their digests differ where one is a file."""
    first, second = (_parse(each.to_json()).to_str() for each in (one, other))
    return one.end_of_text == other.end_of_text and first == second


def _byte_pieces() -> list[str]:
    """Return the printable character that stands for each byte in byte-level tokenizers (GPT-2, bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _codes(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(_encoded(text, "utf-32-le"), dtype="<u4").astype(np.uint32)


def _encoded(text: str, encoding: str) -> bytes:
    try:
        return text.encode(encoding)
    except UnicodeEncodeError as error:
        raise DataError(
            f"text holds half a surrogate pair at character {error.start + 1}, which is not a character"
        ) from None


def _control(content: str) -> AddedToken:
    return AddedToken(content, special=True, normalized=False)


def _json_of(engine: tokenizers.Tokenizer) -> bytes:
    return engine.to_str(pretty=False).encode()


def _parse(json: bytes) -> tokenizers.Tokenizer:
    try:
        engine = tokenizers.Tokenizer.from_str(json.decode("utf-8"))
    except Exception as error:  # the library raises Exception itself
        raise DataError(f"not a tokenizer.json: {_one_line(error)}") from None
    except BaseException as error:  # a panic inside the library is no Exception
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(f"not a tokenizer.json: {_one_line(error)}") from None
    # A file may ask for cut or padded results: documents are encoded whole.
    engine.no_truncation()
    engine.no_padding()
    engine.encode_special_tokens = True
    return engine


def _letters(json: bytes) -> set[str] | None:
    """Return the letters that a tokenizer knows, where the library drops all others in silence; None where it does not.

    It does so with BPE that has no token for what is unknown and does not fall back on bytes.
    """
    tree = reading.json_of(json)
    model = tree.get("model") or {}
    is_bytes = model.get("byte_fallback") or b'"ByteLevel"' in json
    if model.get("type", "BPE") != "BPE" or model.get("unk_token") is not None or is_bytes or "merges" not in model:
        return None
    prefix, suffix = model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or ""
    pieces = (piece.removeprefix(prefix).removesuffix(suffix) for piece in model["vocab"])
    added = (token["content"] for token in tree.get("added_tokens") or () if not token["special"])
    return {piece for piece in pieces if len(piece) == 1}.union(*added)


def _other_kind(file: Path) -> str:
    """Return what to do where a folder holds a tokenizer of another kind."""
    if not file.with_name("tokenizer.model").exists():
        return ""
    return (
        f" {file.with_name('tokenizer.model').name} beside it is SentencePiece's: make a tokenizer.json of it with "
        f"transformers.AutoTokenizer.from_pretrained({str(file.parent)!r}).save_pretrained({str(file.parent)!r})."
    )


def _one_line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error))[:300]


def _eos_of(config: Path) -> str | None:
    """Return `eos_token` of a tokenizer_config.json, which is a string or a mapping with `content`."""
    try:
        tree = reading.json_of(config.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {config}: {error}.") from error
    eos = tree.get("eos_token") if isinstance(tree, dict) else None
    if isinstance(eos, dict):
        eos = eos.get("content")
    return eos if isinstance(eos, str) else None
