"""Every interleaving of three members within bounds: one manifest per branch and round, progress with a majority."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest

from model.reduced import NotDead, ReducedSearch
from model.world import NO_ACTS, Bounds, Search, TwoManifests, World, contribution, first_base, merged
from weft.ids import Attempt, PeerId
from weft.sync.records.acts import Warrant
from weft.sync.records.messages import Base, Manifest, Prepare, Vote, counted
from weft.sync.round import round, rules
from weft.sync.round.machine import Result, State, replace
from weft.sync.round.rules import Durable

LIMIT = 50_000_000  # far above what any bound here needs: reaching it is a failure
OTHER_ORDER = "13"  # a run in which no leader owns the part of its first plan; in run 00 each does


def explored(search: Search) -> Search:
    assert search.run(LIMIT), f"gave up after {search.num_worlds} worlds"
    assert search.num_commits > 0, "a search in which nothing commits shows nothing"
    return search


WITH_A_KILL = Bounds(num_attempts=2, num_kills=1)


@cache  # tests look again at what it has found
def found(bounds: Bounds, run: str, num_parts: int) -> Search:
    return explored(ReducedSearch(first_base(3, num_parts, run), bounds))


@pytest.mark.parametrize(
    ("bounds", "run"),
    [
        (WITH_A_KILL, "00"),
        (Bounds(num_attempts=1, num_kills=1, num_leaves=1), "00"),
        (Bounds(num_attempts=1, num_kills=0, num_leaves=2), OTHER_ORDER),
    ],
    ids=str,
)
def test_no_interleaving_commits_two_manifests(bounds: Bounds, run: str) -> None:
    found(bounds, run, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(num_attempts=3, num_kills=1),
        Bounds(num_attempts=3, num_kills=2),
        Bounds(num_attempts=3, num_kills=0, num_leaves=1),
        Bounds(num_attempts=2, num_kills=1, num_leaves=1),  # a third attempt would need over 20 GB
    ],
    ids=str,
)
def test_no_interleaving_commits_two_manifests_in_depth(bounds: Bounds) -> None:
    explored(ReducedSearch(first_base(3), bounds))


@pytest.mark.slow
def test_no_interleaving_of_four_members_commits_two_manifests() -> None:
    explored(ReducedSearch(first_base(4), Bounds(num_attempts=2, num_kills=1)))


def find_the_same(num_members: int, bounds: Bounds, run: str) -> None:
    find_the_same_in(first_base(num_members, run=run), bounds)


def find_the_same_in(base: Base, bounds: Bounds, acts: Mapping[int, tuple[Warrant, ...]] = NO_ACTS) -> None:
    whole, reduced = explored(Search(base, bounds, acts)), explored(ReducedSearch(base, bounds, acts))
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


@pytest.fixture(scope="module")
def walks() -> tuple[Search, list[World]]:
    search = Search(first_base(3, run=OTHER_ORDER), Bounds(num_attempts=3, num_kills=1))
    return search, search.some_worlds(300)


@pytest.mark.slow
def test_no_interleaving_commits_two_manifests_and_walks_at_random_come_upon_no_others(
    walks: tuple[Search, list[World]],
) -> None:
    whole, _ = walks
    reduced = explored(ReducedSearch(whole.base, whole.bounds))
    assert whole.committed()
    assert whole.proposed() <= reduced.proposed()
    assert whole.committed() <= reduced.committed()


@pytest.mark.full
@pytest.mark.parametrize(
    ("run", "num_parts"),
    [
        ("00", 1),
        pytest.param(OTHER_ORDER, 1, marks=pytest.mark.slow),
        pytest.param(OTHER_ORDER, 2, marks=pytest.mark.slow),
    ],
)
def test_every_manifest_counts_each_payload_once_and_only_what_was_announced_and_merged(
    run: str, num_parts: int
) -> None:
    search = found(WITH_A_KILL, run, num_parts)
    announced = {contribution(search.base, number, life) for number in range(3) for life in range(2)}
    for manifest in search.proposed():
        assert set(manifest.contributions) <= set(map(counted, announced))
        assert len({each.peer for each in manifest.contributions}) == len(manifest.contributions) > 0
        assert manifest.committed_tokens == sum(each.tokens for each in manifest.contributions)
    assert not miscounted(search)


def miscounted(search: Search) -> list[Manifest]:
    """Return what was proposed with a result that was merged from other contributions than are counted.

    More in the result is counted twice, because it stays in its owner's carry; less is lost.
    """
    lives = range(search.bounds.num_kills + 1)
    members = range(len(search.base.electorate))
    known = [contribution(search.base, number, life) for number in members for life in lives]
    brought = {counted(each): each for each in known}
    return [
        manifest
        for manifest in search.proposed()
        if any(
            made.result != merged([brought[each] for each in manifest.contributions], part)
            for part, made in enumerate(manifest.parts)
        )
    ]


def test_a_leader_that_plans_anew_after_a_crash_counts_what_was_not_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round, "resume", forget_plan)
    assert miscounted(explored(Search(first_base(2, run="01"), Bounds(num_attempts=1, num_kills=1))))


@pytest.mark.parametrize("dead", [None, 0, 1, 2])
def test_whatever_happened_a_majority_that_lives_and_talks_commits(
    walks: tuple[Search, list[World]], dead: int | None
) -> None:
    search, worlds = walks
    stuck = [world for world in worlds if not search.commits_when_calm(world, dead, num_attempts=8)]
    assert not stuck, f"{len(stuck)} of {len(worlds)} worlds never commit, the first: {search.describe(stuck[0])}"


def test_a_machine_that_never_leads_again_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "may_promise", lambda durable, attempt: False)
    search = Search(first_base(3), Bounds(num_attempts=3, num_kills=1))
    assert not all(search.commits_when_calm(world, 0, num_attempts=8) for world in search.some_worlds(100))


def always(*_: Any) -> bool:
    return True


def accept_whatever_was_promised(durable: Durable, attempt: Attempt, manifest: Manifest) -> bool:
    return durable.accepted is None or durable.accepted.attempt < attempt or durable.accepted.manifest == manifest


def forget_plan(me: PeerId, durable: Durable) -> Result:
    return State(me=me, durable=durable, attempt=durable.promised), ()


def forget(me: PeerId, durable: Durable) -> Result:
    return round.begin(me, durable.base), ()


@pytest.mark.parametrize(
    ("place", "name", "broken", "bounds"),
    [
        (rules, "may_accept", always, Bounds(num_attempts=2, num_kills=0)),
        (rules, "may_accept", accept_whatever_was_promised, Bounds(num_attempts=2, num_kills=0)),
        (rules, "is_quorum", always, Bounds(num_attempts=2, num_kills=0)),
        (rules, "newest", lambda votes: None, Bounds(num_attempts=2, num_kills=0)),
        pytest.param(round, "resume", forget, Bounds(num_attempts=2, num_kills=1), marks=pytest.mark.slow),
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
    honest = round.promise

    def promise(state: State, sender: PeerId, prepare: Prepare) -> Result:
        forgetful = replace(state, durable=Durable(base=state.base, accepted=state.durable.accepted))
        return honest(forgetful, sender, prepare)

    monkeypatch.setattr(round, "promise", promise)
    with pytest.raises(NotDead):
        explored(ReducedSearch(first_base(3), Bounds(num_attempts=3, num_kills=0)))


def test_half_an_electorate_without_the_tie_breaker_is_no_quorum() -> None:
    base = first_base(4)
    a, b, c, d = base.electorate
    assert rules.is_quorum(base, {a, b})
    assert not rules.is_quorum(base, {c, d})
    assert rules.is_quorum(base, {b, c, d})
    assert rules.is_quorum(base, {c, d}, left={a, b})
    assert not rules.is_quorum(base, {c}, left={a, b}), "the tie-breaker has left, so half is not enough"


def test_the_newest_vote_is_the_one_of_the_latest_attempt() -> None:
    search = explored(ReducedSearch(first_base(3), Bounds(num_attempts=1, num_kills=0)))
    manifest, other, *_ = search.committed()
    votes = [Vote(attempt=Attempt(2), manifest=manifest), None, Vote(attempt=Attempt(1), manifest=other)]
    assert rules.newest(votes) == manifest
    assert rules.newest([None]) is None
