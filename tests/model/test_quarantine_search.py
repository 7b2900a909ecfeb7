"""All that may befall a newcomer's works, in any order: what counts was held, cleared, and is those very bytes.

A world is the charter, what was brought, and what has happened to each work. Manifests hold, clear and count what a
leader likes, as far as a member accepts them; the newcomer leaves and comes again.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from model.world import first_base
from weft.ids import PeerId, Round, Tokens
from weft.sync.records import quarantine
from weft.sync.records.charter import AuditTerms, Charter
from weft.sync.records.messages import Base, Counted, HeldWork, Manifest
from weft.wire import digest

START = first_base(3)
OLD, NEW = START.electorate[:2], START.electorate[2]
WORKS = (digest(b"one"), digest(b"another"))
NUM, ROUNDS = 2, 9
AUDITED = replace(START.charter, audits=AuditTerms(rate=0.1, trace_every=1, quarantine=NUM))


class World(NamedTuple):
    charter: Charter
    is_member: bool
    num_counted: int  # of the works that had to wait, since it came
    held: frozenset[str]  # since then
    cleared: frozenset[str]


def manifest(charter: Charter, members: tuple[PeerId, ...], brought: str | None, holds: str | None) -> Manifest:
    """Return as much of a manifest as tells who is in quarantine after it."""
    peers = [(OLD[0], digest(b"of the first")), *([] if brought is None else [(NEW, brought)])]
    counted = tuple(
        Counted(peer=peer, tokens=Tokens(8), payload=digest(b"payload"), work=work) for peer, work in sorted(peers)
    )
    found = Manifest(
        run=START.run,
        branch=START.branch,
        round=Round(1),
        attempt=0,
        leader=OLD[0],
        previous=START.previous,
        contributions=counted,
        parts=(),
        members=members,
        uplinks=(),
        joined=(),
        left=(),
        leases=(),
        cursor=0,
        committed_tokens=Tokens(0),
        acts=(),
        charter=digest(b"charter"),
    )
    return found if holds is None else replace(found, held=(HeldWork(peer=NEW, work=holds),))


def following(world: World, accepts: Callable[[Base, Manifest], bool]) -> Iterator[World]:
    charter = world.charter
    if not world.is_member:
        after = quarantine.after(charter, Round(1), START.electorate, (NEW,))
        yield World(after, True, 0, frozenset(), frozenset())
        return
    yield world._replace(charter=quarantine.after(charter, Round(1), OLD, ()), is_member=False)
    base = replace(START, charter=charter)
    for brought in (None, *WORKS):
        for holds in (None, *WORKS):
            proposed = manifest(charter, START.electorate, brought, holds)
            if not accepts(base, proposed):
                continue
            is_new = quarantine.of(charter, NEW) is not None
            if brought is not None and is_new:
                assert brought in world.cleared, "it was cleared, and is the very work"
            after = quarantine.after(
                charter, Round(1), START.electorate, (), proposed.contributions, proposed.held or ()
            )
            num = world.num_counted + (brought is not None and is_new)
            assert is_new or num == NUM, "it is settled after so many and no fewer"
            yield World(
                after,
                True,
                num,
                world.held | ({holds} if holds else set()),
                world.cleared - ({brought} if brought else set()) - ({holds} if holds else set()),
            )
    for work in WORKS:
        if quarantine.awaits(charter, NEW, Round(1), work):
            assert work in world.held
            yield world._replace(charter=quarantine.clear(charter, NEW), cleared=frozenset({work}))


def search(accepts: Callable[[Base, Manifest], bool]) -> int:
    worlds, seen = {World(AUDITED, False, 0, frozenset(), frozenset())}, set[World]()
    for _ in range(ROUNDS):
        worlds = {after for world in worlds for after in following(world, accepts)} - seen
        seen |= worlds
    return len(seen)


def test_nothing_of_a_newcomer_counts_that_was_not_cleared() -> None:
    assert search(quarantine.is_kept) > 20


def test_without_the_rule_it_would() -> None:
    with pytest.raises(AssertionError, match="cleared"):
        search(lambda _base, _manifest: True)
