"""A text that is asked of an engine, and what comes of it, token by token.

Who draws it and who reads it are on threads of their own: a queue between them holds what is drawn and not yet read.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePath
from traceback import extract_tb
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.clock import Clock
from weft.engine.draw import Drawing, Drawn
from weft.errors import ConfigError, WeftError

Ending = Literal["stop", "length", "cancelled"]
Told = Drawn | Ending | Exception  # to who reads a text
MAX_UNREAD, UNREAD_PART = 64, 8  # tokens of a text that wait for its reader; or the eighth part of a long one


class Full(WeftError):
    """More texts wait than this machine takes. `retry_s`: when to ask again, in seconds."""

    def __init__(self, retry_s: float) -> None:
        super().__init__(f"Too many texts wait already. Ask again in {retry_s:.0f} s.")
        self.retry_s = retry_s


class Unread(WeftError):
    """Nobody reads a text, and many wait to be read."""

    def __init__(self) -> None:
        super().__init__("The answer ends here: it was read too slowly, and too many others wait to be read, too.")


class EngineBroken(WeftError):
    """A fault of weft's own has ended the engine. Its words may hold what was asked, so its kind and place are told."""

    def __init__(self, fault: Exception) -> None:
        super().__init__(f"The engine has ended after a fault ({_place_of(fault)}). Start the server again.")


class TextBroken(WeftError):
    """A fault of weft's own has ended a text. Its words may hold what was asked, so its kind and place are told."""

    def __init__(self, fault: Exception) -> None:
        super().__init__(f"The answer ends here, by a fault of the server's own ({_place_of(fault)}).")


def _place_of(fault: Exception) -> str:
    last = extract_tb(fault.__traceback__)[-1]
    return f"{type(fault).__name__} at {PurePath(last.filename).name}:{last.lineno}"


class Constraint(Protocol):
    """What a grammar allows next. It is called from the engine's thread."""

    def allowed(self) -> NDArray[np.bool_]:
        """Return which tokens may follow; none: the text is complete."""
        ...

    def take(self, token: int) -> None:
        """A token follows."""
        ...


@dataclass(frozen=True)
class Wanted:
    """A text that is asked for.

    Args:
        key: who asks; keys share the device alike.
        prompt: at least one token.
        max_new_tokens: at most so many are drawn.
        stop_ids: tokens that end the text, and are not in it.
        salt: who may share pages with it.
        room: priority, as a share of the queue: where it is that full, whoever has most in it makes way, or is refused.
        is_mean: the mean of the prompt's last hidden states is wanted, `Text.mean`, and nothing is drawn.
        num_drawn: so many of the prompt's last tokens were drawn for this text before; penalties count them.
    """

    key: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    drawing: Drawing = field(default_factory=Drawing)
    stop_ids: Collection[int] = ()
    salt: bytes = b""
    constraint: Constraint | None = None
    room: float = 1.0
    is_mean: bool = False
    num_drawn: int = 0


class Text:
    """A text under way; an async iterator of what is drawn.

    Args:
        cancel: called where nobody wants it any more.
        go_on: called once so much is read that more may be drawn, after `is_behind` said that no more should be.
        clock: of whoever computes it; its seconds are those of `began_s`, `came_s` and `busy_s`.
    """

    def __init__(
        self, wanted: Wanted, cancel: "Callable[[Text], None]", go_on: "Callable[[Text], None]", clock: Clock
    ) -> None:
        self.wanted = wanted
        self.ended: Ending | None = None
        self.num_shared = 0  # tokens of the prompt that had been read for another text
        self.mean: NDArray[np.float32] | None = None  # once it has ended, where it is wanted
        self.began_s: float | None = None  # when its first piece was computed
        self.came_s = 0.0  # when the token was told that its reader took last
        self.busy_s = 0.0  # until when it is known to be under way, at least
        self._cancel, self._go_on, self.clock = cancel, go_on, clock
        self._loop = asyncio.get_running_loop()
        self._told: asyncio.Queue[tuple[Told, float]] = asyncio.Queue()
        self._num_told = self._num_taken = 0  # tokens, each counted on one thread alone
        self._is_behind = False

    def __aiter__(self) -> AsyncIterator[Drawn]:
        return self

    async def __anext__(self) -> Drawn:
        if self.ended is not None:
            raise StopAsyncIteration
        told, at_s = await self._told.get()
        if isinstance(told, Drawn):
            self._num_taken += 1
            self.came_s = at_s
            if self._is_behind and self._is_half_read():
                self._is_behind = False
                self._go_on(self)
            return told
        if isinstance(told, Exception):
            self.ended = "cancelled"
            raise told
        self.ended = told
        raise StopAsyncIteration

    def cancel(self) -> None:
        """Draw no more of it; a step under way ends. Its pages are free soon."""
        self._cancel(self)

    @property
    def num_unread(self) -> int:
        """Return how many tokens were drawn that nobody has taken."""
        return self._num_told - self._num_taken

    def is_behind(self) -> bool:
        """Return whether so much waits for its reader that no more should be drawn; from the thread that tells."""
        if self.num_unread < self._most_unread:
            return False
        self._is_behind = True  # before it is counted again: its reader may take some at this very moment
        if self._is_half_read():
            self._is_behind = False
        return self._is_behind

    def _is_half_read(self) -> bool:
        return self.num_unread <= self._most_unread // 2

    @property
    def _most_unread(self) -> int:
        return max(MAX_UNREAD, (len(self.wanted.prompt) + self._num_told) // UNREAD_PART)

    def tell(self, told: Told) -> None:
        """Let its reader have a token, or its end; from any thread, but always the same."""
        self.tell_all([(self, told)])

    @staticmethod
    def tell_all(told: "Iterable[tuple[Text, Told]]") -> None:
        """Let readers have what is theirs, in this order; as `tell`.

        A loop is woken once for all of it: each time, other threads get Python's lock, and keep it for a while.
        """
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Text, Told, float]]] = {}
        for text, each in told:
            text._num_told += isinstance(each, Drawn)
            by_loop.setdefault(text._loop, []).append((text, each, text.clock.now()))
        for loop, some in by_loop.items():
            with suppress(RuntimeError):  # the loop has ended: nobody reads any more
                loop.call_soon_threadsafe(Text._put, some)

    @staticmethod
    def _put(told: "Iterable[tuple[Text, Told, float]]") -> None:
        for text, each, at_s in told:
            text._told.put_nowait((each, at_s))


def check(wanted: Wanted, vocab_size: int, context: int) -> None:
    """
    Raises:
        ConfigError: an empty prompt, a token that the model does not have, or more than its context.
    """
    if not wanted.prompt:
        raise ConfigError("the prompt is empty. Give at least one token.")
    if (wrong := next((each for each in wanted.prompt if not 0 <= each < vocab_size), None)) is not None:
        raise ConfigError(f"token {wrong} is outside the model's vocabulary of {vocab_size}.")
    if len(wanted.prompt) >= context:
        said = f"This model's maximum context length is {context} tokens. The prompt has {len(wanted.prompt)}."
        raise ConfigError(said)
