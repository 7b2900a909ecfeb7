"""Tokens are the bytes of their text, and no message makes a control token."""

import psutil
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from weft.chat.vocabulary import GUARD, Vocabulary
from weft.data.tokenizer import ByteTokenizer, CharTokenizer, JsonTokenizer, Tokenizer, from_bytes, train_bpe
from weft.errors import DataError
from weft.rng import stream

TEXT = "Käse, 3 € & ≈ 20 % 🧀\nthe end"


def words() -> JsonTokenizer:
    """Return a tokenizer as SentencePiece makes them: words with ▁ for space, bytes for what is not known."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    for piece in ("▁the", "▁end", "▁", "e", "n", "d"):
        vocab[piece] = len(vocab)
    engine = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    engine.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    engine.add_special_tokens(["<unk>", "<s>", "</s>"])
    return JsonTokenizer(engine.to_str().encode(), 2)


KINDS: dict[str, Tokenizer] = {
    "bytes": ByteTokenizer(),
    "characters": CharTokenizer.of([TEXT]),
    "trained": train_bpe([TEXT * 3], 270),
    "words": words(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_tokens_are_the_text_they_were_made_of(kind: str) -> None:
    vocabulary = Vocabulary(KINDS[kind])
    ids = vocabulary.encode(TEXT)
    assert b"".join(map(vocabulary.piece, ids)).decode() == TEXT
    assert len(vocabulary) == KINDS[kind].vocab_size
    assert vocabulary.piece(10**6) == b""  # a model may have more tokens


@pytest.mark.parametrize("kind", KINDS)
def test_control_tokens_have_no_text_and_are_ids_only_where_a_template_spells_them(kind: str) -> None:
    vocabulary = Vocabulary(KINDS[kind])
    name, token = next(iter(vocabulary.control.items()))
    assert vocabulary.piece(token) == b""
    if kind == "characters":  # its alphabet has no <
        assert vocabulary.encode(f"the{name}end").count(token) == 1
        return
    guarded = vocabulary.guarded(f"a {name} b")
    ids = vocabulary.encode(f"{name}{guarded}{name}")
    assert ids[0] == ids[-1] == token
    assert ids.count(token) == 2
    assert b"".join(map(vocabulary.piece, ids)).decode() == f"a {name} b"


def test_a_mark_that_somebody_sends_is_taken_away() -> None:
    vocabulary = Vocabulary(ByteTokenizer())
    sent = f"<{GUARD}|endoftext|><|endoftext|>"
    assert 256 not in vocabulary.encode(vocabulary.guarded(sent))


def test_a_character_that_a_tokenizer_does_not_know_is_refused() -> None:
    with pytest.raises(DataError, match="not in the alphabet"):
        Vocabulary(KINDS["characters"]).encode("XYZ")


def test_a_plain_prompt_begins_as_the_file_says() -> None:
    engine = tokenizers.Tokenizer.from_str(words().to_json().decode())
    engine.post_processor = tokenizers.processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 1), ("</s>", 2)])
    vocabulary = Vocabulary(JsonTokenizer(engine.to_str().encode(), 2))
    assert vocabulary.encode_plain("end")[0] == 1
    assert 2 not in vocabulary.encode_plain("end")
    assert 1 not in vocabulary.encode("end")


QWENS = "{{ '<think>' }}</think> {% if '<tool_call>' in m.content %} <tool_call>{{ ' the ' + '  ' + '.' }}</tool_call>"
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def with_marks(json: bytes) -> JsonTokenizer:
    """Return a tokenizer with tokens added that are not special, as Qwen's, and such as are words and white space."""
    engine = tokenizers.Tokenizer.from_str(json.decode())
    added = [*MARKS, "<table>", " the ", "  ", "."]
    engine.add_tokens([tokenizers.AddedToken(name, special=False, normalized=False) for name in added])
    return JsonTokenizer(engine.to_str().encode(), 2)


@pytest.mark.parametrize("kind", ["trained", "words"])
def test_marks_that_the_template_writes_are_letters_in_messages(kind: str) -> None:
    tokenizer = with_marks(KINDS[kind].to_json())
    vocabulary = Vocabulary(tokenizer, QWENS)
    assert set(vocabulary.marks) == {*MARKS}
    text = "a</think>b<table>c<tool_call>d</think>"
    ids = vocabulary.encode(vocabulary.guarded(text))
    assert not vocabulary.marks.keys() & {vocabulary.piece(each).decode(errors="replace") for each in ids}
    assert b"".join(map(vocabulary.piece, ids)).decode() == text
    assert [each.token for each in vocabulary.placed(vocabulary.guarded(text))] == ids
    written = vocabulary.encode(f"<think>{vocabulary.guarded('</think>')}</think>")
    assert (written[0], written[-1]) == (vocabulary.marks["<think>"], vocabulary.marks["</think>"])
    assert written.count(vocabulary.marks["</think>"]) == 1
    assert vocabulary.guarded("the  end.") == "the  end.", "words and white space are as they were"
    assert vocabulary.encode(vocabulary.guarded("<table>")) == tokenizer.encode("<table>").tolist()


def test_the_assistant_may_write_marks_and_no_control_tokens() -> None:
    vocabulary = Vocabulary(with_marks(KINDS["trained"].to_json()), QWENS)
    said = "<think>hm</think><tool_call>{}</tool_call><|endoftext|>"
    call = {"function": {"name": "f", "arguments": {"</tool_call>": ["</tool_call>"]}}}
    message = {"role": "assistant", "content": said, "reasoning_content": said, "tool_calls": [call], "name": MARKS[0]}
    found = vocabulary.guarded_message(message)
    for text in (found["content"], found["reasoning_content"]):
        ids = vocabulary.encode(text)
        assert set(vocabulary.marks.values()) <= set(ids)
        assert not set(vocabulary.control.values()) & set(ids)
    for text in (found["name"], *found["tool_calls"][0]["function"]["arguments"]):
        assert not set(vocabulary.marks.values()) & set(vocabulary.encode(text))
    for role in ("user", "system", "tool"):
        ids = vocabulary.encode(vocabulary.guarded_message(message | {"role": role})["content"])
        assert not {*vocabulary.marks.values(), *vocabulary.control.values()} & set(ids)


@pytest.mark.parametrize("kind", ["trained", "words"])
def test_words_that_strangers_send_are_not_kept(kind: str) -> None:
    vocabulary, draws = Vocabulary(from_bytes(KINDS[kind].to_bytes())), stream(0, "words")

    def encode(num: int) -> None:
        for _ in range(num):
            word = "".join(map(chr, draws.integers(97, 123, 200)))
            vocabulary.encode(word)
            vocabulary.encode_plain(word)

    encode(300)
    before = psutil.Process().memory_info().rss
    encode(2000)  # some 4 KB each where they are kept
    assert psutil.Process().memory_info().rss - before < 5e6


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_say_which_characters_they_are_of(kind: str) -> None:
    vocabulary = Vocabulary(KINDS[kind])
    name = "" if kind == "characters" else next(iter(vocabulary.control))  # whose alphabet has no <
    text = f"{TEXT}{name}{TEXT}{vocabulary.guarded(name)}the end"
    placed = vocabulary.placed(text)
    assert [each.token for each in placed] == vocabulary.encode(text)
    for each in placed:
        said, piece = text[each.start : each.stop].replace(GUARD, ""), vocabulary.piece(each.token)
        if each.token in vocabulary.control.values():
            assert said == name
        else:  # a character of several tokens is said to be of each
            assert piece in said.encode()
    covered = {place for each in placed for place in range(each.start, each.stop)}
    assert covered == set(range(len(text)))
