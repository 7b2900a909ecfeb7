"""What a run's stewards decide about it, or a majority of its members: the records, each signed by who decides.

    a steward   Act       Remove, Ban, Pardon, Amend, Succeed, Rewind
    members     Ballot    for the removal of one key: of more than half of the electorate
                RewindBallot    for going back to an earlier round, alike
    auditors    Finding   on one work, alike: of more than half of the electorate
                FalsePassage   of one member of a stage, each on what it has computed again: likewise
    evidence    two notes of a round that contradict each other, or what a member signed of its work and what shows that
                it is not so (`weft.verify.evidence`): whoever has it strikes their signer's key out

Going back is of parameters alone: rounds and tokens go on being counted (`weft.sync.records.rewinds`).

A manifest carries them as warrants, in the order in which they take effect: for the round after it, on all members
alike. What they come to is the part of `weft.sync.governance`.

An act cannot be replayed: it names its run and counts the acts of its steward. A ballot counts how often its key was
removed by members before; one for going back names a round that is dropped once it has taken effect. None names a
branch: where a run has split, it holds for both sides.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from weft.codec.config import CodecConfig
from weft.ids import Round
from weft.net.membership.full_mesh import MAX_MEMBERS
from weft.net.messages import MAX_REASON_CHARS, HexBranch, HexDigest, HexPeer, HexRun
from weft.sync.method.choices import NesterovConfig, SgdConfig
from weft.sync.method.schedule import ScheduleConfig
from weft.wire import Record, Signed

MAX_ACTS = 4  # in one manifest; the next one takes the next
MAX_LETTER_NBYTES = 16 << 10  # of a signed act or ballot: the longest holds a ticket
# Of what proves a lie: two proposals of 32 members have 142 kB, and with it a decision fits a frame.
MAX_CONTRADICTION_NBYTES = 384 << 10
MAX_TICKET_CHARS = 8192  # of eight members with many addresses
MAX_SERIAL = 1 << 53
MAX_TOKENS = 1 << 62  # as many as fit into a cursor

TotalTokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
SeqLen = Annotated[int, Meta(ge=1, le=1 << 20)]
BatchSize = Annotated[int, Meta(ge=1, le=1 << 16)]
Every = Annotated[int, Meta(ge=1, le=100_000)]
Reason = Annotated[str, Meta(max_length=MAX_REASON_CHARS)]
Outcome = Literal["equal", "differs", "unanswered"]
Serial = Annotated[int, Meta(ge=1, le=MAX_SERIAL)]


_Weight = Annotated[int, Meta(ge=0, le=1 << 53)]


class Void(ValueError):
    """A warrant has no effect; says why, for its author."""


class Deed(Record, frozen=True, kw_only=True, tag=True, tag_field="type"):
    """Base of what a steward may decide."""


class Remove(Deed, frozen=True, kw_only=True):
    """A member is no member any more. It may come back as a newcomer."""

    peer: HexPeer
    reason: Reason


class Ban(Deed, frozen=True, kw_only=True):
    """A key is refused from now on, and removed where it is a member's."""

    peer: HexPeer
    reason: Reason


class Pardon(Deed, frozen=True, kw_only=True):
    """A banned key is refused no more."""

    peer: HexPeer
    reason: Reason


class Amend(Deed, frozen=True, kw_only=True):
    """The run goes on with other settings. None: as before."""

    reason: Reason
    tokens: TotalTokens | None = None
    seq_len: SeqLen | None = None
    batch_size: BatchSize | None = None
    every: Every | None = None
    schedule: ScheduleConfig | None = None
    codec: CodecConfig | None = None
    reply_codec: CodecConfig | None = None
    apply: SgdConfig | NesterovConfig | None = None  # other rates; of the kind that the run has


class Succeed(Deed, frozen=True, kw_only=True):
    """Another run goes on where this one ends."""

    run: HexRun
    is_at_once: bool  # this run ends with the next outer step; else when it is complete
    reason: Reason
    ticket: Annotated[str, Meta(max_length=MAX_TICKET_CHARS)] = ""  # of that run, for the members of this one


class Rewind(Deed, frozen=True, kw_only=True):
    """The run goes on with the parameters that it had after an earlier round."""

    round: Annotated[Round, Meta(ge=0, le=1 << 53)]
    manifest: HexDigest  # of that round
    state: HexDigest  # the index of the replicated vectors after it, as votes of the next round name it
    reason: Reason


AnyDeed = Remove | Ban | Pardon | Amend | Succeed | Rewind


class Act(Record, frozen=True, kw_only=True):
    """What a steward signs."""

    run: HexRun
    serial: Serial  # of this steward's acts, from 1
    deed: AnyDeed


class Ballot(Record, frozen=True, kw_only=True):
    """What a member signs to have a key removed."""

    run: HexRun
    peer: HexPeer
    serial: Serial  # one more than how often members have removed that key
    reason: Reason


class RewindBallot(Record, frozen=True, kw_only=True):
    """What a member signs to have the run go back."""

    run: HexRun
    rewind: Rewind


class Weighed(Record, frozen=True, kw_only=True):
    """What the mean of a round was made of that has counted a work: by this, and its manifest, it can be taken out."""

    branch: HexBranch
    manifest: HexDigest
    weights: Annotated[tuple[_Weight, ...], Meta(min_length=1, max_length=MAX_MEMBERS)]  # of all that it counts
    late: _Weight  # of what it waited for
    method: HexDigest  # by which it was computed


class Finding(Record, frozen=True, kw_only=True):
    """What a member signs that has done again what another says it has done, or has asked for it in vain: some of its
    training steps, or the part of a round that it has merged."""

    run: HexRun
    peer: HexPeer  # who says that it has done it
    round: Annotated[Round, Meta(ge=0, le=1 << 53)]  # that counts it
    work: HexDigest  # its signed `Work`; the part's result
    before: Annotated[int, Meta(ge=0, le=1 << 53)]  # number of the state that the steps begin with; of the part
    outcome: Outcome
    why: Reason = ""
    weighed: Weighed | UnsetType = UNSET  # of training steps that differ; unset: that cannot be taken out again


class FalsePassage(Record, frozen=True, kw_only=True):
    """What a member of a stage signs that has computed a micro-batch of another again, and came to something else."""

    run: HexRun  # of the stage
    peer: HexPeer  # who has computed it
    round: Annotated[Round, Meta(ge=0, le=1 << 53)]  # in which it was computed
    passage: Signed  # what that one has signed of it
    why: Reason = ""


class Warrant(Record, frozen=True, kw_only=True):
    """What makes a decision hold: a steward's signed act; signed ballots or verdicts, ascending by signer; two notes of
    a round that one member signed and that contradict each other; or what one member signed, and what shows that it is
    not so."""

    letters: Annotated[tuple[Signed, ...], Meta(min_length=1, max_length=MAX_MEMBERS)]
    shown: Annotated[bytes, Meta(max_length=MAX_CONTRADICTION_NBYTES)] | UnsetType = UNSET  # unset: nothing but those

    @property
    def nbytes(self) -> int:
        """Of what it holds, but for signatures and names."""
        shown = b"" if self.shown is UNSET else self.shown
        return len(shown) + sum(len(letter.body) for letter in self.letters)


def changes_of(amend: Amend) -> dict[str, object]:
    """Return the fields that an amendment changes, by name."""
    fields = [name for name in amend.__struct_fields__ if name != "reason"]
    return {name: value for name in fields if (value := getattr(amend, name)) is not None}
