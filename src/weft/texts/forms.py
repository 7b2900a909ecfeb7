"""Forms that a last stage's member holds answers to: it reads what who asks has sent, and follows it as it draws.

A form comes from a stranger. It is read beside the event loop, one at a time, within the bounds of `chat.grammar`, and
few wait for that, of one who asks fewer still. Who gives up waiting frees no place: what is read is read to its end.
What may follow depends on the tokens before, whoever drew them: after a mend those that were told at
its opening, after a wrong guess those that are drawn in its place.
"""

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from weft.chat.grammar import Form, Forms, wanted_of
from weft.ids import PeerId
from weft.pipeline.worker import Run

MAX_READING, MAX_OF_ONE = 16, 4  # forms that wait to be read, and of one who asks


class FormReader:
    """Reads forms that come with texts.

    Args:
        forms: of the model whose last stage is here.
        run: reads one, beside the event loop.
    """

    def __init__(self, forms: Forms, run: Run) -> None:
        self._forms, self._run = forms, run
        self._turn = asyncio.Lock()
        self._waiting: dict[asyncio.Task[Form], PeerId] = {}  # whose each is

    async def read(self, asker: PeerId, data: bytes) -> Form | None:
        """Return what is said by `chat.grammar.FormWanted.to_json`; None: too many wait, or too many of this asker.

        Raises:
            FormRefused: no answer can be held to it.
        """
        num_own = sum(each == asker for each in self._waiting.values())
        if len(self._waiting) >= MAX_READING or num_own >= MAX_OF_ONE:
            return None
        task = asyncio.create_task(self._made(data))
        self._waiting[task] = asker
        task.add_done_callback(self._is_read)
        return await asyncio.shield(task)

    async def _made(self, data: bytes) -> Form:
        async with self._turn:
            return await self._run(lambda: self._forms.made(wanted_of(data)))

    def _is_read(self, task: asyncio.Task[Form]) -> None:
        del self._waiting[task]
        if not task.cancelled():
            task.exception()  # nobody may be there any more to hear of it


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
        is_kept = (mine == given for mine, given in zip(self._taken, tokens, strict=False))
        num = next((at for at, is_same in enumerate(is_kept) if not is_same), min(len(self._taken), len(tokens)))
        if num < len(self._taken):  # some rested on a wrong guess
            self._form.go_back(len(self._taken) - num)
            del self._taken[num:]
        for token in tokens[num:]:
            self._form.take(token)
            self._taken.append(token)
        return self._form
