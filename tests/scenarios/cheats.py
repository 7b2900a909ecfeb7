"""Peers that do less than they claim, or something else, in as many ways as matter, in every step.

What one names of its states is what it has come to, so it shows auditors what it has named.
"""

from typing import Any

from weft.sim.cheats import Cheating
from weft.sim.scenario import Way
from weft.training.trainer import Trainer


class Always(Cheating):
    way: Way

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.ways = lambda _first: frozenset({self.way})


class NoWork(Always):
    way = "none"


class Noise(Always):
    way = "noise"


class Flip(Always):
    way = "upwards"


class HalfTheSteps(Always):
    way = "half the steps"


class HalfABatch(Always):
    way = "half a batch"


class OneOther(Always):
    way = "one other sample"


class OtherText(Always):
    way = "other text"


class Slower(Always):
    way = "slower"


class NewOptimizer(Always):
    way = "new optimizer"


class FalseMoments(Always):
    way = "false moments"


CHEATS: tuple[type[Trainer], ...] = (
    *(NoWork, Noise, Flip, HalfTheSteps, HalfABatch, OneOther, OtherText, Slower, NewOptimizer, FalseMoments),
)
