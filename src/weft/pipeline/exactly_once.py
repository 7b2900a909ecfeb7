"""Which micro-batches' weight gradients a member of a stage counts, so that each is counted once whoever dies.

A micro-batch may come to a stage more than once: as attempt 0 to one member, and, when an answer was too long in
coming, as attempts 1, 2 and so on to others. Whoever sent it accepts one input gradient of one attempt. Senders die,
too, and then others send: so one micro-batch may be accepted twice, by two who know nothing of each other.

    attempt 0   counts as soon as its sender has accepted it
    the others  are held, input and output gradient alone, and so is attempt 0 where its sender is gone
    a round     tells what each contributor counted and what it holds. What nobody counted is assigned: the lowest of
                those that hold it computes it, for the next round; all others let go of it

Each member works out the same from the same reports. Four rules keep that true while members are late, away or dead:

    what is held is assigned only by a round that every elector contributed to: another may have counted it (`all_told`)
    from the report to the commit nothing is counted; senders are asked again afterwards (`may_count`)
    what a round counted or assigned is past: it is counted by nobody else (`settled`)
    who brings what others have counted meanwhile, having been away, gives up all it brings (`clashes`)

After Ryabinin et al., SWARM, 2301.11913, where what was sent twice counts twice.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from weft.ids import PeerId
from weft.pipeline.messages import OfAttempt

MAX_PAST = 4096  # micro-batches of one origin: of so many steps that none of before is still under way


class BatchId(NamedTuple):
    """A micro-batch, in all stages alike."""

    origin: PeerId  # who began it
    number: int  # of those that it began


class Attempt(NamedTuple):
    """A micro-batch as one sender sent it to one member of a stage. No two members have attempt 0 of the same."""

    batch: BatchId
    number: int

    @classmethod
    def of(cls, message: OfAttempt) -> "Attempt":
        return cls(BatchId(PeerId(message.origin), message.number), message.attempt)

    @property
    def is_first(self) -> bool:
        return self.number == 0

    def at(self, stage: int) -> dict[str, Any]:
        """Return the fields that an `OfAttempt` of a stage names it by."""
        return {"stage": stage, "origin": self.batch.origin, "number": self.batch.number, "attempt": self.number}


Batches = frozenset[BatchId]
NONE: Batches = frozenset()


class Told(NamedTuple):
    """What a member contributes to a round."""

    counted: Batches
    held: Batches


class ExactlyOnce(NamedTuple):
    """Of one member of a stage."""

    asked: frozenset[Attempt] = frozenset()  # whether their senders accept them is not known yet
    held: Batches = NONE
    counted: Batches = NONE  # in the gradient that no round has counted
    past: Batches = NONE  # counted or assigned by rounds
    told: Told | None = None  # to the round that is under way

    def computed(self, attempt: Attempt) -> "ExactlyOnce":
        """An input gradient was sent back: its sender is asked whether it accepts it."""
        if attempt.batch in self.past:
            return self
        return self._replace(asked=self.asked | {attempt})

    def accepted(self, attempt: Attempt) -> "ExactlyOnce":
        """Its sender has accepted it."""
        if attempt not in self.asked:
            return self
        if not attempt.is_first:
            return self._kept(attempt)
        if not may_count(self):
            return self
        batch = attempt.batch
        return self._replace(asked=self.asked - {attempt}, held=self.held - {batch}, counted=self.counted | {batch})

    def refused(self, attempt: Attempt) -> "ExactlyOnce":
        """Its sender has accepted another."""
        return self._replace(asked=self.asked - {attempt})

    def doubted(self, attempt: Attempt) -> "ExactlyOnce":
        """Its sender is gone: it may have accepted it, and another may have sent it on."""
        return self._kept(attempt) if attempt in self.asked else self

    def dropped(self, batches: Batches) -> "ExactlyOnce":
        """There was no room for them. What was told to the round under way is not among them."""
        return self._replace(held=self.held - batches)

    def _kept(self, attempt: Attempt) -> "ExactlyOnce":
        held = self.held if attempt.batch in self.counted else self.held | {attempt.batch}
        return self._replace(asked=self.asked - {attempt}, held=held)

    def report(self) -> "ExactlyOnce":
        """Say what this member contributes to the round that is under way; `told` holds it."""
        return self._replace(told=Told(self.counted, self.held))

    def lost(self) -> "ExactlyOnce":
        """What was counted, and told to the round under way, is lost: others may count it, where they hold it."""
        told = None if self.told is None else self.told._replace(counted=NONE)
        return self._replace(counted=NONE, told=told)

    def committed(self, me: PeerId, reports: Mapping[PeerId, Told], electorate: Collection[PeerId]) -> "Closed":
        """Take a round's manifest up.

        Args:
            reports: of the contributors that the manifest names.
            electorate: who could have contributed.
        """
        counted = NONE.union(*(told.counted for told in reports.values()))
        assigned = assign(reports, electorate, counted | self.past)
        past = settled(self.past, counted, assigned)
        mine = frozenset(batch for batch, peer in assigned.items() if peer == me)
        brought = self.counted - reports[me].counted if me in reports else self.counted
        is_lost = clashes(brought, counted.union(assigned))
        return Closed(
            ExactlyOnce(
                asked=frozenset(attempt for attempt in self.asked if attempt.batch not in past),
                held=self.held - past,
                counted=mine if is_lost else brought | mine,
                past=recent(past),
            ),
            to_compute=mine,
            given_up=brought if is_lost else NONE,
        )


class Closed(NamedTuple):
    """What a member does when a round is over."""

    exactly_once: ExactlyOnce
    to_compute: Batches  # weight gradients of what it holds, for the next round
    given_up: Batches  # it brings what others have counted: its gradient is set to nothing before


def assign(reports: Mapping[PeerId, Told], electorate: Collection[PeerId], past: Batches) -> Mapping[BatchId, PeerId]:
    """Return who computes what nobody counted: the lowest contributor that holds it."""
    if not all_told(reports, electorate):
        return {}
    held = NONE.union(*(told.held for told in reports.values())) - past
    return {batch: min(peer for peer, told in reports.items() if batch in told.held) for batch in held}


def all_told(reports: Collection[PeerId], electorate: Collection[PeerId]) -> bool:
    """Whether nobody can have counted anything that is not in these reports."""
    return set(electorate) <= set(reports)


def may_count(exactly_once: ExactlyOnce) -> bool:
    """Whether what a member counts now is in no report that others go by already."""
    return exactly_once.told is None


def settled(past: Batches, counted: Batches, assigned: Collection[BatchId]) -> Batches:
    """Return what no member may count any more, but for whom it is assigned to."""
    return past | counted | frozenset(assigned)


def recent(past: Batches) -> Batches:
    """Return what is worth remembering of it: of each origin the last ones."""
    newest = dict[PeerId, int]()
    for batch in past:
        newest[batch.origin] = max(batch.number, newest.get(batch.origin, 0))
    return frozenset(batch for batch in past if batch.number > newest[batch.origin] - MAX_PAST)


def clashes(brought: Batches, settled_now: Batches) -> bool:
    """Whether a gradient that was not counted has something in it that others count."""
    return bool(brought & settled_now)
