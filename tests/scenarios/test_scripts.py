"""Faults as a scenario file scripts them: each does what it says, and the run goes on."""

from typing import Literal

import pytest

from scenarios.swarm import LEASE_TOKENS
from scenarios.theatre import NUM_ROUNDS, SPEED, Theatre, names
from weft.events import (
    AttemptStarted,
    BranchLeft,
    BranchOpened,
    MemberGone,
    MemberSuspected,
    Notice,
    PayloadRejected,
    RoundMissed,
    StateJoined,
    StepDone,
)
from weft.net.membership.full_mesh import GONE_S, SUSPECT_S
from weft.sim.byzantine import CLAIM_TOKENS
from weft.sim.play import Played
from weft.sim.scenario import Corrupt, Drop, Freeze, Kill, Kind, Lie, Line, Partition, Skew, Slow

EPOCH_S = 1_700_000_000.0
FAULT_S = 1.0 + GONE_S + 4.0  # a round of a second in which a member vanishes: it is given up, and another leads


def ends(played: Played) -> list[str]:
    return [machine.end for machine in played.machines]


@pytest.mark.full
def test_who_stands_still_for_a_moment_is_waited_for(theatre: Theatre) -> None:
    played = theatre(Freeze(peer="lab-2", at_s=3.5, lasts_s=4.0))
    theatre.check(played)
    assert theatre.heard(MemberSuspected) == []
    (frozen,) = names(played, "lab-2")
    assert frozen.num_missed == 0
    assert not [at for at, _ in theatre.heard(StepDone, frozen) if 3.5 < at - EPOCH_S < 7.5]
    assert NUM_ROUNDS + 4 <= played.took_s < theatre.calm().took_s + 8.0  # its inner steps, and what it slept


@pytest.mark.full
def test_who_stands_still_for_longer_is_suspected_and_comes_back_with_its_work(theatre: Theatre) -> None:
    lasts_s = (SUSPECT_S + GONE_S) / 2
    played = theatre(Freeze(peer="lab-2", at_round=2, lasts_s=lasts_s))
    (frozen,) = names(played, "lab-2")
    theatre.check(played, longest_s=FAULT_S, unhurt=[each for each in played.machines if each is not frozen])
    assert len(theatre.heard(MemberSuspected)) == 3
    assert theatre.heard(MemberGone) == []
    assert frozen.num_missed > 0
    assert frozen.peer in theatre.commits(frozen)[-1].contributors


@pytest.mark.full
def test_who_stands_still_until_it_is_given_up_comes_back_with_its_work(theatre: Theatre) -> None:
    played = theatre(Freeze(peer="lab-1", at_round=2, lasts_s=2 * GONE_S), tokens_per_s=SPEED / 3)
    (frozen,) = names(played, "lab-1")
    theatre.check(played, longest_s=2.0 + FAULT_S, unhurt=[each for each in played.machines if each is not frozen])
    assert {event.member for _, event in theatre.heard(MemberGone)} == {frozen.peer}
    assert frozen.peer in theatre.commits(frozen)[-1].contributors
    assert theatre.heard(BranchOpened) == []


@pytest.mark.full
def test_who_is_killed_in_its_sleep_comes_back(theatre: Theatre) -> None:
    faults = Freeze(peer="lab-1", at_s=3.5, lasts_s=600.0), Kill(peer="lab-1", at_s=5.0, returns_after_s=3.0)
    played = theatre(*faults, tokens_per_s=SPEED / 2)
    theatre.check(played)
    assert ends(played) == 4 * ["complete"]
    assert names(played, "lab-1")[0].num_lives == 2


def test_half_of_all_payloads_may_be_lost(theatre: Theatre) -> None:
    played = theatre(Drop(peer="lab", at_s=0.0, share=0.5), count=4, seed=3)
    theatre.check(played, longest_s=FAULT_S, unhurt=played.machines)
    commits = theatre.commits(played.machines[0])
    counted = sum(len(event.contributors) for event in commits) / sum(
        len(event.contributors) + len(event.left_out) for event in commits
    )
    assert 0.3 < counted < 0.98
    assert any("update" in why for event in commits for why in event.left_out.values())


@pytest.mark.full
def test_letters_of_a_kind_may_be_lost(theatre: Theatre) -> None:
    """An owner's word that it has merged a part reaches nobody for a while: another owner is found."""
    played = theatre(Drop(peer="lab-1", what="letters", kinds=("Merged",), at_round=2, share=1.0, lasts_s=5.0))
    theatre.check(played)
    assert theatre.heard(AttemptStarted)


@pytest.mark.full
def test_two_sides_reach_nobody_of_each_other_and_who_is_on_none_reaches_both(theatre: Theatre) -> None:
    fault = Partition(sides=(("lab-0",), ("lab-1", "lab-2")), at_s=3.5, lasts_s=15.0)
    played = theatre(fault, tokens_per_s=SPEED / 2)
    theatre.check(played)
    one, *pair, neutral = played.machines
    assert {event.member for _, event in theatre.heard(MemberSuspected, one)} == {each.peer for each in pair}
    assert {event.member for _, event in theatre.heard(MemberSuspected, neutral)} == set()


@pytest.mark.full
def test_partitions_that_overlap_leave_no_link_cut(theatre: Theatre) -> None:
    long, short = (
        Partition(sides=(("lab-1",),), at_s=3.0, lasts_s=6.0),
        Partition(sides=(("lab-1",), ("lab-2",)), at_s=4.0, lasts_s=2.0),
    )
    played = theatre(long, short)
    theatre.check(played)
    cut_off = {event.member for _, event in theatre.heard(MemberSuspected, names(played, "lab-2")[0])}
    assert cut_off == {names(played, "lab-1")[0].peer}  # the shorter one's end heals nothing of the longer's


@pytest.mark.full
def test_damaged_payloads_are_not_counted_and_the_work_is_later(theatre: Theatre) -> None:
    played = theatre(Corrupt(peer="lab-1", at_s=3.0, lasts_s=5.0))
    theatre.check(played)
    (broken,) = names(played, "lab-1")
    assert theatre.heard(RoundMissed, broken)
    assert theatre.commits(broken)[-1].left_out == {}
    assert broken.counted > 0


@pytest.mark.full
def test_a_machine_that_writes_damaged_bytes_harms_no_other(theatre: Theatre) -> None:
    played = theatre(Corrupt(peer="lab-1", what="bytes", share=0.1, at_s=3.0, lasts_s=6.0))
    theatre.check(played)
    assert ends(played) == 4 * ["complete"]


@pytest.mark.full
def test_a_claim_of_a_quintillion_tokens_changes_nothing(theatre: Theatre) -> None:
    honest = theatre.calm()
    played = theatre(Lie(peer="lab-1", about="tokens", at_s=0.0))
    theatre.check(played)
    assert any(str(CLAIM_TOKENS) in event.text for _, event in theatre.heard(Notice))
    assert [(each.counted, each.replica) for each in played.machines] == [
        (each.counted, each.replica) for each in honest.machines
    ]
    assert played.committed_tokens == honest.committed_tokens


@pytest.mark.full
@pytest.mark.parametrize("about", ["branch", "progress"])
@pytest.mark.parametrize("count", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_who_claims_to_be_far_ahead_takes_nobody_along(
    theatre: Theatre, about: Literal["branch", "progress"], count: int
) -> None:
    """It offers its state as that of the branch, or the round, that it claims."""
    honest = theatre.calm(count=count)
    played = theatre(Lie(peer="lab-1", about=about, at_s=0.0), count=count)
    theatre.check(played)
    assert [(each.counted, each.replica, each.end) for each in played.machines] == [
        (each.counted, each.replica, each.end) for each in honest.machines
    ]
    assert played.took_s < honest.took_s + 1.0
    assert theatre.heard(BranchLeft) == theatre.heard(StateJoined) == theatre.heard(RoundMissed) == []


@pytest.mark.full
def test_who_claims_to_be_far_ahead_in_a_long_first_round_takes_nobody_along(theatre: Theatre) -> None:
    played = theatre(Lie(peer="lab-1", about="branch", at_s=0.0), tokens_per_s=SPEED / 20)
    theatre.check(played)
    assert all(machine.counted == NUM_ROUNDS * LEASE_TOKENS for machine in played.machines)
    assert theatre.heard(StateJoined) == []


@pytest.mark.full
@pytest.mark.parametrize("about", ["branch", "progress"])
def test_a_newcomer_and_who_returns_follow_the_others_and_not_who_claims_to_be_ahead(
    theatre: Theatre, about: Literal["branch", "progress"]
) -> None:
    faults = Lie(peer="lab-1", about=about, at_s=0.0), Kill(peer="lab-2", at_s=2.5, returns_after_s=3.0)
    late = Kind(name="late", tokens_per_s=SPEED, joins_at_s=3.0)
    played = theatre(*faults, more=(late,))
    theatre.check(played)
    assert ends(played) == 5 * ["complete"]
    assert len({each.replica for each in played.machines}) == 1
    assert played.committed_tokens < CLAIM_TOKENS


@pytest.mark.full
def test_an_owner_whose_results_are_no_numbers_owns_nothing_of_that_round(theatre: Theatre) -> None:
    """It could be an owner in every attempt, were it not left out: attempts give parts to others in turn."""
    played = theatre(Lie(peer="lab-1", about="results", at_round=2))
    theatre.check(played)
    (liar,) = names(played, "lab-1")
    assert {event.member for _, event in theatre.heard(PayloadRejected)} == {liar.peer}
    owners = {part.owner for manifest in played.manifests if manifest.round > 3 for part in manifest.parts}
    assert liar.peer not in owners
    assert played.took_s < theatre.calm().took_s + 10.0
    assert liar.counted == liar.trained


@pytest.mark.full
def test_an_owner_that_says_it_can_have_nobodys_work_keeps_nobody_out(theatre: Theatre) -> None:
    """It owns nothing more in an attempt that another leads, and one that it leads itself comes to nothing."""
    played = theatre(Lie(peer="lab-1", about="stuck", at_round=2))
    theatre.check(played)
    assert ends(played) == 4 * ["complete"]
    (liar,) = names(played, "lab-1")
    lied_in = [manifest for manifest in played.manifests if manifest.round > 3]
    assert len(lied_in) > 5
    for manifest in lied_in:
        assert len(manifest.contributions) == 4
        assert liar.peer not in {part.owner for part in manifest.parts}


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_nobody_follows_a_leader_that_proposes_nonsense(theatre: Theatre, seed: int) -> None:
    honest = theatre.calm(seed=seed)
    (fourth,) = [each for each in honest.manifests if each.round == 4]
    liar = next(machine for machine in honest.machines if machine.peer == fourth.leader)
    played = theatre(Lie(peer=liar.name, about="proposals", at_round=1), seed=seed)
    theatre.check(played)
    others = {machine.peer for machine in played.machines} - {liar.peer}
    for manifest in played.manifests:  # what it proposed and what it says it accepted may contradict each other
        assert set(manifest.members) >= others
        assert len(manifest.members) == len(manifest.leases)
        assert all(each.tokens <= manifest.round * LEASE_TOKENS for each in manifest.contributions)
    assert played.committed_tokens == sum(machine.counted for machine in played.machines)
    assert theatre.heard(AttemptStarted)


@pytest.mark.full
def test_a_clock_that_jumps_by_an_hour_changes_nothing(theatre: Theatre) -> None:
    right = theatre.calm()
    jumps = Skew(peer="lab-1", ahead_s=3600.0, at_s=4.0, lasts_s=3.0), Skew(peer="lab-2", ahead_s=-3600.0, at_s=5.0)
    wrong = theatre(*jumps)
    assert right.machines == wrong.machines
    assert right.took_s == pytest.approx(wrong.took_s, abs=0.5)  # equal timers may fire in another order


@pytest.mark.full
def test_lines_that_are_worse_one_after_another_leave_the_usual_one_behind(theatre: Theatre) -> None:
    """The first ends while the second is in force, the second after it."""
    first = Line(peer="lab-1", at_s=2.5, lasts_s=2.0, delay_ms=400.0)
    second = Line(peer="lab-1", at_s=3.5, lasts_s=2.0, delay_ms=300.0)
    slow = Slow(peer="lab-2", at_s=2.5, lasts_s=2.0, factor=0.5), Slow(peer="lab-2", at_s=3.5, lasts_s=2.0, factor=0.5)
    usual = theatre()
    played = theatre(first, second, *slow)
    theatre.check(played)
    last_s = [event.duration_s for event in theatre.commits(played.machines[0])][-3:]
    theatre.logs.pop()
    assert last_s == pytest.approx([event.duration_s for event in theatre.commits(usual.machines[0])][-3:])
