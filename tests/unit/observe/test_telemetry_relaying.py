"""Handing on what others signed: to whoever asks, a few at a time, once for all who ask together."""

import asyncio
from typing import Any

import msgspec
import pytest

from weft.clock import VirtualClock
from weft.errors import Unreachable, WireError
from weft.events import VERSION, Entry, Notice
from weft.ids import PeerId, RunId
from weft.keys import Identity
from weft.observe.telemetry import (
    MAX_ANSWERS,
    MAX_ASKED,
    NOTHING,
    WINDOW_S,
    BulletinAnswer,
    BulletinRequest,
    Bulletins,
    Relaying,
)

RUN = RunId("ab" * 32)
VISITOR = PeerId("99" * 32)
ME, THEM = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2))


class Node:
    """Is linked to one peer, which answers when it is let."""

    def __init__(self, theirs: Bulletins) -> None:
        self.peer = ME.peer
        self.asked: list[BulletinRequest] = []
        self.error: Exception | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._theirs = theirs

    def serve(self, _kind: Any, _answer: Any) -> None:
        pass

    def is_linked(self, peer: PeerId) -> bool:
        return peer == THEM.peer

    async def call(self, peer: PeerId, request: Any, _kind: Any, *, deadline_s: float) -> BulletinAnswer:
        assert peer == THEM.peer
        assert deadline_s > 0
        self.asked.append(request)
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return self._theirs.told(request)


class Yard:
    def __init__(self, signer: Identity = THEM, run: RunId = RUN) -> None:
        self.clock = VirtualClock()
        self.theirs, self.own = Bulletins(signer, run, self.clock), Bulletins(ME, RUN, self.clock)
        for bulletins, who in ((self.theirs, THEM), (self.own, ME)):
            for at in (0.0, WINDOW_S):
                told = Notice(text=who.peer)
                bulletins.write(Entry(v=VERSION, at=self.clock.wall() + at, peer=who.peer, event=told))
        self.clock.run(asyncio.sleep(WINDOW_S))
        self.node = Node(self.theirs)
        self.relaying = Relaying(self.own, self.node, self.clock)  # type: ignore[arg-type]

    def ask(self, *requests: BulletinRequest) -> list[BulletinAnswer]:
        async def all_of_them() -> list[BulletinAnswer]:
            return await asyncio.gather(*(self.relaying.answer(VISITOR, request) for request in requests))

        return self.clock.run(all_of_them())


def of(peer: PeerId | None, after: int = -1) -> BulletinRequest:
    return BulletinRequest(run=RUN, of=peer, after=after)


def test_what_another_signed_is_handed_on_as_it_is_and_its_own_told_without_asking() -> None:
    yard = Yard()
    own, named, theirs = yard.ask(of(None), of(ME.peer), of(THEM.peer))
    assert own == named == yard.own.told(of(None))
    assert [signed.signer for signed in theirs.bulletins] == [THEM.peer]
    assert theirs == yard.theirs.told(of(None))
    assert yard.node.asked == [of(None)]  # it is asked of itself, so nothing goes in circles


def test_one_answer_serves_all_who_ask_within_two_seconds() -> None:
    yard = Yard()
    yard.ask(*[of(THEM.peer)] * 5)
    yard.ask(of(THEM.peer))
    assert len(yard.node.asked) == 1
    yard.clock.run(asyncio.sleep(WINDOW_S))
    yard.ask(of(THEM.peer))
    assert len(yard.node.asked) == 2


def test_who_is_not_linked_is_not_dialled() -> None:
    yard = Yard()
    assert yard.ask(of(PeerId("77" * 32))) == [NOTHING]
    assert yard.node.asked == []


def test_only_a_few_are_asked_at_a_time_and_few_answers_kept() -> None:
    yard = Yard()

    async def many() -> None:
        yard.node.may_answer.clear()
        waiting = [asyncio.ensure_future(yard.relaying.answer(VISITOR, of(THEM.peer, n))) for n in range(MAX_ASKED + 3)]
        await asyncio.sleep(0.1)
        assert len(yard.node.asked) == MAX_ASKED
        assert sum(each.done() and each.result() == NOTHING for each in waiting) == 3
        yard.node.may_answer.set()
        await asyncio.gather(*waiting)
        for number in range(2 * MAX_ANSWERS):
            await yard.relaying.answer(VISITOR, of(THEM.peer, 100 + number))
        assert len(yard.relaying._asked) <= MAX_ANSWERS

    yard.clock.run(many())


@pytest.mark.parametrize("error", [Unreachable("gone"), WireError("no answer")])
def test_who_does_not_answer_is_nothing_to_hand_on(error: Exception) -> None:
    yard = Yard()
    yard.node.error = error
    assert yard.ask(of(THEM.peer)) == [NOTHING]


@pytest.mark.parametrize("yard", [Yard(signer=ME), Yard(run=RunId("cd" * 32))], ids=["another's", "of another run"])
def test_what_is_not_signed_by_who_is_asked_is_not_handed_on(yard: Yard) -> None:
    assert yard.ask(of(THEM.peer)) == [NOTHING]
    assert msgspec.structs.replace(NOTHING) == BulletinAnswer(bulletins=(), has_more=False)
