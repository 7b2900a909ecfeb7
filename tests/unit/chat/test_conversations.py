"""Conversations are read in the forms that people have, and a fault names file, line and what to do."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from weft.chat.conversations import Conversation, conversation_of, conversations, kind_of_rows, pair_of
from weft.chat.tasks import task_of
from weft.errors import DataError

ASKED, ANSWERED = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
BOTH = (ASKED, ANSWERED)


def deep(num: int) -> Any:
    value: Any = 1
    for _ in range(num):
        value = {"a": value}
    return value


def read(row: dict[str, Any]) -> Conversation:
    return conversation_of(row, "chats.jsonl:3", "chats.jsonl, line 3")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [*BOTH]},
        {"messages": json.dumps(BOTH)},
        {"messages": [{"role": "User", "content": [{"type": "text", "text": "2 + "}, {"text": "2?"}]}, ANSWERED]},
        {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
        {"conversations": [{"role": None, "from": "human", "content": None, "value": "2 + 2?"}, ANSWERED]},
        {"messages": [ASKED, ANSWERED | {"tool_calls": "[]"}]},
        {"messages": [ASKED, ANSWERED | {"weight": 1}], "source": None},
        {"conversation": [*BOTH]},
        {"prompt": "2 + 2?", "completion": "4"},
        {"prompt": [ASKED], "completion": [ANSWERED]},
        {"instruction": "2 + 2?", "input": "", "output": "4"},
        {"instruction": "2 + 2?", "output": "4", "id": 7},
    ],
)
def test_each_form_is_the_same_conversation(row: dict[str, Any]) -> None:
    assert read(row).messages == BOTH


def test_what_stands_beside_the_turns_is_read_too() -> None:
    alpaca = read({"instruction": "Sort.", "input": "3 1", "output": "1 3", "system": "Be brief."})
    assert [each["content"] for each in alpaca.messages] == ["Be brief.", "Sort.\n\n3 1", "1 3"]
    shared = read({"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}], "system": "s"})
    assert [each["role"] for each in shared.messages] == ["system", "user", "assistant"]
    own = read({"messages": [{"role": "System", "content": "a"}, *BOTH], "system": "b"})
    assert [each["content"] for each in own.messages] == ["a", "2 + 2?", "4"]
    asked = read({"prompt": "x", "completion": "y", "system": "s"})
    assert [each["content"] for each in asked.messages] == ["s", "x", "y"]
    earlier = read({"history": [["a", "b"]], "instruction": "", "input": "c", "output": "d"})
    assert [each["content"] for each in earlier.messages] == ["a", "b", "c", "d"]
    thought = read({"messages": [ASKED, ANSWERED | {"thinking": "hm"}]})
    assert thought.messages[1]["reasoning_content"] == "hm"


def test_answers_of_a_prompt_and_those_of_no_weight_are_passed_over() -> None:
    assert read({"messages": [*BOTH, *BOTH]}).passed_over == frozenset()
    assert read({"prompt": [*BOTH, ASKED], "completion": [ANSWERED]}).passed_over == {0}
    weighed = read({"messages": [*BOTH, ASKED, ANSWERED | {"weight": 0}], "system": "s"})
    assert weighed.passed_over == {1}
    assert weighed.messages[-1] == ANSWERED


def test_calls_have_arguments_as_values_however_they_are_written() -> None:
    tool = {"name": "add", "parameters": {"type": "object"}}
    called = {"function": {"name": "add", "arguments": '{"a": 2}'}}
    result = {"role": "tool", "content": "4", "tool_call_id": "call_0000"}
    first = read(
        {"messages": [ASKED, {"role": "assistant", "tool_calls": [called]}, result, ANSWERED], "tools": [tool]}
    )
    second = read(
        {
            "conversations": [
                {"from": "human", "value": "2 + 2?"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
                {"from": "observation", "value": "4"},
                {"from": "gpt", "value": "4"},
            ],
            "tools": json.dumps([tool]),
        }
    )
    for each in (first, second):
        (call,) = each.messages[1]["tool_calls"]
        assert call == {"id": "call_0000", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
        assert each.tools == ({"type": "function", "function": tool},)
    assert first.messages[2]["tool_call_id"] == "call_0000"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "x"}, "no conversation: it has text, and weft knows messages; .*Rename"),
        ({"messages": []}, "field 'messages' is empty"),
        ({"messages": 3}, "field 'messages' is no list; it must be a list of messages"),
        ({"messages": ["hi"]}, "messages 1: no message: it must be an object"),
        ({"messages": [{"content": "x"}]}, "messages 1: nobody's turn: it has content, and needs a role"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, r"messages 1: unknown role 'narrator'\. Known .*Rename"),
        ({"messages": [ASKED]}, "nobody answers: .* Remove it"),
        ({"messages": [ASKED, {"role": "assistant", "content": " \n"}]}, "the assistant's turn 2 is empty. Write the"),
        ({"messages": [ASKED, {"role": "assistant"}]}, "the assistant's turn 2 is empty"),
        ({"messages": [{"role": "user", "content": None}, ANSWERED]}, "the user's turn 1 is empty. Write it, or"),
        ({"instruction": "", "output": "x"}, "the user's turn 1 is empty"),
        ({"messages": [ASKED, ANSWERED | {"weight": 0.5}]}, r"messages 2: weight is 0\.5: it may be 0, not"),
        ({"history": [["a"]], "instruction": "x", "output": "y"}, "history is no list of pairs"),
        ({"history": 5, "instruction": "x", "output": "y"}, "history is no list of pairs.* Write it so"),
        ({"history": True, "instruction": "x", "output": "y"}, "history is no list of pairs"),
        ({"history": [["a", 1]], "instruction": "x", "output": "y"}, "history 1 is no text"),
        ({"input": False, "instruction": "x", "output": "y"}, "input is no text. Write it as text, or remove it"),
        ({"messages": [*BOTH], "system": 3}, "system is no text"),
        ({"messages": [*BOTH], "system": False}, "system is no text"),
        ({"messages": [*BOTH], "tools": 0}, "tools is no list of objects. Write"),
        ({"messages": [*BOTH], "tools": [{"function": 3}]}, "tool 1 is no function with a name. Give"),
        ({"messages": [*BOTH], "tools": [deep(150)]}, "tools is nested deeper than 100. Make"),
        ({"messages": [ASKED, ANSWERED | {"tool_calls": 5}]}, "tool_calls is no list. Write"),
        (
            {"messages": [ASKED, ANSWERED | {"tool_calls": [{"id": "\ud800", "name": "f"}]}]},
            "id of tool call 1 holds half a surrogate pair",
        ),
        (
            {"messages": [*BOTH], "tools": [{"name": "f", "parameters": {"at": 1j}}]},
            "tools holds a complex, which JSON",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWERED]}, "a part of type 'image_url'"),
        ({"messages": [{"role": "user", "content": 4}, ANSWERED]}, "messages 1: its content is neither text nor"),
        ({"messages": [{"role": "user", "content": "\ud800"}, ANSWERED]}, "half a surrogate pair"),
        ({"messages": [*BOTH], "tools": 3}, "tools is no list of objects"),
        ({"messages": [*BOTH], "tools": "[{"}, "tools: no JSON"),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "tool call 1 names no function"),
        (
            {"messages": [ASKED, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            "arguments of tool call 1: no JSON",
        ),
        ({"prompt": "x", "completion": 3}, "field 'completion' is no list"),
        ({"instruction": 3, "output": "x"}, "instruction is no text"),
    ],
)
def test_a_fault_names_its_place_and_what_to_do(row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=rf"^chats\.jsonl, line 3.*({said})"):
        read(row)


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "x"}], "name": "n"},
    {"role": "assistant", "content": "y", "reasoning_content": "r", "weight": 1, "tool_calls": [CALL]},
    {"role": "tool", "content": "z", "tool_call_id": "1"},
    {"from": "gpt", "value": "y"},
]
FORMS: dict[str, dict[str, Any]] = {
    "messages": {"messages": TURNS, "system": "s", "tools": [TOOL]},
    "conversations": {"conversations": TURNS, "functions": [TOOL["function"]]},
    "calls": {"conversations": [TURNS[0], {"from": "function_call", "value": CALL}, TURNS[3]]},
    "old calls": {"messages": [TURNS[0], {"role": "assistant", "function_call": CALL["function"]}, TURNS[3]]},
    "prompt": {"prompt": "x", "completion": "y", "system": "s"},
    "alpaca": {"instruction": "x", "input": "i", "history": [["a", "b"]], "output": "y"},
    "pair": {"prompt": "x", "chosen": "y", "rejected": [TURNS[1]]},
    "question": {"question": "x", "answer": ["4"], "kind": "k", "match": "exact", "system": "s"},
    "choices": {"messages": [TURNS[0]], "choices": {"text": ["3", "4"], "label": ["a", "b"]}, "answerKey": "a"},
    "instruction": {"instruction": "x", "history": [["a", "b"]], "input": "i", "answer": "4", "match": "number"},
    "schema": {"question": "x", "answer": {"type": "integer"}, "match": "schema"},
}
WRONG = [None, True, False, 0, 5, -1.5, float("nan"), "", "\ud800", "[{", "[1]", "{}", [], {}, [[]], [None], {"a": 1}]
WRONG += [[1, 2], b"x", 1j, deep(300), "[" * 100_000, 10**400]


def changed(tree: Any) -> Iterator[Any]:
    """Yield the same tree with each of its values wrong in turn, in every way."""
    yield from WRONG
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        for other in changed(value):
            copy = dict(tree) if isinstance(tree, dict) else list(tree)
            copy[key] = other
            yield copy


@pytest.mark.parametrize("form", FORMS)
def test_a_field_of_a_wrong_type_is_a_fault_of_its_line_and_never_one_of_weft(form: str) -> None:
    refused = list[str]()
    for row in changed(FORMS[form]):
        if not isinstance(row, dict):
            continue
        for read_as in (
            lambda row: conversation_of(row, "chats.jsonl:3", "chats.jsonl, line 3"),
            lambda row: pair_of(row, "chats.jsonl:3", "chats.jsonl, line 3"),
            lambda row: task_of(row, "chats.jsonl, line 3"),
        ):
            try:
                made = read_as(row)
            except DataError as error:
                refused.append(str(error))
            else:
                msgspec.json.encode(made)  # as what is read goes on: no half letters in it
    assert len(refused) > 50
    assert [each for each in refused if not each.startswith("chats.jsonl, line 3")] == []


def test_a_table_and_lines_of_the_same_rows_are_of_one_kind(tmp_path: Path) -> None:
    alpaca = {"instruction": "a", "output": "b"}
    for number, (row, kind) in enumerate(
        [
            (alpaca, "conversations"),
            (alpaca | {"text": "both as one"}, None),
            (alpaca | {"chosen": "x", "rejected": "y", "text": "z"}, "preferences"),
            ({"text": "z", "source": "web"}, None),
        ]
    ):
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / f"{number}.parquet")
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(row))
        for ending in ("parquet", "jsonl"):
            assert kind_of_rows([f"{number}.{ending}"], tmp_path, has_text=True) == kind


def test_calls_of_the_old_form_are_read() -> None:
    called = {"role": "assistant", "content": "", "function_call": {"name": "add", "arguments": "{}"}}
    result = {"role": "function", "name": "add", "content": ""}
    found = read({"messages": [ASKED, called, result, ANSWERED], "functions": [{"name": "add"}]})
    assert found.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {}}
    assert found.messages[1]["content"] is None
    assert found.tools == ({"type": "function", "function": {"name": "add"}},)


def rows_in(folder: Path) -> list[dict[str, Any]]:
    rows = [{"messages": [{"role": "user", "content": f"{n}?"}, ANSWERED]} for n in range(600)]
    (folder / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows[:200])))
    (folder / "b.json").write_text(json.dumps(rows[200:400], indent=1))
    pq.write_table(pa.Table.from_pylist(rows[400:]), folder / "c.parquet")
    return rows


def test_lines_arrays_and_tables_are_read_in_order_of_their_names(tmp_path: Path) -> None:
    rows = rows_in(tmp_path)
    found = list(conversations(["."], tmp_path))
    assert [each.messages[0]["content"] for each in found] == [row["messages"][0]["content"] for row in rows]
    assert (found[0].name, found[1].name, found[200].name, found[400].name) == (
        *("a.jsonl:1", "a.jsonl:3"),
        *("b.json:1", "c.parquet:1"),
    )
    assert found[1].place == f"{tmp_path / 'a.jsonl'}, line 3"
    assert found[-1].place == f"{tmp_path / 'c.parquet'}, row 200"


def test_a_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [*BOTH]}) + "\n[1]\n")
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: not a JSON object: it is a list"):
        list(conversations(["a.jsonl"], tmp_path))


def test_a_table_has_all_fields_in_all_rows_and_those_without_a_value_are_none(tmp_path: Path) -> None:
    call = {"function": {"name": "add", "arguments": {"a": 2}}}
    other = {"function": {"name": "sort", "arguments": {"list": "x"}}}
    rows = [
        {"messages": [ASKED, {"role": "assistant", "tool_calls": [each]}], "image": b"\xff", "at": None}
        for each in (call, other)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    first, second = conversations(["c.parquet"], tmp_path)
    assert first.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 2}
    assert second.messages[1]["tool_calls"][0]["function"]["arguments"] == {"list": "x"}
    assert first.messages[0] == ASKED


def test_a_table_of_something_else_or_with_two_columns_of_a_name_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet, row 1: no conversation: it has text"):
        list(conversations(["a.parquet"], tmp_path))
    pq.write_table(pa.table([["x"], ["y"], ["z"]], ["prompt", "prompt", "completion"]), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="2 columns are named 'prompt'"):
        list(conversations(["b.parquet"], tmp_path))
