"""Tasks are read in the forms that people have, and an answer is right or it is not."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from weft.chat import schemas
from weft.chat.matches import Match, code_in, matches, why_never
from weft.chat.tasks import Task, are_tasks, task_of, tasks_of
from weft.errors import ConfigError, DataError

ASKED = ({"role": "user", "content": "2 + 2?"},)


def read(row: dict[str, Any]) -> Task:
    return task_of(row, "tasks.jsonl, line 3")


@pytest.mark.parametrize(
    "row",
    [
        {"question": "2 + 2?", "choices": ["3", "4"], "answer": 1},
        {"question": "2 + 2?", "choices": ["3", "4"], "answer": "B"},
        {"question": "2 + 2?", "choices": ["3", "4"], "answer": "4"},
        {"prompt": "2 + 2?", "choices": {"text": ["3", "4"], "label": ["4", "3"]}, "answerKey": "3"},
        {"prompt": "2 + 2?", "choices": {"text": ["3", "4"], "label": [0, 1]}, "answerKey": 1},
        {"messages": [ASKED[0]], "choices": ["3", "4"], "answer": 1, "kind": None, "match": None},
    ],
)
def test_each_form_of_choices_is_the_same_task(row: dict[str, Any]) -> None:
    found = read(row)
    assert (found.messages, found.choices, found.answers) == (ASKED, ("3", "4"), (1,))
    assert found.is_right(1)
    assert not found.is_right(0)


@pytest.mark.parametrize(
    ("row", "answers"),
    [
        ({"question": "2 + 2?", "answer": "4"}, ("4",)),
        ({"question": "2 + 2?", "answer": 4}, ("4",)),
        ({"question": "2 + 2?", "answer": 4e22, "match": "number"}, ("4e+22",)),
        ({"prompt": "2 + 2?", "answers": ["4", "four"]}, ("4", "four")),
    ],
)
def test_each_form_of_an_answer_is_a_text(row: dict[str, Any], answers: tuple[str, ...]) -> None:
    found = read(row)
    assert (found.messages, found.choices, found.answers) == (ASKED, (), answers)


def test_a_system_text_comes_first() -> None:
    assert read({"question": "2 + 2?", "answer": "4", "system": "Be brief."}).messages == (
        {"role": "system", "content": "Be brief."},
        *ASKED,
    )


@pytest.mark.parametrize(
    ("match", "answer", "right", "wrong"),
    [
        ("exact", "4", [" 4 ", "4.", "4\n"], ["It is 4", "44", "", "5"]),
        ("contains", "4", ["It is 4!", "44"], ["four", ""]),
        ("number", "1,200", ["2 + 1 is 1200", "1,200.0.", "-3 or 1200"], ["1200 or 5", "none", "12"]),
        ("number", "-2.5", ["x = -2.50"], ["2.5"]),
        ("number", "0.5", [".5", "it is 0.50."], ["5", "50"]),
        ("number", "3", ["1,2,3", "5-3"], ["123", "-3"]),
        ("number", "9007199254740993", ["9,007,199,254,740,993.0"], ["9007199254740992"]),
        ("number", "-0.0", ["0", "+0.00"], ["1"]),
        ("number", "100000", ["1e5", "It is 1.0E+05.", "0.1e6"], ["5", "1e-5", "1e5 5", "1e4", "1e" + "9" * 100_000]),
        ("number", "1e5", ["100,000", "1e5"], ["5", "1"]),
        ("number", "2.5", ["2e, so 2.5", "1e2.5"], ["2.5e1"]),
        ("number", "\u0664\u0665", ["45"], ["54"]),
        ("number", "0" * 100_000 + "7", ["7." + "0" * 100_000], ["7" + "0" * 100_000]),
        ("json", "1", ["1.0", " 1", "10e-1", "0.01E+2", "1" + "0" * 5000 + "e-5000"], ["true", "[" * 5000, '"1"']),
        ("json", "9007199254740993", ["9007199254740993.0"], ["9007199254740992", "9007199254740993.1"]),
        ("json", '{"a": [0.1]}', ['{"a": [1e-1]}'], ['{"a": [0.10000000000000001]}', '{"a": [[false, "1", -1, ""]]}']),
        ("json", "1e999999999", ["10e999999998"], ["1e999999998", "1e" + "9" * 100_000, "Infinity"]),
        ("json", "1e400", ["1e400"], ["1e401", "Infinity"]),
        ("json", "[NaN]", ["[NaN]"], ["[Infinity]", '["NaN"]']),
        ("json", "[" * 90 + "]" * 90, ["[" * 90 + "]" * 90], ["[" * 900 + "]" * 900]),
        ("schema", '{"type": "integer", "minimum": 3}', ["3", " 4\n"], ["2", "3.5", '"3"', "{", "three", "[" * 5000]),
        ("schema", '{"pattern": "^(a+)+$"}', ['"aaa"', "1"], [f'"{"a" * 50}b"']),
        ("json", '{"a": 1, "b": [2]}', ['{"b": [2],"a": 1.0}'], ['{"a": 1}', "{", '```{"a": 1, "b": [2]}```']),
    ],
)
def test_what_is_right(match: Match, answer: str, right: list[str], wrong: list[str]) -> None:
    task = read({"question": "?", "answer": answer, "match": match})
    assert [text for text in right if not task.is_right(text)] == []
    assert [text for text in wrong if task.is_right(text)] == []


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "2 + 2?"}, "no answer: it has question. Name it answer"),
        ({"answer": "4"}, "it has answer, and nothing that is asked. Name that prompt"),
        ({"question": "?", "answer": "4", "match": "fuzzy"}, "match is 'fuzzy'. Known are exact, contains"),
        ({"question": "?", "answer": []}, "the list of right answers is empty"),
        ({"question": "?", "answer": True}, "neither text nor a number"),
        ({"question": "?", "choices": ["a"], "answer": 0}, "no list of two texts"),
        ({"question": "?", "choices": ["a", 3], "answer": 0}, "no list of two texts"),
        ({"question": "?", "choices": ["a", "b"], "answer": 2}, "the answer '2' is none of the 2 choices"),
        ({"question": "?", "choices": ["a", "a"], "answer": "a"}, "is more than one of the 2 choices"),
        ({"question": "?", "choices": ["B", "a"], "answer": "B"}, "is more than one of the 2 choices"),
        ({"question": "?", "choices": ["a", "b"], "answer": 0, "match": "exact"}, "match has no effect"),
        ({"question": "?", "answer": "four", "match": "number"}, "no answer can be right by match = number"),
        ({"question": "?", "answer": "{", "match": "json"}, "no answer can be right by match = json"),
        ({"question": "?", "answer": "1e" + "9" * 20, "match": "json"}, "no answer can be right by match = json"),
        ({"question": "?", "answer": "1e" + "9" * 20, "match": "number"}, "no answer can be right by match = number"),
        ({"question": "?", "answer": "\ud800"}, "answer holds half a surrogate pair"),
        ({"question": "?", "answer": ["4", "\ud800"]}, "answer holds half a surrogate pair"),
        ({"question": "?", "answer": "4", "kind": "\ud800"}, "kind holds half a surrogate pair"),
        ({"question": "?", "answer": "4", "kind": ["x"]}, "kind is no text"),
        ({"question": "?", "answer": "4", "system": "\ud800"}, "system holds half a surrogate pair"),
        ({"question": "?", "choices": ["a", "\ud800"], "answer": 0}, "choice 2 holds half a surrogate pair"),
        ({"question": "?", "choices": {"text": ["a", "b"], "label": ["x", "\ud800"]}, "answer": "x"}, "label 2 holds"),
        ({"question": "?", "answer": {"enum": ["\ud800"]}, "match": "schema"}, "answer holds half a surrogate pair"),
        ({"instruction": "?", "answer": "4", "history": 5}, "history is no list of pairs"),
        ({"question": "?", "answer": " ", "match": "contains"}, "no answer can be right"),
        ({"question": "?", "answer": "{", "match": "schema"}, "by match = schema: it is no JSON: "),
        ({"question": "?", "answer": '{"type": "whole"}', "match": "schema"}, "it is no JSON Schema: "),
        ({"question": "?", "answer": '{"$ref": "http://127.0.0.1/"}', "match": "schema"}, "it is no JSON Schema: "),
        ({"question": "?", "answer": '{"$ref": "file:///etc/passwd"}', "match": "schema"}, "it is no JSON Schema: "),
        ({"question": "?", "answer": "assert f(", "match": "tests"}, "it is no Python: '(' was never closed"),
        ({"question": "?", "answer": {"type": "integer"}}, "neither text nor a number"),
        ({"question": " ", "answer": "4"}, "nothing is asked: its last message is empty"),
        ({"messages": [*ASKED, {"role": "assistant", "content": "4"}], "answer": "4"}, "last message is an answer"),
        ({"question": "?", "answer": "4", "system": 3}, "system is no text"),
        ({"question": "?", "choices": {"text": ["a", "b"], "label": ["x"]}, "answer": 0}, "not as many labels"),
    ],
)
def test_what_is_no_task_is_refused_with_its_place(row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError) as refused:
        read(row)
    assert said in str(refused.value)
    assert str(refused.value).startswith("tasks.jsonl, line 3: ")


def test_a_task_for_a_judge_may_have_choices_without_an_answer() -> None:
    task = task_of({"question": "?", "choices": ["a", "b"]}, "tasks.jsonl, line 3", needs_answers=False)
    assert (task.choices, task.answers) == (("a", "b"), ())
    with pytest.raises(DataError, match="no answer"):
        read({"question": "?", "choices": ["a", "b"]})


@pytest.mark.full
def test_a_schema_may_refer_to_parts_of_itself_but_not_ask_for_years(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = '{"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"\\u0024ref": "#"}}}'
    assert matches("schema", '{"left": {"right": {}}}', tree)
    assert not matches("schema", '{"left": {"right": 3}}', tree)
    monkeypatch.setattr(schemas, "SECONDS", 0.5)
    twice = {f"d{num}": {"allOf": [{"$ref": f"#/$defs/d{num + 1}"}] * 2} for num in range(60)}
    doubled = json.dumps({"$defs": {**twice, "d60": {"type": "object"}}, "$ref": "#/$defs/d0"})
    nested: object = {"type": "object"}
    for _ in range(40):
        nested = {"allOf": [nested], "unevaluatedProperties": {"type": "integer"}}
    for schema in (doubled, json.dumps(nested)):
        assert not why_never("schema", schema)
        assert not matches("schema", '{"a": 1}', schema)
    both = json.dumps({"$defs": {**twice, "d60": {}}, "$ref": "#/$defs/d0", "unevaluatedProperties": False})
    assert why_never("schema", both).startswith("it takes longer")
    assert not matches("schema", '{"a": 1}', both)
    assert why_never("schema", '{"$ref": "#/nowhere"}').startswith("it is no JSON Schema")
    assert not matches("schema", "[" * 993 + "]" * 993, tree)
    monkeypatch.setattr(schemas, "_RUN", "import nothing_of_that_name")
    with pytest.raises(ConfigError, match="nothing_of_that_name"):
        matches("schema", "{}", tree)


@pytest.mark.parametrize(
    ("row", "is_task"),
    [
        ({"question": "2 + 2?", "answer": "4"}, True),
        ({"prompt": "2 + 2?", "answer": "4", "source": "x"}, True),
        ({"messages": [{"role": "user", "content": "2 + 2?"}], "choices": ["3", "4"], "answer": 1}, True),
        ({"question": "Say a rhyme"}, True),
        ({"question": "Which?", "choices": ["a", "b"], "kind": "x"}, True),
        ({"question": "?", "chosen": "a", "rejected": "b"}, False),
        ({"question": "?", "response": "a"}, False),
        ({"question": "?", "context": "a", "text": "b"}, False),
        ({"question": "?", "messages": [{"role": "user", "content": "a"}]}, False),
        ({"instruction": "a", "output": "b", "question": "?"}, False),
        ({"text": "a"}, False),
    ],
)
def test_files_of_other_kinds_are_no_tasks(tmp_path: Path, row: dict[str, Any], is_task: bool) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert are_tasks(["rows.jsonl"], tmp_path) is is_task
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
    assert are_tasks(["rows.parquet"], tmp_path) is is_task


def test_code_is_found_however_many_fences_there_are() -> None:
    assert code_in("```" * 100_000) == "```" * 100_000


def test_a_schema_may_stand_in_a_row_as_it_is() -> None:
    schema = {"type": "object", "required": ["age"], "properties": {"age": {"type": "integer"}}}
    for written in (schema, json.dumps(schema)):
        task = read({"question": "?", "answer": written, "match": "schema"})
        assert task.is_right('{"age": 3, "name": null}')
        assert not task.is_right('{"name": "x"}')


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("x = 1", "x = 1"),
        ("First\n```python\nx = 1\n```\nthen\n```\nx = 2\n```\n", "x = 2\n"),
        ("```py\nx = 1\n", "x = 1\n"),
    ],
)
def test_the_code_of_an_answer_is_what_its_last_fences_hold(said: str, code: str) -> None:
    assert code_in(said) == code


def test_files_and_tables_hold_tasks(tmp_path: Path) -> None:
    rows = [{"question": "2 + 2?", "choices": ["3", "4"], "answer": 1, "kind": "sum"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet")
    first, second = tasks_of(["a.jsonl", "b.parquet"], tmp_path)
    assert (first.kind, first.choices, first.answers) == (second.kind, second.choices, second.answers)
    (tmp_path / "a.jsonl").write_text('{"question": "?", "answer": "4"}\n{"question": "?"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: no answer"):
        list(tasks_of(["a.jsonl"], tmp_path))
