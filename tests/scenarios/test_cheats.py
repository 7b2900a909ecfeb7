"""Cheats and auditors that do not audit, as a scenario file scripts them: who is struck out, and who never is."""

from pathlib import Path
from typing import Literal, get_args

import pytest
from msgspec.structs import replace

from scenarios.theatre import NUM_ROUNDS, SPEED, Theatre, make_run_file
from weft.codec.config import Int8Config
from weft.errors import ConfigError
from weft.events import WorkAudited, WorkDoubted
from weft.run.trust import AuditedTrust, MembersTrust, TrustConfig
from weft.sim.play import Played
from weft.sim.scenario import OF_OPTIMIZERS, Audits, Cheat, Fault, Kind, Way
from weft.sync.method.presets import DiLoCoConfig

ALWAYS = AuditedTrust(audit_rate=1.0)


def stage(root: Path, trust: TrustConfig = ALWAYS, num_rounds: int = NUM_ROUNDS) -> Theatre:
    method = DiLoCoConfig(every=4, codec=Int8Config())
    run_file = make_run_file(root)
    train = replace(run_file.train, tokens=2 * num_rounds * run_file.train.tokens // NUM_ROUNDS)  # 4 steps a round
    return Theatre(replace(run_file, trust=trust, method=method, train=train), root)


def out(played: Played) -> list[str]:
    return [machine.name for machine in played.machines if machine.struck_out is not None]


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(each, marks=() if each == "none" else pytest.mark.slow)
        for each in get_args(Way)
        if each not in OF_OPTIMIZERS
    ],
)
def test_who_cheats_is_struck_out_and_nobody_else(tmp_path: Path, work: Way) -> None:
    theatre = stage(tmp_path)
    played = theatre(Cheat(peer="lab-3", work=work, at_round=2))
    assert out(played) == ["lab-3"]
    assert {event.member for _, event in theatre.heard(WorkDoubted)} == {played.machines[3].peer}
    assert [machine.end for machine in played.machines[:3]] == 3 * ["complete"]
    assert len({machine.replica for machine in played.machines[:3]}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("work", sorted(OF_OPTIMIZERS))
def test_who_lies_about_its_optimizer_is_struck_out(tmp_path: Path, work: Way) -> None:
    played = stage(tmp_path)(Cheat(peer="lab-3", work=work, at_round=2), scenario={"compute": "real"})
    assert out(played) == ["lab-3"]


@pytest.mark.full
def test_where_nobody_cheats_all_are_audited_and_nobody_is_doubted(tmp_path: Path) -> None:
    theatre = stage(tmp_path, num_rounds=6)
    played = theatre()
    theatre.check(played)
    assert len(theatre.heard(WorkAudited)) >= 12
    assert (theatre.heard(WorkDoubted), out(played)) == ([], [])


def test_a_cheat_for_a_while_is_struck_out_for_that_and_comes_to_its_own_steps_again(tmp_path: Path) -> None:
    """In the mean one of four steps is another: an audit finds it one time in four."""
    theatre = stage(tmp_path)
    played = theatre(Cheat(peer="lab-3", work="none", share=0.25, at_round=2, lasts_s=20.0))
    assert out(played) == ["lab-3"]
    assert {event.outcome for _, event in theatre.heard(WorkDoubted)} == {"differs"}


@pytest.mark.full
@pytest.mark.parametrize("how", [pytest.param("lazy", marks=pytest.mark.slow), "collude"])
def test_two_that_stand_by_each_other_are_a_minority_of_five(tmp_path: Path, how: Literal["lazy", "collude"]) -> None:
    faults: tuple[Fault, ...] = (
        Cheat(peer="lab-4", work="none", at_round=2),
        Audits(peer="lab-3", how="lazy", at_s=0.0),
        Audits(peer="lab-4", how=how, at_s=0.0),
    )
    assert out(stage(tmp_path, num_rounds=8)(*faults, count=5)) == ["lab-4"]


@pytest.mark.full
def test_a_majority_that_stands_by_each_other_is_never_struck_out(tmp_path: Path) -> None:
    """What audits cannot do (docs/audits.md)."""
    faults = (Cheat(peer="gang", work="none", at_round=2), Audits(peer="gang", how="collude", at_s=0.0))
    theatre = stage(tmp_path, num_rounds=8)
    played = theatre(*faults, count=2, more=(Kind(name="gang", count=3, tokens_per_s=SPEED),))
    assert out(played) == []
    assert {event.outcome for _, event in theatre.heard(WorkDoubted)} == {"differs"}, "the others know, in vain"


@pytest.mark.full
def test_who_accuses_all_harms_nobody(tmp_path: Path) -> None:
    played = stage(tmp_path, num_rounds=7)(Audits(peer="lab-3", how="accuse", at_s=0.0))
    assert out(played) == []
    assert [machine.end for machine in played.machines] == 4 * ["complete"]


@pytest.mark.full
def test_who_shows_auditors_nothing_is_removed_and_not_banned(tmp_path: Path) -> None:
    theatre = stage(tmp_path)
    played = theatre(Audits(peer="lab-3", how="deaf", at_round=2), tokens_per_s=SPEED / 8)
    assert {event.outcome for _, event in theatre.heard(WorkDoubted)} == {"unanswered"}
    assert out(played) == []
    assert "it did not show auditors what it said it had done" in played.machines[3].end


@pytest.mark.parametrize(
    ("fault", "trust", "words"),
    [
        (Cheat(peer="lab-3", work="false moments", at_s=0.0), ALWAYS, "have no optimizer"),
        (Audits(peer="lab-3", how="lazy", at_s=0.0), MembersTrust(), "nobody audits in this run"),
    ],
)
def test_what_nobody_could_do_is_refused(tmp_path: Path, fault: Fault, trust: TrustConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        stage(tmp_path, trust)(fault)
