"""Tokens from text that a template made, and the bytes of each token.

A vocabulary has the bytes of each token, whatever its tokenizer's kind: they are read off its tokenizer.json, so texts
of tokens are those of the tokens one after the other. Where a file's decoder is none of the known ones, a token's bytes
are what it adds to another one's text.

Control tokens have no text. A template may spell them out, and they become ids; where a message spells them out, they
stay letters: `guarded` marks them, and `Vocabulary.encode` takes the mark away.
"""

import json
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import tokenizers

from weft.data.tokenizer import JsonTokenizer, Tokenizer, keep_no_words
from weft.errors import DataError

GUARD = "\ufdd0"  # no character: Unicode leaves it to programs
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """A tokenizer's tokens.

    Args:
        tokenizer: of any kind. It keeps no word that it encodes from now on.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        if isinstance(tokenizer, JsonTokenizer):
            tokenizer.keep_no_words()
        self._json = tokenizer.to_json()
        tree = json.loads(self._json)
        added = tree.get("added_tokens") or ()
        self.control: dict[str, int] = {token["content"]: token["id"] for token in added if token["special"]}
        """Control tokens by what they are called."""
        self.pieces: list[bytes] = _pieces(tree, tokenizer)
        """The bytes of each token, control tokens none."""
        by_length = sorted(self.control, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, by_length)) or r"(?!)")

    def __len__(self) -> int:
        return len(self.pieces)

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token; a model may have more tokens than its tokenizer knows, and those have none."""
        return self.pieces[token] if token < len(self.pieces) else b""

    def guarded(self, text: str) -> str:
        """Return `text` with a mark in every control token that it spells out."""
        text = text.replace(GUARD, "\ufffd")
        return self._control.sub(lambda found: f"{found[0][:1]}{GUARD}{found[0][1:]}", text)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a template's text, in which control tokens are spelled out.

        Raises:
            DataError: it holds what the tokenizer does not know.
        """
        ids: list[int] = []
        for part, is_letters in self._parts(text):
            ids += self._letters(part) if is_letters else self._trusted(part)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a person's text: begun, and ended, as the tokenizer's own file says.

        Raises:
            DataError: as `encode`.
        """
        ids = self._letters(text)
        if not isinstance(self.tokenizer, JsonTokenizer):
            return ids
        around: list[int] = self._engine.encode("", add_special_tokens=True).ids
        ends = {token for token in (self.tokenizer.end_of_text,) if token is not None}
        return [token for token in around if token not in ends] + ids

    def _parts(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yield stretches of text, and whether control tokens in them are letters."""
        guarded = re.compile("|".join(re.escape(f"{name[:1]}{GUARD}{name[1:]}") for name in self.control) or r"(?!)")
        at = 0
        for found in guarded.finditer(text):
            yield text[at : found.start()], False
            yield found[0].replace(GUARD, ""), True
            at = found.end()
        yield text[at:], False

    def _letters(self, text: str) -> list[int]:
        return [int(each) for each in self.tokenizer.encode(text)] if text else []

    def _trusted(self, text: str) -> list[int]:
        stretches = self._control.split(text)
        if not isinstance(self.tokenizer, JsonTokenizer):
            names = [*self._control.findall(text), None]
            ids = []
            for stretch, name in zip(stretches, names, strict=True):
                ids += self._letters(stretch) + ([] if name is None else [self.control[name]])
            return ids
        for stretch in stretches:
            self._letters(stretch)  # letters that the library would leave out in silence
        try:
            encoded: list[int] = self._engine.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises Exception itself
            raise DataError(f"the tokenizer cannot read this text: {str(error)[:200]}") from None
        return encoded

    @cached_property
    def _engine(self) -> tokenizers.Tokenizer:
        """The file as others use it: what spells a control token is that token."""
        engine = tokenizers.Tokenizer.from_str(self._json.decode())
        engine.no_truncation()
        engine.no_padding()
        keep_no_words(engine)
        return engine


def _pieces(tree: dict[str, Any], tokenizer: Tokenizer) -> list[bytes]:
    vocab = tree["model"]["vocab"]
    names = {token: name for name, token in vocab.items()} if isinstance(vocab, dict) else dict(enumerate(vocab))
    added = {
        token["id"]: b"" if token["special"] else token["content"].encode() for token in tree["added_tokens"] or ()
    }
    bytes_of = _reader(tree, tokenizer)
    pieces = [b""] * (max(*names, *added, 0) + 1)
    for token, name in names.items():
        pieces[token] = added[token] if token in added else bytes_of(token, name if isinstance(name, str) else name[0])
    for token, piece in added.items():
        pieces[token] = piece
    return pieces


def _reader(tree: dict[str, Any], tokenizer: Tokenizer) -> Any:
    """Return what gives the bytes of a token, by id and name, as the file's decoder would."""
    steps = _steps(tree.get("decoder"))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        byte_of = {letter: byte for byte, letter in enumerate(_byte_letters())}

        def of_letters(_token: int, name: str) -> bytes:
            if all(letter in byte_of for letter in name):
                return bytes(byte_of[letter] for letter in name)
            return name.encode()

        return of_letters
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        swaps = [(step["pattern"]["String"], step["content"]) for step in steps if "String" in step.get("pattern", ())]
        swaps += [(step.get("replacement", "▁"), " ") for step in steps if step["type"] == "Metaspace"]

        def of_words(_token: int, name: str) -> bytes:
            if "ByteFallback" in kinds and (found := _BYTE.fullmatch(name)):
                return bytes([int(found[1], 16)])
            for old, new in swaps:
                name = name.replace(old, new)
            return name.encode()

        return of_words
    anchor = next((token for token in range(tokenizer.vocab_size) if tokenizer.decode([token]).strip()), 0)
    before = tokenizer.decode([anchor])

    def of_others(token: int, _name: str) -> bytes:
        both = tokenizer.decode([anchor, token])
        return both.removeprefix(before).encode()

    return of_others


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _byte_letters() -> list[str]:
    """Return the letter that stands for each byte in byte-level tokenizers (GPT-2, bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
