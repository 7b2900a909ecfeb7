"""What a member of a stage signs of a micro-batch that it has computed, and who of its stage computes it again: pure.

    sender                      member                        next member
      what went in  ─given──►     what it made ──output──►
      ◄──gradient──              ◄──returned──
                                 passage: the four digests, and the loss

Who has sent a micro-batch accepts what comes back only with the passage of who computed it, and the one of the stage
after, which says the same of what went between those two (`why_refused`, `is_joined`). It tells both to the other
members of that stage. So nobody hides what it has made, and each digest is signed at both its ends.

    Opened(head)     this member has the state after a manifest: its own signature draws what it looks at
    Told(passage)    its sender tells what another has computed       -> Look, where it was drawn
    Accused(letter)  another has found it to be something else        -> Look at the same, and more often at its author
    Looked(found)    this member has computed it again                -> Accuse, or Clear: the accuser is believed less
    Closed()         another state comes: nothing of this one can be computed any more

Members of a stage have the same parameters until a round is decided, and gradients of weights only add up: so what was
computed can be computed again from what went in and came back, and nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, NamedTuple, assert_never

from msgspec import UNSET, Meta, UnsetType

from weft.ids import Digest, PeerId
from weft.net.messages import HexDigest, HexPeer, HexRun
from weft.verify.draw import drawn
from weft.verify.suspicion import LASTS, TIMES
from weft.wire import Record

MAX_PASSAGE_NBYTES = 4 << 10  # of one, signed: digests and numbers
MAX_EARLY, MAX_EARLY_OF = 256, 64  # passages of a state that is still to come, and of those that one tells
MAX_BEGUN = 4096  # passages that are remembered: each is looked at once
MOST_FALSE = 3  # accusations of one member that were found wrong: no more of its are looked into

_Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Name = HexDigest | UnsetType


class Passage(Record, frozen=True, kw_only=True):
    """What a member of a stage signs of one micro-batch that it has computed there and back."""

    run: HexRun  # of the stage
    head: HexDigest  # the manifest after which its parameters are
    stage: _Count
    origin: HexPeer
    number: _Count
    attempt: _Count
    round: _Count  # of the first stage
    step: _Count
    num_samples: Annotated[int, Meta(ge=1, lt=1 << 20)]
    sender: HexPeer
    tokens: HexDigest
    given: _Name = UNSET  # activations that came; unset: to the first stage
    output: _Name = UNSET  # activations that went on; unset: from the last
    member: HexPeer | UnsetType = UNSET  # of the next stage, whose gradient came back; unset likewise
    returned: _Name = UNSET  # that gradient; unset likewise
    gradient: _Name = UNSET  # of what had come; unset: that was tokens
    loss: float  # mean over the micro-batch


@dataclass(frozen=True)
class Asked:
    """What was sent to a member, and what it sends back, as its sender knows it."""

    run: HexRun
    stage: int
    origin: PeerId
    number: int
    attempt: int
    round: int
    step: int
    num_samples: int
    sender: PeerId
    tokens: Digest
    given: Digest | None
    gradient: Digest | None
    loss: float


def why_refused(passage: Passage, asked: Asked, *, is_last: bool) -> str | None:
    """Return why a passage is not of what was sent to its author, and came back from it; None: it is."""
    place = ("run", "stage", "origin", "number", "attempt", "round", "step", "num_samples", "sender", "tokens", "loss")
    other = [name for name in place if getattr(passage, name) != getattr(asked, name)]
    other += [name for name in ("given", "gradient") if (getattr(passage, name) or None) != getattr(asked, name)]
    if other:
        return f"it names another {other[0]}"
    return None if is_whole(passage, is_last=is_last) else "it does not say what came in and what went out"


def is_whole(passage: Passage, *, is_last: bool) -> bool:
    """Return whether a passage says all that one of its stage has to say."""
    before = {passage.given is UNSET, passage.gradient is UNSET}
    onward = {passage.output is UNSET, passage.member is UNSET, passage.returned is UNSET}
    return before == {passage.stage == 0} and onward == {is_last}


def is_joined(passage: Passage, author: PeerId, after: Passage, next_author: PeerId) -> bool:
    """Return whether two neighbours say the same of what went from one to the other, and came back."""
    here = (passage.origin, passage.number, passage.round, passage.step, passage.num_samples, passage.tokens)
    there = (after.origin, after.number, after.round, after.step, after.num_samples, after.tokens)
    ends = (passage.output, passage.returned, passage.loss) == (after.given, after.gradient, after.loss)
    is_next = (passage.stage + 1, passage.member, author) == (after.stage, next_author, after.sender)
    return here == there and ends and is_next


# --- who looks at what ---


class Key(NamedTuple):
    """What is looked at once."""

    author: PeerId
    name: Digest  # of the passage


@dataclass(frozen=True)
class Opened:
    """This member has the state after a manifest.

    Args:
        ticket: its own signature of that: nobody else can make it.
        num_electors: of the stage.
        round: that follows.
    """

    head: Digest
    ticket: bytes
    num_electors: int
    round: int


@dataclass(frozen=True)
class Told:
    """Somebody tells of a passage.

    Args:
        head: that it names.
    """

    by: PeerId
    key: Key
    head: Digest


@dataclass(frozen=True)
class Accused:
    """A member says that a passage is something else.

    Args:
        round: in which it says so.
    """

    by: PeerId
    key: Key
    head: Digest
    round: int


@dataclass(frozen=True)
class Looked:
    """This member has computed it again; `None`: it could not, which says nothing."""

    key: Key
    outcome: Literal["equal", "differs"] | None


@dataclass(frozen=True)
class Closed:
    """Another state comes."""


Event = Opened | Told | Accused | Looked | Closed


@dataclass(frozen=True)
class Look:
    """Compute this again."""

    key: Key


@dataclass(frozen=True)
class Accuse:
    """Say that it is something else."""

    key: Key


@dataclass(frozen=True)
class Clear:
    """A member accused another of what this one finds to be right."""

    by: PeerId
    key: Key


Output = Look | Accuse | Clear


@dataclass(frozen=True)
class Watch:
    """What one member looks at.

    Args:
        rate: how many members look at a passage, on average.
        begun: that it has looked at, the oldest first, and who had accused the author of it.
        early: what was told of states that are still to come.
        doubted: until which round the authors are looked at more often.
        num_false: how often each member was wrong.
    """

    me: PeerId
    rate: float
    opened: Opened | None = None
    begun: Mapping[Key, frozenset[PeerId]] = field(default_factory=dict)
    early: tuple[Told | Accused, ...] = ()
    doubted: Mapping[PeerId, int] = field(default_factory=dict)
    num_false: Mapping[PeerId, int] = field(default_factory=dict)
    results: Mapping[Key, Looked] = field(default_factory=dict)  # of this state


def is_wanted(watch: Watch, key: Key) -> bool:
    """Return whether a passage that was told of is looked at, or may be yet."""
    return key in watch.begun or any(each.key == key for each in watch.early)


def step(watch: Watch, event: Event) -> tuple[Watch, tuple[Output, ...]]:
    """Return what holds after `event`, and what is to be done."""
    match event:
        case Opened():
            return _opened(watch, event)
        case Closed():
            return replace(watch, opened=None, results={}), ()
        case Told(key=key):
            return _told(watch, event) if key.author != watch.me else (watch, ())
        case Accused(by=by, key=key):
            is_heard = watch.me not in (by, key.author) and by != key.author
            is_heard = is_heard and watch.num_false.get(by, 0) < MOST_FALSE
            return _accused(watch, event) if is_heard else (watch, ())
        case Looked():
            return _looked(watch, event)
        case _:
            assert_never(event)


def _opened(watch: Watch, event: Opened) -> tuple[Watch, tuple[Output, ...]]:
    if watch.opened is not None and watch.opened.head == event.head:
        return watch, ()
    doubted = {peer: until for peer, until in watch.doubted.items() if until > event.round}
    early = [each for each in watch.early if each.head == event.head]
    late = tuple(each for each in watch.early if each.head != event.head)
    watch, found = replace(watch, opened=event, doubted=doubted, early=late, results={}), list[Output]()
    for each in early:
        watch, outputs = step(watch, each)
        found += outputs
    return watch, tuple(found)


def _told(watch: Watch, told: Told) -> tuple[Watch, tuple[Output, ...]]:
    key, opened = told.key, watch.opened
    if key in watch.begun:
        return watch, ()
    if opened is None or opened.head != told.head:
        return _waits(watch, told), ()
    rate = watch.rate * (TIMES if key.author in watch.doubted else 1.0)
    if drawn(opened.ticket, key.name, rate, opened.num_electors, 1) is None:
        return watch, ()
    return _begun(watch, key, frozenset()), (Look(key),)


def _accused(watch: Watch, accused: Accused) -> tuple[Watch, tuple[Output, ...]]:
    key, opened = accused.key, watch.opened
    until = max(watch.doubted.get(key.author, 0), accused.round + LASTS)
    if opened is None or until > opened.round:
        watch = replace(watch, doubted={**watch.doubted, key.author: until})
    if opened is None or opened.head != accused.head:
        return _waits(watch, accused), ()
    known = watch.begun.get(key)
    if known is not None and accused.by in known:
        return watch, ()
    watch = _begun(watch, key, (known or frozenset()) | {accused.by})
    if known is None:
        return watch, (Look(key),)
    return _concluded(watch, watch.results[key], [accused.by]) if key in watch.results else (watch, ())


def _looked(watch: Watch, looked: Looked) -> tuple[Watch, tuple[Output, ...]]:
    if looked.key not in watch.begun or looked.key in watch.results:
        return watch, ()
    if looked.outcome is None:  # it may be told again, or somebody may accuse its author
        return replace(watch, begun={key: by for key, by in watch.begun.items() if key != looked.key}), ()
    watch = replace(watch, results={**watch.results, looked.key: looked})
    watch, cleared = _concluded(watch, looked, sorted(watch.begun[looked.key]))
    return watch, (*cleared, *([Accuse(looked.key)] if looked.outcome == "differs" else []))


def _concluded(watch: Watch, looked: Looked, accusers: Sequence[PeerId]) -> tuple[Watch, tuple[Output, ...]]:
    """Believe those less who accused somebody of what is right."""
    if looked.outcome != "equal":
        return watch, ()
    counted = dict(watch.num_false)
    for by in accusers:
        counted[by] = counted.get(by, 0) + 1
    return replace(watch, num_false=counted), tuple(Clear(by, looked.key) for by in accusers)


def _begun(watch: Watch, key: Key, accusers: frozenset[PeerId]) -> Watch:
    begun = {**watch.begun, key: accusers}
    while len(begun) > MAX_BEGUN:
        del begun[next(iter(begun))]
    return replace(watch, begun=begun)


def _waits(watch: Watch, event: Told | Accused) -> Watch:
    """Keep it until that state is there. Of each that tells the oldest makes room: nobody's word makes another's go."""
    early = watch.early if event in watch.early else (*watch.early, event)
    mine = [each for each in early if each.by == event.by]
    if len(mine) > MAX_EARLY_OF:
        early = tuple(each for each in early if each != mine[0])
    return replace(watch, early=early[-MAX_EARLY:])


# --- how far apart honest machines are ---

NUMBERS = {"fp32": 1e-3, "bf16": 2e-2, "fp8": 8e-2, "int8": 3e-2, "int4": 0.2}
"""By how numbers are sent: the largest distance of two outputs, or two gradients, that is held for honest."""
LOSS = 1e-3  # the same of two losses, relative


def is_near(distances: tuple[float, ...], losses: tuple[float, float], activations: str, gradients: str) -> bool:
    """Return whether what two members came to is as near as honest machines are.

    Args:
        distances: of the outputs, and of the gradients; -1: there are none.
        losses: the author's and one's own.
        activations, gradients: how their numbers are sent.
    """
    theirs, mine = losses
    limits = (NUMBERS[activations], NUMBERS[gradients])
    is_alike = all(each <= limit for each, limit in zip(distances, limits, strict=True))
    return is_alike and abs(theirs - mine) <= LOSS * max(abs(mine), 1.0)
