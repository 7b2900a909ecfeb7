"""Tasks are the same for a seed, and their answers are right by another reckoning."""

import datetime
import json

import pytest
from benchmarks.rig.tasks import conversation, drawn, pair


def test_a_seed_gives_the_same_tasks_and_another_one_others() -> None:
    assert drawn(1, 40) == drawn(1, 40)
    assert drawn(1, 40)[:20] == drawn(1, 20)
    assert not {task.asked for task in drawn(1, 400)} & {task.asked for task in drawn(2, 400) if task.kind == "day"}
    assert [task.kind for task in drawn(3, 8)] == 2 * ["sum", "day", "sort", "json"]


@pytest.mark.parametrize("number", range(200))
def test_its_own_answer_is_right_and_another_ones_is_wrong(number: int) -> None:
    tasks = drawn(5, 208)
    task, other = tasks[number], tasks[number + 4]
    assert task.is_right(f" {task.answer}\n")
    if task.answer != other.answer:
        assert not task.is_right(other.answer)
    words = task.asked.split()
    match task.kind:
        case "sum":
            a, sign, b = int(words[2]), words[3], int(words[4].strip("?"))
            assert int(task.answer) == (a + b if sign == "+" else a - b)
        case "day":
            first = datetime.date.fromisoformat(words[6].strip("?"))
            assert (datetime.date.fromisoformat(task.answer) - first).days == int(words[3])
        case "sort":
            given = task.asked.partition(": ")[2].split(", ")
            assert task.answer.split(", ") == sorted(given)
            assert len(given) >= 3
        case "json":
            told = json.loads(task.answer)
            assert f"{told['name']}, who is {told['age']}, lives in {told['town']}." in task.asked


def test_json_is_right_by_its_value_and_other_answers_by_their_words() -> None:
    task = next(each for each in drawn(6, 4) if each.kind == "json")
    assert task.is_right(json.dumps(json.loads(task.answer), indent=2))
    assert not task.is_right(task.answer[:-1])
    number = drawn(6, 1)[0]
    assert number.is_right(f"{number.answer}.")
    assert not number.is_right(f"It is {number.answer}")


def test_tasks_are_lines_of_files() -> None:
    task = drawn(7, 1)[0]
    assert [each["content"] for each in conversation(task)["messages"]] == [task.asked, task.answer]
    assert pair(task, "no") == {"prompt": task.asked, "chosen": task.answer, "rejected": "no"}
