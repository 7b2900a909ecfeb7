"""`weft eval --data` of conversations, the held-out ones of a private run, and the day that templates are told."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from unit.cli.small import Weft
from unit.cli.test_tuned import LOCAL, folder
from weft.chat.packing import split
from weft.chat.tasks import Task
from weft.cli.model.tasks import Asker, Way
from weft.cli.model.trained import open_trained
from weft.config import load
from weft.data.corpus import USUAL_DATE, ConversationsSource
from weft.run.config import RunFile
from weft.run.genesis import seal
from weft.store.home import Home

__all__ = ["folder"]

DATED = (
    "{% if strftime_now is defined %}{{ strftime_now('%Y-%m-%d') }}{% endif %}|{% for m in messages %}{{ m.role[0] }}:"
    "{{ m.content }}|{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
ANSWERS = [f"ok {number}" for number in range(60)]


def words(text: str) -> str:
    return " ".join(text.split())


def of_day(folder: Path, day: str) -> None:
    """Let the run say that day."""
    (folder / "model" / "chat_template.jinja").write_text(DATED)
    text = (folder / "chat.toml").read_text()
    (folder / "chat.toml").write_text(
        text.replace('paths = ["chats.jsonl"]', f'paths = ["chats.jsonl"], date = "{day}"')
    )


def test_answers_alone_are_measured(weft: Weft, folder: Path) -> None:
    found = weft("eval", "model", "--data", "chats.jsonl", "--device", "cpu")
    assert found.code == 0, found.err
    num = sum(len(f"{answer}|") for answer in ANSWERS)  # of a model whose tokens are bytes
    assert f"over {num:,} tokens" in found.out or f"over {num} tokens" in found.out, found.out
    (folder / "one.jsonl").write_text((folder / "chats.jsonl").read_text().splitlines()[0])
    assert (
        "over 5 tokens (1 sample) of one.jsonl" in weft("eval", "model", "--data", "one.jsonl", "--device", "cpu").out
    )


def test_rows_with_a_text_are_text_where_nobody_trains_on_conversations(weft: Weft, folder: Path) -> None:
    row = {"prompt": "say", "completion": "ok", "text": "all of it " * 20}
    (folder / "both.jsonl").write_text(json.dumps(row))
    found = weft("eval", "model", "--data", "both.jsonl", "--device", "cpu")
    assert found.code == 0, found.err
    assert "over 192 tokens" in found.out


def test_what_cannot_be_measured_is_refused(weft: Weft, folder: Path) -> None:
    said = words(weft("eval", "model", "--data", "pairs.jsonl").err)
    assert "pairs.jsonl: these are pairs of answers, which only a run that learns from pairs has a loss of" in said
    (folder / "model" / "chat_template.jinja").unlink()
    assert "it has no chat template" in words(weft("eval", "model", "--data", "chats.jsonl").err)


@pytest.mark.full
def test_a_private_run_is_measured_on_what_this_machine_held_out(weft: Weft, folder: Path) -> None:
    of_day(folder, "2025-03-04")
    trained = weft("train", "chat.toml", "--set", "is_private=true", *LOCAL)
    assert trained.code == 0, trained.err
    found = weft("eval", "last", "--device", "cpu")
    assert found.code == 0, found.err
    assert "this machine's held-out text of run chat" in found.out
    lines = (folder / "chats.jsonl").read_text().splitlines()
    places = [
        each.place
        for side, each in split(ConversationsSource(paths=("chats.jsonl",)), 0.2, folder)
        if side == "heldout"
    ]
    held_out = [lines[int(place.rpartition(" ")[2]) - 1] for place in places]
    assert 0 < len(held_out) < 60
    (folder / "held_out.jsonl").write_text("\n".join(held_out))
    again = weft("eval", "last", "--data", "held_out.jsonl", "--device", "cpu")
    assert again.code == 0, again.err
    assert again.out.partition(" of held")[0] == found.out.partition(" of this")[0]
    assert "2025-03-04|" in weft("inspect", "chats.jsonl", "--model", "last").out
    (kept,) = folder.rglob("own_data.bin")
    kept.unlink()
    said = words(weft("eval", "last").err)
    assert "this machine has packed none. Name conversations with --data" in said


def test_a_model_is_asked_on_the_day_of_its_run(weft: Weft, folder: Path) -> None:
    of_day(folder, "2025-03-04")
    drawn, chosen = (
        Task("t", "", ({"role": "user", "content": "?"},), each, ("a",), "exact") for each in ((), ("a", "b"))
    )
    trained = open_trained(str(folder / "model"), folder / "home")
    run = seal(load(folder / "chat.toml", RunFile), folder, Home(folder / "home"), lambda _event: None).config
    for model, day in ((trained, USUAL_DATE), (replace(trained, run=run), "2025-03-04")):
        asker = Asker(model, "cpu", Way(8, has_template=True))
        assert trained.tokenizer.decode(asker._prompt(drawn)).startswith(f"{day}|")
        assert trained.tokenizer.decode(list(asker._scored(chosen, "a")[0].ids)).startswith(f"{day}|")
    for kind in ("chats.jsonl", "tasks.jsonl"):
        (folder / "tasks.jsonl").write_text(json.dumps({"question": "?", "answer": "a"}))
        assert f"{USUAL_DATE}|" in weft("inspect", kind, "--model", "model").out
