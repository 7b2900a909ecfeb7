"""Who has the parameters sees from one pass whether answers are those that were to be drawn, and from none else."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from unit.training.test_rewarded import LENGTH, likes_digits, made, write_model
from weft.chat.task_rows import Asked
from weft.data.batch import Batches
from weft.run.frozen import frozen_of
from weft.run.machine import PeerConfig
from weft.store.home import Home
from weft.training.answers import Drawer, Forged, Outdated, Tokens
from weft.training.device import choose
from weft.training.judging import ByTask

MAX_TOKENS, SAMPLES, NUM = 5, 4, 50
ANSWERS = {"reward": {"type": "match", "samples": SAMPLES, "max_tokens": MAX_TOKENS}}
Answers = tuple[Tokens, ...]


class Play:
    """Two machines with the same run, and the tasks of it."""

    def __init__(self, base: Path) -> None:
        torch.set_num_threads(1)
        write_model(base / "model", likes_digits())
        rows = [{"question": f"say {number}", "answer": ["1", "2", "3"]} for number in range(80)]
        (base / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.sealed = made(base, **ANSWERS)
        home = Home(base / "home")
        frozen = frozen_of(self.sealed.config, home, self.sealed.tokenizer, self.sealed.came_with)
        device = choose(PeerConfig(device="cpu"))
        judge = ByTask(runs_code=False)
        self.draws, self.checks, self.outdated, self.helps = (
            Drawer(self.sealed.config, device, frozen, each) for each in (judge, judge, judge, None)
        )
        vector, luck = likes_digits(), torch.Generator().manual_seed(1)
        self.draws.renew(vector)
        self.checks.renew(vector)
        self.helps.renew(vector)
        self.outdated.renew(vector + 0.05 * torch.randn(vector.numel(), generator=luck))
        batches = Batches(self.sealed.store, self.sealed.index, "train", LENGTH, 0)
        self.places = np.arange(NUM)
        self.batch = batches.at(self.places)
        self.asked = self.draws.asked(self.batch)

    def drawn(self, drawer: Drawer, places: list[int] | None = None) -> list[Answers]:
        groups = drawer.drawn(self.asked, self.places.tolist() if places is None else places)
        return [tuple(answer.tokens for answer in group.answers) for group in groups]


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Play:
    return Play(tmp_path_factory.mktemp("answers"))


@pytest.mark.full
def test_honest_answers_are_right_and_as_likely_as_their_drawer_says(play: Play) -> None:
    groups = play.draws.drawn(play.asked, play.places.tolist())
    lengths = set()
    for place, (asked, group) in enumerate(zip(play.asked, groups, strict=True)):
        tokens = tuple(answer.tokens for answer in group.answers)
        found = play.checks.checked(asked, place, tokens)
        assert [answer.reward for answer in found.answers] == [answer.reward for answer in group.answers]
        for mine, theirs in zip(found.answers, group.answers, strict=True):
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
            lengths.add(len(mine.tokens))
    assert MAX_TOKENS in lengths


@pytest.mark.full
def test_who_draws_for_others_alone_needs_no_judge(play: Play) -> None:
    places = play.places.tolist()
    assert play.helps.for_others(play.helps.asked(play.batch), places, 1) == play.drawn(play.draws)
    with pytest.raises(Outdated, match="another round"):
        play.helps.for_others(play.asked, places, 0)


def altered(answers: Answers, luck: np.random.Generator) -> Answers:
    number = int(luck.integers(len(answers)))
    tokens = list(answers[number])
    at = int(luck.integers(len(tokens)))
    tokens[at] = (tokens[at] + int(luck.integers(1, 200))) % 256
    return (*answers[:number], tuple(tokens), *answers[number + 1 :])


FORGERIES: dict[str, Callable[[Answers, np.random.Generator], Answers]] = {
    "one token is another": altered,
    "all say the right one": lambda answers, _: (tuple(b"12345"),) * len(answers),
    "two have changed places": lambda answers, _: (answers[1], answers[0], *answers[2:]),
    "all are the first": lambda answers, _: (answers[0],) * len(answers),
    "one is cut off": lambda answers, _: (answers[0][:-1], *answers[1:]),
    "one goes on": lambda answers, _: ((*answers[0], 49), *answers[1:]),
    "one is missing": lambda answers, _: answers[1:],
    "one has a token that there is not": lambda answers, _: ((*answers[0][:-1], 1000), *answers[1:]),
    "one is empty": lambda answers, _: ((), *answers[1:]),
}


@pytest.mark.full
@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_every_forgery_is_found(play: Play, forge: Callable[[Answers, np.random.Generator], Answers]) -> None:
    luck, num_found, num = np.random.default_rng(0), 0, 0
    for place, (asked, answers) in enumerate(zip(play.asked, play.drawn(play.draws), strict=True)):
        told = forge(answers, luck)
        if told == answers:  # they were alike
            continue
        num += 1
        num_found += is_forged(play.checks, asked, place, told)
    assert num >= NUM - 5
    assert num_found == num


@pytest.mark.full
def test_other_parameters_and_other_noise_are_found(play: Play) -> None:
    of_others = play.drawn(play.outdated)
    elsewhere = play.drawn(play.draws, [place + 1 for place in play.places.tolist()])
    # Of parameters that are nearly the same, a task or two have answers that could have been drawn.
    for told, least in ((of_others, NUM - 3), (elsewhere, NUM)):
        found = [
            is_forged(play.checks, asked, place, answers)
            for place, (asked, answers) in enumerate(zip(play.asked, told, strict=True))
        ]
        assert sum(found) >= least


def is_forged(drawer: Drawer, asked: Asked, place: int, answers: Answers) -> bool:
    try:
        drawer.checked(asked, place, answers)
    except Forged:
        return True
    return False
