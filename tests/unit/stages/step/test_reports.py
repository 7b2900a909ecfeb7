"""What members tell of payloads: of which round, by whom, and which of it a manifest counts."""

from types import SimpleNamespace
from typing import Any

from weft.ids import Digest, PeerId
from weft.pipeline.exactly_once import NONE, BatchId, Told
from weft.stages.messages import Tallied, tallied
from weft.stages.step.reports import MAX_KEPT, Reports, States

A, B, C = (PeerId(letter * 64) for letter in "abc")
BEFORE, PAYLOAD, OTHER = (Digest(digit * 64) for digit in "123")
SOME = Told(frozenset({BatchId(A, 1)}), NONE)


class Channel:
    """Its other end says nothing."""

    def __init__(self) -> None:
        self.peer, self.peers = A, (B, C)
        self.posted: list[tuple[PeerId, Any]] = []
        self.handlers: dict[type, Any] = {}

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
    assert (notes.brought(BEFORE), sorted(notes.beats(BEFORE))) == ([7], [7, 8])
    assert notes.of(BEFORE, [A, B, C]).keys() == {A, B}


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


def test_states_of_long_ago_are_forgotten() -> None:
    states = States()
    for number in range(MAX_KEPT + 1):
        states.note(Digest(f"{number:064x}"), number)
    assert states.beat_after(Digest(f"{0:064x}")) is None
    assert states.beat_after(Digest(f"{MAX_KEPT:064x}")) == MAX_KEPT
