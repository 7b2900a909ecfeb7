"""What events tell of a run so far, as a pure fold: `view = update(view, entry)`.

    terminal    draws a view (`cli.screen.draw`)
    page        adds rows for what changed from one view to the next (`dashboard.history`)

Entries may come from one peer (train, join) or from several at once (demo, watch); what a peer says of itself is
believed before what others say of it. Of a run with stages, rounds, tokens and losses are those of one stage, which
stands for the run, and peers those of all (`dashboard.stages`). Loss is the mean over inner steps since the last
commit; bytes are those of the peers that are heard, beside what a ring all-reduce of bf16 gradients would have moved
for the same steps.

Who takes part is said by one rule, `taking_part`, and is in `View.peers`: every count, row and line is made of these.
Others that are linked (who watches, measures a ticket, or still asks whether to join) are a number, `num_watching`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from weft import events
from weft.dashboard import figures
from weft.dashboard.figures import WAS, is_away, ring_nbytes, smoothed_speed, staged_ring_nbytes
from weft.dashboard.stages import Lead, Stages, holding, led, stage_of, state_at_commit, told
from weft.dashboard.words import notable
from weft.ids import PeerId, name_of, with_names
from weft.wire import printable

MAX_VISITS = 1024  # links of others that are kept: events may be of strangers
MAX_NOTABLE = 6  # as many lines as one takes in at a glance
_SAME_NEWS_S = 20.0  # what several peers say in the same words within so long is one piece of news
_MAX_POINTS = 4096  # of the curve; then every second one is dropped
_RECENT_COMMITS = 16  # what the time left is judged by
_LATE_S = 60.0  # a step so much older than the newest round is of a round before, and told late; clocks differ by less
_TOTAL = re.compile(r"[1-9][0-9]{0,18}")  # of tokens: whoever tells of an act may tell anything
# What a process tells before it takes part, and one that never does.
_TOLD_BY_ANYBODY = (
    *(events.TransportUp, events.LinkUp, events.LinkDown, events.ConnectionDropped, events.AdmissionRefused),
    *(events.Notice, events.Working, events.FellBack, events.RoundProven),
)
BEFORE_IT_BEGINS = (*_TOLD_BY_ANYBODY, events.DataReady)  # what a process tells before its `PeerStarted`
_ENDED = frozenset(("stopped", "finished", "left"))  # by a peer's own word: that others miss it is no news
_MISSED = frozenset(("silent", "gone", "left"))  # by the word of others, who may hear it again


@dataclass(frozen=True, kw_only=True)
class About:
    """What is known of the run before anything happened, as far as it is."""

    name: str | None = None
    id: str | None = None
    total_tokens: int | None = None
    tokens_per_step: int | None = None  # of one peer
    num_parameters: int | None = None  # of the whole model
    method: str | None = None
    layers: tuple[str, ...] = ()  # of each stage, in words; empty: the run has none, as far as is known
    loss_of: str = "token"  # what a loss is of, in one word
    audit_rate: float | None = None  # the chance that a contribution is audited; None: none is, as far as is known


@dataclass(frozen=True, kw_only=True)
class Line:
    """What is known of one peer."""

    name: str = ""
    device: str = ""
    software: str = ""
    tokens_per_s: float = 0.0
    round: int | None = None
    loss: float | None = None
    link: str = ""
    state: str = ""
    work: str = ""  # how far that has come which takes long, in short
    is_ready: bool = False  # it has the data, and has not begun
    counted_through: int | None = None  # the newest round that counted it through another peer
    sent_nbytes: int = 0
    received_nbytes: int = 0
    num_missed: int = 0
    is_heard: bool = False  # it speaks for itself
    missed_at: float = -math.inf  # wall seconds of the newest word of others that it is away

    def is_counted(self, peer: PeerId, commit: events.RoundCommitted) -> bool:
        return peer in commit.contributors or self.counted_through == commit.round


@dataclass(frozen=True)
class Told:
    """Something a person should know, who said so first, and when."""

    by: PeerId
    at: float  # wall seconds
    text: str


class Losses(NamedTuple):
    """The curve of losses, and those of inner steps since its last point, summed up where they are numbers."""

    points: tuple[tuple[int, float], ...] = ()  # committed tokens, nats per token
    num: int = 0
    num_finite: int = 0
    total: float = 0.0

    def and_one(self, loss: float) -> "Losses":
        is_finite = math.isfinite(loss)
        num_finite, total = self.num_finite + is_finite, self.total + (loss if is_finite else 0.0)
        return self._replace(num=self.num + 1, num_finite=num_finite, total=total)

    def at(self, committed_tokens: int) -> "Losses":
        """Return the curve with a point more, where there were steps."""
        if not self.num:
            return self
        mean = self.total / self.num_finite if self.num_finite else math.nan
        points = (*self.points, (committed_tokens, mean))
        return Losses(points if len(points) <= _MAX_POINTS else points[::2])


@dataclass(frozen=True, kw_only=True)
class View:
    run: About = field(default_factory=About)
    wait_for: int = 1  # peers with which the run begins, this one included
    now: float = 0.0  # wall seconds of the newest entry
    peers: Mapping[PeerId, Line] = field(default_factory=dict)  # who takes part, or did
    num_called: Mapping[str, int] = field(default_factory=dict)  # how many of them have a name
    visits: Mapping[tuple[PeerId, PeerId], str] = field(default_factory=dict)  # transports of links, by who tells of
    # them and with whom they are, while not both take part
    round: int | None = None
    committed_tokens: int = 0
    commits: tuple[tuple[float, int], ...] = ()  # the newest: when, committed tokens
    losses: Losses = field(default_factory=Losses)
    evaluated: events.Evaluated | None = None  # of the newest round that was, whenever it was told
    sample: str | None = None
    sent_nbytes: int = 0
    received_nbytes: int = 0
    ring_nbytes: int = 0  # sent and received, had the same steps been made by ring DDP
    checkpoint: str | None = None
    notables: tuple[Told, ...] = ()
    stages: Stages = field(default_factory=Stages)
    lead: Lead = field(default_factory=Lead)

    def name(self, peer: PeerId) -> str:
        """Return what a person calls a peer."""
        name = self.line(peer).name
        return name_of(peer, name, is_shared=self.num_called.get(name, 0) > 1)

    def name_of_part(self, part: str) -> str | None:
        """Return what a person calls the peer whose key begins so; None: nobody has told its name."""
        peers = (peer for peer, line in self.peers.items() if line.name and peer.startswith(part))
        return next(map(self.name, peers), None)

    def line(self, peer: PeerId) -> Line:
        return self.peers.get(peer) or Line()

    @property
    def loss_of(self) -> str:
        """What a loss is of: a token, or a pair of answers."""
        return self.run.loss_of

    @property
    def lines(self) -> dict[PeerId, Line]:
        """Return the peers that a terminal shows, with its words for those that have not begun."""

        def state(line: Line) -> str:
            if line.is_ready and line.state in {"starting", ""}:
                return "data ready"
            return line.state or ("joining" if line.link or not line.is_heard else "")

        there = ((peer, line) for peer, line in self.peers.items() if line.name or line.state or line.link)
        return {peer: replace(line, state=state(line)) for peer, line in there}

    @property
    def num_heard(self) -> int:
        """How many peers' own account there is: all that is known of bytes is of these."""
        return sum(line.is_heard for line in self.peers.values())

    @property
    def num_watching(self) -> int:
        """How many are linked to peers that are here, and take no part."""
        return len({other for own, other in self.visits if other not in self.peers and self.is_here(own)})

    def is_here(self, peer: PeerId) -> bool:
        return peer in self.peers and not is_away(self.peers[peer].state)

    @property
    def is_complete(self) -> bool:
        return self.run.total_tokens is not None and self.committed_tokens >= self.run.total_tokens

    @property
    def cut(self) -> Stages:
        """Return the stages, with what is known of the model."""
        return replace(self.stages, layers=self.run.layers, num=max(self.stages.num, len(self.run.layers)))

    @property
    def held(self) -> str:
        """Return which stage the peer holds whose view this is; empty: none, or there are several peers."""
        heard = [peer for peer, line in self.peers.items() if line.is_heard]
        return holding(self.cut, heard[0]) if len(heard) == 1 and heard[0] in self.stages.held else ""

    @property
    def num_awaited(self) -> int:
        """How many peers must still come before the run begins; 0 once it has begun."""
        if self.round is not None or self.losses.points or self.losses.num:
            return 0
        num_here = sum(bool(line.name) and not is_away(line.state) for line in self.peers.values())
        return max(0, self.wait_for - max(1, num_here))

    @property
    def time_left_s(self) -> float | None:
        """Seconds until the run's tokens are committed, at the pace of the last commits.

        None: it is not known, or nobody is here that goes on.
        """
        goes_on = any(line.state and not is_away(line.state) for line in self.peers.values())
        if self.run.total_tokens is None or len(self.commits) < 2 or not goes_on:
            return None
        (first_at, first), (last_at, last) = self.commits[0], self.commits[-1]
        if last <= first or last_at <= first_at:
            return None
        left = (self.run.total_tokens - last) * (last_at - first_at) / (last - first)
        return max(0.0, left - max(0.0, self.now - last_at))


def taking_part(entry: events.Entry) -> tuple[PeerId, ...]:
    """Return who takes part in the run, by an entry: whoever begins it says so, and members hear its heartbeat.

    A link says nothing of that: who watches has one, too, and who still asks whether to join.
    """
    own = () if isinstance(entry.event, _TOLD_BY_ANYBODY) else (entry.peer,)
    match entry.event:
        case events.MemberJoined(member=member) | events.MemberProgress(member=member):
            return (*own, member)
        case events.MemberSuspected(member=member) | events.MemberRecovered(member=member):
            return (*own, member)
        case events.MemberGone(member=member) | events.MemberLeft(member=member):
            return (*own, member)
        case events.WorkAudited(member=member) | events.WorkDoubted(member=member):
            return (*own, member)
        case events.MergeAudited(member=member) | events.MergeDoubted(member=member):
            return (*own, member)
        case events.AuditorDoubted(member=member):
            return (*own, member)
        case events.PassageAudited(member=member) | events.PassageDoubted(member=member):
            return (*own, member)
        case events.RoundCommitted(contributors=contributors, left_out=left_out):
            return (*own, *contributors, *left_out)
        case events.StagesSeen(members=members, names=names):
            return (*own, *(peer for stage in members for peer in stage), *names)
    return own


def update(view: View, entry: events.Entry) -> View:
    """Return the view after one more entry."""
    view = replace(view, now=max(view.now, entry.at))
    if isinstance(entry.event, events.RoundProven):  # who checked it is no peer of the run
        return view
    if missing := [peer for peer in taking_part(entry) if peer not in view.peers]:
        view = _let_in(view, missing)
    news = news_of(view, entry)
    view = replace(view, stages=told(view.stages, entry))
    if entry.peer in view.peers and not view.line(entry.peer).is_heard:  # its own word counts from now on
        view = _line(view, entry.peer, is_heard=True, state="", tokens_per_s=0.0)
    view = _fold(view, entry)
    return view if news is None else replace(view, notables=(*view.notables, news)[-MAX_NOTABLE:])


def news_of(view: View, entry: events.Entry) -> Told | None:
    """Return what an entry tells that nobody else has just told; None where it is routine or known."""
    text = notable(entry, view.name)
    if text is None:
        return None
    text = with_names(text, view.name_of_part)
    known = (each for each in view.notables if each.text == text and each.by != entry.peer)
    return None if any(entry.at - each.at < _SAME_NEWS_S for each in known) else Told(entry.peer, entry.at, text)


def _fold(view: View, entry: events.Entry) -> View:
    own, event = entry.peer, entry.event
    match event:
        case events.PeerStarted():
            return _start(view, own, event)
        case events.DataReady():
            return _line(view, own, is_ready=True)
        case events.StageHeld() | events.StageLeft():
            num = view.run.num_parameters or view.stages.num_parameters
            return replace(view, run=replace(view.run, num_parameters=num))
        case events.StagesSeen() if view.stages.seen_at == entry.at:  # else it is older than what is known
            return _seen(view, own, event)
        case events.StepDone():
            return _step(view, entry.at, own, event)
        case events.CountedThrough():  # comes before its round's commit
            return _line(view, own, counted_through=event.round)
        case events.RoundCommitted():
            return _commit(view, entry.at, own, event)
        case events.Paused():
            return _line(view, own, state="paused", tokens_per_s=0.0)
        case events.Resumed():
            return _line(view, own, state="training")
        case events.RoundMissed():
            return _line(view, own, state="missed a round", num_missed=view.line(own).num_missed + 1)
        case events.MajorityLost():
            return _line(view, own, state=f"{event.alive} of {event.electorate} left")
        case events.Evaluated():
            known = view.evaluated
            is_new = known is None or event.committed_tokens > known.committed_tokens
            return replace(view, evaluated=event) if is_new else view
        case events.Sampled():
            return replace(view, sample=printable(event.prompt + event.text, keep="\n\t"))
        case events.ActEnacted(changes={"tokens": tokens}) if view.run.total_tokens is not None and _TOTAL.fullmatch(
            tokens
        ):
            return replace(view, run=replace(view.run, total_tokens=int(tokens)))
        case events.CheckpointSaved():
            return replace(view, checkpoint=event.path)
        case events.PeerStopped() if view.stages.of(own) not in ((), (stage_of(event),)):
            return view  # it holds other stages still
        case events.PeerStopped():
            ending = "finished" if event.reason == "complete" else "stopped"
            return _unseen(_line(view, own, state=ending, work="", is_ready=False, tokens_per_s=0.0))
        case events.LinkUp() | events.LinkDown():
            return _link(view, own, event.remote, event.transport if isinstance(event, events.LinkUp) else None)
        case events.Working() if own in view.peers:
            return _line(view, own, work="" if event.is_over else figures.work_in_short(event))
        case _:
            return _hear(view, entry)


def _hear(view: View, entry: events.Entry) -> View:
    event = entry.event
    match event:
        case events.MemberProgress() if view.line(event.member).is_heard:
            view = _call(view, event.member, event.name)
            return _line(view, event.member, state=event.state) if _is_back(view, event.member, entry.at) else view
        case events.MemberProgress() if view.line(event.member).state not in _MISSED or _is_back(
            view, event.member, entry.at
        ):
            view = _call(view, event.member, event.name)
            # Whoever finishes, or has the last round, has all of it: after that nothing may be heard of it.
            has_all = event.state == "finishing" or (view.is_complete and event.round >= (view.round or math.inf))
            does = {"state": "finished", "tokens_per_s": 0.0} if has_all else {"state": event.state}
            heard = {"round": event.round, "loss": event.loss, "tokens_per_s": event.tokens_per_s}
            return _line(view, event.member, **(heard | does))
        case events.MemberJoined():
            return _say(_call(view, event.member, event.name), event.member, "joined")
        case events.MemberRecovered():
            return _say(view, event.member, "back")
        case events.MemberSuspected() | events.MemberGone() | events.MemberLeft() if _is_elsewhere(
            view, event.member, stage_of(event)
        ):
            return view
        case events.MemberSuspected():
            return _miss(view, event.member, "silent", entry.at)
        case events.MemberGone():
            return _miss(view, event.member, "gone", entry.at)
        case events.MemberLeft():
            # Whoever says goodbye to a complete run has all of it.
            return _miss(view, event.member, "finished" if view.is_complete else "left", entry.at)
    return view


def _let_in(view: View, more: Sequence[PeerId]) -> View:
    """Return the view with peers that begin to take part, and the links that they had before."""
    peers = {**view.peers, **dict.fromkeys(more, Line())}
    visits = dict(view.visits)
    for own, other in view.visits:
        if own in peers and other in peers:
            peers[other] = replace(peers[other], link=visits.pop((own, other)))
    return replace(view, peers=peers, visits=visits)


def _link(view: View, own: PeerId, other: PeerId, transport: str | None) -> View:
    """Return the view after a link with `other` went up, or (None) down."""
    if own in view.peers and other in view.peers:
        known = view.line(other)
        down = "down" if known.name or known.state else ""
        return _line(view, other, link=down if transport is None else transport)
    visits = {ends: over for ends, over in view.visits.items() if ends != (own, other)}
    if transport is not None and len(visits) < MAX_VISITS:
        visits[own, other] = printable(transport)
    return replace(view, visits=visits)


def _renamed(view: View, peer: PeerId, before: str) -> View:
    """Return the view after a peer's name became another, also in what was told of it."""
    name, num_called = view.line(peer).name, dict(view.num_called)
    for each, change in ((before, -1), (name, 1)):
        if each:
            num_called[each] = num_called.get(each, 0) + change
    view = replace(view, num_called=num_called)
    called = lambda part: view.name(peer) if name and peer.startswith(part) else None  # noqa: E731
    notables = tuple(replace(news, text=with_names(news.text, called)) for news in view.notables)
    return replace(view, notables=notables)


def _line(view: View, peer: PeerId, **changes: object) -> View:
    changes = {name: printable(value) if isinstance(value, str) else value for name, value in changes.items()}
    was = view.line(peer)
    line = replace(was, **changes)  # type: ignore[arg-type]  # checked by the fields' names
    view = replace(view, peers={**view.peers, peer: line})
    return view if line.name == was.name else _renamed(view, peer, was.name)


def _call(view: View, peer: PeerId, name: str) -> View:
    """Return the view with what others call a peer, unless it has said so itself."""
    line = view.line(peer)
    return view if not name or (line.is_heard and line.name) else _line(view, peer, name=name)


def _say(view: View, peer: PeerId, state: str) -> View:
    """Return the view after others have said what a peer does."""
    return view if view.line(peer).is_heard else _line(view, peer, state=state)


def _is_back(view: View, peer: PeerId, at: float) -> bool:
    """Return whether a peer that others missed was heard after that, by them or by others."""
    return view.line(peer).state in _MISSED and at >= view.line(peer).missed_at


def _miss(view: View, peer: PeerId, state: str, at: float) -> View:
    """Return the view after others have said that a peer is away, which is no news of one that said so itself."""
    line = view.line(peer)
    speed = line.tokens_per_s if state == "silent" else 0.0  # which it may still have
    missed_at = max(at, line.missed_at)
    return view if line.state in _ENDED else _line(view, peer, state=state, tokens_per_s=speed, missed_at=missed_at)


def ended(view: View) -> View:
    """Return the view of who is heard no more, and has not said why: what all did last, they did then."""
    for peer, line in view.peers.items():
        if line.state and not is_away(line.state):
            view = _line(view, peer, state=f"{WAS}{line.state}", work="", tokens_per_s=0.0)
    return view


def _unseen(view: View) -> View:
    """Return the view once nobody is here any more that is heard: what others did last, they did then."""
    if any(line.is_heard and not is_away(line.state) for line in view.peers.values()):
        return view
    for peer, line in view.peers.items():
        if line.state and not line.is_heard and not is_away(line.state):
            view = _line(view, peer, state=f"{WAS}{line.state}", tokens_per_s=0.0)
    return view


def _is_elsewhere(view: View, peer: PeerId, stage: int | None) -> bool:
    """Return whether a peer that is no more in one stage holds another."""
    return stage is not None and any(each != stage for each in view.stages.of(peer))


def _start(view: View, own: PeerId, event: events.PeerStarted) -> View:
    if view.line(own).state:  # links of an earlier process ended with it
        visits = {ends: over for ends, over in view.visits.items() if ends[0] != own}
        view = replace(view, visits=visits)
    if stage_of(event) is None:  # else both are of the stage
        run = replace(view.run, num_parameters=event.num_parameters, id=view.run.id or event.run)
        view = replace(view, run=run)
    others = (line for peer, line in view.peers.items() if peer != own and line.is_heard)
    if all(is_away(line.state) or line.state in ("", "starting") for line in others):
        view = replace(view, commits=())  # nobody told of the time that passed: it is no part of a round
    named = {"name": event.name, "device": event.device, "software": event.software}
    told_before = {name: text for name, text in named.items() if text}
    return _line(view, own, state="starting", work="", **told_before)


def _seen(view: View, own: PeerId, event: events.StagesSeen) -> View:
    """Return the view after a word on who is in the run: of most, nothing else is heard."""
    everybody = view.stages.everybody
    for peer, name in sorted(event.names.items()):
        view = _call(view, peer, name)
        if peer not in everybody and (is_away(view.line(peer).state) or view.line(peer).state == "training"):
            view = _say(view, peer, "")  # it wants a stage
    for peer in sorted(everybody):
        if is_away(view.line(peer).state) or not view.line(peer).state:
            view = _say(view, peer, "training")
    for peer, line in view.peers.items():
        was_here = line.round is not None if line.is_heard else line.name
        is_here = peer in event.names or peer in everybody or peer == own
        if event.names and was_here and not is_here and not is_away(line.state):
            view = _miss(view, peer, "finished" if view.is_complete else "gone", view.now)
    return view


def _step(view: View, at: float, own: PeerId, event: events.StepDone) -> View:
    is_late = bool(view.commits) and at < view.commits[-1][0] - _LATE_S
    if view.lead.is_of(event) and not is_late:  # all stages tell of the same loss
        view = replace(view, losses=view.losses.and_one(event.loss))
    if view.is_complete and view.line(own).state == "finished":  # what was under way when all was counted
        return _line(view, own, loss=event.loss)
    speed = smoothed_speed(view.line(own).tokens_per_s, event)
    if view.line(own).state == "paused":  # a step that was under way when the pause began
        return _line(view, own, loss=event.loss, work="")
    return _line(view, own, tokens_per_s=speed, loss=event.loss, state="training", work="")


def _commit(view: View, at: float, own: PeerId, event: events.RoundCommitted) -> View:
    line, stage, total = view.line(own), stage_of(event), view.run.total_tokens
    state = state_at_commit(view.stages, own, event, is_counted=line.is_counted(own, event))
    has_all = stage is None and total is not None and event.committed_tokens >= total
    view = _line(
        view,
        own,
        round=event.round,
        state="finished" if has_all else "paused" if line.state == "paused" else state,
        tokens_per_s=0.0 if has_all else line.tokens_per_s,
        sent_nbytes=line.sent_nbytes + event.sent_nbytes,
        received_nbytes=line.received_nbytes + event.received_nbytes,
    )
    of_ring = ring_nbytes(event, view.run.num_parameters, view.run.tokens_per_step) if stage is None else 0
    view = replace(
        view,
        sent_nbytes=view.sent_nbytes + event.sent_nbytes,
        received_nbytes=view.received_nbytes + event.received_nbytes,
        ring_nbytes=view.ring_nbytes + of_ring,
        lead=led(view.lead, event, at),
    )
    # Another peer's report of the same commit, or one of a lesser branch, counts nothing.
    if not view.lead.is_of(event) or event.committed_tokens <= view.committed_tokens:
        return view
    return replace(
        view,
        round=event.round,
        committed_tokens=event.committed_tokens,
        losses=view.losses.at(event.committed_tokens),
        commits=(*view.commits, (at, event.committed_tokens))[-_RECENT_COMMITS:],
        ring_nbytes=view.ring_nbytes + (0 if stage is None else _staged_ring_nbytes(view, event)),
    )


def _staged_ring_nbytes(view: View, event: events.RoundCommitted) -> int:
    """Return what the peers that are heard would have moved together for a round."""
    num_parameters, tokens_per_step = view.run.num_parameters, view.run.tokens_per_step
    if not num_parameters or not tokens_per_step:
        return 0
    num_heard = sum(line.round is not None and line.is_heard for line in view.peers.values())
    return num_heard * staged_ring_nbytes(event, num_parameters, tokens_per_step, len(view.stages.everybody))
