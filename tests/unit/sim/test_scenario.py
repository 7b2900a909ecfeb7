"""What a scenario file may say."""

from pathlib import Path
from typing import get_args

import pytest

from weft.config import load
from weft.errors import ConfigError
from weft.sim.scenario import MAX_MACHINES, Kill, Kind, LetterKind, Line, Scenario, Skew, Slow, at_present, parted
from weft.sync.records.messages import AnyRoundMessage

LAB = """
run = "run.toml"
[[kind]]
name = "lab"
count = 3
"""


MANY = f'[[kind]]\nname = "home"\ncount = {MAX_MACHINES - 2}\n'


def read(tmp_path: Path, text: str) -> Scenario:
    path = tmp_path / "scenario.toml"
    path.write_text(text)
    scenario: Scenario = load(path, Scenario)
    return scenario


def test_machines_of_a_kind_are_numbered_and_a_single_one_is_not(tmp_path: Path) -> None:
    scenario = read(tmp_path, LAB + '[[kind]]\nname = "home"\n')
    assert [name for name, _ in scenario.machines()] == ["lab-0", "lab-1", "lab-2", "home"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ('[[kind]]\nname = "lab-1"', "two machines are called lab-1"),
        (MANY, f"{MAX_MACHINES + 1} machines"),
        ('[[fault]]\ntype = "kill"\npeer = "lab-7"\nat_s = 1.0', "no machine is called lab-7"),
        ('[[fault]]\ntype = "partition"\nsides = [["lab-1"], ["x"]]\nat_s = 1.0\nlasts_s = 1.0', "called x"),
        ('[[fault]]\ntype = "partition"\nsides = []\nat_s = 1.0\nlasts_s = 1.0', "sides"),
        ('[[fault]]\ntype = "drop"\npeer = "lab"\nat_s = 1.0\nshare = 2.0', "share"),
        ('[[fault]]\ntype = "drop"\npeer = "lab"\nat_s = 1.0\nshare = 0.5\nkinds = ["Redy"]', "kinds"),
        ('[[fault]]\ntype = "drop"\npeer = "lab"\nat_s = 1.0\nshare = 0.5\nkinds = ["Ready"]', "kinds are of letters"),
        ('[[fault]]\ntype = "line"\npeer = "lab"\nat_s = 1.0\nlasts_s = 5.0', "its line does not change"),
        ('[[kind]]\nname = "home"\njoins_over_s = 5.0', "a single machine comes at joins_at_s"),
        ('[[fault]]\ntype = "lie"\npeer = "lab"\nat_s = 1.0\nabout = "love"', "about"),
        ('[[fault]]\ntype = "kill"\npeer = "lab-1"', "either at_s or at_round"),
        ('[[fault]]\ntype = "kill"\npeer = "lab-1"\nat_s = 1.0\nat_round = 2', "either at_s or at_round"),
        ('[[fault]]\ntype = "burn"\npeer = "lab-1"\nat_s = 1.0', "burn"),
        ('[[fault]]\ntype = "slow"\npeer = "lab-1"\nat_s = 1.0\nfactor = 0.0\nlasts_s = 1.0', "factor"),
        ('[[kind]]\nname = "home"\nloss = 1.0', "loss"),
    ],
)
def test_what_cannot_be_played_is_refused(tmp_path: Path, more: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, LAB + more)


def test_letters_of_every_kind_that_members_send_can_be_lost() -> None:
    sent = {each.__name__ for each in get_args(AnyRoundMessage)} - {"Committed"}  # which travels as a decision
    assert set(get_args(LetterKind)) == {*sent, "Decision"}


def test_the_maker_is_there_from_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="joins_at_s is 0"):
        read(tmp_path, LAB + "joins_at_s = 5.0")


def test_machines_of_a_kind_come_one_after_another(tmp_path: Path) -> None:
    scenario = read(tmp_path, LAB + '[[kind]]\nname = "home"\ncount = 4\njoins_at_s = 5.0\njoins_over_s = 2.0')
    assert [kind.joins_at_s for _, kind in scenario.machines()] == [0.0, 0.0, 0.0, 5.0, 5.5, 6.0, 6.5]


def test_what_is_not_given_of_a_line_stays() -> None:
    kind = Kind(name="home", up_mbit=20.0, down_mbit=100.0, loss=0.01)
    worse = at_present(kind, [Line(peer="home", at_s=0.0, lasts_s=1.0, up_mbit=1.0)])
    assert (worse.up_mbit, worse.down_mbit, worse.loss) == (1.0, 100.0, 0.01)


def test_of_two_faults_the_later_one_holds_where_both_say_something_and_slowness_adds_up() -> None:
    kind = Kind(name="home", tokens_per_s=100.0, up_mbit=20.0, delay_ms=10.0)
    first = Line(peer="home", at_s=0.0, lasts_s=9.0, up_mbit=1.0, delay_ms=50.0)
    second = Line(peer="home", at_s=1.0, lasts_s=1.0, up_mbit=5.0)
    both = at_present(kind, [first, second])
    assert (both.up_mbit, both.delay_ms) == (5.0, 50.0)
    assert at_present(kind, [second]).delay_ms == 10.0
    slow, skew = Slow(peer="home", at_s=0.0, lasts_s=1.0, factor=0.5), Skew(peer="home", at_s=0.0, ahead_s=3600.0)
    now = at_present(kind, [slow, skew, slow])
    assert (now.tokens_per_s, now.clock_skew_s) == (25.0, 3600.0)


def test_a_partition_goes_between_its_sides_and_a_single_side_is_cut_off_from_all() -> None:
    assert parted([["b"], ["a", "c"]], "abcd") == {("a", "b"), ("b", "c")}
    assert parted([["b"]], "abcd") == {("a", "b"), ("b", "c"), ("b", "d")}
    assert parted([["a"], ["b"], ["c"]], "abcd") == {("a", "b"), ("a", "c"), ("b", "c")}


def test_a_fault_names_a_machine_or_all_of_a_kind(tmp_path: Path) -> None:
    scenario = read(tmp_path, LAB)
    assert scenario.called("lab") == ["lab-0", "lab-1", "lab-2"]
    assert scenario.called("lab-1") == ["lab-1"]


def test_a_fault_at_a_time_or_a_round_is_one_fault() -> None:
    assert Kill(peer="a", at_round=3).at_s is None


def test_more_machines_than_an_electorate_has_members_may_be_there_from_the_start(tmp_path: Path) -> None:
    scenario = read(tmp_path, LAB + f'[[kind]]\nname = "home"\ncount = {MAX_MACHINES - 3}\n')
    assert len(list(scenario.machines())) == MAX_MACHINES
