"""What one peer costs another in computing is bounded: it is read slowly, and who goes on all the same is dropped."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from unit.net.test_hostile import Answer, Ask, under_attack
from weft.clock import SystemClock, VirtualClock, computing
from weft.errors import PeerError
from weft.events import ConnectionDropped, Notice
from weft.ids import PeerId
from weft.net.link import burden
from weft.net.link.burden import BURST_S, EXCESS_SHARE, FLOOD_S, MAX_PAUSE_S, SHARE, Burdens, Share
from weft.net.messages import Note
from weft.net.transport.frame import encode_frame
from weft.wire import encode

A, B = PeerId("a" * 64), PeerId("b" * 64)
COST_S = 1e-3  # of a frame


class At:
    """A clock that is set."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def wall(self) -> float:
        return self.at


def test_a_share_is_saved_up_for_a_while_and_then_holds() -> None:
    share = Share(0.1, 0.5, 0.0)
    share.charge(0.5, 0.0)
    assert share.pause_s(0.0) == 0.0
    share.charge(0.02, 0.0)
    assert share.pause_s(0.0) == pytest.approx(0.2)
    assert share.pause_s(0.2) == pytest.approx(0.0)
    share.charge(100.0, 1.0)
    assert share.pause_s(1.0) <= MAX_PAUSE_S  # no peer is silent so long that it is taken for gone
    assert share.pause_s(1000.0) == 0.0
    share.charge(0.5, 1000.0)
    assert share.pause_s(1000.0) == 0.0


@pytest.mark.parametrize("num_links", [1, 4, 10])
def test_many_keys_together_cost_hardly_more_than_one(num_links: int) -> None:
    clock = At()
    all_ = Burdens(clock)
    links = [all_.of(PeerId(f"{number:064x}"), "127.0.0.1") for number in range(num_links)]
    free_at = [0.0] * num_links
    spent_s, flooding_at = 0.0, None
    while clock.at < 20.0:
        for number, each in enumerate(links):
            if clock.at >= free_at[number]:
                each.charge(COST_S)
                spent_s += COST_S
                free_at[number] = clock.at + each.pause_s()
        if flooding_at is None and all(each.is_flood for each in links):
            flooding_at, spent_till_then_s = clock.at, spent_s
        clock.at += COST_S
    assert flooding_at is not None
    assert spent_till_then_s <= num_links * BURST_S + 1.0 + (SHARE + EXCESS_SHARE) * flooding_at
    assert FLOOD_S <= flooding_at < 15.0


def test_who_waits_for_answers_is_never_a_flood_however_much_it_costs() -> None:
    clock = At()
    honest = Burdens(clock).of(A, "")
    for _ in range(1000):
        honest.idle()  # it had to be waited for
        honest.charge(0.05)
        clock.at += max(0.1, honest.pause_s())
        assert not honest.is_flood


def test_an_address_has_a_share_of_its_own() -> None:
    clock = At()
    all_ = Burdens(clock)
    crowd = [all_.of(PeerId(f"{number:064x}"), "203.0.113.9") for number in range(8)]
    for each in crowd:
        each.charge(0.2)  # less than each may
    assert crowd[0].pause_s() > 0
    assert all_.of(B, "198.51.100.1").pause_s() == 0.0


async def test_only_its_own_steps_are_charged_to_a_link() -> None:
    clock = At()
    spent = Burdens(clock).of(A, "")
    computed = iter(range(1000))
    spent._computed_s = lambda: float(next(computed))  # each look is a second later

    async def fails(event: asyncio.Event) -> None:
        await event.wait()
        raise PeerError("no")

    event = asyncio.Event()
    asyncio.get_running_loop().call_soon(event.set)
    with pytest.raises(PeerError, match="no"):
        await spent.metered(fails(event))
    assert spent.cost_s == 2.0  # before the wait, and after
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await spent.metered(fails(asyncio.Event()))
    assert computing(VirtualClock())() == 0.0
    assert computing(SystemClock())() > 0.0


async def test_who_floods_is_named_slowed_dropped_and_barred(monkeypatch: Any) -> None:
    monkeypatch.setattr(burden, "FLOOD_S", 0.5)
    monkeypatch.setattr(burden, "BURST_S", 0.02)
    monkeypatch.setattr(burden, "SHARE", 0.01)  # both ends share this process
    async with under_attack() as victim:
        stream, _ = await victim.admitted()
        flood = b"".join([encode_frame(encode(Note(method="nobody", body=bytes(1000))))] * 64)
        with suppress(PeerError):
            while True:
                await stream.send(flood)
        await victim.dropped.wait()
        (dropped,) = (event for event in victim.events if isinstance(event, ConnectionDropped))
        assert dropped.remote == victim.mallory.peer
        assert "it floods" in dropped.reason
        (slowed,) = (event for event in victim.events if isinstance(event, Notice))
        assert "read more slowly" in slowed.text
        assert victim.node._links.is_barred(victim.mallory.peer)
        answer = await victim.honest.call(victim.node.peer, Ask(text="x"), Answer, deadline_s=5)
        assert answer.text == "x"
