"""Several addresses of one peer, on a virtual clock."""

import asyncio

import pytest

from weft.clock import VirtualClock
from weft.errors import DialError
from weft.net.link.dialer import HEAD_START_S, HappyEyeballs


class FakeStream:
    def __init__(self):
        self.is_closed = False

    async def close(self):
        self.is_closed = True


class Town:
    """Addresses that open or fail after so many seconds: "+2" opens, "-3" fails."""

    def __init__(self):
        self.begun = []
        self.cancelled = []
        self.streams = {}

    async def dial(self, address):
        self.begun.append((asyncio.get_running_loop().time(), address))
        try:
            await asyncio.sleep(abs(float(address)))
        except asyncio.CancelledError:
            self.cancelled.append(address)
            raise
        if address.startswith("-"):
            raise DialError(f"{address} is dead")
        self.streams[address] = FakeStream()
        return self.streams[address]


async def outcomes(town, addresses, *, stop=None, num=99):
    found = []
    async with HappyEyeballs(addresses, town.dial, stop) as dialling:
        while len(found) < num and (outcome := await dialling.next()) is not None:
            found.append((asyncio.get_running_loop().time(), outcome[0], isinstance(outcome[1], DialError)))
    return found


def play(scenario):
    clock = VirtualClock()
    return clock.run(scenario())


def test_one_that_swallows_packets_does_not_hold_up_the_next():
    town = Town()
    found = play(lambda: outcomes(town, ["+8", "+8.5", "+0.2"], num=1))
    assert found == [(2 * HEAD_START_S + 0.2, "+0.2", False)]
    assert town.cancelled == ["+8", "+8.5"]
    assert not town.streams["+0.2"].is_closed


def test_the_next_begins_at_once_where_one_fails():
    town = Town()
    found = play(lambda: outcomes(town, ["-0.25", "+0.5"], num=1))
    assert found == [(0.25, "-0.25", True)]
    found = play(lambda: outcomes(Town(), ["-0.25", "+0.5"]))
    assert found == [(0.25, "-0.25", True), (0.75, "+0.5", False)]


def test_the_better_keeps_its_head_start():
    town = Town()
    assert play(lambda: outcomes(town, ["+0.9", "+0"], num=1)) == [(0.9, "+0.9", False)]
    assert [address for _, address in town.begun] == ["+0.9"]


def test_all_are_given_their_time_when_none_answers():
    found = play(lambda: outcomes(Town(), ["-8", "-8.25", "-8.5"]))
    assert [(at, is_dead) for at, _, is_dead in found] == [(8.0, True), (9.25, True), (10.5, True)]


def test_what_opened_unused_is_closed():
    town = Town()
    play(lambda: outcomes(town, ["+1.5", "+0.5"], num=1))  # both at 1.5 s
    assert sorted(stream.is_closed for stream in town.streams.values()) == [False, True]


def test_a_race_can_be_stopped():
    async def scenario():
        stop = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(3, stop.set_result, None)
        found = await outcomes(town, ["+8", "-8"], stop=stop)
        return found, asyncio.get_running_loop().time()

    town = Town()
    assert play(scenario) == ([], 3.0)
    assert sorted(town.cancelled) == ["+8", "-8"]


def test_a_fault_of_this_software_is_not_taken_for_a_dead_address():
    async def broken(address):
        raise ZeroDivisionError

    async def scenario():
        async with HappyEyeballs(["x"], broken) as dialling:
            await dialling.next()

    with pytest.raises(ZeroDivisionError):
        play(scenario)


def test_those_that_had_their_turn_and_said_nothing_are_named():
    async def scenario():
        async with HappyEyeballs(["+8", "-0.1", "+9", "+0.2"], Town().dial) as dialling:
            assert dialling.unanswered() == []
            while isinstance((await dialling.next())[1], DialError):
                pass
            return dialling.unanswered()

    assert [(address, str(error)) for address, error in play(scenario)] == [
        ("+8", "no answer in 2.3 s"),
        ("+9", "no answer in 1.2 s"),
    ]
