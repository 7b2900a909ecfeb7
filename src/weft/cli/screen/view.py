"""What the live view knows, as a pure fold over events: `view = update(view, entry)`.

Entries may come from one peer (train, join) or from several at once (demo); what a peer says of itself is believed
before what others say of it. Of a run with stages, rounds, tokens and losses are those of the first stage that is
heard, and peers those of all (`dashboard.stages`). Loss is the mean over inner steps since the last commit; bytes are
those of the peers that are heard, held against what a ring all-reduce of bf16 gradients would have moved for the same
steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from weft.dashboard import figures
from weft.dashboard.figures import AWAY, ring_nbytes, smoothed_speed, staged_ring_nbytes
from weft.dashboard.stages import Lead, Stages, holding, led, stage_of, state_at_commit, told
from weft.dashboard.words import notable
from weft.events import (
    ActEnacted,
    CheckpointSaved,
    CountedThrough,
    DataReady,
    Entry,
    Evaluated,
    LinkDown,
    LinkUp,
    MajorityLost,
    MemberGone,
    MemberJoined,
    MemberLeft,
    MemberProgress,
    MemberRecovered,
    MemberSuspected,
    Paused,
    PeerStarted,
    PeerStopped,
    Resumed,
    RoundCommitted,
    RoundMissed,
    Sampled,
    StagesSeen,
    StepDone,
    Working,
)
from weft.ids import PeerId, short
from weft.wire import printable

MAX_NOTABLE = 6  # as many lines as one takes in at a glance
_SAME_NEWS_S = 20.0  # what several peers say in the same words within so long is one piece of news
_MAX_POINTS = 4096  # of the curve; then every second one is dropped
_RECENT_COMMITS = 16  # what the time left is judged by


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the view needs to know of the run."""

    run: str
    total_tokens: int
    tokens_per_step: int  # of one peer
    wait_for: int = 1  # peers with which it begins, this one included
    num_parameters: int | None = None  # of the whole model
    layers: tuple[str, ...] = ()  # of each stage, in words; empty: the run has no stages


@dataclass(frozen=True, kw_only=True)
class Line:
    """One peer as it is shown."""

    name: str = ""
    tokens_per_s: float = 0.0
    round: int | None = None
    loss: float | None = None
    link: str = ""
    state: str = ""
    work: str = ""  # how far that has come which takes long, in short
    committed_tokens: int = 0
    counted_through: int | None = None  # the newest round that counted it with its sponsor
    is_heard: bool = False  # it speaks for itself


@dataclass(frozen=True)
class Told:
    """Something a person should know, who said so first, and when."""

    by: PeerId
    at: float  # wall seconds
    text: str


@dataclass(frozen=True, kw_only=True)
class View:
    facts: Facts | None = None
    began: float | None = None  # wall seconds of the first and the newest entry
    now: float = 0.0
    num_parameters: int = 0
    lines: Mapping[PeerId, Line] = field(default_factory=dict)
    round: int | None = None
    committed_tokens: int = 0
    commits: tuple[tuple[float, int], ...] = ()  # the newest: when, committed tokens
    losses: tuple[tuple[int, float], ...] = ()  # committed tokens, nats per token
    loss_sum: float = 0.0  # of the inner steps since the last point
    num_losses: int = 0
    evaluations: tuple[tuple[int, float], ...] = ()  # committed tokens, nats per byte
    evaluated: Evaluated | None = None  # the newest
    sample: str | None = None
    sent_nbytes: int = 0
    received_nbytes: int = 0
    ring_nbytes: int = 0  # sent and received, had the same steps been made by ring DDP
    checkpoint: str | None = None
    notables: tuple[Told, ...] = ()
    stages: Stages = field(default_factory=Stages)
    lead: Lead = field(default_factory=Lead)

    def name(self, peer: PeerId) -> str:
        line = self.lines.get(peer)
        return line.name if line is not None and line.name else short(peer)

    @property
    def is_complete(self) -> bool:
        return self.facts is not None and self.committed_tokens >= self.facts.total_tokens

    @property
    def cut(self) -> Stages:
        """Return the stages, with what is known of the model."""
        layers = () if self.facts is None else self.facts.layers
        return replace(self.stages, layers=layers, num=max(self.stages.num, len(layers)))

    @property
    def held(self) -> str:
        """Return which stage the peer holds whose view this is; empty: none, or there are several peers."""
        heard = [peer for peer, line in self.lines.items() if line.is_heard]
        return holding(self.cut, heard[0]) if len(heard) == 1 and heard[0] in self.stages.held else ""

    @property
    def num_awaited(self) -> int:
        """How many peers must still come before the run begins; 0 once it has begun."""
        if self.facts is None or self.round is not None or self.losses or self.num_losses:
            return 0
        num_here = sum(bool(line.name) and line.state not in AWAY for line in self.lines.values())
        return max(0, self.facts.wait_for - max(1, num_here))

    @property
    def time_left_s(self) -> float | None:
        """Seconds until the run's tokens are committed, at the pace of the last commits; None while unknown."""
        if self.facts is None or len(self.commits) < 2:
            return None
        (first_at, first), (last_at, last) = self.commits[0], self.commits[-1]
        if last <= first or last_at <= first_at:
            return None
        left = (self.facts.total_tokens - last) * (last_at - first_at) / (last - first)
        return max(0.0, left - max(0.0, self.now - last_at))


def update(view: View, entry: Entry) -> View:
    """Return the view after one more entry."""
    view = replace(view, began=entry.at if view.began is None else view.began, now=max(view.now, entry.at))
    news = news_of(view, entry)
    view = replace(view, stages=told(view.stages, entry))
    view = _fold(view, entry)
    if news is not None:
        view = replace(view, notables=(*view.notables, news)[-MAX_NOTABLE:])
    return view


def news_of(view: View, entry: Entry) -> Told | None:
    """Return what an entry tells that nobody else has just told; None where it is routine or known."""
    text = notable(entry, view.name)
    if text is None:
        return None
    known = (each for each in view.notables if each.text == text and each.by != entry.peer)
    return None if any(entry.at - each.at < _SAME_NEWS_S for each in known) else Told(entry.peer, entry.at, text)


def _fold(view: View, entry: Entry) -> View:
    own, event = entry.peer, entry.event
    match event:
        case PeerStarted():
            said = tuple(_with_name(news, own, event.name) for news in view.notables)
            view = replace(view, num_parameters=event.num_parameters, notables=said)
            return _line(view, own, name=event.name, state="starting", work="", is_heard=True)
        case DataReady():
            return _line(view, own, state="data ready", is_heard=True)
        case StagesSeen() if view.stages.seen_at == entry.at:  # else it is older than what is known
            return _seen(view, own, event)
        case StepDone():
            return _step(view, own, event)
        case CountedThrough():  # comes before its round's commit
            return _line(view, own, counted_through=event.round, is_heard=True)
        case RoundCommitted():
            return _commit(view, entry.at, own, event)
        case Paused():
            return _line(view, own, state="paused", tokens_per_s=0.0, is_heard=True)
        case Resumed():
            return _line(view, own, state="training", is_heard=True)
        case RoundMissed():
            return _line(view, own, state="missed a round", is_heard=True)
        case MajorityLost():
            return _line(view, own, state=f"{event.alive} of {event.electorate} left", is_heard=True)
        case Evaluated():
            view = replace(view, evaluated=event)
            point = (int(event.committed_tokens), event.nats_per_byte)
            return view if point in view.evaluations else replace(view, evaluations=(*view.evaluations, point))
        case Sampled():
            return replace(view, sample=printable(event.prompt + event.text, keep="\n\t"))
        case ActEnacted(changes={"tokens": tokens}) if view.facts is not None:
            return replace(view, facts=replace(view.facts, total_tokens=int(tokens)))
        case CheckpointSaved():
            return replace(view, checkpoint=event.path)
        case PeerStopped() if view.stages.held.get(own, frozenset()) - {stage_of(event)}:
            return view  # it holds other stages still
        case PeerStopped():
            state = "finished" if event.reason == "complete" else "stopped"
            return _line(view, own, state=state, tokens_per_s=0.0, is_heard=True)
        case LinkUp():
            before = view.lines.get(event.remote, Line())
            return _line(view, event.remote, link=event.transport, state=before.state or "joining")
        case LinkDown():
            known = view.lines.get(event.remote, Line())
            if known.state == "joining" and not known.name:  # it only visits
                return replace(view, lines={peer: line for peer, line in view.lines.items() if peer != event.remote})
            return _line(view, event.remote, link="down")
        case Working():
            return _line(view, own, work="" if event.is_over else figures.work_in_short(event), is_heard=True)
        case MemberProgress():
            return _progress(view, event)
        case MemberJoined():
            return _unless_heard(view, event.member, name=event.name, state="joined")
        case MemberRecovered():
            return _unless_heard(view, event.member, state="back")
        case MemberSuspected() | MemberGone() | MemberLeft() if _is_elsewhere(view, event.member, stage_of(event)):
            return view
        case MemberSuspected():
            return _unless_ended(view, event.member, "silent")
        case MemberGone():
            return _unless_ended(view, event.member, "gone", tokens_per_s=0.0)
        case MemberLeft():
            # Whoever says goodbye to a complete run has all of it.
            return _unless_ended(view, event.member, "finished" if view.is_complete else "left", tokens_per_s=0.0)
    return view


def _with_name(news: Told, peer: PeerId, name: str) -> Told:
    """Return what was told of a peer before its name was known, with its name."""
    return replace(news, text=news.text.replace(short(peer), printable(name))) if name else news


def _line(view: View, peer: PeerId, **changes: object) -> View:
    changes = {name: printable(value) if isinstance(value, str) else value for name, value in changes.items()}
    line = replace(view.lines.get(peer, Line()), **changes)  # type: ignore[arg-type]  # checked by the fields' names
    return replace(view, lines={**view.lines, peer: line})


def _unless_heard(view: View, peer: PeerId, **changes: object) -> View:
    if peer in view.lines and view.lines[peer].is_heard:
        return view
    return _line(view, peer, **changes)


def _unless_ended(view: View, peer: PeerId, state: str, **changes: object) -> View:
    """Return the view after others have said that `peer` is away, which is no news of one that said so itself."""
    if peer in view.lines and view.lines[peer].state in {"stopped", "finished"}:
        return view
    return _line(view, peer, state=state, **changes)


def _is_elsewhere(view: View, peer: PeerId, stage: int | None) -> bool:
    """Return whether a peer that is no more in one stage holds another."""
    return stage is not None and any(each != stage for each in view.stages.of(peer))


def _seen(view: View, own: PeerId, event: StagesSeen) -> View:
    """Return the view after a word on who is in the run: of most, nothing else is heard."""
    lines = dict(view.lines)
    for peer in sorted({*event.names, *view.stages.everybody}):
        line = lines.get(peer, Line())
        state = "training" if peer in view.stages.everybody else "joining"
        is_news = peer != own and not line.is_heard and line.state in {*AWAY, "", "joining", "training"}
        name = line.name or printable(event.names.get(peer, ""))
        lines[peer] = replace(line, name=name, state=state if is_news else line.state)
    for peer, line in view.lines.items():
        is_here = peer in event.names or peer in view.stages.everybody
        was_here = line.round is not None if line.is_heard else line.name
        if event.names and was_here and not (peer == own or is_here or line.state in AWAY):
            lines[peer] = replace(line, state="finished" if view.is_complete else "gone", tokens_per_s=0.0)
    return replace(view, lines=lines)


def _progress(view: View, event: MemberProgress) -> View:
    return _unless_heard(
        view,
        event.member,
        name=event.name,
        round=event.round,
        state=event.state,
        loss=event.loss,
        tokens_per_s=event.tokens_per_s,
    )


def _step(view: View, own: PeerId, event: StepDone) -> View:
    smooth = smoothed_speed(view.lines.get(own, Line()).tokens_per_s, event)
    if view.lead.is_of(event):  # all stages tell of the same loss
        view = replace(view, loss_sum=view.loss_sum + event.loss, num_losses=view.num_losses + 1)
    return _line(view, own, tokens_per_s=smooth, loss=event.loss, state="training", work="", is_heard=True)


def _commit(view: View, at: float, own: PeerId, event: RoundCommitted) -> View:
    line = view.lines.get(own, Line())
    is_counted = own in event.contributors or line.counted_through == event.round
    state = "paused" if line.state == "paused" else state_at_commit(view.stages, own, event, is_counted=is_counted)
    view = _line(view, own, round=event.round, state=state, committed_tokens=event.committed_tokens, is_heard=True)
    view = replace(
        view,
        sent_nbytes=view.sent_nbytes + event.sent_nbytes,
        received_nbytes=view.received_nbytes + event.received_nbytes,
        ring_nbytes=view.ring_nbytes + (0 if view.stages.num else _ring_nbytes(view, event)),
        lead=led(view.lead, event, at),
    )
    if not view.lead.is_of(event):
        return view
    if event.committed_tokens <= view.committed_tokens:  # another peer's report of the same commit
        return view
    view = replace(
        view,
        round=event.round,
        committed_tokens=event.committed_tokens,
        commits=(*view.commits, (at, event.committed_tokens))[-_RECENT_COMMITS:],
        ring_nbytes=view.ring_nbytes + (_staged_ring_nbytes(view, event) if view.stages.num else 0),
    )
    if not view.num_losses:
        return view
    losses = (*view.losses, (event.committed_tokens, view.loss_sum / view.num_losses))
    return replace(view, losses=losses if len(losses) <= _MAX_POINTS else losses[::2], loss_sum=0.0, num_losses=0)


def _ring_nbytes(view: View, event: RoundCommitted) -> int:
    return 0 if view.facts is None else ring_nbytes(event, view.num_parameters, view.facts.tokens_per_step)


def _staged_ring_nbytes(view: View, event: RoundCommitted) -> int:
    """Return what the peers that are heard would have moved together for a round."""
    num_parameters = view.stages.num_parameters or (view.facts.num_parameters if view.facts else None)
    if view.facts is None or not num_parameters:
        return 0
    num_heard = sum(line.round is not None and line.is_heard for line in view.lines.values())
    num_peers = len(view.stages.everybody)
    return num_heard * staged_ring_nbytes(event, num_parameters, view.facts.tokens_per_step, num_peers)
