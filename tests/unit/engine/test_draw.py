"""What is drawn is the formula's, computed for all tokens; whatever is left out of the work changes no token."""

from math import inf

import numpy as np
import pytest
from blake3 import blake3

from weft.engine.draw import Counts, Drawing, FloatArray, draw, kept_of, margin
from weft.rng import stream

VOCAB = 2000
DRAWINGS = (
    Drawing(),
    Drawing(temperature=0.3),
    Drawing(temperature=50.0),
    Drawing(top_k=7),
    Drawing(top_p=0.9),
    Drawing(min_p=0.05, temperature=2.0),
    Drawing(top_k=1500, top_p=0.5),
    Drawing(bias={3: -inf, 5: 4.0}),
)


def logits_of(kind: str, seed: int) -> FloatArray:
    """Return logits of a text that is nearly sure, of one that is not, or of none: all alike."""
    found = stream(seed, "logits").standard_normal(VOCAB) * {"sure": 6.0, "unsure": 1.0, "alike": 0.0}[kind]
    return found.astype(np.float32).astype(np.float64)


def noise(seed: bytes, position: int) -> FloatArray:
    bits = np.frombuffer(blake3(position.to_bytes(8, "little"), key=seed).digest(8 * VOCAB), "<u8")
    u = np.maximum((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53, 2.0**-54)
    return -np.log(-np.log(u))


def by_formula(logits: FloatArray, drawing: Drawing, position: int) -> int:
    """Return the token whose sum with its noise is the greatest, of all that are kept."""
    wanted = logits.copy()
    for token, bias in drawing.bias.items():
        wanted[token] += bias
    scaled = (wanted - wanted.max()) / drawing.temperature
    is_kept = np.zeros(VOCAB, dtype=bool)
    is_kept[kept_of(scaled, drawing)] = True
    return int(np.where(is_kept, scaled + noise(drawing.seed, position), -inf).argmax())


@pytest.mark.parametrize("kind", ["sure", "unsure", "alike"])
@pytest.mark.parametrize("drawing", DRAWINGS, ids=str)
def test_the_token_is_the_one_with_the_greatest_sum_of_all(kind: str, drawing: Drawing) -> None:
    found = [draw(logits_of(kind, position), drawing, position).token for position in range(60)]
    assert found == [by_formula(logits_of(kind, position), drawing, position) for position in range(60)]


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2]))
    found = np.bincount([draw(logits, Drawing(), position).token for position in range(4000)], minlength=3) / 4000
    assert np.abs(found - [0.5, 0.3, 0.2]).max() < 0.03


def test_an_unlikely_token_with_much_noise_is_drawn() -> None:
    """A bound on what can win that is too high would never draw what is e^-8 as likely as the likeliest."""
    logits = np.full(VOCAB, -8.0)
    logits[0] = 0.0
    found = [draw(logits, Drawing(), position).token for position in range(60)]
    assert found == [by_formula(logits, Drawing(), position) for position in range(60)]
    assert 0 in found
    assert len(set(found)) > 10


def test_what_a_grammar_forbids_is_not_drawn() -> None:
    allowed = np.zeros(VOCAB, dtype=bool)
    allowed[[4, 9]] = True
    found = {draw(logits_of("unsure", 0), Drawing(), position, allowed=allowed).token for position in range(40)}
    assert found == {4, 9}


def test_the_token_that_is_drawn_has_no_margin() -> None:
    counts = Counts(np.array([1, 2]), VOCAB)
    drawing = Drawing(presence=0.5, top_p=0.9)
    for position in range(20):
        logits = logits_of("unsure", position)
        token = draw(logits, drawing, position, counts).token
        assert margin(logits, drawing, position, token, counts) == 0.0
        assert margin(logits, drawing, position, (token + 1) % VOCAB, counts) > 0.0
