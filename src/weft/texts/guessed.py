"""What the first stage's member guesses of a text: its tokens as they are told, and which it took before they were.

A guess is taken as if it had been told (`sequence.guessed`). It goes through all stages in one step with the token
before it, and the last stage draws after each. Nobody compares guesses with what is drawn: a row says what it attaches
to, so what rests on a wrong guess attaches to nothing, with who asks and here.
"""

from collections.abc import Sequence

from weft.engine.scheduling.guess import Guesses

TRIPS = 8.0  # over about so many the time of one is a mean


class Ring:
    """How long a token takes through all stages, and back to the first one's member.

    Args:
        num_stages: it goes through.
    """

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._trip_s: float | None = None

    def note(self, trip_s: float) -> None:
        self._trip_s = trip_s if self._trip_s is None else self._trip_s + (trip_s - self._trip_s) / TRIPS

    def row_share(self, row_s: float) -> float:
        """Return how long one more row takes in all stages, by how long a token takes (`num_worth`).

        Args:
            row_s: seconds of a row here, for all texts that are drawn.
        """
        return self._num_stages * row_s / self._trip_s if self._trip_s else 0.0


class Guessed:
    """Of one text."""

    def __init__(self) -> None:
        self._start = 0  # the place of the first token that is known here
        self._tokens: list[int] = []
        self._guesses = Guesses()
        self._under_way: list[int] = []
        self._num_guessed = 0
        self._sent_s: float | None = None

    @property
    def stop(self) -> int:
        """Return up to which place tokens were told."""
        return self._start + len(self._tokens)

    def told(self, start: int, tokens: Sequence[int]) -> None:
        """These are the text's tokens from a place on."""
        num_known = self.stop - start
        known = self._tokens[len(self._tokens) - num_known :][: len(tokens)]
        if not 0 <= num_known <= len(self._tokens) or known != list(tokens[:num_known]):
            self._start, self._tokens, self._guesses = start, [], Guesses()
            self._under_way, num_known = [], 0
        for token in tokens[num_known:]:
            self._tokens.append(token)
            self._came(token)

    def again(self) -> None:
        """What was sent is not under way any more."""
        self._under_way, self._sent_s = [], None

    def trip_s(self, now: float) -> float | None:
        """A token goes on whose next one will be the next that is taken; return how long that before it took."""
        before, self._sent_s = self._sent_s, now
        return None if before is None else now - before

    def next(self, most: int, row_share: float) -> list[int]:
        """Return tokens that may follow, at most so many, to be taken now; none where some are under way.

        Args:
            row_share: see `engine.scheduling.guess.num_worth`.
        """
        if self._under_way:
            return []
        found = self._guesses.guess(self._tokens, most, row_share)
        self._under_way, self._num_guessed = found, len(found)
        return list(found)

    def _came(self, token: int) -> None:
        if not self._under_way:
            return
        is_right = self._under_way[0] == token
        num_right = self._num_guessed - len(self._under_way) + is_right
        self._under_way = self._under_way[1:] if is_right else []
        if not self._under_way:
            self._guesses.note(self._num_guessed, num_right)
