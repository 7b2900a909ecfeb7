"""How many may wait at the door, and who makes room."""

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from weft.clock import VirtualClock
from weft.errors import PeerError
from weft.ids import PeerId
from weft.net.transport.base import Lane, Stream
from weft.net.transport.limits import Gate, Handshakes
from weft.net.transport.memory import MemoryNetwork
from weft.tasks import Tasks

A, B = PeerId("a" * 64), PeerId("b" * 64)


def test_one_crowd_cannot_push_out_the_others() -> None:
    gate: Gate[int] = Gate(max_total=8, max_per_ip=4)
    assert gate.enter(100, "198.51.100.1") is None
    victims = [gate.enter(number, "203.0.113.9") for number in range(10)]
    assert [victim and victim[0] for victim in victims] == [None] * 4 + [0, 1, 2, 3, 4, 5]
    assert [gate.enter(number, f"192.0.2.{number}") for number in range(20, 23)] == [None] * 3
    victim = gate.enter(23, "192.0.2.23")
    assert victim is not None
    assert victim[0] == 6  # the oldest of the crowd, not the oldest of all
    gate.leave(100)
    assert gate.enter(24, "192.0.2.24") is None
    assert len(gate) == 8


def test_loopback_has_only_the_bound_over_all() -> None:
    gate: Gate[int] = Gate(max_total=8, max_per_ip=2)
    assert [gate.enter(number, "127.0.0.1") for number in range(8)] == [None] * 8
    assert gate.enter(8, "::1") == (0, "8 connections have proven no key; the oldest is dropped")


@given(
    st.lists(st.tuples(st.sampled_from(["192.0.2.1", "192.0.2.2", "127.0.0.1", "relay"]), st.booleans()), max_size=60)
)
def test_the_bounds_hold_whatever_comes_and_goes(arrivals: list[tuple[str, bool]]) -> None:
    gate: Gate[int] = Gate(max_total=6, max_per_ip=3)
    waiting: dict[int, str] = {}
    for number, (ip, somebody_leaves) in enumerate(arrivals):
        if somebody_leaves and waiting:
            leaver = next(iter(waiting))
            gate.leave(leaver)
            del waiting[leaver]
        victim = gate.enter(number, ip)
        if victim is not None:
            assert victim[0] != number  # the newcomer always gets its chance
            del waiting[victim[0]]
        waiting[number] = ip
        assert len(gate) == len(waiting) <= 6
        assert all(count <= 3 for its_ip, count in Counter(waiting.values()).items() if its_ip != "127.0.0.1")


class Doorway:
    """Handshakes on virtual time; `dropped` and `accepted` tell how they ended."""

    def __init__(self, max_total: int) -> None:
        self.tasks = Tasks()
        self.dropped: list[tuple[str, str]] = []
        self.accepted: list[Lane] = []
        self.discarded: list[str] = []
        gate: Gate[asyncio.Task[None]] = Gate(max_total, max_total)
        self.handshakes = Handshakes(self.tasks, gate, 10.0, lambda *drop: self.dropped.append(drop))

    def begin(self, name: str, takes_s: float, error: Exception | None = None) -> None:
        async def verify() -> tuple[Stream, Lane]:
            await asyncio.sleep(takes_s)
            if error is not None:
                raise error
            network = MemoryNetwork()
            await network.transport(B).start(self._ignore)
            return await network.transport(A).dial(B, f"memory://{B}", "control"), "control"

        self.handshakes.begin(name, "192.0.2.1", verify, self._accept, lambda: self.discarded.append(name))

    async def _accept(self, stream: Stream, lane: Lane) -> None:
        self.accepted.append(lane)

    async def _ignore(self, stream: Stream, lane: Lane) -> None:
        pass


def test_a_handshake_ends_in_a_stream_or_a_reason() -> None:
    async def main() -> Doorway:
        door = Doorway(max_total=9)
        door.begin("good", 9.0)
        door.begin("slow", 11.0)
        door.begin("bad", 1.0, PeerError("it lies"))
        await asyncio.sleep(20)
        assert len(door.tasks) == 0
        return door

    door = VirtualClock().run(main())
    assert door.accepted == ["control"]
    assert door.dropped == [("bad", "it lies"), ("slow", "it did not prove its key within 10 s")]
    assert door.discarded == ["bad", "good", "slow"]


def test_who_makes_room_is_told_why_even_before_it_began() -> None:
    async def main() -> Doorway:
        door = Doorway(max_total=2)
        for name in ("first", "second", "third"):
            door.begin(name, 1.0)
        await asyncio.sleep(5)
        return door

    door = VirtualClock().run(main())
    assert [name for name, _ in door.dropped] == ["first"]
    assert door.discarded == ["first", "second", "third"]
    assert len(door.accepted) == 2


def test_an_error_of_our_own_is_not_hidden() -> None:
    reported: list[dict[str, object]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        door = Doorway(max_total=2)
        door.begin("broken", 0.0, ZeroDivisionError())
        await asyncio.sleep(1)
        assert door.dropped == []

    VirtualClock().run(main())
    assert [type(context["exception"]) for context in reported] == [ZeroDivisionError]


def test_closing_ends_handshakes_without_a_word() -> None:
    async def main() -> Doorway:
        door = Doorway(max_total=2)
        door.begin("under way", 1.0)
        await asyncio.sleep(0)
        door.begin("not begun", 1.0)
        await door.tasks.aclose()
        return door

    door = VirtualClock().run(main())
    assert door.dropped == []
    assert sorted(door.discarded) == ["not begun", "under way"]


def test_a_task_may_close_the_tasks_it_belongs_to() -> None:
    async def main() -> None:
        tasks = Tasks()

        async def close_all() -> None:
            await tasks.aclose()

        sleeper, closer = tasks.spawn(asyncio.sleep(100, None)), tasks.spawn(close_all())
        await closer
        assert sleeper.cancelled()

    VirtualClock().run(main())


def test_grace_lets_tasks_end_by_themselves() -> None:
    async def main() -> tuple[bool, bool]:
        tasks = Tasks()
        short, long = tasks.spawn(asyncio.sleep(1, None)), tasks.spawn(asyncio.sleep(3, None))
        await tasks.aclose(grace_s=2.0)
        return short.cancelled(), long.cancelled()

    clock = VirtualClock()
    assert clock.run(main()) == (False, True)
    assert clock.now() == 2.0
