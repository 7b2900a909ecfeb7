"""An observer: hears what peers tell of a run, and takes no part in it.

    observer                               a few peers, eight at most
      BulletinRequest ───────────────────►   every two seconds
      ◄───────────────────── BulletinAnswer  what happened since, signed
      BulletinRequest(of = another) ─────►   of those that they are linked to, eight of each a time, in turn
      ◄───────────────────── BulletinAnswer  what that one signed

It sends no heartbeat, so it is no member: nobody waits for it, no vote is its own. What a peer tells of itself it has
signed; what it tells of others is its word. Each entry names the peer that said it. What was decided it also checks
for itself (`light_client`), and says whose word differs. Of a run with stages it checks what each stage decided, at
those who compute it, as peers tell.

An event that is told here can have happened: numbers in bounds, names that are names. Nobody here knows whether it did,
but views may count, divide and draw without asking again.

Failure:
- a peer does not answer: the others are asked, and it is asked again.
- a peer tells what it has not signed, or what is no bulletin: it is not heard for a while, and a notice says so.
- one hands on what another signed in an earlier process of its: that is left out.
- a line is of a later version, no event, or one that cannot be: it is left out, and counted.
"""

import asyncio
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cache, partial
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from weft import events
from weft.clock import Clock
from weft.errors import ConfigError, NetError, PeerError, Refused, WireError
from weft.ids import BranchId, Digest, PeerId, RunId, several, short
from weft.keys import verify
from weft.log import read_lines
from weft.net.channel import Channel
from weft.net.node import Node
from weft.observe.light_client import LightClient
from weft.observe.redact import public
from weft.observe.telemetry import MAX_LINES, WINDOW_S, Bulletin, BulletinAnswer, BulletinRequest
from weft.run.staged import channel_of
from weft.tasks import Tasks
from weft.wire import Signed, unseal

MAX_COUNT = 1 << 53
MAX_QUANTITY = 1e15
_NAMES = (PeerId, Digest, RunId, BranchId)
_NAME = re.compile(r"[0-9a-f]{64}")


def is_plausible(event: events.Event) -> bool:
    return all(_is(getattr(event, name), hint) for name, hint in _hints(type(event)).items())


@cache
def _hints(kind: type[events.Event]) -> dict[str, Any]:
    return get_type_hints(kind)


def _is(value: Any, hint: Any) -> bool:
    if hint in _NAMES:
        return isinstance(value, str) and _NAME.fullmatch(value) is not None
    if get_origin(hint) in (Union, UnionType):
        return any(_is(value, each) for each in get_args(hint))
    if isinstance(value, tuple):
        return all(_is(each, get_args(hint)[0]) for each in value)
    if isinstance(value, dict):
        of_key, of_value = get_args(hint)
        return all(_is(key, of_key) and _is(each, of_value) for key, each in value.items())
    if isinstance(value, bool) or value is None:
        return True
    if isinstance(value, int):
        return 0 <= value <= MAX_COUNT
    if isinstance(value, float):
        return math.isnan(value) or abs(value) <= MAX_QUANTITY
    return True


MAX_HEARD = 8  # peers
MAX_RELAYED = 8  # others that each of them is asked of, in two seconds
FIRST_S = 2 * WINDOW_S  # until who has just begun has something to tell
CALL_S = 10.0
DEAF_S = 60.0  # to who told what it had not signed
MAX_KNOWN = 4096  # peers, whatever they tell of
MAX_LINKED = 256  # others to which one peer says that it is linked
MAX_ANSWERS = 64  # of one peer at once: all that it keeps comes in half of these
MAX_HELD = 100_000  # entries of a first look, that are put in order: some hundred MB. A liar's many lines hold no more
ONCE_S = 30.0  # for all that is told at once, however slow some are
MOST_AHEAD_S = 3600.0  # of this clock: what is said to happen later happens now


@dataclass
class _Heard:
    """How far one peer was heard."""

    began_ms: int = 0
    number: int = -1
    not_before: float = 0.0  # on this clock
    asked_at: float = -math.inf
    linked: dict[PeerId, None] = field(default_factory=dict)  # to whom it is, by its word


class Observer:
    """Of one run.

    Args:
        on_entry: is given what peers tell, of each in order. What the first look brings is a history of many minutes of
            several peers: that is given as it happened, in the order of their clocks.
        stages: the runs of its stages; none where it has no stages.
    """

    def __init__(
        self,
        node: Node,
        run: RunId,
        clock: Clock,
        on_entry: Callable[[events.Entry], None],
        stages: Sequence[RunId] = (),
    ) -> None:
        self._node = node
        self._run = run
        self._clock = clock
        self._on_entry = on_entry
        self._held: list[events.Entry] | None = []  # what the first look brings, until it is over
        self._heard: dict[PeerId, _Heard] = {}
        self._sides = [Channel(node, channel_of(stage), each, 0) for stage, each in enumerate(stages)]
        self._provings: dict[int | msgspec.UnsetType, LightClient] = {
            stage: LightClient(side, clock, partial(self._say_of, stage)) for stage, side in enumerate(self._sides)
        } or {msgspec.UNSET: LightClient(node, clock, self._say)}

    @property
    def heard(self) -> tuple[PeerId, ...]:
        return tuple(sorted(peer for peer, heard in self._heard.items() if heard.number >= 0))

    async def once(self) -> None:
        """Hear all that the peers keep which the node is linked to; wait a little for those that have just begun."""
        until, self._held = self._clock.now() + FIRST_S, []
        try:
            async with asyncio.timeout(ONCE_S):
                while True:
                    chosen = self._chosen()
                    await asyncio.gather(*map(self._ask_around, chosen))
                    if set(chosen) <= set(self.heard) or self._clock.now() >= until:
                        return
                    await asyncio.sleep(WINDOW_S / 4)
        except TimeoutError:
            pass
        finally:
            self._hand_out()

    async def watch(self) -> None:
        """Hear the peers that the node is linked to until this is cancelled."""
        asking: dict[PeerId, asyncio.Task[None]] = {}
        async with aclosing(Tasks(self._failed)) as tasks:
            for proving in self._provings.values():
                tasks.spawn(proving.watch())
            while True:
                asking = {peer: task for peer, task in asking.items() if not task.done()}
                for peer in self._chosen():
                    if peer not in asking:
                        asking[peer] = tasks.spawn(self._ask_around(peer))
                if self._held is not None and asking:
                    await asyncio.wait(asking.values(), timeout=FIRST_S)
                    self._hand_out()
                await asyncio.sleep(WINDOW_S)

    def _chosen(self) -> Sequence[PeerId]:
        """Return whom to ask: those that were heard before first, so that they tell all."""
        now = self._clock.now()
        linked = [peer for peer in self._node.peers if self._of(peer).not_before <= now]
        return sorted(linked, key=lambda peer: (self._of(peer).number < 0, peer))[:MAX_HEARD]

    def _of(self, peer: PeerId) -> _Heard:
        if peer not in self._heard and len(self._heard) >= MAX_KNOWN:
            others = self._heard.keys() - set(self._node.peers)
            del self._heard[min(others, key=lambda other: (self._heard[other].asked_at, other))]
        return self._heard.setdefault(peer, _Heard())

    async def _ask_around(self, peer: PeerId) -> None:
        """Hear a peer, and through it some of those that nothing else leads to: who was not asked for longest first."""
        is_heard = await self._ask(peer, peer)
        others = {other: self._of(other).asked_at for other in self._of(peer).linked.keys() - set(self._chosen())}
        for other in sorted(others, key=lambda other: (others[other], other))[:MAX_RELAYED]:
            if not is_heard:
                return
            if self._of(other).asked_at <= self._clock.now() - WINDOW_S:  # else another peer has just been asked
                is_heard = await self._ask(peer, other)

    async def _ask(self, peer: PeerId, of: PeerId) -> bool:
        """Hear from `peer` what `of`, itself or another, has signed; return whether it may be asked for more."""
        heard = self._of(of)
        heard.asked_at = self._clock.now()
        whom = None if of == peer else of
        try:
            for _ in range(MAX_ANSWERS):
                before = heard.began_ms, heard.number
                request = BulletinRequest(run=self._run, of=whom, began_ms=heard.began_ms, after=heard.number)
                answer = await self._node.call(peer, request, BulletinAnswer, deadline_s=CALL_S)
                for signed in answer.bulletins:
                    self._hear(peer, of, heard, signed)
                if not answer.has_more or (heard.began_ms, heard.number) == before:
                    break
        except WireError as error:
            self._of(peer).not_before = self._clock.now() + DEAF_S
            whose = "it" if of == peer else short(of)
            self._tell(f"{short(peer)} passed on what {whose} did not sign; this view ignores it for a minute: {error}")
            return False
        except (PeerError, NetError, Refused):
            pass  # it is asked again
        return True

    def _hear(self, teller: PeerId, peer: PeerId, heard: _Heard, signed: Signed) -> None:
        bulletin = unseal(signed, Bulletin, verify)
        if signed.signer != peer or bulletin.run != self._run:
            raise WireError(f"a bulletin of {short(signed.signer)} in run {short(bulletin.run)}")
        if teller != peer and bulletin.began_ms < heard.began_ms:
            return
        is_same = bulletin.began_ms == heard.began_ms
        if is_same and bulletin.number <= heard.number:
            return
        num_missed = bulletin.number - heard.number - 1 if is_same else 0
        heard.began_ms, heard.number = bulletin.began_ms, bulletin.number
        entries = list(entries_of(bulletin, peer, self._clock.wall()))
        for entry in entries:
            note_links(heard.linked, entry.event)
            if isinstance(told := entry.event, events.RoundCommitted) and told.stage in self._provings:
                self._provings[told.stage].claimed(peer, told.branch, told.round, told.manifest)
            if isinstance(told, events.StagesSeen):
                self._meet(told)
            if getattr(entry.event, "remote", None) != self._node.peer:  # it is no news that this one looks
                self._give(entry)
        if num_lost := bulletin.num_dropped + len(bulletin.lines) - len(entries):
            many = several(num_lost, "event")
            self._tell(f"left out: {many} of {short(peer)}: it had no room for them, or this weft is older")
        if num_missed:
            self._tell(f"{num_missed * WINDOW_S:g} s of {short(peer)} are not shown: it no longer keeps them")

    def _meet(self, seen: events.StagesSeen) -> None:
        """Take up who can be asked what each stage decided."""
        for side, members in zip(self._sides, seen.members, strict=False):
            for peer in set(side.peers) - set(members):
                side.parted(peer, "it computes another stage")
            for peer in members:
                side.met(peer, 0)

    def _failed(self, error: Exception) -> None:
        self._tell(f"a fault in weft itself stopped part of this view: {error!r}")

    def _tell(self, text: str) -> None:
        self._say(events.Notice(text=text))

    def _say_of(self, stage: int, event: events.Event) -> None:
        self._say(msgspec.structs.replace(event, stage=stage))

    def _say(self, event: events.Event) -> None:
        self._give(events.Entry(v=events.VERSION, at=self._clock.wall(), peer=self._node.peer, event=event))

    def _give(self, entry: events.Entry) -> None:
        if self._held is None:
            self._on_entry(entry)
        else:
            self._held.append(entry)
            if len(self._held) >= MAX_HELD:
                self._hand_out()

    def _hand_out(self) -> None:
        """Give what the first look brought; what comes from now on is given at once.

        A peer that nobody has asked for long tells its newest word of each member with its oldest news, so the order in
        which it tells is not the one in which things happened.
        """
        held, self._held = self._held or (), None
        for entry in sorted(held, key=lambda entry: entry.at):
            self._on_entry(entry)


def note_links(linked: dict[PeerId, None], event: events.Event) -> None:
    """Keep up to whom a peer is linked, by what it tells."""
    match event:
        case events.MemberProgress(member=member, link=link) if link:
            if len(linked) < MAX_LINKED:
                linked[member] = None
        case events.StagesSeen(members=stages):  # all of a run with stages are linked to each other
            for member in [member for stage in stages for member in stage][: MAX_LINKED - len(linked)]:
                linked[member] = None
        case (
            events.MemberProgress(member=other)
            | events.LinkDown(remote=other)
            | events.MemberGone(member=other)
            | events.MemberLeft(member=other)
        ):
            linked.pop(other, None)


def entries_of(bulletin: Bulletin, signer: PeerId, now: float) -> Iterator[events.Entry]:
    """Yield what a bulletin tells, as far as it is known here.

    Words are held to what may be told at all, whatever its signer did, and times to this clock.

    Args:
        now: wall seconds.
    """
    for line in bulletin.lines[:MAX_LINES]:
        try:
            told = msgspec.json.decode(line)
            whole = msgspec.json.encode({"v": events.VERSION, "at": told["at"], "peer": signer, "event": told["event"]})
            found = list(read_lines([whole + b"\n"], short(signer)))
        except (msgspec.DecodeError, ConfigError, KeyError, TypeError, RecursionError, UnicodeDecodeError):
            continue
        for entry in found:
            if isinstance(entry.event, events.RoundProven):  # only who looks can check
                continue
            event, at = public(entry.event), entry.at if math.isfinite(entry.at) else now
            if event is not None and is_plausible(event):
                yield events.Entry(v=events.VERSION, at=min(max(at, 0.0), now + MOST_AHEAD_S), peer=signer, event=event)
