"""The next token of a text, drawn so that the text does not depend on who computed it, or along which path.

    scaled = (logits, less penalties, with biases) / temperature
    token  = argmax over the kept of scaled + g,   g = -log(-log(u))

With Gumbel noise the argmax is a draw from the softmax of the kept (Gumbel-max trick; for text arXiv:2405.19107). u is
no generator's state: it is BLAKE3, keyed by the text's seed, of the token's position. So a text that another machine
goes on with, or whose positions are drawn several at once, comes out the same (to rounding of the logits).

Kept are, one after the other: what a grammar allows, `top_k` likeliest, `min_p` of the likeliest's probability, the
likeliest that reach the mass `top_p`. Of equal sums the lowest token wins.

Both logarithms of all tokens would be most of the work, so they are taken of those alone that can win: a token that,
with the largest noise of all, still scores less than the likeliest does with its own, cannot.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from weft.errors import NotFinite

FloatArray = NDArray[np.float64]

SEED_NBYTES = 32
LEAST_REPETITION = 0.01  # by less, a logit may come out infinite, and no token is drawn
MAX_BIASED = 1024  # tokens: each is added to at every step
_SLACK = 1e-6  # of scores, which are rounded by far less
_SOME = (1024, 8192)  # likeliest tokens, of which the mass is nearly always enough: sorting all takes far longer


@dataclass(frozen=True)
class Drawing:
    """How a text's tokens are drawn.

    Args:
        temperature: 0 takes the likeliest.
        top_k: 0 keeps all.
        presence, frequency: taken off the logit of what was drawn, once and for each time.
        repetition: by which logits of what was read or drawn are divided, negative ones multiplied (arXiv:1909.05858);
            at least `LEAST_REPETITION`.
        bias: added to logits; -inf forbids.
        seed: `SEED_NBYTES`.
        num_likeliest: whose log-probabilities are told; None: not even the drawn one's.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: Mapping[int, float] = field(default_factory=dict)
    seed: bytes = bytes(SEED_NBYTES)
    num_likeliest: int | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether it looks at the tokens before."""
        return bool(self.presence or self.frequency or self.repetition != 1.0)


@dataclass(frozen=True)
class Drawn:
    """A token, and if asked for how likely the model found it, and which it found likeliest: log-probabilities, nats,
    before anything of `Drawing`."""

    token: int
    logprob: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()


class Counts:
    """How often each token of a text was drawn, and which its prompt holds."""

    def __init__(self, prompt: NDArray[np.int64], vocab_size: int) -> None:
        self._drawn = np.zeros(vocab_size, dtype=np.int32)
        self._read = np.zeros(vocab_size, dtype=bool)
        self._read[prompt] = True

    def add(self, token: int) -> None:
        self._drawn[token] += 1

    def penalised(self, logits: FloatArray, drawing: Drawing) -> FloatArray:
        if drawing.repetition != 1.0:
            seen = self._read | (self._drawn > 0)
            divided = np.where(logits > 0, logits / drawing.repetition, logits * drawing.repetition)
            logits = np.where(seen, divided, logits)
        if drawing.presence or drawing.frequency:
            logits = logits - drawing.frequency * self._drawn - drawing.presence * (self._drawn > 0)
        return logits


def draw(
    logits: FloatArray,
    drawing: Drawing,
    position: int,
    counts: Counts | None = None,
    allowed: NDArray[np.bool_] | None = None,
) -> Drawn:
    """Return the token at `position`.

    Args:
        logits: one per token, fp64.
        position: in the text, its prompt included.
        counts: needed where there are penalties.
        allowed: by a grammar; at least one token.

    Raises:
        NotFinite: a logit is NaN or infinite.
    """
    if not np.isfinite(logits).all():
        raise NotFinite("the model's logits are NaN or infinite: its weights are broken. Serve an earlier checkpoint.")
    token = _token(logits, drawing, position, counts, allowed)
    if drawing.num_likeliest is None:
        return Drawn(token)
    told = logits - _log_sum(logits)
    best = _largest(told, drawing.num_likeliest)
    return Drawn(token, float(told[token]), tuple((int(each), float(told[each])) for each in best))


def margin(
    logits: FloatArray,
    drawing: Drawing,
    position: int,
    token: int,
    counts: Counts | None = None,
    allowed: NDArray[np.bool_] | None = None,
) -> float:
    """Return by how much a token would have had to score better to be drawn at `position`; 0.0 of the one that is,
    infinite of one that a grammar forbids.

    In units of logits over the temperature; of logits, where the likeliest token is taken. Other machines' logits
    differ a little, and with them what is drawn, where this is small (Token-DiFR, arXiv:2511.20621).
    """
    if allowed is not None and not allowed[token]:
        return inf
    logits = _wanted(logits, drawing, counts, allowed)
    if _is_likeliest(drawing):
        return float(logits.max() - logits[token])
    scaled = (logits - logits.max()) / drawing.temperature
    bits = bits_of(drawing.seed, position, len(logits))
    some, is_cut = _drawable(scaled, bits, drawing), not _keeps_all(drawing)
    by_score = (scaled[some] + gumbel(bits[some])).max() - (scaled[token] + gumbel(bits[[token]])[0])
    return float(max(0.0, by_score, scaled[some].min() - scaled[token] if is_cut else 0.0))


def _token(
    logits: FloatArray, drawing: Drawing, position: int, counts: Counts | None, allowed: NDArray[np.bool_] | None
) -> int:
    logits = _wanted(logits, drawing, counts, allowed)
    if _is_likeliest(drawing):
        return int(logits.argmax())
    scaled = (logits - logits.max()) / drawing.temperature
    bits = bits_of(drawing.seed, position, len(logits))
    some = _drawable(scaled, bits, drawing)
    return int(some[(scaled[some] + gumbel(bits[some])).argmax()])


def _drawable(scaled: FloatArray, bits: NDArray[np.uint64], drawing: Drawing) -> NDArray[np.int64]:
    """Return the tokens of which one is drawn, ascending; few of them, where nothing but their chance cuts any."""
    return np.flatnonzero(scaled >= _least(scaled, bits)) if _keeps_all(drawing) else kept_of(scaled, drawing)


def _least(scaled: FloatArray, bits: NDArray[np.uint64]) -> float:
    """Return what a token's `scaled` is at least where it can be drawn. The likeliest, at 0, is always kept."""
    of_likeliest, most = gumbel(np.array([bits[scaled.argmax()], bits.max()]))
    return float(of_likeliest - most) - _SLACK


def _keeps_all(drawing: Drawing) -> bool:
    return not drawing.top_k and drawing.min_p == 0.0 and drawing.top_p >= 1.0


def _is_likeliest(drawing: Drawing) -> bool:
    return drawing.temperature == 0.0 or drawing.top_k == 1


def _wanted(
    logits: FloatArray, drawing: Drawing, counts: Counts | None, allowed: NDArray[np.bool_] | None
) -> FloatArray:
    """Return logits less penalties, with biases; -inf where a grammar forbids."""
    if counts is not None:
        logits = counts.penalised(logits, drawing)
    if drawing.bias:
        logits = logits.copy()
        logits[list(drawing.bias)] += list(drawing.bias.values())
    return logits if allowed is None else np.where(allowed, logits, -inf)


def kept_of(scaled: FloatArray, drawing: Drawing) -> NDArray[np.int64]:
    """Return the tokens that may be drawn, ascending."""
    num = len(scaled)
    if _keeps_all(drawing):
        return np.flatnonzero(scaled > -inf)
    is_cut = bool(drawing.top_k or drawing.min_p)
    whole = 0.0 if is_cut else float(np.exp(scaled).sum())
    if drawing.top_k:
        best = _largest(scaled, drawing.top_k)
    else:
        all_best = (_largest(scaled, some) for some in (*_SOME, num))
        best = next(best for best in all_best if _is_enough(scaled, best, drawing, whole))
    mass = np.exp(scaled[best])
    num_kept = int((mass >= drawing.min_p * mass[0]).sum())
    if drawing.top_p < 1.0:
        # Of what the others keep, the fewest likeliest whose mass reaches top_p of it.
        whole = float(mass[:num_kept].sum()) if is_cut else whole
        num_kept = min(num_kept, int(np.searchsorted(mass.cumsum(), drawing.top_p * whole)) + 1)
    best = best[:num_kept]
    return np.sort(best[scaled[best] > -inf])


def _is_enough(scaled: FloatArray, best: NDArray[np.int64], drawing: Drawing, whole: float) -> bool:
    """Return whether nothing beyond the likeliest can be kept. `whole`: the mass of all, where nothing else cuts."""
    if len(best) == len(scaled):
        return True
    if drawing.min_p:
        return float(np.exp(scaled[best[-1]])) < drawing.min_p
    return float(np.exp(scaled[best]).sum()) >= drawing.top_p * whole


def _largest(values: FloatArray, num: int) -> NDArray[np.int64]:
    """Return where the `num` largest values are, largest first; of equal ones the lowest place first."""
    if num >= len(values):
        return np.argsort(-values, kind="stable")
    if num == 0:
        return np.empty(0, dtype=np.int64)
    bound = np.partition(values, len(values) - num)[len(values) - num]
    some = np.flatnonzero(values >= bound)
    return some[np.argsort(-values[some], kind="stable")][:num]


def bits_of(seed: bytes, position: int, num: int) -> NDArray[np.uint64]:
    """Return what the noise of `num` tokens is made of: 8 bytes of BLAKE3's output each, keyed."""
    return np.frombuffer(blake3(position.to_bytes(8, "little"), key=seed).digest(8 * num), "<u8")


def gumbel(bits: NDArray[np.uint64]) -> FloatArray:
    """Return the Gumbel noise that is made of `bits`.

    u = (bits >> 11) 2^-53, and 2^-54 where that is 0.
    """
    noise = (bits >> np.uint64(11)).astype(np.float64)  # all in one place: fresh memory takes longer than arithmetic
    noise *= 2.0**-53
    np.maximum(noise, 2.0**-54, out=noise)
    for _ in range(2):
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return noise


def _log_sum(logits: FloatArray) -> float:
    most = float(logits.max())
    return most + float(np.log(np.exp(logits - most).sum()))
