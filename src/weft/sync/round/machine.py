"""The state of a member within a round, what enters the machine and what leaves it.

Time enters as `TimedOut` and leaves as `SetTimer`; everything that takes time or can fail (fetching, merging,
writing, sending) is an output that the driver carries out, and whose end is an input.

How long the driver waits is what measured rounds say, never a number a person has to guess:

    deadline = median + 3 MAD of the last rounds, at least 2 s, and a multiple of the median where one is asked for

Median and median absolute deviation move little when one round was slow. Before anything is measured the wait is long:
the first round holds compilation and cold caches.
"""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Literal

import msgspec

from weft.ids import Attempt, Digest, PeerId
from weft.sync.records import messages
from weft.sync.records.acts import Warrant
from weft.sync.records.tuning import Seen
from weft.sync.round.rules import Durable, is_quorum, leader, spent_farewells

Timer = Literal["grace", "progress"]
# grace: a quorum is ready, passes or is lost, how much longer the leader waits for the others.
# progress: a quorum is ready and nothing committed, how much longer this member follows the present attempt.

Status = Literal["alive", "suspected", "gone", "joining"]  # what membership says of a peer
Fate = Literal["late", "travelling", "lost"]  # of what a peer brought and a round did not count
# late: announced too late, or not at all; travelling: announced in time, and others have begun to fetch it;
# lost: announced in time, and nobody has.

FLOOR_S = 2.0
TELL_S = 0.01  # what arrives within so long is told of together
FIRST_S = 60.0  # nothing measured yet
NUM_REMEMBERED = 16  # rounds: links and loads change within minutes
MIN_MEASURED = 3  # fewer say little about spread

replace = msgspec.structs.replace


class State(msgspec.Struct, frozen=True, kw_only=True):
    me: PeerId
    durable: Durable
    attempt: Attempt = Attempt(0)  # the attempt followed; its leader is the one listened to
    ready: dict[PeerId, messages.Contribution] = {}  # announced, this peer's own included
    announced: messages.Ready | None = None  # by this peer, whole
    passing: frozenset[PeerId] = frozenset()  # who is paused: not waited for
    plan: messages.Collect | None = None
    revision: int = 0  # leader: of its next plan in this attempt
    results: dict[int, Digest] = {}  # of the plan's parts
    held: frozenset[int] = frozenset()  # parts whose result bytes are here
    holders: dict[PeerId, tuple[Digest, ...]] = {}  # leader: who holds which results of the plan
    promises: dict[PeerId, messages.Vote | None] = {}  # leader of an attempt > 0
    refusals: dict[PeerId, Attempt] = {}  # leader: who has promised which later attempt
    proposal: messages.Manifest | None = None  # leader: the one manifest of this attempt
    votes: frozenset[PeerId] = frozenset()  # leader: who accepted it
    is_grace_over: bool = False
    unusable: frozenset[PeerId] = frozenset()  # leader: contributions that cannot be had
    silent: frozenset[PeerId] = frozenset()  # owners of whose parts an earlier attempt never heard
    lacking: dict[PeerId, frozenset[PeerId]] = {}  # leader: by owner, which others it alone says it cannot have
    suspected: frozenset[PeerId] = frozenset()
    gone: frozenset[PeerId] = frozenset()
    farewells: dict[PeerId, messages.Goodbye] = {}
    joiners: frozenset[PeerId] = frozenset()
    acts: tuple[Warrant, ...] = ()  # that wait for a manifest, in order
    recalled: frozenset[PeerId] = frozenset()  # whose false work this member knows well enough to take it out
    relayed: frozenset[PeerId] = frozenset()  # reached by some through a third peer only: they own no parts
    speeds: dict[PeerId, float] = {}  # of inner steps, of whom it is known
    uplinks: dict[PeerId, float] = {}  # bytes per second, of whom it was measured
    seen: Seen | None = None  # what rounds take
    own_state: Digest | None = None  # what this member's vectors are called, once the outer step before is made
    committed: messages.Vote | None = None
    is_back: bool = False  # from its disk, in the middle of the round

    @property
    def base(self) -> messages.Base:
        return self.durable.base


# --- inputs ---


class Received(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    sender: PeerId
    message: messages.AnyRoundMessage


class Trained(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This peer's payload is encoded and served."""

    ready: messages.Ready


class Paused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This peer trains nothing in this round."""


class Lost(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a member announced cannot be had by most of those that should merge it."""

    peer: PeerId


class MergeDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    plan: messages.Collect
    part: int
    result: Digest


class MergeFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    plan: messages.Collect
    part: int
    missing: tuple[PeerId, ...]


class ResultHeld(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    plan: messages.Collect
    part: int


class Noticed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What membership says of a peer."""

    peer: PeerId
    status: Status


class Moved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """These acts wait for a manifest: the next one that this member proposes holds the first of them."""

    acts: tuple[Warrant, ...]


class Recalled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This member knows what was made of the false works of these: where it leads, they are taken out again."""

    peers: frozenset[PeerId]


class Rerouted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Who is reached through others has changed."""

    relayed: frozenset[PeerId]


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How fast members train and send: what they are leased and own next depends on it, where this member leads."""

    speeds: dict[PeerId, float]  # samples or tokens per second
    uplinks: dict[PeerId, float]  # bytes per second
    seen: Seen | None = None  # what rounds take; None: too few were measured


class StateNamed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The outer step before the round is made: what the replicated vectors are called."""

    previous: Digest  # the manifest that it was made by
    name: Digest


class TimedOut(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    timer: Timer
    attempt: Attempt  # it was set in; a timer of another attempt is stale


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This peer's person wants it to stop."""


Input = (
    Received
    | Trained
    | Paused
    | Lost
    | MergeDone
    | MergeFailed
    | ResultHeld
    | Noticed
    | Moved
    | Recalled
    | Rerouted
    | Measured
    | StateNamed
    | TimedOut
    | Leave
)

# --- outputs, to be carried out in order ---


class Persist(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    durable: Durable


class Send(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    to: PeerId
    message: messages.AnyRoundMessage


class Broadcast(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To every other member of the electorate."""

    message: messages.AnyRoundMessage


class Merge(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Fetch the plan's contributions to `part`, merge them, serve the result; answer MergeDone or MergeFailed."""

    plan: messages.Collect
    part: int


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Fetch a result from its owner or whoever holds it; answer ResultHeld."""

    plan: messages.Collect
    part: int
    result: Digest


class SetTimer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    timer: Timer
    attempt: Attempt


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make the outer step. At most one per round."""

    attempt: Attempt
    manifest: messages.Manifest


Output = Persist | Send | Broadcast | Merge | Fetch | SetTimer | Commit
Result = tuple[State, tuple[Output, ...]]


def then(result: Result, following: Callable[[State], Result]) -> Result:
    """Return the result of two steps in a row."""
    state, outputs = result
    state, more = following(state)
    return state, (*outputs, *more)


def at_attempt(state: State, attempt: Attempt) -> State:
    """Return the state once it follows `attempt`; what belonged to an earlier one is dropped."""
    if attempt <= state.attempt:
        return state
    if (plan := state.plan) is not None:
        silent = (owner for part, owner in enumerate(plan.owners) if part not in state.results)
        state = replace(state, silent=state.silent.union(silent) - {state.me})
    state = replace(without_plan(state), attempt=attempt, revision=0, promises={}, refusals={})
    return replace(state, proposal=None, votes=frozenset(), unusable=frozenset(), lacking={})


def without_plan(state: State) -> State:
    return replace(state, plan=None, results={}, held=frozenset(), holders={})


def results_of(state: State) -> tuple[Digest, ...]:
    return tuple(state.results[part] for part in sorted(state.results))


def is_leading(state: State) -> bool:
    """Return whether this member may plan or propose in its attempt. Attempt 0 is promised from the start."""
    if state.committed is not None or leader(state.base, state.attempt) != state.me:
        return False
    if state.attempt < state.durable.promised:
        return False
    accepted = state.durable.accepted
    if state.attempt == 0 and state.is_back and len(state.base.electorate) > 1:
        return False  # what is still said about a plan of before would be taken for one about a new plan
    if state.attempt == 0:
        return accepted is None or state.proposal is not None
    return is_quorum(state.base, state.promises, spent_farewells(state.farewells, state.attempt))


def deadline_s(measured_s: Sequence[float], least: float = 1.0) -> float:
    """Return how long to wait (seconds) given how long it took in the last rounds.

    Args:
        least: times the median, however little they differed.
    """
    recent = measured_s[-NUM_REMEMBERED:]
    if len(recent) < MIN_MEASURED:
        return FIRST_S
    middle = median(recent)
    return max(FLOOR_S, least * middle, middle + 3 * median(abs(value - middle) for value in recent))
