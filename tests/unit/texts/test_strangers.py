"""What those that merely can ask may do to a member, and to others' texts: little."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from unit.engine.test_step import CONFIG
from unit.texts.stages import Served, of_the_whole, tokens_of, wanted
from weft.engine.draw import Drawing
from weft.engine.scheduling.pages import PAGE
from weft.errors import WireError
from weft.pipeline.link import StageLink, parcel
from weft.texts.chain import chain_of, joined, key_of, places
from weft.texts.member import MAX_ROWS, Member
from weft.texts.messages import (
    MAX_STOP_IDS,
    CloseSequence,
    DrawnHow,
    OpenSequence,
    ReceiptWanted,
    ResumeSequence,
    RowsOfText,
    SequenceLost,
    SequenceOpened,
    TextRows,
    drawn_how,
    id_of,
)
from weft.texts.section import packed
from weft.texts.sequence import MAX_EARLY
from weft.wire import decode, encode

SECRET = bytes(range(16))
PROMPT = [each % CONFIG.vocab_size for each in range(20)]


def opening(stranger: StageLink, member: Member, **changed: Any) -> OpenSequence:
    """Return how a stranger opens a text in which it sends and takes all rows itself."""
    at = places(len(PROMPT))
    chain = chain_of(key_of(b"", 0), PROMPT)
    call = OpenSequence(
        sequence=id_of(stranger.me, SECRET),
        secret=SECRET,
        attempt=0,
        stage=member.stage,
        round=0,
        inward=stranger.me,
        onward=stranger.me,
        most=len(PROMPT) + 40,
        places=at,
        chain=joined([chain[place] for place in at]),
        key=key_of(b"", 0) if member.stage == 0 else None,
        drawing=None,
        tokens=b"",
        num_prompt=len(PROMPT),
        stop_ids=(),
    )
    return msgspec.structs.replace(call, **changed)


def named(stranger: StageLink, number: int) -> dict[str, bytes]:
    secret = number.to_bytes(16, "big")
    return {"sequence": id_of(stranger.me, secret), "secret": secret}


async def word(served: Served, stranger: StageLink, member: Member, call: OpenSequence) -> str:
    answer = await stranger.call(served.peer(member), call, SequenceOpened, deadline_s=5.0)
    return answer.word


def heard(stranger: StageLink) -> list[SequenceLost]:
    """Return a list that what the stranger is told of lost texts goes to."""
    found = list[SequenceLost]()

    async def hear(_peer: object, note: SequenceLost) -> None:
        found.append(note)

    stranger.on_note(SequenceLost, hear)
    return found


def test_nobody_opens_a_text_of_another() -> None:
    served = Served((1, 1), num_strangers=1)
    (right,) = of_the_whole(wanted(PROMPT, 30))

    async def play() -> None:
        text = served.entry.begin(wanted(PROMPT, 30))
        task = asyncio.ensure_future(tokens_of(text))
        await asyncio.sleep(0.2)
        (under,) = served.entry._under_way.values()
        (stranger,) = served.strangers
        for member in served.members:
            stolen = opening(stranger, member, sequence=under.id, secret=under._secret, attempt=9)
            assert await word(served, stranger, member, stolen) == "not here"
            await stranger.post(served.peer(member), CloseSequence(sequence=under.id, attempt=9, stage=member.stage))
        assert await task == right
        assert under._state is not None
        assert under._state.attempt == 0

    served.run(play)


def test_who_holds_all_pages_gives_some_up_for_somebody_elses_text() -> None:
    """A stranger's texts take all pages, and stay. Then somebody asks for a short one."""
    served = Served((1, 1), num_pages=24, num_strangers=1)
    asked = wanted(PROMPT, 30)
    (right,) = of_the_whole(asked)

    async def play() -> None:
        (stranger,) = served.strangers
        lost = heard(stranger)
        for member in served.members:
            number = 0
            while await word(served, stranger, member, opening(stranger, member, **named(stranger, number))) == "held":
                number += 1
            assert member.num_texts == number > 2
            assert member._pool.num_room == 0
        assert await tokens_of(served.entry.begin(asked)) == right
        assert {note.why for note in lost} == {"no room"}
        assert all(member.num_texts > 1 for member in served.members)  # it keeps what nobody else wants
        again = opening(stranger, served.members[0], **named(stranger, 99))
        assert await word(served, stranger, served.members[0], again) == "held"  # now that there is room

    served.run(play)


def test_an_old_text_of_who_holds_most_outlives_a_younger_one() -> None:
    served = Served((1,), num_pages=8, num_strangers=2)

    async def play() -> None:
        (member,) = served.members
        first, second = served.strangers
        lost = heard(first)
        calls = [opening(first, member, most=200, **named(first, number)) for number in range(2)]  # 4 pages each
        assert [await word(served, first, member, call) for call in calls] == ["held", "held"]
        assert await word(served, second, member, opening(second, member, most=200)) == "held"
        await asyncio.sleep(0.1)
        assert [note.sequence for note in lost] == [calls[1].sequence]
        other = opening(second, member, most=200, **named(second, 5))
        assert await word(served, second, member, other) == "busy"  # each has four pages

    served.run(play)


def test_who_holds_all_places_gives_some_up_for_somebody_elses_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.texts.member.MAX_HELD", 4)
    served = Served((1,), num_strangers=2)

    async def play() -> None:
        (one,), (first, second) = served.members, served.strangers
        lost = heard(first)
        calls = [opening(first, one, **named(first, number)) for number in range(5)]
        assert [await word(served, first, one, call) for call in calls] == [*["held"] * 4, "busy"]
        others = [opening(second, one, **named(second, number)) for number in range(3)]
        assert [await word(served, second, one, call) for call in others] == ["held", "held", "busy"]
        await asyncio.sleep(0.1)
        assert [(note.sequence, note.why) for note in lost] == [(calls[at].sequence, "no room") for at in (3, 2)]
        assert one.num_texts == 4
        one._pool.check()

    served.run(play)


def test_texts_that_merely_lie_there_take_no_rows_of_a_step_from_others() -> None:
    """A stranger opens texts, and keeps them without a row. Somebody else's text is guessed ahead all the same."""
    served = Served((1, 1), num_pages=90, num_strangers=1)
    asked = wanted([1, 2, 3, 4, 5] * 8, 60, bias={each: 100.0 - each for each in (1, 2, 3)})
    (right,) = of_the_whole(asked)

    async def play() -> None:
        (stranger,), first = served.strangers, served.members[0]
        calls = [opening(stranger, first, **named(stranger, number)) for number in range(MAX_ROWS // 2 + 1)]
        assert {await word(served, stranger, first, call) for call in calls} == {"held"}
        text = served.entry.begin(asked)
        found = [(await anext(text)).token for _ in range(40)]
        (under,) = served.entry._under_way.values()
        ours = first._texts[under.id]
        assert ours.guessed._guesses._num_tried > 4.0, "none was tried"
        assert first._num_rows_for(ours, served.clock.now()) == MAX_ROWS
        for each in first._texts.values():
            each.worked_s = served.clock.now()
        assert first._num_rows_for(ours, served.clock.now()) == MAX_ROWS // 2  # who asks has a half, for however many
        assert found + await tokens_of(text) == right

    served.run(play)


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("a bias outside the vocabulary", {"drawing": drawn_how(Drawing(bias={CONFIG.vocab_size: 1.0}))}),
    (
        "a token outside the vocabulary",
        {"drawing": drawn_how(Drawing(presence=1.0)), "tokens": packed([*PROMPT[:-1], CONFIG.vocab_size])},
    ),
]


@pytest.mark.parametrize(("_what", "changed"), WRONG, ids=[what for what, _ in WRONG])
def test_what_cannot_be_drawn_is_not_opened(_what: str, changed: dict[str, Any]) -> None:
    served = Served((1, 1), num_strangers=1)

    async def play() -> None:
        (stranger,), last = served.strangers, served.members[-1]
        assert await word(served, stranger, last, opening(stranger, last, **changed)) == "not here"
        assert last.num_texts == 0

    served.run(play)


MALFORMED: list[dict[str, Any]] = [
    {"most": len(PROMPT) - 1},
    {"num_prompt": len(PROMPT) + 1},
    {"places": tuple(range(2 * PAGE)), "chain": bytes(16) * 2 * PAGE, "most": 4 * PAGE, "num_prompt": 1},
    {"tokens": packed(PROMPT)},  # which nobody looks at
    {"drawing": drawn_how(Drawing(presence=1.0)), "tokens": packed(PROMPT[:-1])},
    {"stop_ids": tuple(range(MAX_STOP_IDS + 1))},
]


@pytest.mark.parametrize("changed", MALFORMED, ids=[" ".join(each) for each in MALFORMED])
def test_what_does_not_hold_together_is_refused_unread(changed: dict[str, Any]) -> None:
    served = Served((1,), num_strangers=1)

    async def play() -> None:
        (stranger,), (member,) = served.strangers, served.members
        call = opening(stranger, member)
        assert decode(encode(call), OpenSequence) == call
        for name, value in changed.items():
            msgspec.structs.force_setattr(call, name, value)
        with pytest.raises(WireError):
            decode(encode(call), OpenSequence)

    served.run(play)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence", "frequency", "repetition", "bias"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_no_number_that_makes_logits_infinite_is_taken(name: str, value: float) -> None:
    how = drawn_how(Drawing())
    msgspec.structs.force_setattr(how, name, ((3, value),) if name == "bias" else value)
    with pytest.raises(WireError):
        decode(encode(how), DrawnHow)


def test_no_repetition_penalty_makes_a_logit_infinite() -> None:
    how = drawn_how(Drawing())
    msgspec.structs.force_setattr(how, "repetition", 5e-324)
    with pytest.raises(WireError):
        decode(encode(how), DrawnHow)


def test_rows_that_no_text_told_of_are_not_kept() -> None:
    """A stranger opens a short text that may grow long, and sends more rows than there are pages for."""
    served = Served((1, 1), num_strangers=1)

    async def play() -> None:
        (stranger,), last = served.strangers, served.members[-1]
        lost = heard(stranger)
        call = opening(stranger, last, most=CONFIG.max_seq_len * 100)
        assert await word(served, stranger, last, call) == "held"
        (text,) = last._texts.values()
        num = (len(text.pages) + 5) * PAGE
        row = served.codec.nbytes(CONFIG.width)
        given = parcel(bytes(512 * row))
        stranger.give(given)
        chain = joined([bytes([number % 256]) * 16 for number in range(513)])
        rows = RowsOfText(sequence=call.sequence, attempt=0, start=0, chain=chain, data=b"", blob=given.digest)
        for start in range(0, num, 512):  # they come before it is resumed
            note = TextRows(stage=1, rows=(msgspec.structs.replace(rows, start=start),))
            await stranger.post(served.peer(last), note)
        await asyncio.sleep(1)
        assert [(note.sequence, note.why) for note in lost] == [(call.sequence, "wrong rows")]
        assert last.num_held == 0

    served.run(play)


def test_bytes_that_are_never_given_pile_up_nothing() -> None:
    served = Served((1, 1), num_strangers=1)

    async def play() -> None:
        (stranger,), last = served.strangers, served.members[-1]
        call = opening(stranger, last)
        assert await word(served, stranger, last, call) == "held"
        rows = RowsOfText(sequence=call.sequence, attempt=0, start=0, chain=bytes(16) * 2, data=b"", blob="ab" * 32)
        (text,) = last._texts.values()
        await last._on_rows(stranger.me, TextRows(stage=1, rows=(rows,) * 1000))
        assert text.num_fetching == MAX_EARLY
        await asyncio.sleep(30)
        assert text.num_fetching == 0

    served.run(play)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_a_stranger_says_others_texts_come_whole(seed: int) -> None:
    """Records of the right form and any content, also about texts of its own that it opened, fed and cut."""
    served = Served((1, 1, 1), num_pages=32, num_strangers=1)
    rng = random.Random(seed)
    asked = [wanted([*PROMPT, number], 40, 0.8) for number in range(3)]
    right = of_the_whole(*asked)

    async def play() -> None:
        (stranger,) = served.strangers
        tasks = [asyncio.ensure_future(tokens_of(served.entry.begin(each))) for each in asked]
        for _ in range(150):
            member = rng.choice(served.members)
            if rng.random() < 0.8:
                await stranger.post(served.peer(member), note(stranger, member))
            if rng.random() < 0.3:
                call = opening(stranger, member, **named(stranger, rng.randrange(4)), attempt=rng.randrange(3))
                if member.stage == 2:
                    how = Drawing(temperature=rng.choice([0.0, 1e-300, 1e6]), top_p=rng.choice([0.0, 1.0]))
                    how = replace(how, bias=dict.fromkeys(range(CONFIG.vocab_size), -100.0), top_k=rng.randrange(3))
                    call = msgspec.structs.replace(call, drawing=drawn_how(how))
                await word(served, stranger, member, call)
            await asyncio.sleep(0.01)
        assert [await task for task in tasks] == right
        for member in served.members:
            member._pool.check()

    def note(stranger: StageLink, member: Member) -> msgspec.Struct:
        under = [each.id for each in served.entry._under_way.values()]
        ours = [named(stranger, number)["sequence"] for number in range(4)]
        about = {"sequence": rng.choice(under + ours), "attempt": rng.randrange(3), "stage": member.stage}
        kind = rng.randrange(4)
        if kind == 0:
            return ResumeSequence(**about, keep=rng.choice([0, 5, 20, 300]), send_from=rng.choice([0, 20, 1 << 20]))
        if kind == 1:
            return CloseSequence(**about)
        if kind == 2:
            return ReceiptWanted(**about, stop=rng.choice([0, 10, 1 << 20]))
        num = rng.choice([1, 3, 20])
        nbytes = 4 if member.stage == 0 else served.codec.nbytes(CONFIG.width)
        data = rng.choice([rng.randbytes(num * nbytes), np.zeros(num * nbytes, np.uint8).tobytes(), b"x"])
        start = rng.choice([0, 0, 20, 21])
        chain = chain_of(key_of(b"", 0), PROMPT)[: num + 1] if rng.random() < 0.7 else [rng.randbytes(16)] * (num + 1)
        rows = RowsOfText(
            sequence=about["sequence"], attempt=about["attempt"], start=start, chain=joined(chain), data=data
        )
        return TextRows(stage=member.stage, rows=(rows,))

    served.run(play)
