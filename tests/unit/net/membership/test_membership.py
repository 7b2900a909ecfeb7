"""Heartbeats go on whatever fails here at one of them."""

import asyncio

import pytest

from weft.events import MemberGone, MemberJoined, MemberSuspected, Notice
from weft.ids import BranchId, Round
from weft.net.membership.membership import Membership
from weft.net.messages import Heartbeat


def memberships(world):
    def status():
        return Heartbeat(
            name="x",
            branch=BranchId("ab" * 32),
            round=Round(0),
            manifest=None,
            state="training",
            loss=None,
            tokens_per_s=0.0,
        )

    return [Membership(node, world.clock, world.events[node.peer].append, status) for node in world.nodes]


def fail_to_one(world, membership):
    post, one = world.nodes[0].post, world.ids[1]

    def broken(peer, record):
        if peer == one:
            raise KeyError("broken")
        return post(peer, record)

    world.nodes[0].post = broken


def fail_once(world, membership):
    status = membership._status

    def broken():
        membership._status = status
        raise KeyError("broken")

    membership._status = broken


@pytest.mark.full
@pytest.mark.parametrize("fail", [fail_to_one, fail_once])
def test_a_heartbeat_that_fails_is_told_and_the_others_hear_the_next(world, fail):
    async def scenario():
        nodes = await world.started(3)
        members = memberships(world)
        for member in members:
            await member.start()
        await asyncio.sleep(5)
        assert world.ids[0] in members[2].alive()
        fail(world, members[0])
        await asyncio.sleep(30)
        assert world.ids[0] in members[2].alive()
        assert not [event for event in world.seen(2, MemberSuspected) if event.member == world.ids[0]]
        assert "KeyError: 'broken'" in world.seen(0, Notice)[0].text
        assert len(nodes) == len(members[0].alive()) + 1
        for member in members:
            await member.aclose()

    world.run(scenario)


def test_a_callback_that_fails_is_told_and_who_is_silent_is_noticed_as_ever(world):
    async def scenario():
        await world.started(3)
        members = memberships(world)

        def broken(change):
            raise KeyError(type(change).__name__)

        members[0].on_change(broken)
        for member in members:
            await member.start()
        await asyncio.sleep(5)
        assert len(world.seen(0, MemberJoined)) == 2
        await members[2].aclose()
        world.network.kill(world.ids[2])
        await asyncio.sleep(30)
        assert [event.member for event in world.seen(0, MemberGone)] == [world.ids[2]]
        assert members[0].alive() == (world.ids[1],)
        assert any("KeyError: 'Gone'" in event.text for event in world.seen(0, Notice))
        for member in members:
            await member.aclose()

    world.run(scenario)


def test_who_was_killed_is_silent_for_a_while_and_who_said_goodbye_is_not(world):
    async def scenario():
        await world.started(3)
        members = memberships(world)
        for member in members:
            await member.start()
        await asyncio.sleep(5)
        assert members[0].silent(60.0) == ()
        await members[1].say_goodbye("done")
        await members[2].aclose()
        world.network.kill(world.ids[2])
        await asyncio.sleep(20)
        assert members[0].silent(60.0) == (world.ids[2],)
        assert members[0].silent(10.0) == ()
        await asyncio.sleep(60)
        assert members[0].silent(60.0) == ()
        for member in members:
            await member.aclose()

    world.run(scenario)
