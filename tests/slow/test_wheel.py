"""What people install: the wheel, in an environment that has nothing else, from a folder that has nothing else."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HOUSE = Path(__file__).parents[2]
INSTALL_S = 900
DEMO_S = 400


def test_a_wheel_installs_in_a_clean_environment_and_runs_the_demo_from_an_empty_folder(tmp_path: Path) -> None:
    built = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path / "dist"), str(HOUSE)]
    subprocess.run(built, check=True, timeout=INSTALL_S, stdout=subprocess.DEVNULL)
    (wheel,) = (tmp_path / "dist").iterdir()
    venv.create(tmp_path / "clean", with_pip=True)
    scripts = tmp_path / "clean" / ("Scripts" if os.name == "nt" else "bin")
    constraints = str(HOUSE / "constraints.txt")
    # torch first and pinned, as the Makefile does.
    for what in (["torch", "numpy"], [str(wheel)]):
        command = [str(scripts / "pip"), "install", "--quiet", "--constraint", constraints, *what]
        subprocess.run(command, check=True, timeout=INSTALL_S)
    empty = tmp_path / "empty"
    empty.mkdir()
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "WEFT"))}
    demo = [str(scripts / "weft"), "demo", "--tokens", "60000"]
    done = subprocess.run(demo, cwd=empty, env=bare, capture_output=True, text=True, timeout=DEMO_S)
    assert done.returncode == 0, done.stderr
    assert "all 4 are equal, bit for bit" in done.stdout
    assert len(set(re.findall(r"^  peer \d  ([0-9a-f]{64})$", done.stdout, re.MULTILINE))) == 1
    assert (empty / "weft-demo" / "export" / "config.json").exists()
