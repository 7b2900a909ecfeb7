"""Forms that a last stage's member holds answers to: it reads what who asks has sent, and follows it as it draws.

A form comes from a stranger. It is read beside the event loop, one at a time, within the bounds of `chat.grammar`, and
few wait for that. What may follow depends on the tokens before, whoever drew them: after a mend those that were told at
its opening, after a wrong guess those that are drawn in its place.
"""

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from weft.chat.grammar import Form, Forms, wanted_of
from weft.pipeline.worker import Run

MAX_READING = 16  # forms that wait to be read: each takes 0.3 s at most


class FormReader:
    """Reads forms that come with texts.

    Args:
        forms: of the model whose last stage is here.
        run: reads one, beside the event loop.
    """

    def __init__(self, forms: Forms, run: Run) -> None:
        self._forms, self._run = forms, run
        self._turn = asyncio.Lock()
        self._num_waiting = 0

    async def read(self, data: bytes) -> Form | None:
        """Return what is said by `chat.grammar.FormWanted.to_json`; None: too many wait.

        Raises:
            FormRefused: no answer can be held to it.
        """
        if self._num_waiting >= MAX_READING:
            return None
        self._num_waiting += 1
        try:
            async with self._turn:
                return await self._run(lambda: self._forms.made(wanted_of(data)))
        finally:
            self._num_waiting -= 1


class Followed:
    """A form along one text in one attempt.

    Args:
        begin: the form before its first token.
        start: the place of that.
        told: tokens from there on that were there when the attempt was made.
    """

    def __init__(self, begin: Form, start: int, told: Sequence[int]) -> None:
        self.begin, self.start, self.told = begin, start, list(told)
        self._form, self._taken = begin.copy(), list[int]()

    def allowed_after(self, tokens: Sequence[int]) -> NDArray[np.bool_]:
        """Return which tokens may follow on these, from the form's begin on.

        Raises:
            GrammarFault: they are not of the form, or it cannot be told.
        """
        return self._after(tokens).allowed()

    def is_complete_after(self, tokens: Sequence[int]) -> bool:
        """Return whether nothing may follow on these.

        Raises:
            GrammarFault: they are not of the form.
        """
        return self._after(tokens).is_complete

    def _after(self, tokens: Sequence[int]) -> Form:
        num = len(self._taken)
        if self._taken != list(tokens[:num]):  # some rested on a wrong guess
            self._form, self._taken, num = self.begin.copy(), [], 0
        for token in tokens[num:]:
            self._form.take(token)
            self._taken.append(token)
        return self._form
