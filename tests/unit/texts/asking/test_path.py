"""Paths are the best there are, and who counts what others wait for keeps everybody's wait short."""

import heapq
from collections.abc import Callable
from itertools import pairwise, product

import numpy as np
import pytest

from weft.ids import PeerId
from weft.pipeline.routing import Failure
from weft.rng import stream
from weft.texts.asking import path as paths
from weft.texts.asking.path import AS_GOOD, Figures, Link, Path, Paths, Wanted, back_s, best, edge_s, node_s
from weft.texts.messages import MAX_LINKS, Near, SectionServed

Stage = dict[PeerId, Figures]
WANTED = Wanted(num_prompt=100, num_drawn=50, row_nbytes=4096)


def peer(number: int) -> PeerId:
    return PeerId(f"{number:064x}")


def cost_s(peers: tuple[PeerId, ...], stages: list[Stage], between: paths.Between, wanted: Wanted) -> float:
    """Return the sum as the module's first lines have it."""
    total = sum(node_s(stage[each], wanted) for stage, each in zip(stages, peers, strict=True))
    for number, (a, b) in enumerate(pairwise(peers), 1):
        total += edge_s(between(a, b), wanted, stages[number][b].num_held)
    return total + back_s(between(peers[-1], peers[0]), wanted)


@pytest.mark.parametrize("seed", range(8))
def test_the_path_is_the_best_of_all(seed: int) -> None:
    draws = stream(seed, "graph")
    for _ in range(10):
        sizes = draws.integers(1, 5, int(draws.integers(1, 5)))
        numbers = iter(range(100))
        stages = [
            {
                peer(next(numbers)): Figures(*draws.uniform(0.001, 0.1, 3), *map(int, draws.integers(0, 20, 2)))
                for _ in range(size)
            }
            for size in sizes
        ]
        links: dict[frozenset[PeerId], Link] = {}

        def between(a: PeerId, b: PeerId, links: dict[frozenset[PeerId], Link] = links) -> Link:
            pair = frozenset((a, b))
            return links.setdefault(pair, Link(draws.uniform(0, 0.3), draws.uniform(1e6, 1e9)))

        all_of_them = [cost_s(each, stages, between, WANTED) for each in product(*stages)]
        found = best(stages, between, WANTED)
        assert found is not None
        assert found.cost_s == pytest.approx(min(all_of_them))
        assert found.cost_s == pytest.approx(cost_s(found.peers, stages, between, WANTED))


def near(_a: PeerId, _b: PeerId) -> Link:
    return Link(0.01, 1e9)


def test_of_paths_that_are_nearly_alike_the_one_is_taken_that_has_read_most() -> None:
    plain, known = Figures(0.01, 0.001, 1e-6), Figures(0.0101, 0.001, 1e-6, num_held=64)
    far = known._replace(step_s=0.01 * AS_GOOD * 2)
    assert taken([{peer(0): plain, peer(1): known}]).peers == (peer(1),)
    assert taken([{peer(0): plain, peer(1): far}]).peers == (peer(0),)


def taken(stages: list[Stage]) -> Path:
    found = best(stages, near, WANTED)
    assert found is not None
    return found


def test_a_stage_without_members_has_no_path() -> None:
    assert best([{peer(0): Figures(0.01, 0.001, 0.001)}, {}], near, WANTED) is None


def served(stage: int, step_s: float = 0.01, **fields: object) -> SectionServed:
    told = {"rounds": (3,), "num_rows": 0, "num_waiting": 0, "num_free": 9, "row_s": 0.001, "token_s": 0.001}
    return SectionServed(stage=stage, step_s=step_s, **told | fields)  # type: ignore[arg-type]


def made(*told: tuple[int, SectionServed]) -> Paths:
    found = Paths(1 + max(each.stage for _, each in told))
    for number, each in told:
        found.seen(peer(number), each, 0.0)
    return found


def test_texts_sent_at_once_are_shared_out() -> None:
    both = made((0, served(0)), (1, served(0)), (2, served(0, step_s=0.2)))
    sent = [both.reserve(WANTED, 10.0, tie=str(number)) for number in range(8)]
    counts = [sum(each is not None and each.peers == (peer(number),) for each in sent) for number in range(3)]
    assert counts == [4, 4, 0]
    for each in sent:
        assert each is not None
        both.ended(each)
    assert both.reserve(WANTED, 10.0) is not None


def test_who_has_not_computed_yet_is_asked_as_soon_as_the_other_has_something_to_do() -> None:
    """However fast the other is: else nobody would ever know how fast it is."""
    quick, new = served(0, 0.002, row_s=0.0005), served(0, 0.0)
    links = made((0, quick), (1, new))
    reserved = [links.reserve(WANTED, 0.0) for _ in range(4)]
    assert {each.peers[0] for each in reserved if each is not None} == {peer(0), peer(1)}


def test_what_a_member_has_told_since_is_not_counted_twice() -> None:
    both = made((0, served(0)), (1, served(0, step_s=0.0101)))
    for _ in range(4):
        assert both.reserve(WANTED, 1.0) is not None
    both.seen(peer(0), served(0, num_rows=2), 5.0)
    both.seen(peer(1), served(0, step_s=0.0101, num_rows=2), 5.0)
    assert [each.num_rows for each in (both._figures(0, peer(0), 0), both._figures(0, peer(1), 0))] == [2, 2]


def test_others_who_ask_choose_by_the_same_news() -> None:
    """Of eight texts that a member draws two were sent from here: each that is sent from now on comes with two more."""
    asked = made((0, served(0)), (1, served(0, step_s=0.5)))
    for _ in range(2):
        sent = asked.reserve(WANTED, 1.0)
        assert sent is not None
        asked.drew(sent)
    assert asked.num_askers == 1.0, "nobody draws anything yet"
    asked.seen(peer(0), served(0, num_rows=8), 5.0)
    assert asked._figures(0, peer(0), 0).num_rows == 8
    assert asked.num_askers == 9 / 3  # one is counted beside either
    assert asked.reserve(WANTED, 6.0) is not None
    found = asked._figures(0, peer(0), 0)
    assert (found.num_rows, found.num_waiting) == (8 + 1 + 2, 3 * WANTED.num_prompt)
    asked.seen(peer(0), served(0, num_rows=2), 7.0)
    assert asked.num_askers == 1.0, "all are from here"
    asked.seen(peer(1), served(0, num_rows=9), 7.0)
    assert asked.num_askers == 12 / 3
    asked.gone(peer(1))
    assert asked.num_askers == 1.0


def test_a_text_that_goes_on_is_not_in_its_own_way() -> None:
    """A member draws it already: with it, it has as many texts as before."""
    both = made((0, served(0)), (1, served(0)))
    first = both.reserve(WANTED, 1.0)
    assert first is not None
    both.drew(first)
    (here,) = first.peers
    both.seen(here, served(0, num_rows=1), 5.0)
    both.ended(first)
    held = {here: WANTED.num_prompt}
    for _ in range(4):
        again = both.reserve(WANTED, 6.0, held=held, was=first)
        assert again is not None
        assert again.peers == first.peers
        both.ended(again)
    other = both.reserve(WANTED, 6.0)
    assert other is not None
    assert other.peers != first.peers, "to another text it is one in the way"


def test_who_has_read_a_text_goes_on_with_it_where_another_of_its_path_has_gone() -> None:
    """Though some path of others alone were a little shorter."""
    plain = Figures(0.01, 0.001, 1e-5)
    kept = plain._replace(step_s=0.0101, num_held=100)
    stages = [{peer(0): kept, peer(1): plain}, {peer(3): plain}, {peer(4): kept, peer(5): plain}]
    assert taken(stages).peers == (peer(0), peer(3), peer(4))
    far = [{peer(0): kept._replace(step_s=0.1), peer(1): plain}, *stages[1:]]
    assert taken(far).peers == (peer(1), peer(3), peer(4))


def test_who_fails_is_passed_over_for_a_while_and_longer_each_time() -> None:
    both = made((0, served(0)), (1, served(0, step_s=0.5)))
    assert path_at(both, 0.0) == (peer(0),)
    both.failed(peer(0), Failure.UNREACHABLE, 0.0)
    assert path_at(both, 1.9) == (peer(1),)
    assert path_at(both, 2.1) == (peer(0),)
    both.failed(peer(0), Failure.UNREACHABLE, 3.0)
    assert path_at(both, 6.9) == (peer(1),)
    both.gone(peer(1))
    assert both.reserve(WANTED, 6.9) is None
    anyway = both.reserve(WANTED, 6.9, has_barred=True)
    assert anyway is not None
    assert anyway.peers == (peer(0),)
    assert path_at(both, 7.1) == (peer(0),)
    both.failed(peer(0), Failure.UNREACHABLE, 8.0)
    both.drew(anyway)
    assert path_at(both, 8.1) == (peer(0),), "something came of it"


def test_of_who_is_passed_over_only_those_are_asked_that_a_stage_has_no_others_for() -> None:
    both = made((0, served(0)), (1, served(0, step_s=0.5)), (2, served(1)))
    for each in (0, 2):
        both.failed(peer(each), Failure.ERROR, 0.0)
    assert both.reserve(WANTED, 1.0) is None
    found = both.reserve(WANTED, 1.0, has_barred=True)
    assert found is not None
    assert found.peers == (peer(1), peer(2))


def path_at(made: Paths, now: float) -> tuple[PeerId, ...]:
    reserved = made.reserve(WANTED, now)
    assert reserved is not None
    made.ended(reserved)
    return reserved.peers


def test_all_of_a_path_have_the_same_weights_the_newest_that_go_together() -> None:
    four = made(
        (0, served(0, rounds=(5, 4))), (1, served(0, step_s=0.5)), (2, served(1, rounds=(4, 3))), (3, served(1))
    )
    reserved = four.reserve(WANTED, 0.0)
    assert reserved is not None
    assert (reserved.round, reserved.peers) == (4, (peer(0), peer(2)))
    pinned = four.reserve(WANTED, 0.0, round=3, without=[peer(2)])
    assert pinned is not None
    assert pinned.peers == (peer(1), peer(3))
    assert four.reserve(WANTED, 0.0, round=5) is None


@pytest.mark.parametrize(
    ("told", "without", "expected"),
    [
        ({"rounds": (5, 4)}, [], True),
        ({"rounds": (3,)}, [], True),  # it lags
        ({"rounds": (6,)}, [], False),  # it never had it
        ({"rounds": ()}, [], False),
        ({"rounds": (3,)}, [peer(1)], False),
    ],
)
def test_weights_may_come_where_who_lacks_them_has_older_ones(
    told: dict[str, tuple[int, ...]], without: list[PeerId], expected: bool
) -> None:
    two = made((0, served(0, rounds=(5,))), (1, served(1, **told)))
    assert two.may_come(5, without, is_exact=False) is expected
    assert not two.may_come(5, without, is_exact=True)


def test_a_text_that_is_exact_stays_with_members_that_compute_so() -> None:
    exact, rounded = {"numbers": "exact"}, {"numbers": "int8"}
    three = made((0, served(0, **exact)), (1, served(1, step_s=0.5, **exact)), (2, served(1, **rounded)))
    fast = three.reserve(WANTED, 0.0)
    assert fast is not None
    assert (fast.peers, fast.is_exact) == ((peer(0), peer(2)), False)
    slow = three.reserve(WANTED, 0.0, is_exact=True)
    assert slow is not None
    assert (slow.peers, slow.is_exact) == ((peer(0), peer(1)), True)
    assert three.reserve(WANTED, 0.0, without=[peer(1)], is_exact=True) is None
    unsaid = made((0, served(0)))
    assert unsaid.reserve(WANTED, 0.0, is_exact=True) is None


def test_a_gap_is_as_long_as_steps_are_where_members_compute_now_and_then() -> None:
    two = made((0, served(0)), (1, served(1, step_s=0.4, num_waiting=10**6)))
    assert two.gap_s((peer(0), peer(1))) == pytest.approx(0.011 + 2 * 0.401 + 0.05)  # however much is to be read


def test_a_near_member_comes_before_a_far_one() -> None:
    links = (Near(peer=peer(1), rtt_s=0.2, bps=1e8), Near(peer=peer(2), rtt_s=0.002, bps=1e8))
    three = made((0, served(0, links=links)), (1, served(1)), (2, served(1)))
    assert path_at(three, 0.0) == (peer(0), peer(2))
    assert three.ring_s((peer(0), peer(2))) < 0.05 < three.ring_s((peer(0), peer(1)))


def test_of_whom_nothing_is_told_is_no_nearer_than_the_farthest_that_is() -> None:
    many = [Near(peer=peer(100 + number), rtt_s=0.1 + 0.01 * number, bps=1e8) for number in range(MAX_LINKS)]
    told = made((0, served(0, links=tuple(many))), (1, served(0)), (2, served(1)))
    assert told.between(peer(0), peer(2)).rtt_s == pytest.approx(0.1 + 0.01 * (MAX_LINKS - 1))
    assert told.between(peer(1), peer(2)).rtt_s == paths.FIRST_RTT_S
    told.seen(peer(0), served(0, links=tuple(many[1:])), 1.0)  # there was room for one more
    assert told.between(peer(0), peer(2)).rtt_s == paths.FIRST_RTT_S


@pytest.mark.parametrize("seed", range(4))
def test_the_best_path_is_found_whoever_is_its_first_member(seed: int) -> None:
    """Near ones come before those whose steps are a little shorter, in the first stage, too."""
    draws = stream(seed, "ring")
    links = {(a, b): Link(draws.uniform(0.0, 0.5), 1e9) for a in range(40) for b in range(40)}
    stages = [
        {peer(20 * at + number): Figures(0.01 + 0.0001 * number, 0.0, 0.0) for number in range(20)} for at in (0, 1)
    ]

    def between(a: PeerId, b: PeerId) -> Link:
        return links[int(a, 16), int(b, 16)]

    found = best(stages, between, WANTED)
    assert found is not None
    assert found.cost_s == pytest.approx(min(cost_s(each, stages, between, WANTED) for each in product(*stages)))


def test_a_row_of_many_stages_is_in_one_step_of_many() -> None:
    """As long as steps are short for a trip, a member with several texts computes them one after the other."""
    figures = Figures(0.02, 0.004, 0.0, num_rows=4)
    one = Wanted(num_prompt=0, num_drawn=1, row_nbytes=0)
    assert node_s(figures, one) == pytest.approx(0.02 + 5 * 0.004 + 4 * 0.004)  # all at once, which each of four feels
    # One of 0.024 in 0.48: others compute for 4 x 0.05 x 0.95 of the time, and half of a step is waited for twice.
    assert node_s(figures, one._replace(trip_s=0.48)) == pytest.approx(0.024 * (1 + 0.2 * 0.95))
    # s = 0.02 / (1 - 0.004 x 5 / 0.1), and 0.02 / (1 - 0.004 x 4 / 0.1) without this text.
    busy = min(1.0, 4 * 0.025 / 0.1) * (1 - 0.025 / 0.1)
    others = 4 * (0.025 - max(0.024, 0.02 / 0.84))
    assert node_s(figures, one._replace(trip_s=0.1)) == pytest.approx(0.025 * (1 + busy) + others)
    assert node_s(figures, one._replace(trip_s=0.03)) <= 0.04 * 2 + 4 * 0.004 * 2  # never more than all at once, twice


def test_how_long_a_trip_takes_is_learnt_and_a_break_counts_little() -> None:
    one = made((0, served(0)))
    one.came(0.2)
    for _ in range(64):
        one.came(0.3)
    assert 0.25 < one._trip_s < 0.3
    before_s = one._trip_s
    one.came(60.0)
    assert one._trip_s < 1.05 * before_s


# --- a play: texts arrive, and each token of each goes through two stages ---


def gaps(choose: Callable[[list[Stage]], Path]) -> list[float]:
    """Return the seconds between tokens, of 240 texts that arrive ten a second."""
    paces = [[(0.010, 0.002), (0.012, 0.002), (0.015, 0.002)], [(0.010, 0.002), (0.013, 0.002), (0.014, 0.002)]]
    rows = [[0, 0, 0], [0, 0, 0]]
    waiting = [(0.1 * number, number, 40, ()) for number in range(240)]
    heapq.heapify(waiting)
    found = []
    while waiting:
        now, number, num_left, path = heapq.heappop(waiting)
        if not path:
            stages = [
                {peer(n): Figures(*pace, 0.0, rows[stage][n]) for n, pace in enumerate(paces[stage])}
                for stage in range(2)
            ]
            path = tuple(int(each, 16) for each in choose(stages).peers)  # type: ignore[assignment]
            for stage, each in enumerate(path):
                rows[stage][each] += 1  # type: ignore[index]
        if not num_left:
            for stage, each in enumerate(path):
                rows[stage][each] -= 1  # type: ignore[index]
            continue
        gap = sum(
            paces[stage][each][0] + paces[stage][each][1] * rows[stage][each]  # type: ignore[index]
            for stage, each in enumerate(path)
        )
        found.append(gap)
        heapq.heappush(waiting, (now + gap, number, num_left - 1, path))
    return found


def test_routing_that_does_not_look_at_load_makes_everybody_wait() -> None:
    def blind(stages: list[Stage]) -> Path:
        return taken([{each: figures._replace(num_rows=0) for each, figures in stage.items()} for stage in stages])

    p95 = {choose: float(np.quantile(gaps(choose), 0.95)) for choose in (taken, blind)}
    assert p95[blind] > 1.5 * p95[taken]


def links_to(*numbers: int) -> tuple[Near, ...]:
    return tuple(Near(peer=peer(number), rtt_s=0.001 * (1 + number % 7), bps=1e8) for number in sorted(numbers))


def test_of_links_only_those_are_kept_that_a_member_told_of_last() -> None:
    """One that names others in each note takes no more memory for it."""
    told = made((0, served(0, links=links_to(1, 2))), (5, served(1)))
    for number in range(100):
        told.seen(peer(0), served(0, links=links_to(*range(1000 * number, 1000 * number + MAX_LINKS))), 1.0 + number)
    assert sum(len(links) for each in told._links.values() for links in each.values()) == MAX_LINKS
    assert told.between(peer(0), peer(99_003)).rtt_s == pytest.approx(0.001 * (1 + 99_003 % 7))
    assert told.between(peer(0), peer(1)).bps == paths.FIRST_BPS
    told.seen(peer(0), served(1, links=links_to(7)), 200.0)  # it has two stages
    assert told.between(peer(0), peer(99_003)).bps == told.between(peer(7), peer(0)).bps == 1e8
    told.gone(peer(0))
    assert list(told._links) == [peer(5)]
