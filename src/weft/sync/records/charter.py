"""What holds of a run now: its settings, who is banned, and how far each steward has counted.

The charter is a function of the genesis and of all manifests since. A manifest names the digest of the charter that
holds after it, so whoever takes over a state can check the charter that comes with it. How warrants change it is
the part of `weft.sync.governance`.
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from weft.ids import PeerId, Round, RunId
from weft.model.config import ModelConfig
from weft.net.membership.full_mesh import MAX_MEMBERS
from weft.net.messages import HexDigest, HexPeer
from weft.sync.method.choices import AdamWConfig, Choices, InnerSgdConfig
from weft.sync.method.schedule import ScheduleConfig
from weft.sync.records.acts import MAX_TOKENS, BatchSize, SeqLen, Succeed, TotalTokens, Weighed
from weft.sync.records.ancestry import MAX_FORKS, MAX_TAKEN, Fork, Taken
from weft.sync.records.index import MAX_NUM
from weft.wire import Record

MIN_ELECTORS = 3  # of two, no majority outlives one
MAX_STEWARDS = 16  # people, not machines
MAX_UNANSWERED = 2  # rounds of which a member may leave audits unanswered: with the third it is removed
UNANSWERED_FOR = 40  # rounds, after which one is forgotten
MAX_QUARANTINE = 1000  # works of a newcomer that wait
MAX_REWOUND = 64  # times; a run that has to go back more often should be begun anew
MAX_BANNED = 256  # keys; a run that has to ban more should admit by key
# Of one peer: their ids fill 128 MiB, and no single machine steps on so many at once.
MAX_TOKENS_PER_STEP = 1 << 24

_Peers = Annotated[tuple[HexPeer, ...], Meta(max_length=MAX_BANNED)]
_Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Electors = Annotated[int, Meta(ge=MIN_ELECTORS, le=MAX_MEMBERS, description="members that vote, at most")]


class Settings(Record, frozen=True, kw_only=True):
    """What amendments may change of a run."""

    tokens: TotalTokens
    seq_len: SeqLen
    batch_size: BatchSize
    schedule: ScheduleConfig
    method: Choices

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def quota(self) -> int:
        """Samples that one member trains on in one round, at most."""
        return self.method.every * self.batch_size

    @property
    def quota_tokens(self) -> int:
        """The same, in tokens."""
        return self.quota * self.seq_len

    @property
    def unit(self) -> int:
        """Samples that leases hold a multiple of: whole inner steps, where members make their own."""
        return 1 if self.method.sends_gradient else self.batch_size


class Expelled(Record, frozen=True, kw_only=True):
    """A key that members have removed, and how often."""

    peer: HexPeer
    times: Annotated[int, Meta(ge=1, le=1 << 53)]


class Struck(Record, frozen=True, kw_only=True):
    """A key that was struck out, and in which round: what it signed until then is dealt with, if it is pardoned too."""

    peer: HexPeer
    round: Annotated[Round, Meta(ge=0, le=1 << 53)]


class Unanswered(Record, frozen=True, kw_only=True):
    """A key that has not answered auditors, and of which rounds, those long ago apart: ascending."""

    peer: HexPeer
    rounds: Annotated[
        tuple[Annotated[Round, Meta(ge=0, le=1 << 53)], ...], Meta(min_length=1, max_length=MAX_UNANSWERED)
    ]


class FalseWork(Record, frozen=True, kw_only=True):
    """What a key was struck out for, where that was counted, and the round that has taken it out again."""

    peer: HexPeer
    round: Annotated[Round, Meta(ge=0, le=1 << 53)]  # that has counted it
    weighed: Weighed
    taken_out: Annotated[Round, Meta(ge=0, le=1 << 53)] | UnsetType = UNSET  # unset: none has


class Rewound(Record, frozen=True, kw_only=True):
    """A round after which the run went on with the parameters of an earlier one."""

    at: Annotated[Round, Meta(ge=1, le=1 << 53)]
    to: Annotated[Round, Meta(ge=0, le=1 << 53)]


class GradientTerms(Record, frozen=True, kw_only=True):
    """What the gradient of a training step is made of, beside the settings."""

    model: ModelConfig
    micro_batch: Annotated[int, Meta(ge=1, le=MAX_TOKENS_PER_STEP)]  # samples that are computed at a time
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  # by which samples are shuffled
    data: HexDigest  # the run's index of shards


class ExactTerms(Record, frozen=True, kw_only=True):
    """What training steps are computed by, beside the settings, where others may compute one number of them again."""

    optimizer: AdamWConfig | InnerSgdConfig
    clip: Annotated[float, Meta(gt=0)]  # of the gradient's length
    num_decayed: Annotated[int, Meta(ge=0, le=MAX_NUM)]  # parameters, the first so many, that take weight decay
    gradient: GradientTerms | UnsetType = UNSET  # unset: a majority judges of which samples a gradient is


class AuditTerms(Record, frozen=True, kw_only=True):
    """How members audit each other's work."""

    rate: Annotated[float, Meta(gt=0, le=1)]  # the chance that a contribution is audited by somebody
    trace_every: Annotated[int, Meta(ge=1, le=100_000)]  # inner steps from one state that is named to the next
    quarantine: Annotated[int, Meta(ge=1, le=MAX_QUARANTINE)] | UnsetType = (
        UNSET  # works of a newcomer that wait; unset: none
    )
    exact: ExactTerms | UnsetType = UNSET  # unset: machines round otherwise, so a number proves nothing


class PassageTerms(Record, frozen=True, kw_only=True):
    """How members of a stage look at what others of it compute."""

    rate: Annotated[float, Meta(gt=0, le=1)]  # the chance that a micro-batch is computed again by somebody


class Quarantined(Record, frozen=True, kw_only=True):
    """A member whose works count once others have found nothing wrong with them: `weft.sync.records.quarantine`."""

    peer: HexPeer
    left: Annotated[int, Meta(ge=1, le=MAX_QUARANTINE)]  # works that have to be counted so
    work: HexDigest | UnsetType = UNSET  # that waits; unset: none does
    round: Annotated[Round, Meta(ge=0, le=1 << 53)] | UnsetType = UNSET  # whose manifest names it
    is_cleared: bool | UnsetType = UNSET  # nothing wrong was found: it may count; unset: it may not yet


class Charter(Record, frozen=True, kw_only=True):
    stewards: Annotated[tuple[HexPeer, ...], Meta(max_length=MAX_STEWARDS)]  # as the genesis names them
    serials: Annotated[tuple[_Count, ...], Meta(max_length=MAX_STEWARDS)]  # how many acts of each have taken effect
    settings: Settings
    max_seq_len: Annotated[int, Meta(ge=1)]  # longer ones fit neither the model nor the data
    has_even_leases: bool = False  # all are leased the same; else slower members are leased less
    is_routed: bool = False  # members of a stage: what each trains on is routed to it, whatever it was leased
    electors: Electors = MAX_MEMBERS  # members at most; who finds no room contributes through one of them
    banned: _Peers = ()  # ascending
    expelled: Annotated[tuple[Expelled, ...], Meta(max_length=MAX_BANNED)] = ()  # ascending
    struck: Annotated[tuple[Struck, ...], Meta(max_length=MAX_BANNED)] = ()  # ascending
    tuned_at: _Count = 0  # the round whose manifest has last changed how often members synchronise
    resized_at: _Count = 0  # the cursor at which the present seq_len took effect
    tokens_before: _Count = 0  # of all leases up to there, and of all legacies
    successor: Succeed | None = None
    forks: Annotated[tuple[Fork, ...], Meta(max_length=MAX_FORKS)] = ()  # that led to this branch, oldest first
    taken_in: Annotated[tuple[Taken, ...], Meta(max_length=MAX_TAKEN)] = ()  # of other branches, oldest first
    is_recorded: bool | UnsetType = UNSET  # manifests name what was before them; unset: they do not
    min_seq_len: Annotated[int, Meta(ge=1)] | UnsetType = UNSET  # shorter ones do not fit the data; unset: all do
    audits: AuditTerms | UnsetType = UNSET  # unset: nobody's work is audited
    passages: PassageTerms | UnsetType = UNSET  # of a stage; unset: nothing is computed again
    unanswered: Annotated[tuple[Unanswered, ...], Meta(max_length=MAX_BANNED)] | UnsetType = UNSET  # ascending
    false_works: Annotated[tuple[FalseWork, ...], Meta(max_length=MAX_BANNED)] | UnsetType = UNSET  # as they were found
    quarantined: Annotated[tuple[Quarantined, ...], Meta(min_length=1, max_length=MAX_MEMBERS)] | UnsetType = (
        UNSET  # ascending
    )
    rewound: Annotated[tuple[Rewound, ...], Meta(min_length=1, max_length=MAX_REWOUND)] | UnsetType = (
        UNSET  # oldest first
    )

    def leased_tokens(self, cursor: int) -> int:
        """Return the tokens of all leases before `cursor`."""
        return self.tokens_before + (cursor - self.resized_at) * self.settings.seq_len

    def serial_of(self, steward: PeerId) -> int:
        return self.serials[self.stewards.index(steward)]

    def times_expelled(self, peer: PeerId) -> int:
        return next((each.times for each in self.expelled if each.peer == peer), 0)

    def is_dealt_with(self, peer: PeerId, round: Round) -> bool:
        """Return whether `peer` was struck out in that round of a branch or a later one."""
        return any(each.peer == peer and each.round >= round for each in self.struck)

    @property
    def has_ended(self) -> bool:
        """Whether another run goes on in this one's place already."""
        return self.successor is not None and self.successor.is_at_once


@dataclass(frozen=True)
class Body:
    """Whom a round is decided by, as far as acts are concerned."""

    run: RunId
    round: Round
    electorate: tuple[PeerId, ...]
    cursor: int
