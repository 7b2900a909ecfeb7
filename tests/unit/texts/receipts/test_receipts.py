"""Members sign what they compute of a text, and who asks finds out where two say different things. The text stays."""

import asyncio
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from unit.engine.test_step import CONFIG, CPU, text_of, vector_of
from unit.texts.stages import Served, drawn_by_the_whole, of_the_whole, tokens_of, wanted
from weft.engine.draw import Drawn, draw
from weft.engine.fingerprint import MAX_NBYTES, NUM
from weft.engine.step import KeysAndValues
from weft.events import Event, ReceiptFailed, ReceiptsDiffer, TextMoved
from weft.keys import Identity, verify
from weft.net.link.rpc import note_frame
from weft.texts.asking.entry import LATE_S
from weft.texts.messages import BLOCK, Receipts, ReceiptTold
from weft.texts.receipts.audit import Told, audit, tokens_told, verdict
from weft.texts.receipts.receipt import Signing, record_digest, row_digest, rows_digest
from weft.texts.receipts.witness import Kept
from weft.texts.section import packed
from weft.wire import encode, require_signature

PROMPT = text_of(40, 1)


def of_receipts(served: Served) -> list[Event]:
    return [event for event in served.events if isinstance(event, ReceiptFailed | ReceiptsDiffer)]


def by_stage(kept: tuple[Kept, ...]) -> list[list[Kept]]:
    num = 1 + max(each.header.stage for each in kept)
    return [[each for each in kept if each.header.stage == stage] for stage in range(num)]


async def receipts_of_the_last(served: Served) -> tuple[Kept, ...]:
    await asyncio.sleep(LATE_S + 0.5)
    return list(served.entry.receipts.values())[-1]


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1,)])
def test_each_member_signs_what_went_through_it(sizes: tuple[int, ...]) -> None:
    asked = wanted(PROMPT, 50, 0.8)
    (expected,) = of_the_whole(asked)
    served = Served(sizes)

    async def play() -> None:
        assert await tokens_of(served.entry.begin(asked)) == expected
        stages = by_stage(await receipts_of_the_last(served))
        assert len(stages) == len(sizes)
        for stage, kept in enumerate(stages):
            (peer,) = {each.peer for each in kept}
            assert peer == served.peer(served.members[stage])
            assert [(each.receipt.start, each.receipt.stop) for each in kept] == [(0, 32), (32, 64), (64, 89)]
            assert kept[0].receipt.previous == record_digest(kept[0].header)
            assert [each.receipt.previous for each in kept[1:]] == [record_digest(each.receipt) for each in kept[:-1]]
            for each in kept:
                require_signature(each.signed, verify)
            # A last stage has logits of rows that a token is drawn after.
            has_print = [bool(each.receipt.fingerprint) for each in kept]
            assert has_print == [stage < len(sizes) - 1, True, True]
        for before, after in pairwise(stages):
            assert [each.receipt.made for each in before] == [each.receipt.given for each in after]
        text = [*PROMPT, *expected]
        assert stages[0][1].receipt.given == rows_digest(row_digest(packed([each])) for each in text[32:64])
        assert stages[-1][2].receipt.made == rows_digest(row_digest(packed([each])) for each in text[65:90])
        assert not of_receipts(served)

    served.run(play)


def test_receipts_are_of_what_was_drawn_where_guesses_are_wrong() -> None:
    asked = wanted(text_of(7, 3) * 9, 70, 0.7)
    (expected,) = of_the_whole(asked)
    served = Served((1, 1, 1))

    async def play() -> None:
        assert await tokens_of(served.entry.begin(asked)) == expected
        stages = by_stage(await receipts_of_the_last(served))
        assert [sum(each.receipt.num for each in kept) for kept in stages] == [63 + 69] * 3
        assert not of_receipts(served)

    served.run(play)


def test_a_text_that_a_stop_token_ends_is_signed_to_its_last_row() -> None:
    asked = wanted(PROMPT, 50, 0.8)
    (drawn,) = of_the_whole(asked)
    at = next(at for at in range(10, 50) if drawn[at] not in drawn[:at])
    served = Served((1, 1))

    async def play() -> None:
        text = served.entry.begin(type(asked)("key", asked.prompt, 50, asked.drawing, stop_ids=(drawn[at],)))
        assert await tokens_of(text) == drawn[:at]
        stages = by_stage(await receipts_of_the_last(served))
        assert [kept[-1].receipt.stop for kept in stages] == [len(PROMPT) + at] * 2
        assert all(kept[-1].receipt.fingerprint for kept in stages)
        assert not of_receipts(served)

    served.run(play)


@pytest.mark.parametrize("is_honest", [True, False])
def test_an_audit_finds_an_answer_that_its_member_ended_before_its_end(
    is_honest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tells a token that ends the text where another one is drawn."""
    asked, early = wanted(PROMPT, 50, 0.8), 20
    (whole,) = drawn_by_the_whole(asked, kind="exact")
    tokens = [each.token for each in whole]
    end = tokens[early] if is_honest else next(each for each in range(CONFIG.vocab_size) if each not in tokens)
    assert end not in tokens[:early]
    served = Served((1,), kind="exact", has_guesses=False)

    def ending(logits: Any, drawing: Any, place: int, *more: Any) -> Drawn:
        return Drawn(end) if place == len(PROMPT) + early else draw(logits, drawing, place, *more)

    if not is_honest:
        monkeypatch.setattr("weft.texts.section.draw", ending)

    async def play() -> None:
        text = served.entry.begin(replace(asked, stop_ids=(end,)))
        assert await tokens_of(text) == tokens[:early]
        assert text.ended == "stop"
        kept = await receipts_of_the_last(served)
        assert not of_receipts(served)  # nobody says otherwise: only who computes it again
        read = [*PROMPT, *tokens[:early]]
        told = Told(packed(read), tokens_told([*read, end], len(PROMPT)), asked.drawing)
        pages = KeysAndValues(CONFIG, 8, CPU, "exact")
        section = served.section(0, vector_of(CONFIG), pages)
        findings = audit(section, kept[0].header, [each.receipt for each in kept], told)
        assert verdict(findings, None) == ("honest" if is_honest else "cheating")
        assert findings[-1].wrong == (() if is_honest else ("a token is not the one that is drawn",))

    served.run(play)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_members_that_take_a_place_over_sign_what_they_compute_and_nobody_is_accused(stage: int) -> None:
    asked = wanted(PROMPT, 70, 0.8)
    (expected,) = of_the_whole(asked)
    served = Served((2, 2, 2))

    async def play() -> None:
        text = served.entry.begin(asked)
        found = [(await anext(text)).token for _ in range(40)]
        served.kill(stage)
        assert found + await tokens_of(text) == expected
        kept = await receipts_of_the_last(served)
        assert [event.stage for event in served.events if isinstance(event, TextMoved)] == [stage]
        newest = [each for each in kept if each.header.attempt == 1]
        (new,) = {each.peer for each in newest if each.header.stage == stage}
        rows = [(each.receipt.start, each.receipt.stop) for each in newest if each.peer == new]
        assert rows == [(0, 32), (32, 64), (64, 96), (96, 109)]
        assert not of_receipts(served)

    served.run(play)


def test_who_gives_no_receipts_is_told_of_once_and_answers_all_the_same() -> None:
    asked = wanted(PROMPT, 40)
    (expected,) = of_the_whole(asked)
    served = Served((1, 1, 1), silent=(1,))

    async def play() -> None:
        for _ in range(2):
            assert await tokens_of(served.entry.begin(asked)) == expected
            kept = await receipts_of_the_last(served)
            assert {each.header.stage for each in kept} == {0, 2}
        silent = served.peer(served.members[1])
        assert of_receipts(served) == [ReceiptFailed(stage=1, member=silent, reason="none came")]

    served.run(play)


def test_neighbours_that_sign_different_things_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = wanted(PROMPT, 40)
    (expected,) = of_the_whole(asked)
    served = Served((1, 1, 1))
    honest = Signing.computed

    def lying(self: Signing, *given: object) -> None:
        honest(self, *given)  # type: ignore[arg-type]
        if self.header.stage == 1:
            self._made[-1] = bytes(16)

    monkeypatch.setattr(Signing, "computed", lying)

    async def play() -> None:
        assert await tokens_of(served.entry.begin(asked)) == expected
        await receipts_of_the_last(served)
        before, member = (served.peer(served.members[stage]) for stage in (1, 2))
        assert set(of_receipts(served)) == {ReceiptsDiffer(stage=2, before=before, member=member)}

    served.run(play)


@pytest.mark.parametrize(("stage", "side"), [(0, "_given"), (1, "_made")])
def test_receipts_of_other_tokens_than_the_texts_are_told_of(
    stage: int, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = wanted(PROMPT, 40)
    (expected,) = of_the_whole(asked)
    served = Served((1, 1))
    honest = Signing.computed

    def lying(self: Signing, *given: object) -> None:
        honest(self, *given)  # type: ignore[arg-type]
        if self.header.stage == stage:
            getattr(self, side)[-1] = bytes(16)

    monkeypatch.setattr(Signing, "computed", lying)

    async def play() -> None:
        assert await tokens_of(served.entry.begin(asked)) == expected
        await receipts_of_the_last(served)
        (event,) = of_receipts(served)
        assert isinstance(event, ReceiptFailed)
        assert (event.stage, event.member) == (stage, served.peer(served.members[stage]))
        assert "not of the tokens" in event.reason

    served.run(play)


def test_a_signature_that_does_not_hold_and_weights_that_nobody_else_has_are_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = wanted(PROMPT, 40)
    (expected,) = of_the_whole(asked)
    served = Served((1, 2))

    async def play() -> None:
        other = SimpleNamespace(identity=Identity.from_seed(bytes(32)))
        monkeypatch.setattr(served.members[0]._link._node, "passport", other)
        served.members[1]._section.digest = bytes(32)
        for turn in range(2):
            text = served.entry.begin(asked)
            first = (await anext(text)).token
            member = served.path()[1]
            assert [first, *await tokens_of(text)] == expected
            await asyncio.sleep(LATE_S + 0.5)
            if not turn:
                served.kill_peer(member)
        found = {(event.stage, event.reason) for event in of_receipts(served) if isinstance(event, ReceiptFailed)}
        assert (0, "its signature does not hold") in found
        assert (1, "it names other weights than another member for the same round") in found

    served.run(play)


def test_receipts_that_are_not_asked_for_are_dropped() -> None:
    served = Served((1, 1))

    async def play() -> None:
        text = served.entry.begin(wanted(PROMPT, 40))
        await anext(text)
        (under,) = served.entry._under_way.values()
        told = ReceiptTold(
            start=0, num=32, given=bytes(16), made=bytes(16), fingerprint=b"", previous=bytes(16), signature=bytes(64)
        )
        note = Receipts(sequence=under.id, attempt=0, stage=0, receipts=(told,), weights=bytes(32), numbers="fp32")
        await served.entry._on_receipts(served.peer(served.members[1]), note)  # of another stage
        assert not under.witness.kept  # type: ignore[union-attr]
        assert not of_receipts(served)
        text.cancel()
        await tokens_of(text)

    served.run(play)


def test_a_receipt_takes_at_most_twelve_bytes_a_token_on_the_wire() -> None:
    told = ReceiptTold(
        start=100_000,
        num=BLOCK,
        given=bytes(16),
        made=bytes(16),
        fingerprint=bytes(4 * NUM),  # places of two bytes each, as of a vocabulary of 100,000
        previous=bytes(16),
        signature=bytes(64),
    )
    assert len(told.fingerprint) <= MAX_NBYTES
    note = Receipts(sequence=bytes(16), attempt=1, stage=3, receipts=(told,))
    assert len(note_frame("Receipts", encode(note))) <= 12 * BLOCK
