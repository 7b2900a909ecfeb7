"""Texts that are made together are those that are made alone; who goes leaves nothing behind."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from unit.engine.test_step import CONFIG, CPU, text_of, vector_of
from weft.engine.draft import Draft
from weft.engine.draw import Drawing, Drawn
from weft.engine.engine import MAX_WAITING, Engine, Turns, close_all
from weft.engine.scheduling.budget import ALONE_S, GRAIN, SHARED_S, Budget
from weft.engine.scheduling.pages import PAGE
from weft.engine.scheduling.schedule import Row, Scheduler
from weft.engine.step import KeysAndValues, Stepper, Weights
from weft.engine.text import MAX_UNREAD, Full, Text, Unread, Wanted
from weft.errors import ConfigError, NotFinite
from weft.inference.sample import Sampling, generate
from weft.model.config import ModelConfig
from weft.model.flat import assemble
from weft.rng import stream


def made(
    num_pages: int = 48,
    max_running: int = 16,
    *,
    has_guesses: bool = True,
    draft: Draft | None = None,
    on_step: Callable[[int, int, float], None] = lambda *_: None,
    turns: Turns | None = None,
    steps: type[Stepper] = Stepper,
) -> Engine:
    weights = Weights(CONFIG, vector_of(CONFIG), "fp32")
    return Engine(
        steps(weights, KeysAndValues(CONFIG, num_pages, CPU, "fp32")),
        vocab_size=CONFIG.vocab_size,
        context=CONFIG.max_seq_len,
        num_pages=num_pages,
        max_running=max_running,
        has_guesses=has_guesses,
        draft=draft,
        on_step=on_step,
        turns=turns,
    )


DRAFT = msgspec.structs.replace(CONFIG, vocab_size=100, num_layers=1)


def draft_of(config: ModelConfig = CONFIG, num_pages: int = 48, factor: float = 1.0) -> Draft:
    """Return a draft model: the model itself, or one that is nothing like it."""
    kept = KeysAndValues(config, num_pages, CPU, "fp32")
    return Draft(Stepper(Weights(config, vector_of(config) * factor, "fp32"), kept), CONFIG.vocab_size)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = made()
    yield engine
    engine.close()


def wanted(prompt: list[int], num: int = 12, seed: int = 0, temperature: float = 0.0, **options: object) -> Wanted:
    drawing = Drawing(temperature=temperature, seed=bytes([seed]) * 32)
    return Wanted("key", tuple(prompt), num, drawing, **options)  # type: ignore[arg-type]


async def whole(text: Text) -> list[int]:
    return [drawn.token async for drawn in text]


PROMPTS = [text_of(num, seed) for seed, num in enumerate((1, 5, 63, 64, 65, 130, 200, 300))]


@pytest.mark.full
async def test_greedy_texts_made_together_are_those_of_generate(engine: Engine) -> None:
    model = assemble(CONFIG, vector_of(CONFIG))
    sampling = Sampling(max_new_tokens=12, temperature=0.0)
    alone = [list(generate(model, prompt, sampling, stream(0, "unused"))) for prompt in PROMPTS]
    texts = [engine.begin(wanted(prompt)) for prompt in PROMPTS]
    assert await asyncio.gather(*map(whole, texts)) == alone
    assert {text.ended for text in texts} == {"length"}


async def test_what_is_drawn_depends_on_seed_and_text_alone(engine: Engine) -> None:
    asked = [wanted(prompt, seed=number, temperature=0.9) for number, prompt in enumerate(PROMPTS)]
    together = await asyncio.gather(*(whole(engine.begin(each)) for each in asked))
    assert [await whole(engine.begin(each)) for each in reversed(asked)] == together[::-1]
    other = await whole(engine.begin(wanted(PROMPTS[3], seed=99, temperature=0.9)))
    assert other != together[3]


async def test_texts_that_give_up_their_pages_are_the_same() -> None:
    plenty, few = made(has_guesses=False), made(num_pages=7, has_guesses=False)
    try:
        asked = [wanted(text_of(100, seed), num=60, seed=seed, temperature=0.8) for seed in range(4)]
        expected = await asyncio.gather(*(whole(plenty.begin(each)) for each in asked))
        assert await asyncio.gather(*(whole(few.begin(each)) for each in asked)) == expected
        assert few.totals.num_yielded > 0
        assert plenty.totals.num_yielded == 0
    finally:
        plenty.close()
        few.close()


REPEATED = [*(text_of(7, 1) * 9), *text_of(40, 2), *(text_of(5, 3) * 8)]


def asked_with(prompt: list[int], seed: int, temperature: float, num: int = 60) -> Wanted:
    """Return a text that is drawn in an odd way, for each seed another."""
    drawing = Drawing(
        temperature=temperature,
        seed=bytes([seed]) * 32,
        top_p=0.9 if seed % 3 == 1 else 1.0,
        presence=0.5 if seed % 3 == 2 else 0.0,
        bias={prompt[0]: 8.0, prompt[1]: 7.0},  # so likely that texts repeat themselves
        num_likeliest=2,
    )
    return Wanted("key", tuple(prompt), num, drawing, stop_ids=(3,) if seed % 2 else ())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("num_pages", [48, 9])
async def test_texts_are_the_same_with_guesses_and_without(
    temperature: float, num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.engine.scheduling.pace.Pace.row_share", lambda _pace, _num: 0.1)
    drawn, totals = {}, {}
    for has_guesses in (True, False):
        engine = made(num_pages, has_guesses=has_guesses)
        try:
            asked = [asked_with(each, seed, temperature) for seed, each in enumerate((REPEATED, *PROMPTS[1:7]))]
            texts = [engine.begin(each) for each in asked]
            found = await asyncio.gather(*(told(text) for text in texts))
            drawn[has_guesses] = [
                ([each.token for each in some], text.ended) for some, text in zip(found, texts, strict=True)
            ]
            probable = [each.logprob for some in found for each in some]
            await whole(engine.begin(wanted([1], num=1)))
            totals[has_guesses] = engine.totals
            assert engine.totals.num_held == 0
        finally:
            engine.close()
        assert len(probable) == sum(len(some) for some, _ in drawn[has_guesses])
    assert drawn[True] == drawn[False]
    assert (totals[False].num_guessed, totals[False].num_guesses) == (0, 0)
    assert totals[True].num_guessed >= totals[True].num_right > 20
    assert totals[True].num_steps < totals[False].num_steps or num_pages < 48
    assert totals[True].num_drawn == totals[False].num_drawn


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_fifty_texts_are_the_same_with_guesses_and_without(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.engine.scheduling.pace.Pace.row_share", lambda _pace, _num: 0.1)
    drawn = {}
    for has_guesses in (True, False):
        engine = made(48, has_guesses=has_guesses)
        try:
            asked = [asked_with(REPEATED[seed:] + PROMPTS[1 + seed % 7], seed, temperature) for seed in range(50)]
            drawn[has_guesses] = [[each.token for each in await told(engine.begin(one))] for one in asked]
            num_right = engine.totals.num_right
        finally:
            engine.close()
        assert (num_right > 200) == has_guesses
    assert drawn[True] == drawn[False]


@pytest.mark.parametrize("config", [CONFIG, DRAFT], ids=["itself", "another"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("num_pages", [48, 9])
async def test_texts_are_the_same_with_a_draft_model_and_without(
    config: ModelConfig, temperature: float, num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.engine.scheduling.pace.Pace.row_share", lambda _pace, _num: 0.05)
    monkeypatch.setattr(Draft, "step_s", lambda _draft, _num: 0.0)
    drawn, totals = {}, {}
    for draft in (draft_of(config, num_pages), None):
        engine = made(num_pages, draft=draft)
        try:
            asked = [asked_with(each, seed, temperature) for seed, each in enumerate(PROMPTS[1:8])]
            asked = [replace(each, drawing=replace(each.drawing, bias={})) for each in asked]  # little repeats itself
            texts = [engine.begin(each) for each in asked]
            found = await asyncio.gather(*(told(text) for text in texts))
            drawn[draft is None] = [[each.token for each in some] for some in found]
            await whole(engine.begin(wanted([1], num=1)))
            totals[draft is None] = engine.totals
            assert engine.totals.num_held == 0
        finally:
            engine.close()
    assert drawn[False] == drawn[True]
    assert totals[False].num_drawn == totals[True].num_drawn
    if num_pages == 48:
        assert totals[False].num_guessed > totals[True].num_guessed, "the draft model guessed"
    if config is CONFIG and num_pages == 48:
        assert totals[False].num_right > 0.7 * totals[False].num_guessed > 100
        assert totals[False].num_steps < 0.6 * totals[True].num_steps


async def test_a_draft_model_has_read_what_others_take_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It guesses as well for who shares pages as for who filled them, whether guesses paid then or not."""
    monkeypatch.setattr(Draft, "step_s", lambda _draft, _num: 0.0)
    shares = iter([1.0] * 60)  # at first no guess pays
    monkeypatch.setattr("weft.engine.scheduling.pace.Pace.row_share", lambda _pace, _num: next(shares, 0.0))
    engine, prompt = made(draft=draft_of()), text_of(PAGE + 9, 1)
    try:
        answer = await whole(engine.begin(wanted(prompt, num=60, salt=b"one")))
        before = engine.totals.num_guessed
        text = engine.begin(wanted(prompt + answer + [5], num=30, salt=b"one"))
        await whole(text)
        assert text.num_shared == 2 * PAGE
        assert before <= 1
        assert engine.totals.num_right - before == engine.totals.num_guessed - before > 20
    finally:
        engine.close()


async def test_a_draft_model_that_is_broken_ends_a_text_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Draft, "step_s", lambda _draft, _num: 0.0)
    engine = made(draft=draft_of(DRAFT, factor=float("nan")))
    try:
        with pytest.raises(NotFinite, match="draft model"):
            await whole(engine.begin(wanted(text_of(30, 1), num=30)))
        assert engine.totals.num_held == 0
    finally:
        engine.close()


async def test_beside_a_draft_model_means_are_made_and_share_their_pages() -> None:
    engine, prompt = made(draft=draft_of()), text_of(PAGE + 9, 1)
    try:
        mean = engine.begin(wanted(prompt, num=1, salt=b"one", is_mean=True))
        assert await whole(mean) == []
        torch.testing.assert_close(torch.from_numpy(mean.mean), mean_of(prompt), rtol=1e-4, atol=1e-4)
        text = engine.begin(wanted(prompt, num=4, salt=b"one"))
        assert (len(await whole(text)), text.num_shared) == (4, PAGE)
    finally:
        engine.close()


async def told(text: Text) -> list[Drawn]:
    return [drawn async for drawn in text]


async def test_a_grammar_follows_what_is_guessed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.engine.scheduling.pace.Pace.row_share", lambda _pace, _num: 0.1)
    prompt = [5, 3, 8, 5, 3, 8, 5, 3, 8]
    text = engine.begin(wanted(prompt, num=30, constraint=Only(*[5, 3, 8] * 4, 9)))
    assert await whole(text) == [*[5, 3, 8] * 4, 9]
    assert text.ended == "stop"
    assert engine.totals.num_right > 6


async def test_where_pages_are_few_nothing_is_guessed_into_those_that_others_need() -> None:
    engine = made(num_pages=2)
    try:
        text = engine.begin(wanted([7] * (PAGE - 2), num=PAGE))
        assert len(await whole(text)) == PAGE
        assert engine.totals.num_yielded == 0
    finally:
        engine.close()


async def test_a_prompt_that_begins_like_another_is_read_once(engine: Engine) -> None:
    prompt = text_of(4 * PAGE + 3, 1)
    await whole(engine.begin(wanted(prompt, salt=b"one")))
    second = engine.begin(wanted(prompt, salt=b"one"))
    assert await whole(second) == await whole(third := engine.begin(wanted(prompt, salt=b"two")))
    assert (second.num_shared, third.num_shared) == (4 * PAGE, 0)


def mean_of(prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return assemble(CONFIG, vector_of(CONFIG)).features(torch.tensor([prompt]), None)[0].mean(0)


async def test_a_text_is_under_way_with_each_piece_of_its_prompt() -> None:
    busy = list[float]()
    engine = made(on_step=lambda *_: busy.append(text.busy_s))
    try:
        text = engine.begin(wanted(text_of(300, 7), 1))
        assert len(await whole(text)) == 1
    finally:
        engine.close()
    assert len(busy) > 1
    assert 0 < busy[0] < busy[-1] <= text.came_s


async def test_a_mean_of_hidden_states_is_that_of_the_model_beside_texts_that_are_drawn(engine: Engine) -> None:
    drawn = [wanted(prompt, seed=number, temperature=0.9) for number, prompt in enumerate(PROMPTS)]
    alone = await asyncio.gather(*(whole(engine.begin(each)) for each in drawn))
    means = [engine.begin(wanted(prompt, num=1, salt=b"%d" % len(prompt), is_mean=True)) for prompt in PROMPTS]
    *texts, nothing = await asyncio.gather(*(whole(engine.begin(each)) for each in drawn), whole(means[0]))
    assert (texts, nothing) == (alone, [])
    for text, prompt in zip(means, PROMPTS, strict=True):
        assert await whole(text) == []
        assert text.ended == "stop"
        torch.testing.assert_close(torch.from_numpy(text.mean), mean_of(prompt), rtol=1e-4, atol=1e-4)
    assert engine.totals.num_held == 0


@pytest.mark.full
async def test_a_mean_that_gives_up_its_pages_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def readable(budget: Budget, _start: int) -> int:
        return (64 if budget._least == GRAIN else 999) - budget._num_taken

    monkeypatch.setattr(Budget, "readable", readable)
    prompt, num_yielded = text_of(500, 3), 0
    for _ in range(8):  # whether it has to rests on which step each begins in
        few = made(num_pages=14, has_guesses=False)
        try:
            texts = [
                few.begin(replace(wanted(text_of(num, num), num=70), key=key)) for key, num in (("a", 191), ("b", 127))
            ]
            mean = few.begin(wanted(prompt, num=1, salt=b"its own", is_mean=True))
            assert [len(each) for each in await asyncio.gather(*map(whole, [*texts, mean]))] == [70, 70, 0]
            torch.testing.assert_close(torch.from_numpy(mean.mean), mean_of(prompt), rtol=1e-4, atol=1e-4)
            num_yielded += few.totals.num_yielded
        finally:
            few.close()
        if num_yielded:
            return
    raise AssertionError("it never had to")


async def test_a_mean_whose_tokens_are_found_again_is_read_anew(engine: Engine) -> None:
    engine.close()  # its thread; what is called here is called from nowhere else
    text = Text(wanted(text_of(300, 1), salt=b"its own", is_mean=True), engine._cancel, engine._go_on, engine.clock)
    engine._open(text)
    (row,) = engine._schedule.plan()
    engine._by_text[text].num_summed = 192
    assert engine._reads_on(row)
    for start, is_read in ((192, True), (64, False)):
        assert engine._reads_on(replace(row, start=start)) == is_read
    assert (row.sequence.salt, row.sequence.pages, engine._schedule.num_waiting) == (b"its own+", [], 1)


async def test_who_is_cancelled_leaves_no_page(engine: Engine) -> None:
    text = engine.begin(wanted(PROMPTS[5], num=300))
    async for _ in text:
        text.cancel()
        break
    rest = [drawn async for drawn in text]
    assert text.ended == "cancelled"
    assert len(rest) < 250
    await whole(engine.begin(wanted([1], num=1)))
    assert engine.totals.num_held == 0
    assert engine.totals.num_running == 0


async def test_a_token_that_ends_a_text_is_not_in_it(engine: Engine) -> None:
    long = await whole(engine.begin(wanted(PROMPTS[2])))
    text = engine.begin(wanted(PROMPTS[2], stop_ids=(long[5],)))
    assert await whole(text) == long[: long.index(long[5])]
    assert text.ended == "stop"


async def test_what_cannot_be_begun_is_refused(engine: Engine) -> None:
    for prompt, said in (
        ([], "is empty"),
        ([CONFIG.vocab_size], f"token {CONFIG.vocab_size} is outside"),
        ([1] * CONFIG.max_seq_len, f"maximum context length is {CONFIG.max_seq_len} tokens"),
    ):
        with pytest.raises(ConfigError, match=said):
            engine.begin(wanted(prompt))


async def test_a_text_ends_where_the_context_does(engine: Engine) -> None:
    text = engine.begin(wanted([1] * (CONFIG.max_seq_len - 5), num=100))
    assert len(await whole(text)) == 5
    assert text.ended == "length"


async def begin_without_end(engine: Engine, texts: list[Text]) -> None:
    while True:
        texts.append(engine.begin(wanted([1], num=400)))
        await asyncio.sleep(0.001)  # a thread counts them


async def test_more_than_can_wait_are_told_when_to_come_back() -> None:
    engine = made(max_running=1)
    try:
        texts = list[Text]()
        with pytest.raises(Full) as refused:
            await begin_without_end(engine, texts)
        assert len(texts) >= MAX_WAITING
        assert refused.value.retry_s >= 1
    finally:
        engine.close()
    assert {await ending(text) for text in texts} <= {"cancelled", "length"}


async def ending(text: Text) -> str | None:
    await whole(text)
    return text.ended


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_who_has_most_texts_waiting_makes_way_for_others() -> None:
    steps = threading.Semaphore(0)

    def wait(*_: float) -> None:
        steps.acquire()

    engine = made(max_running=1, on_step=wait)
    try:
        texts = [engine.begin(wanted([1], num=400))]
        steps.release()
        await until(lambda: engine.totals.num_running == 1)
        texts += [engine.begin(wanted([1], num=400)) for _ in range(MAX_WAITING)]
        steps.release(2)  # in the first of them they come in, at the end of the second they are counted
        await until(lambda: engine.totals.num_waiting == MAX_WAITING)
        with pytest.raises(Full):
            engine.begin(wanted([1]))
        with pytest.raises(Full):  # nobody makes way for some of those that do not all find places
            engine.begin(replace(wanted([1], num=3), key="other"), num_more=MAX_WAITING)
        other = engine.begin(replace(wanted([1], num=3), key="other"))
        steps.release(10_000)
        youngest = texts[-1]
        with pytest.raises(Full):
            await whole(youngest)
        for each in texts:
            each.cancel()
        assert len(await whole(other)) == 3
    finally:
        steps.release(10_000)
        engine.close()


async def test_of_who_is_asked_less_a_full_queue_takes_fewer() -> None:
    engine = made(max_running=1)
    try:
        texts = [
            engine.begin(replace(wanted([1], num=400), key=f"key {each // 2}")) for each in range(MAX_WAITING // 2)
        ]
        await until(lambda: engine.totals.num_waiting >= MAX_WAITING // 2 - 1)
        with pytest.raises(Full):
            engine.begin(replace(wanted([1]), key="low", room=0.25))
        texts.append(engine.begin(replace(wanted([1]), key="normal", room=0.75)))
    finally:
        engine.close()
    assert {await ending(text) for text in texts} <= {"cancelled", "length"}


async def test_a_text_that_nobody_reads_waits_and_is_then_what_it_would_have_been(engine: Engine) -> None:
    asked = wanted(PROMPTS[2], num=300, temperature=0.9)
    expected = await whole(engine.begin(asked))
    text, twin = engine.begin(asked), engine.begin(asked)
    first = await anext(text)
    await until(lambda: engine.totals.num_behind == 2)
    num_steps = engine.totals.num_steps
    assert (engine.totals.num_running, engine.totals.num_waiting, engine.totals.num_held) == (0, 0, 0)
    assert len(await whole(engine.begin(wanted(PROMPTS[0], num=5)))) == 5
    assert engine.totals.num_steps <= num_steps + 5
    assert engine.totals.num_behind == 2
    assert [first.token, *await whole(text)] == expected
    twin.cancel()
    assert len(await whole(twin)) < MAX_UNREAD + 20
    await until(lambda: engine.totals.num_behind == 0)


async def test_of_too_many_texts_that_nobody_reads_the_first_of_who_has_most_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weft.engine.engine.MAX_BEHIND", 2)
    engine = made()
    try:
        texts = list[Text]()
        for key, prompt in zip(("one", "many", "many", "many"), PROMPTS, strict=False):
            num_drawn = engine.totals.num_drawn + MAX_UNREAD
            texts.append(engine.begin(replace(wanted(prompt, num=300), key=key)))
            await until(lambda: engine.totals.num_drawn >= num_drawn)  # noqa: B023
            await until(lambda: not engine.totals.num_running)
        assert engine.totals.num_behind == 2
        for text in texts[1:3]:
            with pytest.raises(Unread):
                await whole(text)
        assert [len(await whole(text)) for text in texts[::3]] == [300, 300]
    finally:
        engine.close()


class Only:
    """Allows some tokens in turn, then nothing."""

    def __init__(self, *tokens: int) -> None:
        self._left = list(tokens)

    def allowed(self) -> NDArray[np.bool_]:
        mask = np.zeros(CONFIG.vocab_size, dtype=bool)
        mask[self._left[:1]] = True
        return mask

    def take(self, token: int) -> None:
        assert self._left.pop(0) == token


async def test_a_grammar_decides_what_may_follow(engine: Engine) -> None:
    text = engine.begin(wanted(PROMPTS[1], constraint=Only(5, 3, 8)))
    assert await whole(text) == [5, 3, 8]
    assert text.ended == "stop"


class Broken(Only):
    def take(self, token: int) -> None:
        raise NotFinite("broken")


async def test_what_fails_for_one_text_fails_for_no_other(engine: Engine) -> None:
    bad, good = engine.begin(wanted(PROMPTS[1], constraint=Broken(5))), engine.begin(wanted(PROMPTS[2]))
    with pytest.raises(NotFinite):
        await whole(bad)
    assert len(await whole(good)) == 12


async def test_a_text_that_begins_while_the_engine_ends_is_cancelled(engine: Engine) -> None:
    asked: Any = engine._asked

    class Late:
        """What closes the engine just before it is asked."""

        @staticmethod
        def put(each: Callable[[], None]) -> None:
            engine._asked = asked
            engine.close()
            asked.put(each)

    engine._asked = Late()  # type: ignore[assignment]
    text = engine.begin(wanted(PROMPTS[1]))
    async with asyncio.timeout(60):
        assert await whole(text) == []
    assert text.ended == "cancelled"


# --- several engines of one device ---


async def test_turns_are_taken_in_the_order_in_which_they_were_asked_for() -> None:
    models, had = Turns(), list[str]()
    paths = Turns(models)  # of one model

    def take(name: str, turns: Turns) -> None:
        with turns:
            had.append(name)

    threads = list[threading.Thread]()
    with models:
        for name, turns, num_paths, num_models in (
            ("a path", paths, 1, 2),
            ("another path", paths, 2, 2),
            ("a model", models, 2, 3),
        ):
            threads.append(threading.Thread(target=take, args=(name, turns), daemon=True))
            threads[-1].start()
            await until(lambda: (len(paths._line), len(models._line)) == (num_paths, num_models))  # noqa: B023
        assert not had
    await until(lambda: len(had) == len(threads))
    assert had == ["a path", "a model", "another path"]  # those of one model stand in line as one
    with pytest.raises(NotFinite), paths:
        raise NotFinite("a step that fails")
    take("after a fault", paths)


async def test_engines_that_share_turns_step_one_at_a_time_and_draw_what_each_draws_alone(engine: Engine) -> None:
    turns, begun, goes_on = Turns(), list[Stepper](), threading.Event()

    class Gated(Stepper):
        def step(self, pieces: Any) -> torch.Tensor:
            begun.append(self)
            goes_on.wait(60)
            return super().step(pieces)

    engines = [made(turns=turns, steps=Gated) for _ in range(2)]
    try:
        texts = [each.begin(wanted(PROMPTS[2])) for each in engines]
        await until(lambda: len(turns._line) == 2)
        assert len(begun) == 1, "the other waits for its turn"
        goes_on.set()
        assert [await whole(text) for text in texts] == 2 * [await whole(engine.begin(wanted(PROMPTS[2])))]
        assert len(set(map(id, begun))) == 2
    finally:
        goes_on.set()
        for each in engines:
            each.close()


async def test_engines_that_share_turns_end_together_after_one_step_of_each() -> None:
    turns, begun, goes_on = Turns(), list[Stepper](), threading.Event()

    class Gated(Stepper):
        def step(self, pieces: Any) -> torch.Tensor:
            begun.append(self)
            goes_on.wait(60)
            return super().step(pieces)

    engines = [made(turns=turns, steps=Gated) for _ in range(3)]
    closing = threading.Thread(target=close_all, args=(engines,), daemon=True)
    try:
        texts = [each.begin(wanted(PROMPTS[2], num=100)) for each in engines]
        await until(lambda: len(turns._line) == len(engines))
        closing.start()
        await until(lambda: not any(each._asked.empty() for each in engines))
    finally:
        goes_on.set()
        closing.join(60)
    assert len(begun) == len(engines), "no text goes on while others are to end"
    for text in texts:
        await whole(text)
        assert text.ended == "cancelled"
    close_all([])


async def test_prompts_are_read_for_a_shorter_time_while_others_wait_for_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Turns()
    engine, asked, plan = made(turns=Turns(device)), list[float](), Scheduler.plan

    def asking(self: Scheduler, alone_s: float) -> list[Row]:
        asked.append(alone_s)
        return plan(self, alone_s)

    monkeypatch.setattr(Scheduler, "plan", asking)
    try:
        await whole(engine.begin(wanted(PROMPTS[3], num=1)))
        with device:  # another model computes
            num = len(asked)
            text = engine.begin(wanted(PROMPTS[4], num=1))
            await until(lambda: len(asked) > num)
        await whole(text)
        assert set(asked[:num]) == {ALONE_S}
        assert asked[num] == SHARED_S
    finally:
        engine.close()
