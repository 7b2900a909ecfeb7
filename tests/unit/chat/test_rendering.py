"""What is trained on are the assistant's tokens and no others, whatever the template."""

import re
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from unit.chat.templates import ALL, CHATML, LLAMA3
from weft.chat.conversations import Conversation
from weft.chat.rendering import Rendered, Renderer
from weft.chat.task_rows import Asking
from weft.chat.template import Template
from weft.chat.vocabulary import Vocabulary
from weft.data.tokenizer import JsonTokenizer
from weft.errors import DataError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
NAMES = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
)
TURNS = (
    ("user", "What is 2 + 2?"),
    ("assistant", "It is 4.\n\nSure."),
    ("user", "And 3 + 3? Say <|im_end|> and <|eot_id|>."),
    ("assistant", "\n6, not It is 4."),
)
MARKED = """{{ bos_token }}{% for message in messages %}
{%- if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}
{{ message.content + '<|im_end|>' }}{% endgeneration %}
{{ '\n' }}{%- else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    """Return a byte-level tokenizer that has learnt merges across spaces and letters, with all control tokens."""
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    engine.train_from_iterator(["It is what it is.\n\nSure, sure. " * 20], trainer)
    engine.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in NAMES])
    return Vocabulary(JsonTokenizer(engine.to_str().encode(), 1))


def test_reasoning_is_trained_on_by_its_tokens_and_a_person_makes_none(vocabulary: Vocabulary) -> None:
    engine = tokenizers.Tokenizer.from_str(vocabulary.tokenizer.to_json().decode())
    engine.add_tokens([AddedToken(name, special=False, normalized=False) for name in ("<think>", "</think>")])
    template = Template(THINKS, TOKENS)
    thinks = Vocabulary(JsonTokenizer(engine.to_str().encode(), 1), template.writes)
    begin, end = thinks.marks["<think>"], thinks.marks["</think>"]
    asked = ("user", "What is </think>?")
    found = Renderer(template, thinks, 0.0).render(chat(asked, ("assistant", "<think>hm</think>six")))
    assert answers(found) == ["<think>\n\n</think>\n\nsix<|im_end|>"], "this template writes what it thinks anew"
    assert (found.ids.tolist().count(begin), found.ids.tolist().count(end)) == (1, 1)
    found = Renderer(Template(CHATML + "{# <think></think> #}", TOKENS), thinks, 0.0).render(
        chat(asked, ("assistant", "<think>hm</think>six"))
    )
    trained_ids = found.ids[found.is_trained].tolist()
    assert (trained_ids.count(begin), trained_ids.count(end)) == (1, 1)
    assert found.ids.tolist().count(end) == 1


def chat(*turns: tuple[str, str]) -> Conversation:
    messages = tuple({"role": role, "content": content} for role, content in turns)
    return Conversation("chats.jsonl:3", "chats.jsonl, line 3", messages)


def answers(rendered: Rendered) -> list[str]:
    return [rendered.text[start:stop] for start, stop in rendered.spans]


def trained(rendered: Rendered, vocabulary: Vocabulary) -> str:
    names = {token: name for name, token in vocabulary.control.items()}
    ids = rendered.ids[rendered.is_trained].tolist()
    return b"".join(names[each].encode() if each in names else vocabulary.piece(each) for each in ids).decode()


@pytest.mark.parametrize("name", sorted({*ALL} - {"reasoning"}))
def test_answers_are_what_is_trained_on_with_their_ends(name: str, vocabulary: Vocabulary) -> None:
    rendered = Renderer(Template(ALL[name], TOKENS), vocabulary, 0.0).render(chat(*TURNS))
    found = answers(rendered)
    assert len(found) == 2
    for answer, text in zip(found, (TURNS[1][1], TURNS[3][1]), strict=True):
        assert text.strip() in answer
        assert "What" not in answer
        assert "And" not in answer
    assert trained(rendered, vocabulary).split() == "".join(found).split()
    whole, letters = rendered.ids.tolist(), vocabulary.encode(vocabulary.guarded("<|im_end|>"))
    # What a person spells out stays letters.
    assert any(whole[at : at + len(letters)] == letters for at in range(len(whole)))


def test_an_answer_has_its_end_mark_and_not_the_white_space_after_it(vocabulary: Vocabulary) -> None:
    found = Renderer(Template(CHATML, TOKENS), vocabulary, 0.0).render(chat(*TURNS))
    assert answers(found) == ["It is 4.\n\nSure.<|im_end|>", "\n6, not It is 4.<|im_end|>"]
    found = Renderer(Template(LLAMA3, TOKENS), vocabulary, 0.0).render(chat(*TURNS))
    assert answers(found)[0] == "It is 4.\n\nSure.<|eot_id|>"


def test_marks_of_a_template_say_the_same_as_its_turns_and_change_no_text(vocabulary: Vocabulary) -> None:
    marked, bare = (
        Template(MARKED, TOKENS),
        Template(re.sub(r"{% (end)?generation %}", "{% if true %}{% endif %}", MARKED), TOKENS),
    )
    assert marked.has_marks
    assert not bare.has_marks
    by_marks, by_turns = (Renderer(each, vocabulary, 0.0).render(chat(*TURNS)) for each in (marked, bare))
    assert by_marks.text == by_turns.text
    assert by_marks.spans == by_turns.spans
    assert np.array_equal(by_marks.ids, by_turns.ids)
    assert np.array_equal(by_marks.is_trained, by_turns.is_trained)


THINKS = """{% for m in messages %}{% set text = m.content %}
{%- if m.role == 'assistant' %}{% set text = text.split('</think>')[-1] | trim %}
{%- if loop.last %}{% set text = '<think>\n\n</think>\n\n' + text %}{% endif %}{% endif %}
{{- '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


@pytest.mark.parametrize("earlier", ["four", " four\n", "e", "im_end", "<|im_end|>"])
def test_an_earlier_answer_that_is_written_without_reasoning_is_found(vocabulary: Vocabulary, earlier: str) -> None:
    quoted = ("user", f"You said {earlier}, and four")
    found = Renderer(Template(THINKS, TOKENS), vocabulary, 0.0).render(
        chat(TURNS[0], ("assistant", earlier), quoted, ("assistant", "six"))
    )
    assert answers(found) == [f"{earlier.strip()}<|im_end|>", "<think>\n\n</think>\n\nsix<|im_end|>"]


def test_an_earlier_answer_whose_reasoning_is_left_out_is_refused(vocabulary: Vocabulary) -> None:
    thought = ("assistant", "<think>\nhm\n</think>\n\nfour")
    with pytest.raises(DataError, match=r"line 3: the chat template writes an earlier answer otherwise .*{% gen"):
        Renderer(Template(THINKS, TOKENS), vocabulary, 0.0).render(chat(TURNS[0], thought, TURNS[2], TURNS[3]))


def test_answers_that_are_passed_over_are_not_trained_on(vocabulary: Vocabulary) -> None:
    only = replace(chat(*TURNS), passed_over=frozenset({0}))
    for template in (CHATML, MARKED):
        found = Renderer(Template(template, TOKENS), vocabulary, 0.0).render(only)
        assert answers(found) == ["\n6, not It is 4.<|im_end|>"]


CALLS = Conversation(
    "a",
    "chats.jsonl, line 3",
    (
        {"role": "user", "content": "2 + 2?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
        },
        {"role": "tool", "content": "4 <|im_end|>", "tool_call_id": "1"},
        {"role": "assistant", "content": "4"},
    ),
    ({"type": "function", "function": {"name": "add", "description": "<|im_end|>", "parameters": {}}},),
)


def test_calls_are_answers_and_what_a_tool_says_is_none(vocabulary: Vocabulary) -> None:
    found = Renderer(Template(ALL["hermes"], TOKENS), vocabulary, 0.0).render(CALLS)
    call, last = answers(found)
    assert '{"name": "add", "arguments": {"a": 2}}' in call
    assert call.endswith("</tool_call><|im_end|>")
    assert last == "4<|im_end|>"
    assert "4 <|im_end|>" in found.text
    ends = found.ids.tolist().count(vocabulary.control["<|im_end|>"])
    assert ends == len(CALLS.messages) + 1, "one of each turn and of the tools' own; what is spelled out is letters"


@pytest.mark.parametrize("name", ["gemma", "chatml"])
def test_a_template_without_tools_refuses_calls(vocabulary: Vocabulary, name: str) -> None:
    with pytest.raises(DataError, match="line 3: the model's chat template knows no tools"):
        Renderer(Template(ALL[name], TOKENS), vocabulary, 0.0).render(CALLS)


def test_a_template_that_leaves_out_an_answer_or_a_call_is_refused(vocabulary: Vocabulary) -> None:
    silent = "{# tools #}{% for m in messages %}{{ m.role + ': ' + (m.content or '-') + '\n' }}{% endfor %}"
    asks = "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    with pytest.raises(DataError, match="leaves out a call of answer 1"):
        Renderer(Template(silent + asks, TOKENS), vocabulary, 0.0).render(CALLS)
    unmarked = MARKED.replace("{% if message.role == 'assistant' %}", "{% if message.role == 'nobody' %}")
    unmarked = unmarked.replace("{%- if message.role == 'assistant' %}", "{%- if message.role == 'nobody' %}")
    with pytest.raises(DataError, match="marks 0 parts as generated, and there are 2 answers"):
        Renderer(Template(unmarked, TOKENS), vocabulary, 0.0).render(chat(*TURNS))


def test_a_template_that_begins_answers_otherwise_than_it_asks_for_them_is_refused(vocabulary: Vocabulary) -> None:
    template = CHATML.replace("<|im_start|>assistant\n' }}{% endif %}", "<|im_start|>machine\n' }}{% endif %}")
    with pytest.raises(DataError, match=r"line 3: the chat template writes 'assistant.* before answer 1, and asks for"):
        Renderer(Template(template, TOKENS), vocabulary, 0.0).render(chat(*TURNS))


def test_a_template_that_asks_for_reasoning_and_writes_none_is_refused(vocabulary: Vocabulary) -> None:
    with pytest.raises(DataError, match="before answer 1, and asks for one with '<think>"):
        Renderer(Template(ALL["reasoning"], TOKENS), vocabulary, 0.0).render(chat(*TURNS))


def test_two_system_turns_that_a_template_refuses_name_the_line(vocabulary: Vocabulary) -> None:
    renderer = Renderer(Template(ALL["gemma"], TOKENS), vocabulary, 0.0)
    with pytest.raises(
        DataError,
        match=r"^chats\.jsonl, line 3: .*refuses these messages: .*System role not supported\. Change or remove them, ",
    ):
        renderer.render(chat(("system", "a"), ("system", "b"), *TURNS))


def test_whoever_renders_says_which_day_it_is(vocabulary: Vocabulary) -> None:
    for kind in (Renderer, Asking):
        with pytest.raises(TypeError, match="wall_s"):
            kind(Template(CHATML, TOKENS), vocabulary)  # type: ignore[call-arg]
