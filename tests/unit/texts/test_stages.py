"""Texts that stages compute together are those of the whole model, whoever dies meanwhile, and when."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from unit.engine.test_step import CONFIG, CPU, text_of, vector_of
from unit.texts.stages import Served, drawn_by_the_whole, drawn_of, of_the_whole, tokens_of, wanted
from weft.codec.config import Int8Config
from weft.codec.dense import Bf16
from weft.engine.step import KeysAndValues, Weights
from weft.engine.text import Full, Text, Unread, Wanted
from weft.errors import ConfigError
from weft.events import TextChanged, TextMoved
from weft.ids import PeerId, short
from weft.model.flat import cut
from weft.model.sections import sections
from weft.pipeline.routing import Failure
from weft.texts import member, outbox
from weft.texts.asking import under_way
from weft.texts.asking.entry import WAIT_S
from weft.texts.asking.no_path import NoPath
from weft.texts.asking.patience import MOST_S
from weft.texts.asking.under_way import ANYWAY_S, TextOfMembers
from weft.texts.member import Member
from weft.texts.section import Section

PROMPT = text_of(70, 1)


def test_texts_of_unequal_length_at_once_are_those_of_the_whole_model() -> None:
    asked = [wanted(text_of(num, num), 6, temperature) for num, temperature in ((1, 0.0), (65, 0.0), (130, 0.8))]
    expected = of_the_whole(*asked)
    served = Served()

    async def play() -> None:
        texts = [served.entry.begin(each) for each in asked]
        assert await asyncio.gather(*map(tokens_of, texts)) == expected
        assert {text.ended for text in texts} == {"length"}
        await asyncio.sleep(1)
        assert [(each.num_texts, each.num_held) for each in served.members] == [(0, 0)] * 6
        assert not [event for event in served.events if isinstance(event, TextMoved)]

    served.run(play)


async def until_drawn(served: Served, text: Text, num: int) -> list[int]:
    """Return the first tokens of a text; with none, wait until all members have begun to read."""
    found: list[int] = []
    while not num and not any(each.num_texts for each in served.members):  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(0.001)
    while len(found) < num:
        found.append((await anext(text)).token)
    return found


async def until_running(served: Served) -> None:
    """Wait until all members of the only text's path have answered."""
    (under,) = served.entry._under_way.values()
    while under._state is None or under._state.phase != "running":  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(0.001)


@contextmanager
def of_whom_nothing_is_heard(served: Served, peer: PeerId) -> Iterator[None]:
    """Let nothing come from a peer or to it; its links stay up."""
    others = [each for each in served.nodes if each != peer]
    for each in others:
        served.network.partition(each, peer)
    yield
    for each in others:
        served.network.heal(each, peer)


@pytest.mark.full
@pytest.mark.parametrize("num", [0, 1, pytest.param(5, marks=pytest.mark.slow), 64])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_text_goes_on_the_same_after_a_member_of_its_path_has_died(stage: int, num: int) -> None:
    asked = wanted(PROMPT, 70, temperature=0.8)
    (expected,) = of_the_whole(asked)
    served = Served()

    async def play() -> None:
        text = served.entry.begin(asked)
        found = await until_drawn(served, text, num)
        served.kill(stage)
        assert found + await tokens_of(text) == expected
        assert [event.stage for event in served.events if isinstance(event, TextMoved)] == [stage]

    served.run(play)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_text_says_whom_it_has_come_by_and_who_went_on_in_whose_place(stage: int) -> None:
    served = Served(has_guesses=False)  # else it may be over before one dies

    async def play() -> None:
        text = served.entry.begin(wanted(PROMPT, 12))
        assert isinstance(text, TextOfMembers)
        moved = list[int]()
        text.on_moved = lambda: moved.append(text.course.num_mends)
        await until_running(served)
        assert text.busy_s > served.entry.clock.now()
        before = served.path()
        while text.course.num_changes < 1 or served.entry.totals.num_drawn < 5:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.001)
        num_drawn = served.entry.totals.num_drawn
        began = served.clock.now()
        served.kill(stage)
        while text.course.num_mends < 1:  # noqa: ASYNC110  # likewise
            await asyncio.sleep(0.001)
        after = served.path()
        await tokens_of(text)
        told = text.course.tree()
        assert told["members"] == list(map(short, after))
        assert told["rounds"] == [{"round": 0, "after_tokens": 0}]
        (mend,) = told["mends"]
        assert 0 < mend.pop("pause_s") < served.clock.now() - began + 1
        assert mend.pop("after_tokens") in (num_drawn, num_drawn + 1)  # one was under way
        changed = {"before": short(before[stage]), "member": short(after[stage])}
        assert mend == {"stage": stage + 1, "why": "parted"} | changed
        assert before[stage] != after[stage]
        assert moved == [0, 1]

    served.run(play)


def test_a_text_goes_on_the_same_after_one_has_died_of_which_no_more_is_heard() -> None:
    """Its links stay up: nothing comes any more."""
    asked = wanted(PROMPT, 12)
    (expected,) = of_the_whole(asked)
    served = Served(has_guesses=False)

    async def play() -> None:
        text = served.entry.begin(asked)
        found = await until_drawn(served, text, 5)
        dying = served.path()[1]
        with of_whom_nothing_is_heard(served, dying):
            began = served.clock.now()
            assert found + await tokens_of(text) == expected
            assert served.clock.now() - began < 3.0
            assert isinstance(text, TextOfMembers)
            (mend,) = text.course.mends
            assert (mend.stage, mend.before, mend.why) == (1, dying, "silent")

    served.run(play)


def test_silence_is_noticed_in_time_however_slow_members_say_they_are() -> None:
    asked = wanted(PROMPT, 3)
    (expected,) = of_the_whole(asked)
    served = Served()

    async def play() -> None:
        for each in served.members:
            each._pace.note(0, 1, 100.0)
        await asyncio.sleep(member.NEWS_S)
        text = served.entry.begin(asked)
        await until_running(served)
        dying = served.path()[1]
        with of_whom_nothing_is_heard(served, dying):
            began = served.clock.now()
            assert await tokens_of(text) == expected
            assert served.clock.now() - began < 1.5 * MOST_S

    served.run(play)


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_prompt_is_read_on_after_a_member_has_died(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (member, outbox):
        monkeypatch.setattr(each, "MAX_PIECE", 64)
    monkeypatch.setattr(outbox, "MAX_INLINE_NBYTES", 8 << 10)  # and what is longer is fetched
    asked = wanted(text_of(400, 3), 8)
    (expected,) = of_the_whole(asked)
    served = Served()

    async def play() -> None:
        text = served.entry.begin(asked)
        await asyncio.sleep(0.06)
        computing = [each for each in served.members if served.peer(each) == served.path()[stage]]
        assert computing[0].num_texts == 1
        assert not served.entry._under_way or not next(iter(served.entry._under_way.values())).has_drawn
        served.kill(stage)
        assert await tokens_of(text) == expected

    served.run(play)


@pytest.mark.full
def test_neighbours_that_die_together_are_both_replaced() -> None:
    asked = wanted(PROMPT, 20)
    (expected,) = of_the_whole(asked)
    served = Served()

    async def play() -> None:
        text = served.entry.begin(asked)
        found = await until_drawn(served, text, 5)
        path = served.path()
        served.kill_peer(path[0])
        served.kill_peer(path[1])
        assert found + await tokens_of(text) == expected

    served.run(play)


@pytest.mark.full
def test_a_log_without_room_is_made_up_for_by_computing_again() -> None:
    asked = wanted(PROMPT, 20)
    (expected,) = of_the_whole(asked)
    served = Served(log_nbytes=1024)

    async def play() -> None:
        text = served.entry.begin(asked)
        found = await until_drawn(served, text, 10)
        served.kill(2)
        assert found + await tokens_of(text) == expected

    served.run(play)


def test_a_stage_that_has_nobody_left_ends_a_text_in_an_error() -> None:
    served = Served((1, 1), wait_s=2.0)

    async def play() -> None:
        text = served.entry.begin(wanted(PROMPT, 20))
        await until_drawn(served, text, 3)
        served.kill(1)
        with pytest.raises(NoPath, match="Nobody serves stage 2 of 2"):
            await tokens_of(text)
        assert text.ended == "cancelled"
        await asyncio.sleep(0.1)
        assert served.members[0].num_texts == 0

    served.run(play)


def test_the_only_member_of_a_stage_is_asked_though_it_is_passed_over() -> None:
    served = Served((1, 1))
    (expected,) = of_the_whole(asked := wanted(PROMPT, 8))

    async def play() -> None:
        slow = served.peer(served.members[1])
        for _ in range(6):
            served.entry.paths.failed(slow, Failure.UNREACHABLE, served.clock.now())
        began = served.clock.now()
        assert await tokens_of(served.entry.begin(asked)) == expected
        assert ANYWAY_S <= served.clock.now() - began < WAIT_S
        assert not served.entry.paths._barred(served.clock.now()), "it has answered"

    served.run(play)


def test_a_text_whose_only_member_stays_silent_ends_in_an_error() -> None:
    served = Served((1, 1))

    async def play() -> None:
        silent = served.peer(served.members[1])
        with of_whom_nothing_is_heard(served, silent):
            began = served.clock.now()
            with pytest.raises(NoPath, match=r"do not answer|Nobody serves stage 2 of 2"):
                await tokens_of(served.entry.begin(wanted(PROMPT, 8)))
            assert served.clock.now() - began < 3 * WAIT_S

    served.run(play)


def test_a_text_waits_for_a_member_that_says_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served((1, 1))
    (expected,) = of_the_whole(asked := wanted(PROMPT, 8))
    full_s = 4 * WAIT_S

    async def play() -> None:
        busy, began = served.members[1], served.clock.now()
        real = busy._begun
        monkeypatch.setattr(
            busy, "_begun", lambda *given: None if served.clock.now() - began < full_s else real(*given)
        )
        assert await tokens_of(served.entry.begin(asked)) == expected
        assert served.clock.now() - began >= full_s

    served.run(play)


def test_who_takes_over_is_passed_over_no_longer() -> None:
    served = Served((1, 2))

    async def play() -> None:
        text = served.entry.begin(wanted(PROMPT, 12))
        await until_drawn(served, text, 3)
        (other,) = {served.peer(each) for each in served.members[1:]} - {served.path()[1]}
        for _ in range(6):
            served.entry.paths.failed(other, Failure.UNREACHABLE, served.clock.now())
        served.kill(1)
        assert await tokens_of(text)
        assert not served.entry.paths._barred(served.clock.now())

    served.run(play)


def test_who_reads_no_longer_leaves_nothing_behind() -> None:
    served = Served((1, 1))

    async def play() -> None:
        text = served.entry.begin(wanted(PROMPT, 200))
        await until_drawn(served, text, 3)
        text.cancel()
        await tokens_of(text)
        assert text.ended == "cancelled"
        await asyncio.sleep(0.1)
        assert [(each.num_texts, each.num_held) for each in served.members] == [(0, 0)] * 2
        assert served.entry.totals.num_running == served.entry.totals.num_waiting == 0

    served.run(play)


def test_a_text_that_nobody_reads_rests_and_is_then_what_it_would_have_been() -> None:
    served = Served((1, 1))
    asked = wanted(PROMPT, 200)
    (expected,) = of_the_whole(asked)

    async def play() -> None:
        text = served.entry.begin(asked)
        first = await anext(text)
        await asyncio.sleep(20)
        totals = served.entry.totals
        assert (totals.num_running, totals.num_waiting, totals.num_behind) == (0, 0, 1)
        assert [(each.num_texts, each.num_held) for each in served.members] == [(0, 0)] * 2
        num_drawn = totals.num_drawn
        await asyncio.sleep(20)
        assert totals.num_drawn == num_drawn
        assert [first.token, *await tokens_of(text)] == expected
        assert totals.num_behind == 0

    served.run(play)


def test_of_too_many_texts_that_nobody_reads_the_first_ends_and_who_waits_most_makes_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weft.texts.asking.entry.MAX_BEHIND", 1)
    monkeypatch.setattr("weft.texts.asking.entry.MAX_WAITING", 2)
    served = Served((1, 1))

    async def play() -> None:
        texts = [served.entry.begin(wanted(PROMPT, 200)) for _ in range(2)]
        with pytest.raises(Full):
            served.entry.begin(wanted(PROMPT, 3))
        with pytest.raises(Full):  # there are no places for all three, so nobody makes way for the first
            served.entry.begin(replace(wanted(PROMPT, 3), key="other"), num_more=2)
        other = served.entry.begin(replace(wanted(PROMPT, 3), key="other"))
        assert len(await tokens_of(other)) == 3
        with pytest.raises(Full):
            await tokens_of(texts[1])
        texts[1] = served.entry.begin(wanted(PROMPT, 200))
        await asyncio.sleep(60)
        assert served.entry.totals.num_behind == 1
        ends = await asyncio.gather(*map(tokens_of, texts), return_exceptions=True)
        assert sorted(type(end) for end in ends if not isinstance(end, list)) == [Unread]
        assert [len(end) for end in ends if isinstance(end, list)] == [200]

    served.run(play)


def test_who_asks_and_dies_is_forgotten() -> None:
    served = Served((1, 1))

    async def play() -> None:
        text = served.entry.begin(wanted(PROMPT, 400))
        await until_drawn(served, text, 3)
        served.network.kill(served.entry.link.me)
        served.entry.tasks.cancel()
        await asyncio.sleep(90)
        assert [(each.num_texts, each.num_held) for each in served.members] == [(0, 0)] * 2

    served.run(play)


def test_a_prompt_that_begins_like_another_is_read_once() -> None:
    prompt = text_of(150, 5)
    served = Served((1, 1))

    async def play() -> None:
        first, second = (served.entry.begin(wanted(prompt, 3)) for _ in range(1)), None
        found = [await tokens_of(text) for text in first]
        second = served.entry.begin(wanted(prompt, 3))
        assert [await tokens_of(second)] == found
        assert second.num_shared == 128
        other = served.entry.begin(Wanted("key", tuple(prompt), 3, salt=b"another", drawing=wanted(prompt, 3).drawing))
        assert [await tokens_of(other)] == found
        assert other.num_shared == 0

    served.run(play)


def test_penalties_count_what_was_drawn_before_a_member_died() -> None:
    asked = wanted(PROMPT, 16, presence=1.0, repetition=1.3)
    (expected,) = of_the_whole(asked)
    assert expected != of_the_whole(wanted(PROMPT, 16))[0]
    served = Served((1, 2))

    async def play() -> None:
        text = served.entry.begin(asked)
        found = await until_drawn(served, text, 6)
        served.kill(1)
        assert found + await tokens_of(text) == expected

    served.run(play)


def test_exact_numbers_in_stages_are_those_of_the_whole_model_to_the_bit_whoever_dies() -> None:
    texts = [text_of(num, num) for num in (70, 65, 130)]
    asked = [wanted(text, 12, temperature=0.8, num_likeliest=20) for text in texts]
    expected = drawn_by_the_whole(*asked, kind="exact")
    served = Served((1, 2), kind="exact")

    async def play() -> None:
        begun = [served.entry.begin(each) for each in asked]
        found = [await anext(text) for text in begun]
        served.kill_peer(next(iter(served.entry._under_way.values())).peers[1])
        rest = await asyncio.gather(*map(drawn_of, begun))
        assert [[first, *others] for first, others in zip(found, rest, strict=True)] == expected

    served.run(play)


def test_exact_numbers_are_refused_where_activations_would_be_rounded() -> None:
    part = sections(CONFIG, 2)[0]
    weights = Weights(CONFIG, cut(CONFIG, vector_of(CONFIG), part), "exact", part)
    with pytest.raises(ConfigError, match="need activations in fp32"):
        Section(weights, KeysAndValues(CONFIG, 1, CPU, "exact", len(part.layers)), Bf16())


def test_activations_in_eight_bits_give_a_text() -> None:
    served = Served((1, 1), codec=Int8Config())

    async def play() -> None:
        assert len(await tokens_of(served.entry.begin(wanted(PROMPT, 8)))) == 8

    served.run(play)


def test_who_leaves_says_so_and_nobody_waits() -> None:
    asked = wanted(PROMPT, 12)
    (expected,) = of_the_whole(asked)
    served = Served((1, 2), has_guesses=False)  # else it may be over before

    async def play() -> None:
        text = served.entry.begin(asked)
        found = await until_drawn(served, text, 5)
        (leaving,) = [each for each in served.members if served.peer(each) == served.path()[1]]
        began = served.clock.now()
        await leaving.aclose()
        assert leaving.num_held == 0
        found.append((await anext(text)).token)
        assert served.clock.now() - began < 0.25  # sooner than anybody could have noticed
        assert found + await tokens_of(text) == expected

    served.run(play)


def test_a_text_keeps_its_weights_and_a_new_one_has_the_newest() -> None:
    prompt, other = text_of(70, 1), vector_of(CONFIG).flip(0)
    asked = wanted(prompt, 12)
    (old,), (new,) = of_the_whole(asked), of_the_whole(asked, vector=other)
    assert old != new
    served = Served((1, 1))

    async def play() -> None:
        text = served.entry.begin(asked)
        found = await until_drawn(served, text, 3)
        served.renew(1, other)
        await asyncio.sleep(0.02)
        assert await asyncio.gather(tokens_of(text), tokens_of(served.entry.begin(asked))) == [old[3:], new]
        third = served.entry.begin(asked)
        found = await until_drawn(served, third, 3)
        served.renew(2, vector_of(CONFIG))
        served.renew(3, vector_of(CONFIG))
        assert len(found + await tokens_of(third)) == 12

    served.run(play)


def renewed(served: Served, stage: int, number: int, round: int, vector: torch.Tensor) -> Member:
    """Let one member of a stage have a round's weights; return it."""
    at = [place for place, each in enumerate(served.members) if each.stage == stage][number]
    member = served.members[at]
    member.renew(round, served.section(stage, vector, served.kept[at]))
    return member


def test_a_text_waits_for_a_member_that_lags_and_stays_with_its_weights() -> None:
    other = vector_of(CONFIG).flip(0)
    asked = wanted(PROMPT, 12)
    (expected,) = of_the_whole(asked, vector=other)
    served = Served((1, 2))

    async def play() -> None:
        renewed(served, 0, 0, 1, other)
        renewed(served, 1, 0, 1, other)
        await asyncio.sleep(0.05)
        text = served.entry.begin(asked)
        found = await until_drawn(served, text, 3)
        served.kill(1)
        rest = asyncio.ensure_future(tokens_of(text))
        await asyncio.sleep(1.5)
        assert not rest.done()
        renewed(served, 1, 1, 1, other)
        assert found + await rest == expected
        assert not [event for event in served.events if isinstance(event, TextChanged)]

    served.run(play)


@pytest.mark.parametrize("have_some", [True, False])
def test_members_that_are_there_are_waited_for_until_they_have_weights_in_common(have_some: bool) -> None:
    other = vector_of(CONFIG).flip(0)
    served = Served((1, 2))

    async def play() -> None:
        renewed(served, 1, 1, 2, other).drop(0)
        await asyncio.sleep(0.05)
        text = served.entry.begin(wanted(PROMPT, 12))
        found = await until_drawn(served, text, 3)
        served.kill(1)
        rest, began = asyncio.ensure_future(tokens_of(text)), served.clock.now()
        await asyncio.sleep(1.5 * WAIT_S)
        assert not rest.done()
        if have_some:
            renewed(served, 0, 0, 2, other)
            assert len(found + await rest) == 12
            return
        with pytest.raises(NoPath):
            await rest
        assert served.clock.now() - began == pytest.approx(under_way.IN_COMMON * WAIT_S, abs=2.0)

    served.run(play)


@pytest.mark.parametrize("lags", [False, True])
def test_where_nobody_has_a_texts_weights_any_more_it_goes_on_with_others_and_that_is_told(lags: bool) -> None:
    other = vector_of(CONFIG).flip(0)
    served = Served((1, 2))

    async def play() -> None:
        renewed(served, 0, 0, 1, other)
        renewed(served, 1, 0, 1, other)
        await asyncio.sleep(0.05)
        text = served.entry.begin(wanted(PROMPT, 12))
        found = await until_drawn(served, text, 3)
        if not lags:
            renewed(served, 0, 0, 2, other)
            renewed(served, 1, 1, 2, other).drop(0)
        began = served.clock.now()
        served.kill(1)
        assert len(found + await tokens_of(text)) == 12
        (event,) = [event for event in served.events if isinstance(event, TextChanged)]
        assert (event.before, event.round, event.is_exact) == ((1, 0, True) if lags else (1, 2, True))
        assert isinstance(text, TextOfMembers)
        assert [each for each, _ in text.course.rounds] == [event.before, event.round]
        assert (served.clock.now() - began > under_way.STAY_S) is lags  # who lags is waited for

    served.run(play)


def test_a_member_without_two_versions_begins_texts_with_the_other_one() -> None:
    other = vector_of(CONFIG).flip(0)
    asked = wanted(PROMPT, 12)
    (old,) = of_the_whole(asked)
    served = Served((1, 1))

    async def play() -> None:
        served.renew(1, other)
        for each in served.members:
            each.drop(1)
        await asyncio.sleep(0.05)
        assert await tokens_of(served.entry.begin(asked)) == old
        await asyncio.sleep(0.1)  # it is closed
        assert [each.num_texts_of(0) for each in served.members] == [0, 0]

    served.run(play)


def test_what_stages_cannot_do_is_refused_at_once() -> None:
    served = Served((1, 1))

    async def play() -> None:
        with pytest.raises(ConfigError, match="is empty"):
            served.entry.begin(wanted([], 3))
        with pytest.raises(ConfigError, match="embeddings need the model on the machine that is asked"):
            served.entry.begin(Wanted("key", (1,), 1, is_mean=True))

    served.run(play)
