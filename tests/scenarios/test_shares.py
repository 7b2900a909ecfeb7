"""What honest members cost each other in computing stays within their shares, however fast rounds follow one another.

Time is virtual, so what a charge takes is made up: what it does on the machine of docs/log.md.
"""

import asyncio
import itertools
from functools import partial

import pytest
from benchmarks.rig.stages import Pipeline, Shape
from benchmarks.rig.stages_device import Script
from benchmarks.rig.stages_round import Pace

from scenarios.test_faults import MakeSwarm
from scenarios.test_stages import Played
from unit.engine.test_step import text_of
from unit.texts import stages
from unit.texts.stages import Served, tokens_of, wanted
from weft.net.transport import limits
from weft.net.transport.limits import BURST_S, Share
from weft.net.transport.memory import MemoryNetwork

CHARGE_S = 1.7e-4  # a frame that is read, decoded or handled, 33 of them a round
LAN_S = 5e-4  # from one to another
TRAIN_S = 0.01
FOR_S = 10.0
DRAW_S, NUM_TEXTS, NUM_TOKENS = 3e-3, 8, 400
ADDRESS = "203.0.113.9"  # of all: one router
COUNTED = vars(limits.Burden).copy()  # which other scenarios leave out (`conftest.py`)


@pytest.fixture
def levels(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What was left of each share after each charge."""
    found: list[float] = []

    class Watched(Share):
        def charge(self, cost_s: float, now: float) -> None:
            super().charge(cost_s, now)
            found.append(self._level_s)

    for name in ("charge", "call", "note", "pause_s", "do", "metered", "read"):
        monkeypatch.setattr(limits.Burden, name, COUNTED[name])
    monkeypatch.setattr(limits, "computing", lambda _clock: partial(next, itertools.count(0.0, CHARGE_S)))
    monkeypatch.setattr(limits, "network_of", lambda _source: ADDRESS)
    monkeypatch.setattr(limits, "Share", Watched)
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("names", "num_rounds"),
    [
        ("ab", 200),
        pytest.param("abcd", 100, marks=pytest.mark.slow),
        pytest.param("abcdefghijklmnop", 10, marks=pytest.mark.slow),
    ],
)
def test_members_of_rounds_that_take_no_time_are_never_slowed(
    make_swarm: MakeSwarm, levels: list[float], names: str, num_rounds: int
) -> None:
    """A round takes some 30 ms: of a core, each link would take a fifth."""
    swarm = make_swarm(num_rounds=num_rounds, num_peers=len(names), delay_s=LAN_S)

    async def scenario() -> None:
        await swarm.done(*await swarm.start(names, train_s=TRAIN_S))

    swarm.run(scenario)
    swarm.check()
    assert min(levels) > BURST_S / 2


@pytest.mark.full
def test_neighbours_in_a_pipeline_of_small_models_are_never_slowed(levels: list[float]) -> None:
    """Each computes 111 micro-batches a second."""
    script = Script(forward_s=3e-3, input_s=3e-3, weights_s=3e-3)
    shape = Shape(num_stages=3, script=script, delay_s=LAN_S, pace=Pace(every_s=5.0))

    async def work(_pipeline: Pipeline) -> None:
        await asyncio.sleep(FOR_S)

    found = Played([[1.0]] * 3, work, shape)
    assert len(found.pipeline.seen.finished[-1]) > 0.5 * FOR_S / script.total_s
    assert min(levels) > BURST_S / 2


@pytest.mark.slow
def test_members_that_draw_texts_for_somebody_are_never_slowed(
    levels: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three stages, each of which hears of one neighbour and tells the other: 300 steps a second."""
    monkeypatch.setattr(stages, "STEP_S", DRAW_S)
    served = Served((1, 1, 1), has_guesses=False)
    served.network = MemoryNetwork(delay_s=LAN_S)
    texts = list[list[int]]()

    async def play() -> None:
        async def one(number: int) -> None:
            await asyncio.sleep(number * DRAW_S)  # so that each text has steps of its own
            texts.append(await tokens_of(served.entry.begin(wanted(text_of(20, number), NUM_TOKENS))))

        await asyncio.gather(*map(one, range(NUM_TEXTS)))

    served.run(play)
    assert [len(each) for each in texts] == [NUM_TOKENS] * NUM_TEXTS
    assert min(levels) > BURST_S / 2
