"""Eight machines, without models: several die at once, halves lose each other, newcomers come at any moment.

R1 to R4 are asserted of each play by `Theatre.check`.
"""

from pathlib import Path

import msgspec
import pytest

from scenarios import rules
from scenarios.swarm import LEASE_TOKENS
from scenarios.theatre import Theatre, make_run_file, names
from weft.events import BranchLeft, BranchOpened, MajorityLost, StateJoined, WorkDropped
from weft.ids import BranchId
from weft.net.membership.full_mesh import GONE_S
from weft.peer.fork import ORPHAN_AFTER_S
from weft.sim.play import Machine, Played
from weft.sim.scenario import Drop, Fault, Freeze, Kill, Kind, Partition

ROUND_S = 10.0
SLOW_PHASES_S = [
    pytest.param(step / 50, marks=pytest.mark.slow) for step in (0, 1, 3, 5, 10, 4, 6, 7, 8, 9, 11, 12, 15, 25)
]
AT_S = 3.5 * ROUND_S  # in the middle of inner steps
FAULT_S = ROUND_S + GONE_S + 4.0  # a round in which members vanish: they are given up, and another leads or owns


@pytest.fixture
def eight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Eight":
    monkeypatch.setattr("weft.peer.loop.evaluate.SAMPLE_TOKENS", 1)
    return Eight(tmp_path)


class Eight:
    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(self, num_rounds: int, *faults: Fault, more: tuple[Kind, ...] = ()) -> tuple[Theatre, Played]:
        run_file = make_run_file(self.root)
        train = msgspec.structs.replace(run_file.train, tokens=num_rounds * 8 * LEASE_TOKENS, evaluate_windows=1)
        theatre = Theatre(msgspec.structs.replace(run_file, train=train), self.root)
        speed = LEASE_TOKENS / ROUND_S
        return theatre, theatre(*faults, count=8, tokens_per_s=speed, more=more, scenario={"compute": "cost"})


def lab(*numbers: int) -> tuple[str, ...]:
    return tuple(f"lab-{number}" for number in numbers)


def who_kept_the_majority(theatre: Theatre, played: Played, num: int) -> list[Machine]:
    """Return the machines that never lost it, of which there are `num`."""
    kept = [machine for machine in played.machines if not theatre.heard(MajorityLost, machine)]
    assert len(kept) == num
    return kept


@pytest.mark.full
def test_three_of_eight_die_at_once_and_the_others_go_on(eight: Eight) -> None:
    theatre, played = eight(8, *(Kill(peer=name, at_s=AT_S) for name in lab(1, 4, 6)))
    living = names(played, *lab(0, 2, 3, 5, 7))
    theatre.check(played, longest_s=FAULT_S, unhurt=living)
    assert {machine.end for machine in living} == {"complete"}
    assert theatre.heard(MajorityLost) == []


@pytest.mark.full
@pytest.mark.parametrize("num", [pytest.param(5, marks=pytest.mark.slow), 4], ids=["5|3", "4|4"])
def test_sides_that_heal_before_a_branch_opens_lose_nothing(eight: Eight, num: int) -> None:
    sides = lab(*range(num)), lab(*range(num, 8))
    theatre, played = eight(10, Partition(sides=sides, at_s=AT_S, lasts_s=ORPHAN_AFTER_S / 2))
    theatre.check(played, longest_s=FAULT_S, unhurt=who_kept_the_majority(theatre, played, num))
    assert {machine.end for machine in played.machines} == {"complete"}
    assert theatre.heard(BranchOpened) == []
    lost = {event.alive for _, event in theatre.heard(MajorityLost)}
    assert lost == {8 - num}  # of two halves, the one with the tie-breaker goes on
    assert sum(each.trained - each.counted for each in played.machines) == sum(
        each.carried or 0 for each in played.machines
    )


@pytest.mark.slow
@pytest.mark.parametrize("num", [pytest.param(5, marks=pytest.mark.slow), 4], ids=["5|3", "4|4"])
def test_of_a_side_that_opened_a_branch_all_is_brought_to_the_other_once(eight: Eight, num: int) -> None:
    sides = lab(*range(num)), lab(*range(num, 8))
    theatre, played = eight(18, Partition(sides=sides, at_s=AT_S, lasts_s=ORPHAN_AFTER_S + 30.0))
    theatre.check(played, longest_s=FAULT_S, unhurt=who_kept_the_majority(theatre, played, num))
    assert {machine.end for machine in played.machines} == {"complete"}
    opened = {event.branch: event.members for _, event in theatre.heard(BranchOpened)}
    ((branch, members),) = opened.items()
    assert len(members) == 8 - num
    forsaken = sum(rules.counted(each for each in played.manifests if each.branch == branch).values())
    assert forsaken > 0
    trained, counted = (sum(getattr(each, what) for each in played.machines) for what in ("trained", "counted"))
    # Who was cut off in the middle of a round cannot know whether it counted them: they say so, once at most.
    dropped = [event.tokens for _, event in theatre.heard(WorkDropped)]
    assert len(dropped) <= len(members)
    assert trained - counted - sum(each.carried or 0 for each in played.machines) == forsaken + sum(dropped)
    (legacy,) = rules.legacies(played.manifests, BranchId(played.manifests[0].run))
    assert legacy.peer in members
    assert legacy.legacy is not None
    assert legacy.legacy.tokens == forsaken
    for machine in played.machines:
        left = [event for _, event in theatre.heard(BranchLeft, machine)]
        assert [event.kept == event.tokens for event in left] == ([True] if machine.peer in members else [])


@pytest.mark.slow
def test_who_sleeps_until_others_would_have_opened_a_branch_goes_on_with_them(eight: Eight) -> None:
    theatre, played = eight(16, Freeze(peer="lab-3", at_s=AT_S, lasts_s=ORPHAN_AFTER_S + 20.0))
    (sleeper,) = names(played, "lab-3")
    theatre.check(played, longest_s=FAULT_S, unhurt=[each for each in played.machines if each is not sleeper])
    assert theatre.heard(BranchOpened) == []
    assert sleeper.peer in theatre.commits(sleeper)[-1].contributors


@pytest.mark.slow
def test_those_that_slept_follow_the_few_that_trained_on(eight: Eight) -> None:
    """They are a majority as soon as they wake; but what the few counted meanwhile is more than a round or two."""
    asleep = lab(0, 1, 2, 3, 4, 5)
    theatre, played = eight(14, *(Freeze(peer=name, at_s=AT_S, lasts_s=ORPHAN_AFTER_S + 60.0) for name in asleep))
    rules.one_history(theatre.commits())
    assert len({machine.replica for machine in played.machines}) == 1
    assert {machine.end for machine in played.machines} == {"complete"}
    ((branch, members),) = {(event.branch, event.members) for _, event in theatre.heard(BranchOpened)}
    assert set(members) == {machine.peer for machine in names(played, *lab(6, 7))}
    assert {theatre.commits(machine)[-1].branch for machine in played.machines} == {branch}


@pytest.mark.slow
def test_half_of_the_payloads_of_eight_may_be_lost(eight: Eight) -> None:
    theatre, played = eight(10, Drop(peer="lab", at_s=0.0, share=0.5))
    theatre.check(played, longest_s=3 * ROUND_S, unhurt=played.machines)
    commits = theatre.commits(played.machines[0])
    share = sum(len(event.contributors) for event in commits) / (8 * len(commits))
    assert 0.4 < share < 0.95


@pytest.mark.full
@pytest.mark.parametrize("phase_s", [0.04, 5.0, *SLOW_PHASES_S])
def test_a_newcomer_stops_nobody_in_whichever_phase_of_a_round_it_comes(eight: Eight, phase_s: float) -> None:
    """From the moment at which inner steps are over: announced, planned, merged, held, voted, decided."""
    late = Kind(name="late", tokens_per_s=LEASE_TOKENS / ROUND_S, joins_at_s=2 * ROUND_S + phase_s)
    theatre, played = eight(6, more=(late,))
    *members, newcomer = played.machines
    theatre.check(played, longest_s=1.2 * ROUND_S, unhurt=members)
    assert len(theatre.heard(StateJoined, newcomer)) == 1
    assert newcomer.counted > 0
    assert newcomer.end == "complete"
