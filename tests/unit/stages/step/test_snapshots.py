"""States of a round that is still to come: kept as it is over, by all who were asked, or not at all."""

import asyncio

from weft.ids import Digest
from weft.stages.step.snapshots import MAX_AHEAD, MAX_KEPT, Snapshots

HERE = Digest("ab" * 32)


class Pins:
    def __init__(self) -> None:
        self.num = 0

    async def __call__(self) -> None:
        self.num += 1


async def test_a_state_is_kept_as_its_round_is_over_once_for_all_who_ask() -> None:
    pins = Pins()
    snapshots = Snapshots(pins)
    asked = [asyncio.ensure_future(snapshots.at(5)) for _ in range(2)]
    await asyncio.sleep(0)
    await snapshots.settled(4, Digest("cd" * 32))
    assert pins.num == 0
    await snapshots.settled(5, HERE)
    assert [await each for each in asked] == [HERE, HERE]
    assert pins.num == 1


async def test_a_round_that_has_gone_by_or_is_skipped_is_too_late() -> None:
    pins = Pins()
    snapshots = Snapshots(pins)
    asked = asyncio.ensure_future(snapshots.at(6))
    await asyncio.sleep(0)
    await snapshots.settled(7, HERE)
    assert await asked is None
    assert await snapshots.at(7) is None
    assert await snapshots.at(8 + MAX_AHEAD) is None  # nobody has others remember what is never due
    assert pins.num == 0


async def test_who_stops_waiting_takes_nothing_from_others() -> None:
    snapshots = Snapshots(Pins())
    first, second = (asyncio.ensure_future(snapshots.at(1)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    await snapshots.settled(1, HERE)
    assert await second == HERE


async def test_states_of_long_ago_are_forgotten() -> None:
    states = Snapshots(Pins())
    for number in range(MAX_KEPT + 1):
        await states.settled(number, Digest(f"{number:064x}"))
    assert states.round_after(Digest(f"{0:064x}")) is None
    assert states.round_after(Digest(f"{MAX_KEPT:064x}")) == MAX_KEPT
