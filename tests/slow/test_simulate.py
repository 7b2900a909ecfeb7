"""`weft simulate` in processes of their own: what Python leaves to chance when it starts changes nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft.events import MemberGone, RoundCommitted, Sponsored, read_jsonl

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


def test_two_processes_that_hash_otherwise_play_one_scenario_alike(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"line {number} of a text\n" for number in range(2000)))
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "scenario.toml").write_text(SCENARIO)
    logs = []
    for hash_seed in ("1", "2"):
        log = tmp_path / f"log-{hash_seed}.jsonl"
        words = ["simulate", str(tmp_path / "scenario.toml"), "--events", str(log)]
        subprocess.run(
            [sys.executable, "-P", "-m", "weft", *words],
            env={**os.environ, "PYTHONHASHSEED": hash_seed}, timeout=PLAY_S, check=True, capture_output=True,
        )  # fmt: skip
        logs.append(log)
    heard = [entry.event for entry in read_jsonl(logs[0])]
    assert {RoundCommitted, Sponsored, MemberGone} <= {type(event) for event in heard}
    assert logs[0].read_bytes() == logs[1].read_bytes()
