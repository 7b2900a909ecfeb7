"""How far the states may lie apart that two honest machines come to from the same one, by the same steps.

    distance    |a - b| / |a - before|         of the parameters: relative to what the auditor's own steps changed
    threshold   of fp32 1.5e-4, of bf16 2.5e-2; of the optimizer's numbers in bf16 3e-2; exact: equal bits
    new         with AdamW's first step each parameter goes one step along the sign of its gradient: where that is next
                to nothing, rounding turns the sign. In bf16 that is 0.25 more
    moments     of one step: in fp32 the parameters may lie up to 2.5e-2 apart where AdamW makes them of the peer's own
                moments, and those lie at most 1.5e-5 apart: where a gradient is next to nothing, rounding turns its
                sign, too. In bf16 they have to be what AdamW makes of these, but for 1.5e-4: gradients are rounded to
                eight bits there, and AdamW's numbers are not
    rounding    of steps in fp32: three times as far apart as they lead from parameters that are 2^-20 of themselves
                off, the farthest of three times; 2.5e-2 times the root of the steps at most

Machines of other instruction sets, threads or makers round otherwise. One step in fp32 ended at most 2.1e-6 apart, in
bf16 8.1e-3 (benchmarks/reports/audit_steps.md). The least that a cheat made of it was 1.0e-2, by a learning rate one
hundredth lower: in bf16 that is seen by the moments. The next was 9.5e-2, by half the samples. Distances grow with the
number of steps, in bf16 as well as their square root; what cheats make of them grows no slower. First steps in bf16
ended up to 6.3e-2 apart: as many signs turn as gradients are smaller than their rounding, whatever the size of the
model. In fp32 those of models of 24,000 parameters ended up to 3.9e-4 apart, their moments 1.5e-6, and parameters
9.4e-7 from those that AdamW makes of the moments.
"""

from dataclasses import dataclass
from math import hypot, sqrt
from typing import Literal

Numerics = Literal["fp32", "bf16", "exact"]
NONE = -1.0  # no distance is less, not even that of 0 and -0
ONE_STEP: dict[Numerics, float] = {"fp32": 1.5e-4, "bf16": 2.5e-2, "exact": NONE}
FIRST: dict[Numerics, float] = {"fp32": 0.0, "bf16": 0.25, "exact": 0.0}
MOMENTS: dict[Numerics, float] = {"fp32": 1.5e-4, "bf16": 3e-2, "exact": NONE}
FOLLOWED, OF_FOLLOWED = 2.5e-2, 1.5e-5  # parameters, and the moments that they follow
ROUNDING = 2.0**-20  # of themselves: by so much parameters are off where one looks how far rounding leads in fp32
NUM_ROUNDINGS, TIMES_ROUNDED = 3, 3.0  # signs that turn by chance: what comes of it differs as much from draw to draw


def threshold(numerics: Numerics, num_steps: int, *, is_new: bool = False) -> float:
    """Return the largest distance after so many steps, of states that are not equal, that is held for honest.

    Args:
        is_new: the first of them is the first of an optimizer.
    """
    most, first = ONE_STEP[numerics] * sqrt(num_steps), FIRST[numerics] / sqrt(num_steps)
    return hypot(most, first) if is_new and first else most


def threshold_of_moments(numerics: Numerics, num_steps: int) -> float:
    """Return the same of the optimizer's numbers, which a gradient's rounding reaches undamped."""
    return MOMENTS[numerics] * sqrt(num_steps)


def widened(num_steps: int, usual: float, rounded: float) -> float:
    """Return the largest distance in fp32 that is held for honest after so many steps, where these are such that
    rounding leads farther than is usual.

    Args:
        usual: as of `threshold`, or of `threshold_of_moments`.
        rounded: how far parameters that are off by `ROUNDING` lead by these very steps, at most.
    """
    return max(usual, min(TIMES_ROUNDED * rounded, FOLLOWED * sqrt(num_steps)))


@dataclass(frozen=True)
class Followed:
    """How a step's parameters lie to the optimizer's numbers of who made it.

    Args:
        distance: of the parameters, from those that the optimizer makes of the peer's own numbers.
        of_memory: of these numbers, from this machine's.
        of_parameters: of the parameters, from this machine's.
    """

    distance: float
    of_memory: float
    of_parameters: float

    @property
    def is_honest(self) -> bool:
        """Whether rounding of the gradient is all that is between both, in fp32."""
        is_made = self.distance <= ONE_STEP["fp32"] and self.of_memory <= OF_FOLLOWED
        return is_made and self.of_parameters <= FOLLOWED
