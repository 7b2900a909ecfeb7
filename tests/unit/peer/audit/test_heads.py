"""What a peer knows of the rounds before: without a gap, and how long ago they were."""

from pathlib import Path

from msgspec import UNSET
from msgspec.structs import replace

from charters import charter
from unit.peer.snapshots import manifest
from weft.events import Event
from weft.ids import Digest, PeerId, Round, Tokens
from weft.peer.audit.heads import Heads
from weft.sync.merge.method import OUTER
from weft.sync.records.charter import Quarantined
from weft.sync.records.index import StateIndex, VectorIndex
from weft.sync.records.messages import Counted, HeldWork, Manifest
from weft.wire import digest, digest_of

STATE = StateIndex(vectors=(VectorIndex(name=OUTER, num=0, chunks=()),))


def a_row(num: int) -> list[Manifest]:
    """Return manifests of which each follows on the one before."""
    row = [manifest(0)]
    while len(row) < num:
        row.append(replace(manifest(len(row)), previous=digest_of(row[-1])))
    return row


def noted(path: Path, *row: Manifest) -> Heads:
    events: list[Event] = []
    heads = Heads(path, events.append)
    for number, each in enumerate(row):
        heads.note(each, charter(1), STATE, float(number))
    assert events == []
    return heads


def test_what_is_known_up_to_a_round_has_no_gap_and_outlives_a_process(tmp_path: Path) -> None:
    row = a_row(6)
    noted(tmp_path / "heads.bin", *row[:2], *row[3:])
    heads = noted(tmp_path / "heads.bin")
    assert [head.manifest for head in heads.until(digest_of(row[5]))] == row[3:]
    assert [head.manifest for head in heads.until(digest_of(row[1]))] == row[:2]
    assert heads.until(Digest("ab" * 32)) == []
    assert heads.oldest == 3


def test_a_process_that_has_begun_takes_no_round_of_long_ago_for_a_recent_one(tmp_path: Path) -> None:
    """It has seen none of them itself: what the chain says is what counts."""
    heads = noted(tmp_path / "heads.bin")
    assert heads.is_recent(Round(95), Round(100), 8, 60.0, 0.0)
    assert not heads.is_recent(Round(5), Round(100), 8, 60.0, 0.0)


def test_short_rounds_are_recent_for_some_time(tmp_path: Path) -> None:
    heads = noted(tmp_path / "heads.bin", *a_row(20))
    assert heads.is_recent(Round(5), Round(19), 8, 60.0, 50.0)
    assert not heads.is_recent(Round(5), Round(19), 8, 60.0, 66.0)


def test_a_work_waits_in_one_round_and_counts_in_another(tmp_path: Path) -> None:
    work, row = digest(b"work"), a_row(4)
    peer = PeerId("ab" * 32)
    row[1] = replace(row[1], held=(HeldWork(peer=peer, work=work),))
    brings = Counted(peer=peer, tokens=Tokens(8), payload=digest(b"payload"), work=work)
    row[3] = replace(row[3], contributions=(brings,))
    heads = noted(tmp_path / "heads.bin", *row[:2])
    assert (heads.held_in(work), heads.counted_in(work)) == (1, None)
    heads = noted(tmp_path / "heads.bin", *row[2:])
    assert (heads.held_in(work), heads.counted_in(work)) == (1, 3)
    heads.forget()
    assert (heads.held_in(work), heads.counted_in(work)) == (None, None)


def test_settled_members_are_drawn_by_what_held_before_the_round(tmp_path: Path) -> None:
    a, b, c, new = (PeerId(each * 64) for each in "abcd")
    first, second = a_row(2)
    first = replace(first, members=(a, b, c, new))
    second = replace(second, previous=digest_of(first), members=(a, b, new))
    rules = replace(charter(1), quarantined=(Quarantined(peer=new, left=1),))
    events: list[Event] = []
    heads = Heads(tmp_path / "heads.bin", events.append)
    heads.note(first, rules, STATE, 0.0)
    heads.note(second, charter(1), STATE, 0.0)
    assert heads.judges(digest_of(second), a) == (a, b, c)
    assert heads.judges(digest_of(second), new) == (a, b, c)
    assert heads.electorate(digest_of(second)) == (a, b, c, new)
    assert heads.judges(digest_of(first), a) == (), "what held before it is not known"


def test_what_a_state_is_called_outlives_a_process(tmp_path: Path) -> None:
    noted(tmp_path / "heads.bin", *a_row(3))
    heads = noted(tmp_path / "heads.bin")
    assert [head.index for head in heads.newest(2)] == [STATE, STATE]
    assert [head.manifest.round for head in heads.newest(2)] == [1, 2]


def test_what_was_brought_in_the_place_of_what_waited_clears_only_itself(tmp_path: Path) -> None:
    """Who is settled by other works may still bring the first, at which nobody has looked."""
    new, first, second = PeerId("d" * 64), digest(b"replaced"), digest(b"cleared")
    row = a_row(3)
    waits = Quarantined(peer=new, left=1, work=second, round=Round(1))
    heads = Heads(tmp_path / "heads.bin", lambda _event: None)
    heads.note(replace(row[0], held=(HeldWork(peer=new, work=first),)), charter(1), STATE, 0.0)
    for each, is_cleared in zip(row[1:], (UNSET, True), strict=True):
        heads.note(each, replace(charter(1), quarantined=(replace(waits, is_cleared=is_cleared),)), STATE, 0.0)
    after = replace(row[2], round=Round(3), previous=digest_of(row[2]))
    heads.note(after, charter(1), STATE, 0.0)
    assert heads.held_in(first) == 0
    assert [heads.was_cleared(digest_of(each), second) for each in (row[2], after)] == [False, True]
    assert not heads.was_cleared(digest_of(after), first)
