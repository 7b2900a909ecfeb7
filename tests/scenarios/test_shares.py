"""What honest members cost each other in computing stays within their shares, however fast rounds follow one another.

Time is virtual, so what a charge takes is made up: what it does on the machine of docs/log.md.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from scenarios.swarm import Swarm
from scenarios.test_faults import MakeSwarm
from weft.events import ConnectionDropped, Notice
from weft.net.transport import burden
from weft.net.transport.burden import Share

CHARGE_S = 1.7e-4  # a frame that is read, decoded or handled, 33 of them a round
LAN_S = 5e-4  # from one to another
TRAIN_S = 0.01
ADDRESS = "203.0.113.9"  # of all: one router


@pytest.fixture
def levels(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What was left of each share after each charge."""
    found: list[float] = []

    class Watched(Share):
        def charge(self, cost_s: float, now: float) -> None:
            super().charge(cost_s, now)
            found.append(self._level_s)

    monkeypatch.setattr(burden, "computing", lambda _clock: partial(next, itertools.count(0.0, CHARGE_S)))
    monkeypatch.setattr(burden, "network_of", lambda _source: ADDRESS)
    monkeypatch.setattr(burden, "Share", Watched)
    return found


@pytest.mark.full
@pytest.mark.parametrize(("names", "num_rounds"), [("ab", 200), ("abcd", 200), ("abcdefghijklmnop", 40)])
def test_members_whose_rounds_take_no_time_are_never_slowed(
    make_swarm: MakeSwarm, levels: list[float], names: str, num_rounds: int
) -> None:
    swarm = make_swarm(num_rounds=num_rounds, num_peers=len(names), delay_s=LAN_S)

    async def scenario() -> None:
        await swarm.done(*await swarm.start(names, train_s=TRAIN_S))
        print("took", swarm.clock.now())

    swarm.run(scenario)
    swarm.check()
    print("min", min(levels), len(levels))
    for life in swarm.lives:
        assert not [event for _, event in life.events if isinstance(event, ConnectionDropped)]
        assert not [event for _, event in life.events if isinstance(event, Notice) and "share" in event.text]
