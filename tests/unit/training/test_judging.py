"""An answer is worth what its task says, or what a function from outside says; what is no such number is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from unit.chat.test_sandbox import needs_bwrap
from weft.chat.task_rows import Asked, Check
from weft.errors import ConfigError, DataError
from weft.extension import learn
from weft.run.reward import ExtensionReward, JudgeConfig, MatchReward, with_judge
from weft.training.judging import judge_of


def asked(match: str, *answers: str, prompt: tuple[int, ...] = (104, 105)) -> Asked:
    return Asked(prompt, Check(answers=answers, match=match))  # type: ignore[arg-type]


def text(tokens: Any) -> str:
    return bytes(tokens).decode()


def by(judge: Callable[[str, tuple[str, ...], str], object], **settings: Any) -> ExtensionReward:
    learn("test.judge", lambda **given: judge if not given else (lambda *told: judge(*told) * given["times"]))  # type: ignore[operator]
    return with_judge(ExtensionReward(judge=JudgeConfig(name="test.judge", settings=tuple(settings.items()))))  # type: ignore[return-value]


def test_a_task_says_what_is_right() -> None:
    judge = judge_of(MatchReward())
    said = [(asked("number", "4"), "it is 4"), (asked("number", "4"), "it is 5"), (asked("exact", "a", "b"), "b")]
    assert judge.worth(said, text) == [1.0, 0.0, 1.0]


def test_a_function_says_what_answers_are_worth() -> None:
    def share(prompt: str, answers: tuple[str, ...], said: str) -> float:
        assert (prompt, answers) == ("hi", ("abcd",))
        return len(set(said) & set(answers[0])) / 4

    of = asked("exact", "abcd")
    assert judge_of(by(share)).worth([(of, "ab"), (of, "x"), (of, "dcba")], text) == [0.5, 0.0, 1.0]
    assert judge_of(by(share, times=0.5)).worth([(of, "ab")], text) == [0.25]
    for one in (True, 1, np.float32(1), np.ones(()), torch.ones(1)):  # a function of numpy's or torch's says so
        assert judge_of(by(lambda *_, one=one: one)).worth([(of, "ab")], text) == [1.0]


@pytest.mark.parametrize("worth", [-0.1, 1.1, float("nan"), "1", None])
def test_what_is_no_worth_is_refused(worth: object) -> None:
    with pytest.raises(ConfigError, match=r"test\.judge: it says .* of 'ab'. Due is a number from 0 to 1"):
        judge_of(by(lambda *_: worth)).worth([(asked("exact"), "ab")], text)


def test_a_function_that_fails_is_named() -> None:
    def fails(*_: object) -> float:
        raise KeyError("x")

    with pytest.raises(ConfigError, match=r"test\.judge: it raised KeyError: 'x' at the answer 'ab'"):
        judge_of(by(fails)).worth([(asked("exact"), "ab")], text)
    with pytest.raises(ConfigError, match=r"test\.judge: it raised [RV].*Error: .* element"):
        judge_of(by(lambda *_: torch.ones(2))).worth([(asked("exact"), "ab")], text)
    with pytest.raises(ConfigError, match="int judges nothing"):
        judge_of(by(3))  # type: ignore[arg-type]


def test_one_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'test\.nobody' is not known.*--code FILE"):
        with_judge(ExtensionReward(judge=JudgeConfig(name="test.nobody")))
    with pytest.raises(ConfigError, match=r"'test\.nobody' \(text 0{8}.*--code FILE"):
        judge_of(ExtensionReward(judge=JudgeConfig(name="test.nobody", source="0" * 64)))


def test_tests_that_the_run_does_not_speak_of_are_not_run() -> None:
    with pytest.raises(DataError, match="does not say that members run code"):
        judge_of(MatchReward()).require([asked("exact", "4").check, asked("tests", "assert f()").check])


@needs_bwrap
def test_code_is_run_where_the_run_says_so() -> None:
    judge, of = judge_of(MatchReward(runs_code=True)), asked("tests", "assert f(2) == 4")
    judge.require([of.check])
    said = ["def f(x): return 2 * x", "Here:\n```python\ndef f(x):\n    return x * x\n```\nDone.", "def f(x): pass"]
    assert judge.worth([(of, each) for each in said], text) == [1.0, 1.0, 0.0]
