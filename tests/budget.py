"""The budget of `make test`: a test that needs more CPU seconds fails it, so that it answers in minutes for good.

What needs more is made cheaper, or marked `full`, and runs in `make full`. Elsewhere the cost of tests is only told.
Seconds are those of a fast machine: a slower one is allowed as many more as it needs for a piece of computing.
"""

import os
import statistics
import time
from collections.abc import Callable, Generator

import pytest

__all__ = ["pytest_addoption", "pytest_runtest_makereport", "pytest_runtest_protocol", "pytest_terminal_summary"]

BUDGET_S = 2.0  # of CPU time, of a test's processes too; half as much on a machine that does nothing else
# What is worth more in every lane: that searches find what breaks a rule, that bits are the same, that the source
# keeps its rules (the first test of it pays for reading it).
ALLOWED_S = {
    "tests/invariants/test_exact.py::test_whole_rounds_give_the_same_digests_on_every_setting": 8.0,
    "tests/invariants/test_layers.py::test_every_module_keeps_the_rule": 4.0,
    "tests/invariants/test_names.py::test_every_name_in_a_comment_or_docstring_is_there": 4.0,
    "tests/model/test_round_search.py::test_a_machine_that_breaks_one_rule_commits_two_manifests": 4.0,
    "tests/model/test_round_search.py::test_no_interleaving_commits_two_manifests": 10.0,
    "tests/model/test_round_search.py::test_the_reduced_search_finds_what_the_whole_one_finds": 4.0,
    "tests/model/test_round_search.py::test_whatever_happened_a_majority_that_lives_and_talks_commits": 5.0,
}
MAX_ALLOWED = 15
PIECE_S = 0.02  # what `piece_s` takes on the machines of docs/log.md that have AVX-512, while two tests run
NUM_TOLD = 100  # a run of so many tests says which were dear

_began_s = pytest.StashKey[float]()


def complaint(name: str, took_s: float, piece: Callable[[], float]) -> str | None:
    """Return what is wrong with a test that took so much CPU time, where `piece` took what it says; None: nothing."""
    most_s = ALLOWED_S.get(name.partition("[")[0], BUDGET_S)
    if took_s <= most_s:
        return None
    slowness = slowness_of(piece)  # measured only where it matters, and then: a machine has slow minutes
    if took_s <= most_s * slowness:
        return None
    slower = f" on a machine that is {slowness:.1f} times slower than meant" if slowness > 1 else ""
    return f"It needs {took_s:.1f} CPU seconds{slower}, of {most_s:g} in this lane: make it cheaper, or mark it `full`."


def slowness_of(piece: Callable[[], float]) -> float:
    """Return how many times slower than a fast machine this one is; 1 on a faster one."""
    return max(1.0, piece() / PIECE_S)


def piece_s(clock: Callable[[], float] = time.process_time) -> float:
    """Return the time that a fixed piece of computing takes here and now, in seconds: the median of five.

    Args:
        clock: whose time; `time.monotonic`: with what it waits for other processes.
    """
    return statistics.median(one_piece_s(clock) for _ in range(5))


def one_piece_s(clock: Callable[[], float] = time.process_time) -> float:
    began_s, table = clock(), dict[int, str]()
    for number in range(200_000):
        table[number % 1000] = str(number)
    return clock() - began_s


def cpu_s() -> float:
    """Return the CPU time of this process and of those that it has waited for, in seconds."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--budget", action="store_true", help=f"a test that needs over {BUDGET_S:g} CPU seconds of a fast machine fails"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[_began_s] = cpu_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "teardown":
        took_s = cpu_s() - item.stash[_began_s]
        report.user_properties.append(("cpu_s", took_s))
        if report.passed and item.config.getoption("--budget"):
            text = complaint(item.nodeid, took_s, piece_s)
            if text is not None:
                report.outcome, report.longrepr = "failed", text
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    spent = {
        report.nodeid: seconds
        for report in reports
        if isinstance(report, pytest.TestReport)
        for name, seconds in report.user_properties
        if name == "cpu_s"
    }
    if len(spent) > NUM_TOLD:
        terminalreporter.write_line(f"{sum(spent.values()):.0f} CPU seconds in {len(spent)} tests. The dearest:")
        for name in sorted(spent, key=spent.__getitem__, reverse=True)[:10]:
            terminalreporter.write_line(f"{spent[name]:8.1f} s  {name}")
