"""`weft train chats.jsonl --model FOLDER`: what is asked, the run file that is written, and what is refused."""

import json
from pathlib import Path

import pytest

from unit.cli.own.test_own_text import Begun, Terminal, begun, words
from unit.cli.small import Weft
from unit.cli.test_tuned import LOCAL, folder
from weft.cli.plan import speed_here
from weft.cli.run import running
from weft.config import load, load_tree
from weft.data.corpus import ConversationsSource, PreferencesSource
from weft.errors import ConfigError, DataError
from weft.model.config import ModelConfig
from weft.run.config import DpoConfig, FolderModel, NewAdapter, RunFile

__all__ = ["begun", "folder"]


@pytest.fixture(autouse=True)
def _known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    here = speed_here.Here(
        name="cpu, threads: 1", tokens_per_s=100.0, crowding=1.0, is_gpu=False, is_half=False, memory_nbytes=1e9
    )
    monkeypatch.setattr(speed_here, "measure", lambda *_args, **_options: here)


def test_conversations_tune_the_model_that_is_named(weft: Weft, folder: Path, begun: Begun) -> None:
    answer = weft("train", "chats.jsonl", "--model", "model", "--yes")
    assert answer.code == 0, answer.err
    made = load(folder / "chats.toml", RunFile)
    assert made.model == FolderModel(path="model")
    assert made.data.source == ConversationsSource(paths=("chats.jsonl",))
    assert isinstance(made.adapter, NewAdapter)
    assert made.train.loss is None or not isinstance(made.train.loss, DpoConfig)
    said = words(answer)
    for line in (
        "chat model to tune: model, as given",
        "chats.jsonl: 60 conversations; ",
        "name of the run: chats",
        "how long: ",
        " passes over the conversations",
        "an adapter of ",
        "the conversations as tokens, the model, and checkpoints",
        "whoever has the ticket can join and then has the conversations",
        "weft export --adapter the adapter alone",
    ):
        assert line in said
    ((corpus, _),) = begun
    assert corpus.described == (made, folder)


def test_pairs_are_known_by_their_fields(weft: Weft, folder: Path, begun: Begun) -> None:
    answer = weft("train", "pairs.jsonl", "--model", "model", "--yes", "--set", "adapter.rank=2")
    assert answer.code == 0, answer.err
    made = load(folder / "pairs.toml", RunFile)
    assert isinstance(made.data.source, PreferencesSource)
    assert isinstance(made.train.loss, DpoConfig)
    assert isinstance(made.adapter, NewAdapter)
    assert made.adapter.rank == 2
    assert "60 pairs; " in words(answer)


def test_a_person_is_asked_which_model(weft: Weft, folder: Path, begun: Begun, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = Terminal("\n".join(("nowhere", "model", "mine", "2", "10passes")) + "\n")
    monkeypatch.setattr("sys.stdin", typed)
    answer = weft("train", "chats.jsonl")
    assert answer.code == 0, answer.err
    assert typed.read() == ""
    said = words(answer)
    assert "nowhere: no such model. Name a Hugging Face folder" in said
    made = load(folder / "chats.toml", RunFile)
    assert (made.name, made.peers) == ("mine", 2)
    assert " passes over the conversations; more than 3 teach little" in said


def test_a_model_of_the_name_that_weft_would_give_one_is_left_where_a_start_fails(
    weft: Weft, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--after` writes a model beside the run file; this one is somebody's own."""

    def fails(*_args: object, **_named: object) -> None:
        raise ConfigError("cannot listen on 10.9.9.9")

    (folder / "model").rename(folder / "chats-model")
    monkeypatch.setattr(running, "run", fails)
    there = sorted((folder / "chats-model").iterdir())
    assert weft("train", "chats.jsonl", "--model", "chats-model", "--yes").code == 2
    assert sorted((folder / "chats-model").iterdir()) == there
    assert not (folder / "chats.toml").exists()


def test_rows_that_have_a_text_too_are_conversations_where_a_model_is_named(
    weft: Weft, folder: Path, begun: Begun
) -> None:
    rows = [{"instruction": f"say {n}", "input": "", "output": "ok", "text": "all of it"} for n in range(60)]
    (folder / "alpaca.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert weft("train", "alpaca.jsonl", "--model", "model", "--yes").code == 0
    assert isinstance(load(folder / "alpaca.toml", RunFile).data.source, ConversationsSource)


def test_of_a_private_run_nobody_is_said_to_have_the_conversations(weft: Weft, folder: Path, begun: Begun) -> None:
    answer = weft("train", "chats.jsonl", "--model", "model", "--yes", "--set", "is_private=true")
    assert answer.code == 0, answer.err
    assert "those here stay here" in words(answer)
    assert "then has the conversations" not in words(answer)


def test_the_same_conversations_again_find_their_run_file(weft: Weft, folder: Path, begun: Begun) -> None:
    assert weft("train", "chats.jsonl", "--model", "model", "--yes").code == 0
    before = (folder / "chats.toml").read_bytes()
    answer = weft("train", "chats.jsonl")
    assert answer.code == 0, answer.err
    assert "says how to train chats.jsonl" in words(answer)
    assert (folder / "chats.toml").read_bytes() == before


def test_a_model_that_lies_elsewhere_is_named_by_its_whole_path(
    weft: Weft, folder: Path, begun: Begun, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "models" / "small"
    elsewhere.parent.mkdir()
    (folder / "model").rename(elsewhere)
    assert weft("train", "chats.jsonl", "--model", "models/small", "--yes").code == 0
    tree = load_tree(folder / "chats.toml")
    assert tree["model"]["path"] == tree["tokenizer"]["path"] == str(elsewhere)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("chats.jsonl --yes", "which tune a chat model, and weft cannot choose that for you"),
        ("chats.jsonl --yes --model nowhere", "--model nowhere: no such model"),
        ("chats.jsonl --yes --model model --size nano", "--size: no effect here: chats.jsonl holds conversations"),
        ("chats.jsonl --yes --model model --set model.path=other", "--set model.path: for your own text, --model says"),
        ("chats.jsonl --yes --model model --set adapter.rang=2", 'no field "rang"'),
        ("chats.jsonl --yes --model model --set model.size=nano", "model"),
        ("chats.jsonl --yes --model model --peers 60", "too few conversations to train on: 60 conversations fill"),
        ("chats.jsonl", "no terminal to ask you how to train on these conversations"),
        ("plain.jsonl --yes --model model", "--model: no effect here: plain.jsonl is text"),
        ("chats.jsonl --yes --model bare", "--model bare: it has no chat template"),
        ("broken.jsonl --yes --model model", "broken.jsonl, line 2"),
    ],
)
def test_what_makes_no_sense_is_refused_and_leaves_nothing(
    weft: Weft, folder: Path, begun: Begun, line: str, said: str
) -> None:
    (folder / "plain.jsonl").write_text(json.dumps({"text": "words " * 1000}) + "\n")
    (folder / "broken.jsonl").write_text((folder / "chats.jsonl").read_text().splitlines()[0] + '\n{"prompt": 3}\n')
    bare = folder / "bare"
    bare.mkdir()
    for file in (folder / "model").iterdir():
        if file.name != "chat_template.jinja":
            (bare / file.name).write_bytes(file.read_bytes())
    before = sorted(folder.glob("*.toml"))
    answer = weft("train", *line.split())
    assert answer.code in (2, DataError.exit_code), answer.err
    assert said in words(answer)
    assert sorted(folder.glob("*.toml")) == before
    assert begun == []


@pytest.mark.full
def test_conversations_are_trained_on_and_after_that_others(weft: Weft, folder: Path) -> None:
    assert weft("train", "chats.jsonl", "--model", "model", "--yes", "--length", "20passes", *LOCAL).code == 0
    (folder / "more.jsonl").write_text((folder / "chats.jsonl").read_text())
    answer = weft("train", "more.jsonl", "--after", "last", "--yes", *LOCAL)
    assert answer.code == 0, answer.err
    made = load(folder / "more.toml", RunFile)
    assert made.predecessor is not None
    assert made.model == FolderModel(path="more-model")
    assert isinstance(made.adapter, NewAdapter)
    assert "model: what run" in words(answer)


@pytest.mark.full
def test_after_chats_with_dropout_come_pairs_without(weft: Weft, folder: Path) -> None:
    more = ("--set", "adapter.dropout=0.05")
    assert weft("train", "chats.jsonl", "--model", "model", "--yes", "--length", "20passes", *more, *LOCAL).code == 0
    answer = weft("train", "pairs.jsonl", "--after", "last", "--yes", "--length", "3passes", *LOCAL)
    assert answer.code == 0, answer.err
    made = load(folder / "pairs.toml", RunFile)
    assert isinstance(made.adapter, NewAdapter)
    assert not made.adapter.dropout
    assert "adapter.dropout of the run before is left out" in words(answer)
    (folder / "prefer.toml").write_text(
        (folder / "prefer.toml")
        .read_text()
        .replace('{type = "lora", rank = 2, alpha = 8.0}', '{type = "folder", path = "x"}')
    )
    answer = weft("train", "prefer.toml", "--after", "chats", *LOCAL)
    assert answer.code == 0, answer.err
    (folder / "more.jsonl").write_text((folder / "chats.jsonl").read_text())
    assert weft("train", "more.jsonl", "--after", "chats", "--yes", *LOCAL).code == 0
    kept = load(folder / "more.toml", RunFile).adapter
    assert isinstance(kept, NewAdapter)
    assert kept.dropout == 0.05


def test_what_is_timed_is_what_set_makes_of_it(
    weft: Weft, folder: Path, begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed, measure = list[ModelConfig](), speed_here.measure

    def told(model: ModelConfig, *args: object, **options: object) -> speed_here.Here:
        timed.append(model)
        return measure(model, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(speed_here, "measure", told)
    line = ("train", "pairs.jsonl", "--model", "model", "--yes", "--set")
    assert "adapter.dropout=0.1: adapter.dropout: pairs of answers are compared" in words(
        weft(*line, "adapter.dropout=0.1")
    )
    assert not timed
    assert weft(*line, "adapter.rank=2").code == 0
    (model,) = timed  # once
    assert model.adapter
    assert model.adapter.rank == 2


@pytest.mark.parametrize("told", [("--yes",), ("--peers", "1", "--yes"), ("--peers", "2", "--yes")])
def test_too_few_tokens_are_refused_before_this_machine_is_timed(
    weft: Weft, folder: Path, monkeypatch: pytest.MonkeyPatch, told: tuple[str, ...]
) -> None:
    def timed(*_args: object, **_options: object) -> None:
        raise AssertionError("it was timed")

    monkeypatch.setattr(speed_here, "measure", timed)
    answer = weft("train", "chats.jsonl", "--model", "model", "--length", "20tokens", *told)
    assert answer.code == 2
    assert "Give at least" in answer.err
    assert not (folder / "chats.toml").exists()
