"""What peers of a run with stages say to each other beside rounds and micro-batches.

every peer ──StageNews──► all that are linked     every two seconds, and when it has changed: which stages I hold
the maker  ──StageBegin─► all that are linked     who holds what at first
a member   ──Tallied────► members of its stage    what the payload holds that I am about to announce
a member   ──TalliedRequest─► others of its stage what did that one tell you?
a member   ──MayLeave───► others of its stage     I am going to another stage: do you stay?
who goes   ───KeepNow───► another stage's member  I alone hold this stage: take its state
who fetches ─BeatRequest► members of any stage    how far had the first stage come, in this state?
who fetches ───PinAt────► members of all stages   keep your state after this round of the first stage

A beat, on the wire, is a round of the first stage. Every bound is here, with its reason.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from weft.ids import Digest, PeerId
from weft.net.messages import HexDigest, HexPeer
from weft.pipeline.exactly_once import BatchId, Told
from weft.pipeline.messages import MAX_STAGES, Number
from weft.wire import Record

MAX_HELD = 64  # stages of one peer
MAX_PEERS = 1024
MAX_BATCHES = 1 << 14  # that a member tells of: they fit a note
MAX_ORIGINS = 256
MAX_UNTRUSTED = 64  # of one stage, the newest: four kilobytes every two seconds

State = Literal["joining", "ready", "paused", "finishing"]
_Stage = Annotated[int, Meta(ge=0, le=MAX_STAGES)]  # or the number of a tied matrix, which is the last
_Rate = Annotated[float, Meta(ge=0, le=1e12)]


class Held(Record, frozen=True, kw_only=True):
    """A stage that a peer holds."""

    stage: _Stage
    since: Number  # which time it is that this process holds it: a number that grows
    state: State
    round: Number  # of the stage's run
    rate: _Rate  # samples a second that it would compute, always at work; 0: not known yet
    num_waiting: Number  # micro-batches that wait for it
    # Whose key is banned from the stage, or whose passages this peer has found false; unset: nobody's.
    untrusted: Annotated[tuple[HexPeer, ...], Meta(min_length=1, max_length=MAX_UNTRUSTED)] | UnsetType = UNSET


class Shelved(Record, frozen=True, kw_only=True):
    """A stage's state that a peer has on its disk."""

    stage: _Stage
    round: Number


class StageNews(Record, frozen=True, kw_only=True, tag="StageNews"):
    """A note."""

    held: Annotated[tuple[Held, ...], Meta(max_length=MAX_HELD)]
    kept: Annotated[tuple[Shelved, ...], Meta(max_length=MAX_STAGES + 1)]
    is_trainer: bool  # it takes a stage; else it only looks on, or fetches
    is_busy: bool = False  # it evaluates or fetches at the end of the run: stages should stay a while
    is_complete: bool = False  # the first stage has trained all there is
    tied: Held | None = None  # the matrix of both end stages, by the number after the last one's


class StageBegin(Record, frozen=True, kw_only=True, tag="StageBegin"):
    """A note of the run's maker."""

    peers: Annotated[tuple[HexPeer, ...], Meta(max_length=MAX_PEERS)]
    stages: Annotated[tuple[_Stage, ...], Meta(max_length=MAX_PEERS)]  # of each peer; a peer may stand there twice

    def __post_init__(self) -> None:
        if len(self.peers) != len(self.stages):
            raise ValueError("peers and stages are columns of one table")

    def of(self, stage: int) -> list[PeerId]:
        """Return who is to hold a stage, in order: the first one opens its run."""
        return [peer for peer, each in zip(self.peers, self.stages, strict=True) if each == stage]


_Index = Annotated[int, Meta(ge=0, lt=MAX_ORIGINS)]
_Batches = Annotated[tuple[tuple[_Index, Number], ...], Meta(max_length=MAX_BATCHES)]


class Tallied(Record, frozen=True, kw_only=True, tag="Tallied"):
    """A note, before the payload is announced: which micro-batches its gradient has in it, and which are held."""

    previous: HexDigest  # of the manifest that the round follows on
    payload: HexDigest | None  # as a manifest names it; None: its sender brings nothing
    beat: Number  # whose micro-batches these are
    origins: Annotated[tuple[HexPeer, ...], Meta(max_length=MAX_ORIGINS)]
    counted: _Batches  # the place of each one's origin, and its number
    held: _Batches

    def __post_init__(self) -> None:
        if any(index >= len(self.origins) for index, _ in (*self.counted, *self.held)):
            raise ValueError("a micro-batch of an origin that is not named")

    @property
    def told(self) -> Told:
        def batches(named: tuple[tuple[int, int], ...]) -> frozenset[BatchId]:
            return frozenset(BatchId(PeerId(self.origins[index]), number) for index, number in named)

        return Told(batches(self.counted), batches(self.held))


def tallied(previous: Digest, payload: Digest | None, round: int, told: Told) -> Tallied:
    """Return the note that tells of it."""
    origins = sorted({batch.origin for batch in told.counted | told.held})
    place = {origin: index for index, origin in enumerate(origins)}

    def named(batches: frozenset[BatchId]) -> tuple[tuple[int, int], ...]:
        return tuple(sorted((place[batch.origin], batch.number) for batch in batches))

    return Tallied(
        previous=previous,
        payload=payload,
        beat=round,
        origins=tuple(origins),
        counted=named(told.counted),
        held=named(told.held),
    )


class TalliedRequest(Record, frozen=True, kw_only=True, tag="TalliedRequest"):
    """A call."""

    previous: HexDigest
    peer: HexPeer


class TalliedAnswer(Record, frozen=True, kw_only=True, tag="TalliedAnswer"):
    tallied: Tallied | None


class MayLeave(Record, frozen=True, kw_only=True, tag="MayLeave"):
    """A call of a member that is about to leave its stage for another."""


class LeaveAnswer(Record, frozen=True, kw_only=True, tag="LeaveAnswer"):
    does_stay: bool  # who answers


class PinAt(Record, frozen=True, kw_only=True, tag="PinAt"):
    """A call of a peer that fetches states of all pieces: keep yours after this one, when you come there."""

    beat: Number


class PinnedAnswer(Record, frozen=True, kw_only=True, tag="PinnedAnswer"):
    manifest: HexDigest | None  # of the state that is kept; None: that one has gone by, or is far off


class KeepNow(Record, frozen=True, kw_only=True, tag="KeepNow"):
    """A call of a peer that is about to go, and alone holds a stage: take its state from me, now."""

    stage: _Stage


class KeptAnswer(Record, frozen=True, kw_only=True, tag="KeptAnswer"):
    is_kept: bool


class BeatRequest(Record, frozen=True, kw_only=True, tag="BeatRequest"):
    """A call of a peer that fetches a stage's state."""

    manifest: HexDigest | None = None  # that the state belongs to; None: the present one


class BeatAnswer(Record, frozen=True, kw_only=True, tag="BeatAnswer"):
    beat: Number | None  # so many are in it; None: who answers does not know
