"""What answers take, by sums that can be done by hand."""

import asyncio
from dataclasses import replace

import pytest

from unit.engine.test_step import CONFIG, text_of
from unit.texts.stages import STEP_S, Served, wanted
from weft.engine.load import NUMBER_NBYTES, num_multiplied, weights_nbytes
from weft.engine.numbers import Kind
from weft.model.sections import sections, whole
from weft.plan.serve import (
    HOP_S,
    MOST_TEXTS,
    PIECE,
    Stage,
    Step,
    Timed,
    draws,
    first_token_s,
    pieces,
    ring_first_token_s,
    ring_speed,
    seconds_at,
    speed,
    stages_of,
)
from weft.plan.split import Link

TIMED = Timed(
    kind="int8",
    layer_s=((1, 0.001), (8, 0.001), (32, 0.0025), (256, 0.0165)),
    head_s=((1, 0.004), (8, 0.004), (32, 0.008)),
    draw_s=0.002,
    look_s=1e-6,
    read_look_s=1e-7,
    bandwidth=10e9,
    rates={"int8": 1e12, "fp32": 1e11},
)
WHOLE = Stage(num_layers=10, has_head=True, read_nbytes=100_000_000, num_multiplied=100_000_000)
HERE = Link(bps=float("inf"), rtt_s=0.0)


@pytest.mark.parametrize(
    ("num", "seconds"), [(1, 0.001), (4, 0.001), (8, 0.001), (20, 0.00175), (144, 0.0095), (512, 0.0325)]
)
def test_rows_between_those_that_were_timed_take_what_lies_between(num: int, seconds: float) -> None:
    assert seconds_at(TIMED.layer_s, num) == pytest.approx(seconds)


def test_one_point_is_all_that_is_known() -> None:
    assert seconds_at(((8, 0.5),), 1) == seconds_at(((8, 0.5),), 100) == 0.5


@pytest.mark.parametrize(
    ("num_texts", "context", "seconds"),
    [
        (1, 64, 10 * 0.001 + 0.004 + 0.002),
        (1, 1064, 10 * 0.001 + 10 * 1024 * 1e-6 + 0.004 + 0.002),
        (8, 64, 10 * 0.001 + 0.004 + 8 * 0.002),
        (8, 164, 10 * 0.001 + 10 * 8 * 128 * 1e-6 + 0.004 + 8 * 0.002),
        (32, 10, 10 * 0.0025 + 0.008 + 32 * 0.002),
    ],
)
def test_a_step_is_its_layers_what_they_look_at_the_head_and_drawing(
    num_texts: int, context: int, seconds: float
) -> None:
    assert draws(TIMED, WHOLE, num_texts, context).total_s == pytest.approx(seconds)
    assert speed(TIMED, WHOLE, num_texts, context).tokens_per_s == pytest.approx(num_texts / seconds)


def test_more_texts_than_a_step_takes_are_no_faster() -> None:
    assert speed(TIMED, WHOLE, 200, 64).tokens_per_s == speed(TIMED, WHOLE, MOST_TEXTS, 64).tokens_per_s


@pytest.mark.parametrize(
    ("step", "bound"),
    [
        (Step(total_s=10, weights_s=6, arithmetic_s=1), "weights"),
        (Step(total_s=10, weights_s=4, arithmetic_s=6), "arithmetic"),
        (Step(total_s=10, weights_s=2, look_s=5), "keys and values"),
        (Step(total_s=10, weights_s=2, draw_s=5), "drawing"),
        (Step(total_s=10, weights_s=2, arithmetic_s=1, look_s=1, draw_s=1), "small operations"),
    ],
)
def test_the_largest_part_of_a_step_is_what_bounds_it(step: Step, bound: str) -> None:
    assert step.bound == bound


def test_a_step_knows_what_reading_and_multiplying_take() -> None:
    step = draws(TIMED, WHOLE, 8, 64)
    assert step.weights_s == pytest.approx(0.1 / 10)
    assert step.arithmetic_s == pytest.approx(2 * 8 * 1e8 / 1e12)
    assert draws(replace(TIMED, kind="fp32"), WHOLE, 8, 64).arithmetic_s == pytest.approx(2 * 8 * 1e8 / 1e11)


def test_the_first_token_waits_for_all_pieces_of_its_prompt() -> None:
    assert PIECE == 256
    assert list(pieces(600)) == [(0, 256), (256, 256), (512, 88)]
    assert first_token_s(TIMED, WHOLE, 8) == pytest.approx(10 * 0.001 + 0.006)
    read_s = 10 * (2 * 0.0165 + 0.006)
    looked_s = 10 * 1e-7 * (256 * 256 + 88 * 512)
    assert first_token_s(TIMED, WHOLE, 600) == pytest.approx(read_s + looked_s + 0.006)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_stages_are_the_whole_model_between_them(kind: Kind) -> None:
    (one,) = stages_of(CONFIG, kind)
    cut = stages_of(CONFIG, kind, 3)
    assert one.read_nbytes == NUMBER_NBYTES[kind] * num_multiplied(CONFIG, whole(CONFIG))
    assert sum(each.num_layers for each in cut) == one.num_layers == CONFIG.num_layers
    assert sum(each.read_nbytes for each in cut) == one.read_nbytes
    assert [each.has_head for each in cut] == [False, False, True]
    parts = sum(weights_nbytes(CONFIG, kind, each) for each in sections(CONFIG, 3))
    assert parts == weights_nbytes(CONFIG, kind)


def test_a_ring_of_one_text_takes_all_steps_and_a_hop_from_each_to_the_next() -> None:
    stages = [replace(WHOLE, num_layers=5, has_head=False), replace(WHOLE, num_layers=5)]
    link = Link(bps=8e6, rtt_s=0.02)
    cycle_s = 10 * 0.001 + 0.004 + 0.002 + 2 * (0.01 + HOP_S) + 1000 / 1e6
    found = ring_speed(TIMED, stages, link, row_nbytes=1000, num_texts=1, context=64)
    assert found.tokens_per_s == pytest.approx(1 / cycle_s)
    assert found.bound == "line"
    assert ring_speed(TIMED, stages, HERE, 1000, 1, 64).bound != "line"


def even(num: int) -> list[Stage]:
    return [Stage(num_layers=10, has_head=False, read_nbytes=1, num_multiplied=1) for _ in range(num)]


FLAT = replace(TIMED, layer_s=((1, 0.001), (64, 0.001)))  # a step takes 10 ms, whatever is in it


def test_texts_of_a_ring_are_under_way_at_once() -> None:
    """Four stages of 10 ms and hops of 1 ms: 44 ms a token of each, as long as no stage is busy all the time."""
    for num, tokens_per_s in ((1, 1 / 0.044), (4, 4 / 0.044), (8, 8 / 0.044)):
        found = ring_speed(FLAT, even(4), HERE, 0, num, 64)
        assert found.tokens_per_s == pytest.approx(tokens_per_s), num


def test_where_rows_take_as_long_as_they_are_many_a_ring_is_as_fast_as_its_slowest_stage() -> None:
    """1 ms for a row of a layer, 10 layers: 100 rows a second by each stage, however many wait."""
    steep = replace(TIMED, layer_s=((1, 0.001), (64, 0.064)))
    found = [ring_speed(steep, even(4), HERE, 0, num, 64).tokens_per_s for num in (1, 8, 32)]
    assert found[0] == pytest.approx(1 / 0.044)
    assert found[1:] == pytest.approx([100.0, 100.0], rel=1e-3)


def test_a_line_that_is_busy_longer_than_machines_bounds_a_ring() -> None:
    found = ring_speed(FLAT, even(4), Link(bps=8e5, rtt_s=0.0), row_nbytes=10_000, num_texts=32, context=64)
    assert found.tokens_per_s == pytest.approx(10.0, rel=1e-3)  # 100 kB/s
    assert found.bound == "line"


def test_a_share_of_the_machines_bounds_what_they_draw() -> None:
    """30 % of the time is 30 steps of 10 ms a second, and more texts in each do no harm."""
    alone = ring_speed(FLAT, even(4), HERE, 0, 1, 64)
    assert ring_speed(FLAT, even(4), HERE, 0, 1, 64, share=0.3) == alone
    steep = replace(TIMED, layer_s=((1, 0.001), (64, 0.064)))
    assert ring_speed(steep, even(4), HERE, 0, 32, 64, share=0.3).tokens_per_s == pytest.approx(30.0, rel=1e-3)


def test_stages_read_pieces_of_a_prompt_at_once() -> None:
    """Of two stages with 165 ms a piece: three pieces take four of them, not six. Two hops to open it, then three."""
    found = ring_first_token_s(replace(TIMED, read_look_s=0.0), even(2), HERE, row_nbytes=0, num_prompt=768)
    assert found == pytest.approx(4 * 0.165 + 5 * HOP_S)


def test_rows_that_a_note_does_not_hold_are_fetched() -> None:
    link = Link(bps=8e6, rtt_s=0.2)
    hop_s = 0.1 + HOP_S
    short = ring_first_token_s(TIMED, even(2), link, row_nbytes=100, num_prompt=256)
    assert short == pytest.approx(2 * 0.165 + 5 * hop_s + 25_600 / 1e6)
    long = ring_first_token_s(TIMED, even(2), link, row_nbytes=1000, num_prompt=256)
    assert long == pytest.approx(2 * 0.165 + 7 * hop_s + 256_000 / 1e6)


@pytest.mark.full
@pytest.mark.parametrize("num", [1, 2, 6])
def test_rings_that_are_played_are_as_fast_as_reckoned(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members and who asks as in production, on a virtual clock: three stages of 10 ms a step, 5 ms a way."""
    monkeypatch.setattr("weft.plan.serve.HOP_S", 0.0)
    served = Served((1, 1, 1), has_guesses=False)
    all_times = list[list[float]]()

    async def told(seed: int) -> list[float]:
        began = served.clock.now()
        asked = replace(wanted(text_of(20 + seed, seed), 40), key=str(seed))
        return [served.clock.now() - began async for _ in served.entry.begin(asked)]

    async def play() -> None:
        all_times.extend(await asyncio.gather(*map(told, range(num))))

    served.run(play)
    step = ((1, STEP_S), (256, STEP_S))
    timed = replace(TIMED, kind="fp32", layer_s=step, head_s=((1, 0.0),), draw_s=0.0, look_s=0.0, read_look_s=0.0)
    stages, link = stages_of(CONFIG, "fp32", 3), Link(bps=float("inf"), rtt_s=0.01)
    start, stop = max(times[0] for times in all_times), min(times[-1] for times in all_times)
    num_drawn = sum(start < at <= stop for times in all_times for at in times)
    reckoned = ring_speed(timed, stages, link, 0, num, 64)
    assert num_drawn / (stop - start) == pytest.approx(reckoned.tokens_per_s, rel=0.1)
    assert min(times[0] for times in all_times) == pytest.approx(
        ring_first_token_s(timed, stages, link, 0, 20), rel=0.1
    )
