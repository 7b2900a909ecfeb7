"""Questions to a person that options can answer, and that have usual answers."""

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import typer

from weft.cli.terminal import tell
from weft.errors import ConfigError

T = TypeVar("T")


class Asks:
    """Asks a person, takes what options say, or takes what is usual and says so in one line.

    Args:
        is_on: whether a person is asked.
        questions: the options that answer them; given: those that do.
        about: what is to be decided, in words.

    Raises:
        ConfigError: somebody is to be asked, and there is no terminal.
    """

    def __init__(self, *, is_on: bool, questions: Iterable[str], given: Sequence[str], about: str) -> None:
        self._is_on = is_on
        still_open = [option for option in questions if option not in given]
        if is_on and still_open and not sys.stdin.isatty():
            raise ConfigError(
                f"weft has no terminal to ask you {about}. Add --yes for the defaults, or answer with "
                f"{', '.join(still_open)} (`weft train --help`)."
            )

    def ask(self, question: str, given: str | None, usual: str | None, read: Callable[[str], T]) -> T:
        """Return an answer, as `read` takes it.

        Args:
            usual: None: there is none.

        Raises:
            ConfigError: of `read`, for what an option says.
        """
        if given is not None or (not self._is_on and usual is not None):
            answer = str(usual if given is None else given)
            tell(f"{question.partition(':')[0].partition(',')[0]}: {answer}{'' if given is None else ', as given'}")
            return read(answer)
        while True:
            answer = str(typer.prompt(question, default=usual, err=True)).strip()
            try:
                return read(answer)
            except ConfigError as error:
                tell(re.sub(r"^--[a-z-]+ ", "", str(error)))  # it was an answer, and no option
