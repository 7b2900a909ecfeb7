"""What a killed peer had not saved."""

from pathlib import Path

import pytest

from commits import committed
from weft.events import (
    CheckpointSaved,
    CountedThrough,
    Entry,
    Event,
    PayloadOffered,
    PeerStarted,
    PeerStopped,
    RoundCommitted,
    StageLeft,
    StepDone,
    WorkDropped,
)
from weft.ids import Digest, PeerId, Round, RunId, Step, Tokens
from weft.observe.unsaved import TAIL_NBYTES, Unsaved, last_entries, of_killed, told

ME, OTHER = PeerId("a" * 64), PeerId("b" * 64)
STARTED = PeerStarted(run=RunId("e" * 64), name="anna", software="", device="cpu", num_parameters=1)
STOPPED = PeerStopped(reason="asked to")
STEP = StepDone(step=Step(1), loss=1.0, learning_rate=0.1, gradient_norm=1.0, num_tokens=100, duration_s=1.0)
OFFERED = PayloadOffered(round=Round(7), tokens=Tokens(100), nbytes=1)
SAVED = CheckpointSaved(path="", round=Round(7), digest=Digest("d" * 64), nbytes=1)


def commit(round: int, *contributors: PeerId) -> RoundCommitted:
    return committed(round=Round(round), contributors=contributors, committed_tokens=Tokens(100 * round))


def left_by(*events: Event) -> tuple[int, int, int | None] | None:
    found = of_killed(Entry(v=1, at=float(at), peer=ME, event=event) for at, event in enumerate(events))
    return None if found is None else (found.made, found.offered, found.round)


@pytest.mark.parametrize(
    ("events", "left"),
    [
        ((), None),
        ((STARTED, STEP, STOPPED), None),
        ((STARTED, StageLeft(stage=0, reason="")), None),
        ((STARTED,), (0, 0, None)),
        ((STARTED, STEP, STEP), (200, 0, None)),
        ((STARTED, STEP, STOPPED, STARTED), (0, 0, None)),
        ((STEP, OFFERED, commit(7, ME, OTHER)), (0, 0, 7)),
        ((STEP, OFFERED, STEP, commit(7, ME, OTHER)), (100, 0, 7)),
        ((STEP, OFFERED, commit(7, OTHER)), (100, 0, 7)),
        ((STEP, OFFERED, CountedThrough(round=Round(7), tokens=Tokens(100)), commit(7, OTHER)), (0, 0, 7)),
        ((commit(6, ME), STEP, OFFERED, STEP), (100, 100, 6)),
        ((commit(6, ME), STEP, OFFERED, STEP, SAVED), (0, 0, 6)),
        ((STEP, STEP, WorkDropped(tokens=Tokens(100), reason="")), (100, 0, None)),
    ],
)
def test_what_no_round_counted_and_no_checkpoint_has_is_lost(
    events: tuple[Event, ...], left: tuple[int, int, int | None] | None
) -> None:
    assert left_by(*events) == left


@pytest.mark.parametrize(
    ("made", "offered", "words"),
    [
        (0, 0, "last time: nothing that it had trained is lost"),
        (1024, 0, "last time: 1,024 tokens that it had trained after round 6 were not saved and are lost"),
        (0, 512, "last time: 512 tokens that it had sent after round 6 count if the others had them by then"),
        (1024, 512, "are lost, and 512 tokens that it had sent after round 6 count if the others had them by then"),
    ],
)
def test_it_is_told_in_words(made: int, offered: int, words: str) -> None:
    assert told(Unsaved(made=made, offered=offered, round=Round(6))).endswith(words)


def test_only_the_end_of_a_long_log_is_read_and_one_that_is_none_says_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    assert last_entries(log) == []
    line = b'{"v":1,"at":1.0,"peer":"aa","event":{"type":"PeerStopped","reason":"x"}}\n'
    log.write_bytes(line * (2 * TAIL_NBYTES // len(line)))
    assert 0 < len(last_entries(log)) <= TAIL_NBYTES // len(line)
    log.write_bytes(line + b"what is that\n")
    assert last_entries(log) == []
