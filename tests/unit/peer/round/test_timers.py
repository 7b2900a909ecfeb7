"""Deadlines follow the rounds that were measured."""

import asyncio

import pytest

from weft.clock import VirtualClock
from weft.ids import Attempt, PeerId
from weft.peer.round.timers import SLACK, Timers
from weft.sync.records.tuning import NUM_SEEN, Seen
from weft.sync.round.machine import FIRST_S

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def test_deadlines_follow_what_rounds_took() -> None:
    clock = VirtualClock()
    expired: list[tuple[str, int, float]] = []

    async def scenario() -> None:
        timers = Timers(clock, lambda timer, attempt: expired.append((timer, attempt, clock.now())))
        timers.set("grace", Attempt(0))
        await asyncio.sleep(FIRST_S + 1)
        assert expired == [("grace", 0, FIRST_S)]
        for _ in range(5):
            timers.begin()
            timers.note_ready(A)  # who is early waits for the others, and that says nothing about the round
            await asyncio.sleep(100)
            timers.set("progress", Attempt(0))  # a quorum is ready
            await asyncio.sleep(4)
            timers.note_ready(A)
            await asyncio.sleep(3)
            timers.note_decided([A], is_whole=True)
        timers.begin()
        at = clock.now()
        expired.clear()
        timers.set("grace", Attempt(0))
        timers.set("grace", Attempt(0))
        timers.set("progress", Attempt(0))
        timers.set("progress", Attempt(7))  # another member has taken this one there: that is one attempt more
        await asyncio.sleep(60)
        progress_s = 4.0 + SLACK * 7.0
        assert [(timer, attempt, when - at) for timer, attempt, when in expired] == [
            ("grace", 0, 4.0),  # from the quorum's announcement to the last
            ("progress", 0, progress_s),
            ("progress", 7, 2 * progress_s),
        ]

    clock.run(scenario())


def test_who_is_late_is_hurried_when_half_of_the_time_for_it_is_over() -> None:
    clock = VirtualClock()

    async def scenario() -> None:
        timers = Timers(clock, lambda _timer, _attempt: None)
        for took_s in (10.0, 10.0, 10.0):
            timers.begin()
            timers.set("progress", Attempt(0))
            await asyncio.sleep(took_s)
            timers.note_ready(A)
            timers.note_decided([A], is_whole=True)
        timers.begin()
        timers.note_ready(A)
        await asyncio.sleep(1000)
        assert not timers.is_grace_half_over  # nobody waits yet
        timers.set("progress", Attempt(0))
        await asyncio.sleep(4.9)
        assert not timers.is_grace_half_over
        await asyncio.sleep(0.2)
        assert timers.is_grace_half_over
        timers.begin()
        assert not timers.is_grace_half_over

    clock.run(scenario())


def test_a_round_that_begins_or_ends_stops_the_timers_of_the_one_before() -> None:
    clock = VirtualClock()
    expired: list[object] = []

    async def scenario() -> None:
        timers = Timers(clock, lambda timer, attempt: expired.append(timer))
        timers.set("progress", Attempt(0))
        timers.begin()
        timers.set("grace", Attempt(0))
        timers.stop()
        await asyncio.sleep(10 * FIRST_S)

    clock.run(scenario())
    assert expired == []


async def play(timers: Timers, worked_s: float, *, is_late: bool, leads: bool) -> None:
    """A round of which 4.75 s are waiting; with a straggler the leader waits 6 s more, in vain."""
    timers.begin()
    await asyncio.sleep(0.5)  # results come
    await asyncio.sleep(100)
    timers.note_apart(100)  # it evaluates
    await asyncio.sleep(worked_s)
    timers.note_worked(worked_s)
    await asyncio.sleep(0.25)  # it encodes
    timers.note_announced()
    timers.note_ready(B)
    await asyncio.sleep(1)
    timers.note_ready(A)
    await asyncio.sleep(2)
    if leads:
        timers.note_gathering(2)
    if is_late:
        await asyncio.sleep(6)
    timers.note_planned(leads=leads)
    await asyncio.sleep(1)
    timers.note_planned(leads=leads)  # anew, without an owner
    timers.note_ready(C)  # too late to be counted
    await asyncio.sleep(1)
    timers.note_decided([A, B], is_whole=not is_late)


@pytest.mark.parametrize(("is_late", "leads"), [(False, False), (False, True), (True, True)])
def test_evaluating_and_waiting_for_others_inner_steps_are_no_share_of_what_a_round_waits(
    is_late: bool, leads: bool
) -> None:
    clock = VirtualClock()

    async def scenario() -> None:
        timers = Timers(clock, lambda _timer, _attempt: None)
        for number in range(NUM_SEEN):
            assert timers.seen is None
            await play(timers, 10.0 + number, is_late=is_late, leads=leads)
        assert timers.seen == Seen(waited_s=4.75, worked_s=10 + (NUM_SEEN - 1) / 2)
        timers.forget()
        assert timers.seen is None

    clock.run(scenario())


def test_only_the_leader_knows_how_long_it_waited_for_who_was_late() -> None:
    clock = VirtualClock()

    async def scenario() -> None:
        timers = Timers(clock, lambda _timer, _attempt: None)
        for _ in range(NUM_SEEN):
            await play(timers, 10.0, is_late=True, leads=False)
        assert timers.seen is None

    clock.run(scenario())
