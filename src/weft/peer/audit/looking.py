"""One audit as a machine: what is done next, and what it comes to. Pure; `Auditor` carries out what it says.

    asking      the worker is asked for what it has named                   Came(again)
    making      what it shows is checked, the steps are done again          Made(name of the state they come to)
    opening     the name is sealed; then the worker shows its own           Opened(name)
    comparing   both states are measured, where they have two names         Measured(found)
    ended       found; None: it cannot be done here

Nothing is opened before this machine has come to something of its own, and what it finds is found of that. What is not
shown is asked for again, and in the end has got no answer: that is never a difference.

What members tell each other is looked into by each for itself, once, unless who tells it was wrong too often, or has
said too often that it got no answer, which costs nothing.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, assert_never

from weft.ids import Digest, PeerId, Round
from weft.peer.audit.outcome import Found
from weft.peer.messages import NamedState
from weft.sync.records import quarantine
from weft.sync.records.acts import Warrant
from weft.sync.records.charter import UNANSWERED_FOR, Charter
from weft.sync.records.messages import Manifest, works_in
from weft.sync.records.work import Segment, is_state
from weft.verify.draw import drawn
from weft.wire import Signed

Phase = Literal["asking", "making", "opening", "comparing", "ended"]
MOST_LOOKS = 16  # at what one member got no answer of, in as many rounds as that counts
MOST_FALSE = 3  # accusations of one member that this peer could not find true: it looks into no more


@dataclass(frozen=True)
class Looking:
    """
    Args:
        made: what this machine came to.
        found: once it has ended; None: it cannot be done here.
    """

    phase: Phase = "asking"
    made: Digest | None = None
    found: Found | None = None


@dataclass(frozen=True)
class Came:
    """The worker shows what it has named."""


@dataclass(frozen=True)
class Made:
    """The steps were done again, and this is what they came to."""

    name: Digest


@dataclass(frozen=True)
class Opened:
    """The worker has shown what it came to."""

    name: Digest


@dataclass(frozen=True)
class Measured:
    """Both states were compared."""

    found: Found


@dataclass(frozen=True)
class Untrue:
    """What it has named is not so.

    Args:
        proof: as of `Found`.
    """

    why: str
    proof: Warrant | None = None


@dataclass(frozen=True)
class Missing:
    """Something was not shown, or did not come.

    Args:
        has_vote: the worker is a member whose work is judged.
        is_over: it was asked for long enough.
        is_old: what it has shown may not be there any more.
    """

    why: str
    has_vote: bool
    is_over: bool
    is_old: bool


@dataclass(frozen=True)
class Unable:
    """This machine cannot do it, or does not know what it begins at."""


Event = Came | Made | Opened | Measured | Untrue | Missing | Unable


def step(looking: Looking, event: Event) -> Looking:
    """Return what is next."""
    match event:
        case Came():
            return replace(looking, phase="making")
        case Made(name=name):
            return replace(looking, phase="opening", made=name)
        case Opened(name=name):
            return _ended(Found("equal")) if name == looking.made else replace(looking, phase="comparing")
        case Measured(found=found):
            return _ended(found)
        case Untrue(why=why, proof=proof):
            return _ended(Found("differs", why, proof=proof))
        case Missing(why=why, has_vote=has_vote, is_over=is_over, is_old=is_old):
            if not has_vote:
                return _ended(None)
            return _ended(unanswered(why)) if is_over else _again(looking, is_old)
        case Unable():
            return _ended(None)
        case _:
            assert_never(event)


def unanswered(why: str) -> Found:
    """Return what it comes to where the worker does not show what it has named."""
    return Found("unanswered", why)


def _again(looking: Looking, is_old: bool) -> Looking:
    """Return an audit that is begun again, with what was shown, as far as it is there."""
    return Looking("asking" if is_old or looking.phase == "asking" else "making")


def _ended(found: Found | None) -> Looking:
    return Looking("ended", found=found)


def is_named(trace: Digest, segments: Sequence[Segment], trace_every: int, number: int, shown: NamedState) -> bool:
    """Return whether what is shown is the state of this number that a work has named, before anybody was drawn."""
    return is_state(trace, segments, trace_every, number, Digest(shown.state), shown.path)


# --- what one looks at ---


def chosen(
    manifest: Manifest,
    charter: Charter,
    ticket: Signed,
    judges: Callable[[PeerId], Collection[PeerId]],
    times: Callable[[PeerId], float],
    was_cleared: Callable[[Digest], bool],
) -> Iterator[tuple[PeerId, Digest, float, int]]:
    """Yield whose works the signer of a ticket audits of a decided round, their names, and at what rate and of how many
    it was drawn.

    Args:
        charter: after the manifest.
        judges: who may be drawn for what a peer has brought.
        times: as often as others a peer is audited.
        was_cleared: whether a majority has looked at a work before, as it waited. That it has waited once says nothing:
            another may have been brought in its place.
    """
    me, held = ticket.signer, {each.work for each in manifest.held or ()}
    assert charter.audits
    for peer, name in works_in(manifest):
        if peer == me or (name in held and me in quarantine.members(charter)):
            continue
        if name not in held and was_cleared(name):
            continue
        among = judges(peer)
        rate = len(among) - 1.0 if name in held else times(peer) * charter.audits.rate
        if me in among and drawn(ticket.signature, name, rate, len(among), 1) is not None:
            yield peer, name, rate, len(among)


# --- what members tell ---


def is_heard(me: PeerId, by: PeerId, about: PeerId, num_false: Mapping[PeerId, int]) -> bool:
    """Return whether this peer looks into what another has found.

    Args:
        num_false: how often each was wrong.
    """
    return me not in (by, about) and num_false.get(by, 0) < MOST_FALSE


class Looks:
    """How often one has looked again because of what others got no answer of."""

    def __init__(self) -> None:
        self._at = dict[PeerId, deque[Round]]()  # of each, the rounds of the last times

    def may(self, by: PeerId, round: Round) -> bool:
        """Return whether one looks once more because of a member, and note it."""
        at = self._at.setdefault(by, deque(maxlen=MOST_LOOKS))
        if len(at) == MOST_LOOKS and at[0] + UNANSWERED_FOR > round:
            return False
        at.append(round)
        return True


def is_told(found: Found) -> bool:
    """Return whether all members are told what was found; else it clears who was accused."""
    return not is_equal(found)


def is_equal(found: Found) -> bool:
    return found.outcome == "equal"
