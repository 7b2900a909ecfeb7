"""What an audit says of receipts: honest ones pass in whatever steps rows were computed, those of cheats do not."""

import numpy as np
import pytest
from benchmarks._signed_texts import HONEST, SIGNER, Cheat, SignedText, audited, play, stages_of
from msgspec.structs import replace

from unit.engine.test_step import CONFIG, text_of, vector_of
from weft.engine.draw import Drawing, draw, margin
from weft.engine.fingerprint import bounds_of
from weft.engine.numbers import Kind
from weft.errors import PayloadError
from weft.texts.audit import EXACT, Bounds, Finding, Told, audit, tokens_told
from weft.texts.receipt import signed
from weft.texts.section import packed

WIDE = replace(CONFIG, num_layers=4, vocab_size=512)
VECTOR = vector_of(WIDE)
CHEATS = {
    "other numbers": Cheat(numbers="int8"),
    "half the layers": Cheat(share=0.5),
    "a token": Cheat(tells="any"),
    "a page": Cheat(swaps=True),
}
SLACK = 1.5


def prompts(num: int, seed: int = 0) -> list[list[int]]:
    return [[token * 5 % 512 for token in text_of(40 + each % 5, 100 * seed + each)] for each in range(num)]


def texts(
    kind: Kind, num_stages: int, num: int = 8, *, cheat: Cheat = HONEST, seed: int = 0, piece: int = 64
) -> list[SignedText]:
    stages = stages_of(WIDE, VECTOR, kind, num_stages, 2 * num, cheat)
    return play(stages, prompts(num, seed), 30, cheat=cheat, seed=seed, piece=piece)


def judged(
    kind: Kind, num_stages: int, played: list[SignedText], stage: int, bounds: Bounds, *, has_rows: bool = True
) -> list[list[Finding]]:
    section = stages_of(WIDE, VECTOR, kind, num_stages, 2)[stage]
    return [audited(section, text, stage, bounds, has_rows=has_rows) for text in played]


def bounds_for(kind: Kind, num_stages: int, stage: int) -> Bounds:
    """Return bounds of honest runs, in steps of several sizes."""
    found = [
        each
        for seed, piece in ((11, 64), (12, 7))
        for findings in judged(kind, num_stages, texts(kind, num_stages, 12, seed=seed, piece=piece), stage, EXACT)
        for each in findings
    ]
    margins = [one for each in found for one in each.margins]
    return Bounds(bounds_of([one for each in found for one in each.apart], SLACK), SLACK * max(margins, default=0.0))


@pytest.mark.parametrize(("num_stages", "stage"), [(1, 0), (3, 0), (3, 1), (3, 2)])
def test_exact_receipts_are_honest_in_whatever_steps_rows_are_computed(num_stages: int, stage: int) -> None:
    played = [text for piece in (64, 7) for text in texts("exact", num_stages, 4, piece=piece)]
    findings = judged("exact", num_stages, played, stage, EXACT)
    assert [len(each) for each in findings] == [3] * 8
    assert all(each.is_honest for found in findings for each in found)


@pytest.mark.parametrize("cheat", CHEATS)
def test_exact_receipts_of_cheats_are_found_by_digest(cheat: str) -> None:
    findings = judged("exact", 1, texts("exact", 1, cheat=CHEATS[cheat]), 0, EXACT)
    assert [all(each.is_honest for each in found) for found in findings] == [False] * 8
    if cheat == "a token":  # it is one of them, and the rows after it are computed rightly
        assert {each.wrong for found in findings for each in found} == {(), ("a token is not the one that is drawn",)}


@pytest.mark.parametrize("cheat", ["other numbers", "half the layers", "a page"])
def test_a_stage_between_others_that_cheats_is_found(cheat: str) -> None:
    played = texts("exact", 2, cheat=CHEATS[cheat])
    for findings in judged("exact", 2, played, 0, EXACT):
        assert any("what went out is not what these weights give" in each.wrong for each in findings)
    assert all(each.is_honest for found in judged("exact", 2, played, 1, EXACT) for each in found)


@pytest.mark.full
@pytest.mark.parametrize(("num_stages", "stage"), [(1, 0), pytest.param(2, 0, marks=pytest.mark.slow)])
def test_rounded_receipts_are_honest_within_bounds_and_those_of_cheats_are_not(num_stages: int, stage: int) -> None:
    bounds = bounds_for("bf16", num_stages, stage)
    for seed, piece in ((1, 64), (2, 16)):
        played = texts("bf16", num_stages, seed=seed, piece=piece)
        assert all(each.is_honest for found in judged("bf16", num_stages, played, stage, bounds) for each in found)
    for cheat in ("other numbers", "half the layers", "a page"):
        played = texts("bf16", num_stages, cheat=CHEATS[cheat]._replace(stage=stage), seed=3)
        for has_rows in (True, False):
            findings = judged("bf16", num_stages, played, stage, bounds, has_rows=has_rows)
            assert [all(each.is_honest for each in found) for found in findings] == [False] * 8, cheat


def test_a_token_that_was_not_drawn_scores_worse_than_the_best() -> None:
    logits = np.linspace(-3.0, 3.0, 50)
    for drawing in (Drawing(), Drawing(temperature=0.0), Drawing(top_k=5), Drawing(top_p=0.5), Drawing(min_p=0.3)):
        drawn = draw(logits, drawing, 7).token
        assert margin(logits, drawing, 7, drawn) == 0.0
        assert all(margin(logits, drawing, 7, token) > 0 for token in range(50) if token != drawn)
    # A logit that is better by the margin is drawn.
    other = 40 if draw(logits, Drawing(), 7).token != 40 else 41
    more = np.zeros(50)
    more[other] = margin(logits, Drawing(), 7, other)
    assert draw(logits + 1.0001 * more, Drawing(), 7).token == other
    assert draw(logits + 0.9999 * more, Drawing(), 7).token != other


def test_an_audit_with_other_weights_or_of_another_header_says_so() -> None:
    (text, other) = texts("exact", 1, 2)
    (section,) = stages_of(WIDE, VECTOR.flip(0), "exact", 1, 2)
    assert all("other weights" in each.wrong[0] for each in audited(section, text, 0, EXACT))
    (section,) = stages_of(WIDE, VECTOR, "exact", 1, 2)
    receipts = [signed(text.headers[0], each, SIGNER.peer)[0] for each in text.told[0]]
    found = audit(section, other.headers[0], receipts, Told(packed(text.tokens), {}))
    assert [each.wrong for each in found] == [("it is none of this header",)] * 3


def test_an_audit_needs_all_rows_that_came_in() -> None:
    (text,) = texts("exact", 1, 1)
    (section,) = stages_of(WIDE, VECTOR, "exact", 1, 2)
    receipts = [signed(text.headers[0], each, SIGNER.peer)[0] for each in text.told[0]]
    with pytest.raises(PayloadError, match="needs all rows that came in"):
        audit(section, text.headers[0], receipts, Told(packed(text.tokens[:40]), {}))
    altered = Told(packed([1, *text.tokens[1:]]), tokens_told(text.tokens, text.num_prompt), text.drawing)
    found = audit(section, text.headers[0], receipts, altered)
    assert "it is of other rows than those that came in" in found[0].wrong
