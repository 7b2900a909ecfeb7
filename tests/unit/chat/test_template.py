"""Templates render as in jinja2, and one that a stranger wrote neither runs for ever nor reaches anything."""

import datetime
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jinja2
import jinja2.sandbox
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from unit.chat.templates import ALL
from weft.chat.template import MAX_SOURCE_NBYTES, Template, TemplateFault, defaults_of, ends_of, plain, template_of
from weft.chat.vocabulary import BEGIN, END
from weft.model.came_with import CameWith, Ids

WALL_S = 1_700_000_000.0
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {
    "name": "look",
    "description": 'where & <what> "é"',
    "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
}
TOOLS = [{"type": "function", "function": TOOL}]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": {"n": 1, "s": "<ü>"}}}
SYSTEM = {"role": "system", "content": "Be <brief> & kind."}
TURNS = [
    {"role": "user", "content": " Hello 'you' <b> é "},
    {"role": "assistant", "content": "<think>hm</think>\n\nHi."},
    {"role": "user", "content": "And?"},
]
CALLED = [
    TURNS[0],
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "42", "tool_call_id": "abcdefghi"},
]
CHATS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "one turn": (TURNS[:1], []),
    "turns": (TURNS, []),
    "system": ([SYSTEM, *TURNS], []),
    "tools": ([SYSTEM, *TURNS], TOOLS),
    "called": (CALLED, TOOLS),
}


def by_jinja2(source: str, messages: list[Any], tools: list[Any], is_continued: bool) -> str:
    """Render as transformers does."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = to_json
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.datetime.fromtimestamp(WALL_S).strftime(form)
    return env.from_string(source).render(
        messages=messages, tools=tools or None, documents=None, add_generation_prompt=not is_continued, **TOKENS
    )


@pytest.mark.parametrize("is_continued", [False, True])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", ALL)
def test_a_template_renders_as_in_jinja2(name: str, chat: str, is_continued: bool) -> None:
    messages, tools = CHATS[chat]
    template = Template(ALL[name], TOKENS)
    try:
        expected = by_jinja2(ALL[name], messages, tools, is_continued)
    except (jinja2.TemplateError, TypeError):
        with pytest.raises(TemplateFault):
            template.render(messages, tools, wall_s=WALL_S, is_continued=is_continued)
    else:
        assert template.render(messages, tools, wall_s=WALL_S, is_continued=is_continued) == expected


def test_most_of_them_render_most_chats() -> None:
    """So that the comparison above is not one of refusals."""
    num = 0
    for source in ALL.values():
        for messages, tools in CHATS.values():
            try:
                num += bool(Template(source, TOKENS).render(messages, tools, wall_s=WALL_S))
            except TemplateFault:
                continue
    assert num >= 30


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        "{{ 'a' * 4000000000 }}",
        "{{ range(4000000000) | list }}",
    ],
)
def test_an_endless_template_is_refused(source: str) -> None:
    template = Template(source)
    began_s = time.thread_time()
    with pytest.raises(TemplateFault):
        template.render(TURNS, wall_s=WALL_S)
    assert time.thread_time() - began_s < 0.15  # of this thread's computing: 0.03 on a machine that does nothing else


def test_a_template_without_end_says_so() -> None:
    with pytest.raises(TemplateFault, match="does not come to an end"):
        Template("{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}").render(
            TURNS, wall_s=0
        )


@pytest.mark.parametrize(
    "source",
    [
        "{% include '/etc/hostname' %}",
        "{% import '/etc/hostname' as x %}{{ x }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['sys'] }}",
    ],
)
def test_a_template_reaches_no_file_and_no_python(source: str) -> None:
    try:
        text = Template(source).render(TURNS, wall_s=WALL_S)
    except TemplateFault:
        return
    assert text == ""


def test_a_template_that_is_no_jinja_or_too_long_is_refused_when_it_is_loaded() -> None:
    for source in ("{% for %}", "{{ x", "x" * (MAX_SOURCE_NBYTES + 1)):
        with pytest.raises(TemplateFault):
            Template(source)


def test_what_it_refuses_is_told_in_its_words() -> None:
    with pytest.raises(TemplateFault, match="roles must alternate"):
        Template(ALL["gemma"], TOKENS).render([TURNS[0], TURNS[0]], wall_s=WALL_S)
    with pytest.raises(TemplateFault, match="1 MiB"):
        Template("{{ messages[0].content }}").render([{"role": "user", "content": "x" * (1 << 20) + "y"}], wall_s=0)


def test_one_template_renders_on_several_threads_at_once() -> None:
    template = Template(ALL["hermes"], TOKENS)
    messages, tools = CHATS["tools"]
    one = template.render(messages, tools, wall_s=WALL_S)
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            made = threads.map(lambda _: template.render(messages, tools, wall_s=WALL_S), range(100))
            assert set(made) == {one}
    finally:
        sys.setswitchinterval(before_s)


@pytest.mark.parametrize(
    "begin", ["{% generation %}", "{%- generation -%}\n", "  {% generation %}\n", "{%generation -%} "]
)
@pytest.mark.parametrize("end", ["{% endgeneration %}", " {%- endgeneration -%} ", "\n{% endgeneration %}\n"])
def test_marks_for_training_leave_white_space_as_transformers_does(begin: str, end: str) -> None:
    source = f"a\n{begin}b{end} c"
    expected, spans = render_jinja_template([TURNS], chat_template=source, return_assistant_tokens_mask=True)
    template = Template(source)
    assert template.render(TURNS, wall_s=0) == expected[0]
    marked = template.render(TURNS, wall_s=0, is_marked=True)
    assert (marked.index(BEGIN), marked.index(END) - 1) == tuple(spans[0][0])
    assert marked.replace(BEGIN, "").replace(END, "") == expected[0]


@pytest.mark.parametrize("source", ["{% generation %}a", "a{% endgeneration %}", "{% endgeneration %}{% generation %}"])
def test_a_mark_without_its_other_end_is_refused(source: str) -> None:
    with pytest.raises(TemplateFault, match=r"without {% endgeneration %}, or the other way round"):
        Template(source)


# --- from what came with a model ---


def came(**files: Any) -> CameWith:
    named = {name.replace("__", "."): value for name, value in files.items()}
    return CameWith(
        files={
            name: value if isinstance(value, bytes) else json.dumps(value).encode() for name, value in named.items()
        },
        ids=Ids(eos_token_id=(5, 6)),
    )


def test_a_folder_names_its_template_in_four_ways() -> None:
    for files in (
        {"tokenizer_config__json": {"chat_template": "A{{ eos_token }}", "eos_token": {"content": "</s>"}}},
        {"tokenizer_config__json": {"eos_token": "</s>"}, "chat_template__jinja": b"A{{ eos_token }}"},
        {
            "special_tokens_map__json": {"eos_token": "</s>"},
            "chat_template__json": {"chat_template": "A{{ eos_token }}"},
        },
    ):
        template = template_of(came(**files))
        assert template is not None
        assert template.render(TURNS, wall_s=0) == "A</s>"
    listed = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B{{ tools|length }}"}]
    template = template_of(came(tokenizer_config__json={"chat_template": listed}))
    assert template is not None
    assert template.render(TURNS, wall_s=0) == "A"
    assert template.render(TURNS, TOOLS, wall_s=0) == "B1"
    assert template_of(CameWith()) is None


def test_a_folder_says_what_ends_an_answer_and_how_tokens_are_drawn() -> None:
    given = came(
        tokenizer_config__json={"eos_token": "<end>"},
        generation_config__json={"eos_token_id": [7, 8], "temperature": 0.6, "top_p": 0.9, "top_k": None},
    )
    assert ends_of(given, {"<end>": 9}.get) == {5, 6, 7, 8, 9}
    assert defaults_of(given) == {"temperature": 0.6, "top_p": 0.9}
    assert (ends_of(CameWith(), {}.get), defaults_of(CameWith())) == (set(), {})


def test_without_a_template_turns_are_plain() -> None:
    assert plain([SYSTEM, TURNS[2]]) == "System: Be <brief> & kind.\n\nUser: And?\n\nAssistant:"
