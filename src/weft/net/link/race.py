"""Several addresses of one peer, dialled so that one which swallows packets does not hold up the next.

The best goes first. Each further one begins when one before it has failed, or after `HEAD_START_S`, with those before
it still under way (as RFC 8305 does with addresses of one name). Streams are handed out as they open; what is still
under way when the race is left is given up.

It does not know what an address means, nor which stream is good enough.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from weft.errors import DialError
from weft.net.transport.base import Stream

HEAD_START_S = 1.0  # five round trips of 200 ms: what the handshake over TLS takes between continents


class _Dial(NamedTuple):
    address: str
    began: float  # the loop's time


class Race:
    """One dial over several addresses.

    Args:
        addresses: best first.
        dial: opens a stream to one; raises `DialError`.
        stop: ends the race when it is done; None: nothing does.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        dial: Callable[[str], Awaitable[Stream]],
        stop: "asyncio.Future[Any] | None" = None,
    ) -> None:
        self._waiting = deque(addresses)
        self._dial = dial
        self._stop = stop
        self._running: dict[asyncio.Task[Stream], _Dial] = {}

    async def __aenter__(self) -> "Race":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        losers = list(self._running)
        for loser in losers:
            loser.cancel()
        for outcome in await asyncio.gather(*losers, return_exceptions=True):
            if not isinstance(outcome, BaseException):  # it opened too late
                await outcome.close()

    async def next(self) -> tuple[str, Stream | DialError] | None:
        """Return the next address that opened or failed, and how; None when none is left or the race was stopped."""
        while self._waiting or self._running:
            if self._stop is not None and self._stop.done():
                return None
            if self._waiting:
                address = self._waiting.popleft()
                began = asyncio.get_running_loop().time()
                self._running[asyncio.ensure_future(self._dial(address))] = _Dial(address, began)
            awaited = [*self._running, *([] if self._stop is None else [self._stop])]
            head_start_s = HEAD_START_S if self._waiting else None
            await asyncio.wait(awaited, timeout=head_start_s, return_when=asyncio.FIRST_COMPLETED)
            ended = next((task for task in self._running if task.done()), None)
            if ended is not None:
                return self._running.pop(ended).address, _outcome(ended)
        return None

    def unanswered(self) -> list[tuple[str, DialError]]:
        """Return the addresses that had their turn and have neither opened nor failed: they may swallow packets."""
        now = asyncio.get_running_loop().time()
        waited = [(dial.address, now - dial.began) for dial in self._running.values()]
        return [(address, DialError(f"no answer in {s:.1f} s")) for address, s in waited if s >= HEAD_START_S]


def _outcome(task: "asyncio.Task[Stream]") -> Stream | DialError:
    try:
        return task.result()
    except DialError as error:
        return error
