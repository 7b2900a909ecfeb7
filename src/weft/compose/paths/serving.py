"""Trained paths that are served together: each text goes the path that its tokens decide.

    prompt ──first tokens──► model of the features ──z──► router ──► the engine of that path
    W tokens on: those tokens ──────────────────► z ──► router ──► the engine of that path, which reads the text so far

One path computes a text at a time; the others wait for texts of their own. Where a text is routed again (`reading`),
a path that it has been at before finds what it has read there, as long as that is kept.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace

import numpy as np

from weft.clock import Clock
from weft.compose.paths.features import features
from weft.compose.paths.levels import Path
from weft.compose.paths.reading import deciding, router_at
from weft.compose.paths.routing import Router
from weft.engine.draw import Drawn
from weft.engine.engine import Engine, Totals, close_all
from weft.engine.text import Ending, Full, Text, Wanted, check
from weft.model.transformer import Transformer


class Paths:
    """What an engine is, of several: `begin` chooses one.

    Args:
        engines: of each path.
        order: all paths, as the router numbers them.
        model: of the features: what all paths began as.
        routers: by the first tokens; and by those of the piece before, None: the same.
        every: tokens after which a text is routed again; None: never.
    """

    def __init__(
        self,
        engines: Mapping[Path, Engine],
        order: Sequence[Path],
        model: Transformer,
        routers: tuple[Router, Router | None],
        every: int | None = None,
    ) -> None:
        self._engines, self._order, self._model = engines, order, model
        self._router, self._rerouter = routers
        self._every = every
        any_engine = next(iter(engines.values()))
        self.vocab_size = any_engine.vocab_size
        self.context = min(each.context for each in engines.values())

    @property
    def totals(self) -> Totals:
        """Return what all of them have done, and hold."""
        found = Totals()
        for each in (engine.totals for engine in self._engines.values()):
            for field in fields(Totals):
                before, here = getattr(found, field.name), getattr(each, field.name)
                setattr(found, field.name, before | here if isinstance(before, dict) else before + here)
        return found

    def path_of(self, words: Sequence[int], every: int | None) -> Path:
        """Return the path that draws what follows on these tokens; `every` as of `reading.deciding`."""
        decide = deciding(len(words), self._router.record.prefix, every)
        z = features(self._model, [np.array(words[decide], dtype=np.int64)])
        router = router_at(len(words), every, self._router, self._rerouter)
        return self._order[int(router.best(z)[0])]

    def begin(self, wanted: Wanted, num_more: int = 0) -> Text:
        """Begin a text; arguments and errors are those of `Engine.begin`. One that is routed again is refused later,
        when it is read, where too many wait."""
        check(wanted, self.vocab_size, self.context)
        if self._every is None or wanted.is_mean:
            return self._engines[self.path_of(wanted.prompt, None)].begin(wanted, num_more)
        return Rerouted(wanted, self, self._every, next(iter(self._engines.values())).clock)

    def begin_on(self, path: Path, wanted: Wanted) -> Text:
        return self._engines[path].begin(wanted)

    def close(self) -> None:
        """End all texts."""
        close_all(self._engines.values())


class Rerouted(Text):
    """A text that is routed again and again: of parts, each of which a path draws.

    Who reads it has its parts begun. Where too many texts wait, one that has begun waits with them.
    """

    def __init__(self, wanted: Wanted, paths: Paths, every: int, clock: Clock) -> None:
        self._part: Text | None = None  # the one under way, or the last
        self._busy_s = 0.0
        super().__init__(wanted, lambda _text: self._stop(), _nothing, clock)
        self._paths, self._every = paths, every
        self._words = list(wanted.prompt)
        self._stopped = asyncio.Event()

    async def __anext__(self) -> Drawn:
        try:
            while self.ended is None:
                if self._part is None:
                    self._part = await self._next_part()
                drawn = None if self._part is None else await self._drawn(self._part)
                if drawn is not None:
                    return drawn
        except Exception:
            self.ended = "cancelled"
            raise
        raise StopAsyncIteration

    async def _drawn(self, part: Text) -> Drawn | None:
        """Return the next token of a part; None: it has ended, and with it the text, or another part is to begin."""
        drawn = None
        try:
            drawn = await anext(part)
        except StopAsyncIteration:
            self.ended = self._ending(part)
            self._part = part if self.ended else None
        except Full as full:  # it made way for others: a text that is under way waits, and is not broken off
            if not self._num_drawn:
                raise
            self._part = None
            await self._wait(full.retry_s)
        if self.began_s is None and part.began_s is not None:
            self.began_s, self.num_shared = part.began_s, part.num_shared
        if drawn is not None:
            self._words.append(drawn.token)
            self.came_s = part.came_s
        return drawn

    def _ending(self, part: Text) -> Ending | None:
        """Return how the text has ended, once a part has; None: it goes on."""
        has_room = self._num_left > 0 and len(self._words) < self._paths.context
        if part.ended != "length" or not has_room:
            return part.ended
        return "cancelled" if self._stopped.is_set() else None

    async def _next_part(self) -> Text | None:
        """Begin a part, by the path that the newest tokens decide; return None, and end, where nobody wants it any
        more."""
        path = await asyncio.to_thread(self._paths.path_of, self._words, self._every)
        left = self._every - len(self._words) % self._every
        wanted = replace(
            self.wanted,
            prompt=tuple(self._words),
            max_new_tokens=min(left, self._num_left),
            num_drawn=self.wanted.num_drawn + self._num_drawn,
        )
        while not self._stopped.is_set():
            try:
                return self._paths.begin_on(path, wanted)
            except Full as full:
                if not self._num_drawn:
                    raise
                await self._wait(full.retry_s)
        self.ended = "cancelled"
        return None

    async def _wait(self, wait_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._stopped.wait()

    @property
    def _num_drawn(self) -> int:
        return len(self._words) - len(self.wanted.prompt)

    @property
    def _num_left(self) -> int:
        return self.wanted.max_new_tokens - self._num_drawn

    @property
    def num_unread(self) -> int:
        return 0 if self._part is None else self._part.num_unread

    @property
    def busy_s(self) -> float:
        return self._busy_s if self._part is None else self._part.busy_s

    @busy_s.setter
    def busy_s(self, until: float) -> None:  # as any text has it at its beginning
        self._busy_s = until

    def _stop(self) -> None:
        self._stopped.set()
        if self._part is not None:
            self._part.cancel()


def _nothing(_text: Text) -> None:
    """Do nothing: parts tell their engines themselves that they are read."""
