"""Runs in which a member makes each of its steps longer, by less than is held for honest."""

import pytest

from scenarios.cheats import longer
from scenarios.test_audits import METHODS, doubts
from scenarios.test_faults import MakeSwarm, one_replica
from weft.events import ActEnacted, MemberStrays, RoundsUnlike
from weft.run.trust import AuditedTrust
from weft.training.trainer import Trainer
from weft.verify.steering import LASTS
from weft.verify.suspicion import TIMES


@pytest.mark.slow
def test_who_steers_within_what_is_held_for_honest_is_suspected_and_not_judged(make_swarm: MakeSwarm) -> None:
    """It looks at others with the same machine, so it learns that it is the odd one."""
    swarm = make_swarm(
        method=METHODS[0], trust=AuditedTrust(audit_rate=1.0, quarantine=0), num_rounds=60, num_peers=3, learns=True
    )
    made = iter((Trainer, Trainer, longer(5e-5)))
    swarm.make_trainer = lambda *given: next(made)(*given)

    async def scenario() -> None:
        members = await swarm.start("abc")
        one_replica(await swarm.done(*members))

    swarm.run(scenario)
    a, b, c = (swarm.member(name) for name in "abc")
    for life in (a.life, b.life):
        (strays,) = [each for each in life.seen(MemberStrays) if each.what == "steps"]
        assert (strays.member, strays.what, strays.is_back) == (c.id, "steps", False)
        assert strays.value == pytest.approx(5e-5, rel=0.5)
        assert strays.round > 20
        assert life.peer._audits.suspicion.times(c.id) == TIMES
        assert life.seen(RoundsUnlike) == [], "of one other of two"
    (unlike,) = c.life.seen(RoundsUnlike)
    assert (unlike.num_members, unlike.num_unlike) == (2, 2)
    assert len(a.life.peer._audits._steering._leans[c.id]) <= LASTS
    assert doubts(swarm) == []
    assert [event for life in swarm.lives for event in life.seen(ActEnacted)] == []
