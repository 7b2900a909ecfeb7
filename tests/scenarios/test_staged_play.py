"""Runs with stages as `weft simulate` plays them: peers of production, whose sections take their time."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from scenarios.swarm import write_corpus
from weft.codec.config import Fp32Config
from weft.data.corpus import CorpusConfig, TextSource
from weft.errors import ConfigError
from weft.pipeline.config import PipelineConfig
from weft.pipeline.split.cut import SplitConfig
from weft.run.config import RunFile, ShapedModel, TrainConfig
from weft.run.trust import AuditedTrust
from weft.sim.play import Played, play
from weft.sim.scenario import Freeze, Kill, Kind, Scenario, Stop
from weft.sync.method.presets import DdpConfig, DiLoCoConfig
from weft.sync.method.schedule import ConstantConfig

SEQ_LEN, BATCH = 16, 8


def run_file(root: Path, num_steps: int, **fields: Any) -> RunFile:
    return RunFile(
        name="play",
        stages=3,
        peers=6,
        model=ShapedModel(num_layers=3, num_heads=2, width=16, ffn_width=32, is_tied=fields.pop("is_tied", False)),
        data=CorpusConfig(source=TextSource(paths=(str(write_corpus(root)),))),
        pipeline=PipelineConfig(micro_batch=1, activations=Fp32Config(), rebalance_s=30.0),
        train=TrainConfig(
            seq_len=SEQ_LEN,
            batch_size=BATCH,
            tokens=num_steps * 2 * BATCH * SEQ_LEN,
            schedule=ConstantConfig(lr=1e-2),
            evaluate_every=0,
            evaluate_windows=4,
        ),
        **{"method": DdpConfig(codec=Fp32Config()), **fields},
    )


def played(root: Path, scenario: Scenario, num_steps: int, name: str = "one", **fields: Any) -> tuple[Played, bytes]:
    """Return how it went, and its log."""
    lines: list[bytes] = []
    found = play(scenario, run_file(root, num_steps, **fields), root, root / name, lines.append)
    return found, b"".join(lines)


def scenario(*kinds: Kind, **fields: Any) -> Scenario:
    return Scenario(run="", kind=kinds, limit_s=3600.0, **fields)


LAB = Kind(name="lab", count=6, tokens_per_s=200.0, delay_ms=5.0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("compute", "is_tied"),
    [
        ("real", False),
        ("cost", True),
        pytest.param("real", True, marks=pytest.mark.slow),
        pytest.param("cost", False, marks=pytest.mark.slow),
    ],
)
def test_six_machines_complete_a_run_and_agree_on_each_stage(tmp_path: Path, compute: str, is_tied: bool) -> None:
    found, _ = played(tmp_path, scenario(LAB, compute=compute), 4, is_tied=is_tied)
    assert found.broken == ()
    assert {machine.end for machine in found.machines} == {"complete"}
    assert sorted(machine.stages[0] for machine in found.machines) == [0, 0, 1, 1, 2, 2]
    replicas = {(stage, replica) for machine in found.machines for stage, replica in machine.sections.items()}
    assert len(replicas) == 3
    assert found.committed_tokens == 4 * 2 * BATCH * SEQ_LEN
    assert all(machine.counted == machine.trained > 0 for machine in found.machines)


@pytest.mark.full
def test_the_same_scenario_gives_the_same_log(tmp_path: Path) -> None:
    _, one = played(tmp_path, scenario(LAB, seed=3), 2)
    _, two = played(tmp_path, scenario(LAB, seed=3), 2, "two")
    assert one == two


@pytest.mark.full
def test_time_is_that_of_the_slowest_section(tmp_path: Path) -> None:
    took_s = [
        played(tmp_path, scenario(LAB, compute="cost"), num, str(num), method=DiLoCoConfig(every=5))[0].took_s
        for num in (5, 15)
    ]
    tokens = 10 * 2 * BATCH * SEQ_LEN
    # Six machines would take tokens / 1200 s, were all layers and the head shared out evenly; the last has the head.
    assert 1.0 < (took_s[1] - took_s[0]) / (tokens / 1200.0) < 3.0


@pytest.mark.slow
def test_machines_that_die_leave_stand_still_and_come_late_complete_it(tmp_path: Path) -> None:
    faults = (
        Kill(peer="lab-1", at_s=20.0, returns_after_s=20.0),
        Stop(peer="lab-2", at_s=40.0),
        Freeze(peer="lab-4", at_s=60.0, lasts_s=15.0),
    )
    late = Kind(name="late", tokens_per_s=400.0, joins_at_s=50.0)
    found, _ = played(tmp_path, scenario(LAB, late, fault=faults, compute="cost"), 150)
    ends = {machine.name: machine.end for machine in found.machines}
    assert found.broken == ()
    assert ends.pop("lab-2") == "its person stopped it"
    assert set(ends.values()) == {"complete"}
    assert found.committed_tokens >= 150 * 2 * BATCH * SEQ_LEN


@pytest.mark.full
def test_machines_that_take_the_time_of_a_section_find_no_fault_with_each_other(tmp_path: Path) -> None:
    trust = AuditedTrust(audit_rate=1.0, quarantine=0)
    nine = Kind(name="lab", count=9, tokens_per_s=200.0, delay_ms=5.0)
    found, log = played(tmp_path, scenario(nine, compute="cost"), 4, trust=trust)
    assert found.broken == ()
    assert {machine.end for machine in found.machines} == {"complete"}
    assert log.count(b"PassageAudited") > 20
    assert b"PassageDoubted" not in log


def test_members_that_compute_together_are_not_simulated(tmp_path: Path) -> None:
    teamed = msgspec.structs.replace(run_file(tmp_path, 6), pipeline=PipelineConfig(split=SplitConfig()))
    with pytest.raises(ConfigError, match="not simulated"):
        play(scenario(LAB), teamed, tmp_path, tmp_path / "one", lambda _line: None)
