"""Tokens that may follow, guessed without a model: those that followed the same few tokens before (prompt look-up).

    guess     what came after the last place where the text's last `GRAM` tokens stood; a model can guess, too (`draft`)
    step      computes the text's last token and the guesses in one go: their rows read the weights once
    verified  a token is drawn at each of these places, as ever; guesses are kept as long as they are what is drawn

What is drawn depends on the text, the seed and the position alone (`draw`), so a text is the same with guesses and
without, up to rounding of logits. Code, tables and what quotes its prompt are guessed well, other texts hardly: so how
many tokens are guessed follows from how many were right of late.

Speculative decoding: Leviathan et al., 2211.17192. Look-up in place of a draft model: Saxena, "Prompt lookup decoding",
2023. Verifying by equal noise: 2405.19107.
"""

from collections.abc import Sequence

GRAM = 3  # tokens
MAX_GUESSED = 8  # tokens a step, of one text
PRIOR, PRIOR_WEIGHT = 0.6, 4.0  # the share that is right, and how many guesses that is worth
MEMORY = 0.9  # of what was right, from one step with guesses to the next
TRY_EVERY = 64  # steps in which a guess would not pay, until one token is guessed all the same


class Worth:
    """How many tokens of a text to guess, by how many were guessed right of late."""

    def __init__(self) -> None:
        self._num_right = PRIOR * PRIOR_WEIGHT
        self._num_tried = PRIOR_WEIGHT
        self._num_not_tried = 0

    @property
    def rate(self) -> float:
        """Return which share of tokens is guessed right where those before them were."""
        return self._num_right / self._num_tried

    def num(self, most: int, share: float) -> int:
        """Return how many to guess, at most so many; 0 where that does not pay, but for a trial from time to time.

        Args:
            share: see `num_worth`.
        """
        if most <= 0:
            return 0
        num = num_worth(self.rate, share)
        if num == 0:
            self._num_not_tried += 1
            if self._num_not_tried < TRY_EVERY:
                return 0
            num = 1
        self._num_not_tried = 0
        return min(num, most)

    def note(self, num_guessed: int, num_right: int) -> None:
        """Of the guesses of a step the first so many were right."""
        if num_guessed:
            self._num_right = MEMORY * self._num_right + num_right
            self._num_tried = MEMORY * self._num_tried + num_right + (num_right < num_guessed)


class Guesses(Worth):
    """By look-up, of one text, whose tokens only grow."""

    def __init__(self) -> None:
        super().__init__()
        self._after: dict[tuple[int, ...], int] = {}  # where what followed these tokens begins, the last time
        self._num_seen = 0

    def guess(self, tokens: Sequence[int], most: int, row_share: float) -> list[int]:
        """Return at most so many tokens that may follow; none where that does not pay, or none is known.

        Args:
            row_share: see `num_worth`.
        """
        start = self._last(tokens)
        if start is None:
            return []
        found: list[int] = []
        for at in range(start, start + self.num(most, row_share)):  # beyond the end the guess repeats itself
            found.append(tokens[at] if at < len(tokens) else found[at - len(tokens)])
        return found

    def _last(self, tokens: Sequence[int]) -> int | None:
        """Take up which tokens have come, and return where those begin that followed the last ones before."""
        if len(tokens) < GRAM:
            return None
        for end in range(max(GRAM, self._num_seen), len(tokens)):
            self._after[tuple(tokens[end - GRAM : end])] = end
        self._num_seen = len(tokens)
        return self._after.get(tuple(tokens[-GRAM:]))


def num_worth(rate: float, share: float) -> int:
    """Return how many guesses make most tokens a second, at most `MAX_GUESSED`.

    k of them give (1 + rate + .. + rate^k) tokens in (1 + k share) of the time (2211.17192, theorem 3.8).

    Args:
        rate: see `Worth.rate`.
        share: the seconds of one more row (`Pace.row_share`), and where it costs something those of its guess, by the
            seconds that a token takes without guesses.
    """
    best, most, tokens = 0, 1.0, 1.0
    for num in range(1, MAX_GUESSED + 1):
        tokens += rate**num
        if (speed := tokens / (1 + num * share)) > most:
            best, most = num, speed
    return best
