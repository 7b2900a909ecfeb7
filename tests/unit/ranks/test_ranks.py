"""A site of one, two and three real processes computes what one process does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft.ranks.launch import differences

PROGRAM = Path(__file__).parent / "program.py"
TESTS = Path(__file__).parents[2]
DEADLINE_S = 120


def run(kinds: str, num_ranks: int, folder: Path) -> list[list[str]]:
    """Return what each rank says, once all have ended well."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(PROGRAM), kinds, str(rank), str(num_ranks), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        said = [rank.communicate(timeout=DEADLINE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * num_ranks, "\n".join(error for _, error in said)
    return [out.splitlines() for out, _ in said]


slow = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=slow), 2, pytest.param(3, marks=slow)])
def test_a_site_has_the_bits_of_plain_vectors_and_trains_as_one_process_does_in_bf16_too(
    num_ranks: int, tmp_path: Path
) -> None:
    """In one test: what it takes is mostly to start the processes."""
    said = [line.partition(":")[0] for line in run("vectors,training,half", num_ranks, tmp_path)[0]]
    assert said == ["vectors"] * 4 + ["training"] * 6 + ["half"]


@pytest.mark.slow
def test_ranks_that_are_not_alike_all_say_so(tmp_path: Path) -> None:
    said = run("alike", 2, tmp_path)
    assert ["precision is bf16 on rank 1 and fp32 on rank 0" in each[0] for each in said] == [True, True]


def test_who_differs_in_what_is_told() -> None:
    first = {"weft": "1", "torch": "2"}
    assert differences([first, dict(first)]) == []
    assert differences([first, first, {"weft": "1", "torch": "3"}, {}]) == [
        "torch is 3 on rank 2 and 2 on rank 0",
        "weft is None on rank 3 and 1 on rank 0",
        "torch is None on rank 3 and 2 on rank 0",
    ]
