"""Calls are told apart from text, however the text is cut; nothing that a model writes is lost."""

import pytest

from weft.chat.template import Template
from weft.serve.tools import HERMES, LLAMA3, MISTRAL, Arguments, CallBegun, Reader, Said, Style, Told, style_of

F, G = ("f", '{"a": "}\\"{", "b": [1]}'), ("g", "{}")
BOTH = [F, G]


def read(style: Style, text: str, size: int) -> tuple[str, list[tuple[str, str]], list[Told]]:
    reader = Reader(style, ["f", "g"])
    told: list[Told] = []
    for place in range(0, len(text), size):
        told += reader.feed(text[place : place + size])
    told += reader.finish()
    names = [each.name for each in told if isinstance(each, CallBegun)]
    arguments = ["" for _ in names]
    for each in told:
        if isinstance(each, Arguments):
            arguments[each.number] += each.text
    return "".join(each.text for each in told if isinstance(each, Said)), list(zip(names, arguments, strict=True)), told


def hermes(*calls: tuple[str, str]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>' for name, given in calls)


CASES: list[tuple[Style, str, str, list[tuple[str, str]]]] = [
    (HERMES, hermes(*BOTH), "", BOTH),
    (HERMES, "Let me see. " + hermes(F), "Let me see. ", [F]),
    (HERMES, '\n<tool_call>{"arguments": {"x": 1}, "name": "g"}</tool_call>', "", [("g", '{"x": 1}')]),
    (HERMES, '<tool_call>{"name": "g"}</tool_call>', "", [("g", "{}")]),
    (HERMES, "a < b <tool_call> none", "a < b <tool_call> none", []),
    (HERMES, "<tool_call>no", "<tool_call>no", []),
    (HERMES, hermes(("unknown", "{}")), hermes(("unknown", "{}")), []),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": ', "", [("f", '{"a": ')]),
    (HERMES, "  ends in half <tool", "  ends in half <tool", []),
    (LLAMA3, '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "", [("f", '{"a": 1}'), G]),
    (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (LLAMA3, '{"not": 1} x', '{"not": 1} x', []),
    (LLAMA3, 'I write {"name": "f"}', 'I write {"name": "f"}', []),
    (MISTRAL, f'[TOOL_CALLS][{{"name": "f", "arguments": {F[1]}}}, {{"name": "g", "arguments": {{}}}}]', "", BOTH),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": "{\\"a\\":2}"}]', "", [("f", '{"a":2}')]),
    (MISTRAL, "[1, 2]", "[1, 2]", []),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("style", "text", "said", "calls"), CASES)
def test_calls_are_found_however_the_text_is_cut(
    style: Style, text: str, said: str, calls: list[tuple[str, str]], size: int
) -> None:
    assert read(style, text, size)[:2] == (said, calls)


def test_the_name_is_told_before_the_arguments_and_those_as_they_come() -> None:
    _, _, told = read(HERMES, hermes(F), 1)
    assert isinstance(told[0], CallBegun)
    assert len(told) == 1 + len(F[1])


@pytest.mark.parametrize(
    ("source", "style"),
    [
        ("{{ tools }}<tool_call>", HERMES),
        ("{{ tools }}[TOOL_CALLS]", MISTRAL),
        ("{{ tools }}<|python_tag|>", LLAMA3),
        ('{{ tools }}"parameters" ipython', LLAMA3),
        ("{{ messages }}", HERMES),
    ],
)
def test_the_template_tells_how_calls_are_written(source: str, style: Style) -> None:
    assert style_of(Template(source)) is style
    assert style_of(None) is HERMES


def test_ids_are_as_templates_take_them() -> None:
    assert len(MISTRAL.new_id()) == 9
    assert HERMES.new_id() != HERMES.new_id()
