"""What a member tells who asks about the way to it, on a virtual clock and lines of a known speed."""

import asyncio

import pytest

from weft.errors import CallFailed
from weft.net import speed_test as gauge
from weft.net.speed_test import (
    LARGE_NBYTES,
    PAUSE_S,
    SMALL_NBYTES,
    SpeedIs,
    SpeedPlease,
    SpeedTest,
    measure,
    sight,
    zeros,
)
from weft.wire import digest


def test_speed_is_measured_both_ways_with_more_bytes_on_a_faster_line(world):
    async def scenario():
        a, b = await world.started(2)
        SpeedTest(b, world.clock)
        world.network.set_line(a.peer, up_bps=2e6, down_bps=8e6)
        slow = await measure(a, b.peer, world.clock)
        assert slow.nbytes == SMALL_NBYTES
        assert slow.up_bps == pytest.approx(2e6, rel=0.1)
        assert slow.down_bps == pytest.approx(8e6, rel=0.2)
        await asyncio.sleep(PAUSE_S)
        world.network.set_line(a.peer, up_bps=1e8, down_bps=2e8)
        fast = await measure(a, b.peer, world.clock)
        assert fast.nbytes == LARGE_NBYTES
        assert fast.up_bps == pytest.approx(1e8, rel=0.2)

    world.run(scenario)


def test_zeros_are_hashed_once_however_many_blobs_are_asked_for(world, monkeypatch):
    hashed = []
    monkeypatch.setattr(gauge, "digest", lambda data: hashed.append(len(data)) or digest(data))
    zeros.cache_clear()

    async def scenario():
        a, b = await world.started(2)
        SpeedTest(b, world.clock)
        await measure(a, b.peer, world.clock)
        for _ in range(5):
            with pytest.raises(CallFailed):
                await a.fetch_small(b.peer, digest(b"something else"), 100)

    world.run(scenario)
    assert sorted(hashed) == sorted({*hashed})


def test_a_member_measures_seldom_and_gives_zeros_to_who_asked_only(world):
    async def scenario():
        a, b, c = await world.started(3)
        SpeedTest(b, world.clock)
        await measure(a, b.peer, world.clock)
        with pytest.raises(CallFailed, match="less than 20 s ago"):
            await measure(a, b.peer, world.clock)
        with pytest.raises(CallFailed, match="begins with a small one"):
            await c.call(b.peer, SpeedPlease(nbytes=LARGE_NBYTES), SpeedIs, deadline_s=5)
        with pytest.raises(CallFailed, match="holds no blob"):
            await c.fetch_small(b.peer, zeros(LARGE_NBYTES), LARGE_NBYTES)

    world.run(scenario)


def test_one_measurement_at_a_time(world):
    async def scenario():
        a, b, c = await world.started(3)
        SpeedTest(b, world.clock)
        world.network.set_line(a.peer, up_bps=1e6, down_bps=1e6)
        first = asyncio.ensure_future(measure(a, b.peer, world.clock))
        await asyncio.sleep(1)
        with pytest.raises(CallFailed, match="another measurement is under way"):
            await measure(c, b.peer, world.clock)
        assert (await first).nbytes == SMALL_NBYTES

    world.run(scenario)


def test_a_clock_that_is_wrong_is_seen(world):
    class Late:
        def now(self):
            return world.clock.now()

        def wall(self):
            return world.clock.wall() - 3600

    async def scenario():
        a, b = await world.started(2)
        SpeedTest(b, Late())
        found = await sight(a, b.peer, world.clock)
        assert found.ahead_s == pytest.approx(-3600, abs=0.05)
        assert found.round_trip_s == pytest.approx(0.02, abs=0.001)
        assert found.seen.source == a.peer  # what the memory network has for an IP address

    world.run(scenario)
