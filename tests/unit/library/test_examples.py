"""Every example runs as its first lines say, in processes of its own, and is short."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from example import EXAMPLES
from unit.library.processes import Process, ending, replica

FRAMEWORKS = [
    ("hugging_face.py", "accelerate"),  # without which transformers has no Trainer
    ("lightning_trainer.py", "lightning"),
]
EXTENSIONS = [("extension_codec.py", "torch"), ("extension_method.py", "torch")]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 120


def test_a_plain_loop_becomes_a_peer_with_no_more_than_twelve_lines() -> None:
    lines = (EXAMPLES / "plain_loop.py").read_text(encoding="utf-8").splitlines()
    assert 0 < sum(line.endswith("# +") for line in lines) <= 12


@pytest.mark.slow
def test_two_processes_of_a_plain_loop_end_with_the_same_weights_and_have_learnt(tmp_path: Path) -> None:
    two_learn(tmp_path, "plain_loop.py", num_samples=8_000)


@pytest.mark.full
@pytest.mark.parametrize(("example", "needs"), FRAMEWORKS)
def test_a_frameworks_trainer_trains_for_a_run_until_it_is_complete(tmp_path: Path, example: str, needs: str) -> None:
    skip_without(example, needs)
    alone = Process(tmp_path, "alone", example, "--samples", "2000")
    with ending(alone):
        assert "complete after round 3, 2880 samples" in alone.done()


@pytest.mark.slow
@pytest.mark.parametrize(("example", "needs"), [*FRAMEWORKS, *EXTENSIONS])
def test_two_processes_of_any_example_end_with_the_same_weights(tmp_path: Path, example: str, needs: str) -> None:
    skip_without(example, needs)
    two_learn(tmp_path, example, num_samples=16_000)


def skip_without(example: str, needs: str) -> None:
    if find_spec(needs) is None:
        pytest.skip(f"{example} needs {needs}, which is not installed")


def two_learn(folder: Path, example: str, num_samples: int) -> None:
    usual = ("--samples", str(num_samples))
    a = Process(folder, "a", example, *usual, "--wait-for", "2")
    with ending(a):
        b = Process(folder, "b", example, *usual, "--seed", "1", ticket=a.ticket())
        with ending(b):
            said = [a.done(), b.done()]
    assert replica(said[0]) == replica(said[1])
    for each in said:
        assert "complete after round" in each
        right = re.search(r"right: (\d+)%", each)
        assert right is not None
        assert int(right[1]) >= 75  # 50 by chance
