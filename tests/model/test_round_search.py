"""Every interleaving of three members within bounds: one manifest per branch and round, progress with a majority."""

from collections.abc import Callable
from typing import Any

import pytest

from model.reduced import NotDead, ReducedSearch
from model.world import Bounds, Search, TwoManifests, contribution, first_base, merged
from weft.ids import Attempt, PeerId
from weft.sync import decide, round, rules
from weft.sync.machine import Result, State, replace
from weft.sync.messages import Manifest, Prepare, Vote
from weft.sync.rules import Durable

LIMIT = 50_000_000  # far above what any bound here needs: reaching it is a failure
OTHER_ORDER = "13"  # a run in which no leader owns the part of its first plan; in run 00 each does


def explored(search: Search) -> Search:
    assert search.run(LIMIT), f"gave up after {search.num_worlds} worlds"
    assert search.num_commits > 0, "a search in which nothing commits shows nothing"
    return search


@pytest.mark.parametrize(
    ("bounds", "run"),
    [
        (Bounds(num_attempts=3, num_kills=1), "00"),
        (Bounds(num_attempts=1, num_kills=1, num_leaves=1), "00"),
        (Bounds(num_attempts=1, num_kills=0, num_leaves=2), OTHER_ORDER),
    ],
    ids=str,
)
def test_no_interleaving_commits_two_manifests(bounds: Bounds, run: str) -> None:
    explored(ReducedSearch(first_base(3, run=run), bounds))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bounds", "run"),
    [
        (Bounds(num_attempts=3, num_kills=1), OTHER_ORDER),
        (Bounds(num_attempts=2, num_kills=0, num_leaves=1), "00"),
        (Bounds(num_attempts=3, num_kills=2), "00"),  # 390 thousand worlds
        (Bounds(num_attempts=2, num_kills=1, num_leaves=1), "00"),
        (Bounds(num_attempts=3, num_kills=1, num_leaves=1), "00"),  # 560 thousand, 4 minutes and 4.5 GB
    ],
    ids=str,
)
def test_no_interleaving_commits_two_manifests_in_depth(bounds: Bounds, run: str) -> None:
    explored(ReducedSearch(first_base(3, run=run), bounds))


def find_the_same(num_members: int, bounds: Bounds, run: str) -> None:
    base = first_base(num_members, run=run)
    whole, reduced = explored(Search(base, bounds)), explored(ReducedSearch(base, bounds))
    assert reduced.proposed() == whole.proposed()
    assert reduced.committed() == whole.committed()
    assert reduced.num_worlds < whole.num_worlds / 10


@pytest.mark.parametrize("run", ["00", "01"])
@pytest.mark.parametrize(
    "bounds", [Bounds(num_attempts=1, num_kills=1, num_leaves=1), Bounds(num_attempts=2, num_kills=0)], ids=str
)
def test_the_reduced_search_finds_what_the_whole_one_finds(bounds: Bounds, run: str) -> None:
    find_the_same(2, bounds, run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_members", "bounds", "run"),
    [
        (2, Bounds(num_attempts=2, num_kills=1), "00"),
        (2, Bounds(num_attempts=2, num_kills=1), "01"),
        (2, Bounds(num_attempts=2, num_kills=1, num_leaves=1), "00"),
        (3, Bounds(num_attempts=1, num_kills=0), OTHER_ORDER),
    ],
    ids=str,
)
def test_the_reduced_search_finds_what_the_whole_one_finds_in_depth(num_members: int, bounds: Bounds, run: str) -> None:
    find_the_same(num_members, bounds, run)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["00", OTHER_ORDER])
def test_the_reduced_search_finds_what_walks_at_random_come_upon(run: str) -> None:
    bounds = Bounds(num_attempts=3, num_kills=1)
    walks, reduced = Search(first_base(3, run=run), bounds), explored(ReducedSearch(first_base(3, run=run), bounds))
    walks.some_worlds(1000)
    assert walks.committed()
    assert walks.proposed() <= reduced.proposed()
    assert walks.committed() <= reduced.committed()


@pytest.mark.parametrize("run", ["00", OTHER_ORDER])
def test_every_manifest_counts_each_payload_once_and_only_what_was_announced(run: str) -> None:
    search = explored(ReducedSearch(first_base(3, run=run), Bounds(num_attempts=2, num_kills=1)))
    announced = {contribution(search.base, number, life) for number in range(3) for life in range(2)}
    for manifest in search.proposed():
        assert set(manifest.contributions) <= announced
        assert len({each.peer for each in manifest.contributions}) == len(manifest.contributions) > 0
        assert manifest.committed_tokens == sum(each.tokens for each in manifest.contributions)


@pytest.mark.parametrize("num_kills", [0, 1])
@pytest.mark.parametrize("run", ["00", OTHER_ORDER])
def test_what_a_manifest_counts_is_what_its_results_were_merged_from(run: str, num_kills: int) -> None:
    search = explored(ReducedSearch(first_base(3, run=run), Bounds(num_attempts=2, num_kills=num_kills)))
    for manifest in search.proposed():  # more would be counted twice, by its owner's next payload; less would be lost
        assert [made.result for made in manifest.parts] == [merged(manifest.contributions, part) for part in range(1)]


@pytest.mark.slow
def test_a_leader_that_plans_anew_after_a_crash_counts_what_was_not_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    def resume(me: PeerId, durable: Durable) -> Result:
        return replace(State(me=me, durable=durable), attempt=durable.promised), ()

    monkeypatch.setattr(round, "resume", resume)
    with pytest.raises(AssertionError):
        test_what_a_manifest_counts_is_what_its_results_were_merged_from(OTHER_ORDER, 1)


@pytest.mark.parametrize("dead", [None, 0, 1, 2])
def test_whatever_happened_a_majority_that_lives_and_talks_commits(dead: int | None) -> None:
    search = Search(first_base(3), Bounds(num_attempts=3, num_kills=1))
    worlds = search.some_worlds(1000)
    stuck = [world for world in worlds if not search.commits_when_calm(world, dead, num_attempts=8)]
    assert not stuck, f"{len(stuck)} of {len(worlds)} worlds never commit, the first: {search.describe(stuck[0])}"


def test_a_machine_that_never_leads_again_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round, "may_promise", lambda durable, attempt: False)
    search = Search(first_base(3), Bounds(num_attempts=3, num_kills=1))
    assert not all(search.commits_when_calm(world, 0, num_attempts=8) for world in search.some_worlds(100))


def always(*_: Any) -> bool:
    return True


def accept_whatever_was_promised(durable: Durable, attempt: Attempt, manifest: Manifest) -> bool:
    return durable.accepted is None or durable.accepted.attempt < attempt or durable.accepted.manifest == manifest


def forget(me: PeerId, durable: Durable) -> Result:
    return round.begin(me, durable.base), ()


@pytest.mark.parametrize(
    ("place", "name", "broken", "bounds"),
    [
        (decide, "may_accept", always, Bounds(num_attempts=2, num_kills=0)),
        (decide, "may_accept", accept_whatever_was_promised, Bounds(num_attempts=2, num_kills=0)),
        (decide, "is_quorum", always, Bounds(num_attempts=2, num_kills=0)),
        (round, "newest", lambda votes: None, Bounds(num_attempts=2, num_kills=0)),
        (round, "resume", forget, Bounds(num_attempts=2, num_kills=1)),
    ],
    ids=[
        "accepts twice",
        "accepts below what it promised",
        "commits without a majority",
        "leads on without asking what was accepted",
        "forgets at a crash",
    ],
)
def test_a_machine_that_breaks_one_rule_commits_two_manifests(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, broken: Callable[..., Any], bounds: Bounds
) -> None:
    monkeypatch.setattr(place, name, broken)
    with pytest.raises(TwoManifests):
        explored(ReducedSearch(first_base(3), bounds))


def test_the_reduced_search_notices_when_mail_that_it_drops_does_something(monkeypatch: pytest.MonkeyPatch) -> None:
    def promise(state: State, sender: PeerId, prepare: Prepare) -> Result:
        forgetful = replace(state, durable=Durable(base=state.base, accepted=state.durable.accepted))
        return decide.promise(forgetful, sender, prepare)

    monkeypatch.setattr(round, "promise", promise)
    with pytest.raises(NotDead):
        explored(ReducedSearch(first_base(3), Bounds(num_attempts=3, num_kills=0)))


def test_half_an_electorate_without_the_keeper_is_no_quorum() -> None:
    base = first_base(4)
    a, b, c, d = base.electorate
    assert rules.is_quorum(base, {a, b})
    assert not rules.is_quorum(base, {c, d})
    assert rules.is_quorum(base, {b, c, d})
    assert rules.is_quorum(base, {c, d}, left={a, b})
    assert not rules.is_quorum(base, {c}, left={a, b}), "the keeper has left, so half is not enough"


def test_the_newest_vote_is_the_one_of_the_latest_attempt() -> None:
    search = explored(ReducedSearch(first_base(3), Bounds(num_attempts=1, num_kills=0)))
    manifest, other, *_ = search.committed()
    votes = [Vote(attempt=Attempt(2), manifest=manifest), None, Vote(attempt=Attempt(1), manifest=other)]
    assert rules.newest(votes) == manifest
    assert rules.newest([None]) is None
