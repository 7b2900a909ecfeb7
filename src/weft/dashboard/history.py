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

It does not know where entries come from, nor who is shown them.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from weft.dashboard import figures
from weft.dashboard.advice import advice_of
from weft.dashboard.notable import notable
from weft.dashboard.reckoned import AWAY, ring_nbytes, smoothed_speed
from weft.dashboard.routine import described
from weft.dashboard.severity import ROUTINE, SEVERITIES, severity_of
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
    StepDone,
    Working,
)
from weft.ids import PeerId, short
from weft.wire import printable

Row = list[Any]
Tree = dict[str, Any]

LISTS = (
    *("peers", "states", "links", "rounds", "turns", "train", "heldout", "bytes"),
    *("proofs", "samples", "methods", "events", "advice"),
)
MAX_ROWS = 400_000  # of all lists together: a page holds them all
_UNTOLD = (StepDone, MemberProgress, Working)  # too many to list, and each is in another list


@dataclass(frozen=True, kw_only=True)
class About:
    """What is known of the run, as far as it is."""

    name: str | None = None
    id: str | None = None
    total_tokens: int | None = None
    tokens_per_step: int | None = None  # of one peer
    num_parameters: int | None = None
    method: str | None = None


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
        self._committed: set[tuple[str, int]] = set()
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
            num_rounds=len(self._committed),
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
                )
                for key, peer in self._peers.items()
            ),
        )

    # --- the fold ---

    def take(self, entry: Entry) -> None:
        """Add what an entry tells."""
        if len(self._rows) >= MAX_ROWS:
            self.num_left_out += 1
            return
        if isinstance(entry.event, RoundProven):  # who checked it is no peer of the run
            proven = entry.event
            self._add("proofs", [entry.at, proven.round, proven.num_signed, proven.num_electors])
            return
        own, at = self._peer(entry.peer), entry.at
        self._fold(own, at, entry)
        if not isinstance(entry.event, _UNTOLD):
            kind, severity = type(entry.event).__name__, severity_of(entry.event)
            self._num_events[severity] += 1
            words = (None if severity == ROUTINE else notable(entry, self.name)) or self._routine(entry.event)
            self._add("events", [at, own.number, severity, kind, words])
        for about, text, what_to_do in advice_of(entry, self.name):
            number = None if about is None else self._peer(about).number
            self._add("advice", [at, number, printable(text), printable(what_to_do)])

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
                self.run = replace(self.run, num_parameters=num, id=self.run.id or run)
                self._state(own, at, own, "starting")
            case StepDone() as step:
                self._step(own, at, step)
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
            case PeerStopped(reason=reason):
                own.tokens_per_s = 0.0
                self._state(own, at, own, "finished" if reason == "complete" else "stopped")
            case MemberProgress():
                self._claim(own, at, event)
            case MemberJoined(member=member, name=name):
                self._call(member, name)
                self._hearsay(own, at, member, "joined")
            case MemberRecovered(member=member):
                self._hearsay(own, at, member, "back")
            case MemberSuspected(member=member):
                self._away(own, at, member, "silent")
            case MemberGone(member=member):
                self._away(own, at, member, "gone")
            case MemberLeft(member=member):
                self._away(own, at, member, "left")

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
        if math.isfinite(step.loss):
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
        self._add("turns", [*turn, is_counted])
        if own.state != "paused":
            self._state(own, at, own, "training" if is_counted else "left out")
        if (commit.branch, commit.round) in self._committed:
            return
        self._committed.add((commit.branch, commit.round))
        if _tells_shares(commit):
            for each, tokens in zip(commit.contributors, commit.contributed, strict=True):
                self._peer(each).counted_tokens += tokens
        self._add(
            "rounds",
            [
                *(at, commit.round, commit.attempt, self._number(commit.leader)),
                *(commit.tokens, commit.committed_tokens),
                [self._peer(each).number for each in commit.contributors],
                [[self._peer(each).number, printable(reason)] for each, reason in commit.left_out.items()],
                list(commit.contributed) if _tells_shares(commit) else None,
            ],
        )
        if commit.committed_tokens <= self._committed_tokens:  # of a lesser branch
            return
        self._committed_tokens = commit.committed_tokens
        self._add("bytes", [at, commit.committed_tokens, self._moved_nbytes, self._ring_nbytes])
        if self._losses:
            self._loss = sum(self._losses) / len(self._losses)
            self._add("train", [at, commit.committed_tokens, self._loss])
            self._losses.clear()


def _tells_shares(commit: RoundCommitted) -> bool:
    """Whether a commit says what each peer brought: not where groups are counted, of which one brings all."""
    return len(commit.contributed) == len(commit.contributors) and not commit.num_through


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
