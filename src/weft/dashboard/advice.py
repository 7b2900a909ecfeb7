"""What is wrong, in plain words, and what to do about it: of those events that a person can do something about."""

from collections.abc import Callable, Iterator

from weft.dashboard.stages import ordinal
from weft.events import (
    AttemptStarted,
    CheckpointFailed,
    Entry,
    JoinTooSlow,
    LieProven,
    LoopStalled,
    MajorityLost,
    MemberGone,
    MemberStrays,
    NotLearning,
    PayloadRejected,
    StageEmpty,
)
from weft.ids import PeerId

Advice = tuple[PeerId | None, str, str]  # about whom, what is wrong, what to do

LONG_STALL_S = 30.0
MANY_ATTEMPTS = 3


def advice_of(entry: Entry, name: Callable[[PeerId], str]) -> Iterator[Advice]:
    """Yield what to say of an entry, if anything."""
    me = entry.peer
    match entry.event:
        case MajorityLost(alive=alive, electorate=electorate, opens_branch_in_s=wait_s):
            then = "nothing is decided until more are back" if wait_s is None else f"it goes on alone in {wait_s:.0f} s"
            yield (
                me,
                f"{name(me)} reaches {alive} of {electorate} members: {then}.",
                "Look whether the others' machines run and whether the network between them is up. No work is lost.",
            )
        case MemberGone(member=member, silent_s=silent_s):
            yield (
                member,
                f"{name(member)} has been silent for {silent_s:.0f} s and is gone.",
                "The run goes on without it. Start it again with the same command: it goes on where it was.",
            )
        case NotLearning():
            yield (
                None,
                "Rounds are decided, and the loss is no lower than when the run began.",
                "Lower the learning rate, or the outer one: a steward can, with weft act amend, without a restart.",
            )
        case MemberStrays(is_back=False, member=member, what=what):
            yield (
                member,
                f"The {what} of {name(member)} is far from that of the others.",
                "Ask its owner which data and settings it has. Stewards can remove it: weft act remove.",
            )
        case LieProven(member=member):
            yield (
                member,
                f"{name(member)} signed two words that contradict each other.",
                "Its key is struck out by itself. If it is yours: a copy of it runs twice, or the key was stolen.",
            )
        case CheckpointFailed(reason=reason):
            yield (
                me,
                f"{name(me)} cannot save its state: {reason}.",
                "Make room on its disk. It trains on, and saves when it can.",
            )
        case LoopStalled(stall_s=stall_s) if stall_s >= LONG_STALL_S:
            yield (
                me,
                f"{name(me)} stood still for {stall_s:.0f} s.",
                "Its machine slept or is overloaded. Keep it awake, or give weft fewer cores: weft join --cores.",
            )
        case JoinTooSlow(is_in=is_in):
            how = "falls behind" if is_in else "cannot catch up"
            yield (
                me,
                f"The line of {name(me)} is slower than the run: it {how}.",
                "A run with more inner steps a round needs less; or join with --blocking, so that others wait once.",
            )
        case StageEmpty(stage=stage, restored_by=None):
            yield (
                None,
                f"Nobody holds {ordinal([stage], 0)}, and nobody here has a state of it.",
                "Start a peer again that held it, with the same command, within seconds: else its section begins anew.",
            )
        case StageEmpty(stage=stage, restored_by=str() as peer, round=round):
            yield (
                peer,
                f"Nobody holds {ordinal([stage], 0)}: nothing is trained.",
                f"{name(peer)} takes it up by itself, with the state of round {round}; more peers make this rarer.",
            )
        case PayloadRejected(member=member, reason=reason):
            yield (
                member,
                f"What {name(member)} sent was refused: {reason}.",
                "Its owner should look at its log; another version of weft, or a broken memory, does this.",
            )
        case AttemptStarted(attempt=attempt, round=round, reason=reason) if attempt >= MANY_ATTEMPTS:
            yield (
                None,
                f"Round {round} is in its attempt {attempt + 1}: {reason}.",
                "Leaders cannot be reached or are too slow. Look at the links of those who led.",
            )
