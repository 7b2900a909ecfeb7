"""What a peer says of how it came to what it brings, where others may do it again: the record that audits stand on.

A contribution is what some inner steps changed. The peer names all states in between, by a tree over their digests:

    outer parameters ──► state 0 ──steps──► state 1 ──steps──► ... ──► state n ──encoded──► payload
                         |------------ segment: steps on one lease ------------|

A contribution that no round has counted yet goes on in the next lease, from the same distance to other outer
parameters: another segment. So all that leads from one state to the next is known to all members but the states, and
who has the state before can make the one after.

    state       the digest of its `StateIndex`: parameters and optimizer
    link        so many inner steps from one state to the next: `trace_every`, or what a segment has left
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from weft.ids import Digest, Tokens
from weft.ledger.tree import Path, is_leaf
from weft.net.messages import HexBranch, HexDigest, HexPeer, HexRun
from weft.wire import Record

MAX_SEGMENTS = 8  # who was counted in none of so many rounds gives up what it has
MAX_STEPS = 1 << 32
_Count = Annotated[int, Meta(ge=0, le=1 << 53)]
_Steps = Annotated[int, Meta(ge=0, le=MAX_STEPS)]


class Segment(Record, frozen=True, kw_only=True):
    """Inner steps on the samples of one lease, from its first sample on."""

    head: HexDigest  # the manifest after which the lease was given, and at whose outer parameters they begin
    round: _Count  # of that manifest
    holder: HexPeer  # whose lease it is: another's, if that one was away
    num_steps: _Steps  # 0: what the segments before it changed was only moved there


class Work(Record, frozen=True, kw_only=True):
    """How one peer came to one payload."""

    run: HexRun
    branch: HexBranch
    round: _Count  # for which it was announced first
    peer: HexPeer
    segments: Annotated[tuple[Segment, ...], Meta(min_length=1, max_length=MAX_SEGMENTS)]  # in order
    follows: HexDigest | None  # its work that was counted last, whose optimizer it goes on with; None: with a new one
    num_before: _Count  # inner steps that this optimizer has made before
    trace: HexDigest  # the root over the digests of all states, in order
    payload: HexDigest  # as in a manifest
    tokens: Annotated[Tokens, Meta(ge=0, le=1 << 62)]  # that were trained on
    error: HexDigest | None  # what codecs had left before, the index of one vector; None: nothing
    left: HexDigest | None  # the same after this payload

    @property
    def num_steps(self) -> int:
        return sum(segment.num_steps for segment in self.segments)


class MadeStep(Record, frozen=True, kw_only=True):
    """What a peer signs of one inner step that is audited, in exact numbers: what it was made of."""

    run: HexRun
    work: HexDigest  # of the signed `Work`
    before: _Count  # the number of the state that the step begins with
    gradient: HexDigest  # the index of one vector: the mean over the batch, pulled to the center, and not shortened
    norm: Annotated[float, Meta(ge=0)]  # its length
    # The root over the indices of what each operation came to (`weft.verify.evidence.program`); unset: not said yet.
    operations: HexDigest | UnsetType = UNSET


@dataclass(frozen=True)
class Link:
    """The inner steps between two states that are named.

    Args:
        segment: its number in the work.
        first: steps of the segment before it.
        before: the number of the state that it begins with; the next state is the one after.
    """

    segment: int
    first: int
    num_steps: int
    before: int


def num_links(segments: Sequence[Segment], trace_every: int) -> int:
    """Return how often a state leads to the next.

    Args:
        trace_every: inner steps from one state that is named to the next.
    """
    return sum(-(-segment.num_steps // trace_every) for segment in segments)


def link(segments: Sequence[Segment], trace_every: int, number: int) -> Link:
    """Return what leads from a state to the next: the one of this number, in order.

    Raises:
        IndexError: there are not so many.
    """
    before = 0
    for index, segment in enumerate(segments):
        num = -(-segment.num_steps // trace_every)
        if 0 <= number < num:
            first = number * trace_every
            return Link(index, first, min(trace_every, segment.num_steps - first), before + number)
        number -= num
        before += num + 1  # a segment's last state leads nowhere
    raise IndexError("a work has not so many links")


def link_from(segments: Sequence[Segment], trace_every: int, before: int) -> Link | None:
    """Return what leads on from the state of this number; None: nothing does."""
    passed = 0
    for index, segment in enumerate(segments):
        num = -(-segment.num_steps // trace_every)
        if passed <= before < passed + num:
            return link(segments, trace_every, before - index)
        passed += num + 1
    return None


def num_states(segments: Sequence[Segment], trace_every: int) -> int:
    """Return how many states are named: the first of each segment, and one after each link."""
    return sum(1 + -(-segment.num_steps // trace_every) for segment in segments)


def state_before(segments: Sequence[Segment], trace_every: int, number: int) -> int:
    """Return the number of the first state of a segment."""
    return num_states(segments[:number], trace_every)


def state_after(segments: Sequence[Segment], trace_every: int, number: int) -> int:
    """Return the number of the last state of a segment."""
    return state_before(segments, trace_every, number + 1) - 1


def is_state(
    trace: Digest, segments: Sequence[Segment], trace_every: int, number: int, state: Digest, path: Path
) -> bool:
    """Return whether a work with this trace has named a state as the one of this number."""
    is_there = (path.index, path.count) == (number, num_states(segments, trace_every))
    return is_there and is_leaf(trace, bytes.fromhex(state), path)
