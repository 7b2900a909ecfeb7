"""`make gpu` without a card is a test of itself; a part that fails or takes too long costs the report no other."""

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from benchmarks import gpu
from benchmarks._gpu_parts import PARTS

HOUSE = Path(__file__).parents[2]
WIDTH = 2
# It says one thing, starts a process in a session of its own, as torchrun does, and goes on for ever.
SLOW = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1] + ".pid", "w").write(str(child.pid))
open(sys.argv[1], "w").write('["a", 1, "ok"]\\n')
time.sleep(600)
"""


def played(tmp_path: Path, program: str, most_s: float = 30.0) -> gpu.Found:
    return gpu.run_part("step", [sys.executable, "-c", program], WIDTH, most_s, tmp_path)


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or nobody has asked yet how it ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_every_part_has_its_seconds_and_all_fit_into_nine_minutes() -> None:
    assert gpu.PARTS.keys() == PARTS.keys()
    # A part may be cut off at its last second, so the sum of all is what bounds the report.
    assert sum(part.most_s for part in gpu.PARTS.values()) <= gpu.ALL_S - gpu.SPARE_S
    assert gpu.ALL_S <= 9 * 60


def test_a_part_that_takes_too_long_is_cut_off_with_all_it_started_and_keeps_its_rows(tmp_path: Path) -> None:
    found = played(tmp_path, SLOW, most_s=3.0)
    assert found.rows[0] == (("a", 1), "ok")
    assert found.wrong == ["step: cut off: its 3 s are spent"]
    assert has_ended(int(tmp_path.joinpath("step.rows.pid").read_text()))


@pytest.mark.parametrize(
    ("program", "wrong"),
    [
        ("raise SystemExit('no card')", "step: failed: ended with code 1: no card"),
        ("pass", "step: failed: it told nothing"),
        ("import sys; open(sys.argv[1], 'w').write('[\"a\", 1')", "a row: failed: it was cut short"),
        ("import sys; open(sys.argv[1], 'w').write('[\"a\", \"ok\"]')", "a: failed: 1 cells of 2"),
        ("import sys; open(sys.argv[1], 'w').write('[\"a\", 1, \"below 0.97\"]')", "a: below 0.97"),
    ],
)
def test_what_fails_is_a_row(tmp_path: Path, program: str, wrong: str) -> None:
    found = played(tmp_path, program)
    assert found.wrong == [wrong]
    assert wrong.partition(": ")[2] in gpu.section(gpu.PARTS["step"], found)


def test_a_part_without_time_is_not_run_and_the_report_says_so(tmp_path: Path) -> None:
    assert played(tmp_path, "raise SystemExit(1)", most_s=0.0).wrong == [
        "step: not run: the time of all parts is spent"
    ]


@pytest.mark.slow
def test_the_report_on_a_cpu_has_every_part(tmp_path: Path) -> None:
    report = tmp_path / "gpu.md"
    quick = [name for name in PARTS if name != "compiled"]  # a compiler takes a minute of two cores
    command = [sys.executable, "-m", "benchmarks.gpu", *quick, "--small", "--out", str(report)]
    done = subprocess.run(command, cwd=HOUSE, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    text = report.read_text("utf-8")
    for name in quick:
        assert f"## {gpu.PARTS[name].title}\n" in text
    assert "failed" not in text
    assert re.search(r"\| cpu \| \d+ \|  \| agree \|", text), "the digests are those of every machine"
