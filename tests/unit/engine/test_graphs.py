"""Steps of fixed shapes: what is padded disturbs nobody, and what graphs hold is foretold.

Without a GPU such steps are computed as others are, padded as for a graph.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from unit.engine.test_step import CONFIG, CPU, vector_of
from weft.codec.dense import Fp32
from weft.engine.batch import Batch, Piece
from weft.engine.draw import Drawing, Drawn
from weft.engine.engine import Engine
from weft.engine.graphs import (
    MOST_NEW,
    MOST_TEXTS,
    Graphs,
    _between_nbytes,
    _found_nbytes,
    _given_nbytes,
    held_nbytes,
    shapes,
)
from weft.engine.numbers import Kind
from weft.engine.scheduling.pages import PAGE
from weft.engine.step import KeysAndValues, Stepper, Weights
from weft.engine.text import Text, Wanted
from weft.model.config import named
from weft.model.flat import cut
from weft.model.sections import sections, whole
from weft.texts.section import Draw, Section, Work, packed

NUM_PAGES = 48
REPEATED = [5, 3, 8, 7] * 6


def stepper(kind: Kind = "exact", *, has_graphs: bool = True) -> tuple[Stepper, KeysAndValues]:
    kept = KeysAndValues(CONFIG, NUM_PAGES, CPU, kind, has_graphs=has_graphs)
    return Stepper(Weights(CONFIG, vector_of(CONFIG), kind), kept), kept


class Play:
    """An engine in exact numbers, whose steps are padded or not."""

    def __init__(self, *, has_graphs: bool) -> None:
        self.stepper, self.kept = stepper(has_graphs=has_graphs)
        self.engine = Engine(
            self.stepper, vocab_size=CONFIG.vocab_size, context=CONFIG.max_seq_len, num_pages=NUM_PAGES
        )

    def begin(self, prompt: Sequence[int], num: int, salt: bytes = b"", seed: int = 0) -> Text:
        bias = {5: 9.0, 3: 8.0, 8: 7.5}  # so likely that texts repeat themselves
        drawing = Drawing(temperature=0.7, seed=bytes([seed]) * 32, bias=bias, num_likeliest=2)
        return self.engine.begin(Wanted("key", tuple(prompt), num, drawing, salt=salt))

    async def all(self, *texts: Text) -> list[list[Drawn]]:
        return list(await asyncio.gather(*(self.told(each) for each in texts)))

    async def told(self, text: Text) -> list[Drawn]:
        return [drawn async for drawn in text]

    @property
    def made(self) -> set[tuple[int, int]]:
        """Return how many texts, and new tokens of each, padded steps had."""
        graphs = self.stepper._graphs
        return set() if graphs is None else {(num, num_new) for num, num_new, _ in graphs._made}


@pytest.fixture
def plays(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Play, Play]]:
    """Padded, and not; a guess costs hardly anything, so there are some wherever one is known."""
    monkeypatch.setattr("weft.engine.scheduling.pace.Pace.row_share", lambda _pace, _num: 0.1)
    found = Play(has_graphs=True), Play(has_graphs=False)
    yield found
    for each in found:
        each.engine.close()


async def test_texts_with_guesses_have_the_same_bits_in_padded_steps(plays: tuple[Play, Play]) -> None:
    drawn = [await play.all(*(play.begin([*REPEATED, seed], 60, seed=seed) for seed in range(3))) for play in plays]
    assert drawn[0] == drawn[1]  # log-probabilities among it
    padded, plain = plays
    assert all(play.engine.totals.num_right > 10 for play in plays)  # how many rests on which step each begins in
    assert (4, MOST_NEW) in padded.made  # three texts and nobody's
    assert plain.made == set()


async def test_pages_that_others_share_are_not_written_by_padded_steps(plays: tuple[Play, Play]) -> None:
    """Three texts begin alike, so that they hold the same named pages; a fourth row of each step is nobody's."""
    padded, plain = plays
    begins = (REPEATED * 8)[: 2 * PAGE]
    drawn = []
    for play in plays:
        await play.all(play.begin([*begins, 1], 1, b"salt"))
        before = _pages(play.kept, _named(play))
        texts = [play.begin([*begins, seed], 40, b"salt", seed) for seed in (1, 2, 3)]
        drawn.append(await play.all(*texts))
        assert [text.num_shared for text in texts] == [2 * PAGE] * 3
        assert _pages(play.kept, list(before)) == before
    assert drawn[0] == drawn[1]
    assert {(4, 1), (4, MOST_NEW)} & padded.made
    assert not plain.made


def _named(play: Play) -> list[int]:
    pages = list(play.engine._pool._names)
    assert len(pages) == 2
    return pages


def _pages(kept: KeysAndValues, numbers: list[int]) -> dict[int, list[bytes]]:
    """Return all that is kept in some pages, to the bit."""
    return {
        number: [
            bytes(each[number].contiguous().view(torch.uint8).numpy().tobytes())
            for layer in kept.layers
            for each in vars(layer).values()
            if isinstance(each, torch.Tensor)
        ]
        for number in numbers
    }


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_section_with_guesses_has_the_same_bits_in_padded_steps(number: int) -> None:
    """Three texts with one, three and nine tokens each: what goes on, and what is drawn after each of them."""
    part = sections(CONFIG, 3)[number]
    prompts = {0: 3, 1: PAGE - 2, 2: 70}  # what each text has read before
    done = []
    for has_graphs in (True, False):
        weights = Weights(CONFIG, cut(CONFIG, vector_of(CONFIG), part), "exact", part)
        kept = KeysAndValues(CONFIG, NUM_PAGES, CPU, "exact", len(part.layers), has_graphs=has_graphs)
        section = Section(weights, kept, Fp32())
        section.compute([_work(section, text, 0, num) for text, num in prompts.items()])
        works = [_work(section, text, prompts[text], num) for text, num in ((0, 1), (1, 3), (2, MOST_NEW))]
        done.append(section.compute(works))
        assert section.num_graphs == has_graphs
    assert done[0] == done[1]
    lengths = [len(each.drawn) if part.is_last else len(each.data) // (4 * CONFIG.width) for each in done[0]]
    assert lengths == [1, 3, MOST_NEW]


def _work(section: Section, text: int, start: int, num: int) -> Work:
    if section.is_first:
        data = packed([(text + at) % CONFIG.vocab_size for at in range(start, start + num)])
    else:
        rows = torch.arange(start, start + num)[:, None] + torch.arange(CONFIG.width) * (text + 1)
        data = rows.float().sin().numpy().tobytes()
    how = Draw(Drawing(temperature=0.9), None) if section.is_last else None
    return Work(data, num, start, range(4 * text, 4 * text + 4), how, num)


# --- what they hold ---


def test_shapes_are_those_that_steps_come_in() -> None:
    assert set(shapes(context=128, pool=100)) == {
        (1 << power, num_new, pages) for power in range(7) for num_new in (1, MOST_NEW) for pages in (1, 2)
    }
    few = list(shapes(context=64 * PAGE, pool=32))
    assert max(num * pages for num, _, pages in few) == 4 * 32
    assert (MOST_TEXTS, 1, 1) in few
    assert max(pages for _, _, pages in few) == 32


@pytest.mark.parametrize("number", [None, 0, 1, 2])
def test_what_a_graph_is_given_and_finds_is_as_large_as_is_foretold(
    number: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = whole(CONFIG) if number is None else sections(CONFIG, 3)[number]
    seen = list[tuple[Any, int, int]]()
    run = Graphs.run

    def watched(graphs: Graphs, batch: Batch, compute: Any) -> torch.Tensor:
        out = run(graphs, batch, compute)
        (spread,) = batch.spreads
        shape = (spread.num, spread.num_new, spread.num_all // PAGE)
        seen.append((shape, sum(each.nbytes for each in batch.tensors), out.nbytes))
        return out

    monkeypatch.setattr(Graphs, "run", watched)
    weights = Weights(
        CONFIG, cut(CONFIG, vector_of(CONFIG), part) if number is not None else vector_of(CONFIG), "fp32", part
    )
    section = Section(weights, KeysAndValues(CONFIG, NUM_PAGES, CPU, "fp32", len(part.layers), has_graphs=True), Fp32())
    for num in (1, 4, MOST_NEW):
        section.compute([_work(section, text, 0, num) for text in range(3)])
    assert {shape for shape, _, _ in seen} == {(4, 1, 1), (4, MOST_NEW, 1)}
    for shape, given, found in seen:
        assert given == _given_nbytes(CONFIG, shape, part)
        assert found == _found_nbytes(CONFIG, shape, part)


def test_sections_hold_less_than_the_whole_and_more_texts_hold_more() -> None:
    config = named("150m", 32_000, 512)
    whole_nbytes = held_nbytes(config, "bf16", 512, 64)
    assert held_nbytes(config, "bf16", 128, 64) < whole_nbytes
    assert held_nbytes(config, "bf16", 512, 4) < whole_nbytes
    assert all(held_nbytes(config, "bf16", 512, 64, part) < whole_nbytes for part in sections(config, 3)[:2])
    # Logits of 1, 2, .. 64 texts with one and with nine tokens each, and once those of the most in bf16.
    logits = 4 * 32_000 * 127 * (1 + MOST_NEW) + 2 * 32_000 * MOST_TEXTS * MOST_NEW
    assert held_nbytes(config, "bf16", 64, 64) == pytest.approx(logits, rel=0.05)


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize(("num_texts", "num_pages"), [(64, 4), (2, 16), (64, 1)])
def test_what_a_step_needs_between_is_about_as_much_as_is_foretold(kind: Kind, num_texts: int, num_pages: int) -> None:
    """By the allocations of a step on a CPU, less what it returns."""
    config = named("nano", 2048 if num_pages == 1 else 257, 2048)
    pool = num_texts * num_pages
    kept = KeysAndValues(config, pool, CPU, kind, has_graphs=True)
    made = Stepper(Weights(config, vector_of(config), kind), kept)
    graphs = made._graphs
    assert graphs is not None
    work = [
        Piece([at], num_pages * PAGE - 1, range(at * num_pages, (at + 1) * num_pages), num_draws=1)
        for at in range(num_texts)
    ]
    made.step(work)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        made.step(work)
    events: Any = profiled.profiler
    most = now = 0
    for event in sorted(events.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    shape = (num_texts, 1, num_pages)
    foretold = _between_nbytes(config, kind, shape, whole(config))
    told = most - _found_nbytes(config, shape, whole(config)) - _given_nbytes(config, shape, whole(config))
    assert told == pytest.approx(foretold, rel=0.15)
