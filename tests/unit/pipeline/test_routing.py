"""Who gets a micro-batch: shares by speed, no bursts, pauses by what went wrong."""

import heapq
from collections import Counter
from collections.abc import Mapping

import pytest

from weft.ids import PeerId
from weft.pipeline.routing import WARM_TURNS, Failure, Pace, Reserved, Router

A, B, C, D = (PeerId(f"{number:064x}") for number in range(4))
ME, OTHER = PeerId("e" * 64), PeerId("f" * 64)
HERE = 1


def router(*peers: PeerId, me: PeerId = ME) -> Router:
    made = Router(me)
    made.seen(dict.fromkeys(peers, HERE))
    return made


def turns(made: Router, num: int, now: float = 0.0) -> list[PeerId]:
    """Return who gets `num` units, none of which is done meanwhile."""
    found = [made.reserve(1.0, now) for _ in range(num)]
    assert None not in found
    return [each.peer for each in found if each is not None]


def reserve_at(made: Router, peer: PeerId, units: float, now: float) -> Reserved | None:
    """Charge this peer, whose turn it need not be."""
    return made.reserve(units, now, without=set(made.peers) - {peer})


def free_at(made: Router, now: float) -> float:
    """Return when the first can take work again."""
    return max(now, min(each.barred_until or now for each in made._accounts.values()))


class Stage:
    """Peers that work off what they are sent, one after the other, each at its speed."""

    def __init__(self, seconds: Mapping[PeerId, float], delay_s: float = 0.0) -> None:
        self.seconds = dict(seconds)
        self._free_at = dict.fromkeys(seconds, 0.0)
        self._delay_s = delay_s

    def done_at(self, peer: PeerId, units: float, now: float) -> float:
        begins = max(now + self._delay_s / 2, self._free_at[peer])
        self._free_at[peer] = begins + units * self.seconds[peer]
        return self._free_at[peer] + self._delay_s / 2


def played(routes: list[Router], stage: Stage, in_flight: int, until: float) -> Counter[PeerId]:
    """Keep so much of each sender's on its way; return what each peer has done."""
    done: Counter[PeerId] = Counter()
    receipts: list[tuple[float, int, int, Reserved]] = []
    count = 0

    def send(sender: int, now: float) -> None:
        nonlocal count
        reserved = routes[sender].reserve(1.0, now)
        assert reserved is not None
        count += 1
        heapq.heappush(receipts, (stage.done_at(reserved.peer, 1.0, now), count, sender, reserved))

    for sender in range(len(routes)):
        for _ in range(in_flight):
            send(sender, 0.0)
    while receipts[0][0] < until:
        now, _, sender, reserved = heapq.heappop(receipts)
        done[reserved.peer] += 1
        routes[sender].settled(reserved, now)
        send(sender, now)
    return done


def test_the_mean_of_paces_has_no_bias_and_follows() -> None:
    pace = Pace()
    assert not pace.is_known
    pace.measured(3.0)
    assert pace.mean == pytest.approx(3.0)
    expected, weights = 0.0, 0.0
    for x in [3.0, 5.0, 1.0]:
        expected, weights = 0.9 * expected + 0.1 * x, 0.9 * weights + 0.1
    pace.measured(5.0)
    pace.measured(1.0)
    assert pace.mean == pytest.approx(expected / weights)
    for _ in range(200):
        pace.measured(7.0)
    assert pace.mean == pytest.approx(7.0)


def test_equal_peers_take_turns_and_senders_begin_with_different_ones() -> None:
    found = turns(router(A, B, C), 9)
    assert Counter(found) == {A: 3, B: 3, C: 3}
    assert set(found[:3]) == {A, B, C}
    firsts = {turns(router(A, B, C, me=PeerId(f"{number:064x}")), 1)[0] for number in range(20)}
    assert firsts == {A, B, C}


@pytest.mark.parametrize("num_senders", [1, 3])
@pytest.mark.parametrize("delay_s", [0.0, 0.2])
def test_all_that_peers_can_do_is_used_and_each_has_its_share(num_senders: int, delay_s: float) -> None:
    seconds = {A: 0.4, B: 0.4, C: 0.2, D: 0.1}
    routes = [router(*seconds, me=PeerId(f"{number:064x}")) for number in range(num_senders)]
    done = played(routes, Stage(seconds, delay_s), in_flight=24 // num_senders, until=400.0)
    capacity = {peer: 400.0 / each for peer, each in seconds.items()}
    assert sum(done.values()) > 0.95 * sum(capacity.values())
    for peer, most in capacity.items():
        assert done[peer] > 0.9 * most


def test_who_becomes_four_times_slower_soon_gets_less() -> None:
    seconds = {A: 0.1, B: 0.1, C: 0.1}
    made, stage = router(*seconds), Stage(seconds)
    played([made], stage, in_flight=9, until=30.0)
    stage.seconds[B] = 0.4
    before = made.pace_of(B)
    done = played([made], Stage({**seconds, B: 0.4}), in_flight=9, until=60.0)
    assert before == pytest.approx(0.1, rel=0.05)
    assert made.pace_of(B) == pytest.approx(0.4, rel=0.05)
    assert sum(done.values()) > 0.9 * 60.0 * (10 + 10 + 2.5)


def test_two_on_their_way_do_not_make_a_peer_half_as_fast() -> None:
    made = router(A)
    first, second = made.reserve(1.0, 0.0), made.reserve(1.0, 0.0)
    assert first is not None
    assert second is not None
    made.settled(first, 2.0)
    made.settled(second, 4.0)
    assert made.pace_of(A) == pytest.approx(2.0)


def test_work_counts_by_its_units() -> None:
    made = router(A, B)
    for units in (1.0, 4.0):
        for peer, each in ((A, 0.1), (B, 0.3)):
            reserved = reserve_at(made, peer, units, 0.0)
            assert reserved is not None
            made.settled(reserved, made._accounts[peer].busy_until + units * each if units > 1 else units * each)
    assert made.pace_of(A) == pytest.approx(0.1)
    assert made.pace_of(B) == pytest.approx(0.3)


def test_a_newcomer_stands_at_the_back_and_gets_no_burst() -> None:
    seconds = {A: 0.1, B: 0.1}
    made = router(*seconds)
    played([made], Stage(seconds), in_flight=4, until=20.0)
    made.seen(dict.fromkeys((A, B, C), HERE))
    assert made.pace_of(C) == pytest.approx(0.1, rel=0.1)
    found = turns(made, 12, now=20.0)
    assert found[0] != C
    assert 1 <= found.count(C) <= 3
    assert found.count(C) < min(found.count(A), found.count(B))


def test_who_starts_again_is_a_newcomer_and_who_is_gone_gets_nothing() -> None:
    made = router(A, B)
    reserved = reserve_at(made, A, 1.0, 0.0)
    assert reserved is not None
    made.settled(reserved, 9.0)
    assert made.pace_of(A) == pytest.approx(9.0)
    made.seen({A: 2, B: HERE})
    later = reserve_at(made, B, 1.0, 9.0)
    assert later is not None
    made.settled(later, 10.0)
    assert made.pace_of(A) == pytest.approx(1.0)  # as B
    made.seen({B: HERE})
    assert made.peers == (B,)
    assert made.reserve(1.0, 10.0, without={B}) is None
    made.settled(reserved, 11.0)  # a receipt that comes too late changes nothing
    made.failed(reserved, Failure.ERROR, 11.0)
    assert set(turns(made, 5, now=11.0)) == {B}


def test_a_nearer_peer_is_asked_first_and_has_no_larger_share() -> None:
    made = router(A, B)
    for peer, took_s in ((A, 0.2), (A, 0.3), (B, 0.01), (B, 0.9)):  # B was busy once
        made.answered(peer, took_s)
    for peer in (A, B):
        for number in range(WARM_TURNS):
            reserved = reserve_at(made, peer, 1.0, 0.1 * number)
            assert reserved is not None
            made.settled(reserved, 0.1 * number + 0.1)
    found = turns(made, 40, now=1.0)
    assert found[0] == B
    assert abs(found.count(A) - found.count(B)) <= 2


@pytest.mark.parametrize("why", [Failure.BUSY, Failure.UNREACHABLE, Failure.ERROR])
def test_who_fails_is_passed_over_for_a_while_that_grows(why: Failure) -> None:
    made, now, pauses = router(A), 0.0, []
    for _ in range(12):
        reserved = made.reserve(1.0, now)
        assert reserved is not None
        made.failed(reserved, why, now)
        assert made.reserve(1.0, now) is None
        pauses.append(free_at(made, now) - now)
        now = free_at(made, now)
    assert pauses[0] == pytest.approx(why.first_s)
    assert pauses[1] == pytest.approx(2 * why.first_s)
    assert pauses[-1] == pytest.approx(why.most_s)
    reserved = made.reserve(1.0, now)
    assert reserved is not None
    made.settled(reserved, now + 1)
    again = made.reserve(1.0, now + 1)
    assert again is not None
    made.failed(again, why, now + 1)
    assert free_at(made, now + 1) - now - 1 == pytest.approx(why.first_s)


def test_who_was_passed_over_has_no_turns_to_catch_up_on() -> None:
    made = router(A, B)
    reserved = reserve_at(made, A, 1.0, 0.0)
    assert reserved is not None
    made.failed(reserved, Failure.UNREACHABLE, 0.0)
    turns(made, 50)
    found = turns(made, 10, now=10.0)
    assert 4 <= found.count(A) <= 6


def test_who_has_failed_with_this_work_is_not_asked_again() -> None:
    made = router(A, B)
    reserved = made.reserve(1.0, 0.0, without={A})
    assert reserved is not None
    assert reserved.peer == B
    assert made.reserve(1.0, 0.0, without={A, B}) is None
    assert free_at(made, 0.0) == 0.0


def test_who_has_a_queue_is_not_passed_over_and_its_next_failure_is_its_first() -> None:
    made = router(A)
    for _ in range(3):
        reserved = made.reserve(1.0, 0.0)
        assert reserved is not None
        made.failed(reserved, Failure.QUEUED, 0.0)
    reserved = made.reserve(1.0, 0.0)
    assert reserved is not None
    made.failed(reserved, Failure.BUSY, 0.0)
    assert free_at(made, 0.0) == pytest.approx(Failure.BUSY.first_s)


def test_who_takes_longer_than_is_asked_for_does_not_get_it() -> None:
    made = router(A, B)
    for peer, took_s in ((A, 1.0), (B, 4.0)):
        reserved = reserve_at(made, peer, 1.0, 0.0)
        assert reserved is not None
        made.settled(reserved, took_s)
    assert made.reserve(1.0, 9.0, without={A}, most_s=2.0) is None
    found = made.reserve(1.0, 9.0, without={A}, most_s=4.0)
    assert found is not None
    assert found.peer == B


def test_a_pause_has_a_length_however_often_somebody_has_failed() -> None:
    made = router(A)
    for number in range(2000):
        made.failed(Reserved(A, 1.0, 0.0, 0.0), Failure.UNREACHABLE, float(number))
    assert free_at(made, 2000.0) - 1999.0 == pytest.approx(Failure.UNREACHABLE.most_s)
