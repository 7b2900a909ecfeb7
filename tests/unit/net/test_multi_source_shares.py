"""Who fetches what of whom: played with holders that deliver at given speeds."""

import heapq

import pytest

from weft.ids import Digest, PeerId
from weft.net.multi_source import LATE_S, MAX_LACKING, MAX_UNDER_WAY, Blob, BlobQueue

A, B, C = (PeerId(letter * 64) for letter in "abc")
MIB = 1 << 20


def blobs(num: int) -> list[Blob]:
    return [Blob(digest=Digest(f"{number:064x}"), nbytes=MIB) for number in range(num)]


class Play:
    """Holders that each send one blob after the other.

    Args:
        pace: seconds that a blob takes of each.
        dies_at: when a holder falls silent.
    """

    def __init__(self, num: int, pace: dict[PeerId, float], dies_at: dict[PeerId, float] | None = None) -> None:
        self.shares = BlobQueue(blobs(num), list(pace), 0.0)
        self.now = 0.0
        self.fetched: list[tuple[PeerId, int]] = []  # begun, in order
        self._pace, self._dies_at = pace, dies_at or {}
        self._free_at = dict.fromkeys(pace, 0.0)
        self._due: list[tuple[float, PeerId, int]] = []

    def run(self) -> float:
        while not self.shares.is_done:
            self._begin()
            due = self._due[0][0] if self._due else float("inf")
            deaths = [at for peer, at in self._dies_at.items() if peer in self.shares.holders]
            self.now = min([due, self.now + 1.0, *deaths])
            for peer, at in self._dies_at.items():
                if at <= self.now:
                    self._drop(peer)
            for peer in self.shares.late(self.now):
                self._drop(peer)
            while self._due and self._due[0][0] <= self.now:
                _, peer, number = heapq.heappop(self._due)
                self.shares.arrived(peer, number, self.now)
        return self.now

    def _begin(self) -> None:
        is_any = True
        while is_any:
            is_any = False
            for peer in self.shares.holders:
                number = self.shares.take(peer, self.now)
                if number is not None:
                    is_any = True
                    self.fetched.append((peer, number))
                    self._free_at[peer] = max(self._free_at[peer], self.now) + self._pace[peer]
                    heapq.heappush(self._due, (self._free_at[peer], peer, number))
        assert len(self._due) <= MAX_UNDER_WAY

    def _drop(self, peer: PeerId) -> None:
        self.shares.failed(peer)
        self._due = [each for each in self._due if each[1] != peer]
        heapq.heapify(self._due)


def test_two_holders_are_twice_as_fast_as_one_and_no_blob_is_asked_twice() -> None:
    one, two = Play(100, {A: 1.0}), Play(100, {A: 1.0, B: 1.0})
    assert (one.run(), two.run()) == (100.0, 50.0)
    assert sorted(number for _, number in two.fetched) == list(range(100))


def test_each_holder_delivers_as_much_as_it_can_and_the_slow_one_is_not_waited_for() -> None:
    play = Play(100, {A: 1.0, B: 10.0})
    assert play.run() <= 100 / 1.1 + 10.0
    of_b = [number for peer, number in play.fetched if peer == B]
    assert 6 <= len(of_b) <= 10
    assert len(play.fetched) == 100


def test_a_dead_holder_costs_what_it_had_under_way() -> None:
    play = Play(100, {A: 1.0, B: 1.0}, {B: 20.5})
    assert play.run() == pytest.approx(80.0, abs=3.0)
    assert len(play.fetched) - 100 <= MAX_UNDER_WAY // 2


def test_who_is_stuck_with_the_last_blobs_is_given_up() -> None:
    play = Play(40, {A: 1.0, B: 1e9})
    assert play.run() < 40 + 4 * 4 + LATE_S + 4
    assert play.shares.holders == (A,)
    assert len(play.fetched) == 42  # two of them twice


def test_a_slow_holder_alone_is_waited_for() -> None:
    assert Play(3, {A: 1000.0}).run() == 3000.0


def test_a_blob_that_one_holder_lacks_comes_from_another_and_who_lacks_several_is_out() -> None:
    shares = BlobQueue(blobs(8), [A, B], 0.0)
    assert shares.take(A, 0.0) == 0
    shares.lacks(A, 0)
    assert (shares.take(A, 0.0), shares.take(B, 0.0)) == (1, 0)
    for number in range(1, MAX_LACKING):
        assert A in shares.holders
        shares.lacks(A, number)
        shares.take(A, 0.0)
    assert shares.holders == (B,)
    assert shares.unobtainable() is None
    shares.lacks(B, 0)
    assert shares.unobtainable() == 0


def test_without_anybody_every_blob_is_unobtainable() -> None:
    shares = BlobQueue(blobs(2), [A], 0.0)
    shares.take(A, 0.0)
    assert shares.failed(A) == (0,)
    assert shares.unobtainable() == 0
    assert not shares.is_done


def test_who_is_found_later_delivers_too() -> None:
    shares = BlobQueue(blobs(9), [A], 0.0)
    taken = [shares.take(A, 0.0) for _ in range(5)]
    assert taken == [0, 1, 2, 3, None]
    shares.add(C, 1.0)
    assert [shares.take(C, 1.0) for _ in range(3)] == [4, 5, None]
