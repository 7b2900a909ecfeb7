"""What of its open files a process gives to connections, and who makes room for whom."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.ids import PeerId
from weft.net.transport.limits import MAX_LINKS, MAX_STREAMS, Budget, Streams, budget_of

A, B, C = (PeerId(letter * 64) for letter in "abc")
SWARM = 31  # links of a run of 32, whose members all know each other


def test_where_nothing_is_bounded_the_process_has_bounds_of_its_own() -> None:
    assert budget_of(None) == Budget()
    assert not Budget().is_taken(1 << 20, is_ours=False)
    assert (Budget().links, Budget().streams) == (MAX_LINKS, MAX_STREAMS)


@pytest.mark.parametrize("files", [16, 64, 256, 1024, 4096, 1 << 20])
def test_what_all_may_hold_together_leaves_files_for_the_process_itself(files: int) -> None:
    budget = budget_of(files)
    assert min(budget.newcomers, budget.links, budget.streams) >= 4
    if files >= 64:
        assert min(budget.newcomers, 64) + budget.links + budget.streams + budget.spare <= files
    if files >= 256:
        assert budget.links >= SWARM
        assert budget.streams >= SWARM


def test_own_connections_come_before_those_of_others_and_own_files_before_both() -> None:
    budget = budget_of(256)
    taken = [(budget.is_taken(n, is_ours=False), budget.is_taken(n, is_ours=True)) for n in range(256)]
    assert taken == sorted(taken)
    assert taken.count((False, False)) > taken.count((True, True)) > 16
    assert taken.count((True, False)) > 16


def test_who_rests_makes_room_before_who_moves_bytes_and_of_those_whoever_holds_most() -> None:
    streams: Streams[int] = Streams(6)
    for number in range(4):
        assert streams.enter(A, number)
    assert streams.enter(B, 10)
    assert streams.enter(B, 11, rests=True)
    assert not streams.enter(C, 20)
    assert streams.victim(C) == (B, 11)
    streams.rest(A, 2, True)
    streams.rest(A, 1, True)
    assert streams.victim(C) == (A, 2)  # rests longest, of who holds most
    for number in (1, 2):
        streams.rest(A, number, False)
    streams.rest(B, 11, False)
    assert streams.victim(C) == (A, 0)
    streams.leave(A, 0)
    assert streams.enter(C, 20)
    streams.leave(A, 1)
    assert streams.enter(C, 21)
    assert streams.victim(A) is None  # all hold as many
    assert streams.of(C) == (20, 21)


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.integers(0, 3)), max_size=80))
def test_the_bound_holds_and_whoever_has_none_gets_one(steps: list[tuple[PeerId, int]]) -> None:
    streams: Streams[int] = Streams(6)
    held: dict[int, PeerId] = {}
    for number, (peer, what) in enumerate(steps):
        if what == 3 and held:
            gone, owner = held.popitem()
            streams.leave(owner, gone)
            continue
        while not streams.enter(peer, number, rests=what == 0):
            victim = streams.victim(peer)
            if victim is None:
                assert peer in held.values()
                break
            assert held.pop(victim[1]) == victim[0]
            streams.leave(*victim)
        else:
            held[number] = peer
        assert len(streams) == len(held) <= 6
