"""Every interleaving of audits of one work: who is honest stays, who cheats does not, and no minority has a say."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from model.audit_world import FALSE, RIGHT, AuditSearch, Bounds, Free, Innocent, Peeked, Said, Twice, Unheard, Wrong
from model.search import break_rules
from weft.ids import PeerId
from weft.peer.audit import looking
from weft.peer.audit.outcome import Found
from weft.peer.round import verdicts
from weft.sync import governance
from weft.sync.records import quarantine
from weft.sync.records.charter import Charter
from weft.wire import digest

PARTS = (digest(b"part"), digest(b"another"))  # that the worker has merged
ALL = ("differs", "unanswered")
ACCUSED = Bounds(num_members=3, liars=(2,), said=tuple(Said(2, each) for each in ALL), drawn=(1,))
TWO_LIARS = Bounds(num_members=5, liars=(3, 4), said=(Said(3, "differs"), Said(4, "differs")), drawn=(), can_ban=True)
SILENT = Bounds(drawn=(), said=tuple(Said(by, "unanswered", what) for by in (1, 2) for what in PARTS))
CHEAT = Bounds(is_honest=False, drawn=(1,))
IDLE = CHEAT._replace(num_members=5, newcomers=(3, 4), can_wait=False)
CROWD = Bounds(
    num_members=7,
    liars=(3, 4, 5, 6),
    newcomers=(3, 4, 5, 6),
    said=tuple(Said(each, "differs") for each in (3, 4, 5, 6)),
    drawn=(),
    can_wait=False,
    num_rounds=1,
)


@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(drawn=(1, 2), can_fail=True, num_kills=1),
        ACCUSED._replace(num_kills=1),
        pytest.param(TWO_LIARS, marks=pytest.mark.slow),
        pytest.param(Bounds(num_members=4, drawn=(1, 2, 3), num_kills=1), marks=pytest.mark.slow),
        pytest.param(TWO_LIARS._replace(num_kills=1), marks=pytest.mark.slow),
        pytest.param(TWO_LIARS._replace(drawn=(1,)), marks=pytest.mark.slow),
        pytest.param(
            Bounds(num_members=4, liars=(3,), said=(Said(3, "differs"),), can_ban=True), marks=pytest.mark.slow
        ),
    ],
)
def test_nobody_strikes_out_who_is_honest_whatever_is_lost_late_or_told_twice(bounds: Bounds) -> None:
    search = AuditSearch(bounds)
    assert search.run() > 50
    assert search.num_struck == 0


@pytest.mark.parametrize("bounds", [ACCUSED._replace(drawn=()), TWO_LIARS, pytest.param(CROWD, marks=pytest.mark.slow)])
def test_what_fewer_than_a_majority_say_comes_to_nothing_where_the_others_are_answered(bounds: Bounds) -> None:
    """Where they are not, what they find themselves may make a majority: the worker counts as silent, and stays."""
    search = AuditSearch(bounds._replace(can_wait=False))
    search.run()
    assert search.num_struck == search.num_unanswered == 0


@pytest.mark.parametrize(
    "bounds",
    [
        CHEAT._replace(num_kills=1),
        CHEAT._replace(shows=(FALSE, RIGHT)),
        CHEAT._replace(shows=(RIGHT,)),
        CHEAT._replace(can_fail=True),
        IDLE,
        pytest.param(CHEAT._replace(drawn=(1, 2), num_kills=2), marks=pytest.mark.slow),
        pytest.param(CHEAT._replace(num_members=4), marks=pytest.mark.slow),
        pytest.param(
            CHEAT._replace(num_members=5, liars=(3,), said=(Said(3, "differs"),), can_wait=False, num_rounds=1),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_who_cheats_does_not_go_free_once_somebody_was_drawn(bounds: Bounds) -> None:
    search = AuditSearch(bounds)
    search.run()
    assert (search.num_unanswered > 0) == bounds.can_wait
    assert (search.num_struck > 0) == (bounds.shows != (RIGHT,)), "what was not named is not shown"


def test_of_one_round_it_counts_once_that_nobody_answered() -> None:
    search = AuditSearch(SILENT)
    search.run()
    assert search.num_unanswered > 0


# --- the search can fail ---


class Forgetful(AuditSearch):
    """Members whose disks keep nothing of what they heard and found, nor what they were drawn for."""

    def _restarted(self, world: Any, member: Any, number: int) -> Any:
        return super()._restarted(world, member, -1)

    def _on_disk(self, member: Any) -> Any:
        return frozenset()


def test_where_members_forget_who_cheats_goes_free() -> None:
    with pytest.raises(Free):
        Forgetful(CHEAT._replace(num_kills=1)).run()


def opened_at_once(now: looking.Looking, event: looking.Event) -> looking.Looking:
    after = STEP(now, event)
    return replace(after, phase="opening") if isinstance(event, looking.Came) else after


def all_judge(_charter: Charter, electorate: Iterable[PeerId], _peer: PeerId) -> tuple[PeerId, ...]:
    return tuple(electorate)


STEP = looking.step
Patches = dict[tuple[Any, str], Any]
ANYBODY: Patches = {
    (verdicts, "who_counts"): lambda cast, judges: sorted(cast),
    (governance, "are_judges"): lambda *_: True,
}
TWICE: Patches = {
    (verdicts, "who_counts"): lambda cast, judges: sorted([*cast, *cast]),
    (governance, "are_judges"): lambda *_: True,
}
BROKEN: dict[str, tuple[Patches, Bounds, type[Wrong]]] = {
    "one voice is enough": ({(governance, "is_majority"): lambda num, _: num > 0}, ACCUSED, Unheard),
    "half is enough": ({(governance, "is_majority"): lambda num, most: 2 * num >= most}, TWO_LIARS, Unheard),
    "who was struck out still counts": (ANYBODY, TWO_LIARS, Unheard),
    "newcomers that look at nothing are judges": ({(quarantine, "judges"): all_judge}, IDLE, Free),
    "newcomers that lie are judges": ({(quarantine, "judges"): all_judge}, CROWD, Unheard),
    "a verdict counts twice": (TWICE, ACCUSED, Unheard),
    "no answer is a lie": ({(looking, "unanswered"): lambda why: Found("differs", why)}, Bounds(), Innocent),
    "a round counts again": ({(governance, "is_counted"): lambda *_: False}, SILENT, Twice),
    "anything may be opened": ({(looking, "is_named"): lambda *_: True}, CHEAT._replace(shows=(FALSE, RIGHT)), Free),
    "the worker opens first": ({(looking, "step"): opened_at_once}, CHEAT, Peeked),
    "nobody looks for itself": ({(looking, "is_heard"): lambda *_: False}, CHEAT, Free),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_each_rule_is_needed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, bounds, found = BROKEN[rule]
    break_rules(monkeypatch, broken)
    with pytest.raises(found):
        AuditSearch(bounds).run()
