"""An n-gram model over tokens: the yardstick a trained model is held against.

Fitted on the same training stream and scored on the same held-out stream, it says how far counting goes. It is
no straw man: interpolated, modified Kneser-Ney smoothing (Chen and Goodman 1998, "An Empirical Study of Smoothing
Techniques for Language Modeling", section 3; discounts by their equation 26), the strongest n-gram smoothing known:

    P_k(w | c) = max(count(c w) - D(count(c w)), 0) / count(c .) + gamma(c) P_{k-1}(w | c without its first token)

with counts of occurrences at the highest order, counts of distinct left neighbours below it, and 1 / vocabulary at
the bottom. A gram is one integer in base `vocab_size`, so counting is sorting.

On byte tokens a context of k tokens is k bytes.
"""

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]
Floats = NDArray[np.float64]

# Where a level has no grams of some count (small vocabularies meet every gram often), its estimate is undefined.
_FALLBACK_DISCOUNT = 0.5
_LEAST_DISCOUNT = 0.01  # keeps every token possible


class _Level:
    """Grams of one length: what each adds to its probability, and what its context leaves to shorter ones."""

    def __init__(self, grams: Keys, counts: NDArray[np.int64], vocab_size: int) -> None:
        """
        Args:
            grams: distinct, ascending; the last token is the one predicted.
            counts: of each gram, positive.
        """
        contexts = grams // vocab_size
        starts = np.flatnonzero(np.r_[True, contexts[1:] != contexts[:-1]])
        totals = np.add.reduceat(counts, starts)
        taken = _discounts(counts)[np.minimum(counts, 3) - 1]
        self.grams = grams
        self.contexts = contexts[starts]
        self.shares = (counts - taken) / np.repeat(totals, np.diff(np.r_[starts, len(grams)]))
        self.backoffs = np.add.reduceat(taken, starts) / totals

    def refine(self, grams: Keys, vocab_size: int, shorter: Floats) -> Floats:
        """Return P_k of each gram's last token, given P_{k-1}; an unseen context changes nothing."""
        backoff = _look_up(self.contexts, self.backoffs, grams // vocab_size, absent=1.0)
        refined: Floats = _look_up(self.grams, self.shares, grams, absent=0.0) + backoff * shorter
        return refined


class NgramModel:
    """Predicts a token from the `order` tokens before it."""

    def __init__(self, levels: list[_Level], vocab_size: int) -> None:
        self._levels = levels  # by length of context, from none to `order`
        self._vocab_size = vocab_size

    @classmethod
    def fit(cls, tokens: NDArray[np.integer], order: int, vocab_size: int) -> "NgramModel":
        """Count the grams of a stream.

        Args:
            tokens: the training stream, ids below `vocab_size`.
            order: tokens of context, so that grams have one more.

        Raises:
            ValueError: `tokens` is not longer than `order`, or a gram does not fit into 63 bits.
        """
        if order < 0 or vocab_size ** (order + 1) >= 1 << 63:
            raise ValueError(f"a context of {order} tokens out of {vocab_size} does not fit into one 64-bit integer")
        if len(tokens) <= order:
            raise ValueError(f"{len(tokens)} tokens hold no gram of {order + 1}")
        grams, counts = np.unique(_grams(tokens, order, vocab_size), return_counts=True)
        levels = [_Level(grams, counts, vocab_size)]
        for length in range(order, 0, -1):
            # A gram counts once for each distinct token that was seen on its left.
            grams, counts = np.unique(grams % vocab_size**length, return_counts=True)
            levels.insert(0, _Level(grams, counts, vocab_size))
        return cls(levels, vocab_size)

    def probabilities(self, tokens: NDArray[np.integer]) -> Floats:
        """Return the probability of each token but the first, given up to `order` tokens before it."""
        found = np.full(len(tokens) - 1, 1.0 / self._vocab_size)
        for length, level in enumerate(self._levels):
            skipped = max(0, length - 1)  # the first targets have fewer tokens before them
            grams = _grams(tokens[1:] if length == 0 else tokens, length, self._vocab_size)
            found[skipped:] = level.refine(grams, self._vocab_size, found[skipped:])
        return found

    def loss(self, tokens: NDArray[np.integer]) -> float:
        """Return the mean loss over `tokens`, in nats per token; the first token is not predicted.

        Raises:
            ValueError: fewer than two tokens.
        """
        if len(tokens) < 2:
            raise ValueError("a loss needs at least two tokens")
        return float(-np.log(self.probabilities(tokens)).mean())


def _grams(tokens: NDArray[np.integer], length: int, vocab_size: int) -> Keys:
    """Return every run of `length` + 1 tokens as one integer, the first token weighing most."""
    num_grams = max(0, len(tokens) - length)
    grams = np.zeros(num_grams, dtype=np.int64)
    for offset in range(length + 1):
        grams *= vocab_size
        grams += tokens[offset : offset + num_grams]
    return grams


def _discounts(counts: NDArray[np.int64]) -> Floats:
    """Return D_1, D_2 and D_3+ of Chen and Goodman's equation 26, from how many grams have counts 1 to 4."""
    n1, n2, n3, n4 = (int((counts == number).sum()) for number in (1, 2, 3, 4))
    if 0 in (n1, n2, n3, n4):
        return np.full(3, _FALLBACK_DISCOUNT)
    # Y = n_1 / (n_1 + 2 n_2);  D_1 = 1 - 2 Y n_2 / n_1;  D_2 = 2 - 3 Y n_3 / n_2;  D_3+ = 3 - 4 Y n_4 / n_3
    y = n1 / (n1 + 2 * n2)
    estimate = np.array([1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
    clipped: Floats = np.clip(estimate, _LEAST_DISCOUNT, np.array([1.0, 2.0, 3.0]))
    return clipped


def _look_up(keys: Keys, values: Floats, wanted: Keys, *, absent: float) -> Floats:
    """Return the value of each wanted key; `keys` ascend."""
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], absent)
