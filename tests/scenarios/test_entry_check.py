"""Newcomers to an audited run look at what others have done before they bring anything themselves."""

from itertools import count, pairwise

import pytest

from scenarios.cheats import always, longer
from scenarios.swarm import TRAIN_S, Swarm
from scenarios.test_audits import METHODS
from scenarios.test_faults import MakeSwarm
from weft.errors import PeerError
from weft.events import RoundCommitted, RoundsUnlike, StepDone, WorkAudited, WorkDoubted
from weft.ids import short
from weft.peer.context import MakeTrainer
from weft.run.machine import PeerConfig
from weft.run.trust import AuditedTrust
from weft.sim.world import Life
from weft.tasks import Inline
from weft.training.trainer import Trainer

EXACT = AuditedTrust(audit_rate=1e-6, numerics="exact", quarantine=0)
FP32 = AuditedTrust(audit_rate=1e-6, quarantine=0)


def settings(check: int) -> PeerConfig:
    return PeerConfig(device="cpu", micro_batch=2, check=check)


def come(
    swarm: Swarm, check: int, *, liar: str = "", train_s: float = TRAIN_S, newcomer: MakeTrainer = Trainer
) -> Life:
    """Play a run that d joins after some rounds.

    Args:
        train_s: that a call of training takes d.
        newcomer: what d trains with.
    """
    made, kinds = count(), {liar and 2: always("half the steps"), 3: newcomer}
    swarm.make_trainer = lambda *given: kinds.get(next(made), Trainer)(*given)

    async def scenario() -> None:
        a, b, c = await swarm.start("abc")
        await swarm.round(a, 5)
        d = swarm.member("d")
        swarm.launch(d, settings=settings(check), compute=Inline(train_s))
        await swarm.done(a, b, c)
        if train_s > TRAIN_S:
            swarm.kill(d)
        await d.life.has_ended.wait()

    swarm.run(scenario)
    return swarm.member("d").life


@pytest.mark.parametrize("check", [3, pytest.param(0, marks=pytest.mark.full)])
def test_a_newcomer_makes_some_leases_of_others_again_before_its_own(make_swarm: MakeSwarm, check: int) -> None:
    swarm = make_swarm(method=METHODS[0], trust=FP32, num_rounds=9, num_peers=3, learns=True)
    life = come(swarm, check)
    looked, trained = life.times(WorkAudited), life.times(StepDone)
    assert len(looked) == check
    assert life.outcome.reason == "complete"
    assert {audit.member for audit in life.seen(WorkAudited)} <= {swarm.member(name).id for name in "abc"}
    assert {audit.distance for audit in life.seen(WorkAudited)} <= {0.0}
    assert all(at <= trained[0] for at in looked)
    founder = swarm.member("a").life
    assert founder.seen(WorkAudited) == [], "who begins a run has nothing to look at"


@pytest.mark.full
def test_nobody_waits_while_a_slow_machine_looks(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(method=METHODS[0], trust=FP32, num_rounds=20, num_peers=3, learns=True)
    life = come(swarm, 3, train_s=60.0)
    assert life.seen(StepDone) == [], "all is trained before it has looked"
    times = swarm.member("a").life.times(RoundCommitted)
    assert len(times) == 20
    assert max(after - before for before, after in pairwise(times)) < 10 * TRAIN_S, "one call of its training takes 60"


@pytest.mark.full
def test_in_exact_numbers_a_newcomer_does_not_join_a_run_that_counts_false_work(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(method=METHODS[2], trust=EXACT, num_rounds=9, num_peers=3, learns=True)
    life = come(swarm, 64, liar="c")
    liar = swarm.member("c").id
    with pytest.raises(PeerError, match=f"{liar} has not done"):
        life.task.result()
    (doubt,) = life.seen(WorkDoubted)
    assert (doubt.member, doubt.outcome) == (liar, "differs")
    assert life.seen(StepDone) == []
    assert all(liar != audit.member for audit in life.seen(WorkAudited)), short(liar)


@pytest.mark.full
def test_where_machines_round_differently_a_difference_is_a_warning(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(method=METHODS[0], trust=FP32, num_rounds=9, num_peers=3, learns=True)
    life = come(swarm, 64, liar="c")
    assert {doubt.member for doubt in life.seen(WorkDoubted)} == {swarm.member("c").id}
    assert {audit.member for audit in life.seen(WorkAudited)} == {swarm.member(name).id for name in "ab"}
    assert life.outcome.reason == "complete"


@pytest.mark.full
def test_a_machine_that_rounds_unlike_the_others_is_told_how_far_and_joins(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(method=METHODS[0], trust=FP32, num_rounds=9, num_peers=3, learns=True)
    life = come(swarm, 6, newcomer=longer(1e-4))
    (unlike,) = life.seen(RoundsUnlike)
    assert unlike.distance == pytest.approx(1e-4, rel=0.1)
    assert 0.1 * unlike.held < unlike.distance < unlike.held
    assert unlike.num_unlike == unlike.num_members >= 2
    assert life.seen(WorkDoubted) == []
    assert life.outcome.reason == "complete"
    assert all(swarm.member(name).life.seen(RoundsUnlike) == [] for name in "abc")


@pytest.mark.full
def test_a_machine_that_comes_near_to_nobody_does_not_join(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(method=METHODS[0], trust=FP32, num_rounds=9, num_peers=3, learns=True)
    life = come(swarm, 6, newcomer=longer(1e-3))
    with pytest.raises(PeerError, match="this machine computes otherwise than theirs do"):
        life.task.result()
    (unlike,) = life.seen(RoundsUnlike)
    assert unlike.distance > unlike.held
    assert len(life.seen(WorkDoubted)) == 6
    assert life.seen(StepDone) == []
