"""How much an event concerns a person: 0 routine, 1 good to know, 2 look at it, 3 something is broken."""

from weft.events import (
    ActRefused,
    AdmissionRefused,
    AttemptStarted,
    BranchOpened,
    CheckpointFailed,
    CheckpointSaved,
    ConnectionDropped,
    CountedThrough,
    Event,
    FellBack,
    HeldDropped,
    JoinTooSlow,
    LegacyDropped,
    LieProven,
    LinkDown,
    LinkUp,
    LoopStalled,
    MajorityLost,
    MemberGone,
    MemberProgress,
    MemberStrays,
    MemberSuspected,
    NotLearning,
    PayloadOffered,
    PayloadRejected,
    RoundCommitted,
    RoundMissed,
    RoundProven,
    Sampled,
    StageEmpty,
    StagesSeen,
    StepDone,
    TransportUp,
    Working,
)

SEVERITIES = ("routine", "note", "warning", "error")
ROUTINE, NOTE, WARNING, ERROR = range(len(SEVERITIES))

_ROUTINE = (
    *(StepDone, MemberProgress, RoundCommitted, AttemptStarted, PayloadOffered, CountedThrough, RoundProven),
    *(LinkUp, LinkDown, TransportUp, CheckpointSaved, Sampled, Working, StagesSeen),
)
_WARNINGS = (
    *(MemberSuspected, MemberGone, MemberStrays, LoopStalled, RoundMissed, PayloadRejected, FellBack, JoinTooSlow),
    *(ActRefused, AdmissionRefused, ConnectionDropped, LegacyDropped, BranchOpened, StageEmpty, HeldDropped),
)
_ERRORS = (MajorityLost, CheckpointFailed, NotLearning, LieProven)


_OF_KIND = dict.fromkeys(_ROUTINE, ROUTINE) | dict.fromkeys(_WARNINGS, WARNING) | dict.fromkeys(_ERRORS, ERROR)


def severity_of(event: Event) -> int:
    if isinstance(event, MemberStrays) and event.is_back:
        return NOTE
    return _OF_KIND.get(type(event), NOTE)
