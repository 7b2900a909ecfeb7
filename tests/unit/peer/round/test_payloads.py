"""What is merged and fetched in a round: each byte once."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from charters import charter
from weft.clock import VirtualClock
from weft.errors import PayloadError, PeerError
from weft.ids import Attempt, BranchId, PeerId, Round, RunId, Tokens
from weft.peer import chain
from weft.peer.chain import Chain, genesis, open_branch
from weft.peer.messages import Handed
from weft.peer.round.payloads import FETCH_FLOOR_S, Payloads
from weft.store.journal import Journal
from weft.sync.merge.method import Scope
from weft.sync.merge.reduce import named
from weft.sync.records.messages import Certificate, Contribution, PartResult
from weft.tasks import Inline
from weft.wire import digest

NUM = 5000
A, B = PeerId("aa" * 32), PeerId("bb" * 32)
RUN = RunId("cc" * 32)


class FakeNode:
    """Delivers one blob after a while, and counts how often it was asked."""

    def __init__(self, data, failures=0):
        self.peer, self.peers = A, (B,)
        self.data, self.failures = data, failures
        self.num_fetched = 0
        self.events = []
        self.posted = []
        self.lookups = []

    def serve_blobs(self, lookup, *, is_patient=False):
        self.lookup = lookup
        self.lookups.append(lookup)

    def on_note(self, kind, handler):
        self.take = handler

    def on_link(self, callback):
        self.linked = callback

    def post(self, peer, note):
        self.posted.append((peer, note))
        return True

    def is_linked(self, peer):
        return peer == B

    async def fetch(self, peer, wanted, into):
        self.num_fetched += 1
        await asyncio.sleep(0.001)
        if self.failures:
            self.failures -= 1
            raise PeerError("gone")
        assert (peer, wanted, len(into)) == (B, digest(self.data), len(self.data))
        into[:] = self.data


def parts_and_manifest(node):
    base = genesis(RUN, A, charter())
    opening = open_branch(base, [A, B], A, BranchId(RUN))
    manifest = type(opening)(
        **{name: getattr(opening, name) for name in opening.__struct_fields__ if name != "parts"},
        parts=(PartResult(owner=B, result=digest(node.data)),),
    )
    journal = Journal(Path("nowhere"), is_on=False)
    place = SimpleNamespace(
        node=node,
        clock=VirtualClock(),
        compute=Inline(),
        emit=node.events.append,
        journal=journal,
        initial=torch.empty(0),
    )
    return Payloads(place, Chain(opening, charter()), Scope(NUM)), manifest


@pytest.fixture
def data():
    return torch.arange(NUM, dtype=torch.float32).numpy().tobytes()


async def test_a_result_that_two_want_at_once_is_fetched_once(data):
    node = FakeNode(data)
    parts, manifest = parts_and_manifest(node)
    assert await asyncio.gather(parts.results(manifest), parts.results(manifest)) == [(data,), (data,)]
    assert node.num_fetched == 1
    assert node.lookup(B, digest(data)) == data


async def test_who_waited_for_a_fetch_that_failed_tries_again(data):
    node = FakeNode(data, failures=1)
    parts, manifest = parts_and_manifest(node)
    first, second = await asyncio.gather(parts.results(manifest), parts.results(manifest), return_exceptions=True)
    assert isinstance(first, PeerError)
    assert second == (data,)


async def test_who_waited_for_a_fetch_that_was_cancelled_takes_over(data):
    node = FakeNode(data)
    parts, manifest = parts_and_manifest(node)
    first, second = (asyncio.ensure_future(parts.results(manifest)) for _ in range(2))
    for _ in range(3):  # each part is a task of its own
        await asyncio.sleep(0)
    first.cancel()
    assert await second == (data,)
    assert node.num_fetched == 2


async def test_who_is_gone_is_waited_for_no_longer(data):
    node = FakeNode(data)
    parts, _ = parts_and_manifest(node)
    never = asyncio.Event()
    node.fetch = lambda _peer, _wanted, _into: never.wait()
    brought = Contribution(peer=B, tokens=Tokens(8), parts=(digest(data),))
    fetching = asyncio.ensure_future(parts.contribution(brought, 0, NUM, Round(1)))
    await asyncio.sleep(0.01)
    assert not fetching.done()
    parts.notice(B, "suspected")
    await asyncio.sleep(0.01)
    assert not fetching.done()
    parts.notice(B, "gone")
    async with asyncio.timeout(FETCH_FLOOR_S / 2):
        assert await fetching is None
        assert await parts.contribution(brought, 0, NUM, Round(1)) is None
    del node.fetch
    parts.notice(B, "alive")
    assert await parts.contribution(brought, 0, NUM, Round(1)) == data


async def test_what_others_bring_stays_where_this_peer_offered_the_same_and_offers_something_else(data):
    parts, _ = parts_and_manifest(FakeNode(data))
    mine = bytearray(data)
    (wanted,) = parts.offer(tuple(map(named, [mine])))
    assert parts.hold(wanted)
    mine[:] = bytes(len(mine))  # the memory is used again
    parts.offer(tuple(map(named, [bytes(mine)])))
    brought = Contribution(peer=B, tokens=Tokens(8), parts=(wanted,))
    assert bytes(await parts.contribution(brought, 0, NUM, Round(1))) == data
    parts.forget(wanted)
    assert not parts.hold(wanted)


def test_no_result_of_the_last_two_rounds_is_given_up_however_large(monkeypatch):
    monkeypatch.setattr(chain, "RESULTS_NBYTES", 10)
    base = genesis(RUN, A, charter())
    kept = Chain(open_branch(base, [A, B], A, BranchId(RUN)), charter())  # two members: two parts a round
    results = [bytes([number]) * 100 for number in range(6)]
    for number, data in enumerate(results):
        kept.keep(Round(1 + number // 2), digest(data), data)
    assert [kept.result(digest(data)) for data in results] == [None, None, *results[2:]]


async def test_a_decision_is_written_where_others_do_not_wait_for_the_disk(data, tmp_path, monkeypatch):
    parts, manifest = parts_and_manifest(FakeNode(data))
    certificate = Certificate(attempt=Attempt(0), manifest=manifest, votes=(), farewells=())
    written = parts._journal = Journal(tmp_path)
    waiting = []

    async def later(work):
        waiting.append(work)

    monkeypatch.setattr(parts._compute, "serve", later)
    await parts.note(certificate)
    assert list(written.rounds()) == []
    waiting[0]()
    assert list(written.rounds()) == [certificate]


async def test_a_small_part_is_handed_to_its_owner_who_may_count_it(data):
    node = FakeNode(data)
    parts, _ = parts_and_manifest(node)
    parts.offer([named(b"mine"), named(b"theirs")])
    assert parts.asked_by == {}
    parts.hand_out()
    assert [(peer, note.data) for peer, note in node.posted] == [(B, b"theirs")]
    assert parts.asked_by == {B: False}
    assert not parts.is_asked_for  # it is there as soon as the announcement is: it does not go on travelling


async def test_a_small_result_is_handed_to_all_others_who_then_hold_what_is_in_it(data):
    node = FakeNode(data)
    parts, _ = parts_and_manifest(node)
    parts.offer([named(b"mine"), named(b"theirs")])
    parts.hand_on(b"mean")
    assert [(peer, note.data) for peer, note in node.posted] == [(B, b"mean")]
    assert parts.asked_by == {B: False}


async def test_who_fetches_what_it_was_handed_counts_as_who_fetches(data):
    node = FakeNode(data)
    parts, _ = parts_and_manifest(node)
    theirs = named(b"theirs")
    parts.offer([named(b"mine"), theirs])
    parts.hand_out()
    assert node.lookups[0](B, theirs.digest) == b"theirs"  # it is from before there was that note
    assert parts.asked_by == {B: True}
    parts.hand_on(b"mean")
    assert parts.asked_by == {B: True}


async def test_a_part_that_was_handed_is_here_and_is_not_fetched(data):
    node = FakeNode(data)
    parts, _ = parts_and_manifest(node)
    part = bytes(parts._codec(Round(1)).nbytes(100))
    brought = Contribution(peer=B, tokens=Tokens(8), parts=(digest(part),))
    assert not parts.take(brought, digest(part), 100)
    await node.take(B, Handed(data=part))
    assert parts.take(brought, digest(part), 100)
    assert parts.is_here(digest(part))
    assert node.num_fetched == 0


async def test_a_result_that_is_no_vector_is_not_kept(data):
    node = FakeNode(torch.full((NUM,), float("nan")).numpy().tobytes())
    parts, manifest = parts_and_manifest(node)
    with pytest.raises(PayloadError):
        await parts.results(manifest)
    assert not parts.has_results(manifest)
    assert node.lookup(B, digest(node.data)) is None


async def test_a_result_is_known_once_it_was_fetched(data):
    parts, manifest = parts_and_manifest(FakeNode(data))
    assert not parts.has_results(manifest)
    await parts.results(manifest)
    assert parts.has_results(manifest)


async def test_a_part_of_no_numbers_is_asked_of_nobody(data):
    node = FakeNode(data)
    parts, _ = parts_and_manifest(node)
    brought = Contribution(peer=B, tokens=Tokens(8), parts=(digest(b""),))
    assert await parts.contribution(brought, 0, 0, Round(1)) == b""
    assert node.num_fetched == 0


async def test_a_contribution_that_is_planned_in_again_has_all_its_time_where_it_came_before(data):
    node, took = FakeNode(data), []

    async def slow(peer, wanted, into):
        clock.advance(0.6 * FETCH_FLOOR_S)
        took.append(wanted)

    parts, _ = parts_and_manifest(node)
    node.fetch, clock = slow, parts._clock
    brought = Contribution(peer=B, tokens=Tokens(8), parts=(digest(b"a"),))
    assert [await parts.contribution(brought, 0, NUM, Round(1)) is None for _ in range(2)] == [False, False]
    assert len(took) == 2
    assert node.events == []


async def test_what_is_no_payload_is_told_from_what_cannot_be_had(data):
    node = FakeNode(data)

    async def other(peer, wanted, into):
        raise PayloadError("other bytes")

    node.fetch = other
    parts, _ = parts_and_manifest(node)
    brought = Contribution(peer=B, tokens=Tokens(8), parts=(digest(data),))
    with pytest.raises(PayloadError):
        await parts.gather(brought, digest(data), NUM)
