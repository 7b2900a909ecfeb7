"""Evidence that comes late, again, of who has left or was pardoned, beside verdicts of a majority: one lie strikes its
author out once, and nobody else ever.

Any manifest may hold any two of the warrants that there are, in either order, or none: so each comes as late and as
often as may be, from whoever has it. The liar may leave and come again, and a steward may pardon it. What is searched
is what manifests come to: production code, on signed letters.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import permutations
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from model.search import num_reached
from model.world import first_base
from weft.ids import Attempt, Round
from weft.keys import Identity
from weft.sync import governance
from weft.sync.records.acts import Act, Finding, Pardon, Warrant
from weft.sync.records.charter import AuditTerms, Charter
from weft.sync.records.messages import Accept, Base, RoundNote
from weft.wire import digest, seal

KEYS = sorted((Identity.from_seed(bytes([number] * 32)) for number in range(4)), key=lambda each: each.peer)
STEWARD = Identity.from_seed(bytes([9] * 32))
LIAR, OTHERS = KEYS[0], KEYS[1:]
START = first_base(4, stewards=(STEWARD.peer,))
BASE = replace(
    START,
    electorate=tuple(each.peer for each in KEYS),
    round=Round(2),
    charter=replace(START.charter, audits=AuditTerms(rate=1.0, trace_every=1)),
)
LIES = (1, 3)  # rounds of which something was signed that is not so
NUM_ROUNDS, NUM_PARDONS = 6, 2


def contradiction(round: int) -> Warrant:
    notes = (
        RoundNote(branch=BASE.branch, round=Round(round), message=Accept(attempt=Attempt(0), manifest=digest(each)))
        for each in (b"one", b"other")
    )
    return Warrant(letters=tuple(seal(LIAR, each) for each in notes))


def verdict(round: int) -> Warrant:
    found = Finding(
        run=BASE.run, peer=LIAR.peer, round=Round(round), work=digest(b"work"), before=0, outcome="differs", why=""
    )
    return Warrant(letters=tuple(seal(each, found) for each in OTHERS))


WARRANTS = {(round, kind.__name__): kind(round) for round in LIES for kind in (contradiction, verdict)}
PARDONS = [
    Warrant(letters=(seal(STEWARD, Act(run=BASE.run, serial=serial, deed=Pardon(peer=LIAR.peer, reason=""))),))
    for serial in range(1, NUM_PARDONS + 1)
]


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    """What rules came to is remembered; other rules come to something else."""
    governance.enact.cache_clear()
    yield
    governance.enact.cache_clear()


class World(NamedTuple):
    """
    Args:
        struck: how often each lie has struck its author out, in the order of `LIES`.
        last_at: the round that did so last: what was signed until then is dealt with.
    """

    base: Base
    struck: tuple[int, ...] = (0,) * len(LIES)
    last_at: int = 0


class Wrong(AssertionError):
    pass


class Twice(Wrong):
    pass


class Free(Wrong):
    pass


def following(world: World) -> Iterator[World]:
    base = world.base
    if base.round >= BASE.round + NUM_ROUNDS:
        return
    able = {name: each for name, each in WARRANTS.items() if name[0] < base.round}
    able |= {(0, str(number)): each for number, each in enumerate(PARDONS)}
    for num in range(3):
        for names in permutations(able, num):
            yield from decided(world, {name: able[name] for name in names})
    electorate = set(base.electorate) ^ {LIAR.peer}
    if LIAR.peer in base.electorate or LIAR.peer not in base.charter.banned:  # it leaves, or comes again
        after = replace(base, electorate=tuple(sorted(electorate)), round=Round(base.round + 1))
        yield world._replace(base=after)


def decided(world: World, warrants: dict[tuple[int, str], Warrant]) -> Iterator[World]:
    base, struck, charter = world.base, [*world.struck], world.base.charter
    chosen = governance.in_effect(charter, base.body, list(warrants.values()), len(warrants))
    if len(chosen) < len(warrants):
        return  # the same as without those that have no effect
    done = governance.enact(charter, base.body, chosen)
    assert set(done.removed) <= {LIAR.peer}
    if done.removed:
        struck[LIES.index(next(round for round, _ in warrants if round))] += 1
    electorate = tuple(peer for peer in base.electorate if peer not in done.removed)
    after = replace(base, round=Round(base.round + 1), electorate=electorate, charter=done.charter)
    yield World(after, tuple(struck), base.round if done.removed else world.last_at)


def check(world: World) -> None:
    base = world.base
    if max(world.struck) > 1:
        raise Twice(world.struck)
    for round in LIES:
        is_told = world.last_at < round < base.round and LIAR.peer in base.electorate
        warrant = WARRANTS[round, "contradiction"]
        if is_told and governance.objection(base.charter, base.body, (warrant,)) is not None:
            raise Free(world)


def test_one_lie_strikes_its_author_out_once_however_late_and_often_it_is_told() -> None:
    ends = Counter[tuple[int, ...]]()

    def counted(world: World) -> None:
        check(world)
        ends[world.struck] += 1

    assert num_reached(World(BASE), counted, following) > 100
    assert {(0, 0), (1, 0), (0, 1), (1, 1)} == set(ends), "a lie after a pardon strikes out again"


# --- the search can fail ---

BROKEN: dict[str, tuple[tuple[Any, str], Any, type[Wrong]]] = {
    "what was dealt with counts again": ((Charter, "is_dealt_with"), lambda *_: False, Twice),
    "only the very round is dealt with": (
        (Charter, "is_dealt_with"),
        lambda charter, peer, round: any((each.peer, each.round) == (peer, round) for each in charter.struck),
        Twice,
    ),
    "who was pardoned may lie": (
        (Charter, "is_dealt_with"),
        lambda charter, peer, _round: any(each.peer == peer for each in charter.struck),
        Free,
    ),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_each_rule_is_needed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (module, name), function, found = BROKEN[rule]
    monkeypatch.setattr(module, name, function)
    with pytest.raises(found):
        num_reached(World(BASE), check, following)
