"""The budget of `make test`: a test that needs more CPU seconds fails it, so that it answers in minutes for good.

What needs more is made cheaper, or marked `full`, and runs in `make full`. Elsewhere the cost of tests is only told.
"""

import os
from collections.abc import Generator

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
NUM_TOLD = 100  # a run of so many tests says which were dear

_began_s = pytest.StashKey[float]()


def complaint(name: str, took_s: float) -> str | None:
    """Return what is wrong with a test that took so much CPU time; None: nothing."""
    most_s = ALLOWED_S.get(name.partition("[")[0], BUDGET_S)
    if took_s <= most_s:
        return None
    return f"It needs {took_s:.1f} CPU seconds, of {most_s:g} in this lane: make it cheaper, or mark it `full`."


def cpu_s() -> float:
    """Return the CPU time of this process and of those that it has waited for, in seconds."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--budget", action="store_true", help=f"a test that needs over {BUDGET_S:g} CPU seconds fails")


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
        text = complaint(item.nodeid, took_s)
        if text is not None and report.passed and item.config.getoption("--budget"):
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
