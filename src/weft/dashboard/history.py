"""The history of a run as a page shows it: a fold over events into lists of small rows.

    take(entry)        adds the rows that an entry makes
    whole()            everything, as one tree of JSON
    since(cursor)      the rows that came after a cursor, by list

Rows are never changed, so a page that has some of them needs only the others, and goes back in time by leaving the
last ones out. Peers are told by their number, in the order in which they were first heard of; a row of `peers` with a
key that was there before tells its name anew.

What a peer says of itself is believed before what others say of it, which is shown as their word. Loss is the mean over
inner steps since the last commit; bytes are those of the peers that are heard, beside what a ring all-reduce of bf16
gradients would have moved for the same steps.

Of a run with stages, rows of `rounds`, `train` and `bytes` are of one stage, which stands for the run
(`dashboard.stages`); what the others committed is in `beside`. Where a row is of a stage, that is its last column.

What is known of a run before anything happened, and how it stands: records without behaviour.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from weft.dashboard import figures
from weft.dashboard.figures import AWAY, ring_nbytes, smoothed_speed, staged_ring_nbytes
from weft.dashboard.stages import Lead, StageNow, Stages, led, stage_of, state_at_commit, told
from weft.dashboard.words import ROUTINE, SEVERITIES, advice_of, described, notable, severity_of
from weft.events import (
    ActEnacted,
    CountedThrough,
    Entry,
    Evaluated,
    Event,
    GraphChosen,
    LinkDown,
    LinkUp,
    MajorityLost,
    MemberGone,
    MemberJoined,
    MemberLeft,
    MemberProgress,
    MemberRecovered,
    MemberSuspected,
    MethodTuned,
    Paused,
    PayloadOffered,
    PeerStarted,
    PeerStopped,
    Resumed,
    RoundCommitted,
    RoundMissed,
    RoundProven,
    Sampled,
    StageHeld,
    StageLeft,
    StagesSeen,
    StepDone,
    Working,
)
from weft.ids import PeerId, short
from weft.wire import printable


@dataclass(frozen=True, kw_only=True)
class About:
    """What is known of the run, as far as it is."""

    name: str | None = None
    id: str | None = None
    total_tokens: int | None = None
    tokens_per_step: int | None = None  # of one peer
    num_parameters: int | None = None
    method: str | None = None
    layers: tuple[str, ...] = ()  # of each stage, in words; empty: the run has none, as far as is known


@dataclass(frozen=True, kw_only=True)
class PeerNow:
    """A peer as it stands."""

    key: str
    name: str
    is_here: bool
    tokens_per_s: float
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
    stages: tuple[StageNow, ...] = ()


Row = list[Any]
Tree = dict[str, Any]

LISTS = (
    *("peers", "states", "links", "rounds", "turns", "train", "heldout", "bytes"),
    *("proofs", "samples", "methods", "events", "advice", "stages", "moves", "beside"),
)
MAX_ROWS = 400_000  # of all lists together: a page holds them all
STAGES_S = 30.0  # between two rows of stages that say the same
_UNTOLD = (StepDone, MemberProgress, Working)  # too many to list, and each is in another list


@dataclass
class _Peer:
    number: int
    row: Row
    state: str = ""
    round: int | None = None
    loss: float | None = None
    tokens_per_s: float = 0.0
    is_heard: bool = False  # it speaks for itself
    counted_through: int | None = None
    offered: tuple[int, int] = (0, 0)  # to which round, tokens
    counted_tokens: int = 0
    sent_nbytes: int = 0
    received_nbytes: int = 0
    num_missed: int = 0


class History:
    """Of one run."""

    def __init__(self, run: About | None = None) -> None:
        self.run = About() if run is None else run
        self.num_left_out = 0
        self._rows: list[tuple[str, Row]] = []
        self._peers: dict[PeerId, _Peer] = {}
        self._committed: set[tuple[int | None, str, int]] = set()
        self._num_rounds = 0
        self._stages, self._lead = Stages(), Lead()
        self._shown: set[int] = set()  # rounds that are the run's
        self._stages_row: tuple[float, object] = (-math.inf, None)  # the last: when, and the members in it
        self._evaluated: set[int] = set()
        self._committed_tokens = 0
        self._moved_nbytes = self._ring_nbytes = 0
        self._losses: list[float] = []
        self._loss: float | None = None
        self._heldout: float | None = None
        self._num_events = [0] * len(SEVERITIES)

    # --- for who shows it ---

    @property
    def cursor(self) -> int:
        return len(self._rows)

    def since(self, cursor: int) -> Tree:
        """Return what came after a cursor, with the one to go on from."""
        tree: Tree = {}
        for name, row in self._rows[max(cursor, 0) :]:
            tree.setdefault(name, []).append(row)
        return {"cursor": self.cursor, "run": asdict(self.run), **tree}

    def whole(self) -> Tree:
        return {name: [] for name in LISTS} | self.since(0)

    @property
    def now(self) -> Now:
        return Now(
            num_rounds=self._num_rounds,
            committed_tokens=self._committed_tokens,
            total_tokens=self.run.total_tokens,
            moved_nbytes=self._moved_nbytes,
            ring_nbytes=self._ring_nbytes,
            loss=self._loss,
            heldout=self._heldout,
            num_events=tuple(self._num_events),
            peers=tuple(
                PeerNow(
                    key=key,
                    name=peer.row[1],
                    is_here=bool(peer.state) and peer.state not in AWAY,
                    tokens_per_s=peer.tokens_per_s,
                    round=peer.round,
                    device=peer.row[2],
                    software=peer.row[3],
                    counted_tokens=peer.counted_tokens,
                    sent_nbytes=peer.sent_nbytes,
                    received_nbytes=peer.received_nbytes,
                    num_missed=peer.num_missed,
                    is_heard=peer.is_heard,
                    stages=self._stages.of(key),
                )
                for key, peer in self._peers.items()
            ),
            stages=replace(self._stages, num=max(self._stages.num, len(self.run.layers)), layers=self.run.layers).now,
        )

    # --- the fold ---

    def take(self, entry: Entry) -> None:
        """Add what an entry tells."""
        if len(self._rows) >= MAX_ROWS:
            self.num_left_out += 1
            return
        if isinstance(entry.event, RoundProven):  # who checked it is no peer of the run
            proven = entry.event
            self._add("proofs", [entry.at, proven.round, proven.num_signed, proven.num_electors, *_column(proven)])
            return
        self._stages = told(self._stages, entry)
        own, at = self._peer(entry.peer), entry.at
        self._fold(own, at, entry)
        if not isinstance(entry.event, _UNTOLD):
            kind, severity = type(entry.event).__name__, severity_of(entry.event)
            self._num_events[severity] += 1
            words = (None if severity == ROUTINE else notable(entry, self.name)) or self._routine(entry.event)
            self._add("events", [at, own.number, severity, kind, words])
        if (advice := advice_of(entry, self.name)) is not None:
            about, text, what_to_do = advice
            self._add("advice", [at, self._number(about), printable(text), printable(what_to_do)])

    def name(self, peer: PeerId) -> str:
        known = self._peers.get(peer)
        return known.row[1] if known is not None and known.row[1] else short(peer)

    def _words(self, entry: Entry) -> str:
        return notable(entry, self.name) or self._routine(entry.event)

    def _routine(self, event: Event) -> str:
        return printable(described(event, self.name))

    def _add(self, name: str, row: Row) -> None:
        self._rows.append((name, row))

    def _peer(self, peer: PeerId) -> _Peer:
        if peer not in self._peers:
            self._peers[peer] = _Peer(number=len(self._peers), row=[str(peer), "", "", ""])
            self._add("peers", self._peers[peer].row)
        return self._peers[peer]

    def _number(self, peer: PeerId | None) -> int | None:
        return None if peer is None else self._peer(peer).number

    def _call(self, peer: PeerId, name: str, device: str = "", software: str = "") -> None:
        known = self._peer(peer)
        told = zip((name, device, software), known.row[1:], strict=True)
        row = [str(peer), *(printable(new) or old for new, old in told)]
        if row != known.row:
            known.row = row
            self._add("peers", row)

    def _state(self, of: _Peer, at: float, by: _Peer, state: str | None = None) -> None:
        of.state = of.state if state is None else state
        self._add("states", self._row_of(of, at, by, of.state))

    def _row_of(self, of: _Peer, at: float, by: _Peer, state: str) -> Row:
        return [at, of.number, state, of.round, _finite(of.loss), of.tokens_per_s, by.number]

    def _fold(self, own: _Peer, at: float, entry: Entry) -> None:
        if not own.is_heard:  # its own word counts from now on
            own.is_heard, own.state, own.tokens_per_s = True, "", 0.0
        match entry.event:
            case PeerStarted(name=name, device=device, software=software, num_parameters=num, run=run):
                self._call(entry.peer, name, device, software)
                if stage_of(entry.event) is None:  # else both are of the stage
                    self.run = replace(self.run, num_parameters=num, id=self.run.id or run)
                self._state(own, at, own, "starting")
            case StepDone() as step:
                self._step(own, at, step)
            case StageHeld(stage=stage, reason=reason) | StageLeft(stage=stage, reason=reason):
                self.run = replace(self.run, num_parameters=self.run.num_parameters or self._stages.num_parameters)
                is_held = isinstance(entry.event, StageHeld)
                self._add("moves", [at, own.number, stage, is_held, printable(reason)])
            case StagesSeen() if self._stages.seen_at == at:  # else it is older than what is known
                self._see(own, at, entry.event)
            case RoundCommitted() as commit:
                self._commit(own, at, entry.peer, commit)
            case CountedThrough(round=round):
                own.counted_through = round
            case PayloadOffered(round=round, tokens=tokens):
                own.offered = (round, tokens)
            case Evaluated(committed_tokens=tokens, loss=loss, nats_per_byte=per_byte):
                if tokens not in self._evaluated and math.isfinite(loss):
                    self._evaluated.add(tokens)
                    self._heldout = loss
                    self._add("heldout", [at, tokens, loss, _finite(per_byte)])
            case Sampled(round=round, prompt=prompt, text=text):
                self._add("samples", [at, round, printable(prompt, keep="\n\t"), printable(text, keep="\n\t")])
            case MethodTuned(round=round) | GraphChosen(round=round) | ActEnacted(kind="amend", round=round):
                self._add("methods", [at, round, self._words(entry)])
            case LinkUp(remote=remote, transport=transport):
                self._add("links", [at, own.number, self._peer(remote).number, printable(transport)])
            case LinkDown(remote=remote):
                self._add("links", [at, own.number, self._peer(remote).number, ""])
            case _:
                self._stand(own, at, entry.event)

    def _stand(self, own: _Peer, at: float, event: Event) -> None:
        """Take up what somebody is doing."""
        match event:
            case Paused():
                own.tokens_per_s = 0.0
                self._state(own, at, own, "paused")
            case Working(is_over=True):
                self._state(own, at, own)
            case Working():
                self._add("states", self._row_of(own, at, own, figures.work_in_short(event)))
            case Resumed():
                self._state(own, at, own, "training")
            case RoundMissed():
                own.num_missed += 1
                self._state(own, at, own, "missed a round")
            case MajorityLost(alive=alive, electorate=electorate):
                self._state(own, at, own, f"{alive} of {electorate} left")
            case PeerStopped() if self._stages.of(PeerId(own.row[0])) not in ((), (stage_of(event),)):
                pass  # it holds other stages still
            case PeerStopped(reason=reason):
                own.tokens_per_s = 0.0
                self._state(own, at, own, "finished" if reason == "complete" else "stopped")
            case MemberProgress():
                self._claim(own, at, event)
            case MemberJoined(member=member, name=name):
                self._call(member, name)
                self._hearsay(own, at, member, "joined")
            case MemberSuspected(member=member) | MemberGone(member=member) | MemberLeft(member=member) if (
                self._is_elsewhere(member, stage_of(event))
            ):
                pass
            case MemberRecovered(member=member):
                self._hearsay(own, at, member, "back")
            case MemberSuspected(member=member):
                self._away(own, at, member, "silent")
            case MemberGone(member=member):
                self._away(own, at, member, "gone")
            case MemberLeft(member=member):
                self._away(own, at, member, "left")

    def _is_elsewhere(self, member: PeerId, stage: int | None) -> bool:
        """Return whether a peer that is no more in one stage holds another."""
        return stage is not None and any(each != stage for each in self._stages.of(member))

    def _see(self, own: _Peer, at: float, seen: StagesSeen) -> None:
        """Take up a word on who is in the run."""
        everybody = self._stages.everybody
        for key, name in sorted(seen.names.items()):
            if not (self._peer(key).is_heard and self._peer(key).row[1]):
                self._call(key, name)
        for key in sorted(everybody):
            if self._peer(key).state in {*AWAY, ""}:
                self._hearsay(own, at, key, "training")
        for key, peer in list(self._peers.items()):
            was_here = peer.round is not None if peer.is_heard else peer.state == "training"
            if seen.names and was_here and peer is not own and key not in everybody and key not in seen.names:
                self._away(own, at, key, "gone")
        when, members = self._stages_row
        if seen.members != members or at - when >= STAGES_S:
            self._stages_row = at, seen.members
            numbers = [[self._peer(each).number for each in stage] for stage in seen.members]
            self._add("stages", [at, own.number, numbers, list(seen.rates), list(seen.waiting)])

    def _hearsay(self, own: _Peer, at: float, member: PeerId, state: str) -> None:
        of = self._peer(member)
        if not of.is_heard and of.state != state:
            self._state(of, at, own, state)

    def _away(self, own: _Peer, at: float, member: PeerId, state: str) -> None:
        """Take up that somebody is away, which is no news of one that said so itself."""
        of = self._peer(member)
        if of.state not in {"stopped", "finished", "left", state}:
            of.tokens_per_s = 0.0
            self._state(of, at, own, state)

    def _claim(self, own: _Peer, at: float, told: MemberProgress) -> None:
        self._call(told.member, told.name)
        of = self._peer(told.member)
        if of.is_heard or (of.state, of.round) == (told.state, told.round):
            return
        of.round, of.loss, of.tokens_per_s = told.round, told.loss, told.tokens_per_s
        self._state(of, at, own, printable(told.state))

    def _step(self, own: _Peer, at: float, step: StepDone) -> None:
        own.tokens_per_s = smoothed_speed(own.tokens_per_s, step)
        own.loss = step.loss
        if math.isfinite(step.loss) and self._lead.is_of(step):  # all stages tell of the same loss
            self._losses.append(step.loss)
        if own.state != "training":
            self._state(own, at, own, "training")

    def _commit(self, own: _Peer, at: float, peer: PeerId, commit: RoundCommitted) -> None:
        is_counted = peer in commit.contributors or own.counted_through == commit.round
        own.round = commit.round
        own.sent_nbytes += commit.sent_nbytes
        own.received_nbytes += commit.received_nbytes
        if not _tells_shares(commit):  # its own account, then
            offered_to, offered = own.offered
            own.counted_tokens += offered if is_counted and offered_to == commit.round else 0
        self._moved_nbytes += commit.sent_nbytes + commit.received_nbytes
        stage = stage_of(commit)
        if stage is None:
            self._ring_nbytes += ring_nbytes(commit, self.run.num_parameters, self.run.tokens_per_step)
        turn = [
            at,
            own.number,
            commit.round,
            commit.work_s,
            commit.duration_s,
            commit.sent_nbytes,
            commit.received_nbytes,
        ]
        self._add("turns", [*turn, is_counted, *_column(commit)])
        if own.state != "paused":
            self._state(own, at, own, state_at_commit(self._stages, peer, commit, is_counted=is_counted))
        if (stage, commit.branch, commit.round) in self._committed:
            return
        self._committed.add((stage, commit.branch, commit.round))
        if _tells_shares(commit):
            for each, tokens in zip(commit.contributors, commit.contributed, strict=True):
                self._peer(each).counted_tokens += tokens
        self._lead = led(self._lead, commit, at)
        is_run_s = stage is None or (self._lead.is_of(commit) and commit.round not in self._shown)
        self._add("rounds" if is_run_s else "beside", [*self._round_row(at, commit), *_column(commit)])
        if not is_run_s:
            return
        self._num_rounds += 1
        self._shown.add(commit.round)
        if commit.committed_tokens <= self._committed_tokens:  # of a lesser branch
            return
        self._committed_tokens = commit.committed_tokens
        if stage is not None:
            self._ring_nbytes += self._staged_ring_nbytes(commit)
        self._add("bytes", [at, commit.committed_tokens, self._moved_nbytes, self._ring_nbytes])
        if self._losses:
            self._loss = sum(self._losses) / len(self._losses)
            self._add("train", [at, commit.committed_tokens, self._loss])
            self._losses.clear()

    def _round_row(self, at: float, commit: RoundCommitted) -> Row:
        return [
            *(at, commit.round, commit.attempt, self._number(commit.leader)),
            *(commit.tokens, commit.committed_tokens),
            [self._peer(each).number for each in commit.contributors],
            [[self._peer(each).number, printable(reason)] for each, reason in commit.left_out.items()],
            list(commit.contributed) if _tells_shares(commit) else None,
        ]

    def _staged_ring_nbytes(self, commit: RoundCommitted) -> int:
        num, tokens_per_step = self.run.num_parameters, self.run.tokens_per_step
        if not num or not tokens_per_step:
            return 0
        num_heard = sum(peer.is_heard and peer.round is not None for peer in self._peers.values())
        return num_heard * staged_ring_nbytes(commit, num, tokens_per_step, len(self._stages.everybody))


def _tells_shares(commit: RoundCommitted) -> bool:
    """Whether a commit says what each peer brought: not where groups are counted, of which one brings all."""
    return len(commit.contributed) == len(commit.contributors) and not commit.num_through


def _column(event: Event) -> Row:
    """Return the column that says of which stage a row is; none where the run has no stages."""
    stage = stage_of(event)
    return [] if stage is None else [stage]


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
