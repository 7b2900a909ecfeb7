"""Every example runs as its first lines say, in processes of its own, and is short."""

import re
from pathlib import Path

import pytest

from unit.door.processes import EXAMPLES, Process, ending, replica


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 120


def test_a_plain_loop_becomes_a_peer_with_no_more_than_twelve_lines() -> None:
    lines = (EXAMPLES / "plain_loop.py").read_text(encoding="utf-8").splitlines()
    assert 0 < sum(line.endswith("# +") for line in lines) <= 12


def test_two_processes_of_a_plain_loop_end_with_the_same_weights_and_have_learnt(tmp_path: Path) -> None:
    a = Process(tmp_path, "a", "plain_loop.py", "--samples", "12000", "--wait-for", "2")
    with ending(a):
        b = Process(tmp_path, "b", "plain_loop.py", "--samples", "12000", "--seed", "1", "--ticket", a.ticket())
        with ending(b):
            said = [a.done(), b.done()]
    assert replica(said[0]) == replica(said[1])
    assert all("complete after round" in each for each in said)
    for each in said:
        right = re.search(r"right: (\d+)%", each)
        assert right is not None
        assert int(right[1]) >= 90
