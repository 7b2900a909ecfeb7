"""`weft train` from a home that has trained before."""

from pathlib import Path

from unit.cli.small import Weft
from unit.cli.test_bad_input import LOCAL
from weft.cli.home import find_checkpoint

TWO_ROUNDS = ("--set", "method={type='fedavg', every=5}")


def test_a_run_that_is_taken_up_and_left_does_not_become_the_last(weft: Weft, run_path: Path, home: Path) -> None:
    train = ("train", run_path, *TWO_ROUNDS, *LOCAL, "--quiet")
    assert weft(*train).code == 0
    first = find_checkpoint("last", home)
    assert weft(*train, "--set", "name=other").code == 0
    other = find_checkpoint("last", home)
    assert other != first
    assert "complete" in weft(*train).out  # and nothing was trained
    assert find_checkpoint("last", home) == other
