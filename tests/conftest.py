"""What every test shares: shapes in signatures are checked while tests run, and no test asserts wall time.

`make test` holds each test to a budget of CPU seconds, so that it answers in minutes however many tests there are. What
needs more is marked `full`, and runs in `make full`.
"""

import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

# Several processes test side by side: where the threads of each wait for each other, all of them crawl.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before any weft module is imported: every annotated function of these rooms checks its tensors' shapes. Elsewhere the
# checker stumbles over Protocols.
SHAPED = ["model", "codec", "data.batch"]
SHAPED += [f"sync.merge.{name}" for name in ("method", "outer", "reduce")]
SHAPED += [f"peer.state.{name}" for name in ("checkpoint", "carry", "replica")]
install_import_hook([f"weft.{room}" for room in SHAPED], "beartype.beartype")

# A slow machine is no fault of the code: hypothesis does not time examples.
settings.register_profile("weft", deadline=None)
settings.load_profile("weft")


def pytest_collection_finish() -> None:
    """Look for garbage less often: a twelfth of the time of a suite that makes many small objects goes there."""
    gc.collect()
    gc.freeze()  # all that was imported stays
    gc.set_threshold(50_000, 20, 100)


# --- the budget ---

BUDGET_S = 2.0  # of CPU time, of a test's processes too; half as much on a machine that does nothing else
# What is worth more in every lane, at most 15 of them: that searches find what breaks a rule, that bits are the same.
ALLOWED_S = {
    "tests/invariants/test_exact.py::test_whole_rounds_give_the_same_digests_on_every_setting": 8.0,
    "tests/model/test_round_search.py::test_a_machine_that_breaks_one_rule_commits_two_manifests": 3.0,
    "tests/model/test_round_search.py::test_no_interleaving_commits_two_manifests": 5.0,
}
NUM_TOLD = 100  # a run of so many tests says which were dear
_began_s = pytest.StashKey[float]()


def cpu_s() -> float:
    """Return the CPU time of this process and of those that it has waited for, in seconds."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--budget", action="store_true", help=f"a test that needs over {BUDGET_S} CPU seconds fails")


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
        most_s = ALLOWED_S.get(item.nodeid.partition("[")[0], BUDGET_S)
        if item.config.getoption("--budget") and report.passed and took_s > most_s:
            report.outcome = "failed"
            report.longrepr = (
                f"It needs {took_s:.1f} CPU seconds, and {most_s:g} are allowed in this lane: make it cheaper, or mark "
                "it `full`."
            )
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
        dearest = sorted(spent, key=spent.__getitem__, reverse=True)[:10]
        terminalreporter.write_line(f"{sum(spent.values()):.0f} CPU seconds in {len(spent)} tests. The dearest:")
        for name in dearest:
            terminalreporter.write_line(f"{spent[name]:8.1f} s  {name}")
