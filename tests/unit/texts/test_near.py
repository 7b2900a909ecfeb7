"""Who computes a stage finds out how far the next one's members are."""

import asyncio
from collections.abc import Callable
from typing import Any

from weft.clock import VirtualClock
from weft.errors import CallFailed, DeadlineExceeded
from weft.ids import PeerId
from weft.texts.messages import MAX_LINKS, HowNear, IsNear, SectionServed
from weft.texts.near import Nearness

NEAR, FAR, OLD, GONE = (PeerId(each * 64) for each in "1234")


class FarLink:
    """Peers that answer after a time; `OLD` does not know the question, `GONE` does not answer."""

    me = PeerId("0" * 64)

    def __init__(self) -> None:
        self.rtts = {NEAR: 0.02, FAR: 0.2, OLD: 0.1}
        self.asked: list[PeerId] = []
        self.parted: list[Callable[[PeerId], object]] = []

    def on_parted(self, callback: Callable[[PeerId], object]) -> None:
        self.parted.append(callback)

    def off_parted(self, callback: Callable[[PeerId], object]) -> None:
        self.parted.remove(callback)

    async def call(self, peer: PeerId, request: HowNear, response: type[IsNear], *, deadline_s: float) -> IsNear:
        assert isinstance(request, HowNear)
        self.asked.append(peer)
        await asyncio.sleep(self.rtts.get(peer, deadline_s))
        if peer == OLD:
            raise CallFailed("nobody here serves HowNear")
        if peer == GONE:
            raise DeadlineExceeded("no answer")
        return response()


def served(*rounds: int) -> SectionServed:
    told: dict[str, Any] = dict.fromkeys(("step_s", "row_s", "token_s"), 0.0)
    return SectionServed(stage=1, rounds=rounds, num_rows=0, num_waiting=0, num_free=0, **told)


def played(*peers: PeerId) -> tuple[FarLink, Nearness]:
    clock, link = VirtualClock(), FarLink()

    async def play() -> None:
        asking = asyncio.ensure_future(near.ask_on())
        for peer in peers:
            await near.heard(peer, served(0))
        await asyncio.sleep(20.0)
        asking.cancel()

    near = Nearness(link, clock)  # type: ignore[arg-type]
    clock.run(play())
    return link, near


def test_the_nearest_is_told_first() -> None:
    _, near = played(FAR, NEAR, OLD)
    assert [(each.peer, round(each.rtt_s, 6)) for each in near.told()] == [(NEAR, 0.02), (OLD, 0.1), (FAR, 0.2)]


def test_the_shortest_answer_counts() -> None:
    clock, link = VirtualClock(), FarLink()
    near = Nearness(link, clock)  # type: ignore[arg-type]

    async def play() -> None:
        asking = asyncio.ensure_future(near.ask_on())
        await near.heard(NEAR, served(0))
        await asyncio.sleep(5.0)
        link.rtts[NEAR] = 0.5  # it has much to do
        await asyncio.sleep(3.0)
        asking.cancel()

    clock.run(play())
    assert [round(each.rtt_s, 6) for each in near.told()] == [0.02]


def test_all_are_asked_in_turn_and_who_is_silent_holds_nobody_up_for_long() -> None:
    link, near = played(GONE, NEAR, FAR)
    assert {each.peer for each in near.told()} == {NEAR, FAR}
    assert link.asked.count(GONE) == 1
    assert min(link.asked.count(peer) for peer in (NEAR, FAR)) >= 3


def test_who_serves_no_longer_or_is_parted_is_told_no_more() -> None:
    link, near = played(NEAR, FAR, OLD)
    for callback in link.parted:
        callback(NEAR)
    asyncio.run(near.heard(FAR, served()))
    assert [each.peer for each in near.told()] == [OLD]
    near.close()
    assert link.parted == []


def test_no_more_are_told_than_news_holds() -> None:
    many = [PeerId(f"{number:064x}") for number in range(100, 100 + MAX_LINKS + 8)]
    clock, link = VirtualClock(), FarLink()
    link.rtts |= {peer: 0.001 * number for number, peer in enumerate(many, 1)}
    near = Nearness(link, clock)  # type: ignore[arg-type]

    async def play() -> None:
        asking = asyncio.ensure_future(near.ask_on())
        for peer in many:
            await near.heard(peer, served(0))
        await asyncio.sleep(30.0)
        asking.cancel()

    clock.run(play())
    assert [each.peer for each in near.told()] == many[:MAX_LINKS]
