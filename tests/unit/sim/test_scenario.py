"""What a scenario file may say."""

from pathlib import Path

import pytest

from weft.config import load
from weft.errors import ConfigError
from weft.sim.scenario import MAX_PEERS, Group, Kill, Line, Scenario, changed

LAB = """
run = "run.toml"
[[group]]
name = "lab"
count = 3
"""


def read(tmp_path: Path, text: str) -> Scenario:
    path = tmp_path / "scenario.toml"
    path.write_text(text)
    scenario: Scenario = load(path, Scenario)
    return scenario


def test_machines_of_a_group_are_numbered_and_a_single_one_is_not(tmp_path: Path) -> None:
    scenario = read(tmp_path, LAB + '[[group]]\nname = "home"\n')
    assert [name for name, _ in scenario.machines()] == ["lab-0", "lab-1", "lab-2", "home"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ('[[group]]\nname = "lab-1"', "two machines are called lab-1"),
        (f'[[group]]\nname = "home"\ncount = {MAX_PEERS}', f"{MAX_PEERS + 3} peers"),
        ('[[fault]]\ntype = "kill"\npeer = "lab-7"\nat_s = 1.0', "no machine is called lab-7"),
        ('[[fault]]\ntype = "cut"\npeer = "lab-1"\ncompanions = ["x"]\nat_s = 1.0\nlasts_s = 1.0', "called x"),
        ('[[fault]]\ntype = "kill"\npeer = "lab-1"', "either at_s or at_round"),
        ('[[fault]]\ntype = "kill"\npeer = "lab-1"\nat_s = 1.0\nat_round = 2', "either at_s or at_round"),
        ('[[fault]]\ntype = "burn"\npeer = "lab-1"\nat_s = 1.0', "burn"),
        ('[[fault]]\ntype = "slow"\npeer = "lab-1"\nat_s = 1.0\nfactor = 0.0\nlasts_s = 1.0', "factor"),
        ('[[group]]\nname = "home"\nloss = 1.0', "loss"),
    ],
)
def test_what_cannot_be_played_is_refused(tmp_path: Path, more: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, LAB + more)


def test_the_maker_is_there_from_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="joins_at_s is 0"):
        read(tmp_path, LAB + "joins_at_s = 5.0")


def test_a_changed_line_leaves_the_rest_as_it_was() -> None:
    group = Group(name="home", up_mbit=20.0, down_mbit=100.0, loss=0.01)
    worse = changed(group, Line(peer="home", at_s=0.0, lasts_s=1.0, up_mbit=1.0))
    assert (worse.up_mbit, worse.down_mbit, worse.loss) == (1.0, 100.0, 0.01)
    assert changed(group, Line(peer="home", at_s=0.0, lasts_s=1.0)) == group


def test_a_fault_at_a_time_or_a_round_is_one_fault() -> None:
    assert Kill(peer="a", at_round=3).at_s is None
