"""The budget of `make test`: what is dear fails it, and what may be dear is a short list of tests that are there."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import budget

TESTS = Path(__file__).parents[1]

DEAR = """
import time

import budget

def test_dear():
    budget.PIECE_S, budget.BUDGET_S = 1.0, 0.2  # this machine is a fast one
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass

def test_cheap():
    pass
"""


def run_it(folder: Path, *options: str) -> str:
    (folder / "test_sample.py").write_text(DEAR)
    command = [sys.executable, "-m", "pytest", "-p", "budget", "-p", "no:cacheprovider", *options, "test_sample.py"]
    environment = os.environ | {"PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    return done.stdout


def test_a_test_over_the_budget_is_complained_about() -> None:
    for piece_s in (budget.PIECE_S, budget.PIECE_S / 2):  # on a faster machine, too
        assert budget.complaint("tests/a.py::test_b", budget.BUDGET_S, lambda took_s=piece_s: took_s) is None
        assert budget.complaint("tests/a.py::test_b[1]", budget.BUDGET_S + 0.1, lambda took_s=piece_s: took_s)
        name, most_s = next(iter(budget.ALLOWED_S.items()))
        assert budget.complaint(f"{name}[case]", most_s, lambda took_s=piece_s: took_s) is None
        assert budget.complaint(f"{name}[case]", most_s + 0.1, lambda took_s=piece_s: took_s)


def test_a_slow_machine_is_allowed_as_many_more_seconds() -> None:
    def three_times() -> float:
        return 3 * budget.PIECE_S

    assert budget.complaint("tests/a.py::test_b", 3 * budget.BUDGET_S, three_times) is None
    told = budget.complaint("tests/a.py::test_b", 3 * budget.BUDGET_S + 0.1, three_times)
    assert told is not None
    assert "3.0 times slower" in told


def test_few_are_allowed_more_and_all_of_them_are_there() -> None:
    assert len(budget.ALLOWED_S) <= budget.MAX_ALLOWED
    for name in budget.ALLOWED_S:
        path, _, function = name.partition("::")
        tree = ast.parse((TESTS.parent / path).read_text(encoding="utf-8"))
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name


@pytest.mark.full
def test_a_lane_with_a_budget_fails_where_a_test_is_dear(tmp_path: Path) -> None:
    assert "2 passed" in run_it(tmp_path)
    told = run_it(tmp_path, "--budget")
    assert "1 error" in told
    assert "make it cheaper" in told
