"""Who computes which stage of a run with stages, and whose rounds stand for the run's: folds over events.

    stages = told(stages, entry)          members, rates and queues of each stage; who says that it holds which
    lead = led(lead, commit)              the lowest stage that goes on: its rounds and tokens are the run's

Each stage has rounds of its own, which go together. Those of the first count what the run has trained; whoever hears
none of it goes by the lowest stage that it hears. Stages are counted from 0 in events, and from 1 in words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import msgspec

from weft import events
from weft.dashboard import figures
from weft.ids import PeerId

if TYPE_CHECKING:
    from weft.model.sections import Section  # comes with torch, for which no view should wait

T = TypeVar("T")

GIVEN_UP, GIVEN_UP_S = 3, 60.0  # rounds of another stage, and seconds, without one of the lead's
MAX_STAGES = 1024  # that are kept: events may be of strangers


@dataclass(frozen=True, kw_only=True)
class StageNow:
    """A stage as it stands, by what peers tell."""

    members: tuple[PeerId, ...] = ()  # that compute it
    rate: float = 0.0  # samples a second that they would compute if they never waited
    waiting: int = 0  # micro-batches
    num_parameters: int | None = None
    layers: str = ""  # in words


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Of a run. `num` 0: it has no stages, as far as is known."""

    num: int = 0
    seen_at: float | None = None  # wall seconds, of the newest word on members
    members: tuple[tuple[PeerId, ...], ...] = ()
    rates: tuple[float, ...] = ()
    waiting: tuple[int, ...] = ()
    parameters: Mapping[int, int] = field(default_factory=dict)  # by stage, where one told
    held: Mapping[PeerId, frozenset[int]] = field(default_factory=dict)  # as each says itself
    layers: tuple[str, ...] = ()  # of each stage, in words, where the model is known
    helpers: frozenset[tuple[PeerId, int]] = frozenset()  # who computes for another, and of which stage

    @property
    def now(self) -> tuple[StageNow, ...]:
        return tuple(
            StageNow(
                members=_at(self.members, stage, ()),
                rate=_at(self.rates, stage, 0.0),
                waiting=_at(self.waiting, stage, 0),
                num_parameters=self.parameters.get(stage),
                layers=_at(self.layers, stage, ""),
            )
            for stage in range(self.num)
        )

    @property
    def everybody(self) -> frozenset[PeerId]:
        """Return who computes any stage."""
        return frozenset(peer for stage in self.members for peer in stage)

    @property
    def num_parameters(self) -> int | None:
        """Return those of the whole model, once all stages' are known."""
        return sum(self.parameters.values()) if self.num and len(self.parameters) == self.num else None

    def of(self, peer: PeerId) -> tuple[int, ...]:
        """Return the stages that a peer holds: by its own word, else by what others see."""
        if peer in self.held:
            return tuple(sorted(self.held[peer]))
        return tuple(stage for stage, members in enumerate(self.members) if peer in members)

    def empty(self) -> tuple[int, ...]:
        """Return the stages that nobody computes, once anybody computes any."""
        now = self.now
        return tuple(number for number, stage in enumerate(now) if not stage.members) if self.everybody else ()


@dataclass(frozen=True, kw_only=True)
class Lead:
    """Whose rounds stand for the run's. `stage` None: of a run without stages, or nobody has told of a round yet."""

    stage: int | None = None
    at: float = 0.0  # wall seconds, of its newest round
    beside: Mapping[int, int] = field(default_factory=dict)  # rounds of other stages since one of its own

    def is_of(self, event: events.Event) -> bool:
        """Return whether what an event counts is the run's, and not another stage's once more."""
        return self.stage is None or stage_of(event) in (None, self.stage)


def stage_of(event: events.Event) -> int | None:
    """Return the stage that an event is about; None: none."""
    return None if event.stage is msgspec.UNSET else event.stage


def led(lead: Lead, commit: events.RoundCommitted, at: float) -> Lead:
    """Return whose rounds are the run's after one more, at wall seconds."""
    stage = stage_of(commit)
    if stage is None:
        return lead
    if stage == lead.stage:
        return Lead(stage=stage, at=max(at, lead.at))
    num = lead.beside.get(stage, 0) + 1
    if lead.stage is None or stage < lead.stage or (num > GIVEN_UP and at - lead.at > GIVEN_UP_S):
        return Lead(stage=stage, at=at)
    return replace(lead, beside={**lead.beside, stage: num} if len(lead.beside) < MAX_STAGES else {})


def told(stages: Stages, entry: events.Entry) -> Stages:
    """Return what is known of the stages after one more entry."""
    match entry.event:
        case events.StageHeld(stage=stage, num_stages=num, num_parameters=num_parameters) if stage < num <= MAX_STAGES:
            held = stages.held.get(entry.peer, frozenset()) | {stage}
            return replace(
                stages,
                num=max(stages.num, num),
                parameters={**stages.parameters, stage: num_parameters},
                held={**stages.held, entry.peer: held},
            )
        case events.TeamFormed(stage=stage, members=members) if stage < MAX_STAGES:
            helpers, here = stages.helpers, {(entry.peer, stage)}
            return replace(stages, helpers=helpers | here if entry.peer in members[1:] else helpers - here)
        case events.StageLeft(stage=stage):
            return replace(
                stages,
                helpers=stages.helpers - {(entry.peer, stage)},
                held={**stages.held, entry.peer: stages.held.get(entry.peer, frozenset()) - {stage}},
            )
        case events.StagesSeen() as seen if len(seen.members) <= MAX_STAGES and entry.at >= (
            stages.seen_at or entry.at
        ):
            return replace(
                stages,
                num=max(stages.num, len(seen.members)),
                seen_at=entry.at,
                members=seen.members,
                rates=seen.rates,
                waiting=seen.waiting,
            )
    return stages


# --- in words ---

_OWN_WORDS = (
    *(events.StageHeld, events.StageLeft, events.StageEmpty, events.StagesSeen, events.TeamFormed),
    *(events.MicroBatchFailed, events.HeldDropped, events.TextMoved),
    *(events.PassageAudited, events.PassageDoubted, events.PassageRefused, events.AccuserDoubted),
    *(events.ReceiptsDiffer, events.ReceiptFailed),
)  # they name it


def prefixed(event: events.Event, text: str) -> str:
    """Return what is said of an event, with the stage whose rounds it is of."""
    stage = stage_of(event)
    return text if stage is None or isinstance(event, _OWN_WORDS) else f"stage {stage + 1}: {text}"


def state_at_commit(stages: Stages, peer: PeerId, commit: events.RoundCommitted, *, is_counted: bool) -> str:
    """Return what a peer does that tells of a commit."""
    return "training" if is_counted else "helping" if (peer, stage_of(commit)) in stages.helpers else "left out"


def ordinal(held: Sequence[int], num: int) -> str:
    """Return which stages these are: stage 2 of 3; stages 1 and 3 of 3."""
    names = [str(stage + 1) for stage in held]
    which = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"stage{'s' if len(names) > 1 else ''} {which}{f' of {num}' if num else ''}"


def holding(stages: Stages, peer: PeerId) -> str:
    """Return what a peer holds: stage 2 of 3, layers 4-6; nothing where it holds none."""
    held = stages.of(peer)
    if not held:
        return ""
    layers = _at(stages.layers, held[0], "") if len(held) == 1 else ""
    return f"{ordinal(held, stages.num)}{f', {layers}' if layers else ''}"


def layers_of(cuts: "Sequence[Section]") -> tuple[str, ...]:
    """Return the layers of each section, counted from 1."""

    def words(section: "Section") -> str:
        first, last = section.layers.start + 1, section.layers.stop
        return f"layer {first}" if first == last else f"layers {first}-{last}"

    return tuple(map(words, cuts))


def rate(of: StageNow) -> str:
    """Return how fast a stage computes; a dash where nobody has measured it."""
    return f"{figures.amount(of.rate) if of.rate >= 10 else f'{of.rate:.2g}'} samples/s" if of.rate > 0 else "-"


def slowest(stages: Stages) -> int | None:
    """Return the stage that the others wait for, by what is measured; None: not all is."""
    rates = [stage.rate for stage in stages.now]
    if len(rates) < 2 or min(rates) <= 0 or min(rates) == max(rates):
        return None
    return rates.index(min(rates))


def _at(values: Sequence[T], place: int, otherwise: T) -> T:
    return values[place] if place < len(values) else otherwise
