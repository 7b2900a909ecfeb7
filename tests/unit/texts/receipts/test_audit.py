"""What an audit says of receipts, and many of them of a member: honest ones pass in whatever steps rows were computed,
those of cheats do not."""

from functools import cache

import numpy as np
import pytest
from benchmarks._signed_texts import HONEST, SIGNER, Cheat, SignedText, audited, play, stages_of
from msgspec.structs import replace

from unit.engine.test_step import CONFIG, text_of, vector_of
from weft.engine.draw import Drawing, draw, margin
from weft.engine.numbers import Kind
from weft.errors import ConfigError, PayloadError
from weft.texts.receipts.audit import (
    MIN_CALIBRATED,
    NUMBERS,
    TOKENS,
    Bounds,
    Finding,
    Odds,
    Told,
    audit,
    calibrated,
    tokens_told,
    verdict,
    weighed,
)
from weft.texts.receipts.receipt import signed
from weft.texts.section import packed

WIDE = replace(CONFIG, num_layers=4, vocab_size=512)
VECTOR = vector_of(WIDE)
CHEATS = {
    "other numbers": Cheat(numbers="int8"),
    "half the layers": Cheat(share=0.5),
    "a token": Cheat(tells="any"),
    "a page": Cheat(swaps=True),
}


def prompts(num: int, seed: int = 0) -> list[list[int]]:
    return [[token * 5 % 512 for token in text_of(40 + each % 5, 100 * seed + each)] for each in range(num)]


@cache
def texts(
    kind: Kind, num_stages: int, num: int = 8, *, cheat: Cheat = HONEST, seed: int = 0, piece: int = 64
) -> list[SignedText]:
    stages = stages_of(WIDE, VECTOR, kind, num_stages, 2 * num, cheat)
    return play(stages, prompts(num, seed), 30, cheat=cheat, seed=seed, piece=piece)


def judged(
    kind: Kind, num_stages: int, played: list[SignedText], stage: int, *, has_rows: bool = True
) -> list[list[Finding]]:
    section = stages_of(WIDE, VECTOR, kind, num_stages, 2)[stage]
    return [audited(section, text, stage, has_rows=has_rows) for text in played]


def pooled(
    kind: Kind, num_stages: int, played: list[SignedText], stage: int, *, has_rows: bool = True
) -> list[Finding]:
    """Return what was found of all receipts, as of one member."""
    return [each for found in judged(kind, num_stages, played, stage, has_rows=has_rows) for each in found]


def bounds_for(kind: Kind, num_stages: int, stage: int) -> Bounds:
    """Return bounds of honest runs, in steps of several sizes."""
    ways = [texts(kind, num_stages, 51, seed=seed, piece=piece) for seed, piece in ((11, 64), (12, 7))]
    return calibrated([pooled(kind, num_stages, way, stage) for way in ways])


@pytest.mark.parametrize(
    ("num_stages", "stage"),
    [(1, 0), pytest.param(3, 0, marks=pytest.mark.full), pytest.param(3, 1, marks=pytest.mark.full), (3, 2)],
)
def test_exact_receipts_are_honest_in_whatever_steps_rows_are_computed(num_stages: int, stage: int) -> None:
    played = [text for piece in (64, 7) for text in texts("exact", num_stages, 4, piece=piece)]
    findings = judged("exact", num_stages, played, stage)
    assert [len(each) for each in findings] == [3] * 8
    assert all(verdict(found, None) == "honest" for found in findings)


@pytest.mark.parametrize("cheat", CHEATS)
def test_exact_receipts_of_cheats_are_found_by_digest(cheat: str) -> None:
    findings = judged("exact", 1, texts("exact", 1, cheat=CHEATS[cheat]), 0)
    assert [verdict(found, None) for found in findings] == ["cheating"] * 8
    if cheat == "a token":  # it is one of them, and the rows after it are computed rightly
        assert {each.wrong for found in findings for each in found} == {(), ("a token is not the one that is drawn",)}


@pytest.mark.parametrize("cheat", ["other numbers", "half the layers", "a page"])
def test_a_stage_between_others_that_cheats_is_found(cheat: str) -> None:
    played = texts("exact", 2, cheat=CHEATS[cheat])
    for findings in judged("exact", 2, played, 0):
        assert any("what went out is not what these weights give" in each.wrong for each in findings)
    assert all(verdict(found, None) == "honest" for found in judged("exact", 2, played, 1))


@pytest.mark.parametrize("num_stages", [1, 2])
def test_receipts_that_are_computed_afterwards_for_what_a_smaller_model_wrote_are_found(num_stages: int) -> None:
    """Rows and digests are right for those tokens: the tokens are not those that these weights draw."""
    drafted = texts("exact", 1, cheat=Cheat(share=0.5))
    written = [text.tokens[text.num_prompt :] for text in drafted]
    stages = stages_of(WIDE, VECTOR, "exact", num_stages, 16)
    forged = play(stages, prompts(8), 30, cheat=Cheat(tells="written"), written=written)
    assert [text.tokens for text in forged] == [text.tokens for text in drafted]
    findings = judged("exact", num_stages, forged, num_stages - 1)
    assert [verdict(found, None) for found in findings] == ["cheating"] * 8
    assert {each.wrong for found in findings for each in found} <= {(), ("a token is not the one that is drawn",)}


@pytest.mark.full
@pytest.mark.parametrize(("num_stages", "stage"), [(1, 0), pytest.param(2, 0, marks=pytest.mark.slow)])
def test_members_with_rounded_numbers_are_judged_by_many_receipts(num_stages: int, stage: int) -> None:
    bounds = bounds_for("bf16", num_stages, stage)
    for seed, piece in ((1, 64), (2, 16)):
        honest = pooled("bf16", num_stages, texts("bf16", num_stages, 16, seed=seed, piece=piece), stage)
        assert verdict(honest, bounds) == "honest"
        assert verdict(honest[:3], bounds) == "not enough"
    for cheat in ("other numbers", "half the layers", "a page"):
        played = texts("bf16", num_stages, 16, cheat=CHEATS[cheat]._replace(stage=stage), seed=3)
        for has_rows in (True, False):
            found = pooled("bf16", num_stages, played, stage, has_rows=has_rows)
            assert verdict(found, bounds) == "cheating", cheat
            assert verdict(found[:3], bounds) != "cheating"


@pytest.mark.parametrize("odds", [NUMBERS, TOKENS])
def test_no_member_is_accused_for_as_many_far_receipts_as_honest_ones_have(odds: Odds) -> None:
    rng = np.random.default_rng(0)
    honest = [weighed((rng.random(300) < odds.honest).tolist(), odds) for _ in range(500)]
    cheating = [weighed((rng.random(300) < odds.cheat).tolist(), odds) for _ in range(500)]
    assert honest.count("cheating") == 0
    assert honest.count("honest") == 500
    assert cheating.count("cheating") == 500


def test_a_verdict_waits_for_enough_receipts_and_finds_who_turns() -> None:
    assert weighed([], NUMBERS) == "not enough"
    assert weighed([True] * 8, NUMBERS) == "not enough"  # 5^8 < 10^6
    assert weighed([True] * 9, NUMBERS) == "cheating"
    assert weighed([False] * 7, NUMBERS) == "not enough"  # (5/9)^7 > 1/100
    assert weighed([False] * 8, NUMBERS) == "honest"
    assert weighed([*[False] * 1000, *[True] * 17], NUMBERS) == "cheating"


def finding(apart: float | None, margin: float | None, wrong: tuple[str, ...] = ()) -> Finding:
    return Finding(None, wrong, apart, margin)  # type: ignore[arg-type]


def test_numbers_and_tokens_are_weighed_apart_and_what_no_rounding_explains_decides_alone() -> None:
    bounds = Bounds(1.0, 1.0)
    near, far_token = finding(0.5, 0.5), finding(0.5, 2.0)
    assert verdict([near] * 30, bounds) == "honest"
    assert verdict([near] * 10, bounds) == "not enough"  # tokens need more of them
    assert verdict([finding(0.5, None)] * 10, bounds) == "honest"  # it draws none
    assert verdict([near, far_token] * 10, bounds) == "cheating"
    assert verdict(
        [near] * 30 + [finding(0.5, 0.5, ("it is of other tokens than those that were drawn",))], bounds
    ) == ("cheating")
    assert verdict([], None) == "not enough"


def test_bounds_are_those_of_the_way_whose_receipts_are_farthest() -> None:
    ways = [[finding(scale * number / 100, number / 100) for number in range(1, 101)] for scale in (1.0, 2.0)]
    bounds = calibrated(ways)
    assert bounds.apart == pytest.approx(1.5 * np.quantile([each.apart for each in ways[1]], 0.95))
    assert bounds.margin == pytest.approx(1.5 * np.quantile([each.margin for each in ways[0]], 0.99))
    with pytest.raises(ConfigError, match=f"need {MIN_CALIBRATED} receipts"):
        calibrated([*ways, ways[0][1:]])


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
    assert all("other weights" in each.wrong[0] for each in audited(section, text, 0))
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
