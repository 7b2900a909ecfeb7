"""Who is alive, among up to 32 members that all heartbeat to all: the decisions, without effects.

    step(state, input, now) -> (state, outputs)

    (unknown) ──Joined──► ALIVE ──6 s silent, or its link reset and redial failed──► SUSPECTED ──8 s silent──► GONE
                          ▲  ▲                                                          │                       │
                          │  └──────────────────────── Heard ───────────────────────────┴───────────────────────┘
                          └─Joined─ LEFT ◄─ SaidGoodbye, from anywhere; nothing but a new Joined leads out

Silence is measured on the receiver's clock from the last byte heard. When this process itself stood still (a tick
comes more than `STALL_S` late), that time counts as nobody's silence: the others' bytes wait in its sockets. It then
listens for as long again, at most `LISTEN_S`, before it judges anybody: after a long sleep the others have closed
their links, and those must come up first. A member that is gone and speaks again has recovered; a goodbye is final.
Who has been away for `FORGET_S` is forgotten, and so is the one longest gone where a newcomer needs its place.
"""

from typing import Annotated, assert_never

import msgspec
from msgspec import Meta

from weft.cost.training import HEARTBEAT_S
from weft.ids import PeerId

SUSPECT_S = 6.0  # three heartbeats missed
GONE_S = 8.0
FORGET_S = 600.0  # a member away for so long is redialled no more; it still finds its way back by itself
TICK_S = 0.5
STALL_S = 0.5  # a tick that is so late: a stopped process, a sleeping machine or a held lock
LISTEN_S = 10.0  # for links to be dialled anew after a long sleep: a network that wakes up takes its time
MAX_MEMBERS = 32  # all-to-all: 31 x 31 heartbeats every 2 s; of more, swim.py decides who is alive

Status = Annotated[str, Meta(pattern="alive|suspected|gone|left")]


class Member(msgspec.Struct, frozen=True, kw_only=True):
    status: Status
    heard_at: float  # on the receiver's clock, moved on by what it slept itself


class State(msgspec.Struct, frozen=True, kw_only=True):
    members: dict[PeerId, Member] = {}  # never changed in place
    ticked_at: float | None = None
    heartbeat_at: float = 0.0  # when the next is due
    judges_from: float = 0.0  # until then, nobody is suspected or gone


# --- inputs ---


class Tick(msgspec.Struct, frozen=True):
    """Time has passed. Due every `TICK_S`, and at `next_due`."""


class Joined(msgspec.Struct, frozen=True):
    """A heartbeat of `peer` arrived, from a process that has not said goodbye."""

    peer: PeerId


class Heard(msgspec.Struct, frozen=True):
    """A byte of `peer` arrived at `at`."""

    peer: PeerId
    at: float


class LinkLost(msgspec.Struct, frozen=True):
    peer: PeerId
    reason: str


class RedialFailed(msgspec.Struct, frozen=True):
    peer: PeerId
    reason: str


class SaidGoodbye(msgspec.Struct, frozen=True):
    peer: PeerId


Input = Tick | Joined | Heard | LinkLost | RedialFailed | SaidGoodbye


# --- outputs ---


class SendHeartbeat(msgspec.Struct, frozen=True):
    """Send one to every linked peer: it may be what makes this peer a member there, or brings it back."""


class Redial(msgspec.Struct, frozen=True):
    """Try at once whether `peer` can still be reached; answer with Heard or RedialFailed."""

    peer: PeerId


class New(msgspec.Struct, frozen=True):
    peer: PeerId


class Suspected(msgspec.Struct, frozen=True):
    peer: PeerId
    silent_s: float
    reason: str


class Recovered(msgspec.Struct, frozen=True):
    peer: PeerId


class Gone(msgspec.Struct, frozen=True):
    peer: PeerId
    silent_s: float


class Left(msgspec.Struct, frozen=True):
    peer: PeerId


class Forgotten(msgspec.Struct, frozen=True):
    """Follows on Gone or Left, and is no change for others: if `peer` ever comes back, it is new."""

    peer: PeerId


class Full(msgspec.Struct, frozen=True):
    """`peer` is no member, because `MAX_MEMBERS` are present."""

    peer: PeerId


class Stalled(msgspec.Struct, frozen=True):
    """This process itself stood still for `stall_s`, up to now."""

    stall_s: float


Change = New | Suspected | Recovered | Gone | Left
Output = Stalled | SendHeartbeat | Redial | Change | Forgotten | Full


def step(state: State, event: Input, now: float) -> tuple[State, tuple[Output, ...]]:
    """Return the state after `event` at `now` (seconds, never going back) and what is to be done."""
    match event:
        case Tick():
            return _tick(state, now)
        case Joined(peer=peer):
            return _join(state, peer, now)
        case Heard(peer=peer, at=at):
            return _hear(state, peer, at)
        case LinkLost(peer=peer):
            known = state.members.get(peer)
            return state, (Redial(peer),) if known is not None and known.status in ("alive", "suspected") else ()
        case RedialFailed(peer=peer, reason=reason):
            return _suspect(state, peer, now, reason)
        case SaidGoodbye(peer=peer):
            known = state.members.get(peer)
            if known is None or known.status == "left":
                return state, ()
            return _with(state, peer, Member(status="left", heard_at=now)), (Left(peer),)
        case _:
            assert_never(event)


def next_due(state: State, now: float) -> float:
    """Return when the next tick has something to do, at most `TICK_S` from `now`."""
    due = [(now if state.ticked_at is None else state.ticked_at) + TICK_S, state.heartbeat_at]
    for member in state.members.values():
        if member.status == "alive":
            due.append(max(member.heard_at + SUSPECT_S, state.judges_from))
        elif member.status == "suspected":
            due.append(max(member.heard_at + GONE_S, state.judges_from))
    return max(now, min(due))


def _tick(state: State, now: float) -> tuple[State, tuple[Output, ...]]:
    outputs: list[Output] = []
    stall_s = own_stall(state.ticked_at, now)
    if stall_s:
        state = _forgive(state, now, stall_s)
        outputs.append(Stalled(stall_s))
    is_judge = now >= state.judges_from
    for peer, member in sorted(state.members.items()):
        silent_s = now - member.heard_at
        if is_judge and member.status == "alive" and silent_s >= SUSPECT_S:
            state, suspected = _suspect(state, peer, now, f"silent for {silent_s:.1f} s")
            outputs.extend(suspected)
        if is_judge and state.members[peer].status == "suspected" and silent_s >= GONE_S:
            state = _with(state, peer, Member(status="gone", heard_at=member.heard_at))
            outputs.append(Gone(peer, silent_s))
        if state.members[peer].status in ("gone", "left") and silent_s >= FORGET_S:
            state = _without(state, peer)
            outputs.append(Forgotten(peer))
    if now >= state.heartbeat_at:
        outputs.append(SendHeartbeat())
        state = msgspec.structs.replace(state, heartbeat_at=now + HEARTBEAT_S)
    return msgspec.structs.replace(state, ticked_at=now), tuple(outputs)


def own_stall(ticked_at: float | None, now: float) -> float:
    """Return for how long this process stood still, whose ticks lie no further apart than `TICK_S`; 0 if it did not."""
    late_s = 0.0 if ticked_at is None else now - ticked_at - TICK_S
    return late_s if late_s > STALL_S else 0.0


def _forgive(state: State, now: float, stall_s: float) -> State:
    members = {
        peer: Member(status=member.status, heard_at=min(now, member.heard_at + stall_s))
        for peer, member in state.members.items()
    }
    return msgspec.structs.replace(state, members=members, judges_from=now + min(stall_s, LISTEN_S))


def _join(state: State, peer: PeerId, now: float) -> tuple[State, tuple[Output, ...]]:
    known = state.members.get(peer)
    if known is not None and known.status != "left":
        return _hear(state, peer, now)
    num_present = sum(member.status != "left" for member in state.members.values())
    outputs: list[Output] = []
    if num_present >= MAX_MEMBERS - 1:  # and this peer itself
        gone = [(member.heard_at, gone) for gone, member in state.members.items() if member.status == "gone"]
        if not gone:
            return state, (Full(peer),)
        longest = min(gone)[1]
        state = _without(state, longest)
        outputs.append(Forgotten(longest))
    return _with(state, peer, Member(status="alive", heard_at=now)), (*outputs, New(peer))


def _hear(state: State, peer: PeerId, at: float) -> tuple[State, tuple[Output, ...]]:
    known = state.members.get(peer)
    if known is None or known.status == "left" or at <= known.heard_at:
        return state, ()
    heard = _with(state, peer, Member(status="alive", heard_at=at))
    return heard, () if known.status == "alive" else (Recovered(peer),)


def _suspect(state: State, peer: PeerId, now: float, reason: str) -> tuple[State, tuple[Output, ...]]:
    known = state.members.get(peer)
    if known is None or known.status != "alive" or now < state.judges_from:
        return state, ()
    suspected = Member(status="suspected", heard_at=known.heard_at)
    return _with(state, peer, suspected), (Suspected(peer, now - known.heard_at, reason),)


def _without(state: State, peer: PeerId) -> State:
    members = {other: member for other, member in state.members.items() if other != peer}
    return msgspec.structs.replace(state, members=members)


def _with(state: State, peer: PeerId, member: Member) -> State:
    return msgspec.structs.replace(state, members={**state.members, peer: member})
