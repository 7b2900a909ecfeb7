"""`weft inspect chats.jsonl --model MODEL` shows a conversation as the model reads it, and what is trained on."""

import json
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pytest
from pyarrow import parquet

from unit.chat.templates import CHATML
from unit.cli.small import Weft
from unit.cli.test_came_with import source
from weft.cli.model import conversations

__all__ = ["source"]

CHATS = [
    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4\x1b[31m"}]},
    {"prompt": "And <|endoftext|>?", "completion": "A token."},
]


@pytest.fixture
def chats(tmp_path: Path, source: Path) -> Path:
    (source / "chat_template.jinja").write_text(CHATML)
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, CHATS)))
    return path


def test_a_conversation_is_shown_with_what_is_trained_on(weft: Weft, chats: Path, source: Path) -> None:
    said = weft("inspect", chats, "--model", source)
    assert said.code == 0
    first, template, tokens, place, _, *text = said.out.splitlines()
    assert first == "2 conversations"
    assert template.endswith("answers are found by its turns")
    num_trained = len("4\x1b[31m<|im_end|>A token.<|im_end|>")  # of a model whose tokens are bytes
    assert f"of which {num_trained} are trained on" in tokens
    assert place == f"number 1, {chats}, line 1: ⟦trained on⟧"
    assert "\n".join(text).endswith("<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n⟦4?[31m<|im_end|>⟧")
    assert "⟦A token.<|im_end|>⟧" in weft("inspect", chats, "--model", source, "--number", "2").out


def test_marks_of_the_template_are_named(weft: Weft, chats: Path, source: Path) -> None:
    (source / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}"
    )
    said = weft("inspect", chats, "--model", source).out
    assert "answers are found by its own marks" in said
    assert "user: ⟦2 + 2?⟧" in said, "it is the template that says what is generated"


def test_on_a_terminal_it_is_in_colour(
    weft: Weft, chats: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(conversations, "sys", SimpleNamespace(stdout=SimpleNamespace(isatty=lambda: True)))
    text = "\n".join(conversations.shown(str(chats), str(source), 1, tmp_path))
    assert "\x1b[32m4?[31m<|im_end|>\x1b[0m" in text


def test_one_of_more_than_a_template_may_make_is_counted(weft: Weft, chats: Path, source: Path) -> None:
    chats.write_text("\n".join(map(json.dumps, [*CHATS, {"prompt": "x" * (2 << 20), "completion": "y"}])))
    said = weft("inspect", chats, "--model", source)
    assert said.out.splitlines()[:2] == [
        "2 conversations",
        "1 conversation more left out, because of more than the 1 MiB that a chat template may make",
    ]
    assert (
        "line 3: the model's chat template makes more" in weft("inspect", chats, "--model", source, "--number", "3").err
    )


def test_a_template_that_cannot_be_read_names_model_and_file(weft: Weft, chats: Path, source: Path) -> None:
    (source / "chat_template.jinja").write_text("{% for %}")
    said = weft("inspect", chats, "--model", source)
    assert f"--model {source}: the chat template of chat_template.jinja cannot be read: line 1: " in said.err


def test_tasks_of_a_table_are_shown(weft: Weft, chats: Path, source: Path) -> None:
    path = chats.with_name("tasks.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "2 + 2?", "answer": "4"}]), path)
    assert weft("inspect", path, "--model", source).out.startswith("1 task\n")


def test_what_is_wrong_is_said(weft: Weft, chats: Path, source: Path, tmp_path: Path) -> None:
    assert "--number 3: there are 2 conversations" in weft("inspect", chats, "--model", source, "--number", "3").err
    assert "--number: it is of conversations" in weft("inspect", chats, "--number", "1").err
    assert "--model MODEL" in weft("inspect", chats).err
    assert "nosuch" in weft("inspect", chats, "--model", "nosuch").err
    assert "weft1secret" not in weft("inspect", "weft1secret", "--model", source).err
    (tmp_path / "none.jsonl").write_text("[]")
    assert "none.jsonl holds no conversation" in weft("inspect", tmp_path / "none.jsonl", "--model", source).err
    chats.write_text('{"messages": [{"role": "narrator", "content": "x"}]}')
    said = weft("inspect", chats, "--model", source)
    assert said.code == 11
    assert "chats.jsonl, line 1, messages 1: unknown role 'narrator'" in " ".join(said.err.split())
    (source / "chat_template.jinja").unlink()
    assert "it has no chat template" in weft("inspect", chats, "--model", source).err


def test_a_pair_of_answers_is_shown_with_both(weft: Weft, chats: Path, source: Path, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}) + "\n")
    said = weft("inspect", pairs, "--model", source)
    assert said.code == 0
    assert said.out.startswith("1 pair\n")
    chosen, _, rejected = said.out.partition("rejected:\n")
    assert chosen.partition("chosen:\n")[2].strip().endswith("<|im_start|>assistant\n⟦4<|im_end|>⟧")
    assert rejected.strip().endswith("<|im_start|>assistant\n⟦5<|im_end|>⟧")
    assert "--number 2: there is 1 pair." in weft("inspect", pairs, "--model", source, "--number", "2").err
    said = weft("inspect", chats, "--model", source)
    assert "chosen:" not in said.out


def test_a_task_is_shown_with_what_answers_it(weft: Weft, chats: Path, source: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    rows = [
        {"question": "2 + 2?", "answer": ["4", "four"], "match": "contains"},
        {"question": "3 + 3?", "choices": ["5", "6"], "answer": 1},
        {"question": "1 + 1?", "answer": "2", "match": "contains"},
    ]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = weft("inspect", tasks, "--model", source).out
    assert said.startswith("3 tasks\n")
    assert "right by  contains (2), a choice (1)" in said
    assert f"number 1, {tasks}, line 1:\n\n" in said
    assert "user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n\nright is by match = contains:\n4\nfour\n" in said
    assert weft("inspect", tasks, "--model", source, "--number", "2").out.endswith("right is the choice:\n6\n")
    assert "--number 4: there are 3 tasks" in weft("inspect", tasks, "--model", source, "--number", "4").err
    tasks.write_text('{"question": "Say a rhyme"}\n')
    said = weft("inspect", tasks, "--model", source).out
    assert "right by  a judge of the run's" in said
    assert said.rstrip().endswith("user\nSay a rhyme<|im_end|>\n<|im_start|>assistant")
