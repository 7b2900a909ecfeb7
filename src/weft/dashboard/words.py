"""Events a person wants to hear of, each as one sentence. Routine has none: steps, commits, progress.

The choices of a run's method in one line, for a person.

What happens in routine, in words: of events that `notable` has no sentence for.

How much an event concerns a person: 0 routine, 1 good to know, 2 look at it, 3 something is broken.
"""

from collections.abc import Callable

import msgspec

from weft.dashboard import figures
from weft.dashboard.stages import ordinal, prefixed
from weft.events import (
    ActEnacted,
    ActRefused,
    ActWaits,
    AdmissionRefused,
    AttemptStarted,
    BranchLeft,
    BranchOpened,
    CheckpointFailed,
    CheckpointSaved,
    ConnectionDropped,
    CountedThrough,
    DataReady,
    Entry,
    Evaluated,
    Event,
    FellBack,
    GraphChosen,
    HeldDropped,
    JoinTooSlow,
    LegacyCounted,
    LegacyDropped,
    LieProven,
    LinkDown,
    LinkUp,
    LoopStalled,
    MajorityLost,
    MemberGone,
    MemberJoined,
    MemberLeft,
    MemberProgress,
    MemberRecovered,
    MemberStrays,
    MemberSuspected,
    MethodTuned,
    MicroBatchChanged,
    MicroBatchFailed,
    Notice,
    NotLearning,
    Paused,
    PayloadOffered,
    PayloadRejected,
    PeerStarted,
    PeerStopped,
    Resumed,
    RoundCommitted,
    RoundMissed,
    RoundProven,
    RunBlocked,
    RunUnblocked,
    Sampled,
    Sponsored,
    StageEmpty,
    StageHeld,
    StageLeft,
    StagesSeen,
    StateJoined,
    StepDone,
    TeamFormed,
    TrainsOn,
    TransportUp,
    WarmedUp,
    Working,
)
from weft.ids import PeerId, short
from weft.sync.method.choices import Choices
from weft.wire import printable

SLEPT_S = 5.0  # a shorter stall concerns nobody but who reads the log


def notable(entry: Entry, name: Callable[[PeerId], str]) -> str | None:
    """Return what to say of an entry, or None; `name` knows what peers are called.

    Others' names and words are in it, so it is made safe to print.
    """
    text = _sentence(entry, name)
    return None if text is None else printable(prefixed(entry.event, text))


def _sentence(entry: Entry, name: Callable[[PeerId], str]) -> str | None:
    match entry.event:
        case Notice(text=text):
            return text
        case Paused(reason=reason):
            return f"{name(entry.peer)} is paused: {reason}"
        case Resumed(paused_s=paused_s):
            return f"{name(entry.peer)} trains again after {figures.duration(paused_s)}"
        case FellBack(wanted=wanted, used=used, reason=reason):
            return f"{name(entry.peer)}: {used} instead of {wanted}: {reason}"
        case MemberJoined(member=member, name=called):
            return f"{called or short(member)} joined"
        case MemberSuspected(member=member, silent_s=silent_s, reason=reason):
            return f"{name(member)} is silent ({reason or f'{silent_s:.0f} s'})"
        case MemberRecovered(member=member):
            return f"{name(member)} is back"
        case MemberGone(member=member):
            return f"{name(member)} is gone"
        case MemberLeft(member=member):
            return f"{name(member)} left with a goodbye"
        case MemberStrays(member=member, what=what, is_back=True):
            return f"the {what} of {name(member)} is like the others' again"
        case MemberStrays(member=member, what="loss", value=value, usual=usual):
            own = f"the loss of {name(member)} is {value:.2f}"
            return f"{own} where that of the others is {usual:.2f}: other data or rates?"
        case MemberStrays(member=member, value=value, usual=usual):
            times = f"{value / usual:.3g} times" if value > usual else f"1/{usual / value:.3g}"
            return f"an update of {name(member)} is {times} as long as one of the others: other data or rates?"
        case NotLearning(first_loss=first, loss=now, committed_tokens=tokens):
            return (
                f"after {tokens:,} tokens the members' loss is {now:.2f}, no lower than the {first:.2f} with which the "
                "run began: rates may be too high, or rounds count what was computed long before"
            )
        case LoopStalled(stall_s=stall_s) if stall_s >= SLEPT_S:
            return f"{name(entry.peer)} stood still for {stall_s:.0f} s"
        case MethodTuned(round=number, every=every, codec=codec, reason=reason):
            return f"from round {number} on every {every} inner steps, in {codec}: {reason}"
        case GraphChosen(graph=graph, num_members=num, spectral_gap=gap):
            return f"exchanges with neighbours: {graph} of {num}, spectral gap {gap:.4f}"
        case Sponsored(sponsor=sponsor):
            return f"{name(entry.peer)} contributes through {name(sponsor)}: there is no room among those who vote"
        case MajorityLost(alive=alive, electorate=electorate, opens_branch_in_s=wait_s, reason=reason):
            waits = "waits for the others" if wait_s is None else f"goes on alone in {wait_s:.0f} s"
            return f"{name(entry.peer)} reaches {alive} of {electorate} members and {waits}: {reason}"
        case TrainsOn(steps=steps):
            return f"{name(entry.peer)} trains on meanwhile, for at most {steps} inner steps, which later rounds count"
        case BranchOpened(members=members, reason=reason):
            return f"{len(members)} peers go on in a branch: {reason}"
        case BranchLeft(tokens=tokens, kept=kept, reason=reason):
            what = (
                f"{name(entry.peer)} goes over to another branch; the {tokens:,} tokens that only its own had counted"
            )
            if kept == tokens:
                return f"{what} are brought there"
            return f"{what} are lost{f', but for {kept:,} that are brought there' if kept else ''}: {reason}"
        case LegacyCounted(by=by, tokens=tokens, weight=weight):
            return (
                f"the {tokens:,} tokens of a branch that was given up are counted as {weight:,}, brought by {name(by)}"
            )
        case LegacyDropped(tokens=tokens, reason=reason):
            return f"of a branch that was given up, {tokens:,} tokens are not counted: {reason}"
        case RoundMissed(round=number, reason=reason):
            return f"{name(entry.peer)} missed round {number} and carries its work on: {reason}"
        case ActWaits(by=by, kind=kind, subject=subject):
            what = f"{kind} {name(PeerId(subject))}" if subject else kind
            return f"{what}: handed in by {name(by)}, waits for a round"
        case ActRefused(by=by, kind=kind, reason=reason):
            return f"{kind} of {name(by)} has no effect: {reason}"
        case LieProven(member=member, round=number, what=what):
            return f"{name(member)} lied in round {number}: {what}. Its key is about to be struck out"
        case ActEnacted(kind="strike out", subject=subject, reason=reason):
            return f"the key of {name(PeerId(subject))} is struck out: {reason}"
        case ActEnacted(by=by, kind=kind, subject=subject, reason=reason, changes=changes):
            who = name(by[0]) if len(by) == 1 else f"{len(by)} members"
            what = name(PeerId(subject)) if subject else ", ".join(f"{key} = {value}" for key, value in changes.items())
            return f"{who}: {kind} {what}{f' ({reason})' if reason else ''}"
        case StageHeld(stage=stage, num_stages=num, reason=reason):
            return f"{name(entry.peer)} takes {ordinal([stage], num)}: {reason}"
        case StageLeft(stage=stage, reason=reason):
            return f"{name(entry.peer)} leaves {ordinal([stage], 0)}: {reason}"
        case TeamFormed(stage=stage, members=(_,), size=size):
            return (
                f"{name(entry.peer)} computes {ordinal([stage], 0)} alone: too few are there for another team of {size}"
            )
        case TeamFormed(stage=stage, members=(first, *others)) if first == entry.peer:
            return f"{name(first)} computes {ordinal([stage], 0)} together with {', '.join(map(name, others))}"
        case TeamFormed(stage=stage, members=(first, *_)):
            return f"{name(entry.peer)} helps {name(first)} to compute {ordinal([stage], 0)}"
        case StageEmpty(stage=stage, restored_by=None):
            return f"nobody holds {ordinal([stage], 0)}, and nobody here has a state of it: micro-batches wait"
        case StageEmpty(stage=stage, restored_by=str() as peer, round=number):
            whose = f"{name(peer)} has its newest state, of round {number}"
            return f"nobody holds {ordinal([stage], 0)}: micro-batches wait; {whose}"
        case HeldDropped(stage=stage, num=num):
            what = f"of {num} micro-batches that came a second time"
            return f"{name(entry.peer)} had no room in {ordinal([stage], 0)} for what came {what}: it counts nowhere"
        case PayloadRejected(member=member, reason=reason):
            return f"the payload of {name(member)} was refused: {reason}"
        case ConnectionDropped(address="bulk stream", remote=remote, reason=reason) if remote is not None:
            return f"{name(entry.peer)} could not fetch from {name(remote)}: {reason}"
        case ConnectionDropped(address=address, remote=remote, reason=reason):
            whom = name(remote) if remote is not None else address
            return f"a connection{f' with {whom}' if whom else ''} was dropped: {reason}"
        case AdmissionRefused(remote=remote, reason=reason):
            return f"{short(remote)} was not admitted: {reason}"
        case MicroBatchChanged(before=before, after=after, reason=reason):
            return f"{name(entry.peer)} computes {after} samples at a time, not {before}: {reason}"
        case WarmedUp(is_compiled=True, duration_s=duration_s):
            return f"{name(entry.peer)} has compiled the model in {figures.duration(duration_s)}"
        case StateJoined(fetched_nbytes=fetched, duration_s=duration_s, donors=donors):
            whence = ", ".join(name(donor) for donor in donors) or "what it had kept"
            return f"{name(entry.peer)} has the state: {figures.nbytes(fetched)} in {duration_s:.1f} s from {whence}"
        case JoinTooSlow():
            return _too_slow(entry.event)
        case RunBlocked(by=by, needs_s=needs_s, longest_s=longest_s):
            asks = (
                f"the line of {name(by)} is slower than this run: {name(entry.peer)} announces nothing until it is in"
            )
            return (
                f"{asks}, about {figures.duration(needs_s)} by its own account, {figures.duration(longest_s)} at most"
            )
        case RunUnblocked(by=by, blocked_s=blocked_s, reason=reason):
            return f"{name(entry.peer)} waits for {name(by)} no more, after {figures.duration(blocked_s)}: {reason}"
        case DataReady(fetched_nbytes=fetched) if fetched:
            return f"{name(entry.peer)} fetched {figures.nbytes(fetched)} of data"
        case CheckpointFailed(path=path, reason=reason):
            return f"{name(entry.peer)} could not save {path}: {reason}"
    return None


def _too_slow(event: JoinTooSlow) -> str:
    received, added = figures.rate(event.received_bps), figures.rate(event.added_bps)
    needs = f"about {figures.duration(event.needs_s)} at this pace"
    what = (
        f"this machine receives {received}, and the run adds {added} of results, which it must receive too: at this "
        "pace it never catches up"
    )
    if event.is_in:
        return (
            f"this machine was in, and falls behind again: it receives {received}, and the run adds {added} of "
            "results. At this pace it is of no use to the run, and members wait for one key once a day. Ctrl-C leaves "
            "with a goodbye, and what has come is kept. A faster line would help, or a run of more inner steps a round"
        )
    if event.is_blocking:
        return f"{what}. Members are asked to wait until it is in, {needs}; Ctrl-C gives up"
    return (
        f"{what}. Ctrl-C gives up, and what has come is kept. Joining again with `weft join --blocking` asks members "
        f"to wait until it is in, {needs}; afterwards, too, it must receive {added}. A faster line would help, or a "
        "run with more inner steps a round"
    )


def in_words(choices: Choices) -> str:
    """Return the five choices, and what of the rest is not as usual."""
    said = [
        f"every {choices.every} inner steps" if choices.every > 1 else "every inner step",
        f"{choices.send} in {_named(choices.codec)}",
    ]
    if choices.reply != choices.codec:
        said.append(f"back in {_named(choices.reply)}")
    if choices.feedback is not None or choices.reply_feedback is not None:
        said.append("with feedback")
    if choices.fragments > 1:
        said.append(f"in {choices.fragments} fragments")
    if choices.overlap:
        said.append(f"overlapping {choices.overlap} steps")
    said.append("among all" if choices.among == "all" else f"among {_named(choices.among)}")
    said.append(f"{choices.merge} applied by {_named(choices.apply)}")
    if choices.wait != "all":
        said.append("waiting for whoever is ready")
    return ", ".join(said)


def _named(config: msgspec.Struct | str) -> str:
    """Return a choice by its name, with its numbers: nesterov (lr 0.7, momentum 0.9)."""
    if isinstance(config, str):
        return config
    tag = str(config.__struct_config__.tag)
    numbers = (f"{name} {getattr(config, name)}" for name in config.__struct_fields__)
    inside = ", ".join(numbers)
    return f"{tag} ({inside})" if inside else tag


def described(event: Event, name: Callable[[PeerId], str]) -> str:
    """Return what happened in routine, in words."""
    return prefixed(event, _words(event, name))


def _words(event: Event, name: Callable[[PeerId], str]) -> str:
    match event:
        case RoundCommitted():
            counted = f"{len(event.contributors) + event.num_through} counted"
            left = f", without {', '.join(map(name, event.left_out))}" if event.left_out else ""
            took_s = event.work_s + event.duration_s
            return f"round {event.round}: {counted}{left}, {event.tokens:,} tokens in {took_s:.1f} s"
        case PeerStarted():
            return f"{event.name} starts on {event.device}, {event.software}"
        case PeerStopped():
            return f"stops: {event.reason}"
        case Evaluated():
            return f"held-out loss {event.loss:.4f} after round {event.round}, {event.nats_per_byte:.4f} nats per byte"
        case Sampled():
            return f"a sample of what the model writes after round {event.round}"
        case AttemptStarted():
            return f"{name(event.leader)} leads round {event.round}, attempt {event.attempt}: {event.reason}"
        case LinkUp():
            return f"a link to {name(event.remote)} over {event.transport}"
        case LinkDown():
            return f"no link to {name(event.remote)}: {event.reason}"
        case PayloadOffered():
            return f"offers {event.tokens:,} tokens to round {event.round}, in {figures.nbytes(event.nbytes)}"
        case CountedThrough():
            return f"{event.tokens:,} tokens of it are counted in round {event.round}, through its sponsor"
        case CheckpointSaved():
            return f"saves round {event.round}, {figures.nbytes(event.nbytes)}"
        case TransportUp():
            return f"can be reached over {event.transport}"
        case WarmedUp():
            return f"ready to train after {event.duration_s:.1f} s, {event.micro_batch} samples at a time"
        case DataReady():
            return f"has the data: {event.train_tokens:,} tokens to train on, {event.heldout_tokens:,} held out"
        case StagesSeen():
            sizes = ", ".join(str(len(members)) for members in event.members)
            rates = ", ".join(figures.amount(rate) for rate in event.rates)
            waiting = ", ".join(map(str, event.waiting))
            return f"peers by stage: {sizes}; {rates} samples/s; {waiting} micro-batches wait"
        case MicroBatchFailed():
            whose = f"a micro-batch that {name(event.member)} sent"
            return f"{whose} is given up in {ordinal([event.stage], 0)}, and goes to another member: {event.reason}"
    fields = (f"{key} {getattr(event, key)}" for key in event.__struct_fields__ if key != "stage")
    return ", ".join(fields)[:200]


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
