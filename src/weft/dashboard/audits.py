"""What members have found of each other's work, where they audit each other: sums over what is told of audits.

    take(entry)     counts what an audit came to
    count(round)    a round counts what its peers contributed
    now             the sums as they stand

Of members that are not heard nobody knows what they have audited: sums are of those that are.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from weft import events
from weft.ids import PeerId, Round, several

Audit = events.WorkAudited | events.WorkDoubted | events.MergeAudited | events.MergeDoubted

EQUAL, DIFFERS, UNANSWERED = OUTCOMES = ("equal", "differs", "unanswered")
STEPS, PART = WHATS = ("steps", "part")  # what is done again: training steps, or the merging of a part


@dataclass(frozen=True, kw_only=True)
class Found:
    """What audits of one peer came to.

    Args:
        distance: the largest that was measured: between the states that both came to, relative to what the steps
            changed; None: none was.
    """

    num_equal: int = 0
    num_differing: int = 0
    num_unanswered: int = 0
    distance: float | None = None

    @property
    def nums(self) -> tuple[int, int, int]:
        """Return how many there were, in the order of `OUTCOMES`."""
        return self.num_equal, self.num_differing, self.num_unanswered

    @property
    def num(self) -> int:
        return sum(self.nums)


@dataclass(frozen=True, kw_only=True)
class AuditsNow:
    """The sums as they stand.

    Args:
        num_counted: contributions that rounds have counted. `num_audited`: those of them that somebody looked at, each
            once. `num_steps`: training steps that were done again.
        num_by: audits by what was done again, and what they came to.
    """

    num_counted: int = 0
    num_audited: int = 0
    num_steps: int = 0
    num_by: Mapping[tuple[str, str], int]
    of: Mapping[PeerId, Found]

    @property
    def num(self) -> int:
        return sum(self.num_by.values())


class Audits:
    """Of one run."""

    def __init__(self) -> None:
        self._works: set[tuple[Round, PeerId]] = set()
        self._counted: set[tuple[Round, PeerId]] = (
            set()
        )  # an audit may be told of what no round that is heard of counts
        self._num_counted = self._num_steps = 0
        self._num_by: Counter[tuple[str, str]] = Counter()
        self._of: dict[PeerId, Found] = {}

    def count(self, round: Round, contributors: Collection[PeerId]) -> None:
        """A round counts what these contributed."""
        self._counted.update((round, peer) for peer in contributors)
        self._num_counted += len(contributors)

    def take(self, event: Audit) -> None:
        """Count what an audit came to."""
        outcome = outcome_of(event)
        self._num_by[what_of(event), outcome] += 1
        self._of[event.member] = _and_one(self._of.get(event.member, Found()), outcome, distance_of(event))
        if isinstance(event, events.WorkAudited | events.WorkDoubted):
            self._works.add((event.round, event.member))
            self._num_steps += 0 if outcome == UNANSWERED else event.num_steps

    @property
    def now(self) -> AuditsNow:
        return AuditsNow(
            num_counted=self._num_counted,
            num_audited=len(self._works & self._counted),
            num_steps=self._num_steps,
            num_by=dict(self._num_by),
            of=dict(self._of),
        )


def _and_one(found: Found, outcome: str, distance: float | None) -> Found:
    most = max((each for each in (found.distance, distance) if each is not None), default=None)
    return replace(
        found,
        num_equal=found.num_equal + (outcome == EQUAL),
        num_differing=found.num_differing + (outcome == DIFFERS),
        num_unanswered=found.num_unanswered + (outcome == UNANSWERED),
        distance=most,
    )


def what_of(event: Audit) -> str:
    """Return what was done again, in one of `WHATS`."""
    return STEPS if isinstance(event, events.WorkAudited | events.WorkDoubted) else PART


def outcome_of(event: Audit) -> str:
    """Return what an audit came to, in one of `OUTCOMES`: whoever tells of it may tell anything."""
    if isinstance(event, events.WorkAudited | events.MergeAudited):
        return EQUAL
    return UNANSWERED if event.outcome == UNANSWERED else DIFFERS


def distance_of(event: Audit) -> float | None:
    """Return how far apart two machines came; None: that was not measured, or is no number."""
    if isinstance(event, events.WorkAudited):
        return event.distance if math.isfinite(event.distance) else None
    if isinstance(event, events.WorkDoubted) and outcome_of(event) == DIFFERS:  # a false claim has none
        return event.distance if math.isfinite(event.distance) and event.distance > 0 else None
    return None


# --- in words ---


def share(now: AuditsNow, rate: float | None) -> str:
    """Return how much of the work was audited, beside what the run asks for."""
    part = f" ({100 * now.num_audited / now.num_counted:.3g} %)" if now.num_counted else ""
    asked = "" if rate is None else f"; the run asks for {100 * rate:.3g} %, of newcomers for four times as much"
    num_parts = sum(num for (what, _), num in now.num_by.items() if what == PART)
    return (
        f"{now.num_audited:,} of {several(now.num_counted, 'contribution')} audited{part}{asked}. "
        f"Done again: {several(now.num_steps, 'training step')}; merged again: {several(num_parts, 'part')}."
    )
