"""Conversations are read in the forms that people have, and a fault names file, line and what to do."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from weft.chat.conversations import Conversation, conversation_of, conversations
from weft.errors import DataError

ASKED, ANSWERED = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
BOTH = (ASKED, ANSWERED)


def read(row: dict[str, Any], field: str | None = None) -> Conversation:
    return conversation_of(row, "chats.jsonl:3", "chats.jsonl, line 3", field)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [*BOTH]},
        {"messages": json.dumps(BOTH)},
        {"messages": [{"role": "User", "content": [{"type": "text", "text": "2 + "}, {"text": "2?"}]}, ANSWERED]},
        {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
        {"conversation": [*BOTH]},
        {"prompt": "2 + 2?", "completion": "4"},
        {"prompt": [ASKED], "completion": [ANSWERED]},
        {"instruction": "2 + 2?", "input": "", "output": "4"},
        {"instruction": "2 + 2?", "output": "4", "id": 7},
    ],
)
def test_each_form_is_the_same_conversation(row: dict[str, Any]) -> None:
    assert read(row).messages == BOTH


def test_a_field_may_be_named() -> None:
    assert read({"turns": [*BOTH], "messages": None}, "turns").messages == BOTH


def test_what_stands_beside_the_turns_is_read_too() -> None:
    alpaca = read({"instruction": "Sort.", "input": "3 1", "output": "1 3", "system": "Be brief."})
    assert [each["content"] for each in alpaca.messages] == ["Be brief.", "Sort.\n\n3 1", "1 3"]
    shared = read({"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}], "system": "s"})
    assert [each["role"] for each in shared.messages] == ["system", "user", "assistant"]
    own = read({"messages": [{"role": "system", "content": "a"}, *BOTH], "system": "b"})
    assert [each["content"] for each in own.messages] == ["a", "2 + 2?", "4"]


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
        ({"text": "x"}, r"no conversation: it has text, and weft knows messages; .*--set data\.source\.field"),
        ({"messages": []}, "field 'messages' is empty"),
        ({"messages": 3}, "field 'messages' is no list; it must be a list of messages"),
        ({"messages": ["hi"]}, "messages 1: no message: it must be an object"),
        ({"messages": [{"content": "x"}]}, "messages 1: nobody's turn: it has content, and needs a role"),
        (
            {"messages": [{"role": "narrator", "content": "x"}]},
            r"messages 1: unknown role 'narrator'\. Known are .*Rename",
        ),
        ({"messages": [ASKED]}, "nobody answers: .* Remove it"),
        ({"messages": [ASKED, {"role": "assistant", "content": " \n"}]}, "the assistant's turn 2 is empty. Write the"),
        ({"messages": [ASKED, {"role": "assistant"}]}, "the assistant's turn 2 is empty"),
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
        ({"prompt": "x", "completion": 3}, "field 'completion'|no list"),
        ({"instruction": 3, "output": "x"}, "instruction is no text"),
    ],
)
def test_a_fault_names_its_place_and_what_to_do(row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=rf"^chats\.jsonl, line 3.*({said})"):
        read(row)


def test_a_field_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(DataError, match=r"no field 'turns'; it has messages"):
        read({"messages": [*BOTH]}, "turns")


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
