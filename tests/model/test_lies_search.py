"""Evidence that comes late, again, of who has left or was pardoned, beside verdicts of a majority: one lie strikes its
author out once, and nobody else ever.

Any manifest may hold any two of the warrants that there are, in either order, or none: so each comes as late and as
often as may be, from whoever has it. No warrant says who tells it, so it may be one whose key was struck out: a second
member lies, too, and its verdicts on the first count only while it is a judge. The liar may leave and come again, and a
steward may pardon it. What is searched is what manifests come to: production code, on signed letters.

    contradiction   two notes
    claim           false work, shown by what its author has signed (`weft.verify.evidence`)
    verdict         more than half of the members say so
    forged          a false claim of another, which that one has not signed: it is nothing
"""

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from model.search import num_reached
from model.world import first_base
from unit.verify.evidence.forge import PEERS, done
from unit.verify.evidence.test_works import claimed
from weft.ids import Attempt, Round, Tokens
from weft.keys import Identity
from weft.sync import governance
from weft.sync.records.acts import Act, Finding, Pardon, Warrant
from weft.sync.records.charter import AuditTerms, Charter
from weft.sync.records.messages import Accept, Base, RoundNote
from weft.verify.evidence.evidence import read
from weft.wire import digest, encode, seal

KEYS, LIAR, SECOND = PEERS[:4], PEERS[0], PEERS[1]
STEWARD = Identity.from_seed(bytes([9] * 32))
WORKS = (done(), done(segments=3))  # of the liar
START = first_base(4, stewards=(STEWARD.peer,))
BASE = replace(
    START,
    run=WORKS[0].work.run,
    branch=WORKS[0].work.branch,
    electorate=tuple(each.peer for each in KEYS),
    round=Round(5),
    charter=replace(START.charter, audits=AuditTerms(rate=1.0, trace_every=1)),
)
LIES = ((LIAR, 4), (LIAR, 6), (SECOND, 4))  # rounds of which something was signed that is not so
NUM_ROUNDS, NUM_PARDONS = 4, 2


def contradiction(author: Identity, round: int) -> Warrant:
    notes = (
        RoundNote(branch=BASE.branch, round=Round(round), message=Accept(attempt=Attempt(0), manifest=digest(each)))
        for each in (b"one", b"other")
    )
    return Warrant(letters=tuple(seal(author, each) for each in notes))


def claim(round: int) -> Warrant:
    """Return what shows that a work of the liar claims more tokens than its steps take."""
    lied = next(each for each in WORKS if each.work.round == round).renamed(tokens=Tokens(1000))
    return Warrant(letters=(lied.signed,), shown=encode(claimed(lied)))


def forged(round: int) -> Warrant:
    """As `claim`, of another, who has not signed it: who is struck out may try that."""
    other = KEYS[2].peer
    lied = next(each for each in WORKS if each.work.round == round).renamed(tokens=Tokens(1000), peer=other)
    return Warrant(letters=(replace(lied.signed, signer=other),), shown=encode(claimed(lied)))


def verdict(round: int) -> Warrant:
    found = Finding(
        run=BASE.run, peer=LIAR.peer, round=Round(round), work=digest(b"work"), before=0, outcome="differs", why=""
    )
    return Warrant(letters=tuple(seal(each, found) for each in KEYS[1:]))


WARRANTS = {(number, "contradiction"): contradiction(*lie) for number, lie in enumerate(LIES)}
WARRANTS |= {
    (number, kind.__name__): kind(round)
    for number, (author, round) in enumerate(LIES)
    for kind in (claim, verdict, forged)
    if author is LIAR
}
PARDONS = [
    Warrant(letters=(seal(STEWARD, Act(run=BASE.run, serial=serial, deed=Pardon(peer=LIAR.peer, reason=""))),))
    for serial in range(1, NUM_PARDONS + 1)
]


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    """What rules came to is remembered; other rules come to something else."""
    for each in (governance.enact, governance.read_lie):
        each.cache_clear()
    yield
    for each in (governance.enact, governance.read_lie):
        each.cache_clear()


class World(NamedTuple):
    """
    Args:
        struck: how often each lie has struck its author out, in the order of `LIES`.
        last_at: of each author the round that did so last: what was signed until then is dealt with.
    """

    base: Base
    struck: tuple[int, ...] = (0,) * len(LIES)
    last_at: tuple[int, ...] = (0, 0)


class Wrong(AssertionError):
    pass


class Twice(Wrong):
    pass


class Free(Wrong):
    pass


class Unheard(Wrong):
    pass


class Innocent(Wrong):
    pass


def following(world: World) -> Iterator[World]:
    base = world.base
    if base.round >= BASE.round + NUM_ROUNDS:
        return
    able = {name: each for name, each in WARRANTS.items() if LIES[name[0]][1] < base.round}
    able |= {(-1, str(number)): each for number, each in enumerate(PARDONS)}
    yield from decided(world, {})
    for name, first in able.items():
        if governance.objection(base.charter, base.body, (first,)) is None:  # else nothing follows it either
            yield from decided(world, {name: first})
            for other, second in able.items():
                if other != name:
                    yield from decided(world, {name: first, other: second})
    electorate = set(base.electorate) ^ {LIAR.peer}
    if LIAR.peer in base.electorate or LIAR.peer not in base.charter.banned:  # it leaves, or comes again
        after = replace(base, electorate=tuple(sorted(electorate)), round=Round(base.round + 1))
        yield world._replace(base=after)


def decided(world: World, warrants: dict[tuple[int, str], Warrant]) -> Iterator[World]:
    base, struck, last_at = world.base, [*world.struck], [*world.last_at]
    chosen = governance.in_effect(base.charter, base.body, list(warrants.values()), len(warrants))
    if len(chosen) < len(warrants):
        return  # the same as without those that have no effect
    done = governance.enact(base.charter, base.body, chosen)
    told = [(number, kind) for number, kind in warrants if number >= 0]
    if done.removed:
        ((number, kind),) = told
        author = LIES[number][0]
        if done.removed != (author.peer,) or kind == "forged":
            raise Innocent(done.removed)
        if kind == "verdict" and not set(KEYS[1:]) <= {each for each in KEYS if each.peer in base.electorate}:
            raise Unheard(world)
        struck[number] += 1
        last_at[author is SECOND] = base.round
    electorate = tuple(peer for peer in base.electorate if peer not in done.removed)
    after = replace(base, round=Round(base.round + 1), electorate=electorate, charter=done.charter)
    yield World(after, tuple(struck), tuple(last_at))


def check(world: World) -> None:
    base = world.base
    if max(world.struck) > 1:
        raise Twice(world.struck)
    for number, (author, round) in enumerate(LIES):
        is_told = world.last_at[author is SECOND] < round < base.round and author.peer in base.electorate
        for kind in ("contradiction", "claim"):
            warrant = WARRANTS.get((number, kind))
            if is_told and warrant and governance.objection(base.charter, base.body, (warrant,)) is not None:
                raise Free(world)


def test_one_lie_strikes_its_author_out_once_however_late_and_often_it_is_told() -> None:
    ends = Counter[tuple[int, ...]]()

    def counted(world: World) -> None:
        check(world)
        ends[world.struck] += 1

    assert num_reached(World(BASE), counted, following) > 100
    assert set(product((0, 1), repeat=3)) == set(ends), "a lie after a pardon strikes out again"


# --- the search can fail ---

BROKEN: dict[str, tuple[tuple[Any, str], Any, type[Wrong]]] = {
    "who was struck out is a judge": ((governance, "are_judges"), lambda *_: True, Unheard),
    "nobody looks whose signature it is": (
        (governance, "read"),
        lambda letters, shown: read(letters, shown, lambda *_: True),
        Innocent,
    ),
    "who is struck out stays a member": ((governance, "_without"), lambda before, *_: before, Free),
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
