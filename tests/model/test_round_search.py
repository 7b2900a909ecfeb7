"""Every interleaving of three members within bounds: one manifest per branch and round, progress with a majority."""

import pytest

from model.world import Bounds, Search, TwoManifests, first_base, payload
from weft.ids import Attempt
from weft.sync import decide, round, rules
from weft.sync.messages import Vote

LIMIT = 50_000_000  # far above what any bound here needs: reaching it is a failure


def explored(bounds: Bounds) -> Search:
    search = Search(first_base(3), bounds)
    assert search.run(LIMIT), f"gave up after {search.num_worlds} worlds"
    assert search.num_commits > 0, "a search in which nothing commits shows nothing"
    return search


@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(num_attempts=1, num_kills=1),
        Bounds(num_attempts=1, num_kills=0, num_leaves=2),
        Bounds(num_attempts=3, num_kills=0, is_announced=True),
        Bounds(num_attempts=2, num_kills=1, is_announced=True),
        Bounds(num_attempts=3, num_kills=1, is_announced=True, is_carried=True),
    ],
    ids=str,
)
def test_no_interleaving_commits_two_manifests(bounds: Bounds) -> None:
    explored(bounds)


@pytest.mark.slow
@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(num_attempts=3, num_kills=1, is_announced=True),
        Bounds(num_attempts=2, num_kills=1),
        Bounds(num_attempts=2, num_kills=1, num_leaves=1, is_announced=True),
        Bounds(num_attempts=3, num_kills=1, num_leaves=1, is_announced=True, is_carried=True),
    ],
    ids=str,
)
def test_no_interleaving_commits_two_manifests_in_depth(bounds: Bounds) -> None:
    explored(bounds)


def test_every_manifest_counts_each_payload_once_and_only_what_was_announced() -> None:
    search = explored(Bounds(num_attempts=1, num_kills=1))
    announced = {(member, life): payload(member, 0, life) for member in search.base.electorate for life in range(2)}
    for manifest in search.manifests():
        peers = [each.peer for each in manifest.contributions]
        assert len(peers) == len(set(peers))
        for each in manifest.contributions:
            assert each.parts[0] in {announced[each.peer, life] for life in range(2)}


@pytest.mark.parametrize("dead", [None, 0, 1, 2])
def test_whatever_happened_a_majority_that_lives_and_talks_commits(dead: int | None) -> None:
    search = Search(first_base(3), Bounds(num_attempts=2, num_kills=1))
    worlds = search.some_worlds(600)
    stuck = [world for world in worlds if not search.commits_when_calm(world, dead, num_attempts=8)]
    assert not stuck, f"{len(stuck)} of {len(worlds)} worlds never commit, the first: {search.describe(stuck[0])}"


def test_a_machine_that_never_leads_again_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round, "may_promise", lambda durable, attempt: False)
    search = Search(first_base(3), Bounds(num_attempts=2, num_kills=1))
    assert not all(search.commits_when_calm(world, 0, num_attempts=8) for world in search.some_worlds(100))


def test_a_member_that_accepts_twice_breaks_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    def may_accept(durable: rules.Durable, attempt: Attempt, manifest: object) -> bool:
        return True  # whatever it promised or accepted before

    monkeypatch.setattr(decide, "may_accept", may_accept)
    with pytest.raises(TwoManifests):
        explored(Bounds(num_attempts=2, num_kills=0, is_announced=True))


def test_a_leader_that_ignores_what_was_accepted_breaks_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round, "newest", lambda votes: None)
    with pytest.raises(TwoManifests):
        explored(Bounds(num_attempts=2, num_kills=0, is_announced=True))


def test_a_member_that_forgets_at_a_crash_breaks_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.sync import round
    from weft.sync.machine import Result

    def resume(me: str, durable: rules.Durable) -> Result:
        return round.begin(me, durable.base), ()  # type: ignore[arg-type]

    monkeypatch.setattr(round, "resume", resume)
    with pytest.raises(TwoManifests):
        explored(Bounds(num_attempts=2, num_kills=1, is_announced=True))


def test_half_an_electorate_without_the_keeper_is_no_quorum() -> None:
    base = first_base(4)
    a, b, c, d = base.electorate
    assert rules.is_quorum(base, {a, b})
    assert not rules.is_quorum(base, {c, d})
    assert rules.is_quorum(base, {b, c, d})
    assert rules.is_quorum(base, {c, d}, left={a, b})
    assert not rules.is_quorum(base, {c}, left={a, b}), "the keeper has left, so half is not enough"


def test_the_newest_vote_is_the_one_of_the_latest_attempt() -> None:
    search = Search(first_base(3), Bounds(num_attempts=1))
    search.run(LIMIT)
    manifest, other = search.manifests()[:2]
    votes = [Vote(attempt=Attempt(2), manifest=manifest), None, Vote(attempt=Attempt(1), manifest=other)]
    assert rules.newest(votes) == manifest
    assert rules.newest([None]) is None
