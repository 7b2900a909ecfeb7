"""Who is in quarantine after a manifest, and what of it may count."""

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from model.world import first_base
from weft.ids import PeerId, Round, Tokens
from weft.sync.governance import forked
from weft.sync.records import quarantine
from weft.sync.records.charter import AuditTerms, Charter, Quarantined
from weft.sync.records.messages import Base, Counted, HeldWork
from weft.wire import digest

START = first_base(4)
OLD, NEW = START.electorate[:3], START.electorate[3]
AUDITED = replace(START.charter, audits=AuditTerms(rate=0.1, trace_every=1, quarantine=2))
WORK, OTHER = digest(b"work"), digest(b"another")


def joined(before: Charter = AUDITED) -> Charter:
    return quarantine.after(before, Round(3), START.electorate, (NEW,))


def held(before: Charter, round: int = 4, work: str = WORK) -> Charter:
    return quarantine.after(before, Round(round), START.electorate, (), (), (HeldWork(peer=NEW, work=work),))


def brings(peer: PeerId = NEW, work: str = WORK) -> Counted:
    return Counted(peer=peer, tokens=Tokens(8), payload=digest(b"payload"), work=work)


def counted(before: Charter) -> Charter:
    return quarantine.after(before, Round(6), START.electorate, (), (brings(OLD[0]), brings()))


def test_who_is_counted_in_is_in_quarantine_and_who_was_there_is_not() -> None:
    assert joined().quarantined == (Quarantined(peer=NEW, left=2),)
    assert quarantine.settled(joined(), START.electorate) == set(OLD)
    assert quarantine.after(AUDITED, Round(0), START.electorate, ()) is AUDITED


def test_settled_members_judge_unless_there_is_but_one_beside_who_is_judged() -> None:
    everybody = START.electorate
    assert quarantine.judges(joined(), everybody, OLD[0]) == OLD
    assert quarantine.judges(joined(), everybody, NEW) == OLD
    assert quarantine.judges(joined(), everybody[1:], NEW) == OLD[1:], "two judge who is a newcomer"
    assert quarantine.judges(joined(), everybody[1:], OLD[1]) == everybody[1:]
    assert quarantine.judges(joined(), everybody[2:], NEW) == everybody[2:], "one alone strikes nobody out"
    assert quarantine.judges(AUDITED, everybody, NEW) == everybody


@pytest.mark.parametrize("terms", [UNSET, AuditTerms(rate=0.1, trace_every=1)])
def test_where_none_is_asked_for_nobody_is(terms: AuditTerms) -> None:
    before = replace(AUDITED, audits=terms)
    assert joined(before) is before


def test_a_work_waits_until_it_is_cleared_and_then_the_very_same_may_count() -> None:
    waiting = held(joined())
    assert quarantine.awaits(waiting, NEW, Round(4), WORK)
    assert not quarantine.awaits(waiting, NEW, Round(4), OTHER)
    assert not quarantine.awaits(waiting, NEW, Round(5), WORK)
    assert not quarantine.may_count(waiting, brings())
    cleared = quarantine.clear(waiting, NEW)
    assert quarantine.may_count(cleared, brings())
    assert not quarantine.may_count(cleared, brings(work=OTHER))
    assert not quarantine.awaits(cleared, NEW, Round(4), WORK)
    assert quarantine.may_count(cleared, brings(OLD[0], OTHER))


def test_what_waits_is_not_held_again_and_what_comes_in_its_place_waits_anew() -> None:
    waiting = quarantine.clear(held(joined()), NEW)
    assert not quarantine.may_be_held(waiting, brings())
    assert quarantine.may_be_held(waiting, brings(work=OTHER))
    assert not quarantine.may_be_held(waiting, brings(OLD[0]))
    other = held(waiting, 5, OTHER)
    assert quarantine.awaits(other, NEW, Round(5), OTHER)
    assert not quarantine.may_count(other, brings(work=OTHER))


def test_after_so_many_works_it_is_over() -> None:
    once = counted(quarantine.clear(held(joined()), NEW))
    assert once.quarantined == (Quarantined(peer=NEW, left=1),)
    assert counted(quarantine.clear(held(once), NEW)).quarantined is UNSET


def test_who_leaves_and_comes_again_is_new_again() -> None:
    gone = quarantine.after(counted(joined()), Round(7), OLD, ())
    assert gone.quarantined is UNSET
    assert joined(gone).quarantined == (Quarantined(peer=NEW, left=2),)


def test_who_is_named_by_a_branch_and_was_no_member_comes_new() -> None:
    base = replace(START, charter=AUDITED, electorate=OLD)
    assert forked(base, OLD[:2]).quarantined is UNSET
    assert forked(base, (*OLD[:2], NEW)).quarantined == (Quarantined(peer=NEW, left=2),)
    assert forked(base, (NEW,)).quarantined is UNSET, "nobody else is there"


def test_where_no_settled_member_stays_all_who_do_are_settled() -> None:
    assert quarantine.after(held(joined()), Round(5), (NEW,), ()).quarantined is UNSET
    base: Base = replace(START, charter=joined())
    assert quarantine.is_lifted(base, set(OLD))
    assert not quarantine.is_lifted(base, set(OLD[:2]))
