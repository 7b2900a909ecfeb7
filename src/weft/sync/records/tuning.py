"""How often members synchronise and in which bytes, chosen from what rounds take: `method = "auto"`.

    share = waited / (waited + worked)      of a round: worked, in inner steps; waited, all else that it takes
    a rung of the ladder (H', c') takes     worked H' / H,  and waits  waited bits(c') / bits(c)

Rungs stand in order: those above learn more from the same tokens. The leader of a round names the first on which
members wait for at most the share that the run allows; to go up, it must be clearly less, for what is measured wobbles.
Where they wait far too long it goes down as soon as that was measured twice.
All go over with the manifest's outer step. Whoever votes checks that it is a rung, and that the last change was some
rounds ago: a leader that names a bad one harms a few rounds, until the next.

All else is encoding, from the last announcement to the decision, and fetching and applying results; not evaluation,
nor waiting for others' inner steps. What does not shrink with the bytes, the delay of messages, is foretold too small
at first and measured then.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from weft.codec.config import CodecConfig
from weft.ids import Round
from weft.sync.method.choices import Choices
from weft.sync.method.presets import LADDER
from weft.sync.records.charter import Charter
from weft.wire import Record

PACE = 5  # rounds from one change to the next, at least,
SOON = 3  # and down from where members wait far too long
FAR = 2.0  # times the share that the run allows
NUM_SEEN = 2  # rounds that must have been measured since
SURELY = 0.6  # of the share: to go up, less than this is foretold
_BLOCKS = 1 << 20  # numbers of which a codec's bits are reckoned

_Ms = Annotated[int, Meta(ge=0, le=1 << 53)]


class Tuned(Record, frozen=True, kw_only=True):
    """A change of rung, and why: what a round took where its leader is, in milliseconds."""

    rung: Annotated[int, Meta(ge=0, lt=len(LADDER))]
    waited_ms: _Ms
    worked_ms: _Ms

    @property
    def share(self) -> float:
        """Return the share of a round's time that members waited."""
        return self.waited_ms / max(self.waited_ms + self.worked_ms, 1)


@dataclass(frozen=True)
class Seen:
    """What rounds took, in the median of the last ones by the present settings: seconds."""

    waited_s: float
    worked_s: float

    @property
    def share(self) -> float:
        return self.waited_s / (self.waited_s + self.worked_s)


def chosen(charter: Charter, round: Round, seen: Seen | None) -> Tuned | None:
    """Return the change that the leader of `round` proposes; None: all stays as it is."""
    now = charter.settings.method
    if not now.tune or seen is None or round < charter.tuned_at + SOON or seen.worked_s <= 0:
        return None
    limit, present = now.tune, rung_of(now)
    if seen.share <= FAR * limit and round < charter.tuned_at + PACE:
        return None

    def share(rung: int) -> float:
        every, codec = LADDER[rung]
        waited_s = seen.waited_s * _bits(codec) / _bits(now.codec)
        return waited_s / (waited_s + seen.worked_s * every / now.every)

    fits = (rung for rung in range(len(LADDER)) if share(rung) <= limit * (1 if rung >= present else SURELY))
    rung = next(fits, len(LADDER) - 1)
    if rung == present:
        return None
    tuned = Tuned(rung=rung, waited_ms=int(1000 * seen.waited_s), worked_ms=int(1000 * seen.worked_s))
    return tuned if is_allowed(charter, round, tuned) else None  # from off the ladder all is up


def is_allowed(charter: Charter, round: Round, tuned: Tuned) -> bool:
    """Return whether a manifest of `round` may name this change."""
    method = charter.settings.method
    present = rung_of(method)
    pace = SOON if tuned.rung > present else PACE
    return bool(method.tune) and round >= charter.tuned_at + pace and tuned.rung != present


def tuned_charter(charter: Charter, round: Round, tuned: Tuned) -> Charter:
    """Return what holds after the manifest of `round` that names it."""
    settings = msgspec.structs.replace(charter.settings, method=tuned_method(charter.settings.method, tuned))
    return msgspec.structs.replace(charter, settings=settings, tuned_at=round)


def tuned_method(method: Choices, tuned: Tuned) -> Choices:
    """Return the method on its new rung."""
    every, codec = LADDER[tuned.rung]
    return msgspec.structs.replace(method, every=every, codec=codec, reply_codec=None)


def rung_of(choices: Choices) -> int:
    """Return the rung on which a method stands; of one that a steward has set otherwise, that from which all are up."""
    return next((n for n, rung in enumerate(LADDER) if rung == (choices.every, choices.codec)), len(LADDER))


def _bits(codec: CodecConfig) -> float:
    from weft.codec.build import build  # needs torch, which an anchor does not have

    return 8 * build(codec).nbytes(_BLOCKS) / _BLOCKS
