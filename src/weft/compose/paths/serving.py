"""Trained paths that are served together: each text goes the path that its first tokens decide.

    prompt ──first tokens──► model of the features ──z──► router ──► the engine of that path

One path computes a text, from its first token to its last; the others wait for texts of their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields

import numpy as np

from weft.compose.paths.features import features
from weft.compose.paths.levels import Path
from weft.compose.paths.routing import Router
from weft.engine.engine import Engine, Text, Totals, Wanted
from weft.model.transformer import Transformer


class Paths:
    """What an engine is, of several: `begin` chooses one.

    Args:
        engines: of each path.
        order: all paths, as the router numbers them.
        model: of the features: what all paths began as.
    """

    def __init__(
        self, engines: Mapping[Path, Engine], order: Sequence[Path], model: Transformer, router: Router
    ) -> None:
        self._engines, self._order, self._model, self._router = engines, order, model, router
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

    def path_of(self, prompt: Sequence[int]) -> Path:
        """Return the path of a text that begins so."""
        first = np.array(prompt[: self._router.record.prefix], dtype=np.int64)
        return self._order[int(self._router.best(features(self._model, [first]))[0])]

    def begin(self, wanted: Wanted, num_more: int = 0) -> Text:
        """Begin a text; arguments and errors are those of `Engine.begin`."""
        engine = next(iter(self._engines.values())) if not wanted.prompt else self._engines[self.path_of(wanted.prompt)]
        return engine.begin(wanted, num_more)

    def close(self) -> None:
        """End all texts."""
        for each in self._engines.values():
            each.close()
