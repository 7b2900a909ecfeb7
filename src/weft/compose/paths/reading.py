"""Reads and writes texts along paths: routed once, by their first tokens, or again every W tokens.

    tokens     0 ........ 32 ............. W ............... 2W ................ 3W
    decided by    (none)     the first 32      those of 0..W      those of W..2W

The first 32 tokens are not scored: nothing has decided yet who reads them. A token is never predicted by a path that
was chosen by itself, or by what comes after it.

What it costs: keys and values are the path's own. Where the path changes, the new one reads the whole text so far, of
which all but the newest token has been read before; where what each path has read is kept, what came since it was last
at it. `cost` tells how many tokens that is. Beside that, the model of the features reads what decides.

DiPaCo: Douillard et al., 2403.10616, section 2; its table 3 has both ways.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

from weft.compose.paths.features import Text, features, token_losses
from weft.compose.paths.levels import Levels, Path
from weft.compose.paths.routing import Features, Router
from weft.compose.space import numbers_digest
from weft.errors import ConfigError
from weft.ids import short
from weft.inference.sample import Sampling, generate
from weft.model.flat import assemble
from weft.model.transformer import Transformer


class Piece(NamedTuple):
    """Tokens `start` to `stop` of a text are read along one path, which tokens `decided` decide."""

    start: int
    stop: int
    decided: slice


class Cost(NamedTuple):
    """Tokens that paths read of texts; `num_again`: of those, what is read only because the path changes."""

    num_read: int
    num_again: int

    @classmethod
    def of(cls, costs: Sequence["Cost"]) -> "Cost":
        """Return the cost of several texts together."""
        return cls(sum(each.num_read for each in costs), sum(each.num_again for each in costs))


@dataclass(frozen=True, eq=False)
class Found:
    """What reading comes to.

    Args:
        losses: of each text, nats, summed over what is scored.
        num_scored: tokens of each text.
        paths: of each text and piece, by number.
        dropping: what it costs a reader that keeps what one path has read; keeping: what all have.
        num_deciding: tokens that the model of the features reads.
    """

    losses: Float64[np.ndarray, " texts"]
    num_scored: int
    paths: Int64[np.ndarray, "texts pieces"]
    dropping: Cost
    keeping: Cost
    num_deciding: int

    @property
    def mean(self) -> float:
        """Nats per token."""
        return float(self.losses.mean()) / self.num_scored


def deciding(position: int, prefix: int, every: int | None) -> slice:
    """Return the tokens of a text that decide which path predicts the one at `position`; all come before it.

    Args:
        prefix: tokens that decide first; of a text that has fewer, all.
        every: tokens after which a text is routed again; None: never.
    """
    if every is None or position < every:
        return slice(0, min(prefix, position))
    start = position // every * every
    return slice(start - every, start)


def router_at(position: int, every: int | None, router: Router, rerouter: Router | None) -> Router:
    """Return the router that is given what `deciding` says.

    Args:
        rerouter: by the tokens of the piece before; None: there is none but the first.
    """
    return router if rerouter is None or every is None or position < every else rerouter


def pieces(num_tokens: int, prefix: int, every: int | None) -> list[Piece]:
    """Return the pieces of a text; the other arguments are those of `deciding`."""
    length = every or num_tokens
    stops = [min(start + length, num_tokens) for start in range(0, num_tokens, length)]
    return [Piece(number * length, stop, deciding(stop - 1, prefix, every)) for number, stop in enumerate(stops)]


def cost(paths: Sequence[int], text: Sequence[Piece], *, is_kept: bool) -> Cost:
    """Return what a text's paths read. The last token is not read: nothing follows it.

    Args:
        paths: of each piece.
        is_kept: whether keys and values of a path are kept when another takes over.
    """
    has_read, num_read = dict[int, int](), 0
    for path, piece in zip(paths, text, strict=True):
        if not is_kept and path not in has_read:
            has_read.clear()
        num_read += piece.stop - 1 - has_read.get(path, 0)
        has_read[path] = piece.stop - 1
    return Cost(num_read, num_read - (text[-1].stop - 1))


@dataclass(frozen=True, eq=False)
class Reader:
    """
    Args:
        model: returns the model of a path.
        begun: the vector of the model that all began as: z comes from it.
        router: by the first tokens.
        every: tokens after which a text is routed again; None: never.
        rerouter: by the tokens of the piece before; None: the same.

    Raises:
        ConfigError: a router is for other levels or other features, or pieces are too short.
    """

    levels: Levels
    model: Callable[[Path], Transformer]
    begun: Float32[Tensor, " num"]
    router: Router
    every: int | None = None
    rerouter: Router | None = None

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 2:
            raise ConfigError(f"every: a text is routed again after {self.every} tokens. Allowed: 2 or more.")
        for router in (self.router, self.rerouter):
            if router is not None and router.record.levels != self.levels.config:
                raise ConfigError(
                    f"the router is for levels {router.record.levels.levels} with ends "
                    f'"{router.record.levels.ends}", the paths are of {self.levels.config.levels} with ends '
                    f'"{self.levels.config.ends}". Take the router that was made with them.'
                )
            if router is not None and router.record.features != (found := numbers_digest(self.begun)):
                raise ConfigError(
                    f"the router reads features of the model {short(router.record.features)}, and these are of "
                    f"{short(found)}. Take the model that all paths began as."
                )

    def read(self, windows: Int64[np.ndarray, "texts words"]) -> Found:
        """Return the losses of texts of one length.

        Raises:
            ConfigError: nothing of a text is left to score.
        """
        num_texts, num_tokens = windows.shape
        prefix = self.router.record.prefix
        if num_tokens <= prefix:
            raise ConfigError(
                f"texts of {num_tokens} tokens: the first {prefix} decide the path, and nothing is left to score. "
                "Give longer ones."
            )
        text = pieces(num_tokens, prefix, self.every)
        chosen = np.stack([self._best(list(windows[:, each.decided]), each.start) for each in text], axis=1)
        losses = np.zeros(num_texts)
        for number in np.unique(chosen):
            rows = np.flatnonzero((chosen == number).any(1))
            found = token_losses(self.model(self.levels.paths[number]), windows[rows])
            for place, each in enumerate(text):
                mine = chosen[rows, place] == number
                start = max(each.start, prefix)  # the loss of token t is the one before: the first has none
                losses[rows[mine]] += found[mine, start - 1 : each.stop - 1].sum(1)
        dropping, keeping = (
            Cost.of([cost(each, text, is_kept=is_kept) for each in chosen.tolist()]) for is_kept in (False, True)
        )
        num_deciding = num_texts * sum(each.decided.stop - each.decided.start for each in text)
        return Found(losses, num_tokens - prefix, chosen, dropping, keeping, num_deciding)

    def write(
        self, prompt: Sequence[int], sampling: Sampling, generator: np.random.Generator
    ) -> Iterator[tuple[int, Path]]:
        """Yield the tokens that follow `prompt`, each with the path that drew it.

        A text of less than `every` tokens is routed by the first ones that the prompt has.

        Raises:
            ConfigError, NotFinite: as `weft.inference.sample.generate`.
        """
        words, path, drawn = list(prompt), None, iter(list[int]())
        for num_drawn in range(sampling.max_new_tokens):
            here = len(words)
            if num_drawn == 0 or (self.every is not None and here % self.every == 0):
                decided = words[deciding(here, self.router.record.prefix, self.every)]
                chosen = self.levels.paths[int(self._best([np.array(decided)], here)[0])]
                if chosen != path:
                    left = msgspec.structs.replace(sampling, max_new_tokens=sampling.max_new_tokens - num_drawn)
                    path, drawn = chosen, generate(self.model(chosen), words, left, generator)
            token = next(drawn, None)
            if token is None:
                return
            assert path is not None
            words.append(token)
            yield token, path

    def _best(self, texts: Sequence[Text], position: int) -> Int64[np.ndarray, " texts"]:
        """Return the numbers of the paths that the tokens before `position` decide for."""
        router = router_at(position, self.every, self.router, self.rerouter)
        return router.best(features(self._begun, texts))

    @cached_property
    def _begun(self) -> Transformer:
        return assemble(self.levels.model, self.begun)


def pairs(
    begun: Transformer, losses: Iterable[Sequence[Float64[np.ndarray, " _"]]], texts: Sequence[Text], every: int
) -> tuple[Features, Float64[np.ndarray, "documents paths"]]:
    """Return what a router for texts that are routed again learns from: features of a piece, losses of the next.

    Args:
        losses: of each text's tokens but the first, under each path in their order (`document_losses`).
        texts: documents that no path was trained on.

    Raises:
        ConfigError: no text has two pieces.
    """
    places = [  # of next pieces, whole ones
        (number, start) for number, text in enumerate(texts) for start in range(every, len(text) - every + 1, every)
    ]
    if not places:
        longest = max(map(len, texts), default=0)
        raise ConfigError(f"every: texts of {longest} tokens do not have two pieces of {every}.")
    z = features(begun, [texts[number][start - every : start] for number, start in places])
    means = [[each[number][start - 1 : start - 1 + every].mean() for number, start in places] for each in losses]
    return z, np.array(means).T
