"""One process of a run with stages in a simulated world: the company that production has, and how it fared.

It does not know what befalls it.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from weft.clock import Clock
from weft.ids import Digest, Tokens
from weft.peer.peer import Outcome
from weft.sim.sections import CostSection, CostTied, Owing, PacedSection
from weft.stages.launch import summed
from weft.stages.peer import Company
from weft.stages.step.membership import Kit
from weft.sync.records.messages import Manifest


class OwingClock:
    """A machine's clock: while something is computed, with the time that it takes and that has not passed yet.

    Args:
        owed_s: returns that time.
    """

    def __init__(self, clock: Clock, owed_s: Callable[[], float]) -> None:
        self._clock = clock
        self._owed_s = owed_s

    def now(self) -> float:
        return self._clock.now() + self._owed_s()

    def wall(self) -> float:
        return self._clock.wall()


class StagedLife:
    """
    Args:
        computes: whether sections are computed; else they only take their time, and nothing is learnt.
    """

    def __init__(self, kit: Kit, owing: Owing, *, computes: bool) -> None:
        if computes:
            kit = replace(kit, make_section=partial(PacedSection, owing))
        else:
            kit = replace(kit, make_section=partial(CostSection, owing), make_tied=CostTied)
        self._company = Company(kit)
        self._heads: dict[int, Manifest] = {}  # of what it has held

    async def live(self, wait_for: int | None) -> Outcome:
        """Take part to the end.

        Args:
            wait_for: begin once so many peers are here; None: join.
        """
        await (self._company.join() if wait_for is None else self._company.found(wait_for))
        return summed(self._company)

    def stop(self, reason: str) -> None:
        self._company.stop(reason)

    def head(self, stage: int) -> Manifest | None:
        """Return the last manifest of a stage that this process has taken up."""
        member = self._company.members.get(stage)
        if member is not None and member.peer.head is not None:
            self._heads[stage] = member.peer.head
        return self._heads.get(stage)

    @property
    def carried_tokens(self) -> Tokens:
        """Return what it has trained in its stages and no manifest has counted."""
        return Tokens(sum(member.peer.carried_tokens for member in self._company.members.values()))

    @property
    def replicas(self) -> dict[int, Digest]:
        """Return the digests of what it held at the end, by stage."""
        return {stage: outcome.replica for stage, outcome in sorted(self._company.outcomes.items())}
