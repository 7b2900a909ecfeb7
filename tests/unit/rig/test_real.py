"""What of a scenario can be done with real processes. That it is done is in tests/slow."""

from pathlib import Path
from typing import Any

import pytest
from benchmarks.rig.real import RealStage, require_playable

from weft.errors import ConfigError
from weft.sim.scenario import Corrupt, Drop, Fault, Freeze, Kill, Kind, Lie, Line, Partition, Scenario, Skew, Slow, Stop

AT: dict[str, Any] = {"at_s": 1.0}


def test_with_namespaces_machines_can_be_parted_and_have_rates_but_no_delay() -> None:
    part, slow = (
        Partition(sides=(("lab-0",), ("lab-1",)), lasts_s=1.0, **AT),
        Line(peer="lab", up_mbit=1.0, lasts_s=1.0, **AT),
    )
    lab = Kind(name="lab", count=2, up_mbit=20.0)
    require_playable(Scenario(run="", kind=(lab,), fault=(part, slow)), has_lines=True)
    far = Line(peer="lab", delay_ms=100.0, lasts_s=1.0, **AT)
    with pytest.raises(ConfigError, match="line of lab: a real line has a rate each way"):
        require_playable(Scenario(run="", kind=(lab,), fault=(far,)), has_lines=True)
    with pytest.raises(ConfigError, match="kind lab: delay_ms"):
        require_playable(Scenario(run="", kind=(Kind(name="lab", delay_ms=50.0),)), has_lines=True)


def staged(tmp_path: Path, *faults: Fault, **kind: Any) -> RealStage:
    scenario = Scenario(run="", kind=(Kind(name="lab", count=2, **kind),), fault=faults)
    return RealStage(scenario, tmp_path / "run.toml", tmp_path)


@pytest.mark.parametrize(
    "fault",
    [
        Kill(peer="lab-0", returns_after_s=1.0, **AT),
        Stop(peer="lab", at_round=3),
        Freeze(peer="lab-1", lasts_s=1.0, **AT),
        Slow(peer="lab", factor=0.5, lasts_s=1.0, **AT),
    ],
)
def test_what_signals_do_can_be_done_to_real_processes(tmp_path: Path, fault: Fault) -> None:
    assert list(staged(tmp_path, fault).machines) == ["lab-0", "lab-1"]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (Partition(sides=(("lab-0",), ("lab-1",)), lasts_s=1.0, **AT), "partition of lab-0, lab-1: .* no line"),
        (Line(peer="lab-0", up_mbit=1.0, lasts_s=1.0, **AT), "line of lab-0: .* no line"),
        (Skew(peer="lab-0", ahead_s=1.0, **AT), "shares? its clock"),
        (Drop(peer="lab-0", share=0.5, **AT), "does what its program does"),
        (Corrupt(peer="lab-0", **AT), "does what its program does"),
        (Lie(peer="lab-0", about="tokens", **AT), "does what its program does"),
        (Slow(peer="lab-0", factor=2.0, lasts_s=1.0, **AT), "cannot be made faster"),
    ],
)
def test_what_only_the_simulator_can_do_is_refused_with_the_reason(tmp_path: Path, fault: Fault, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        staged(tmp_path, fault)
    assert "Play it with weft simulate" in str(refused.value)


@pytest.mark.parametrize("field", [{"tokens_per_s": 5.0}, {"up_mbit": 1.0}, {"loss": 0.1}, {"clock_skew_s": 1.0}])
def test_machines_that_differ_from_this_one_are_refused(tmp_path: Path, field: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"kind lab: {next(iter(field))} .*real processes are as fast as this one"):
        staged(tmp_path, **field)
