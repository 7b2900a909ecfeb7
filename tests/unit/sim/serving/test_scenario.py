"""What a scenario of serving may say."""

from pathlib import Path

import pytest

from weft.config import load
from weft.errors import ConfigError
from weft.sim.serving.scenario import ServingScenario

TWO = """
stages = 2
[texts]
count = 4
per_s = 1.0
[[kind]]
name = "home"
count = 4
"""


def read(tmp_path: Path, text: str) -> ServingScenario:
    path = tmp_path / "scenario.toml"
    path.write_text(text)
    return load(path, ServingScenario)


def test_machines_are_dealt_out_to_the_stages(tmp_path: Path) -> None:
    scenario = read(tmp_path, TWO + '[[kind]]\nname = "end"\nstage = 2\n')
    assert [(name, stage) for name, _, stage in scenario.servers()] == [
        ("home-0", 0),
        ("home-1", 1),
        ("home-2", 0),
        ("home-3", 1),
        ("end", 1),
    ]


def test_machines_with_a_spread_differ_and_the_same_seed_gives_the_same(tmp_path: Path) -> None:
    text = TWO + "spread = 0.5\n"
    speeds = [
        [kind.step_ms for _, kind, _ in read(tmp_path, each).servers()] for each in (text, text, "seed = 1" + text)
    ]
    assert speeds[0] == speeds[1] != speeds[2]
    assert len(set(speeds[0])) == 4


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ('[[kind]]\nname = "home-1"', "two machines are called home-1"),
        ('[[entry]]\nname = "home-1"', "two machines are called home-1"),
        ('[[kind]]\nname = "end"\nstage = 3', "stage is 3, of 2 stages"),
        ('[[fault]]\ntype = "kill"\npeer = "home-7"\nat_s = 1.0', "no machine is called home-7"),
        ('[[fault]]\ntype = "kill"\npeer = "home-1"\nat_round = 1', "give at_s"),
        ('[[fault]]\ntype = "lie"\npeer = "home-1"\nat_s = 1.0\nabout = "tokens"', "lie"),
        ("[churn]\nevery_s = 0.0", "every_s"),
    ],
)
def test_what_cannot_be_played_is_refused(tmp_path: Path, more: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, TWO + more)


def test_a_stage_that_nobody_holds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nobody holds stage 2"):
        read(tmp_path, TWO + "stage = 1\n")
