"""What an answer is worth, from 0 to 1: by what its task says, or by a function from outside of weft.

    judge = judge_of(run.reward)          refused where this machine cannot judge: before anything is fetched
    judge.require(checks)                 of tasks that somebody else has packed
    judge.worth(said, decode)             of answers, in their order

A function from outside is called with the prompt as the model reads it, the task's answers and what was said:

    def rhymes(prompt: str, answers: tuple[str, ...], said: str) -> float: ...
    weft.extend("acme.rhymes", lambda: rhymes)
"""

from collections.abc import Callable, Iterable, Sequence
from math import nan
from typing import Any, Protocol, SupportsFloat

from weft.chat import sandbox
from weft.chat.task_rows import Asked, Check
from weft.errors import ConfigError, DataError, WeftError
from weft.extension import make
from weft.run.reward import ExtensionReward, MatchReward, RewardConfig

Said = Sequence[tuple[Asked, str]]
Decode = Callable[[Sequence[int]], str]


class Judge(Protocol):
    def require(self, checks: Iterable[Check]) -> None:
        """
        Raises:
            DataError: a task is to be judged as the run does not say.
        """

    def worth(self, said: Said, decode: Decode) -> list[float]:
        """Return what answers are worth.

        Args:
            decode: returns the text of tokens.

        Raises:
            ConfigError: this machine cannot judge one.
        """
        ...


def judge_of(reward: RewardConfig) -> Judge:
    """Return what judges a run's answers.

    Raises:
        ConfigError: this machine lacks it; says what to do.
    """
    match reward:
        case MatchReward():
            return ByTask(runs_code=reward.runs_code)
        case ExtensionReward():
            return Extension(reward.judge.name, make(reward.judge))


class ByTask:
    """1 where the task says that it is right, and else 0.

    Args:
        runs_code: some are code, which is run in a sandbox.
    """

    def __init__(self, *, runs_code: bool) -> None:
        if runs_code:
            sandbox.require()
        self._runs_code = runs_code

    def require(self, checks: Iterable[Check]) -> None:
        if not self._runs_code and any(check.match == "tests" for check in checks):
            raise DataError(
                "a task of the run's data has tests, and the run does not say that members run code. Whoever made the "
                "run packed it wrongly; tell them."
            )

    def worth(self, said: Said, decode: Decode) -> list[float]:  # noqa: ARG002  # a task needs no prompt to be checked
        return sandbox.map_together(lambda each: float(each[0].check.is_right(each[1])), said)


class Extension:
    """
    Args:
        name: that the run has it by.
        made: by its author, as the run's settings say.

    Raises:
        ConfigError: it cannot be called.
    """

    def __init__(self, name: str, made: Any) -> None:
        if not callable(made):
            raise ConfigError(
                f"{name}: {type(made).__name__} judges nothing: it needs to be a function of prompt, answers and what "
                "was said."
            )
        self._name, self._made = name, made

    def require(self, checks: Iterable[Check]) -> None:
        pass

    def worth(self, said: Said, decode: Decode) -> list[float]:
        return [self._worth(decode(asked.prompt), asked.check.answers, text) for asked, text in said]

    def _worth(self, prompt: str, answers: tuple[str, ...], said: str) -> float:
        try:
            worth = self._made(prompt, answers, said)
            value = float(worth) if isinstance(worth, SupportsFloat) else nan
        except WeftError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{self._name}: it raised {what} at the answer {said[:60]!r}. Mend it.") from error
        if not 0 <= value <= 1:
            raise ConfigError(f"{self._name}: it says {worth!r:.40} of {said[:60]!r}. Due is a number from 0 to 1.")
        return value
