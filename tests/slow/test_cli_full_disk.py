"""A disk of three megabytes that fills up while a run goes on, as the system itself says it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from unit.cli.small import RUN, TEXT

pytestmark = pytest.mark.slow

DEADLINE_S = 120.0  # of all commands together; they take ten seconds
SCRIPT = """
mount -t tmpfs -o size=3m none home
weft() { "$PYTHON" -P -m weft --home home "$@"; }
train() { weft train run.toml --machine machine.toml --threads 1 --host 127.0.0.1 --transports tls --device cpu; }
fill() { until ls home/runs/*/*/checkpoint/private-2.safetensors; do sleep 0.05; done; cat /dev/zero > home/filler; }
fill > filled 2>&1 &
train > first 2>&1; echo $?
weft inspect last > inspected 2>&1; echo $?
train > still-full 2>&1; echo $?
rm home/filler
train > again 2>&1; echo $?
"""


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    probe = ["unshare", "--mount", "--map-root-user", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(probe, capture_output=True, timeout=DEADLINE_S, check=False).returncode == 0


def test_a_full_disk_costs_what_was_trained_since_the_last_checkpoint_and_no_more(tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("this machine lets us mount no small disk; tests/unit/cli lets the system say the same")
    (tmp_path / "home").mkdir()
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "run.toml").write_text(
        RUN.replace("width = 16", "width = 64").replace("tokens = 320", "tokens = 20_000")
    )
    (tmp_path / "machine.toml").write_text("checkpoint_every_s = 0.2\n")
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", SCRIPT],
        cwd=tmp_path,
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    said = {name: (tmp_path / name).read_text() for name in ("first", "inspected", "still-full", "again")}
    assert done.stdout.split() == ["41", "0", "41", "0"], said
    assert " is intact: no room on the disk" in said["first"].splitlines()[-1]
    assert "every byte checked" in said["inspected"]
    assert "Free some" in said["still-full"].splitlines()[-1]
    assert "complete after" in said["again"]
    assert not any("Traceback" in text for text in said.values())
