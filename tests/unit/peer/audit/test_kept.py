"""For how long a peer keeps what others may ask for of rounds gone by."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from unit.peer.snapshots import manifest
from weft.clock import VirtualClock
from weft.ids import Attempt, PeerId, Round, Tokens
from weft.peer.audit.kept import KEPT_ROUNDS, KEPT_S, Kept
from weft.peer.audit.outcome import ANSWER_ROUNDS
from weft.sync.records.counters import WITHIN
from weft.sync.records.messages import Collect, Contribution, list_of, payload_of
from weft.wire import digest

PARTS = (digest(b"one part"), digest(b"another"))
ME = PeerId("aa" * 32)
PLAN = Collect(
    attempt=Attempt(0), revision=0, contributions=(Contribution(peer=ME, tokens=Tokens(7), parts=PARTS),), owners=(ME,)
)


def kept(path: Path, clock: VirtualClock) -> Kept:
    context: Any = SimpleNamespace(
        clock=clock, folder=SimpleNamespace(traces=path), node=SimpleNamespace(serve_blobs=lambda *_, **__: None)
    )
    chain = SimpleNamespace(head=manifest(1))
    rounds: Any = SimpleNamespace(chain=chain, merger=SimpleNamespace(on_brought=lambda _: None))
    return Kept(context, rounds)


def until(clock: VirtualClock, made: Kept, round_s: float) -> tuple[int, float]:
    """Return after how many rounds, of so many seconds, the lists of a round are gone, and how long after the last that
    may take out what it has counted."""
    made.note(Round(1), PLAN)
    for number in range(1, 1000):
        made.sweep(replace(manifest(1), round=Round(number)))
        if made.listed(payload_of(PARTS)) is None:
            assert not made.is_listed(Round(1))
            return number - 1, clock.now() - WITHIN * round_s
        assert made.listed(payload_of(PARTS)) == list_of(PARTS)
        clock.advance(round_s)
    raise AssertionError("they are kept for ever")


def test_lists_are_kept_until_who_has_taken_a_work_out_last_is_audited(tmp_path: Path) -> None:
    clock = VirtualClock()
    num, _ = until(clock, kept(tmp_path, clock), 60.0)
    assert num == WITHIN + 2 * ANSWER_ROUNDS + 1
    assert num > KEPT_ROUNDS


def test_where_rounds_are_short_lists_are_kept_for_as_long_as_files(tmp_path: Path) -> None:
    clock = VirtualClock()
    num, after_s = until(clock, kept(tmp_path, clock), 1.0)
    assert num > WITHIN + 2 * ANSWER_ROUNDS + 1
    assert KEPT_S < after_s <= KEPT_S + 2.0
