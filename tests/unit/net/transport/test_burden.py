"""What one peer costs another in computing is bounded: it is read slowly, and who goes on all the same is dropped."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from unit.net.conftest import World
from unit.net.test_hostile import BLOB, Answer, Ask, drained, under_attack
from weft.clock import SystemClock, VirtualClock, computing, kept_waiting, part_given
from weft.errors import PeerError
from weft.events import ConnectionDropped, Notice
from weft.ids import Digest, PeerId
from weft.net.link.rpc import MAX_IN_FLIGHT
from weft.net.messages import BlobRequest, Note
from weft.net.node import Node
from weft.net.transport import limits
from weft.net.transport.base import Stream
from weft.net.transport.frame import encode_frame
from weft.net.transport.limits import (
    BURST_S,
    CROWD,
    FLOOD_S,
    MAX_PAUSE_S,
    SHARE,
    Burden,
    Burdens,
    Gate,
    Handshakes,
    Share,
)
from weft.tasks import Tasks
from weft.wire import digest, encode

A, B = PeerId("a" * 64), PeerId("b" * 64)
COST_S = 1e-3  # of a frame
FAR, OTHER = "203.0.113.9", "198.51.100.1"


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


def test_of_a_core_that_others_use_a_share_is_of_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = At()
    monkeypatch.setattr(limits, "part_given", lambda _clock: lambda: 0.2)
    links = [Burdens(clock).of(A, FAR)]
    assert flooding(clock, links, 60.0) == pytest.approx(BURST_S + 0.2 * SHARE * 60.0, rel=0.1)


def test_the_system_says_what_part_of_its_time_a_process_is_given() -> None:
    part = part_given(SystemClock())
    sum(range(2_000_000))  # some milliseconds
    assert 0.0 < part() <= 1.0
    assert part() == 1.0, "it computed nothing since"
    assert part_given(VirtualClock())() == 1.0


def test_the_system_says_for_how_long_a_thread_had_to_wait() -> None:
    waited_s = kept_waiting(SystemClock())
    before = waited_s()
    assert 0.0 <= before <= waited_s()
    assert kept_waiting(VirtualClock())() == 0.0


def flooding(clock: At, links: list[Burden], seconds: float) -> float:
    """Return what links cost that always have something to read."""
    free_at = [0.0] * len(links)
    spent_s = 0.0
    while clock.at < seconds:
        for number, each in enumerate(links):
            if clock.at >= free_at[number]:
                each.charge(COST_S)
                spent_s += COST_S
                free_at[number] = clock.at + each.pause_s()
        clock.at += COST_S
    return spent_s


@pytest.mark.parametrize("num_links", [1, 4, 10])
def test_many_keys_together_cost_hardly_more_than_one(num_links: int) -> None:
    clock = At()
    all_ = Burdens(clock)
    links = [all_.of(PeerId(f"{number:064x}"), "127.0.0.1") for number in range(num_links)]
    assert flooding(clock, links, 60.0) <= (num_links + 1) * BURST_S + 2.0 + SHARE * 60.0


def test_a_step_that_takes_long_by_chance_slows_nobody() -> None:
    """Such as one in which garbage is collected, on a slow machine."""
    honest = Burdens(At()).of(A, FAR)
    honest.charge(2.0)
    assert honest.pause_s() == 0.0


def test_a_key_that_comes_back_has_not_saved_up_anew() -> None:
    clock = At()
    all_ = Burdens(clock)
    flooding(clock, [all_.of(A, "")], 15.0)
    again, other = all_.of(A, ""), all_.of(B, "")
    for each in (again, other):
        each.charge(BURST_S / 2)
    assert again.pause_s() > 0 == other.pause_s()


@pytest.fixture
def spend(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """What a step does that takes so many seconds of computing, where time is virtual."""
    spent = [0.0]
    monkeypatch.setattr(limits, "computing", lambda _clock: lambda: spent[0])

    def some(seconds: float) -> None:
        spent[0] += seconds

    return some


SMALL = bytes(range(200))
HEAVY_S, LONG_S = 0.02, 60.0  # of a call or look-up; of asking without a pause


def serving(b: Node, spend: Callable[[float], None]) -> None:
    async def answer(_peer: PeerId, request: Ask) -> Answer:
        spend(HEAVY_S)
        return Answer(text=request.text)

    blobs = {digest(blob): blob for blob in (SMALL, BLOB)}

    def look(_peer: PeerId, name: Digest) -> bytes | None:
        spend(HEAVY_S)
        return blobs.get(name)

    b.serve(Ask, answer)
    b.serve_blobs(look)


async def again_and_again(ask: Callable[[], Coroutine[Any, Any, object]], num: int, served: list[float]) -> None:
    """Ask so many times at once, each anew once it is answered."""
    loop = asyncio.get_running_loop()

    async def one() -> None:
        while True:
            await ask()
            served.append(loop.time())

    with suppress(TimeoutError):
        async with asyncio.timeout(LONG_S), asyncio.TaskGroup() as group:
            for _ in range(num):
                group.create_task(one())


@pytest.mark.parametrize("num", [1, 4, 16, CROWD - 1])
def test_who_waits_for_answers_is_slowed_and_never_dropped_however_much_it_asks(
    world: World, spend: Callable[[float], None], num: int
) -> None:
    async def scenario() -> None:
        a, b = await world.started(2)
        serving(b, spend)
        served: list[float] = []
        await again_and_again(lambda: a.call(b.peer, Ask(text="x"), Answer, deadline_s=LONG_S), num, served)
        assert len(served) * HEAVY_S == pytest.approx(BURST_S + SHARE * LONG_S, rel=0.15)
        assert b.is_linked(a.peer)

    world.run(scenario)
    assert sum("read more slowly" in event.text for event in world.seen(1, Notice)) == 1
    assert not world.seen(1, ConnectionDropped)


def test_who_has_as_many_calls_open_as_it_may_all_the_time_is_dropped(
    world: World, spend: Callable[[float], None]
) -> None:
    async def scenario() -> None:
        a, b = await world.started(2)
        serving(b, spend)
        with pytest.raises(ExceptionGroup):
            await again_and_again(
                lambda: a.call(b.peer, Ask(text="x"), Answer, deadline_s=LONG_S), MAX_IN_FLIGHT, served := []
            )
        assert FLOOD_S < served[-1] < 3 * FLOOD_S

    world.run(scenario)
    assert "it floods" in world.seen(1, ConnectionDropped)[0].reason


@pytest.mark.full
@pytest.mark.parametrize("num", [1, 6])
def test_keys_that_send_more_and_more_cost_what_one_may_and_are_dropped(
    world: World, spend: Callable[[float], None], num: int
) -> None:
    spent: list[float] = []

    async def scenario() -> None:
        *many, b = await world.started(num + 1)

        async def take(_peer: PeerId, _note: Ask) -> None:
            spend(COST_S)
            spent.append(COST_S)

        async def flood(a: Node) -> None:
            await a.connect(b.peer)
            with suppress(PeerError):
                while True:
                    await a.note(b.peer, Ask(text="x" * 100))

        b.on_note(Ask, take)
        async with asyncio.timeout(3 * FLOOD_S):
            await asyncio.gather(*(flood(a) for a in many))

    world.run(scenario)
    assert all("it floods" in event.reason for event in world.seen(num, ConnectionDropped))
    assert len(world.seen(num, ConnectionDropped)) == num
    # What waits in queues when a link ends is not handled.
    assert sum(spent) <= (num + 1) * BURST_S + SHARE * 3 * FLOOD_S


def test_who_fetches_one_small_blob_after_another_is_slowed_and_never_dropped(
    world: World, spend: Callable[[float], None]
) -> None:
    async def scenario() -> None:
        a, b = await world.started(2)
        serving(b, spend)
        served: list[float] = []
        await again_and_again(lambda: a.fetch_small(b.peer, digest(SMALL), len(SMALL), stall_s=LONG_S), 8, served)
        assert len(served) * HEAVY_S == pytest.approx(BURST_S + SHARE * LONG_S, rel=0.15)
        assert b.is_linked(a.peer)

    world.run(scenario)
    assert not world.seen(1, ConnectionDropped)


def test_who_fetches_large_blobs_pays_for_no_look_at_them(world: World, spend: Callable[[float], None]) -> None:
    """The first one of a file checks it, which takes a second for weights of a gigabyte."""

    async def scenario() -> None:
        a, b = await world.started(2)
        serving(b, spend)
        for _ in range(200):
            await a.fetch(b.peer, digest(BLOB), bytearray(len(BLOB)))
        assert asyncio.get_running_loop().time() < 10.0  # at a tenth of a core their looks would take 40 s

    world.run(scenario)


def test_who_is_called_for_each_micro_batch_may_pass_on_as_many_as_it_can() -> None:
    clock = At()
    neighbour = Burdens(clock).of(A, FAR)
    for _ in range(20_000):  # two hundred a second, each of two milliseconds here
        neighbour.call()
        neighbour.charge(2e-3)
        clock.at += 5e-3
        assert neighbour.pause_s() == 0.0


def test_keys_of_one_address_share_what_it_has_and_those_of_this_machine_do_not() -> None:
    clock = At()
    all_ = Burdens(clock)
    keys = [PeerId(f"{number:064x}") for number in range(8)]
    crowd = [all_.of(key, FAR) for key in keys]
    for each in crowd:
        each.charge(0.3)  # less than each may
    assert crowd[0].pause_s() > 0
    assert all_.at(FAR).pause_s() > 0
    assert all_.of(B, OTHER).pause_s() == 0.0
    here = [Burdens(clock).of(key, "127.0.0.1") for key in keys]
    for each in here:
        each.charge(0.3)
    assert here[0].pause_s() == 0.0


async def test_only_its_own_steps_are_charged_to_a_stream() -> None:
    clock = At()
    spent = Burdens(clock).of(A, "")
    computed = iter(range(1000))
    spent._computed_s = lambda: next(computed) / 8  # each look is an eighth of a second later

    async def fails(event: asyncio.Event) -> None:
        await event.wait()
        raise PeerError("no")

    event = asyncio.Event()
    asyncio.get_running_loop().call_soon(event.set)
    with pytest.raises(PeerError, match="no"):
        await spent.metered(fails(event))
    assert spent.cost_s == 2 / 8  # before the wait, and after
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await spent.metered(fails(asyncio.Event()))
    assert computing(VirtualClock())() == 0.0
    assert computing(SystemClock())() > 0.0


async def test_an_address_whose_handshakes_cost_too_much_is_turned_away_and_others_are_not(monkeypatch: Any) -> None:
    monkeypatch.setattr(limits, "ADDRESS_BURST_S", 0.02)
    monkeypatch.setattr(limits, "ADDRESS_SHARE", 1e-3)
    tasks, dropped, begun = Tasks(), [], []

    async def verify() -> tuple[Stream, Any]:
        begun.append(1)
        sum(range(100_000))  # some milliseconds
        raise PeerError("it proves nothing")

    handshakes = Handshakes(tasks, Gate(64, 64), 5.0, lambda _address, reason: dropped.append(reason))
    num_started = 0
    for _ in range(200):
        num_started += handshakes.begin("tls://far", FAR, verify, _never)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert len(begun) == num_started < 100 < sum("more than their share" in reason for reason in dropped)
    num = len(begun)
    handshakes.begin("tls://other", OTHER, verify, _never)
    handshakes.begin("tls://here", "127.0.0.1", verify, _never)
    await asyncio.sleep(0.01)
    assert len(begun) == num + 2
    await tasks.aclose()


async def _never(_stream: Stream, _lane: Any) -> None:
    raise AssertionError


@pytest.fixture
def strict(monkeypatch: Any) -> None:
    """Shares so small that both ends of a test may share one process, on a machine that has little for it."""
    monkeypatch.setattr(limits, "FLOOD_S", 0.5)
    monkeypatch.setattr(limits, "BURST_S", 2e-3)
    monkeypatch.setattr(limits, "SHARE", 1e-4)


NOTES = b"".join([encode_frame(encode(Note(method="nobody", body=bytes(1000))))] * 64)
REQUESTS = encode_frame(encode(BlobRequest(digest=Digest("0" * 64)))) * 64


@pytest.mark.usefixtures("strict")
async def test_who_floods_is_named_slowed_dropped_and_barred() -> None:
    async with under_attack() as victim:
        stream, _ = await victim.admitted()
        await _flood(stream, NOTES, victim.dropped.is_set)
        await victim.dropped.wait()
        (dropped,) = (event for event in victim.events if isinstance(event, ConnectionDropped))
        assert dropped.remote == victim.mallory.peer
        assert "it floods" in dropped.reason
        (slowed,) = (event for event in victim.events if isinstance(event, Notice))
        assert "read more slowly" in slowed.text
        assert victim.node._links.is_barred(victim.mallory.peer)
        answer = await victim.honest.call(victim.node.peer, Ask(text="x"), Answer, deadline_s=5)
        assert answer.text == "x"


@pytest.mark.usefixtures("strict")
async def test_who_asks_for_blobs_without_end_is_dropped_and_others_are_served() -> None:
    async with under_attack() as victim:
        await victim.admitted()
        stream = await victim.dial("bulk")
        reading = asyncio.ensure_future(drained(stream))
        await _flood(stream, REQUESTS, victim.dropped.is_set)
        await reading
        (dropped,) = (event for event in victim.events if isinstance(event, ConnectionDropped))
        assert "more blobs than" in dropped.reason
        assert await victim.honest.fetch_small(victim.node.peer, digest(BLOB), len(BLOB)) == BLOB


async def _flood(stream: Stream, sent: bytes, is_over: Callable[[], bool]) -> None:
    with suppress(PeerError):
        while not is_over():
            await stream.send(sent)
