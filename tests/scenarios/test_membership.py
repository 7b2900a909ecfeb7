"""Swarms whose members die, freeze, part and come back, on a virtual clock."""

import asyncio

import pytest

from weft.clock import VirtualClock
from weft.errors import CallFailed
from weft.events import (
    LinkDown,
    LinkUp,
    LoopStalled,
    MemberGone,
    MemberJoined,
    MemberLeft,
    MemberProgress,
    MemberRecovered,
    MemberSuspected,
)
from weft.ids import BranchId, Digest, Round, RunId
from weft.keys import Identity
from weft.net.admission import ByTicket
from weft.net.blobs.blobs import inline
from weft.net.link.handshake import Passport
from weft.net.membership.full_mesh import FORGET_S
from weft.net.membership.membership import Membership, say_goodbye
from weft.net.messages import Acquaint, Contact, Heartbeat
from weft.net.node import Node
from weft.net.transport.memory import MemoryNetwork

RUN = RunId("ab" * 32)


class Peer:
    def __init__(self, world, index, instance=0):
        identity = world.identities[index]
        passport = Passport(
            identity=identity,
            run=RUN,
            name=f"peer-{index}",
            admission=ByTicket(secret=bytes(16)),
            instance=bytes([index, instance] * 4),
        )
        self.id = identity.peer
        self.log = []
        self.world = world
        self.node = Node(passport, [world.network.transport(self.id)], world.clock, self.emit, offload=inline)
        self.membership = Membership(self.node, world.clock, self.emit, self.status)

    def emit(self, event):
        self.log.append((self.world.clock.now(), event))

    def status(self):
        return Heartbeat(
            name=self.node.passport.name,
            branch=BranchId(RUN),
            round=Round(int(self.world.clock.now())),
            manifest=None,
            state="training",
            loss=float("nan"),
            tokens_per_s=1.0,
        )

    async def start(self, *contacts):
        await self.node.start()
        for peer in contacts:
            self.node.remember(peer, [f"memory://{peer}"])
        await self.membership.start()

    def kill(self):
        """End the process: nothing of it runs or answers any more."""
        self.world.network.kill(self.id)
        self.membership._gossip.stop()
        self.membership._tasks.cancel()
        self.node._dialer._kept.clear()
        self.node._dialer._tasks.cancel()

    def seen(self, kind, since=0.0):
        return [(at, event) for at, event in self.log if isinstance(event, kind) and at >= since]


class World:
    def __init__(self):
        self.clock = VirtualClock()
        self.network = MemoryNetwork(delay_s=0.03)
        self.identities = sorted((Identity.from_seed(bytes([i]) * 32) for i in range(34)), key=lambda one: one.peer)
        self.peers = []

    async def swarm(self, num):
        """Start `num` peers that know only the first, and let them meet."""
        for index in range(num):
            self.peers.append(Peer(self, index))
        for peer in self.peers:
            await peer.start(*([] if peer is self.peers[0] else [self.peers[0].id]))
        await asyncio.sleep(5)
        return list(self.peers)

    def cut(self, peer, others):
        for other in others:
            self.network.partition(peer.id, other.id)

    def heal(self, peer, others):
        for other in others:
            self.network.heal(peer.id, other.id)

    def run(self, scenario):
        async def whole():
            try:
                await scenario()
            finally:
                for peer in self.peers:
                    await peer.membership.aclose()
                    await peer.node.aclose()

        self.clock.run(whole())


@pytest.fixture
def world():
    return World()


@pytest.mark.parametrize("num", [2, 4, 12])
def test_members_that_know_one_of_them_come_to_know_all(world, num):
    async def scenario():
        peers = await world.swarm(num)
        everybody = {peer.id for peer in peers}
        for peer in peers:
            assert set(peer.membership.alive()) == everybody - {peer.id}
            assert len(peer.seen(MemberJoined)) == num - 1
            assert len(peer.seen(LinkUp)) == num - 1  # each pair settled on one connection at the first try
        before = world.clock.now()
        await asyncio.sleep(60)
        for peer in peers:
            assert peer.seen((MemberSuspected, MemberGone)) == []
            progress = [event for _, event in peer.seen(MemberProgress, since=before)]
            assert len(progress) == 30 * (num - 1)
            assert {event.member for event in progress} == everybody - {peer.id}
            assert progress[0].link == "memory"
            assert progress[0].loss is None  # what is not finite is no figure to show

    world.run(scenario)


def test_who_was_linked_before_membership_began_is_a_member(world):
    async def scenario():
        a, b = world.peers = [Peer(world, 0), Peer(world, 1)]
        await a.node.start()
        await b.node.start()
        b.node.remember(a.id, [f"memory://{a.id}"])
        await b.node.connect(a.id)
        await a.membership.start()
        await b.membership.start()
        await asyncio.sleep(20)
        for one, other in ((a, b), (b, a)):
            assert one.membership.alive() == (other.id,)
            assert len(one.seen(MemberProgress)) > 5
            assert one.seen((MemberSuspected, MemberGone)) == []

    world.run(scenario)


def test_newcomer_is_nobody_to_miss_until_it_sends_heartbeats(world):
    async def scenario():
        a, b = await world.swarm(2)
        newcomer = Peer(world, 2)
        world.peers.append(newcomer)
        await newcomer.node.start()
        newcomer.node.remember(a.id, [f"memory://{a.id}"])
        await newcomer.node.connect(a.id)
        await asyncio.sleep(60)  # its person reads the terms
        assert [event.member for _, event in a.seen(MemberJoined)] == [b.id]
        assert a.seen((MemberSuspected, MemberGone)) == []
        assert a.node.is_linked(newcomer.id)
        await newcomer.membership.start()
        await asyncio.sleep(1)
        for peer in (a, b):
            assert newcomer.id in peer.membership.alive()
            assert len(peer.seen(MemberJoined)) == 2
        assert set(newcomer.membership.alive()) == {a.id, b.id}

    world.run(scenario)


def test_member_that_starts_again_and_is_not_ready_is_gone_once(world):
    async def scenario():
        a, _, c = await world.swarm(3)
        c.kill()
        again = Peer(world, 2, instance=1)
        world.peers.append(again)
        await again.node.start()
        again.node.remember(a.id, [f"memory://{a.id}"])
        for _ in range(30):
            await again.node.connect(a.id)
            await asyncio.sleep(2)
        assert len(a.seen(MemberGone)) == 1
        assert a.seen(MemberRecovered) == []
        assert a.node.is_linked(again.id)  # and was not dropped for the silence of the one before it
        assert again.seen(LinkDown) == []
        await again.membership.start()
        await asyncio.sleep(1)
        assert [event.member for _, event in a.seen(MemberRecovered)] == [again.id]

    world.run(scenario)


def test_request_for_a_blob_is_as_good_as_a_heartbeat(world):
    async def scenario():
        a, b = await world.swarm(2)
        b.membership._tasks.cancel()  # its heartbeats are stuck behind something large
        for _ in range(15):
            with pytest.raises(CallFailed):
                await b.node.fetch_small(a.id, Digest("0" * 64), 1)
            await asyncio.sleep(2)
        assert a.seen((MemberSuspected, MemberGone)) == []
        await asyncio.sleep(9)
        assert a.seen(MemberGone)

    world.run(scenario)


def test_newcomer_that_declines_is_dialled_no_more(world):
    async def scenario():
        a, b = await world.swarm(2)
        passport = Passport(
            identity=world.identities[2], run=RUN, name="reads the terms", admission=ByTicket(secret=bytes(16))
        )
        newcomer = Node(passport, [world.network.transport(passport.peer)], world.clock, lambda _: None, offload=inline)
        await newcomer.start()
        newcomer.remember(a.id, [f"memory://{a.id}"])
        await newcomer.connect(a.id)
        await asyncio.sleep(5)
        assert newcomer.is_linked(b.id)
        await say_goodbye(newcomer, "its person declined")
        assert not newcomer.peers
        at = world.clock.now()
        await asyncio.sleep(60)
        assert [peer.seen(LinkUp, since=at) for peer in (a, b)] == [[], []]
        await newcomer.aclose()
        assert a.seen((MemberSuspected, MemberGone, MemberLeft)) == []

    world.run(scenario)


def test_who_was_only_told_of_is_sought_for_ten_minutes(world):
    async def scenario():
        a, b = await world.swarm(2)
        invented = world.identities[9].peer
        a.node.post(b.id, Acquaint(contacts=(Contact(peer=invented, name="", addresses=("memory://x",)),)))
        await asyncio.sleep(FORGET_S - 10)
        assert invented in b.node._dialer._kept
        await asyncio.sleep(20)
        assert set(b.node._dialer._kept) == {a.id}

    world.run(scenario)


def test_killed_member_is_suspected_at_once_and_gone_within_eight_seconds(world):
    async def scenario():
        a, b, c = await world.swarm(3)
        await asyncio.sleep(0.7)
        at = world.clock.now()
        c.kill()
        await asyncio.sleep(30)
        for peer in (a, b):
            (suspected,) = peer.seen(MemberSuspected)
            (gone,) = peer.seen(MemberGone)
            assert suspected[0] - at < 0.2
            assert "nothing listens" in suspected[1].reason
            assert gone[1].member == c.id
            assert gone[0] - at <= 8.0
            assert set(peer.membership.alive()) == {a.id, b.id} - {peer.id}

    world.run(scenario)


def test_killed_member_that_restarts_within_eight_seconds_was_never_gone(world):
    async def scenario():
        a, _, c = await world.swarm(3)
        c.kill()
        await asyncio.sleep(3)
        again = Peer(world, 2, instance=1)
        world.peers.append(again)
        await again.start(a.id)
        await asyncio.sleep(20)
        for peer in world.peers[:2]:
            assert len(peer.seen(MemberRecovered)) == 1
            assert peer.seen(MemberGone) == []
            assert again.id in peer.membership.alive()
        assert len(again.membership.alive()) == 2

    world.run(scenario)


@pytest.mark.parametrize("later_s", [0.0, 1.02, 1.04, 1.5])  # a heartbeat is on its way at 1.02, just heard at 1.04
def test_vanished_host_is_suspected_at_six_and_gone_at_eight_seconds(world, later_s):
    async def scenario():
        a, b, c = await world.swarm(3)
        await asyncio.sleep(later_s)
        at = world.clock.now()
        world.cut(c, [a, b])
        await asyncio.sleep(20)
        for peer in (a, b):
            (suspected,), (gone,) = peer.seen(MemberSuspected), peer.seen(MemberGone)
            assert 4.0 <= suspected[0] - at <= 6.0
            assert 6.0 <= gone[0] - at <= 8.0
            assert suspected[1].reason == "silent for 6.0 s"
        assert {event.member for _, event in c.seen(MemberGone)} == {a.id, b.id}

    world.run(scenario)


def test_short_partition_is_refuted(world):
    async def scenario():
        a, b, c = await world.swarm(3)
        world.cut(c, [a, b])
        await asyncio.sleep(6.9)
        world.heal(c, [a, b])
        await asyncio.sleep(20)
        for peer in (a, b, c):
            assert len(peer.seen(MemberRecovered)) == len(peer.seen(MemberSuspected)) > 0
            assert peer.seen(MemberGone) == []
            assert len(peer.membership.alive()) == 2

    world.run(scenario)


def test_long_partition_heals_by_redialling(world):
    async def scenario():
        a, b, c = await world.swarm(3)
        world.cut(c, [a, b])
        await asyncio.sleep(120)
        assert c.membership.alive() == ()
        world.heal(c, [a, b])
        await asyncio.sleep(31)  # the longest pause between two redials
        for peer in (a, b, c):
            assert len(peer.membership.alive()) == 2
            assert len(peer.seen(MemberRecovered)) >= 1
            assert len(peer.seen(MemberJoined)) == 2  # known all along

    world.run(scenario)


def test_goodbye_is_known_at_once_and_nobody_redials(world):
    async def scenario():
        a, b, c = await world.swarm(3)
        at = world.clock.now()
        await c.membership.say_goodbye("asked to stop")
        assert world.clock.now() - at < 0.2
        await c.membership.aclose()
        await c.node.aclose()
        await asyncio.sleep(30)
        for peer in (a, b):
            (left,) = peer.seen(MemberLeft)
            assert left[0] - at < 0.1
            assert peer.seen((MemberSuspected, MemberGone)) == []
            assert peer.seen(LinkUp, since=at) == []
            assert c.id not in peer.membership.alive()

    world.run(scenario)


def test_who_said_goodbye_returns_as_a_newcomer(world):
    async def scenario():
        a, b, c = await world.swarm(3)
        await c.membership.say_goodbye("back soon")
        await c.membership.aclose()
        await c.node.aclose()
        await asyncio.sleep(5)
        again = Peer(world, 2, instance=1)
        world.peers.append(again)
        await again.start(a.id)
        await asyncio.sleep(5)
        for peer in (a, b):
            assert [event.member for _, event in peer.seen(MemberJoined)].count(c.id) == 2
            assert peer.seen(MemberRecovered) == []
            assert again.id in peer.membership.alive()

    world.run(scenario)


def test_goodbye_across_a_partition_waits_two_seconds_and_no_more(world):
    async def scenario():
        a, b, c = await world.swarm(3)
        world.cut(c, [a])
        at = world.clock.now()
        await c.membership.say_goodbye("asked to stop")
        assert world.clock.now() - at == pytest.approx(2.0, abs=0.01)
        assert b.seen(MemberLeft)
        assert not a.seen(MemberLeft)

    world.run(scenario)


def test_own_stall_makes_nobody_look_dead(world):
    async def scenario():
        a, b, c = await world.swarm(3)
        world.clock.advance(25.0)  # every timer of this one process is late: it was stopped
        await asyncio.sleep(3)
        for peer in (a, b, c):
            assert peer.seen((MemberSuspected, MemberGone)) == []
            ((_, stalled),) = peer.seen(LoopStalled)
            assert 24.0 <= stalled.stall_s <= 25.0
        at = world.clock.now()
        c.kill()
        await asyncio.sleep(9)
        assert a.seen(MemberGone, since=at)

    world.run(scenario)


@pytest.mark.slow
def test_swarm_of_thirty_two_is_quiet_and_notices_one_death(world):
    async def scenario():
        peers = await world.swarm(32)
        for peer in peers:
            assert len(peer.membership.alive()) == 31
            assert peer.seen((MemberSuspected, MemberGone)) == []
        at = world.clock.now()
        peers[7].kill()
        await asyncio.sleep(9)
        for peer in peers[:7] + peers[8:]:
            ((when, gone),) = peer.seen(MemberGone)
            assert gone.member == peers[7].id
            assert when - at <= 8.0

    world.run(scenario)
