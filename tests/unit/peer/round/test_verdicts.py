"""What members have found of each other's work: how long it counts, and that it outlives a process."""

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from unit.peer.round.test_acts_pending import BASE, IDENTITIES, FakeNode
from weft.errors import DiskFull
from weft.events import Event, Notice
from weft.ids import PeerId, Round
from weft.keys import Identity
from weft.peer.round.acts import PendingActs, letters_file, lies_file
from weft.peer.round.verdicts import MAX_VERDICTS, kept, still, warrants
from weft.store import home
from weft.sync.governance import Void
from weft.sync.records.acts import Finding, Outcome, Weighed
from weft.sync.records.charter import AuditTerms, FalseWork, Quarantined, Struck, Unanswered
from weft.sync.records.counters import WITHIN
from weft.sync.records.messages import Base
from weft.wire import Signed, digest, seal

AUDITED = replace(BASE, charter=replace(BASE.charter, audits=AuditTerms(rate=0.1, trace_every=1)))
ACCUSED, OTHERS = IDENTITIES[0], IDENTITIES[1:]
WORK = digest(b"work")


def found(by: Identity, outcome: Outcome = "differs", round: int = 4, work: str = WORK) -> Signed:
    verdict = Finding(run=BASE.run, peer=ACCUSED.peer, round=Round(round), work=work, before=0, outcome=outcome)
    return seal(by, verdict)


def cast(*letters: Signed, base: Base = AUDITED) -> Any:
    all_of_them: Any = {}
    for letter in letters:
        all_of_them = kept(all_of_them, base, letter)
    return all_of_them


def signers(all_of_them: Any, base: Base = AUDITED) -> list[list[PeerId]]:
    return [[letter.signer for letter in each.letters] for each in warrants(all_of_them, base)]


def test_more_than_half_of_who_votes_now_is_a_warrant() -> None:
    two, three = cast(*map(found, OTHERS[:2])), cast(*map(found, OTHERS))
    assert signers(two) == []
    assert signers(three) == [[each.peer for each in OTHERS]]
    without_one = replace(AUDITED, electorate=tuple(each.peer for each in IDENTITIES[:3]))
    assert signers(three, without_one) == [[each.peer for each in OTHERS[:2]]], "who has left is not counted"
    assert kept(three, AUDITED, found(OTHERS[0])) is three


@pytest.mark.parametrize(
    "change",
    [
        {"charter": replace(AUDITED.charter, struck=(Struck(peer=ACCUSED.peer, round=Round(4)),))},
        {"electorate": tuple(each.peer for each in OTHERS)},
        {"round": Round(4)},
    ],
)
def test_what_is_dealt_with_or_of_a_round_to_come_is_not_kept(change: dict[str, Any]) -> None:
    base = replace(AUDITED, **change)
    with pytest.raises(Void):
        cast(found(OTHERS[0]), base=base)
    assert still(cast(found(OTHERS[0])), base) == {}


def test_who_was_struck_out_by_evidence_is_still_judged_as_to_what_was_counted() -> None:
    weighed = Weighed(branch="ab" * 32, manifest="cd" * 32, weights=(1,), late=0, method="ef" * 32)
    verdict = Finding(run=BASE.run, peer=ACCUSED.peer, round=4, work=WORK, before=0, outcome="differs", weighed=weighed)
    charter = replace(AUDITED.charter, struck=(Struck(peer=ACCUSED.peer, round=Round(5)),))
    base = replace(AUDITED, charter=charter, electorate=tuple(each.peer for each in OTHERS))
    before = cast(*(seal(each, verdict) for each in OTHERS[:2]), found(OTHERS[2]))
    assert {judged.peer: len(each) for judged, each in still(before, base).items()} == {ACCUSED.peer: 2}
    assert signers(cast(*(seal(each, verdict) for each in OTHERS[:2]), base=base), base) == [
        [each.peer for each in OTHERS[:2]]
    ]
    assert still(before, replace(base, round=Round(4 + WITHIN + 1))) == {}
    noted = replace(charter, false_works=(FalseWork(peer=ACCUSED.peer, round=4, weighed=weighed),))
    assert still(before, replace(base, charter=noted)) == {}


def test_a_round_that_was_counted_as_unanswered_is_not_judged_again() -> None:
    counted = Unanswered(peer=ACCUSED.peer, rounds=(Round(4),))
    base = replace(AUDITED, charter=replace(AUDITED.charter, unanswered=(counted,)))
    both = cast(found(OTHERS[0], "unanswered"), found(OTHERS[0]))
    assert [judged.outcome for judged in still(both, base)] == ["differs"]


def test_one_member_has_no_more_than_so_many_verdicts() -> None:
    full = cast(*(found(OTHERS[0], round=4, work=digest(b"%d" % number)) for number in range(MAX_VERDICTS)))
    with pytest.raises(Void, match="wait already"):
        kept(full, AUDITED, found(OTHERS[0], round=3))


def test_nobody_is_kept_from_saying_what_it_finds_by_who_gives_it_no_answers() -> None:
    silent = [found(OTHERS[0], "unanswered", work=digest(b"%d" % number)) for number in range(MAX_VERDICTS)]
    other, false = found(OTHERS[1], "unanswered", work=digest(b"0")), found(OTHERS[0])
    told = [*silent, other, false]
    one, another = cast(*told), {}
    for letter in [false, other, *reversed(silent)]:  # they are told again and again, and come in any order
        with suppress(Void):
            another = kept(another, AUDITED, letter)
    assert one == another
    assert sum(OTHERS[0].peer in each for each in one.values()) == MAX_VERDICTS
    assert [by for each, by in one.items() if each.outcome == "differs"] == [{OTHERS[0].peer: false}]
    assert sum(OTHERS[1].peer in each for each in one.values()) == 1, "nobody else's give way"


def waiting(**more: Any) -> Base:
    """Return the round in which what one member in quarantine has brought waits, and another is in it, too."""
    mine = Quarantined(peer=ACCUSED.peer, left=2, work=WORK, round=Round(4), **more)
    both = tuple(sorted((mine, Quarantined(peer=OTHERS[0].peer, left=1)), key=lambda each: each.peer))
    return replace(AUDITED, charter=replace(AUDITED.charter, quarantined=both))


def test_more_than_half_of_the_settled_members_clear_what_waits() -> None:
    base = waiting()
    one, both = cast(found(OTHERS[1], "equal"), base=base), [found(each, "equal") for each in OTHERS[1:]]
    assert signers(one, base) == []
    assert signers(cast(*both, base=base), base) == [sorted(each.peer for each in OTHERS[1:])]
    with pytest.raises(Void, match="in quarantine itself"):
        cast(found(OTHERS[0], "equal"), base=base)


@pytest.mark.parametrize("base", [AUDITED, waiting(is_cleared=True)], ids=["settled", "cleared"])
def test_where_nothing_waits_what_is_right_is_not_told(base: Base) -> None:
    with pytest.raises(Void, match="finds no fault"):
        cast(found(OTHERS[1], "equal"), base=base)
    assert still(cast(found(OTHERS[1], "equal"), base=waiting()), base) == {}


def pending(folder: Path, base: Base, events: list[Event]) -> PendingActs:
    """Return the acts of a process whose files lie there."""
    chain: Any = SimpleNamespace(base=base, charter=base.charter)
    node: Any = FakeNode()
    letters, lies = letters_file(folder / "awaiting.bin"), lies_file(folder / "lies.bin")
    return PendingActs(node, chain, events.append, letters, lies, lambda: None)


def test_what_was_heard_and_found_outlives_a_process(tmp_path: Path) -> None:
    first = pending(tmp_path, AUDITED, [])
    assert [first.take(found(each)) for each in OTHERS] == [None] * 3
    (wanted,) = first.warrants()
    second = pending(tmp_path, AUDITED, [])
    assert second.warrants() == ()
    second.recall()
    assert second.warrants() == (wanted,)
    later = replace(AUDITED, electorate=tuple(each.peer for each in OTHERS))
    third = pending(tmp_path, later, [])
    third.recall()
    assert third.findings() == [], "it was dealt with meanwhile"


def test_what_a_round_has_dealt_with_is_gone_from_the_disk(tmp_path: Path) -> None:
    acts = pending(tmp_path, AUDITED, [])
    acts.take(found(OTHERS[0]))
    acts._chain.base = replace(AUDITED, electorate=tuple(each.peer for each in OTHERS))  # type: ignore[misc]
    manifest: Any = SimpleNamespace(acts=())
    acts.follow(manifest)
    assert letters_file(tmp_path / "awaiting.bin").read().letters == ()


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise DiskFull("no room")

    events: list[Event] = []
    acts = pending(tmp_path, AUDITED, events)
    monkeypatch.setattr(home, "write_atomically", full)
    assert acts.take(found(OTHERS[0])) is None
    assert [type(event) for event in events] == [Notice]
    assert len(acts.findings()) == 1
