"""Templates render as in jinja2, and one that a stranger wrote neither runs for ever nor reaches anything."""

import datetime
import gc
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any

import jinja2
import jinja2.sandbox
import psutil
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from budget import piece_s, slowness_of
from unit.chat.templates import ALL
from weft.chat import template as templates
from weft.chat.template import (
    MAX_GIVEN_NBYTES,
    MAX_SOURCE_NBYTES,
    Template,
    TemplateFault,
    TextTooLong,
    defaults_of,
    ends_of,
    plain,
    template_of,
)
from weft.chat.vocabulary import BEGIN, END
from weft.errors import ConfigError
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
ENDLESS_S = 0.05  # of CPU time, that one without end may take on a fast machine
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


@pytest.fixture(scope="module")
def all_of_them() -> dict[str, Template]:
    """Each with a process of its own."""
    return {name: Template(source, TOKENS) for name, source in ALL.items()}


@pytest.mark.parametrize("is_continued", [False, True])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", ALL)
def test_a_template_renders_as_in_jinja2(
    all_of_them: dict[str, Template], name: str, chat: str, is_continued: bool
) -> None:
    (messages, tools), template = CHATS[chat], all_of_them[name]
    try:
        expected = by_jinja2(ALL[name], messages, tools, is_continued)
    except (jinja2.TemplateError, TypeError):
        with pytest.raises(TemplateFault):
            template.render(messages, tools, wall_s=WALL_S, is_continued=is_continued)
    else:
        assert template.render(messages, tools, wall_s=WALL_S, is_continued=is_continued) == expected


def test_most_of_them_render_most_chats(all_of_them: dict[str, Template]) -> None:
    """So that the comparison above is not one of refusals."""
    num = 0
    for template in all_of_them.values():
        for messages, tools in CHATS.values():
            try:
                num += bool(template.render(messages, tools, wall_s=WALL_S))
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
    """Its process counts what it does, and goes on: it is not ended by the clock."""
    template, num = Template(source), 3
    process = child_of(template)
    before_s = sum(process.cpu_times()[:2])
    for _ in range(num):
        with pytest.raises(TemplateFault):
            template.render(TURNS, wall_s=WALL_S)
    assert child_of(template) == process
    took_s = (sum(process.cpu_times()[:2]) - before_s) / num
    assert took_s < ENDLESS_S * slowness_of(piece_s)


def child_of(template: Template) -> psutil.Process:
    """Return the process that renders."""
    running = template._process._running
    assert running is not None, "the clock ended it"
    return psutil.Process(running.pid)


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
    with pytest.raises(TemplateFault, match="cannot be read: line 3: "):
        Template("a\n\n{% for %}")
    for source in ("{% for %}", "{{ x", "x" * (MAX_SOURCE_NBYTES + 1)):
        with pytest.raises(TemplateFault, match=r"^the chat template .* Use another model, or change the template\.$"):
            Template(source)


@pytest.mark.parametrize("source", ["{% for %}", "x" * (MAX_SOURCE_NBYTES + 1), "{% generation %}"])
def test_one_that_cannot_be_read_names_its_file(source: str) -> None:
    for name, files in (
        ("tokenizer_config.json", {"tokenizer_config__json": {"chat_template": source}}),
        (
            "tokenizer_config.json",
            {"tokenizer_config__json": {"chat_template": [{"name": "default", "template": source}]}},
        ),
        ("chat_template.json", {"chat_template__json": {"chat_template": source}, "tokenizer_config__json": {}}),
        (
            "chat_template.jinja",
            {"chat_template__jinja": source.encode(), "chat_template__json": {"chat_template": ""}},
        ),
    ):
        with pytest.raises(TemplateFault, match=rf"^the chat template of {name} (cannot be read|has).*(Use|Write) "):
            template_of(came(**files))


NESTED = "{%% set ns = namespace(x=[1]) %%}{%% for i in range(%d) %%}{%% set ns.x = %s %%}{%% endfor %%}{{ ns.x%s }}"
BREAKS = "does not come to an end, or takes very long or much memory. Use another model, or change the template"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ messages | tojson(indent=1000000000) }}", "tojson takes an indent of at most 16, not 1000000000. Change"),
        ("{{ messages | tojson(indent='x' * 1000) }}", "tojson takes an indent of at most 16"),
        ("{{ messages | tojson(indent=1.5) }}", "tojson takes an indent of at most 16"),
        ("{{ messages | tojson(separators=3) }}", "cannot unpack"),
        ("{{ strftime_now(3) }}", "must be str"),
        ("{{ raise_exception(range(100000) | list) }}", "[0, 1, 2"),
        ("{{ '{:>1000000000}'.format('x') }}", BREAKS),
        (NESTED % (60, "ns.x + ns.x", " | length"), BREAKS),
        (NESTED % (90_000, "[ns.x]", " | string | length"), BREAKS),
        (NESTED % (500, "[ns.x]", " | tojson"), ""),
    ],
)
def test_what_fuel_does_not_count_is_bounded(source: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MEMORY_NBYTES", 192 << 20)
    template = Template(source)
    if not said:
        assert template.render(TURNS, wall_s=WALL_S)
        return
    with pytest.raises(TemplateFault) as refused:
        template.render(TURNS, wall_s=WALL_S)
    assert said in str(refused.value)


def test_one_that_takes_too_long_is_ended_and_the_next_text_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{% if messages | length > 1 %}" + NESTED % (60, "[ns.x, ns.x]", "") + "{% else %}x{% endif %}"
    template = Template(source)
    monkeypatch.setattr(templates, "SECONDS", 0.3)
    with pytest.raises(TemplateFault, match="does not come to an end"):
        template.render(TURNS, wall_s=WALL_S)
    monkeypatch.setattr(templates, "SECONDS", 30.0)
    assert template.render(TURNS[:1], wall_s=WALL_S) == "x"


@pytest.mark.parametrize("chain", ["1" + "+1" * 100_000, "a" + ".b" * 100_000, "not " * 50_000 + "1"])
def test_one_that_breaks_what_reads_it_is_refused(chain: str) -> None:
    with pytest.raises(TemplateFault, match=r"cannot be read: it breaks what reads it\. Use another model, or change"):
        Template(f"{{{{ {chain} }}}}")


def test_its_process_ends_with_it() -> None:
    before = set(psutil.Process().children())
    template = Template("x")
    (process,) = set(psutil.Process().children()) - before
    del template
    gc.collect()
    assert not process.is_running()


def test_a_machine_that_runs_no_process_for_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"(?s)of its own, and here that fails: .*No module named 'minijinja'"):
        Template("x")


def messages_of(num: int, text: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, _ in zip(cycle(("user", "assistant")), range(num), strict=False)]


@pytest.mark.parametrize("name", ALL)
def test_long_messages_are_rendered_and_those_of_more_than_a_mib_are_too_long(name: str) -> None:
    template = Template(ALL[name], TOKENS)
    assert len(template.render(messages_of(8_001, "x"), wall_s=0)) > 8_000
    assert len(template.render(messages_of(5, "long " * 38_000), wall_s=0)) > 900_000 or name == "reasoning"
    for messages in (messages_of(11, "long " * 38_000), messages_of(3, "x" * MAX_GIVEN_NBYTES)):
        with pytest.raises(TextTooLong, match=r"or they are too many for it\. Shorten them, or leave them out"):
            template.render(messages, wall_s=0)


def test_many_messages_of_a_template_that_takes_long_over_each_are_too_long_and_one_without_end_is_a_fault() -> None:
    each = "{% for m in messages %}{% for n in messages %}{{ '' if n.content else '-' }}{% endfor %}{% endfor %}"
    with pytest.raises(TextTooLong):
        Template(each).render(messages_of(6_001, "x"), wall_s=0)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
    with pytest.raises(TemplateFault, match="does not come to an end") as refused:
        Template(endless).render(messages_of(6_001, "x"), wall_s=0)
    assert not isinstance(refused.value, TextTooLong)


def test_what_it_refuses_is_told_in_its_words() -> None:
    with pytest.raises(TemplateFault, match=r"roles must alternate.*\. Change or remove them, or use another model"):
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
