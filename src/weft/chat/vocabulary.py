"""Tokens from text that a template made, and the bytes of each token.

A vocabulary has the bytes of each token, whatever its tokenizer's kind: they are read off its tokenizer.json, so texts
of tokens are those of the tokens one after the other. Where a file's decoder is none of the known ones, a token's bytes
are what it adds to another one's text.

Control tokens have no text. A template may spell them out, and they become ids; where a message spells them out, they
stay letters: `guarded` marks them, and `Vocabulary.encode` takes the mark away.

Other tokens that a file adds have a text (Qwen's <think>, <tool_call>). Those that look like marks and that the
template itself writes are letters in messages, too, but in what the assistant says and thinks: there the model writes
them itself, and is trained to. A control token is letters there as well.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import tokenizers

from weft.data.tokenizer import JsonTokenizer, Tokenizer, keep_no_words
from weft.errors import DataError

# No characters: Unicode leaves them to programs.
GUARD = "\ufdd0"
BEGIN, END = "\ufdd1", "\ufdd2"  # of what is trained on, in a template's text
_MARKS = re.compile(f"[{GUARD}{BEGIN}{END}]")
_LIKE_A_MARK = re.compile(r"[<\[{(].+[>\]})]", re.DOTALL)  # and unlike words and white space, which files add, too
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Placed(NamedTuple):
    """A token, and the characters of a text that it is of."""

    token: int
    start: int
    stop: int


class Vocabulary:
    """A tokenizer's tokens.

    Args:
        tokenizer: of any kind. It keeps no word that it encodes from now on.
        written: what the template writes of its own (`Template.writes`); empty: there is none.
    """

    def __init__(self, tokenizer: Tokenizer, written: str = "") -> None:
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
        self.marks: dict[str, int] = {
            token["content"]: token["id"]
            for token in added
            if not token["special"] and token["content"] in written and _LIKE_A_MARK.fullmatch(token["content"])
        }
        """Others that the template writes, by their text."""
        self.control_pattern = _any_of(self.control)
        self._guarded_pattern = _any_of([*self.control, *self.marks])

    def __len__(self) -> int:
        return len(self.pieces)

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token; a model may have more tokens than its tokenizer knows, and those have none."""
        return self.pieces[token] if token < len(self.pieces) else b""

    def guarded(self, text: str, *, is_assistants: bool = False) -> str:
        """Return `text` with a mark in every token that it must not spell out, and none of its own.

        Args:
            is_assistants: the assistant says it.
        """
        text = _MARKS.sub("\ufffd", text)
        pattern = self.control_pattern if is_assistants else self._guarded_pattern
        return pattern.sub(lambda found: _with_guard(found[0]), text)

    def guarded_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message, as templates know it, with all its texts `guarded`."""
        tree: dict[str, Any] = self.guarded_tree(dict(message))
        if message.get("role") == "assistant":
            for name in ("content", "reasoning_content"):
                if isinstance(said := message.get(name), str):
                    tree[name] = self.guarded(said, is_assistants=True)
        return tree

    def guarded_tree(self, tree: Any) -> Any:
        """Return the same with all its texts `guarded`."""
        match tree:
            case str():
                return self.guarded(tree)
            case dict():
                return {self.guarded(name): self.guarded_tree(value) for name, value in tree.items()}
            case list():
                return [self.guarded_tree(each) for each in tree]
        return tree

    def encode(self, text: str) -> list[int]:
        """Return the ids of a template's text, in which control tokens are spelled out.

        Raises:
            DataError: it holds what the tokenizer does not know.
        """
        ids: list[int] = []
        for _, part, is_letters in self._parts(text):
            if is_letters:
                ids += self._letters(part.replace(GUARD, ""))
            elif isinstance(self.tokenizer, JsonTokenizer):
                ids += self._encoded(part).ids
            else:
                ids += [each.token for each in self._trusted(part)]
        return ids

    def placed(self, text: str) -> list[Placed]:
        """Return the same ids, each with the first character of `text` that it is of, and the one after its last.

        Raises:
            DataError: as `encode`.
        """
        found: list[Placed] = []
        for at, part, is_letters in self._parts(text):
            if is_letters:
                found += [Placed(token, at, at + len(part)) for token in self._letters(part.replace(GUARD, ""))]
            else:
                found += [Placed(token, at + start, at + stop) for token, start, stop in self._trusted(part)]
        return found

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

    def _parts(self, text: str) -> Iterator[tuple[int, str, bool]]:
        """Yield stretches of text, where each begins, and whether control tokens in it are letters."""
        at = 0
        for found in self._spelled_pattern.finditer(text):
            yield at, text[at : found.start()], False
            yield found.start(), found[0], True
            at = found.end()
        yield at, text[at:], False

    @cached_property
    def _spelled_pattern(self) -> re.Pattern[str]:
        return _any_of([_with_guard(name) for name in (*self.control, *self.marks)])

    def _letters(self, text: str) -> list[int]:
        """Return the ids of text that spells out no token: of a mark those of its letters."""
        if text in self.marks:
            found: list[int] = self._engine_of_letters.encode(text, add_special_tokens=False).ids
            return found
        return [int(each) for each in self.tokenizer.encode(text)] if text else []

    def _trusted(self, text: str) -> Iterator[Placed]:
        """Yield the tokens of text in which control tokens are such."""
        at = 0
        names = [*self.control_pattern.findall(text), ""]
        if not isinstance(self.tokenizer, JsonTokenizer):
            for stretch, name in zip(self.control_pattern.split(text), names, strict=True):
                yield from self._letter_by_letter(stretch, at)
                at += len(stretch) + len(name)
                if name:
                    yield Placed(self.control[name], at - len(name), at)
            return
        encoded = self._encoded(text)
        for token, (start, stop) in zip(encoded.ids, encoded.offsets, strict=True):
            yield Placed(token, start, stop)

    def _encoded(self, text: str) -> tokenizers.Encoding:
        """Return what the tokenizer.json makes of text in which control tokens are such."""
        for stretch in self.control_pattern.split(text):
            self._letters(stretch)  # letters that the library would leave out in silence
        try:
            return self._engine.encode(text, add_special_tokens=False)
        except Exception as error:  # the library raises Exception itself
            raise DataError(f"the tokenizer cannot read this text: {str(error)[:200]}") from None

    def _letter_by_letter(self, text: str, at: int) -> Iterator[Placed]:
        """Yield tokens of bytes, or of characters."""
        ids = self._letters(text)
        nums = [1] * len(text) if len(ids) == len(text) else [len(letter.encode()) for letter in text]
        places = [at + number for number, num in enumerate(nums) for _ in range(num)]
        for token, place in zip(ids, places, strict=True):
            yield Placed(token, place, place + 1)

    @cached_property
    def _engine(self) -> tokenizers.Tokenizer:
        """The file as others use it: what spells a control token is that token."""
        return _engine_of(self._json.decode())

    @cached_property
    def _engine_of_letters(self) -> tokenizers.Tokenizer:
        """The file with its marks as control tokens, which are letters: what is not special is always its token."""
        tree = json.loads(self._json)
        for token in tree["added_tokens"]:
            token["special"] = token["special"] or token["content"] in self.marks
        engine = _engine_of(json.dumps(tree))
        engine.encode_special_tokens = True
        return engine


def _engine_of(text: str) -> tokenizers.Tokenizer:
    engine = tokenizers.Tokenizer.from_str(text)
    engine.no_truncation()
    engine.no_padding()
    keep_no_words(engine)
    return engine


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Return what finds any of some texts, of two at one place the longer."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")


def _with_guard(name: str) -> str:
    return f"{name[:1]}{GUARD}{name[1:]}"


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
