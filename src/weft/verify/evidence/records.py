"""What is shown beside what a member signed, and which of both cannot be so together.

    letters            shown           why it is false
    Work               FalseClaim      the rounds that it names leased other samples, or are other rounds
    Work (and before)  FalseStart      its optimizer is not that of the work that it follows, or no new one
    Work               FalseMove       its optimizer is another one after a round
    Work               FalsePayload    a block of its payload is not what its states came to
    RoundNote          FalseMerge      a block of what it has merged is not the mean of what was brought
    Work, MadeStep     FalseStep       numbers after a training step are not what the optimizer makes of those before
    Work, MadeStep     FalseList       what it lists of the operations of a step contradicts the step, or itself
    Work, MadeStep     FalseOperation  a number of one of them is not what it is made of

Nothing of it needs signatures but the letters': all else is named in these by its digest, or in what they name.
"""

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from weft.data.store import DataIndex
from weft.ledger.opening import Slice
from weft.ledger.tree import Path
from weft.net.membership.full_mesh import MAX_MEMBERS
from weft.net.messages import HexDigest
from weft.sync.records.acts import MAX_CONTRADICTION_NBYTES
from weft.sync.records.charter import Charter
from weft.sync.records.index import MAX_NUM
from weft.sync.records.messages import Collect, Manifest
from weft.sync.records.work import MAX_SEGMENTS
from weft.verify.evidence.shown import Window
from weft.wire import Record

MAX_VECTORS = 4  # of a state: parameters, and what an optimizer keeps
MAX_OPERANDS = 1 << 16  # of an operation: the gradient is the sum of all tensors'
MAX_READ = 1 << 12  # slices

_Index = Annotated[bytes, Meta(max_length=MAX_CONTRADICTION_NBYTES)]  # a StateIndex, canonical
_Part = Annotated[int, Meta(ge=0, lt=MAX_MEMBERS)]
_Number = Annotated[int, Meta(ge=0, le=MAX_NUM)]
_Block = Annotated[tuple[Window, ...], Meta(min_length=1, max_length=2)]  # of an encoding: scales, then codes
_Vectors = Annotated[tuple[Window, ...], Meta(min_length=1, max_length=MAX_VECTORS)]  # by their names, ascending


class Ground(Record, frozen=True, kw_only=True):
    """A manifest, which what was signed names, and the charter that holds after it."""

    manifest: Manifest
    charter: Charter


class ShownState(Record, frozen=True, kw_only=True):
    """A state that a work names: its list of chunks, and its place among all states."""

    index: _Index
    path: Path


class Falsehood(Record, frozen=True, kw_only=True, tag=True, tag_field="type"):
    """Base of what is shown."""


class FalseClaim(Falsehood, frozen=True, kw_only=True):
    grounds: Annotated[tuple[Ground, ...], Meta(min_length=1, max_length=MAX_SEGMENTS)]  # of each segment


class FalseStart(Falsehood, frozen=True, kw_only=True):
    """Where the works alone say it, no state is shown."""

    first: ShownState | None = None  # the work's first state
    last: ShownState | None = None  # the last of the work that it follows


class FalseMove(Falsehood, frozen=True, kw_only=True):
    ground: Ground  # of the first segment
    segment: Annotated[int, Meta(ge=1, lt=MAX_SEGMENTS)]  # that began with another optimizer
    ended: ShownState  # the last state of the segment before it
    begun: ShownState


class FalsePayload(Falsehood, frozen=True, kw_only=True):
    ground: Ground  # of the only segment
    first: ShownState
    last: ShownState
    parts: Annotated[tuple[HexDigest, ...], Meta(max_length=MAX_MEMBERS)]  # of the payload
    part: _Part
    block: _Number  # of the part
    before: Window  # its parameters, in the first state
    after: Window  # in the last
    sent: _Block  # what the payload has of it


class FalseMerge(Falsehood, frozen=True, kw_only=True):
    ground: Ground  # the manifest before the round
    plan: Collect
    num: _Number  # elements of the part
    block: _Number
    end: Window  # the last piece of the result: it says how long that is
    merged: _Block
    brought: Annotated[tuple[_Block, ...], Meta(min_length=1, max_length=MAX_MEMBERS)]  # by each, as the plan has them


class FalseStep(Falsehood, frozen=True, kw_only=True):
    ground: Ground  # of the segment
    before: ShownState
    after: ShownState
    gradient: _Index
    block: _Number  # of 256 numbers of each vector
    numbers_before: _Vectors
    numbers_after: _Vectors
    slope: Window  # of the gradient


class ShownOutput(Record, frozen=True, kw_only=True):
    """What an operation came to: the list of its chunks, and its place among all operations."""

    index: _Index
    path: Path


class FalseList(Falsehood, frozen=True, kw_only=True):
    ground: Ground  # of the segment
    leaf: HexDigest  # of an operation
    path: Path
    index: _Index | UnsetType = UNSET  # what the leaf names, where it is that which is false


class FalseOperation(Falsehood, frozen=True, kw_only=True):
    ground: Ground  # of the segment
    output: ShownOutput  # of the operation
    at: _Number  # which number of it is false
    has: Slice  # what it came to there
    operands: Annotated[tuple[ShownOutput, ...], Meta(max_length=MAX_OPERANDS)]  # operations that it reads, ascending
    read: Annotated[tuple[Slice, ...], Meta(max_length=MAX_READ)]  # of them and of the state before, as it reads
    before: ShownState | UnsetType = UNSET  # unset: it reads no parameters
    data: DataIndex | UnsetType = UNSET  # unset: it reads no words of the run's data


AnyFalse = FalseClaim | FalseStart | FalseMove | FalsePayload | FalseMerge | FalseStep | FalseList | FalseOperation
