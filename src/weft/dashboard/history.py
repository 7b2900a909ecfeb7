"""The history of a run as a page shows it: lists of small rows, of what each event changed in the view of the run.

    take(entry)        adds the rows that an entry makes
    whole()            everything, as one tree of JSON
    since(cursor)      the rows that came after a cursor, by list

Rows are never changed, so a page that has some of them needs only the others, and goes back in time by leaving the
last ones out. Peers are told by their number, in the order in which they were first heard of; a row of `peers` with a
key that was there before tells its name anew. A row of `states` says whose word it is. Who takes no part has no number
(`dashboard.view.taking_part`): its news are nobody's, what else it tells waits until it begins, and rows of `watching`
say how many such there are.

Of a run with stages, rows of `rounds`, `train` and `bytes` are of one stage, which stands for the run
(`dashboard.stages`); what the others committed is in `beside`. Where a row is of a stage, that is its last column.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec
from msgspec import UNSET

from weft import events
from weft.dashboard.audits import STEPS, Audit, Audits, AuditsNow, distance_of, outcome_of, what_of
from weft.dashboard.figures import is_away
from weft.dashboard.stages import StageNow, stage_of
from weft.dashboard.view import About, Line, View, update
from weft.dashboard.words import ROUTINE, SEVERITIES, advice_of, described, notable, severity_of
from weft.ids import PeerId, with_names
from weft.wire import printable


@dataclass(frozen=True, kw_only=True)
class PeerNow:
    """A peer as it stands."""

    key: str
    name: str
    is_here: bool
    state: str  # in a word or two
    tokens_per_s: float
    trained_at_tokens_per_s: float  # the same, while it last trained
    round: int | None
    device: str
    software: str
    counted_tokens: int  # that rounds counted of it
    sent_nbytes: int
    received_nbytes: int
    num_missed: int
    is_heard: bool
    stages: tuple[int, ...] = ()  # that it holds, from 0


@dataclass(frozen=True, kw_only=True)
class Now:
    """How a run stands, in figures."""

    num_rounds: int
    committed_tokens: int
    total_tokens: int | None
    moved_nbytes: int
    ring_nbytes: int
    loss: float | None
    heldout: float | None
    num_events: tuple[int, ...]  # by severity
    peers: tuple[PeerNow, ...]
    audits: AuditsNow
    stages: tuple[StageNow, ...] = ()
    num_watching: int = 0


Row = list[Any]
Tree = dict[str, Any]

LISTS = (
    *("peers", "states", "links", "rounds", "turns", "train", "heldout", "bytes"),
    *("proofs", "samples", "methods", "events", "advice", "stages", "moves", "beside", "watching", "audits"),
)
MAX_ROWS = 400_000  # of all lists together: a page holds them all
MAX_WAITING = 64  # peers that take no part, and events of each
STAGES_S = 30.0  # between two rows of stages that say the same
_UNTOLD = (events.StepDone, events.MemberProgress, events.Working)  # too many to list, and each is in another list


class History:
    """Of one run."""

    def __init__(self, run: About | None = None) -> None:
        self.view = View(run=About() if run is None else run)
        self.num_left_out = 0
        self._rows: list[tuple[str, Row]] = []
        self._numbers: dict[PeerId, int] = {}
        self._offered: dict[PeerId, tuple[int, int]] = {}  # the last: to which round, tokens
        self._counted: Counter[PeerId] = Counter()  # tokens
        self._committed: set[tuple[int | None, str, int]] = set()
        self._shown: set[int] = set()  # rounds that are the run's
        self._audits = Audits()
        self._num_rounds = 0
        self._num_watching = 0
        self._waiting: dict[PeerId, list[Row]] = {}  # of events, of who takes no part
        self._stages_row: tuple[float, object] = (-math.inf, None)  # the last: when, and the members in it
        self._evaluated: set[int] = set()
        self._speeds: dict[PeerId, float] = {}  # the last above 0
        self._loss: float | None = None
        self._heldout: float | None = None
        self._num_events = [0] * len(SEVERITIES)

    # --- for who shows it ---

    @property
    def run(self) -> About:
        return self.view.run

    def know(self, run: About) -> None:
        """Take what is known of the run."""
        self.view = replace(self.view, run=run)

    def name(self, peer: PeerId) -> str:
        return self.view.name(peer)

    @property
    def cursor(self) -> int:
        return len(self._rows)

    def since(self, cursor: int) -> Tree:
        """Return what came after a cursor, with the one to go on from."""
        tree: Tree = {}
        for name, row in self._rows[max(cursor, 0) :]:
            tree.setdefault(name, []).append(row)
        view = self.view
        moved = [view.sent_nbytes + view.received_nbytes, view.ring_nbytes, view.num_heard]
        return {"cursor": self.cursor, "run": asdict(self.run), "moved": moved, **tree}

    def whole(self) -> Tree:
        return {name: [] for name in LISTS} | self.since(0)

    @property
    def now(self) -> Now:
        view = self.view
        return Now(
            num_rounds=self._num_rounds,
            committed_tokens=view.committed_tokens,
            total_tokens=view.run.total_tokens,
            moved_nbytes=view.sent_nbytes + view.received_nbytes,
            ring_nbytes=view.ring_nbytes,
            loss=self._loss,
            heldout=self._heldout,
            num_events=tuple(self._num_events),
            peers=tuple(map(self._peer_now, self._numbers)),
            audits=self._audits.now,
            stages=view.cut.now,
            num_watching=view.num_watching,
        )

    def _peer_now(self, peer: PeerId) -> PeerNow:
        line = self.view.line(peer)
        return PeerNow(
            key=peer,
            name=line.name,
            is_here=bool(line.state) and not is_away(line.state),
            state=line.state,
            tokens_per_s=_speed(line),
            trained_at_tokens_per_s=self._speeds.get(peer, 0.0),
            round=line.round,
            device=line.device,
            software=line.software,
            counted_tokens=self._counted[peer],
            sent_nbytes=line.sent_nbytes,
            received_nbytes=line.received_nbytes,
            num_missed=line.num_missed,
            is_heard=line.is_heard,
            stages=self.view.stages.of(peer),
        )

    # --- the rows ---

    def take(self, entry: events.Entry) -> None:
        """Add what an entry tells."""
        if len(self._rows) >= MAX_ROWS:
            self.num_left_out += 1
            return
        event, at = entry.event, entry.at
        if isinstance(event, events.RoundProven):
            self._add("proofs", [at, event.round, event.num_signed, event.num_electors, *_column(event)])
            return
        before, self.view = self.view, update(self.view, entry)
        own = self._number(entry.peer) if entry.peer in self.view.peers else None
        for peer in self._touched(entry):
            self._tell(before, peer, entry)
        if own is not None and self._waiting:
            for row in self._waiting.pop(entry.peer, ()):
                self._add("events", [row[0], own, *row[1:]])
        if before.visits or self.view.visits:
            self._visits(before, at)
        if own is not None:
            self._list(before, own, entry)
        if not isinstance(event, _UNTOLD):
            severity = severity_of(event)
            self._num_events[severity] += 1
            words = self._routine(event) if severity == ROUTINE else self._words(entry)
            if own is None and severity == ROUTINE:
                self._wait(entry.peer, [at, severity, type(event).__name__, words])
            else:
                self._add("events", [at, own, severity, type(event).__name__, words])
        if (advice := advice_of(entry, self.name)) is not None:
            about, text, what_to_do = advice
            number = None if about is None else self._number(about)
            self._add("advice", [at, number, self._named(text), self._named(what_to_do)])

    def _wait(self, peer: PeerId, row: Row) -> None:
        """Keep an event of who may begin to take part."""
        if peer in self._waiting or len(self._waiting) < MAX_WAITING:
            own = self._waiting.setdefault(peer, [])
            own.append(row)
            del own[:-MAX_WAITING]

    def _words(self, entry: events.Entry) -> str:
        return self._named(notable(entry, self.name) or described(entry.event, self.name))

    def _routine(self, event: events.Event) -> str:
        return self._named(described(event, self.name))

    def _named(self, text: str) -> str:
        return printable(with_names(text, self.view.name_of_part))

    def _add(self, name: str, row: Row) -> None:
        self._rows.append((name, row))

    def _number(self, peer: PeerId) -> int:
        if peer not in self._numbers:
            self._numbers[peer] = len(self._numbers)
            self._add("peers", [str(peer), "", "", ""])
        return self._numbers[peer]

    def _touched(self, entry: events.Entry) -> Iterable[PeerId]:
        """Return the peers of whom an entry may have told anything."""
        if isinstance(entry.event, events.StagesSeen | events.PeerStopped):  # the last that is heard ends all it tells
            return self.view.peers
        told = [entry.peer, getattr(entry.event, "member", None), getattr(entry.event, "remote", None)]
        return {peer: None for peer in told if peer is not None and peer in self.view.peers}

    def _tell(self, before: View, peer: PeerId, entry: events.Entry) -> None:
        """Add what has changed of a peer: who it is, and what it does."""
        was, line, number = before.line(peer), self.view.line(peer), self._number(peer)
        if (line.name, line.device, line.software) != (was.name, was.device, was.software):
            self._add("peers", [str(peer), line.name, line.device, line.software])
        if line.tokens_per_s > 0:
            self._speeds[peer] = line.tokens_per_s
        is_work = isinstance(entry.event, events.Working) and peer == entry.peer
        if is_work or (line.state and (line.state, line.round, line.is_heard) != (was.state, was.round, was.is_heard)):
            shown = (is_work and line.work) or line.state
            row = [entry.at, number, shown, line.round, finite(line.loss), _speed(line)]
            self._add("states", [*row, self._number(entry.peer)])

    def _list(self, before: View, own: int, entry: events.Entry) -> None:
        at, event = entry.at, entry.event
        match event:
            case events.StageHeld(stage=stage, reason=reason) | events.StageLeft(stage=stage, reason=reason):
                self._add("moves", [at, own, stage, isinstance(event, events.StageHeld), printable(reason)])
            case events.StagesSeen() if self.view.stages.seen_at == at:  # else it is older than what is known
                self._see(own, at, event)
            case events.RoundCommitted():
                self._commit(before, own, entry, event)
            case events.WorkAudited() | events.WorkDoubted() | events.MergeAudited() | events.MergeDoubted():
                self._audit(at, own, event)
            case events.PayloadOffered(round=round, tokens=tokens):
                self._offered[entry.peer] = (round, tokens)
            case events.Evaluated(
                committed_tokens=tokens, loss=loss, nats_per_byte=per_byte, round=round, preferred=pairs, reward=reward
            ):
                if tokens not in self._evaluated and math.isfinite(loss):
                    if tokens > max(self._evaluated, default=-1):  # else it is told late, of an earlier round
                        self._heldout = loss
                    self._evaluated.add(tokens)
                    beside = (
                        []
                        if pairs is UNSET
                        else [{name: finite(each) for name, each in msgspec.to_builtins(pairs).items()}]
                    )
                    if reward is not UNSET:
                        beside = [{"reward": reward}]
                    self._add("heldout", [at, tokens, loss, finite(per_byte), round, *beside])
            case events.Sampled(round=round, prompt=prompt, text=text):
                self._add("samples", [at, round, printable(prompt, keep="\n\t"), printable(text, keep="\n\t")])
            case (
                events.MethodTuned(round=round)
                | events.GraphChosen(round=round)
                | events.ActEnacted(kind="amend", round=round)
            ):
                self._add("methods", [at, round, self._words(entry)])
            case events.LinkUp(remote=remote, transport=transport) if remote in self.view.peers:
                self._add("links", [at, own, self._number(remote), printable(transport)])
            case events.LinkDown(remote=remote) if remote in self.view.peers:
                self._add("links", [at, own, self._number(remote), ""])

    def _audit(self, at: float, own: int, event: Audit) -> None:
        """Add what a member has found of another's work: training steps, how many, or a part, which."""
        self._audits.take(event)
        what = what_of(event)
        num = event.num_steps if isinstance(event, events.WorkAudited | events.WorkDoubted) else event.part
        row = [at, own, self._number(event.member), event.round, what == STEPS, num]
        self._add("audits", [*row, outcome_of(event), distance_of(event)])

    def _visits(self, before: View, at: float) -> None:
        """Add the links of who begins to take part, and how many do not."""
        peers, visits = self.view.peers, self.view.visits
        for (own, other), transport in before.visits.items():
            if (own, other) not in visits and own in peers and other in peers:
                self._add("links", [at, self._number(own), self._number(other), transport])
        if (num := self.view.num_watching) != self._num_watching:
            self._num_watching = num
            self._add("watching", [at, num])

    def _see(self, own: int, at: float, seen: events.StagesSeen) -> None:
        when, members = self._stages_row
        if seen.members != members or at - when >= STAGES_S:
            self._stages_row = at, seen.members
            numbers = [[self._number(each) for each in stage] for stage in seen.members]
            self._add("stages", [at, own, numbers, list(seen.rates), list(seen.waiting)])

    def _commit(self, before: View, own: int, entry: events.Entry, commit: events.RoundCommitted) -> None:
        view, peer, at, stage = self.view, entry.peer, entry.at, stage_of(commit)
        is_counted = view.line(peer).is_counted(peer, commit)
        offered_to, offered = self._offered.get(peer, (0, 0))
        if is_counted and offered_to == commit.round and not _tells_shares(commit):  # its own account, then
            self._counted[peer] += offered
        took = [commit.work_s, commit.duration_s, commit.sent_nbytes, commit.received_nbytes]
        self._add("turns", [at, own, commit.round, *took, is_counted, *_column(commit)])
        if (stage, commit.branch, commit.round) not in self._committed:
            self._committed.add((stage, commit.branch, commit.round))
            if _tells_shares(commit):
                self._counted.update(dict(zip(commit.contributors, commit.contributed, strict=True)))
            is_run_s = stage is None or (view.lead.is_of(commit) and commit.round not in self._shown)
            self._add("rounds" if is_run_s else "beside", [*self._round_row(at, commit), *_column(commit)])
            if is_run_s:
                self._num_rounds += 1
                self._audits.count(commit.round, commit.contributors)
                self._shown.add(commit.round)
        if view.committed_tokens > before.committed_tokens:  # else it is of a lesser branch, or was told before
            moved = view.sent_nbytes + view.received_nbytes
            self._add("bytes", [at, commit.committed_tokens, moved, view.ring_nbytes])
        points = view.losses.points
        if points is not before.losses.points and math.isfinite(points[-1][1]):
            self._loss = points[-1][1]
            self._add("train", [at, commit.committed_tokens, self._loss])

    def _round_row(self, at: float, commit: events.RoundCommitted) -> Row:
        return [
            *(at, commit.round, commit.attempt, None if commit.leader is None else self._number(commit.leader)),
            *(commit.tokens, commit.committed_tokens),
            [self._number(each) for each in commit.contributors],
            [[self._number(each), printable(reason)] for each, reason in commit.left_out.items()],
            list(commit.contributed) if _tells_shares(commit) else None,
        ]


def _tells_shares(commit: events.RoundCommitted) -> bool:
    """Whether a commit says what each peer brought: not where groups are counted, of which one brings all."""
    return len(commit.contributed) == len(commit.contributors) and not commit.num_through


def _speed(line: Line) -> float:
    """Return what a peer adds to the speed of all."""
    return 0.0 if is_away(line.state) else line.tokens_per_s


def _column(event: events.Event) -> Row:
    """Return the column that says of which stage a row is; none where the run has no stages."""
    stage = stage_of(event)
    return [] if stage is None else [stage]


def finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
