"""Trained paths that are served together: each text goes the path that its first tokens decide.

    prompt ──first tokens──► model of the features ──z──► router ──► the engine of that path
    W tokens on: those tokens ──────────────────► z ──► router ──► the engine of that path, which reads the text so far

One path computes a text at a time; the others wait for texts of their own. Where a text is routed again (`reading`),
a path that it has been at before finds what it has read there, as long as that is kept.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import numpy as np

from weft.compose.paths.features import features
from weft.compose.paths.levels import Path
from weft.compose.paths.reading import deciding
from weft.compose.paths.routing import Router
from weft.engine.draw import Drawn
from weft.engine.engine import Engine, Totals
from weft.engine.text import Full, Text, Wanted
from weft.model.transformer import Transformer


class Paths:
    """What an engine is, of several: `begin` chooses one.

    Args:
        engines: of each path.
        order: all paths, as the router numbers them.
        model: of the features: what all paths began as.
        every: tokens after which a text is routed again; None: never.
    """

    def __init__(
        self,
        engines: Mapping[Path, Engine],
        order: Sequence[Path],
        model: Transformer,
        router: Router,
        every: int | None = None,
    ) -> None:
        self._engines, self._order, self._model, self._router = engines, order, model, router
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

    def path_of(self, words: Sequence[int]) -> Path:
        """Return the path that draws what follows on these tokens."""
        decide = deciding(len(words), self._router.record.prefix, self._every)
        z = features(self._model, [np.array(words[decide], dtype=np.int64)])
        return self._order[int(self._router.best(z)[0])]

    def begin(self, wanted: Wanted, num_more: int = 0) -> Text:
        """Begin a text; arguments and errors are those of `Engine.begin`."""
        if not wanted.prompt:  # refused, whoever is asked
            return next(iter(self._engines.values())).begin(wanted, num_more)
        path = self.path_of(wanted.prompt)
        if self._every is None or wanted.is_mean:
            return self._engines[path].begin(wanted, num_more)
        return Rerouted(wanted, self, self._engines[path].begin(self._until_routed(wanted), num_more))

    async def go_on(self, wanted: Wanted) -> Text:
        """Begin the rest of a text that is routed again now; errors are those of `Engine.begin`."""
        path = await asyncio.to_thread(self.path_of, wanted.prompt)
        return self._engines[path].begin(self._until_routed(wanted))

    def _until_routed(self, wanted: Wanted) -> Wanted:
        assert self._every is not None
        left = self._every - len(wanted.prompt) % self._every
        return replace(wanted, max_new_tokens=min(left, wanted.max_new_tokens))

    def close(self) -> None:
        """End all texts."""
        for each in self._engines.values():
            each.close()


class Rerouted(Text):
    """A text of several paths, one after the other.

    Args:
        first: its beginning.
    """

    def __init__(self, wanted: Wanted, paths: Paths, first: Text) -> None:
        self._part, self._is_cancelled, self._busy_s = first, False, 0.0
        super().__init__(wanted, lambda _text: self._end(), _nothing, first.clock)
        self._paths = paths
        self._words = list(wanted.prompt)

    async def __anext__(self) -> Drawn:
        while self.ended is None:
            try:
                drawn = await anext(self._part)
            except StopAsyncIteration:
                if not self._is_routed_again():
                    self.ended = self._part.ended
                    break
                await self._go_on_elsewhere()
            except Exception:
                self.ended = "cancelled"
                raise
            else:
                self._words.append(drawn.token)
                self.came_s = self._part.came_s
                if self.began_s is None:
                    self.began_s, self.num_shared = self._part.began_s, self._part.num_shared
                return drawn
        raise StopAsyncIteration

    @property
    def num_unread(self) -> int:
        return self._part.num_unread

    @property
    def busy_s(self) -> float:
        return max(self._busy_s, self._part.busy_s)

    @busy_s.setter
    def busy_s(self, until: float) -> None:
        self._busy_s = until

    def _is_routed_again(self) -> bool:
        num_drawn = len(self._words) - len(self.wanted.prompt)
        has_room = num_drawn < self.wanted.max_new_tokens and len(self._words) < self._paths.context
        return self._part.ended == "length" and has_room and not self._is_cancelled

    async def _go_on_elsewhere(self) -> None:
        num_drawn = len(self._words) - len(self.wanted.prompt)
        left = self.wanted.max_new_tokens - num_drawn
        rest = replace(self.wanted, prompt=tuple(self._words), max_new_tokens=left, num_drawn=num_drawn)
        while True:
            try:
                self._part = await self._paths.go_on(rest)
                break
            except Full as full:  # an answer that is under way waits, and is not broken off
                await asyncio.sleep(full.retry_s)
        if self._is_cancelled:
            self._part.cancel()

    def _end(self) -> None:
        self._is_cancelled = True
        self._part.cancel()


def _nothing(_text: Text) -> None:
    """Do nothing: parts tell their engines themselves that they are read."""
