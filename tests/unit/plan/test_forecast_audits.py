"""What a plan says of audits: against the same plan without, and against the rooms that do them."""

import pytest
import torch

from unit.plan.asked import HOME, MODEL, machines, question, train
from weft.codec.config import Int8Config
from weft.model.config import num_parameters
from weft.plan.forecast import audits_nbytes, evidence_nbytes, forecast, load_of, pace_of
from weft.plan.methods import rows
from weft.run.trust import AuditedTrust, RecordedTrust
from weft.store.chunks import state_index
from weft.sync.method.presets import DdpConfig, DiLoCoConfig
from weft.verify.suspicion import TIMES

TRUST = AuditedTrust()


def test_a_plan_counts_audits_among_what_a_round_takes_and_moves() -> None:
    without, found = pace_of(question()), pace_of(question(trust=TRUST))
    assert found.audits is not None
    assert found.round.total_s == pytest.approx(without.round.total_s + found.audits.round_s)
    assert found.audited_speed == pytest.approx(found.tokens_per_s / without.tokens_per_s)
    assert 0.7 < found.audited_speed < 0.95
    moved = found.traffic.sent_nbytes - without.traffic.sent_nbytes
    assert moved == pytest.approx(found.audits.traffic.sent_nbytes, rel=1e-2)  # and heartbeats of a longer round
    load = load_of(question())
    assert found.audits.payloads_nbytes == 2 * load.payload_nbytes + max(load.merged_nbytes)
    assert found.audits.step_nbytes[0] == 4 * num_parameters(MODEL) * 4
    assert found.kept_nbytes > 0
    assert (without.audits, without.audited_speed, without.kept_nbytes) == (None, 1.0, 0)
    assert pace_of(question(trust=RecordedTrust())) == without


def test_a_higher_rate_costs_more_and_rarer_states_less() -> None:
    speeds = [pace_of(question(trust=AuditedTrust(audit_rate=rate))).audited_speed for rate in (0.01, 0.1, 1.0)]
    assert speeds == sorted(speeds, reverse=True)
    often = pace_of(question(trust=AuditedTrust(audit_rate=0.001)))
    rare = pace_of(question(trust=AuditedTrust(audit_rate=0.001, trace_every=10)))
    assert rare.audited_speed > often.audited_speed


def test_the_parts_of_the_multiplier_have_audits_in_them() -> None:
    found = forecast(question(trust=TRUST))
    (part,) = [part for part in found.multiplier.time if part.name == "audits"]
    assert part.factor == pytest.approx(1 / found.pace.audited_speed)
    assert found.bill.kwh > forecast(question()).bill.kwh


def test_who_cannot_be_audited_is_planned_without_and_not_chosen() -> None:
    assert pace_of(question(trust=TRUST, method=DdpConfig())).audits is None
    assert pace_of(question(machines(count=40), trust=TRUST, electors=4)).audits is None
    table = rows(question(trust=TRUST))
    assert {row.objection for row in table if row.choices.sends_gradient} == {"members cannot audit each other"}
    assert all(row.pace.audits is not None for row in table if not row.choices.sends_gradient)


def test_what_a_simulator_plays_takes_no_time_to_hash() -> None:
    played = machines(line=HOME, is_processor_free=True)
    found = pace_of(question(played, trust=TRUST, method=DiLoCoConfig(every=30, codec=Int8Config()))).audits
    assert found is not None
    assert found.hash_s == 0.0
    assert found.again_s > 0.0


def test_few_tokens_are_rounds_of_newcomers() -> None:
    few = pace_of(question(trust=TRUST, train=train(tokens=1000))).audits
    assert few is not None
    assert few.num_audits == pytest.approx(TIMES * TRUST.audit_rate)


def test_states_are_as_large_as_what_members_hash() -> None:
    vectors = {name: torch.zeros(1000) for name in ("local", "moment1", "moment2")}
    index = state_index(vectors)
    found = pace_of(question(trust=TRUST)).audits
    assert found is not None
    least, most = found.step_nbytes
    assert (most - least) * 1000 == sum(4 * each.num for each in index.vectors) * num_parameters(MODEL)


def test_memory_is_of_as_many_audits_as_are_drawn_at_a_time() -> None:
    """And evidence takes some beside it in exact numbers, where single steps are named: nobody has to have that."""
    exact, num = AuditedTrust(numerics="exact"), num_parameters(MODEL)
    rates = [audits_nbytes(question(machines(count=8), trust=AuditedTrust(audit_rate=rate))) for rate in (0.1, 1.0)]
    assert rates[1] - rates[0] >= 3 * 3 * 12 * num  # four works of a member in place of one
    (without,), (found,) = forecast(question()).memory, forecast(question(trust=TRUST)).memory
    assert found.on_host == without.on_host + audits_nbytes(question(trust=TRUST))
    assert audits_nbytes(question(trust=exact)) > audits_nbytes(question(trust=TRUST)) > 200 * num
    assert evidence_nbytes(question(trust=exact)) > 16 * num
    others = (TRUST, RecordedTrust(), AuditedTrust(numerics="exact", trace_every=2))
    assert [evidence_nbytes(question(trust=each)) for each in others] == [0, 0, 0]
    assert audits_nbytes(question()) == 0
