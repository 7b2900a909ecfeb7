"""What fits here and how fast it would be: by timed steps, and what members measured, planned or left out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from unit.cli.company import founder
from unit.cli.small import Weft
from unit.launch.test_code import JUDGE, options
from unit.launch.test_terms import TICKET, cut, news, told
from unit.peer.tiny import run_config
from unit.training.test_rewarded import made, write_base
from weft import extension
from weft.cli.doctor import fit
from weft.cli.doctor.findings import Finding
from weft.errors import ConfigError, TooLarge
from weft.ids import PeerId
from weft.launch.code import learn
from weft.launch.terms import Heard
from weft.model.config import SIZES, named, num_parameters
from weft.net.speed_test import Speed
from weft.run.config import Genesis
from weft.run.machine import CapsConfig, PeerConfig
from weft.run.reward import ExtensionReward, JudgeConfig, with_judge
from weft.run.trust import AuditedTrust

HERE = PeerConfig(device="cpu", threads=1)
LINE = Speed(up_bps=2e7, down_bps=1e8, nbytes=1 << 20)
BESIDE = "more, if they are free, where a fault was found"
FAST = 1e12  # operations a second: a tiny model is timed whole


@pytest.fixture(autouse=True)
def took(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let each timed step take so many seconds; first 0.1."""

    def take(step_s: float) -> None:
        monkeypatch.setattr("weft.cli.doctor.fit.usual_s", lambda _step, **_how: step_s)

    take(0.1)
    return take


def look(heard: Heard, run: Genesis | None = None, speed: Speed | None = LINE) -> fit.Look:
    return fit.Look(ticket=TICKET, run=run or run_config(), heard=heard, speed=speed, round_trip_s=0.02)


def found(
    tmp_path: Path, given: fit.Look, settings: PeerConfig = HERE, flops_per_s: float = FAST
) -> dict[str, Finding]:
    return {each.topic: each for each in fit.of_ticket(given, tmp_path, settings, flops_per_s)}


def number(finding: Finding, name: str) -> float:
    found = finding.facts[name]
    assert isinstance(found, int | float)
    return found


# --- named models ---


def free(monkeypatch: pytest.MonkeyPatch, nbytes: float) -> None:
    monkeypatch.setattr("weft.training.device.host_free_nbytes", lambda: int(nbytes))


def test_the_largest_model_is_told_whole_and_as_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    for room, whole, largest_cut, num_stages in ((6e9, "35m", "400m", 8), (2.2e10, "400m", "7b", 32)):
        free(monkeypatch, room)
        facts = fit.largest(HERE).facts
        assert (facts["largest"], facts["largest_cut"], facts["num_stages"]) == (whole, largest_cut, num_stages), room
        assert facts["num_parameters"] == num_parameters(named(whole, 32_000, 1024))
    free(monkeypatch, 1e8)
    assert fit.largest(HERE).level == "note"


def test_named_models_are_timed_while_a_step_is_short(took: Callable[[float], None]) -> None:
    took(0.01)
    first, *more = fit.paces(HERE, SIZES[:2])
    assert number(first, "tokens_per_s") == pytest.approx(8 * 128 / 0.01)
    assert [each.text.split()[0] for each in (first, *more)] == ["nano", "tiny"]
    took(20.0)
    assert len(list(fit.paces(HERE))) == 1


# --- a ticket's run ---


def test_a_run_that_fits_comes_with_speed_share_and_bytes_as_measured(tmp_path: Path) -> None:
    there = found(tmp_path, look(told(2, speeds=(320.0, 320.0))))
    assert there["fit"].level == "ok"
    assert number(there["fit"], "needed_nbytes") < number(there["fit"], "free_nbytes")
    assert there["pace"].facts["tokens_per_s"] == pytest.approx(4 * 16 / 0.1)
    assert there["pace"].facts["fastest_tokens_per_s"] == 320.0
    assert there["pace"].facts["share"] == pytest.approx(1 / 3)  # of even leases
    assert there["bytes"].facts["is_measured"] is True
    assert number(there["bytes"], "day_nbytes") == pytest.approx(number(there["bytes"], "round_nbytes") * 43_200)


def test_what_nobody_has_measured_is_planned_and_said_to_be(tmp_path: Path) -> None:
    alone = look(told(1, round_s=0.01, speeds=(64_000.0,)))
    planned = found(tmp_path, alone)["bytes"]
    assert planned.facts["is_measured"] is False
    assert number(planned, "round_s") > 0.4 + 0.02  # four steps here, and what is under way; not a hundredth
    there = found(tmp_path, look(alone.heard, speed=None))["bytes"]  # nor was the line measured
    assert there.facts["day_nbytes"] is None
    assert "trains alone" in there.text


def test_what_is_planned_has_what_audits_move_in_it(tmp_path: Path) -> None:
    heard = Heard(num_members=2, num_linked=2)  # who have measured no round
    plain = number(found(tmp_path, look(heard))["bytes"], "round_nbytes")
    audited = msgspec.structs.replace(run_config(), trust=AuditedTrust(audit_rate=1.0))
    moved = number(found(tmp_path, look(heard, audited))["bytes"], "round_nbytes") - plain
    assert moved > 2 * 12 * run_config().num_parameters  # of one audit of the other, and by it, at least


def test_what_audits_hold_is_told_and_counted(tmp_path: Path) -> None:
    plain = found(tmp_path, look(told(2)))["fit"]
    audited = found(tmp_path, look(told(2), msgspec.structs.replace(run_config(), trust=AuditedTrust())))["fit"]
    assert number(audited, "needed_nbytes") > number(plain, "needed_nbytes") + 100 * run_config().num_parameters
    assert " for audits" in audited.text
    assert " for audits" not in plain.text
    exact = msgspec.structs.replace(run_config(), trust=AuditedTrust(numerics="exact"))
    assert BESIDE in found(tmp_path, look(told(2), exact))["fit"].text
    assert BESIDE not in audited.text


def test_what_audits_hold_is_told_of_a_run_file(run_path: Path) -> None:
    plain = run_path.read_text().replace("peers = 1", "peers = 3")

    def told_of(table: str) -> str:
        run_path.write_text(f"{plain}\n{table}\n")
        (fitting,) = (each for each in fit.of_run_file(run_path, run_path.parent, HERE, FAST) if each.topic == "fit")
        return fitting.text

    assert " for audits" not in told_of("")
    audited = told_of('[trust]\ntype = "audited"')
    assert " for audits" in audited
    assert BESIDE not in audited
    assert BESIDE in told_of('[trust]\ntype = "audited"\nnumerics = "exact"')


def test_of_a_run_with_stages_the_stage_counts(tmp_path: Path) -> None:
    held = {PeerId("a" * 64): news(0, 1), PeerId("b" * 64): news(2)}
    there = found(tmp_path, look(Heard(num_members=2, num_linked=2, news=held), cut()))
    assert there["fit"].facts["stages"] in (["1"], ["2"], ["3"])
    assert there["pace"].facts["share"] is None
    assert there["bytes"].facts["day_nbytes"] is None


def test_what_does_not_fit_blocks(tmp_path: Path) -> None:
    small = PeerConfig(device="cpu", threads=1, caps=CapsConfig(memory_nbytes=1 << 20))
    assert found(tmp_path, look(told(2)), small)["fit"].level == "block"


def test_a_step_that_would_take_minutes_is_not_timed(tmp_path: Path) -> None:
    there = found(tmp_path, look(told(2)), flops_per_s=1e4)
    assert there["pace"].facts["tokens_per_s"] is None
    assert "not timed" in there["pace"].text
    assert there["bytes"].facts["is_measured"] is True


@pytest.mark.full
def test_doctor_asks_members_for_their_run(weft: Weft, tmp_path: Path) -> None:
    """One trains; nothing of its run is kept here."""
    machine = tmp_path / "machine.toml"
    machine.write_text('device = "cpu"\nthreads = 1\ntransports = ["tls"]\n[tls]\nhost = "127.0.0.1"\n')
    with founder(tmp_path / "crew", wait_for=1, num_peers=1, num_rounds=1_000_000) as member:
        answer = weft("doctor", member.ticket, "--machine", machine, "--json")
        facts = {each["topic"]: each["facts"] for each in json.loads(answer.out)["findings"]}
        assert answer.code == 0, answer.out
        assert facts["fit"]["num_parameters"] == member.peer.run.num_parameters
        assert facts["pace"]["tokens_per_s"] > 0
        assert facts["bytes"]["is_measured"] is False  # its only member trains alone
        assert not (tmp_path / "home" / "runs").exists()
        assert not member.task.done()


# --- a run file ---


def topics(answer: Any) -> dict[str, dict[str, Any]]:
    return {each["topic"]: each for each in json.loads(answer.out)["findings"]}


def test_a_run_file_is_examined_without_being_founded(weft: Weft, run_path: Path, home: Path) -> None:
    answer = weft("doctor", run_path, "--json")
    assert answer.code == 0, answer.out + answer.err
    there = topics(answer)
    assert there["fit"]["level"] == "ok"
    assert there["pace"]["facts"]["tokens_per_s"] == pytest.approx(2 * 16 / 0.1)
    assert there["pace"]["facts"]["share"] == 1.0
    assert there["bytes"]["facts"]["is_measured"] is False
    assert not (home / "runs").exists()
    run_path.write_text(run_path.read_text().replace("peers = 1", "peers = 1\nstages = 1"))
    assert weft("doctor", run_path).code == 0


def test_a_run_with_a_judge_is_examined_by_whoever_has_it_and_else_says_what_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension, "_KNOWN", {})
    (tmp_path / "judge.py").write_text(JUDGE)
    learn(options(tmp_path / "home", tmp_path / "judge.py"), lambda _event: None)
    reward = with_judge(ExtensionReward(judge=JudgeConfig(name="test.ones")))
    run = made(write_base(tmp_path), reward=msgspec.to_builtins(reward)).config
    for home, level in (("home", "ok"), ("elsewhere", "block")):
        monkeypatch.setattr(extension, "_KNOWN", {})
        told = found(tmp_path / home, look(Heard(), run))["fit"]
        assert told.level == level
    assert "--code FILE" in told.text


def test_a_run_file_that_does_not_fit_ends_as_training_would(
    weft: Weft, run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 2e9)
    text = run_path.read_text().replace("width = 16", "width = 8192").replace("num_layers = 1", "num_layers = 40")
    run_path.write_text(text)
    answer = weft("doctor", run_path)
    assert answer.code == TooLarge.exit_code
    assert "does not fit" in answer.out


def test_a_run_file_that_is_none_is_refused_before_anything_is_timed(weft: Weft, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("name = ")
    assert weft("doctor", path).code == ConfigError.exit_code
    assert weft("doctor", tmp_path / "none.toml").code == ConfigError.exit_code
