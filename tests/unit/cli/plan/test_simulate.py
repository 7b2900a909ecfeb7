"""`weft simulate` from a file to its report."""

import tomllib
from pathlib import Path

import pytest

from unit.cli.small import Weft
from weft.config import from_tree
from weft.events import RoundCommitted
from weft.log import read_jsonl
from weft.sim.scenario import Scenario

SCENARIO = """
run = "{run}"
[[kind]]
name = "lab"
count = 2
tokens_per_s = 1000.0
"""
FAULT = """
[[fault]]
type = "kill"
peer = "lab-1"
at_round = 900
"""


@pytest.fixture
def scenario(run_path: Path, tmp_path: Path) -> Path:
    path = tmp_path / "scenario.toml"
    path.write_text(SCENARIO.format(run=run_path.name))
    return path


def test_a_scenario_is_played_and_reported(weft: Weft, scenario: Path, tmp_path: Path) -> None:
    scenario.write_text(scenario.read_text() + FAULT)
    log = tmp_path / "log.jsonl"
    answer = weft("simulate", scenario, "--events", log)
    assert (answer.code, answer.err) == (0, "")
    rows = [line.split() for line in answer.out.splitlines()]
    assert [row[0] for row in rows[1:3]] == ["lab-0", "lab-1"]
    assert {row[-1] for row in rows[1:3]} == {"complete"}
    assert "2 machines completed the run with one replica" in answer.out
    assert "not played: kill of lab-1 at round 900" in answer.out
    rounds = {entry.event.round for entry in read_jsonl(log) if isinstance(entry.event, RoundCommitted)}
    assert f"{max(rounds)} rounds" in answer.out


def test_the_same_scenario_is_the_same_play(weft: Weft, scenario: Path, tmp_path: Path) -> None:
    logs = [tmp_path / "one", tmp_path / "two"]
    outs = {weft("simulate", scenario, "--events", log).out for log in logs}
    assert len(outs) == 1
    assert logs[0].read_bytes() == logs[1].read_bytes()


@pytest.mark.full
def test_a_field_of_the_run_can_be_changed(weft: Weft, scenario: Path) -> None:
    usual, more = weft("simulate", scenario), weft("simulate", scenario, "--set", "train.tokens=6400")
    assert "7,680 tokens counted" in more.out
    assert "1,920 tokens counted" in usual.out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('run = 3\n[[kind]]\nname = "lab"', "run is 3"),
        ('run = "none.toml"\n[[kind]]\nname = "lab"', "none.toml: no such file"),
        (SCENARIO.format(run="run.toml") + FAULT.replace("lab-1", "lab-9"), "no machine is called lab-9"),
    ],
)
def test_a_scenario_that_cannot_be_played_says_why(weft: Weft, scenario: Path, text: str, words: str) -> None:
    scenario.write_text(text)
    answer = weft("simulate", scenario)
    assert answer.code == 2
    assert words in answer.err


def test_a_log_that_cannot_be_written_is_refused_before_anything_is_played(
    weft: Weft, scenario: Path, tmp_path: Path
) -> None:
    answer = weft("simulate", scenario, "--events", tmp_path / "none" / "log")
    assert answer.code == 2
    assert "--events" in answer.err


def test_the_scenarios_to_start_from_can_be_played() -> None:
    folder = Path(__file__).parents[4] / "recipes" / "scenarios"
    paths = sorted(folder.glob("*.toml"))
    assert paths
    for path in paths:
        described = from_tree(tomllib.loads(path.read_text()), Scenario, where=str(path))
        assert (folder / described.run).exists()
