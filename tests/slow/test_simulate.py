"""`weft simulate`: what Python leaves to chance when it starts changes nothing, and small models outrun the clock."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from weft.config import load
from weft.events import MemberGone, RoundCommitted, Sponsored
from weft.log import read_jsonl
from weft.run.config import RunFile
from weft.sim.play import play
from weft.sim.scenario import Scenario

pytestmark = pytest.mark.slow

PLAY_S = 900.0
RUN = """
name = "crowd"
electors = 8
data.source = {type = "text", paths = ["text.txt"]}
model = {type = "shape", num_layers = 1, num_heads = 2, width = 16, ffn_width = 16}
method = {type = "fedavg", every = 2}
[train]
seq_len = 16
batch_size = 2
tokens = 20480
evaluate_every = 0
schedule = {type = "constant", lr = 0.01}
"""
SCENARIO = """
run = "run.toml"
compute = "cost"
seed = 5
[[kind]]
name = "home"
count = 40
tokens_per_s = 32.0
delay_ms = 15.0
jitter_ms = 15.0
loss = 0.01
[[fault]]
type = "kill"
peer = "home-3"
at_round = 2
returns_after_s = 10.0
[[fault]]
type = "freeze"
peer = "home-30"
at_s = 40.0
lasts_s = 9.0
[[fault]]
type = "drop"
peer = "home-5"
what = "letters"
at_s = 30.0
share = 0.3
lasts_s = 20.0
[[fault]]
type = "kill"
peer = "home-12"
at_s = 35.0
"""

RUN_OF_EIGHT = """
name = "eight"
data.source = {type = "text", paths = ["text.txt"]}
model = {type = "size", size = "nano"}
method = {type = "diloco", every = 30}
[train]
seq_len = 32
batch_size = 1
tokens = 38400
evaluate_every = 0
evaluate_windows = 16
schedule = {type = "constant", lr = 0.001}
"""
EIGHT = """
run = "run.toml"
[[kind]]
name = "home"
count = 8
tokens_per_s = 16.0
up_mbit = 20.0
"""


def write_files(folder: Path, run: str, scenario: str) -> Path:
    """Return the scenario's path."""
    (folder / "text.txt").write_text("".join(f"line {number} of a text\n" for number in range(2000)))
    (folder / "run.toml").write_text(run)
    path = folder / "scenario.toml"
    path.write_text(scenario)
    return path


def test_two_processes_that_hash_otherwise_play_one_scenario_alike(tmp_path: Path) -> None:
    path, logs = write_files(tmp_path, RUN, SCENARIO), []
    for hash_seed in ("1", "2"):
        log = tmp_path / f"log-{hash_seed}.jsonl"
        words = ["simulate", str(path), "--events", str(log)]
        subprocess.run(
            [sys.executable, "-P", "-m", "weft", *words],
            env={**os.environ, "PYTHONHASHSEED": hash_seed}, timeout=PLAY_S, check=True, capture_output=True,
        )  # fmt: skip
        logs.append(log)
    heard = [entry.event for entry in read_jsonl(logs[0])]
    assert {RoundCommitted, Sponsored, MemberGone} <= {type(event) for event in heard}
    assert logs[0].read_bytes() == logs[1].read_bytes()


def test_eight_machines_with_small_models_play_faster_than_real_time(tmp_path: Path) -> None:
    scenario = load(write_files(tmp_path, RUN_OF_EIGHT, EIGHT), Scenario)
    run_file = load(tmp_path / scenario.run, RunFile)
    began_s = time.process_time()
    played = play(scenario, run_file, tmp_path, tmp_path / "machines", lambda _line: None)
    cpu_s = time.process_time() - began_s
    assert scenario.compute == "real"
    assert played.broken == ()
    assert {machine.end for machine in played.machines} == {"complete"}
    assert len({machine.replica for machine in played.machines}) == 1
    # Of computing, which other programs hardly change: twelve times as fast on two cores that were busy.
    assert cpu_s < played.took_s, f"{cpu_s:.0f} s of computing for {played.took_s:.0f} virtual seconds"
