"""Frozen records of what happened, and the sinks they go to. The only way information leaves a peer.

Code that decides nothing about display calls `emit(Event(...))`; the live view, the log file, benchmarks,
the simulator's assertions and the tests read the same records. A stored line is
`{"v": 1, "at": seconds since 1970, "peer": id, "event": {"type": "RoundCommitted", ...}}`.

No event carries a key, a ticket or its secret: no field here could hold one.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Protocol

import msgspec

from weft.clock import Clock
from weft.ids import Attempt, BranchId, Digest, PeerId, Round, RunId, Step, Tokens, several
from weft.wire import Record

VERSION = 1


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type"):
    """Base of all events; the tag is the class name."""

    stage: int | msgspec.UnsetType = msgspec.UNSET  # whose rounds, steps or members it tells of; a line leaves it out


# --- the peer ---


class PeerStarted(Event, frozen=True, kw_only=True):
    run: RunId
    name: str
    software: str
    device: str
    num_parameters: int


class PeerStopped(Event, frozen=True, kw_only=True):
    reason: str


class Paused(Event, frozen=True, kw_only=True):
    """This peer trains nothing until it is resumed; it votes and follows."""

    reason: str


class Resumed(Event, frozen=True, kw_only=True):
    reason: str
    paused_s: float


class Notice(Event, frozen=True, kw_only=True):
    """Something a person should know that changes no behaviour."""

    text: str


class Working(Event, frozen=True, kw_only=True):
    """How far something has come that takes long (`weft.progress`)."""

    what: str
    unit: str  # "B", or a word for many
    done: int
    total: int | None
    rate: float  # units a second, of late
    left_s: float | None
    is_over: bool  # it is done, or was given up


class FellBack(Event, frozen=True, kw_only=True):
    """A fallback that changes numerics, bytes or trust."""

    wanted: str
    used: str
    reason: str


# --- the network ---


class TransportUp(Event, frozen=True, kw_only=True):
    transport: str
    addresses: tuple[str, ...]


class LinkUp(Event, frozen=True, kw_only=True):
    """A control connection stands. `tried` holds the addresses that failed before, with the reason."""

    remote: PeerId
    transport: str
    address: str
    tried: tuple[str, ...] = ()


class LinkDown(Event, frozen=True, kw_only=True):
    remote: PeerId
    reason: str


HUNG_UP = "it hung up in the handshake"  # so begins the reason where who left had broken nothing


class ConnectionDropped(Event, frozen=True, kw_only=True):
    """Somebody broke the protocol, or left before it said who it is; the connection is closed and the run goes on."""

    address: str
    remote: PeerId | None
    reason: str


class AdmissionRefused(Event, frozen=True, kw_only=True):
    remote: PeerId
    reason: str


# --- membership ---


class MemberJoined(Event, frozen=True, kw_only=True):
    member: PeerId
    name: str


class MemberSuspected(Event, frozen=True, kw_only=True):
    member: PeerId
    silent_s: float
    reason: str


class MemberRecovered(Event, frozen=True, kw_only=True):
    member: PeerId


class MemberGone(Event, frozen=True, kw_only=True):
    member: PeerId
    silent_s: float


class MemberLeft(Event, frozen=True, kw_only=True):
    """A member said goodbye."""

    member: PeerId


class MemberProgress(Event, frozen=True, kw_only=True):
    """A member's own summary, heard with its heartbeat: what the live view shows of the others."""

    member: PeerId
    name: str
    round: Round
    state: str
    loss: float | None
    tokens_per_s: float
    link: str


class MemberStrays(Event, frozen=True, kw_only=True):
    """What a member shows is far from what the others show, or is like theirs again. Nothing is decided by it."""

    member: PeerId
    round: Round
    # "loss": as it tells; "update": the length of what it brings, by its tokens, measured here; "steps": by how much
    # its training steps are longer than the same made here, on average
    what: str
    value: float
    usual: float  # the median of the others; of steps 0
    is_back: bool = False


class LoopStalled(Event, frozen=True, kw_only=True):
    """This process stood still: its machine slept, something stopped it, or something held its event loop."""

    stall_s: float


# --- training ---


class StepDone(Event, frozen=True, kw_only=True):
    step: Step
    loss: float  # nats per token, mean over the step's batch
    learning_rate: float
    gradient_norm: float
    num_tokens: int
    duration_s: float


class WarmedUp(Event, frozen=True, kw_only=True):
    """What steps need is compiled and loaded; before that a peer does not let itself be counted in."""

    is_compiled: bool
    micro_batch: int
    duration_s: float


class MicroBatchChanged(Event, frozen=True, kw_only=True):
    before: int
    after: int
    reason: str


class Preferred(Record, frozen=True, kw_only=True):
    """What a model makes of held-out pairs of answers, on the mean."""

    accuracy: Annotated[float, msgspec.Meta(ge=0, le=1)]  # share of pairs of which it finds the chosen answer better
    margin: float  # of the chosen answer's reward above the other's, nats
    kl: float | msgspec.UnsetType = msgspec.UNSET  # nats per token, from the model that the run began with


class Evaluated(Event, frozen=True, kw_only=True):
    """Loss of the outer parameters on held-out text."""

    round: Round
    loss: float  # nats per token; of pairs of answers, per pair
    nats_per_byte: float  # NaN of pairs, and where bytes are not known
    num_tokens: int  # that were predicted; of pairs, how many
    committed_tokens: Tokens
    preferred: Preferred | msgspec.UnsetType = msgspec.UNSET  # of pairs of answers
    reward: float | msgspec.UnsetType = msgspec.UNSET  # of answers to tasks; the loss is what lacks to 1


class Rewarded(Event, frozen=True, kw_only=True):
    """Answers were drawn for a training step, and judged."""

    reward: Annotated[float, msgspec.Meta(ge=0, le=1)]  # on the mean
    num_answers: int
    num_tasks: int
    num_teaching: int  # tasks whose answers are not all worth the same
    num_brought: int  # tasks whose answers others have drawn
    mean_length: float  # tokens


class AnswersForged(Event, frozen=True, kw_only=True):
    """A member has told answers that it did not draw: nothing is taken of it any more."""

    member: PeerId
    place: int  # of the task, in the run's order
    reason: str


class NotLearning(Event, frozen=True, kw_only=True):
    """Rounds count tokens, and the members' loss is no lower than when the run began."""

    round: Round
    committed_tokens: Tokens
    first_loss: float  # nats per token: medians over members and some rounds
    loss: float
    num_members: int | msgspec.UnsetType = msgspec.UNSET  # unset: nobody says


class Diverged(Event, frozen=True, kw_only=True):
    """The held-out loss is far above that of a model which gives every token the same chance."""

    round: Round
    committed_tokens: Tokens
    loss: float  # nats per token
    nothing: float  # the loss of such a model: the logarithm of the vocabulary


class Sampled(Event, frozen=True, kw_only=True):
    round: Round
    prompt: str
    text: str


# --- rounds ---


class AttemptStarted(Event, frozen=True, kw_only=True):
    branch: BranchId
    round: Round
    attempt: Attempt
    leader: PeerId
    reason: str


class PayloadOffered(Event, frozen=True, kw_only=True):
    """This peer has announced what it brings to a round. Inner steps until its `RoundCommitted` are made meanwhile."""

    round: Round
    tokens: Tokens
    nbytes: int


class RoundCommitted(Event, frozen=True, kw_only=True):
    """An outer step was made. `left_out` says who did not take part, and why."""

    branch: BranchId
    round: Round
    attempt: Attempt
    manifest: Digest
    contributors: tuple[PeerId, ...]
    left_out: dict[PeerId, str]
    num_through: int = 0  # peers counted with contributors, whose groups they are in
    tokens: Tokens  # counted in this round
    committed_tokens: Tokens  # counted since the run began
    sent_nbytes: int  # by this peer, since the last commit
    received_nbytes: int
    duration_s: float  # from this peer's payload to its outer step
    work_s: float  # inner steps before it
    distance: float | None = None  # of who exchanges with neighbours, to the mean just made, in lengths of the mean
    leader: PeerId | None = None
    contributed: tuple[Tokens, ...] = ()  # of each contributor, in their order


class RoundProven(Event, frozen=True, kw_only=True):
    """An observer has checked that a majority signed what was decided (`observe.light_client`)."""

    branch: BranchId
    round: Round
    manifest: Digest
    committed_tokens: Tokens
    num_signed: int
    num_electors: int  # whose majority it is


class RoundMissed(Event, frozen=True, kw_only=True):
    """A round committed without this peer's contribution, which stays in its carry."""

    round: Round
    carried_tokens: Tokens
    reason: str


class WorkDropped(Event, frozen=True, kw_only=True):
    """What this peer had trained, and no round is known to have counted, is carried no more."""

    tokens: Tokens
    reason: str


class MethodTuned(Event, frozen=True, kw_only=True):
    """From a round on all members synchronise every so many inner steps, in this codec."""

    round: Round
    every: int
    codec: str
    waited_s: float  # of a round so far, where its leader is
    worked_s: float
    reason: str


class GraphChosen(Event, frozen=True, kw_only=True):
    """Who exchanges with whom from a round on. The gap is what a round takes off the distance to the mean."""

    round: Round
    graph: str
    num_members: int
    spectral_gap: float


class Sponsored(Event, frozen=True, kw_only=True):
    """No round has counted this peer in, or the electorate has no room: it contributes through an elector from now."""

    round: Round
    sponsor: PeerId
    has_room: bool | msgspec.UnsetType = msgspec.UNSET  # the electorate has: it is an elector once a round counts it in


class CountedThrough(Event, frozen=True, kw_only=True):
    """A round counted this peer's contribution with its aggregator's. Comes before the round's `RoundCommitted`."""

    round: Round
    tokens: Tokens


class MajorityLost(Event, frozen=True, kw_only=True):
    branch: BranchId
    round: Round
    alive: int
    electorate: int
    opens_branch_in_s: float | None
    reason: str


class TrainsOn(Event, frozen=True, kw_only=True):
    """No majority is in sight: this peer makes inner steps beyond its lease, which cover leases to come."""

    branch: BranchId
    round: Round  # that cannot be decided
    steps: int  # at most


class BranchOpened(Event, frozen=True, kw_only=True):
    branch: BranchId
    round: Round
    members: tuple[PeerId, ...]
    reason: str
    is_everybody: bool | msgspec.UnsetType = (
        msgspec.UNSET
    )  # nobody is missing: all were stopped in one round, and are back


class BranchLeft(Event, frozen=True, kw_only=True):
    """A peer goes over to a branch that counts more than its own."""

    branch: BranchId
    round: Round  # the last one of it that this peer applied
    into: BranchId
    since: Round  # the first that the two do not share
    tokens: Tokens  # counted by then, that the other does not have: at most
    kept: Tokens  # of those, which are brought to the other
    reason: str  # why the rest is lost; empty where there is none


class LegacyCounted(Event, frozen=True, kw_only=True):
    """A round has counted what a branch had counted that was given up."""

    branch: BranchId
    round: Round  # that counted it
    by: PeerId  # who brought it
    tokens: Tokens  # that it holds
    weight: Tokens  # as which it was counted


class LegacyDropped(Event, frozen=True, kw_only=True):
    """What a branch had counted that was given up can no longer be counted, or not all of it."""

    branch: BranchId
    tokens: Tokens
    reason: str


class ActWaits(Event, frozen=True, kw_only=True):
    """An act of a steward, or a member's vote, waits for a manifest that holds it."""

    by: PeerId
    kind: str
    subject: str  # a key or a run; empty where it is about settings


class LieProven(Event, frozen=True, kw_only=True):
    """A member signed two notes that contradict each other, or false work: whoever sees what shows it strikes its key
    out."""

    member: PeerId
    branch: BranchId
    round: Round
    what: str


class ActRefused(Event, frozen=True, kw_only=True):
    """An act or vote that this peer was handed has no effect."""

    by: PeerId
    kind: str
    subject: str
    reason: str


class ActEnacted(Event, frozen=True, kw_only=True):
    """A committed manifest holds an act: it takes effect with the round after."""

    branch: BranchId
    round: Round
    by: tuple[PeerId, ...]  # a steward, or the members that voted for it
    kind: str
    subject: str
    reason: str
    changes: dict[str, str]  # of settings, as JSON


class PayloadRejected(Event, frozen=True, kw_only=True):
    round: Round
    member: PeerId
    reason: str


class StageHeld(Event, frozen=True, kw_only=True):
    """This peer takes a stage of a run with stages."""

    stage: int
    num_stages: int
    num_parameters: int
    reason: str


class StageLeft(Event, frozen=True, kw_only=True):
    """This peer holds a stage no more."""

    stage: int
    reason: str


class TeamFormed(Event, frozen=True, kw_only=True):
    """With whom this peer computes a stage's micro-batches from now on."""

    stage: int
    members: tuple[PeerId, ...]  # the first takes micro-batches and the others help; one: this peer computes alone
    size: int  # of a team, as the run says


class StagesSeen(Event, frozen=True, kw_only=True):
    """Who computes which stage, where that has changed, or a minute has gone by."""

    members: tuple[tuple[PeerId, ...], ...]  # of each stage
    rates: tuple[float, ...]  # samples a second of each stage, as its members say
    waiting: tuple[int, ...]  # micro-batches under way in each
    names: dict[PeerId, str] = {}  # of all who hold or want a stage, as far as they are known


class StageEmpty(Event, frozen=True, kw_only=True):
    """Nobody holds a stage: micro-batches wait until somebody does."""

    stage: int
    restored_by: PeerId | None  # None: nobody has a state of it
    round: Round  # of the state that it is restored from


class MicroBatchFailed(Event, frozen=True, kw_only=True):
    """A micro-batch that a member of the stage before sent was given up here; its sender tries another member."""

    stage: int
    member: PeerId
    reason: str


class PassageRefused(Event, frozen=True, kw_only=True):
    """What came back of a micro-batch was not accepted: it is not what was sent, by its author's own signature."""

    stage: int
    member: PeerId  # who has sent it back
    reason: str


class PassageAudited(Event, frozen=True, kw_only=True):
    """This peer has computed a micro-batch of another member of its stage again, and come to the same."""

    stage: int
    member: PeerId
    round: Round
    distance: float  # of what went on and of what went back, the larger; 0: equal bits


class PassageDoubted(Event, frozen=True, kw_only=True):
    """This peer has computed a micro-batch of another member of its stage again, and come to something else."""

    stage: int
    member: PeerId
    round: Round
    why: str


class AccuserDoubted(Event, frozen=True, kw_only=True):
    """A member accused another of the same stage of what this peer finds to be right."""

    stage: int
    accuser: PeerId
    member: PeerId


class HeldDropped(Event, frozen=True, kw_only=True):
    """There was no room for what later attempts of so many micro-batches brought; they count nowhere."""

    stage: int
    num: int


class TextMoved(Event, frozen=True, kw_only=True):
    """A text that is being drawn goes on with another member of a stage: the one before is gone, silent or busy."""

    stage: int | msgspec.UnsetType = msgspec.UNSET  # unset: each member has the whole model
    before: PeerId
    member: PeerId


class TextChanged(Event, frozen=True, kw_only=True):
    """A text that is being drawn goes on as nobody would have drawn it from its beginning: with other weights than it
    began with, or with other numbers than exact ones."""

    before: Round
    round: Round  # whose weights it goes on with
    is_exact: bool  # as far as the text was: numbers are as before


class ReceiptsDiffer(Event, frozen=True, kw_only=True):
    """Two members have signed different things of what one sent the other for a text: one lies, or is broken."""

    stage: int  # of `member`
    before: PeerId
    member: PeerId


class ReceiptFailed(Event, frozen=True, kw_only=True):
    """A receipt for a part of a text did not come, or says what cannot be. Told once of a member and a reason."""

    stage: int | msgspec.UnsetType = msgspec.UNSET  # unset: each member has the whole model
    member: PeerId
    reason: str


class StateJoined(Event, frozen=True, kw_only=True):
    """A newcomer holds the run's state."""

    round: Round
    nbytes: int
    fetched_nbytes: int  # the last time it asked: less where it had some of it already, or chunks are equal
    duration_s: float
    donors: tuple[PeerId, ...]  # who delivered


class StateContradicted(Event, frozen=True, kw_only=True):
    """What a peer has is not the state that the members of the run have signed; it fetches it anew."""

    round: Round  # before which most members had another
    donors: tuple[PeerId, ...]  # who gave it; none: it is what this process has computed since


class StatesDiffer(Event, frozen=True, kw_only=True):
    """Members name other states than a peer has, and no majority says which is right."""

    round: Round  # before which they have them
    members: tuple[PeerId, ...]


class WorkAudited(Event, frozen=True, kw_only=True):
    """This peer has done some of a member's training steps again, and found that they are what it says."""

    round: Round  # that counts them
    member: PeerId
    work: Digest
    num_steps: int
    distance: float  # between what both came to, relative to what the steps changed


class WorkDoubted(Event, frozen=True, kw_only=True):
    """This peer has found that a member's training steps are not what it says, or got no answer."""

    round: Round
    member: PeerId
    work: Digest
    num_steps: int
    outcome: str  # differs or unanswered
    why: str
    distance: float


class AuditorDoubted(Event, frozen=True, kw_only=True):
    """A member has not opened what it had sealed before it was shown training steps of another, or something else."""

    member: PeerId  # who has audited
    work: Digest
    outcome: str  # false or silent
    why: str


class RoundsUnlike(Event, frozen=True, kw_only=True):
    """Training steps that this peer has made again end farther from those of members than honest machines' usually do:
    this machine rounds otherwise, or they do, or theirs are false."""

    distance: float  # the largest
    held: float  # the most that is held for honest
    num_members: int  # whose steps it has made again
    num_unlike: int  # of them


class MergeAudited(Event, frozen=True, kw_only=True):
    """This peer has merged a part of a round again, and found what its owner has."""

    round: Round
    member: PeerId  # the owner
    part: int
    result: Digest


class MergeDoubted(Event, frozen=True, kw_only=True):
    """This peer has found that a part of a round is not what was brought to it, or could not fetch that."""

    round: Round
    member: PeerId  # the owner
    part: int
    result: Digest
    outcome: str  # differs or unanswered
    why: str


class WorkTakenOut(Event, frozen=True, kw_only=True):
    """A round has taken out of the model again what a round before had counted of a work that was found false."""

    round: Round
    member: PeerId  # who was struck out for it
    counted_in: Round


class WorkStays(Event, frozen=True, kw_only=True):
    """What a round had counted of a work that was found false stays in the model."""

    round: Round
    member: PeerId  # who was struck out for it
    counted_in: Round
    why: str


class JoinTooSlow(Event, frozen=True, kw_only=True):
    """A newcomer's line is no faster than the run: at this pace it never catches up. Told again once it was in."""

    received_bps: float  # by this machine
    added_bps: float  # by the results of the run's rounds, which it must receive, too
    needs_s: float  # at that pace, if the run waited
    is_blocking: bool  # it asks members for that
    is_in: bool = False  # it had caught up, and falls behind again


class RunBlocked(Event, frozen=True, kw_only=True):
    """This peer announces nothing until a newcomer is in that asked for it."""

    by: PeerId
    needs_s: float  # by its own account
    longest_s: float  # that this peer waits


class RunUnblocked(Event, frozen=True, kw_only=True):
    by: PeerId
    blocked_s: float
    reason: str


# --- files ---


class DataReady(Event, frozen=True, kw_only=True):
    num_shards: int
    fetched_nbytes: int
    train_tokens: int
    heldout_tokens: int


class CheckpointSaved(Event, frozen=True, kw_only=True):
    path: str
    round: Round
    digest: Digest
    nbytes: int


class CheckpointFailed(Event, frozen=True, kw_only=True):
    path: str
    reason: str


Emit = Callable[[Event], None]


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """An event with its origin, as sinks receive it."""

    v: int
    at: float  # wall seconds, for people: no decision reads it
    peer: PeerId
    event: Event


class Sink(Protocol):
    def write(self, entry: Entry) -> None: ...

    def close(self) -> None: ...


# Who floods can cause these as often as it likes: more of a kind within a minute are counted, and the next minute says
# how many. At 300 bytes a line they would fill the log's 256 MB in four days.
REPEATED = (ConnectionDropped, AdmissionRefused)
MAX_PER_MINUTE = 120


class EventLog:
    """Stamps events and hands them to every sink. One that fails is asked again with the next event.

    The others are told when it fails, and all are told when it goes on and how many events it lacks. Of kinds that
    others can cause at will, no more than `MAX_PER_MINUTE` are handed out.
    """

    def __init__(self, clock: Clock, peer: PeerId, sinks: Sequence[Sink]) -> None:
        self._clock = clock
        self._peer = peer
        self._sinks = list(sinks)
        self._num_lost = [0] * len(self._sinks)
        self._repeated: dict[type[Event], tuple[float, int]] = {}  # since when, and how many since then

    def emit(self, event: Event) -> None:
        if isinstance(event, REPEATED) and self._is_only_counted(event):
            return
        for text in self._hand_out(event):
            self._hand_out(Notice(text=text))

    def _is_only_counted(self, event: Event) -> bool:
        kind, now = type(event), self._clock.wall()
        since, num = self._repeated.get(kind, (now, 0))
        if not 0 <= now - since < 60:
            if (num_more := num - MAX_PER_MINUTE) > 0:
                self._hand_out(Notice(text=f"{num_more} more {kind.__name__} like those before were not written"))
            since, num = now, 0
        self._repeated[kind] = since, num + 1
        return num >= MAX_PER_MINUTE

    def _hand_out(self, event: Event) -> list[str]:
        """Return what is to be said of the sinks."""
        entry = Entry(v=VERSION, at=self._clock.wall(), peer=self._peer, event=event)
        told: list[str] = []
        for number, sink in enumerate(self._sinks):
            name, num_lost = type(sink).__name__, self._num_lost[number]
            try:
                sink.write(entry)
            except (OSError, ValueError) as error:  # a full disk or an odd file name must not stop a run
                self._num_lost[number] += 1
                if not num_lost:
                    told.append(f"{name} stopped: {error}")
            else:
                self._num_lost[number] = 0
                if num_lost:
                    told.append(f"{name} goes on, without {several(num_lost, 'event')}")
        return told

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
