"""Entries on their way to pages: folded once, and told to all that look.

    sources ──take──► Feed ──whole, since──► any number of pages

A page asks for what came after its cursor, and waits where there is nothing. A slow page gets larger pieces, and holds
nobody up: nothing is queued for it.
"""

import asyncio
from typing import Any

from weft.dashboard.history import History
from weft.dashboard.view import About
from weft.events import Entry
from weft.observe.redact import public_entry

TOGETHER_S = 0.25  # what comes within so long is one piece


class Feed:
    """Of one run.

    Args:
        is_public: leave out what strangers should not see.
    """

    def __init__(self, run: About | None = None, *, is_public: bool = False) -> None:
        self.history = History(run)
        self.is_public = is_public
        self.is_live = True  # more may come
        self._news = asyncio.Event()

    def take(self, entry: Entry) -> None:
        """Take an entry, on the event loop's thread."""
        told = public_entry(entry) if self.is_public else entry
        if told is not None:
            self.history.take(told)
            self._wake()

    def finish(self) -> None:
        """Nothing more will come."""
        self.is_live = False
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def whole(self) -> dict[str, Any]:
        return self._told(self.history.whole())

    def since(self, cursor: int) -> dict[str, Any]:
        return self._told(self.history.since(cursor))

    def _told(self, tree: dict[str, Any]) -> dict[str, Any]:
        return tree | {"is_live": self.is_live, "is_public": self.is_public}

    async def wait(self, cursor: int) -> bool:
        """Wait until there is something after `cursor`, and a little for what comes with it; False: nothing will."""
        while self.history.cursor <= cursor:
            if not self.is_live:
                return False
            await self._news.wait()
        if self.is_live:
            await asyncio.sleep(TOGETHER_S)
        return True
