"""How far the states may lie apart that two honest machines come to from the same one, by the same steps.

    distance    |a - b| / |a - before|         of the parameters: relative to what the auditor's own steps changed
    threshold   of fp32 1.5e-4, of bf16 3e-3; of the optimizer's numbers in bf16 3e-2; of exact numbers none: equal bits

Machines of other instruction sets, threads or makers round otherwise. One step in fp32 ended at most 2.1e-6 apart, in
bf16 1.0e-3; the least that any cheat made of it was 1.0e-2 (a learning rate one hundredth lower). Distances grow with
the number of steps, in bf16 as well as their square root; what cheats make of them grows no slower.
"""

from math import sqrt
from typing import Literal

Numerics = Literal["fp32", "bf16", "exact"]
NONE = -1.0  # no distance is less, not even that of 0 and -0
ONE_STEP: dict[Numerics, float] = {"fp32": 1.5e-4, "bf16": 3e-3, "exact": NONE}
MOMENTS: dict[Numerics, float] = {"fp32": 1.5e-4, "bf16": 3e-2, "exact": NONE}


def threshold(numerics: Numerics, num_steps: int) -> float:
    """Return the largest distance after so many steps, of states that are not equal, that is held for honest."""
    return ONE_STEP[numerics] * sqrt(num_steps)


def threshold_of_moments(numerics: Numerics, num_steps: int) -> float:
    """Return the same of the optimizer's numbers, which a gradient's rounding reaches undamped."""
    return MOMENTS[numerics] * sqrt(num_steps)
