"""What peers of a run say to each other above rounds: decisions, state, the chain, branches.

newcomer                         member
  StateRequest ────────────────► all     what do you hold?
  ◄────────────────── StateOffer         the head of the chain
  StateRequest ────────────────► some    pin this one for me
  ◄────────────────── StateOffer         the digests of the state's chunks, equal at all
  (blobs) ◄────────────────────►
  BlockPlease ─────────────────► all     announce nothing until I am in (only where it asks for that, every 2 s)
  Joining ─────────────────────► all     count me in from the next manifest on (every second until it does)
  ChainRequest ────────────────►         what was committed since?
  ◄──────────────── ChainAnswer          certificates, in order
  RoundsRequest ───────────────►         what was before? (only where the run records its rounds)
  ◄─────────────── RoundsAnswer          headers, and who was a member
"""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from weft.events import Preferred
from weft.ids import Attempt, BranchId, Digest, Round, RunId
from weft.ledger.header import HEADER_NBYTES
from weft.ledger.tree import Path
from weft.net.membership.full_mesh import MAX_MEMBERS
from weft.net.messages import HexDigest, HexPeer
from weft.sync.records.acts import Reason, Warrant
from weft.sync.records.charter import Charter
from weft.sync.records.messages import MAX_COUNT, Certificate, Manifest
from weft.sync.records.proof import Milestone
from weft.sync.records.work import MAX_SEGMENTS
from weft.wire import Record, Signed

GENESIS = Digest("0" * 64)  # what the first manifest of a run names as the one before it
# Of a part that is sent unasked: on the slowest uplink that rounds wait for, 1 Mbit/s, it takes 50 ms, as asking does.
HANDED_NBYTES = 6 << 10
MAX_CERTIFICATES = 16  # per answer, and no more than fit a call's body
MAX_HEADERS, MAX_TOLD_MILESTONES = 1024, 16  # the same


class Letter(Record, frozen=True, kw_only=True, tag="Letter"):
    """A note: a signed RoundNote."""

    signed: Signed


class Decision(Record, frozen=True, kw_only=True, tag="Decision"):
    """A note: a round is decided, with the proof."""

    certificate: Certificate


class RunBegin(Record, frozen=True, kw_only=True, tag="RunBegin"):
    """A note of the run's maker: everybody expected is here."""

    opening: Manifest
    signed: Signed | UnsetType = UNSET  # the same under its maker's key, where the run's rounds are recorded


class Joining(Record, frozen=True, kw_only=True, tag="Joining"):
    """A note: its sender holds the state after this manifest and asks to be a member."""

    branch: BranchId
    manifest: HexDigest


class BlockPlease(Record, frozen=True, kw_only=True, tag="BlockPlease"):
    """A call of a newcomer whose line is slower than the run, again and again until it is in: announce nothing."""

    needs_s: Annotated[int, Meta(ge=0, le=MAX_COUNT)]  # by its own account; 0: it is in, or gives it up


class BlockAnswer(Record, frozen=True, kw_only=True, tag="BlockAnswer"):
    is_given: bool
    reason: Reason = ""


class StateRequest(Record, frozen=True, kw_only=True, tag="StateRequest"):
    """What state do you hold? `wanted`, the digest of its manifest, asks to pin it; None: only to tell."""

    run: RunId
    wanted: HexDigest | None = None


class StateOffer(Record, frozen=True, kw_only=True, tag="StateOffer"):
    """A pinned state: its chunks can be fetched for a while, whatever is committed meanwhile.

    Who was asked for a state that it holds no more offers its own. Nothing is pinned for who did not ask for it.
    """

    head: Manifest | None  # None: not begun
    index: HexDigest | None  # of the StateIndex, itself a blob; None: not pinned
    charter: Charter | None  # what holds after `head`, which names its digest; None: not pinned


class RoundsRequest(Record, frozen=True, kw_only=True, tag="RoundsRequest"):
    """Tell me of the rounds before mine, in a run that records them."""

    start: Annotated[int, Meta(ge=0, le=MAX_COUNT)]  # the first round whose header is asked for
    after: Annotated[int, Meta(ge=0, le=MAX_COUNT)]  # the round after which milestones are


class RoundsAnswer(Record, frozen=True, kw_only=True, tag="RoundsAnswer"):
    opening: Signed | None  # the run's first manifest, by who began it; None: it is not known here
    headers: Annotated[bytes, Meta(max_length=MAX_HEADERS * HEADER_NBYTES)]
    milestones: Annotated[tuple[Milestone, ...], Meta(max_length=MAX_TOLD_MILESTONES)]


class ForkRequest(Record, frozen=True, kw_only=True, tag="ForkRequest"):
    """Have you kept the outer parameters after this manifest, the last before a branch?"""

    manifest: HexDigest


class ForkOffer(Record, frozen=True, kw_only=True, tag="ForkOffer"):
    """Their chunks can be fetched for a while."""

    index: HexDigest | None  # of a StateIndex with the one vector "fork", itself a blob; None: no


class ChainRequest(Record, frozen=True, kw_only=True, tag="ChainRequest"):
    branch: BranchId
    after: Round


class ChainAnswer(Record, frozen=True, kw_only=True, tag="Chain"):
    """What was committed on the branch after that round, oldest first; None where it is no longer remembered."""

    certificates: Annotated[tuple[Certificate, ...], Meta(max_length=MAX_CERTIFICATES)] | None


class Evaluation(Record, frozen=True, kw_only=True, tag="Evaluation"):
    """A note: held-out loss of the outer parameters, measured by one member for all."""

    round: Round
    loss: float
    nats_per_byte: float
    num_tokens: Annotated[int, Meta(ge=0)]
    committed_tokens: Annotated[int, Meta(ge=0)]
    preferred: Preferred | UnsetType = UNSET  # of pairs of answers
    reward: Annotated[float, Meta(ge=0, le=1)] | UnsetType = UNSET  # of answers to tasks


class Shown(Record, frozen=True, kw_only=True, tag="Shown"):
    """A note to the leader of a later attempt: a RoundNote that another member has signed in this round."""

    signed: Signed


class StandingNote(Record, frozen=True, kw_only=True, tag="StandingNote"):
    """A note: how its sender, of this round's electorate, stands in it. Told again while the round takes long."""

    branch: BranchId
    round: Round
    attempt: Annotated[Attempt, Meta(ge=0, le=MAX_COUNT)]  # that it follows
    has_vote: bool  # False: it has left, comes back from an older state, or cannot apply what it accepted


class Gathered(Record, frozen=True, kw_only=True, tag="Gathered"):
    """A note to the leader of a round's first attempt: whose parts its sender holds, of the part that it owns.

    `missing`: whose it has asked for and not been given, several times.
    """

    branch: BranchId
    round: Round
    peers: Annotated[tuple[HexPeer, ...], Meta(max_length=MAX_MEMBERS)]
    missing: Annotated[tuple[HexPeer, ...], Meta(max_length=MAX_MEMBERS)] = ()


class Handed(Record, frozen=True, kw_only=True, tag="Handed"):
    """A note: bytes that its receiver is about to want, a part of a payload or a result (peer/round/payloads.py)."""

    data: Annotated[bytes, Meta(max_length=HANDED_NBYTES)]


# --- audits ---


class NamedState(Record, frozen=True, kw_only=True):
    """A state of a work's training steps: its digest is that of its index, a blob."""

    state: HexDigest
    path: Path  # in the work's trace


class AuditRequest(Record, frozen=True, kw_only=True, tag="AuditRequest"):
    """A call of who audits a work: show me what it takes to do some of its training steps again."""

    work: HexDigest
    ticket: Signed  # a Draw, or another's Finding: it says which steps


class AuditAnswer(Record, frozen=True, kw_only=True, tag="AuditAnswer"):
    """The lists of all states that are named here can be fetched for a while, and these chunks: of `before` all, of
    `last` and `ends` those of the parameters, those of the outer parameters that segments began at, and those of what
    codecs had left before."""

    is_ready: bool  # else ask again
    reason: Reason = ""  # why not
    before: NamedState | None = None  # the state that the steps begin with
    last: NamedState | None = None  # the state that the payload was made of
    begins: Annotated[tuple[NamedState, ...], Meta(max_length=MAX_SEGMENTS)] = ()  # the first of each segment
    ends: Annotated[tuple[NamedState, ...], Meta(max_length=MAX_SEGMENTS)] = ()  # the last of each, but of the last one
    followed: NamedState | None = None  # the last of the work that it goes on from


class AuditSealed(Record, frozen=True, kw_only=True, tag="AuditSealed"):
    """A call: its sender has done the steps. What it came to is fixed by the seal, before it is shown the worker's."""

    work: HexDigest
    ticket: Signed
    letter: Signed  # a Sealed


class AuditOpened(Record, frozen=True, kw_only=True, tag="AuditOpened"):
    after: NamedState | None = None  # what the worker came to; None: ask again
    made: Signed | UnsetType = UNSET  # a MadeStep: of one step in exact numbers; its gradient can be fetched, too


class OperationsRequest(Record, frozen=True, kw_only=True, tag="OperationsRequest"):
    """A call of who was opened what a step came to, and has come to something else: show me what it was made of."""

    work: HexDigest
    ticket: Signed  # as in its AuditRequest
    number: Annotated[int, Meta(ge=0, le=MAX_COUNT)] | UnsetType = UNSET  # of an operation; unset: list them all


class OperationsAnswer(Record, frozen=True, kw_only=True, tag="OperationsAnswer"):
    """What was asked for can be fetched for a while: the list of all operations; or the list of the chunks of what one
    came to, which is in that, and the chunks."""

    is_ready: bool
    is_under_way: bool = False  # ask again
    reason: Reason = ""  # why it is not ready
    made: Signed | UnsetType = UNSET  # a MadeStep that has the root over the list
    listed: HexDigest | UnsetType = UNSET  # 32 bytes for each operation


class MergedRequest(Record, frozen=True, kw_only=True, tag="MergedRequest"):
    """A call of who has not heard an owner, which need not tell all: what has it said of its part of that round?"""

    manifest: HexDigest
    part: Annotated[int, Meta(ge=0, lt=MAX_MEMBERS)]


class MergedAnswer(Record, frozen=True, kw_only=True, tag="MergedAnswer"):
    letter: Signed | None = None  # a RoundNote of Merged; None: it is not here


class SealNote(Record, frozen=True, kw_only=True, tag="SealNote"):
    """A note to all of an auditor, or of the worker that it audits: a signed Sealed."""

    letter: Signed


class SealOpened(Record, frozen=True, kw_only=True, tag="SealOpened"):
    """A note to all of an auditor that has sealed what it came to: this was it."""

    work: HexDigest
    before: Annotated[int, Meta(ge=0, le=MAX_COUNT)]  # as in its Sealed
    state: HexDigest
    salt: HexDigest
    after: NamedState | None = None  # what it was shown, where it has found nothing wrong with that


class WorkRequest(Record, frozen=True, kw_only=True, tag="WorkRequest"):
    """A call of who keeps or checks what a run has counted: between which states are the steps of this work?"""

    work: HexDigest
    keeps_all: bool = False  # its sender asks for each work of this peer: who is done stays until it has the last
    is_done: bool = False  # its sender has all of this one, or asks no more for it


class WorkAnswer(Record, frozen=True, kw_only=True, tag="WorkAnswer"):
    """The lists of the states of `begins` and of the last of `ends` can be fetched for a while, and these chunks: of
    `begins` all, of the last state those of the parameters, and what codecs had left before."""

    is_here: bool
    reason: Reason = ""  # why not
    begins: Annotated[tuple[NamedState, ...], Meta(max_length=MAX_SEGMENTS)] = ()  # the first of each segment
    ends: Annotated[tuple[NamedState, ...], Meta(max_length=MAX_SEGMENTS)] = ()  # the last of each


MAX_PLACES = 64  # of tasks whose answers are asked for at a time
MAX_ANSWERS_NBYTES = 768 << 10  # what they may take in a message


class DrawsAnswers(Record, frozen=True, kw_only=True, tag="DrawsAnswers"):
    """A note of who draws answers and trains nothing: it has the parameters after the manifest of this digest."""

    head: HexDigest


class DrawAnswers(Record, frozen=True, kw_only=True, tag="DrawAnswers"):
    """A call: draw answers to the tasks at these places of the run's order, from the parameters after this manifest."""

    head: HexDigest
    places: Annotated[tuple[Annotated[int, Meta(ge=0, le=MAX_COUNT)], ...], Meta(max_length=MAX_PLACES)]


class AnswersDrawn(Record, frozen=True, kw_only=True, tag="AnswersDrawn"):
    """All answers, task by task: how many tokens each has, and the tokens, in four bytes each."""

    lengths: Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 16)], ...], Meta(max_length=MAX_PLACES * 256)]
    tokens: Annotated[bytes, Meta(max_length=MAX_ANSWERS_NBYTES)]


class BranchProposal(Record, frozen=True, kw_only=True, tag="BranchProposal"):
    """A call: the majority is lost; let those named here go on together."""

    opening: Manifest
    opener: HexPeer


class BranchConsent(Record, frozen=True, kw_only=True, tag="BranchConsent"):
    is_given: bool
    reason: str = ""


class BranchBegin(Record, frozen=True, kw_only=True, tag="BranchBegin"):
    """A note: all consented."""

    opening: Manifest


# --- groups ---


class SponsorPlease(Record, frozen=True, kw_only=True, tag="SponsorPlease"):
    """A call of a peer outside the electorate, of an elector: contribute for me."""

    branch: BranchId
    round: Round


class SponsorAnswer(Record, frozen=True, kw_only=True, tag="SponsorAnswer"):
    is_taken: bool
    reason: Reason = ""


class OfferNote(Record, frozen=True, kw_only=True, tag="OfferNote"):
    """A note of a leaf to its aggregator: a signed Offer."""

    signed: Signed


class WardPass(Record, frozen=True, kw_only=True, tag="WardPass"):
    """A note of a leaf that is paused: it brings nothing to this round."""

    branch: BranchId
    round: Round


class HandOn(Record, frozen=True, kw_only=True, tag="HandOn"):
    """A note of an aggregator to its leaves: a round is decided. Certificate, record and results are blobs."""

    round: Annotated[Round, Meta(ge=0, le=MAX_COUNT)]
    certificate: HexDigest
    source: HexPeer  # from whom to fetch them first: the aggregator, or another leaf that it has told as well


class Hurry(Record, frozen=True, kw_only=True, tag="Hurry"):
    """A note of an aggregator to those of its leaves that have not offered: half of the time left for it is over."""

    branch: BranchId
    round: Round


class Release(Record, frozen=True, kw_only=True, tag="Release"):
    """A note of an aggregator to its leaves: ask another elector."""

    branch: BranchId


# --- acts ---


class ActNote(Record, frozen=True, kw_only=True, tag="ActNote"):
    """A note: a signed Act or Ballot that waits for a manifest."""

    letter: Signed


class LieNote(Record, frozen=True, kw_only=True, tag="LieNote"):
    """A note: what proves by itself that a member lies. It waits for a manifest."""

    lie: Warrant


class HandIn(Record, frozen=True, kw_only=True, tag="HandIn"):
    """A call, of anybody that is admitted: let this act or ballot be decided. Asked again, what became of it?"""

    letter: Signed


class HandInAnswer(Record, frozen=True, kw_only=True, tag="HandInAnswer"):
    outcome: Literal["waits", "decided", "refused"]
    reason: Reason = ""


class CharterRequest(Record, frozen=True, kw_only=True, tag="CharterRequest"):
    run: RunId


class CharterAnswer(Record, frozen=True, kw_only=True, tag="CharterAnswer"):
    """What holds of the run where its sender stands."""

    charter: Charter
    round: Round
    members: Annotated[tuple[HexPeer, ...], Meta(max_length=MAX_MEMBERS)]
