"""A hundred training steps of real recipes in exact numbers, in processes apart, with other instruction sets and
numbers of threads: one digest."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from benchmarks.rig.elsewhere import PATIENT, PROCESSORS

from slow import exact_steps

STEPS = 100
ROOT = Path(__file__).parents[2]
RECIPES = {"demo": ROOT / "src" / "weft" / "recipes" / "demo.toml", "nano": ROOT / "recipes" / "nano.toml"}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_hundred_steps_have_one_digest_on_every_kind_of_processor(recipe: str, tmp_path: Path) -> None:
    words = (Path(each).read_text("utf-8") for each in sorted((ROOT / "src" / "weft" / "sync").rglob("*.py")))
    (tmp_path / "text.txt").write_text("\n".join(words), "utf-8")
    found = {}
    for name, threads in product(PROCESSORS, (1, 2)):
        folder = tmp_path / f"{name} {threads}"
        folder.mkdir()
        (folder / "text.txt").hardlink_to(tmp_path / "text.txt")
        done = subprocess.run(
            [sys.executable, exact_steps.__file__, str(RECIPES[recipe]), str(threads), str(STEPS), str(folder)],
            env=os.environ | PATIENT | PROCESSORS[name] | {"PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
            timeout=900,
        )
        found[name, threads] = done.stdout
    assert len(set(found.values())) == 1, found
    assert all(len(each) == 64 for each in found.values())
