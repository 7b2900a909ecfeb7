"""Tasks as rows: what is written is what is read, and what has no room or no draw is left out and told."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unit.chat.templates import CHATML
from weft.chat.task_rows import Judged, asked_in, pack_tasks
from weft.chat.template import Template
from weft.data.batch import Batches
from weft.data.corpus import TasksSource
from weft.data.rows import written
from weft.data.store import DataIndex, ShardStore
from weft.data.tokenizer import ByteTokenizer
from weft.errors import DataError

LENGTH = 200
TEN = Judged(max_tokens=10)


def packed(folder: Path, rows: list[dict[str, Any]], judged: Judged = TEN) -> tuple[DataIndex, str, ShardStore]:
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    store, source = ShardStore(folder / "shards"), TasksSource(paths=("tasks.jsonl",))
    index, told = pack_tasks(store, source, 0.2, Template(CHATML), ByteTokenizer(), LENGTH, judged, folder)
    return index, str(told), store


def tasks(num: int) -> list[dict[str, Any]]:
    return [
        {"question": f"what is {n} + {n}?", "answer": [str(2 * n), f"{2 * n}.0"], "match": "number"} for n in range(num)
    ]


def test_every_task_is_a_row_with_its_prompt_and_how_it_is_checked(tmp_path: Path) -> None:
    index, told, store = packed(tmp_path, tasks(40))
    assert told == ""
    assert index.has_tasks
    assert not index.is_paired
    found = {}
    for side in ("train", "heldout"):
        batches = Batches(store, index, side, LENGTH, seed=1)
        for row in written(batches.windows(np.arange(batches.num_windows)))[:, :-1].numpy():
            asked = asked_in(row, ByteTokenizer())
            found[ByteTokenizer().decode(list(asked.prompt))] = asked.check
    assert len(found) == 40
    for n in range(40):
        (prompt,) = [each for each in found if f"what is {n} + {n}?" in each]
        assert prompt.endswith("<|im_start|>assistant\n")
        assert found[prompt].is_right(f"It is {2 * n}")
        assert not found[prompt].is_right(f"It is {2 * n + 1}")
    rows = index.rows
    assert rows
    assert rows.train_trained + rows.heldout_trained == 40
    assert rows.heldout_trained >= 1


def test_what_has_no_room_and_what_is_chosen_is_left_out_and_told(tmp_path: Path) -> None:
    chosen = {"question": "2 + 2?", "choices": ["3", "4"], "answer": 1}
    long = {"question": "x" * LENGTH, "answer": "y"}
    large = {"question": "x" * (2 << 20), "answer": "y"}
    index, told, _ = packed(tmp_path, [*tasks(20), chosen, chosen | {"question": "3 + 1?"}, long, large])
    assert "2 tasks left out, because train.seq_len has no room for it" in told
    assert "2 tasks left out, because its answer is chosen and not drawn" in told
    rows = index.rows
    assert rows
    assert rows.train_trained + rows.heldout_trained == 20


def test_the_answer_needs_room_behind_the_prompt(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no task is left to learn from.*no room for it"):
        packed(tmp_path, tasks(20), Judged(max_tokens=LENGTH - 20))


def test_tasks_with_tests_need_a_run_that_says_so(tmp_path: Path) -> None:
    rows = [{"question": f"write f{n}", "answer": f"assert f{n}()", "match": "tests"} for n in range(20)]
    with pytest.raises(DataError, match=r"tasks\.jsonl, line \d+: its answers are code.*runs_code = true"):
        packed(tmp_path, rows)
    index, _, _ = packed(tmp_path, rows, Judged(max_tokens=10, runs_code=True))
    assert index.has_tasks


@pytest.mark.parametrize("num", [0, 1])
def test_fewer_than_two_are_refused(tmp_path: Path, num: int) -> None:
    with pytest.raises(DataError, match=r"one task|no tasks"):
        packed(tmp_path, tasks(num))


def test_a_row_without_a_task_is_the_makers_mistake() -> None:
    with pytest.raises(DataError, match="holds no task"):
        asked_in(np.arange(10), ByteTokenizer())
