"""What members tell of payloads: of which round, by whom, and which of it a manifest counts; and of states to come."""

import asyncio
from types import SimpleNamespace
from typing import Any

from weft.ids import Digest, PeerId
from weft.pipeline.exactly_once import NONE, BatchId, Told
from weft.stages.messages import Tallied, tallied
from weft.stages.step.barrier import MAX_AHEAD, MAX_KEPT, Reports, Snapshots

A, B, C = (PeerId(letter * 64) for letter in "abc")
BEFORE, PAYLOAD, OTHER = (Digest(digit * 64) for digit in "123")
SOME = Told(frozenset({BatchId(A, 1)}), NONE)


class Channel:
    """Its other end says nothing."""

    def __init__(self) -> None:
        self.peer, self.peers = A, (B, C)
        self.posted: list[tuple[PeerId, Any]] = []
        self.handlers: dict[type, Any] = {}
        self.processes = {B: b"1", C: b"1"}

    def is_linked(self, peer: PeerId) -> bool:
        return peer in self.peers

    def instance_of(self, peer: PeerId) -> bytes:
        return self.processes[peer] if peer in self.peers else b""

    def post(self, peer: PeerId, note: Any) -> None:
        self.posted.append((peer, note))

    def on_note(self, kind: type, handler: Any) -> None:
        self.handlers[kind] = handler

    def serve(self, kind: type, handler: Any) -> None:
        self.handlers[kind] = handler

    async def ask(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(tallied=None)


async def test_what_is_told_reaches_all_and_is_known_here() -> None:
    channel, looks = Channel(), list[int]()
    notes = Reports(channel, lambda: looks.append(1))  # type: ignore[arg-type]
    notes.tell(BEFORE, PAYLOAD, 7, SOME)
    assert [peer for peer, _ in channel.posted] == [B, C]
    assert notes.brought(BEFORE) == [7]
    assert (notes.brought(OTHER), notes.brought(None)) == ([], [])
    await channel.handlers[Tallied](B, tallied(BEFORE, None, 8, Told(NONE, NONE)))
    assert looks == [1]
    assert (notes.brought(BEFORE), sorted(notes.rounds(BEFORE))) == ([7], [7, 8])
    assert notes.of(BEFORE, [A, B, C]).keys() == {A, B}


async def test_what_was_told_is_not_to_come_once_who_told_it_is_gone_or_has_started_again() -> None:
    channel = Channel()
    notes = Reports(channel, lambda: None)  # type: ignore[arg-type]
    lost = asyncio.ensure_future(notes.until_lost(BEFORE))
    await channel.handlers[Tallied](B, tallied(BEFORE, PAYLOAD, 8, SOME))
    assert notes.is_coming(BEFORE)
    assert not notes.is_coming(OTHER)
    channel.peers = (C,)
    assert not notes.is_coming(BEFORE)
    channel.peers = (B, C)
    assert notes.is_coming(BEFORE), "its link was away, and it is the same"
    channel.processes[B] = b"2"
    assert not notes.is_coming(BEFORE)
    assert notes.brought(BEFORE) == [8], "a round may have counted it"
    await asyncio.wait_for(lost, 5.0)
    await channel.handlers[Tallied](B, tallied(BEFORE, OTHER, 8, SOME))
    assert notes.is_coming(BEFORE)
    notes.tell(BEFORE, PAYLOAD, 8, SOME)
    channel.peers = ()
    assert notes.is_coming(BEFORE), "this peer brings something itself"


async def test_a_report_counts_where_the_manifest_has_that_payload() -> None:
    notes = Reports(Channel(), lambda: None)  # type: ignore[arg-type]
    notes.tell(BEFORE, PAYLOAD, 7, SOME)
    one = SimpleNamespace(peer=A, payload=PAYLOAD, legacy=None)
    manifest: Any = SimpleNamespace(previous=BEFORE, contributions=(one,))
    assert await notes.reports(manifest, [A, B]) == {A: SOME}
    one.payload = OTHER  # of before a restart
    assert await notes.reports(manifest, [A, B]) == {}


async def test_what_was_told_anew_is_not_forgotten_with_what_was_told_before() -> None:
    notes = Reports(Channel(), lambda: None)  # type: ignore[arg-type]
    notes.tell(BEFORE, None, 7, SOME)
    old = notes.of(BEFORE, [A])
    notes.tell(BEFORE, PAYLOAD, 7, SOME)
    notes.forget(BEFORE, old)
    assert notes.brought(BEFORE) == [7]
    notes.forget(BEFORE, notes.of(BEFORE, [A]))
    assert notes.of(BEFORE, [A]) == {}


# --- states ---

HERE = Digest("ab" * 32)


class Pins:
    def __init__(self) -> None:
        self.num = 0

    async def __call__(self) -> None:
        self.num += 1


async def test_a_state_is_kept_as_its_round_is_over_once_for_all_who_ask() -> None:
    pins = Pins()
    snapshots = Snapshots(pins)
    asked = [asyncio.ensure_future(snapshots.at(5)) for _ in range(2)]
    await asyncio.sleep(0)
    await snapshots.settled(4, Digest("cd" * 32))
    assert pins.num == 0
    await snapshots.settled(5, HERE)
    assert [await each for each in asked] == [HERE, HERE]
    assert pins.num == 1


async def test_a_round_that_has_gone_by_or_is_skipped_is_too_late() -> None:
    pins = Pins()
    snapshots = Snapshots(pins)
    asked = asyncio.ensure_future(snapshots.at(6))
    await asyncio.sleep(0)
    await snapshots.settled(7, HERE)
    assert await asked is None
    assert await snapshots.at(7) is None
    assert await snapshots.at(8 + MAX_AHEAD) is None  # nobody has others remember what is never due
    assert pins.num == 0


async def test_who_stops_waiting_takes_nothing_from_others() -> None:
    snapshots = Snapshots(Pins())
    first, second = (asyncio.ensure_future(snapshots.at(1)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    await snapshots.settled(1, HERE)
    assert await second == HERE


async def test_states_of_long_ago_are_forgotten() -> None:
    states = Snapshots(Pins())
    for number in range(MAX_KEPT + 1):
        await states.settled(number, Digest(f"{number:064x}"))
    assert states.round_after(Digest(f"{0:064x}")) is None
    assert states.round_after(Digest(f"{MAX_KEPT:064x}")) == MAX_KEPT
