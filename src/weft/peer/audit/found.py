"""What an audit has found."""

from dataclasses import dataclass

from weft.sync.records.acts import Outcome


@dataclass(frozen=True)
class Found:
    """
    Args:
        distance: between both states, where steps were done again: relative to what they changed.
    """

    outcome: Outcome
    why: str = ""
    distance: float = 0.0
