"""More members than can watch each other: few links, claims that go round, going over from one regime to the other."""

import asyncio

import pytest
from benchmarks.rig.seats import Hall

from weft.events import (
    ConnectionDropped,
    LinkDown,
    LoopStalled,
    MemberGone,
    MemberLeft,
    MemberRecovered,
    MemberSuspected,
)
from weft.keys import Identity
from weft.net.membership.gossip import accuse
from weft.net.membership.swim import MAX_ALL, SETTLE_S
from weft.net.messages import News
from weft.net.transport.memory import MemoryNetwork


class Log:
    """What all seats said."""

    def __init__(self, hall):
        self.hall = hall
        self.events = []
        hall.on_event = lambda seat, event: self.events.append((hall.clock.now(), seat, event))

    def of(self, kinds, since=0.0, who=None):
        return [
            (at, seat, event)
            for at, seat, event in self.events
            if isinstance(event, kinds) and at >= since and (who is None or event.member == who.id)
        ]


@pytest.fixture
def hall():
    return Hall(MemoryNetwork(delay_s=0.03, jitter_s=0.05, loss=0.01))


def everybody_knows(hall):
    living = {seat.id for seat in hall.living}
    return all(set(seat.membership.alive()) == living - {seat.id} for seat in hall.living)


@pytest.mark.slow
def test_forty_members_know_of_each_death_and_goodbye_over_few_links(hall):
    log = Log(hall)

    async def play():
        await hall.fill(40, per_s=20)
        await asyncio.sleep(60)
        assert everybody_knows(hall)
        assert not any(seat.membership.watches_all for seat in hall.seats)
        assert all(6 <= len(seat.node.peers) <= 22 for seat in hall.seats)
        assert log.of((MemberSuspected, MemberGone)) == []
        at = hall.clock.now()
        hall.seats[7].kill()
        await asyncio.sleep(15)
        assert len(log.of(MemberGone, at, hall.seats[7])) == 39
        at = hall.clock.now()
        await hall.seats[11].leave()
        await asyncio.sleep(10)
        left = log.of(MemberLeft, at, hall.seats[11])
        assert len(left) == 38
        assert max(when for when, _, _ in left) - at < 1.0
        at = hall.clock.now()
        hall.seats[3].vanish()
        await asyncio.sleep(20)
        assert len(log.of(MemberGone, at, hall.seats[3])) == 37
        assert len(log.of(MemberGone)) == 39 + 37  # and nobody else was
        assert everybody_knows(hall)

    hall.run(play)


@pytest.mark.slow
def test_who_starts_again_at_once_was_never_gone_and_who_left_returns_as_new(hall):
    log = Log(hall)

    async def play():
        await hall.fill(34, per_s=20)
        await asyncio.sleep(10)
        hall.seats[7].kill()
        await asyncio.sleep(2)
        again = await hall.again(hall.seats[7], hall.seats[1])
        await asyncio.sleep(20)
        assert log.of(MemberGone) == []
        assert everybody_knows(hall)
        assert again.membership._gossip.members.incarnation > 0  # above its predecessor
        await again.leave()
        await asyncio.sleep(5)
        await hall.again(again, hall.seats[2])
        await asyncio.sleep(20)
        assert everybody_knows(hall)

    hall.run(play)


@pytest.mark.full
def test_one_liar_removes_nobody(hall):
    log = Log(hall)

    async def play():
        await hall.fill(34, per_s=20)
        await asyncio.sleep(10)
        liar, victim = hall.seats[5], hall.seats[20]
        gossip = liar.membership._gossip
        for _ in range(4):
            claim = accuse(liar.node.passport.identity, liar.node.run, gossip.members.entries[victim.id].life)
            for peer in liar.node.peers:
                liar.node.post(peer, News(claims=(claim.proof,)))
            await asyncio.sleep(3)
        assert log.of(MemberSuspected, who=victim)
        assert log.of(MemberRecovered, who=victim)
        await asyncio.sleep(20)
        assert log.of(MemberGone) == []
        assert everybody_knows(hall)

    hall.run(play)


def test_a_claim_that_does_not_hold_ends_the_link_it_came_over(hall):
    log = Log(hall)

    async def play():
        await hall.fill(3, per_s=20)
        await asyncio.sleep(5)
        a, b, c = hall.seats
        life = a.membership._gossip.members.entries[c.id].life
        claim = accuse(Identity.from_seed(bytes(32)), a.node.run, life).proof
        forged = type(claim)(kind=claim.kind, body=claim.body, signer=b.id, signature=claim.signature)
        a.node.post(b.id, News(claims=(forged,)))
        await asyncio.sleep(5)
        dropped = [event.reason for _, seat, event in log.of(LinkDown) if seat is b]
        assert any("a claim that does not hold" in reason for reason in dropped)
        assert log.of((MemberGone, ConnectionDropped)) == []
        assert everybody_knows(hall)

    hall.run(play)


@pytest.mark.slow
def test_an_own_stall_buries_nobody(hall):
    log = Log(hall)

    async def play():
        await hall.fill(34, per_s=20)
        await asyncio.sleep(10)
        hall.clock.advance(40.0)  # every timer of this one process is late: it was stopped
        await asyncio.sleep(30)
        assert log.of((MemberSuspected, MemberGone)) == []
        assert len(log.of(LoopStalled)) == 34
        hall.seats[9].kill()
        await asyncio.sleep(20)
        assert len(log.of(MemberGone, who=hall.seats[9])) == 33

    hall.run(play)


@pytest.mark.slow
def test_going_over_to_few_links_and_back_removes_nobody(hall):
    log = Log(hall)

    async def play():
        await hall.fill(MAX_ALL, per_s=20)
        await asyncio.sleep(10)
        assert all(seat.membership.watches_all for seat in hall.seats)
        await hall.fill(MAX_ALL + 1, per_s=20)
        await asyncio.sleep(10)
        assert not any(seat.membership.watches_all for seat in hall.seats)
        for seat in hall.seats[20:]:
            await seat.leave()
        await asyncio.sleep(SETTLE_S + 20)
        assert len(hall.living) == 20
        assert all(seat.membership.watches_all for seat in hall.living)
        assert all(len(seat.node.peers) == 19 for seat in hall.living)
        assert everybody_knows(hall)
        assert log.of((MemberSuspected, MemberGone)) == []

    hall.run(play)


@pytest.mark.slow
def test_two_halves_that_buried_each_other_grow_together(hall):
    async def play():
        await hall.fill(34, per_s=20)
        await asyncio.sleep(10)
        halves = hall.seats[::2], hall.seats[1::2]
        for one in halves[0]:
            for other in halves[1]:
                hall.network.partition(one.id, other.id)
        await asyncio.sleep(60)
        assert all(len(seat.membership.alive()) == 16 for seat in hall.seats)
        for one in halves[0]:
            for other in halves[1]:
                hall.network.heal(one.id, other.id)
        await asyncio.sleep(90)
        assert everybody_knows(hall)

    hall.run(play)


@pytest.mark.slow
def test_pinned_links_stay(hall):
    async def play():
        await hall.fill(40, per_s=20)
        committee = [seat.id for seat in hall.seats[::3]]
        await asyncio.sleep(20)
        for seat in hall.seats:
            seat.membership.pin(committee if seat.id in committee else ())
        await asyncio.sleep(90)
        for seat in hall.seats:
            linked = set(committee) <= {*seat.node.peers, seat.id}
            assert linked or seat.id not in committee
        assert everybody_knows(hall)

    hall.run(play)


def bad_lines(num, duration_s):
    hall = Hall(MemoryNetwork(delay_s=0.03, jitter_s=0.3, loss=0.05))
    log = Log(hall)

    async def play():
        await hall.fill(num, per_s=20)
        await asyncio.sleep(duration_s)
        assert log.of((MemberSuspected, MemberGone)) == []
        assert everybody_knows(hall)

    hall.run(play)


@pytest.mark.full
def test_five_minutes_of_jitter_and_loss_remove_nobody():
    bad_lines(8, 300.0)


@pytest.mark.slow
@pytest.mark.parametrize("num", [8, 32])
def test_an_hour_of_jitter_and_loss_removes_nobody(num):
    bad_lines(num, 3600.0)


@pytest.mark.slow
def test_an_hour_of_jitter_and_loss_removes_nobody_of_a_hundred():
    hall = Hall(MemoryNetwork(delay_s=0.03, jitter_s=0.3, loss=0.05))
    log = Log(hall)

    async def play():
        await hall.fill(100, per_s=20)
        await asyncio.sleep(3600)
        assert log.of(MemberGone) == []
        assert everybody_knows(hall)

    hall.run(play)
