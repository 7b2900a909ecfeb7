"""A model learns from what its own answers are worth; whoever has the same parameters draws the same answers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import weft
from example import example
from unit.chat.templates import CHATML
from weft.clock import SystemClock
from weft.config import from_tree
from weft.data.batch import Batches
from weft.data.corpus import CorpusConfig, JsonlSource
from weft.data.tokenizer import ByteTokenizer
from weft.errors import ConfigError, DataError
from weft.events import Event, Rewarded
from weft.launch.corpus import ONE
from weft.model.config import ModelConfig
from weft.model.flat import layout
from weft.model.initial import initial_vector
from weft.model.weights import write_folder
from weft.run.config import RunFile
from weft.run.frozen import frozen_of
from weft.run.genesis import Sealed, initial, pack_private, seal
from weft.run.machine import PeerConfig
from weft.store.home import Home
from weft.training.rewarded import RewardedTrainer, trainer_of
from weft.training.trainer import Trainer

LENGTH, BATCH = 192, 6
MODEL = ModelConfig(
    vocab_size=257, num_layers=1, num_heads=2, num_kv_heads=2, width=32, ffn_width=64, max_seq_len=LENGTH
)


SCHEDULE = {"type": "constant", "lr": 5e-3, "warmup_tokens": 0}
TRAIN = {"seq_len": LENGTH, "batch_size": BATCH, "tokens": 1_000_000, "schedule": SCHEDULE}


def run_file(**changes: Any) -> RunFile:
    tree: dict[str, Any] = {
        "name": "digits",
        "peers": 1,
        "model": {"type": "folder", "path": "model"},
        "tokenizer": {"type": "json", "path": "model"},
        "data": {"source": {"type": "tasks", "paths": ["tasks.jsonl"]}, "heldout_fraction": 0.2},
        "reward": {"type": "match", "samples": 8, "max_tokens": 1},
        "train": TRAIN,
        "method": {"type": "fedavg", "every": 2},
    }
    given = {name: value for name, value in (tree | changes).items() if value is not None}
    return from_tree(given, RunFile, where="run.toml")


def write_base(folder: Path) -> Path:
    torch.set_num_threads(1)
    write_model(folder / "model", likes_digits())
    rows = [{"question": f"say {number}", "answer": ["1", "2", "3"]} for number in range(30)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path)


def write_model(folder: Path, vector: Tensor) -> None:
    write_folder(folder, MODEL, vector, ByteTokenizer().to_json())
    (folder / "chat_template.jinja").write_text(CHATML)


def likes_digits() -> Tensor:
    """Return parameters by which, after any text, the ten digits are likely, and about alike."""
    vector, spans = initial_vector(MODEL, 3), layout(MODEL)
    named = {span.name: spans.view(vector, span) for span in spans}
    named["head.weight"][48:58] *= 5  # so that they can be told apart
    named["head.weight"][48:58] += 10 * named["embed.weight"][10]  # what comes out behind a line's end
    return vector


def made(base: Path, **changes: Any) -> Sealed:
    return seal(run_file(**changes), base, Home(base / "home"), lambda _event: None)


def trainer(base: Path, sealed: Sealed, told: list[Event], **settings: Any) -> tuple[Trainer, Tensor]:
    home, run = Home(base / "home"), sealed.config
    peer = PeerConfig(device="cpu", threads=1, **settings)
    batches = Batches(sealed.store, sealed.index, "train", LENGTH, run.seed)

    def frozen() -> Any:
        return frozen_of(run, home, sealed.tokenizer, sealed.came_with)

    found, outer = trainer_of(run, peer, batches, told.append, SystemClock(), frozen), initial(run, home)
    assert outer is not None
    found.start(outer)
    return found, outer


@pytest.mark.full
def test_who_draws_for_others_needs_no_judge(base: Path) -> None:
    reward = {"type": "extension", "judge": {"name": "test.unheard", "source": "ab" * 32}, "samples": 2}
    sealed = made(base, reward=reward)
    found, _ = trainer(base, sealed, [], is_drawing_only=True)
    assert isinstance(found, RewardedTrainer)
    (answers,) = found.answers(np.arange(1), found.edition)
    assert len(answers) == 2
    with pytest.raises(ConfigError, match="none of that name"):
        trainer(base, sealed, [])


def rewards(told: list[Event]) -> list[float]:
    return [event.reward for event in told if isinstance(event, Rewarded)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("adapter", "lr", "least"),
    [(None, 5e-3, 0.9), pytest.param({"type": "lora", "rank": 4}, 1e-2, 0.5, marks=pytest.mark.slow)],
    ids=["whole", "adapter"],
)
def test_answers_become_right(base: Path, adapter: dict[str, Any] | None, lr: float, least: float) -> None:
    told, sealed = list[Event](), made(base, adapter=adapter, train=TRAIN | {"schedule": SCHEDULE | {"lr": lr}})
    learner, outer = trainer(base, sealed, told)
    assert isinstance(learner, RewardedTrainer)
    learner.warm_up()
    heldout = Batches(sealed.store, sealed.index, "heldout", LENGTH, 0)
    before, at = learner.evaluate(outer, heldout, 100), 0
    for _ in range(15):
        work = learner.train(np.arange(at, at + 2 * BATCH), at * LENGTH, 1)
        assert work.num_steps == 2
        at += 2 * BATCH
        outer = learner.local().clone()
        learner.set_center(outer)
    assert np.mean(rewards(told)[:2]) < 0.4
    assert np.mean(rewards(told)[-6:]) > least
    after = learner.evaluate(outer, heldout, 100)
    assert after.reward is not None
    assert after.loss == 1 - after.reward
    assert before.num == after.num == sealed.index.rows.heldout_trained  # type: ignore[union-attr]


@pytest.mark.full
def test_answers_become_what_a_function_from_outside_likes(base: Path) -> None:
    """The nearer to nine, the better: the right answer itself is drawn seldom, and all others teach where it lies."""
    rows = [{"question": f"say {number}", "answer": 9} for number in range(30)]
    (base / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert example("judge").near
    reward = {"type": "extension", "samples": 8, "max_tokens": 1, "judge": {"name": "example.near"}}
    told, sealed = list[Event](), made(base, reward=reward)
    learner, _ = trainer(base, sealed, told)
    learner.warm_up()
    for at in range(0, 30 * BATCH, 2 * BATCH):
        learner.train(np.arange(at, at + 2 * BATCH), at * LENGTH, 1)
        learner.set_center(learner.local().clone())
    assert 0.3 < np.mean(rewards(told)[:2]) < 0.6
    assert np.mean(rewards(told)[-6:]) > 0.85


def test_a_judge_needs_no_answers(base: Path) -> None:
    (base / "tasks.jsonl").write_text("".join(json.dumps({"question": f"say {n}"}) + "\n" for n in range(30)))
    weft.extend("test.short", lambda: lambda prompt, answers, said: float(answers == () and "say" in prompt))
    reward = {"type": "extension", "max_tokens": 1, "judge": {"name": "test.short"}}
    told, sealed = list[Event](), made(base, reward=reward)
    trainer(base, sealed, told)[0].train(np.arange(BATCH), 0, 1)
    assert rewards(told) == [1.0]
    with pytest.raises(DataError, match="no answer"):
        made(base)


def test_whoever_has_the_same_parameters_draws_the_same_answers(base: Path) -> None:
    sealed = made(base)
    one, _ = trainer(base, sealed, [])
    other, _ = trainer(base, sealed, [])
    places = np.array([4, 1, 17])
    assert isinstance(one, RewardedTrainer)
    assert isinstance(other, RewardedTrainer)
    first, second = one.groups(places)[0], other.groups(places[::-1].copy())[0]
    assert [[a.tokens for a in group.answers] for group in first] == [
        [a.tokens for a in group.answers] for group in reversed(second)
    ]
    assert len({a.tokens for a in first[0].answers}) > 1  # each by noise of its own
    other.train(np.arange(BATCH), 0, 1)
    assert [a.tokens for a in other.groups(places)[0][0].answers] == [a.tokens for a in first[0].answers]
    other.set_center(other.local().clone())
    assert [a.logprobs for a in other.groups(places)[0][0].answers] != [a.logprobs for a in first[0].answers]
    one.park()
    one.unpark()
    assert [a.tokens for a in one.groups(places)[0][0].answers] == [a.tokens for a in first[0].answers]


def test_steps_that_teach_nothing_change_nothing_but_what_decays(base: Path) -> None:
    rows = [{"question": f"say {number}", "answer": "never"} for number in range(30)]
    (base / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    optimizer = {"type": "adamw", "weight_decay": 0.0}
    told = list[Event]()
    learner, outer = trainer(base, made(base, train=TRAIN | {"optimizer": optimizer}), told)
    work = learner.train(np.arange(2 * BATCH), 0, 1)
    assert (work.num_steps, work.mean_loss) == (2, 1.0)  # all that could be had is lacking
    assert rewards(told) == [0.0, 0.0]
    assert torch.equal(learner.local(), outer)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reward": None}, "tasks are learnt from by rewards"),
        ({"data": {"source": {"type": "text", "paths": ["x"]}}}, "it is of answers to tasks"),
        ({"model": {"type": "size", "size": "nano"}}, "it improves a model that answers already"),
        ({"stages": 2, "method": {"type": "ddp"}}, "stages draw no answers"),
        ({"reward": {"type": "match", "max_tokens": LENGTH}}, "leaves no room for a task"),
        *(
            ({"method": method}, "no neighbours, no gradients, no sample")
            for method in (
                {"type": "ddp"},
                {"type": "noloco"},
                {"type": "fedavg", "among": {"type": "sample", "share": 0.5}},
            )
        ),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=words):
        run_file(**changes)


def test_a_private_run_packs_each_peers_own_tasks(base: Path) -> None:
    sealed = made(base, is_private=True)
    (base / "own.jsonl").write_text("".join(json.dumps({"question": f"q{n}", "answer": "a"}) + "\n" for n in range(40)))
    corpus = CorpusConfig(source=JsonlSource(paths=("own.jsonl",)), heldout_fraction=0.2)
    index = pack_private(
        sealed.config, sealed.tokenizer, sealed.came_with, corpus, base, Home(base / "other"), lambda _event: None
    )
    assert index.has_tasks


def test_files_of_another_kind_are_refused(base: Path) -> None:
    (base / "tasks.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 5)
    with pytest.raises(DataError, match="no answer"):
        made(base)


def test_drawing_only_needs_a_run_with_rewards(base: Path) -> None:
    settings = PeerConfig(device="cpu", is_drawing_only=True)
    ONE.check_fits(made(base).config, settings)
    (base / "chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "c", "completion": "d"}\n' * 20)
    chats = {"source": {"type": "conversations", "paths": ["chats.jsonl"]}, "heldout_fraction": 0.2}
    with pytest.raises(ConfigError, match="--draw-only"):
        ONE.check_fits(made(base, data=chats, reward=None).config, settings)
    with pytest.raises(ConfigError, match="tasks stay with whoever has them"):
        ONE.check_fits(made(base, is_private=True).config, settings)
