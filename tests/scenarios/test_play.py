"""Scenarios as files describe them, played with a model of some ten thousand parameters."""

import statistics
from pathlib import Path

import msgspec
import pytest

from scenarios.swarm import BATCH, FEDAVG, LEASE_TOKENS, SEQ_LEN
from scenarios.theatre import FIRST_ROUNDS, NUM_ROUNDS, SPEED, Theatre
from weft.run.config import RunFile, ShapedModel
from weft.sim.play import Played
from weft.sim.scenario import Fault, Kill, Kind, Line, Partition, Slow, Stop


def ends(played: Played) -> list[str]:
    return [machine.end for machine in played.machines]


@pytest.mark.full
def test_without_faults_all_that_is_trained_is_counted(theatre: Theatre) -> None:
    played = theatre()
    assert ends(played) == 4 * ["complete"]
    assert played.num_rounds == NUM_ROUNDS
    assert [machine.counted for machine in played.machines] == 4 * [NUM_ROUNDS * LEASE_TOKENS]
    assert [machine.trained for machine in played.machines] == 4 * [NUM_ROUNDS * LEASE_TOKENS]
    assert len({machine.replica for machine in played.machines}) == 1
    assert NUM_ROUNDS <= played.took_s < NUM_ROUNDS + 10


@pytest.mark.full
def test_one_scenario_has_one_log_byte_for_byte_and_another_seed_another(theatre: Theatre) -> None:
    faults = (
        Kill(peer="lab-1", at_round=3, returns_after_s=5.0),
        Partition(sides=(("lab-2",),), at_s=6.0, lasts_s=3.0),
    )
    links = {"jitter_ms": 20.0, "loss": 0.01, "up_mbit": 10.0}
    for seed in (1, 1, 2):
        theatre(*faults, seed=seed, **links)
    assert theatre.logs[0] == theatre.logs[1]
    assert theatre.logs[0] != theatre.logs[2]
    assert b"RoundCommitted" in theatre.logs[0]


def test_who_is_killed_comes_back_and_is_counted_again(theatre: Theatre) -> None:
    played = theatre(Kill(peer="lab-2", at_round=2, returns_after_s=4.0))
    assert ends(played) == 4 * ["complete"]
    victim, evidence = played.machines[2], played.machines[0]
    lost = [event.round for event in theatre.commits(evidence) if victim.peer not in event.contributors]
    assert lost
    assert min(lost) <= 4
    assert victim.peer in theatre.commits(evidence)[-1].contributors
    assert victim.counted <= victim.trained


@pytest.mark.full
def test_who_is_killed_for_good_is_missed_once(theatre: Theatre) -> None:
    played = theatre(Kill(peer="lab-3", at_round=2))
    assert ends(played) == [*3 * ["complete"], "killed"]
    assert played.unplayed == ()


@pytest.mark.full
def test_who_is_stopped_says_goodbye_and_comes_back(theatre: Theatre) -> None:
    played = theatre(Stop(peer="lab-0", at_s=4.5, returns_after_s=3.0))
    assert ends(played) == 4 * ["complete"]
    reasons = [why for event in theatre.commits(played.machines[1]) for why in event.left_out.values()]
    assert reasons
    assert all("goodbye" in why or "come back" in why for why in reasons)


def test_a_minority_that_was_cut_off_hands_its_work_in_later(theatre: Theatre) -> None:
    played = theatre(Partition(sides=(("lab-1",),), at_s=3.5, lasts_s=4.0))
    assert ends(played) == 4 * ["complete"]
    assert len({machine.replica for machine in played.machines}) == 1
    assert played.machines[1].counted <= played.machines[1].trained


@pytest.mark.full
def test_two_that_are_cut_off_together_reach_each_other(theatre: Theatre) -> None:
    played = theatre(Partition(sides=(("lab-1", "lab-2"),), at_s=3.5, lasts_s=600.0))
    assert all(end in ("complete", "killed") for end in ends(played))
    commits = theatre.commits(played.machines[1])
    assert any({played.machines[2].peer, played.machines[1].peer} == set(event.contributors) for event in commits)


@pytest.mark.slow
def test_a_slower_machine_makes_rounds_longer_while_it_lasts(theatre: Theatre) -> None:
    usual_s = theatre().took_s
    slow_s = theatre(Slow(peer="lab-1", at_s=1.5, factor=0.5, lasts_s=6.0)).took_s
    assert usual_s + 1.5 <= slow_s <= usual_s + 5.0  # three rounds take two seconds instead of one


@pytest.mark.full
def test_rounds_take_as_long_as_the_slowest_line_needs_for_its_bytes(theatre: Theatre) -> None:
    """A vector of n numbers in 4 parts: each sends 3/4 of its own, and as much of what it merged: 6 n bytes in all."""
    wide, narrow = (theatre(up_mbit=mbit).took_s for mbit in (None, 0.5))
    nbytes = 2 * 0.75 * 4 * 17_024
    least_s = NUM_ROUNDS * 8 * nbytes / 0.5e6
    assert least_s <= narrow - wide <= 1.5 * least_s  # letters and heartbeats pass the same lines


@pytest.mark.full
def test_a_line_that_is_worse_for_a_while_is_as_good_again_afterwards(theatre: Theatre) -> None:
    def exchanges_s(*faults: Fault) -> list[float]:
        return [event.duration_s for event in theatre.commits(theatre(*faults, up_mbit=10.0).machines[0])]

    usual_s, worse_s = exchanges_s(), exchanges_s(Line(peer="lab-1", at_s=2.5, lasts_s=3.0, up_mbit=0.5))
    assert max(worse_s) > 3 * max(usual_s)
    assert worse_s[-6:] == pytest.approx(usual_s[-6:], rel=0.1)


def test_who_joins_late_is_counted(theatre: Theatre) -> None:
    late = Kind(name="late", tokens_per_s=SPEED, joins_at_s=4.0)
    played = theatre(more=(late,))
    assert ends(played) == 5 * ["complete"]
    assert 0 < played.machines[4].counted < played.machines[0].counted


@pytest.mark.full
def test_a_run_begins_with_its_electorate_and_counts_the_work_of_all_others_through_it(
    run_file: RunFile, tmp_path: Path
) -> None:
    theatre = Theatre(msgspec.structs.replace(run_file, electors=3, has_even_leases=True), tmp_path)
    played = theatre(Kill(peer="lab-8", at_s=0.0), count=9, scenario={"compute": "cost"})
    theatre.check(played)
    assert ends(played) == [*8 * ["complete"], "killed"]
    assert {len(manifest.members) for manifest in played.manifests} == {3}
    for machine in played.machines[:-1]:
        assert machine.counted >= 3 * LEASE_TOKENS
        assert machine.trained == machine.counted + (machine.carried or 0)
    assert sum(machine.counted for machine in played.machines) == played.committed_tokens


@pytest.mark.full
def test_a_clock_on_the_wall_that_is_an_hour_off_changes_nothing(theatre: Theatre) -> None:
    right = theatre.calm()
    wrong = theatre(more=(), clock_skew_s=3600.0)
    assert [msgspec.structs.asdict(event) for event in theatre.commits(wrong.machines[0])]
    assert (right.took_s, right.machines) == (wrong.took_s, wrong.machines)


def test_a_fault_whose_moment_never_came_is_named(theatre: Theatre) -> None:
    fault = Kill(peer="lab-1", at_round=NUM_ROUNDS + 5)
    assert theatre(fault).unplayed == (fault,)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [3.0, 10.0])
def test_a_slow_computer_delays_nobody_and_what_it_trains_is_counted(
    run_file: RunFile, tmp_path: Path, factor: float
) -> None:
    every, num_rounds, round_s = 8, 40, 40.0
    lease = every * BATCH * SEQ_LEN
    train = msgspec.structs.replace(run_file.train, tokens=num_rounds * 4 * lease)
    method = msgspec.structs.replace(FEDAVG, every=every)
    theatre = Theatre(msgspec.structs.replace(run_file, train=train, method=method), tmp_path)
    speed = lease / round_s
    played = theatre(tokens_per_s=speed, more=(Kind(name="slow", tokens_per_s=speed / factor),))
    assert ends(played) == 5 * ["complete"]
    fast, slow = played.machines[0], played.machines[4]
    waits_s = [event.duration_s for event in theatre.commits(fast)[5:]]  # the first have measured nothing yet
    assert max(waits_s) < 0.3 * round_s
    assert slow.counted / fast.counted > 0.8 / (factor + 1)
    assert slow.trained - slow.counted <= 2 * lease  # what the run's end found it at


@pytest.mark.slow
def test_a_computer_ten_times_slower_brings_a_tenth_and_delays_nobody(run_file: RunFile, tmp_path: Path) -> None:
    """Forty inner steps a round for four machines, and four for one; from the second round on all finish together."""
    every, num_rounds = 40, 16
    lease = every * BATCH * SEQ_LEN
    slow = Kind(name="slow", tokens_per_s=lease / 400.0)
    train = msgspec.structs.replace(run_file.train, tokens=num_rounds * 4 * lease)
    method = msgspec.structs.replace(FEDAVG, every=every)
    theatre = Theatre(msgspec.structs.replace(run_file, train=train, method=method), tmp_path)
    played = theatre(tokens_per_s=lease / 40.0, more=(slow,))
    assert set(ends(played)) == {"complete"}
    commits = theatre.commits(played.machines[0])
    assert max(event.duration_s for event in commits[1:]) < 0.3 * 40  # at most 1.3 times what the inner steps take
    assert all(played.machines[4].peer in event.contributors for event in commits)
    assert 0.08 < played.machines[4].counted / played.machines[0].counted < 0.13


@pytest.mark.slow
def test_a_machine_that_becomes_slower_for_a_while_is_leased_less_and_then_as_before(
    run_file: RunFile, tmp_path: Path
) -> None:
    every, num_rounds = 20, 16
    lease = every * BATCH * SEQ_LEN
    train = msgspec.structs.replace(run_file.train, tokens=num_rounds * 4 * lease)
    method = msgspec.structs.replace(FEDAVG, every=every)
    theatre = Theatre(msgspec.structs.replace(run_file, train=train, method=method), tmp_path)
    slow = Slow(peer="lab-3", at_round=3, factor=0.2, lasts_s=100.0)
    played = theatre(slow, tokens_per_s=lease / 20.0)
    assert set(ends(played)) == {"complete"}
    commits = theatre.commits(played.machines[0])
    tokens = {event.round: event.tokens for event in commits}
    assert tokens[3] == 4 * lease
    assert min(tokens[round] for round in range(5, 8)) < 3.5 * lease
    assert tokens[max(tokens)] == 4 * lease
    assert sum(len(event.contributors) < 4 for event in commits) <= 2  # while its steps tell how slow it is
    assert max(event.duration_s for event in commits[5:]) < 0.3 * 20


@pytest.mark.slow
def test_an_uplink_ten_times_slower_is_counted_when_its_payload_has_arrived_and_delays_nobody(
    run_file: RunFile, tmp_path: Path
) -> None:
    """A payload of two megabytes: the others send it in two seconds, one in seventeen, at ten seconds of training."""
    every, num_rounds = 2, 12
    lease = every * BATCH * SEQ_LEN
    train = msgspec.structs.replace(run_file.train, tokens=num_rounds * 4 * lease)
    method = msgspec.structs.replace(FEDAVG, every=every)
    model = ShapedModel(num_layers=4, num_heads=4, width=96, ffn_width=256)
    theatre = Theatre(msgspec.structs.replace(run_file, model=model, train=train, method=method), tmp_path)
    speed, lines = lease / 10.0, {"up_mbit": 10.0, "down_mbit": 50.0}
    alone = theatre(tokens_per_s=speed, **lines)
    alone_s = statistics.median(event.duration_s for event in theatre.commits(alone.machines[0]))
    slow = Kind(name="slow", tokens_per_s=speed, up_mbit=1.0, down_mbit=50.0)
    played = theatre(tokens_per_s=speed, more=(slow,), **lines)
    assert set(ends(played)) == {"complete"}
    commits = theatre.commits(played.machines[0])[FIRST_ROUNDS:]
    assert max(event.duration_s for event in commits) + 10 < 1.3 * (alone_s + 10)
    machine = played.machines[4]
    assert machine.trained - machine.counted <= lease
    assert machine.counted > played.machines[0].counted / 10
    assert 0 < sum(machine.peer in event.contributors for event in commits) < len(commits)
