"""Every interleaving of three members, to some of which an act was told: the act is in the one manifest or in none."""

from typing import Any

import pytest

from model.reduced import ReducedSearch
from model.test_round_search import explored, find_the_same_in
from model.world import Bounds, TwoManifests, first_base
from weft.data.assign import leases
from weft.ids import PeerId
from weft.keys import Identity
from weft.sync.governance import enact
from weft.sync.records.acts import Act, AnyDeed, Ban, Remove, Warrant
from weft.sync.records.messages import MAX_UPLINK, Base, Manifest, next_base
from weft.sync.round import rules
from weft.sync.round.machine import replace
from weft.sync.round.rules import is_successor
from weft.wire import digest_of, seal

STEWARD = Identity.from_seed(bytes(32))
BASE = first_base(3, stewards=(STEWARD.peer,))


def warrant(deed: AnyDeed, serial: int = 1) -> Warrant:
    return Warrant(letters=(seal(STEWARD, Act(run=BASE.run, serial=serial, deed=deed)),))


def removal(number: int) -> Warrant:
    return warrant(Remove(peer=BASE.electorate[number], reason=""))


def first_leader() -> int:
    return BASE.electorate.index(rules.leader(BASE, rules.Attempt(0)))


@pytest.mark.full
@pytest.mark.parametrize(
    "told",
    [
        pytest.param((True, True, True), marks=pytest.mark.slow),
        (True, False, False),
        pytest.param((False, True, False), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_no_interleaving_commits_two_manifests_where_a_member_is_removed(told: tuple[bool, ...]) -> None:
    acts = {number: (removal(first_leader()),) for number in range(3) if told[number]}
    search = explored(ReducedSearch(BASE, Bounds(num_attempts=2, num_kills=1), acts))
    assert {bool(manifest.acts) for manifest in search.committed()} >= {any(told)}
    for manifest in search.proposed():
        assert is_successor(BASE, manifest)
        assert bool(manifest.acts) == told[BASE.electorate.index(manifest.leader)]
        assert (BASE.electorate[first_leader()] in manifest.left) == bool(manifest.acts)


@pytest.mark.full
@pytest.mark.parametrize("num_attempts", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_two_acts_for_one_place_are_never_both_committed(num_attempts: int) -> None:
    one, other = removal(0), warrant(Ban(peer=BASE.electorate[1], reason=""))
    first, second, third = (BASE.electorate.index(rules.leader(BASE, rules.Attempt(each))) for each in range(3))
    told = {first: (one, other), second: (other,), third: (one,)}
    search = explored(ReducedSearch(BASE, Bounds(num_attempts=num_attempts, num_kills=0), told))
    assert {manifest.acts for manifest in search.proposed()} == {(one,), (other,)}


def test_the_reduced_search_finds_what_the_whole_one_finds_with_acts() -> None:
    base = first_base(2, stewards=(STEWARD.peer,))
    find_the_same_in(
        base, Bounds(num_attempts=2, num_kills=0), {0: (warrant(Remove(peer=base.electorate[1], reason="")),)}
    )


def test_a_machine_that_removes_within_the_round_commits_two_manifests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whom an act removes has a vote until the round is over that decides it: this one takes it away at once."""
    removed = {BASE.electorate[number] for number in range(3) if number != first_leader()}
    acts = (
        warrant(Remove(peer=sorted(removed)[0], reason="")),
        Warrant(letters=(seal(STEWARD, Act(run=BASE.run, serial=2, deed=Remove(peer=sorted(removed)[1], reason=""))),)),
    )

    is_quorum = rules.is_quorum

    def at_once(base: Base, voters: Any, left: Any = ()) -> bool:
        leads = rules.leader(base, rules.Attempt(0)) in set(voters)
        return is_quorum(base, voters, {*left, *removed} if leads else left)

    monkeypatch.setattr(rules, "is_quorum", at_once)
    with pytest.raises(TwoManifests):
        explored(ReducedSearch(BASE, Bounds(num_attempts=2, num_kills=0), {first_leader(): acts}))


def test_the_round_after_a_removal_is_decided_without_the_removed() -> None:
    first = first_leader()
    search = explored(ReducedSearch(BASE, Bounds(num_attempts=1, num_kills=0), {first: (removal(2),)}))
    (manifest, *_) = search.committed()
    following = base_after(manifest)
    assert following.electorate == tuple(peer for peer in BASE.electorate if peer != BASE.electorate[2])
    explored(ReducedSearch(following, Bounds(num_attempts=2, num_kills=1)))


def test_a_manifest_that_does_not_do_what_its_acts_say_follows_on_nothing() -> None:
    first = first_leader()
    acts = (removal(2), warrant(Ban(peer=PeerId("ab" * 32), reason=""), 2))
    search = explored(ReducedSearch(BASE, Bounds(num_attempts=1, num_kills=0), {first: acts}))
    (manifest, *_) = search.committed()
    assert manifest.acts == acts
    kept, banned = BASE.electorate, tuple(sorted((*manifest.members, PeerId("ab" * 32))))

    def leased(members: tuple[PeerId, ...]) -> dict[str, Any]:
        lent, cursor = leases(BASE.cursor, dict.fromkeys(members, BASE.quota))
        return {"members": members, "uplinks": (MAX_UPLINK,) * len(members), "leases": lent, "cursor": cursor}

    other = warrant(Ban(peer=PeerId("cd" * 32), reason=""))
    for change in (
        {"acts": ()},
        {"acts": acts[::-1]},
        {"acts": (other,)},
        {"charter": digest_of(BASE.charter)},
        {"left": (), **leased(kept)},
        {"joined": (PeerId("ab" * 32),), **leased(banned)},
    ):
        assert is_successor(BASE, manifest)
        assert not is_successor(BASE, replace(manifest, **change)), change  # type: ignore[arg-type]
    joined = PeerId("ef" * 32)
    with_another = leased(tuple(sorted((*manifest.members, joined))))
    assert is_successor(BASE, replace(manifest, joined=(joined,), **with_another)), "whom nobody banned may join"


def base_after(manifest: Manifest) -> Base:
    charter = enact(BASE.charter, BASE.body, manifest.acts).charter
    assert digest_of(charter) == manifest.charter
    return next_base(manifest, charter)
