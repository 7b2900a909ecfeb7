"""`weft simulate` from a file to its report."""

import json
import tomllib
from pathlib import Path

import pytest

from unit.cli.small import Weft
from weft.config import from_tree
from weft.events import RoundCommitted
from weft.ids import several
from weft.log import read_jsonl
from weft.sim.scenario import Scenario
from weft.sim.serving.scenario import ServingScenario

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
    assert several(max(rounds), "round") in answer.out


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


SERVING = """
stages = 2
[texts]
count = 3
per_s = 2.0
prompt_tokens = 8
answer_tokens = 4
row_nbytes = 64
[[kind]]
name = "home"
count = 4
[[fault]]
type = "kill"
peer = "home-3"
at_s = 900.0
"""


def test_texts_are_played_and_told_as_a_table_and_as_json(weft: Weft, tmp_path: Path) -> None:
    path = tmp_path / "serving.toml"
    path.write_text(SERVING)
    answer = weft("simulate", path)
    assert (answer.code, answer.err) == (0, "")
    lines = answer.out.splitlines()
    assert [line.split()[:2] for line in lines[1:5]] == [[f"home-{number}", str(1 + number % 2)] for number in range(4)]
    assert "3 texts came whole" in answer.out
    assert "not played: kill of home-3 at 900 s" in answer.out
    told = json.loads(weft("simulate", path, "--json").out)
    assert told["num_done"] == 3
    between = next(line for line in lines if line.startswith("between tokens"))
    assert f"{told['gap']['p95']:.0f} ms" in between


def test_a_play_of_a_run_is_told_as_json(weft: Weft, scenario: Path) -> None:
    told = json.loads(weft("simulate", scenario, "--json").out)
    assert [machine["name"] for machine in told["machines"]] == ["lab-0", "lab-1"]


def test_texts_have_no_run_file_to_change(weft: Weft, tmp_path: Path) -> None:
    path = tmp_path / "serving.toml"
    path.write_text(SERVING)
    answer = weft("simulate", path, "--set", "train.tokens=5")
    assert answer.code == 2
    assert "texts in place of a run" in answer.err


def test_the_scenarios_to_start_from_can_be_played() -> None:
    folder = Path(__file__).parents[4] / "recipes" / "scenarios"
    paths = sorted(folder.glob("*.toml"))
    assert paths
    for path in paths:
        tree = tomllib.loads(path.read_text())
        if "texts" in tree:
            assert list(from_tree(tree, ServingScenario, where=str(path)).servers())
            continue
        described = from_tree(tree, Scenario, where=str(path))
        assert (folder / described.run).exists()
