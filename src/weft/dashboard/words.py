"""What a person is told of each kind of event: how much it concerns them, in which words, and what to do about it.

One table (`_ROWS`) has a row for each kind: its severity, the sentence of what a person wants to hear of, plain words
for a list of all that happened, and advice where something can be done. A text names fields of its event in braces,
and after a colon how they are written (`_Writer`); `me` is the peer whose event it is. Where there are several cases
a function chooses the text. `in_words` tells the choices of a run's method in one line.
"""

from collections.abc import Callable
from dataclasses import dataclass
from string import Formatter
from typing import Any

import msgspec

from weft import events
from weft.dashboard import deeds, figures, findings
from weft.dashboard.stages import ordinal, prefixed, stage_of
from weft.events import Entry, Event
from weft.ids import PeerId, several, short
from weft.sync.method.choices import Choices
from weft.wire import printable

Name = Callable[[PeerId], str]  # what a peer is called
Advice = tuple[PeerId | None, str, str]  # about whom, what is wrong, what to do
Remedy = tuple[str | None, str, str]  # the same as texts; about whom: the name of a field, or me

SEVERITIES = ("routine", "note", "warning", "error")  # of no concern, good to know, look at it, something is broken
ROUTINE, NOTE, WARNING, ERROR = range(len(SEVERITIES))

SLEPT_S = 5.0  # a shorter stall concerns nobody but who reads the log
LONG_STALL_S = 30.0
MAX_NAMED = 4  # in a sentence; of more it says how many they are
MANY_ATTEMPTS = 3
_SUBJECT = "\0"  # stands for the key or run that an act is about


@dataclass(frozen=True)
class _Row:
    severity: int
    news: str | Callable[[Any, PeerId], str | None] | None = None  # by the event, and whose it is
    plain: str | Callable[[Any], str] | None = None
    advice: Remedy | Callable[[Any], Remedy | None] | None = None


class _Writer(Formatter):
    """Fills in a text about an event, with names for keys and figures as people read them."""

    def __init__(self, event: Event, own: PeerId | None, name: Name) -> None:
        self._event, self._own = event, own
        self._specs: dict[str, Callable[[Any], str]] = {
            "peer": name,
            "peers": lambda peers: ", ".join(map(name, peers)),
            "others": lambda peers: ", ".join(map(name, peers[1:])),
            "key": short,
            "stage": lambda stage: ordinal([stage], 0),
            "time": figures.duration,
            "bytes": figures.nbytes,
            "rate": figures.rate,
            "samples": lambda num: several(num, "sample"),
            "training steps": lambda num: several(num, "training step"),
            "micro-batches": lambda num: several(num, "micro-batch"),
            "silent": lambda reason: reason.removeprefix("silent "),  # behind that word
        }

    def get_value(self, key: int | str, *_: Any) -> Any:
        return self._own if key == "me" else getattr(self._event, str(key))

    def format_field(self, value: Any, spec: str) -> str:
        write = self._specs.get(spec)
        return format(value, spec) if write is None else write(value)


def notable(entry: Entry, name: Name) -> str | None:
    """Return what a person wants to hear of an entry, as one sentence; None: it is routine.

    Others' names and words are in it, so it is made safe to print.
    """
    news = _row(entry.event).news
    text = news(entry.event, entry.peer) if callable(news) else news
    if text is None:
        return None
    return printable(prefixed(entry.event, _Writer(entry.event, entry.peer, name).format(text)))


def described(event: Event, name: Name) -> str:
    """Return what happened, in words, of an event that `notable` has no sentence for."""
    plain = _row(event).plain
    text = plain(event) if callable(plain) else plain
    if text is None:
        fields = (f"{key} {getattr(event, key)}" for key in event.__struct_fields__ if key != "stage")
        return prefixed(event, ", ".join(fields)[:200])
    return prefixed(event, _Writer(event, None, name).format(text))


def severity_of(event: Event) -> int:
    is_good = isinstance(event, events.MemberStrays) and event.is_back
    if isinstance(event, events.LoopStalled) and event.stall_s < SLEPT_S:
        return ROUTINE
    if isinstance(event, events.ConnectionDropped) and _is_hung_up(event):
        return ROUTINE
    return NOTE if is_good else _row(event).severity


def advice_of(entry: Entry, name: Name) -> Advice | None:
    """Return what is wrong by an entry, in plain words, and what to do about it; None: nothing that a person can."""
    advice = _row(entry.event).advice
    found = advice(entry.event) if callable(advice) else advice
    if found is None:
        return None
    writer, (about, what, remedy) = _Writer(entry.event, entry.peer, name), found
    return None if about is None else writer.get_value(about), writer.format(what), writer.format(remedy)


def _row(event: Event) -> _Row:
    return _ROWS.get(type(event), _OTHER)


# --- where there are several cases ---


def _stalled_advice(e: events.LoopStalled) -> Remedy | None:
    if e.stall_s < LONG_STALL_S:
        return None
    return (
        "me",
        "{me:peer} stood still for {stall_s:.0f} s.",
        "Its machine slept or is overloaded. Keep it awake, or give weft fewer cores: weft join --cores.",
    )


def _committed(e: events.RoundCommitted) -> str:
    left = ", without {left_out:peers}" if e.left_out else ""
    took_s = e.work_s + e.duration_s
    return (
        f"round {{round}}: {len(e.contributors) + e.num_through} counted{left}, {{tokens:,}} tokens in {took_s:.1f} s"
    )


def _attempts_advice(e: events.AttemptStarted) -> Remedy | None:
    if e.attempt < MANY_ATTEMPTS:
        return None
    return (
        None,
        f"Round {{round}} is at try {e.attempt + 1}: {{reason}}.",
        "The peers that lead it cannot be reached or are too slow. Check their links.",
    )


def _majority_lost(e: events.MajorityLost, _own: PeerId) -> str:
    then = "waits for the others" if e.opens_branch_in_s is None else f"{_alone(e)} in {{opens_branch_in_s:.0f}} s"
    return f"{{me:peer}} reaches {_reached(e)} and {then}: {{reason}}"


def _reached(e: events.MajorityLost) -> str:
    if e.alive <= 1:
        return f"none of the {e.electorate - 1} other members" if e.electorate > 2 else "no other member"
    return "{alive} of {electorate} members, itself included,"


def _alone(e: events.MajorityLost) -> str:
    return "goes on alone" if e.alive <= 1 else "goes on with these alone"


def _majority_advice(e: events.MajorityLost) -> Remedy:
    alone = f"it {_alone(e)} in {{opens_branch_in_s:.0f}} s"
    then = "no round can end until more are back" if e.opens_branch_in_s is None else alone
    return (
        "me",
        f"{{me:peer}} reaches {_reached(e).rstrip(',')}: {then}.",
        "Check that the others' machines run and that the network between them is up. No work is lost.",
    )


def _branch_left(e: events.BranchLeft, _own: PeerId) -> str:
    what = "{tokens:,} tokens that were counted apart from them"
    if e.kept == e.tokens:
        return f"{{me:peer}} goes on with what the others have trained and brings {what}"
    kept = ", except {kept:,} that it brings" if e.kept else ""
    return f"{{me:peer}} goes on with what the others have trained and loses {what}{kept}: {{reason}}"


def _legacy_counted(e: events.LegacyCounted, _own: PeerId) -> str:
    less = "" if e.weight == e.tokens else "; in the update they weigh as {weight:,}, no more than a member's own work"
    return f"{{by:peer}} brought {{tokens:,}} tokens that were counted apart from the others{less}"


def _branch_opened(e: events.BranchOpened, _own: PeerId) -> str:
    if len(e.members) == 1:
        return "{members:peers} goes on alone: {reason}"
    who = "{members:peers}" if len(e.members) <= MAX_NAMED else f"{len(e.members)} peers"
    return f"{who} go on {'together' if e.is_everybody is True else 'by themselves'}: {{reason}}"


def _sponsored(e: events.Sponsored, _own: PeerId) -> str:
    if e.has_room is True:
        return "no round has counted {me:peer} in yet: until one does, {sponsor:peer} hands its updates on"
    return (
        "{sponsor:peer} hands the updates of {me:peer} on from now: as many peers decide on rounds as this run allows, "
        "and all others train through one of them"
    )


def _suspected(e: events.MemberSuspected, _own: PeerId) -> str:
    return f"{{member:peer}} is silent ({'{reason:silent}' if e.reason else 'for {silent_s:.0f} s'})"


def _act_enacted(e: events.ActEnacted, _own: PeerId) -> str:
    if e.kind == "strike out":
        return "members banned the key of {subject:peer}, which lied: {reason}"
    who = "{by[0]:peer}" if len(e.by) == 1 else f"{len(e.by)} members"
    what = deeds.done(e.kind, _SUBJECT if e.subject else "", e.changes, by_one=len(e.by) == 1)
    return f"{who}{_about(what, e.kind)}{' ({reason})' if e.reason else ''}"


def _act_waits(e: events.ActWaits, _own: PeerId) -> str:
    what = deeds.wanted(e.kind, _SUBJECT if e.subject else "")
    return f"{{by:peer}} asks to {_about(what, e.kind)}: that waits for a round"


def _act_refused(e: events.ActRefused, _own: PeerId) -> str:
    what = deeds.wanted(e.kind, _SUBJECT if e.subject else "")
    return f"{{by:peer}} asks to {_about(what, e.kind)}, which has no effect: {{reason}}"


def _about(text: str, kind: str) -> str:
    """Return a text whose braces, which others may have written, are no fields, and whose subject is one."""
    subject = "{subject:key}" if kind == "succeed" else "{subject:peer}"
    return text.replace("{", "{{").replace("}", "}}").replace(_SUBJECT, subject)


def _dropped(e: events.ConnectionDropped, _own: PeerId) -> str | None:
    if _is_hung_up(e):
        return None
    if e.remote is None:
        return f"a connection{' with {address}' if e.address else ''} was dropped: {{reason}}"
    if e.address == "bulk stream":
        return "{me:peer} could not fetch from {remote:peer}: {reason}"
    return "a connection with {remote:peer} was dropped: {reason}"


def _is_hung_up(e: events.ConnectionDropped) -> bool:
    """Whether somebody looked whether this machine answers, or gave up: that is no news."""
    return e.remote is None and e.reason.startswith(events.HUNG_UP)


def _team_formed(e: events.TeamFormed, own: PeerId) -> str | None:
    match e.members:
        case ():
            return None
        case (_,):
            return "{me:peer} computes {stage:stage} alone: there are too few peers for another team of {size}"
        case (first, *_) if first == own:
            return "{me:peer} computes {stage:stage} together with {members:others}"
    return "{me:peer} helps {members[0]:peer} to compute {stage:stage}"


def _stages_seen(e: events.StagesSeen) -> str:
    sizes = ", ".join(str(len(members)) for members in e.members)
    rates = ", ".join(figures.amount(rate) for rate in e.rates)
    return f"peers by stage: {sizes}; {rates} samples/s; {', '.join(map(str, e.waiting))} micro-batches wait"


def _stage_empty(e: events.StageEmpty, _own: PeerId) -> str:
    if e.restored_by is None:
        return "no peer holds {stage:stage}, and none here has its state: training waits"
    return "no peer holds {stage:stage}: training waits; {restored_by:peer} has its newest state, of round {round}"


def _stage_empty_advice(e: events.StageEmpty) -> Remedy:
    if e.restored_by is None:
        return (
            None,
            "No peer holds {stage:stage}, and none here has its state.",
            "Restart a peer that held it, with the same command, within seconds. Otherwise its layers start over.",
        )
    return (
        "restored_by",
        "No peer holds {stage:stage}: training waits.",
        "{restored_by:peer} takes it over by itself, with the state of round {round}. With more peers this happens "
        "less often.",
    )


def _too_slow(e: events.JoinTooSlow, _own: PeerId) -> str:
    if e.is_in:
        return (
            "this machine had caught up, and falls behind again: it receives {received_bps:rate}, and the run adds "
            "{added_bps:rate} of results. At this pace it does not help the run, and members wait for one key only "
            "once a day. Ctrl-C leaves with a goodbye and keeps what it has fetched. A faster line would help, or a "
            "run with more training steps a round"
        )
    what = (
        "this machine receives {received_bps:rate}, and the run adds {added_bps:rate} of results, which it must "
        "receive too: at this pace it never catches up"
    )
    if e.is_blocking:
        return (
            f"{what}. Members are asked to wait until it has caught up, about {{needs_s:time}} at this pace; "
            "Ctrl-C gives up"
        )
    return (
        f"{what}. Ctrl-C gives up and keeps what it has fetched. `weft join --blocking` asks members to wait until "
        "it has caught up, about {needs_s:time} at this pace; after that it must still receive {added_bps:rate}. "
        "A faster line would help, or a run with more training steps a round"
    )


# --- the table, in the order of events.py ---


def _in_stage(event: Event) -> str:
    return "" if stage_of(event) is None else " in {stage:stage}"


def _text_changed(event: events.TextChanged) -> str:
    if event.round == event.before:
        return "the rest of an answer may differ from what exact numbers give: a stage has nobody left who computes so"
    return (
        f"an answer goes on with the weights of round {event.round}: nobody has those of round {event.before} any more"
    )


_OTHER = _Row(NOTE)
_ROWS: dict[type[Event], _Row] = {
    events.PeerStarted: _Row(NOTE, plain="{name} starts on {device}, {software}"),
    events.PeerStopped: _Row(NOTE, plain="ended: {reason}"),
    events.Paused: _Row(NOTE, "{me:peer} is paused: {reason}"),
    events.Resumed: _Row(NOTE, "{me:peer} trains again after {paused_s:time}"),
    events.Notice: _Row(NOTE, "{text}"),
    events.Working: _Row(ROUTINE),
    events.FellBack: _Row(WARNING, "{me:peer} uses {used} instead of {wanted}: {reason}"),
    events.TransportUp: _Row(ROUTINE, plain="can be reached over {transport}"),
    events.LinkUp: _Row(ROUTINE, plain="connected to {remote:peer} over {transport}"),
    events.LinkDown: _Row(ROUTINE, plain="no longer connected to {remote:peer}: {reason}"),
    events.ConnectionDropped: _Row(WARNING, _dropped, "somebody at {address} did not say who it is: {reason}"),
    events.AdmissionRefused: _Row(WARNING, "{remote:key} was not admitted: {reason}"),
    events.MemberJoined: _Row(NOTE, lambda e, _: "{name} joined" if e.name else "{member:key} joined"),
    events.MemberSuspected: _Row(WARNING, _suspected),
    events.MemberRecovered: _Row(NOTE, "{member:peer} is back"),
    events.MemberGone: _Row(
        WARNING,
        "{member:peer} is gone",
        advice=(
            "member",
            "{member:peer} has been silent for {silent_s:.0f} s and is gone.",
            "The run goes on without it. Start it again with the same command: it goes on where it was.",
        ),
    ),
    events.MemberLeft: _Row(NOTE, "{member:peer} left with a goodbye"),
    events.MemberProgress: _Row(ROUTINE),
    events.MemberStrays: _Row(WARNING, findings.strays, advice=findings.strays_advice),
    events.LoopStalled: _Row(
        WARNING,
        lambda e, _: "{me:peer} stood still for {stall_s:.0f} s" if e.stall_s >= SLEPT_S else None,
        "stood still for {stall_s:.1f} s",
        advice=_stalled_advice,
    ),
    events.StepDone: _Row(ROUTINE),
    events.WarmedUp: _Row(
        NOTE,
        lambda e, _: "{me:peer} has compiled the model in {duration_s:time}" if e.is_compiled else None,
        "ready to train after {duration_s:.1f} s, {micro_batch:samples} at a time",
    ),
    events.MicroBatchChanged: _Row(NOTE, "{me:peer} computes {after:samples} at a time, not {before}: {reason}"),
    events.Evaluated: _Row(
        NOTE,
        plain=lambda e: (
            f"held-out loss {'after round {round}' if e.round else 'before the first round'}: {figures.heldout_of(e)}"
        ),
    ),
    events.Rewarded: _Row(
        ROUTINE,
        plain="{num_answers} answers to {num_tasks} tasks were worth {reward:.3f}, and {num_teaching} of these teach",
    ),
    events.AnswersForged: _Row(
        WARNING,
        "the answers of {member:peer} are not taken any more: {reason}",
        advice=(
            "member",
            "{member:peer} told answers that it did not draw: {reason}.",
            "This machine draws them itself. Whoever may change the run can ban a peer that does so: weft act ban.",
        ),
    ),
    events.NotLearning: _Row(
        ERROR,
        findings.not_learning,
        advice=(
            None,
            "Rounds go on, but the loss is no lower than at the start of the run.",
            "Lower a learning rate, in train or method. Whoever may change the run can do so while it runs: weft act "
            "amend.",
        ),
    ),
    events.Diverged: _Row(
        ERROR,
        "after {committed_tokens:,} tokens the held-out loss is {loss:.4g} nats, far above the {nothing:.2f} "
        "of a model that knows nothing: learning rates are too high, and training makes it worse",
        advice=(
            None,
            "The held-out loss is far above that of a model that knows nothing.",
            "Stop the run, lower the learning rates, in train or method, and begin it anew: it seldom recovers.",
        ),
    ),
    events.Sampled: _Row(ROUTINE, plain="a sample of what the model writes after round {round}"),
    events.AttemptStarted: _Row(
        ROUTINE,
        plain=lambda e: f"{{leader:peer}} leads round {{round}}, try {e.attempt + 1}: {{reason}}",
        advice=_attempts_advice,
    ),
    events.PayloadOffered: _Row(ROUTINE, plain="offers {tokens:,} tokens to round {round}, in {nbytes:bytes}"),
    events.RoundCommitted: _Row(ROUTINE, plain=_committed),
    events.RoundProven: _Row(ROUTINE),
    events.RoundMissed: _Row(WARNING, "{me:peer} missed round {round} and keeps its work for the next: {reason}"),
    events.MethodTuned: _Row(NOTE, "from round {round} on, rounds have {every:training steps}, in {codec}: {reason}"),
    events.GraphChosen: _Row(
        NOTE, "peers exchange with neighbours: {graph} of {num_members}, spectral gap {spectral_gap:.4f}"
    ),
    events.WorkDropped: _Row(NOTE, "{tokens:,} tokens that {me:peer} trained last do not count: {reason}"),
    events.Sponsored: _Row(NOTE, _sponsored),
    events.CountedThrough: _Row(
        ROUTINE, plain="{tokens:,} tokens of it are counted in round {round}, which another peer handed on"
    ),
    events.MajorityLost: _Row(ERROR, _majority_lost, advice=_majority_advice),
    events.TrainsOn: _Row(
        NOTE, "{me:peer} keeps training meanwhile, for at most {steps:training steps}; later rounds count them"
    ),
    events.BranchOpened: _Row(WARNING, _branch_opened),
    events.BranchLeft: _Row(NOTE, _branch_left),
    events.LegacyCounted: _Row(NOTE, _legacy_counted),
    events.LegacyDropped: _Row(WARNING, "{tokens:,} tokens that were counted apart do not count: {reason}"),
    events.ActWaits: _Row(NOTE, _act_waits),
    events.LieProven: _Row(
        ERROR,
        "{member:peer} lied in round {round}: {what}. Members ban its key",
        advice=(
            "member",
            "{member:peer} signed what cannot be so: {what}.",
            "Members ban its key by themselves. If it is yours, two peers run with it, it was stolen, or the machine "
            "computes wrongly: have it checked.",
        ),
    ),
    events.WorkAudited: _Row(
        ROUTINE, plain="has done {num_steps:training steps} of {member:peer} again: they are what it says"
    ),
    events.MergeAudited: _Row(
        ROUTINE, plain="has merged part {part} of round {round} again: it is what {member:peer} has found"
    ),
    events.MergeDoubted: _Row(
        WARNING,
        findings.merge_doubted,
        advice=(
            "member",
            "What {member:peer} has merged comes to something else, or nobody shows what was brought to it.",
            "If most members find the same, they strike it out, or remove it with the third round. If it is yours: a "
            "broken memory or processor gives other numbers, a slow line or a machine that was asleep no answer.",
        ),
    ),
    events.WorkTakenOut: _Row(
        NOTE, "what round {counted_in} had counted of false work of {member:peer} is taken out of the model again"
    ),
    events.WorkStays: _Row(
        WARNING, "what round {counted_in} has counted of false work of {member:peer} stays in the model: {why}"
    ),
    events.WorkDoubted: _Row(
        WARNING,
        findings.work_doubted,
        advice=(
            "member",
            "Training steps of {member:peer} could not be done again.",
            "If most members find the same, they strike it out, or remove it with the third round. If it is yours: a "
            "slow line or a machine that was asleep gives no answer; a broken memory or processor gives other numbers.",
        ),
    ),
    events.AuditorDoubted: _Row(
        WARNING,
        "{member:peer} has audited training steps, and {why}",
        advice=(
            "member",
            "What {member:peer} says of an audit is not what it had sealed before, or it did not say it.",
            "Three times, and it is believed no more. If it is yours: it was away, or was started again with other "
            "threads.",
        ),
    ),
    events.RoundsUnlike: _Row(
        WARNING,
        findings.rounds_unlike,
        advice=(
            "me",
            "{me:peer} does not come as near to others' training steps as most machines do.",
            "As long as it is less than what is held for honest, nothing has to be done. Beyond it, members find the "
            "work of this machine false and strike its key out: train on such a device and with such a version of "
            'torch as the others have, or begin a run with numerics = "exact".',
        ),
    ),
    events.ActRefused: _Row(WARNING, _act_refused),
    events.ActEnacted: _Row(NOTE, _act_enacted),
    events.PayloadRejected: _Row(
        WARNING,
        "the update of {member:peer} was refused: {reason}",
        advice=(
            "member",
            "What {member:peer} sent was refused: {reason}.",
            "Its owner should look at its log. Another version of weft, or faulty memory, causes this.",
        ),
    ),
    events.StageHeld: _Row(NOTE, lambda e, _: f"{{me:peer}} takes {ordinal([e.stage], e.num_stages)}: {{reason}}"),
    events.StageLeft: _Row(NOTE, "{me:peer} leaves {stage:stage}: {reason}"),
    events.TeamFormed: _Row(NOTE, _team_formed),
    events.StagesSeen: _Row(ROUTINE, plain=_stages_seen),
    events.StageEmpty: _Row(WARNING, _stage_empty, advice=_stage_empty_advice),
    events.MicroBatchFailed: _Row(
        NOTE, plain="{stage:stage} gave up a micro-batch that {member:peer} sent, and another member gets it: {reason}"
    ),
    events.PassageAudited: _Row(
        ROUTINE, plain="has computed a micro-batch of {member:peer} again, in {stage:stage}: it is what it says"
    ),
    events.PassageDoubted: _Row(
        WARNING,
        "a micro-batch of {member:peer} in {stage:stage}, in round {round}: {why}",
        advice=(
            "member",
            "What {member:peer} has computed of a micro-batch comes to something else here.",
            "If most members of that stage find the same, they strike it out. If it is yours: a broken memory or "
            "processor gives other numbers.",
        ),
    ),
    events.PassageRefused: _Row(
        WARNING,
        "what {member:peer} sent back from {stage:stage} was not accepted, and another gets the micro-batch: {reason}",
        advice=(
            "member",
            "What {member:peer} sends back is not what it was sent, by its own signature: {reason}.",
            "Its owner should look at its log. Another version of weft, or a changed one, causes this.",
        ),
    ),
    events.AccuserDoubted: _Row(
        WARNING,
        "{accuser:peer} accuses {member:peer} in {stage:stage} of what comes to the same here",
        advice=(
            "accuser",
            "What {accuser:peer} says of others in {stage:stage} is not so.",
            "Three times, and it is believed no more. If it is yours: a broken memory gives other numbers.",
        ),
    ),
    events.HeldDropped: _Row(
        WARNING,
        "{me:peer} had no room in {stage:stage} for the results of {num:micro-batches} that came a second time: they "
        "count nowhere",
    ),
    events.TextMoved: _Row(
        NOTE, lambda e, _: f"an answer goes on with {{member:peer}} in place of {{before:peer}}{_in_stage(e)}"
    ),
    events.TextChanged: _Row(NOTE, lambda e, _: _text_changed(e)),
    events.ReceiptsDiffer: _Row(
        WARNING,
        "{before:peer} and {member:peer} have signed different things of what went from one to the other, in "
        "{stage:stage}",
    ),
    events.ReceiptFailed: _Row(
        NOTE, lambda e, _: f"no good receipt of {{member:peer}}{_in_stage(e)} for an answer: {{reason}}"
    ),
    events.StateJoined: _Row(
        NOTE,
        lambda e, _: (
            "{me:peer} has the state: {fetched_nbytes:bytes} in {duration_s:.1f} s from "
            + ("{donors:peers}" if e.donors else "what it had kept")
        ),
    ),
    events.StateContradicted: _Row(
        WARNING,
        lambda e, _: (
            "the state that {me:peer} has is not the one that most members signed in round {round}: "
            + ("it came from {donors:peers}" if e.donors else "this machine has computed it")
            + ". It fetches the state anew"
        ),
        advice=lambda e: (
            "me",
            "{me:peer} had another state than the run's.",
            "It was given a false one, and has fetched another. Ask the members who gave it."
            if e.donors
            else "Its machine may compute wrongly: test its memory, and leave overclocking out.",
        ),
    ),
    events.StatesDiffer: _Row(
        WARNING,
        "{members:peers} and {me:peer} had different states before round {round}, and no majority says which is right",
        advice=lambda _e: (
            "me",
            "Members of this run have different states.",
            "The memory of a machine may fail, or one of them lies. Compare digests (weft status), and let who differs "
            "join anew from an empty home.",
        ),
    ),
    events.JoinTooSlow: _Row(
        WARNING,
        _too_slow,
        advice=lambda e: (
            "me",
            f"The line of {{me:peer}} is slower than the run: it {'falls behind' if e.is_in else 'cannot catch up'}.",
            "A run with more training steps a round needs less; or join with --blocking, so that others wait once.",
        ),
    ),
    events.RunBlocked: _Row(
        NOTE,
        "the line of {by:peer} is slower than this run: {me:peer} waits until it has caught up, about {needs_s:time} "
        "as it estimates, {longest_s:time} at most",
    ),
    events.RunUnblocked: _Row(NOTE, "{me:peer} no longer waits for {by:peer}, after {blocked_s:time}: {reason}"),
    events.DataReady: _Row(
        NOTE,
        lambda e, _: "{me:peer} fetched {fetched_nbytes:bytes} of data" if e.fetched_nbytes else None,
        "has the data: {train_tokens:,} tokens to train on, {heldout_tokens:,} held out",
    ),
    events.CheckpointSaved: _Row(ROUTINE, plain="saves round {round}, {nbytes:bytes}"),
    events.CheckpointFailed: _Row(
        ERROR,
        "{me:peer} could not save {path}: {reason}",
        advice=(
            "me",
            "{me:peer} cannot save its state: {reason}.",
            "Make room on its disk. It keeps training, and saves when it can.",
        ),
    ),
}


# --- the choices of a run's method ---


def in_words(choices: Choices) -> str:
    """Return the five choices, and what of the rest is not as usual."""
    said = [
        f"every {choices.every} training steps" if choices.every > 1 else "every training step",
        f"{choices.send} in {_named(choices.codec)}",
    ]
    if choices.reply != choices.codec:
        said.append(f"back in {_named(choices.reply)}")
    if choices.feedback is not None or choices.reply_feedback is not None:
        said.append("with feedback")
    if choices.fragments > 1:
        said.append(f"in {choices.fragments} fragments")
    if choices.overlap:
        said.append(f"overlapping {several(choices.overlap, 'step')}")
    said.append("among all" if choices.among == "all" else f"among {_named(choices.among)}")
    said.append(f"{_named(choices.merge)} applied by {_named(choices.apply)}")
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
