"""The round machine where a member is in quarantine: it is held, and moves nothing."""

import msgspec
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from model.world import contribution, first_base
from weft.clock import VirtualClock
from weft.ids import Attempt, PeerId, Round, Tokens
from weft.peer.round.inbox import Leaps
from weft.sync.records import quarantine
from weft.sync.records.ancestry import Legacy, Stretch
from weft.sync.records.charter import AuditTerms, Charter, Quarantined
from weft.sync.records.messages import Base, HeldWork, Manifest, Prepare, Propose, Ready, counted
from weft.sync.round import round
from weft.sync.round.leading import new_manifest, new_plan
from weft.sync.round.machine import Noticed, Received, State, TimedOut, Trained
from weft.sync.round.rules import is_successor, leader
from weft.wire import Signed, digest, digest_of

FIRST = replace(first_base(4, num_parts=4), keeper=None)
NEW = FIRST.electorate[1]
SETTLED = tuple(peer for peer in FIRST.electorate if peer != NEW)
TERMS = AuditTerms(rate=0.1, trace_every=1, quarantine=3)


class Letter(msgspec.Struct, frozen=True):
    text: str


def work_of(peer: PeerId, text: str = "a work") -> Signed:
    """Return what stands for a signed work: the machine looks at its digest alone."""
    return Signed(kind="Work", signer=peer, body=text.encode(), signature=bytes(64))


WORK = digest_of(work_of(NEW))


def base_of(**waits: object) -> Base:
    charter: Charter = replace(
        FIRST.charter,
        audits=TERMS,
        quarantined=(Quarantined(peer=NEW, left=3, **waits),),  # type: ignore[arg-type]
    )
    return replace(FIRST, charter=charter, round=Round(5))


FRESH, WAITING = base_of(), base_of(work=WORK, round=Round(4))
CLEARED = base_of(work=WORK, round=Round(4), is_cleared=True)


def ready_of(base: Base, peer: PeerId, text: str = "a work") -> Ready:
    parts = contribution(base, base.electorate.index(peer), 0).parts
    return Ready(tokens=Tokens(4), parts=parts, work=work_of(peer, text))


def announced(base: Base, peers: tuple[PeerId, ...], text: str = "a work") -> State:
    """Return the first leader's state once these have announced, itself last."""
    first = leader(base, Attempt(0))
    state = round.begin(first, base)
    for peer in peers:
        if peer != first:
            state, _ = round.step(state, Received(sender=peer, message=ready_of(base, peer, text)))
    return round.step(state, Trained(ready=ready_of(base, first)))[0]


def manifest_of(state: State) -> Manifest:
    assert state.plan is not None
    results = {part: digest(b"merged") for part in range(state.base.num_parts)}
    return new_manifest(replace(state, results=results), state.plan)


def proposed(base: Base, text: str = "a work") -> Manifest:
    return manifest_of(announced(base, base.electorate, text))


def peers(manifest: Manifest) -> tuple[str, ...]:
    return tuple(each.peer for each in manifest.contributions)


def test_what_a_newcomer_brings_is_held_and_not_counted() -> None:
    manifest = proposed(FRESH)
    assert peers(manifest) == SETTLED
    assert manifest.held == (HeldWork(peer=NEW, work=WORK),)
    assert NEW not in {part.owner for part in manifest.parts}
    assert NEW not in manifest.awaited
    assert is_successor(FRESH, manifest)


def test_a_newcomer_owns_nothing_and_all_parts_stay_while_something_of_it_waits() -> None:
    cut = (16, 0, 8, 4)
    fast = {SETTLED[0]: 1e6, SETTLED[1]: 1e6, SETTLED[2]: 1e6}
    waiting = replace(announced(replace(WAITING, uplinks=cut), WAITING.electorate), uplinks=fast)
    assert manifest_of(waiting).uplinks == cut
    long_since = replace(WAITING, uplinks=cut, round=Round(4 + quarantine.STILL))
    assert manifest_of(replace(announced(long_since, WAITING.electorate), uplinks=fast)).uplinks != cut
    settled = replace(announced(replace(CLEARED, uplinks=cut), CLEARED.electorate), uplinks=fast)
    assert manifest_of(settled).uplinks == (16, 0, 8, 16), "what is a factor of four off is another line"


def test_what_waits_is_neither_counted_nor_held_again() -> None:
    manifest = proposed(WAITING)
    assert (peers(manifest), manifest.held) == (SETTLED, UNSET)
    assert is_successor(WAITING, manifest)


def test_what_is_cleared_counts_and_other_bytes_in_its_place_wait() -> None:
    manifest = proposed(CLEARED)
    assert (peers(manifest), manifest.held) == (CLEARED.electorate, UNSET)
    assert is_successor(CLEARED, manifest)
    other = proposed(CLEARED, "another work")
    assert (peers(other), [each.peer for each in other.held or ()]) == (SETTLED, [NEW])
    assert is_successor(CLEARED, other)


def with_charter(base: Base, manifest: Manifest) -> Manifest:
    """Return a manifest that names the charter after it, whatever else it says."""
    after = quarantine.after(
        base.charter, base.round, manifest.members, manifest.joined, manifest.contributions, manifest.held or ()
    )
    return replace(manifest, charter=digest_of(after))


@pytest.mark.parametrize("base", [FRESH, WAITING], ids=["held", "waiting"])
def test_a_manifest_that_counts_it_at_once_is_no_successor(base: Base) -> None:
    manifest = proposed(base)
    brought = counted(replace(contribution(base, 1, 0), tokens=Tokens(4), work=WORK))
    contributions = tuple(sorted((*manifest.contributions, brought), key=lambda each: each.peer))
    tokens = Tokens(manifest.committed_tokens + brought.tokens)
    false = replace(manifest, contributions=contributions, committed_tokens=tokens, held=UNSET)
    assert not is_successor(base, with_charter(base, false))
    cleared = replace(false, previous=CLEARED.previous)
    assert is_successor(CLEARED, with_charter(CLEARED, cleared)), "nothing else is wrong with it"


def test_a_legacy_of_a_newcomer_does_not_count() -> None:
    stretch = Stretch(branch=FIRST.branch, start=Round(1), stop=Round(2))
    legacy = Legacy(stretches=(stretch,), tokens=Tokens(4))
    brought = replace(contribution(CLEARED, 1, 0), legacy=legacy)
    assert not quarantine.may_count(CLEARED.charter, brought)
    assert not quarantine.may_be_held(CLEARED.charter, replace(brought, work=digest(b"another")))


def false_owner(manifest: Manifest) -> Manifest:
    return replace(manifest, parts=(replace(manifest.parts[0], owner=NEW), *manifest.parts[1:]))


def holds(*held: HeldWork) -> object:
    return lambda manifest: replace(manifest, held=held or UNSET)


@pytest.mark.parametrize(
    "change",
    [
        false_owner,
        holds(HeldWork(peer=NEW, work=WORK)),  # it waits already
        holds(HeldWork(peer=SETTLED[0], work=digest(b"settled"))),
        holds(*2 * (HeldWork(peer=NEW, work=digest(b"another")),)),
        holds(HeldWork(peer=PeerId("ff" * 32), work=digest(b"of nobody"))),
    ],
)
def test_what_a_leader_may_not_say_of_a_newcomer(change: object) -> None:
    manifest = proposed(WAITING)
    false = change(manifest)  # type: ignore[operator]
    assert not quarantine.is_kept(WAITING, false)
    assert not is_successor(WAITING, false)


def test_no_mean_waits_for_a_newcomer() -> None:
    state = announced(WAITING, SETTLED[:2])
    assert state.plan is None, "it is waited for, as long as for others"
    state, _ = round.step(state, TimedOut(timer="grace", attempt=Attempt(0)))
    manifest = manifest_of(state)
    assert manifest.awaited == (SETTLED[2],) if SETTLED[2] not in peers(manifest) else ()
    late = tuple(sorted({*manifest.awaited, NEW}))
    assert is_successor(WAITING, manifest)
    assert not is_successor(WAITING, replace(manifest, awaited=late))


def test_a_newcomer_leads_after_all_others() -> None:
    assert [leader(FRESH, Attempt(number)) for number in range(4)].index(NEW) == 3


def test_a_newcomer_takes_nobody_to_an_attempt_that_it_leads() -> None:
    """Else it could lead any round, and choose who counts in it."""
    leaps, state = Leaps(VirtualClock(), lambda: 10.0), round.begin(SETTLED[0], FRESH)
    settled = next(peer for peer in SETTLED if leader(FRESH, Attempt(2)) == peer)
    assert leaps.may_lead(state, settled, Prepare(attempt=Attempt(2)))
    assert not leaps.may_lead(state, NEW, Prepare(attempt=Attempt(3)))
    there = replace(state, attempt=Attempt(3))
    assert leaps.may_lead(there, NEW, Prepare(attempt=Attempt(3))), "its own timers have brought it there"


def test_where_all_settled_members_are_gone_newcomers_go_on() -> None:
    state = round.begin(NEW, FRESH)
    state, _ = round.step(state, Trained(ready=ready_of(FRESH, NEW)))
    for peer in SETTLED:
        state, _ = round.step(state, Noticed(peer=peer, status="gone"))
    # Nobody promises: what it would plan.
    plan = new_plan(state, {NEW}, state.gone)
    manifest = new_manifest(replace(state, results={part: digest(b"m") for part in range(4)}), replace(plan, attempt=3))
    assert (peers(manifest), manifest.members) == ((NEW,), (NEW,))
    assert is_successor(FRESH, manifest)
    assert not is_successor(FRESH, replace(manifest, left=manifest.left[1:]))
    asked = Received(sender=NEW, message=Propose(attempt=Attempt(3), manifest=manifest))
    assert round.step(replace(round.begin(SETTLED[0], FRESH), attempt=Attempt(3)), asked)[1] == (), "it is not gone"
    both = (Quarantined(peer=SETTLED[0], left=1), Quarantined(peer=NEW, left=3))
    without_it = replace(FRESH, charter=replace(FRESH.charter, quarantined=both))
    assert not quarantine.is_put_out(without_it, SETTLED[0], manifest)
