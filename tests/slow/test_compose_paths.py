"""Four processes train a path each; two that share a module synchronise it. One is killed, and taken over elsewhere.

Then documents are dealt anew, they train on, and a server sends each text along the paths."""

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slow.shell import LOCAL, Shell, typed
from weft.compose.paths.folder import SEED, TRAINED, last_modules, path_called, read_module, read_shared
from weft.compose.paths.modules import Modules
from weft.events import RoundCommitted
from weft.log import read_jsonl
from weft.model.flat import cut
from weft.model.weights import read_folder

pytestmark = pytest.mark.slow

ENDS_S, ROUNDS = 300.0, 12
PORT = "8322"
MACHINE = 'transports = ["tls"]\n[tls]\nhost = "127.0.0.1"\n'
KINDS = ("def f{n}(x):\n    return x + {n}\n", "{n},{n}0,name {n}\n", "Dear reader {n}, all is well.\n", "- item {n}\n")
RUN = """
name = "seed"
peers = 1
[model]
type = "shape"
num_layers = 2
num_heads = 2
width = 32
ffn_width = 64
[data.source]
type = "text"
paths = ["text.txt"]
[train]
seq_len = 64
batch_size = 4
tokens = 51_200
evaluate_every = 100
evaluate_windows = 4
[train.schedule]
type = "constant"
lr = 2e-3
"""


def rounds(shell: Shell) -> int:
    """Return how many rounds the first module of a path has counted."""
    logs = shell.home.glob("paths/*/*/*/runs/*/*/log.jsonl")
    found = [entry.event for log in logs for entry in read_jsonl(log)]
    return max((event.round for event in found if isinstance(event, RoundCommitted)), default=0)


def wait(is_so: Callable[[], bool], shells: list[Shell]) -> None:
    deadline = time.monotonic() + ENDS_S
    while not is_so():
        said = "\n".join(shell.said.read_text()[-2000:] for shell in shells)
        assert time.monotonic() < deadline, said
        time.sleep(0.3)


def begin(shell: Shell, folder: Path, name: str, tickets: Path, num: int) -> None:
    """Start a path, and note the tickets that it prints."""
    (shell.folder / "machine.toml").write_text(MACHINE)
    shell.run("compose", "path", str(folder), name, "--tickets", str(tickets), "--machine", "machine.toml")
    assert shell.process is not None
    assert shell.process.stdout is not None
    for _ in range(num):
        line = shell.process.stdout.readline()
        assert " weft2" in line, shell.said.read_text()
        with tickets.open("a") as out:
            out.write(line)


def test_paths_share_their_modules_and_one_is_taken_over(shells: Callable[..., Shell], tmp_path: Path) -> None:
    maker = shells("maker")
    (maker.folder / "text.txt").write_text("".join(kind.format(n=n) for n in range(3000) for kind in KINDS))
    (maker.folder / "run.toml").write_text(RUN)
    typed(maker.home, maker.folder, "train", "run.toml", *LOCAL)
    documents = [
        {"name": f"{kind}-{n}", "text": "".join(KINDS[kind].format(n=at) for at in range(40 * n, 40 * n + 40))}
        for n in range(40)
        for kind in range(len(KINDS))
    ]
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, documents)))
    folder, tickets = tmp_path / "talk", tmp_path / "tickets.txt"
    how = ("--levels", "2,2", "--rounds", str(ROUNDS), "--steps", "10", "--seq-len", "64", "--batch-size", "4")
    typed(
        maker.home, tmp_path, "compose", "route", maker_run(maker), folder, "--data", "text.jsonl", "--lr", "1e-3", *how
    )
    tickets.touch()
    paths = {name: shells(name) for name in ("0.0", "0.1", "1.0", "1.1")}
    for (name, shell), num in zip(paths.items(), (3, 1, 1, 0), strict=True):
        begin(shell, folder, name, tickets, num)
    wait(lambda: rounds(paths["1.1"]) >= 3, [*paths.values()])
    killed = paths["1.1"].process
    assert killed is not None
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    at = rounds(paths["1.0"])
    paths["1.1"] = shells("taken over")
    begin(paths["1.1"], folder, "1.1", tickets, 0)
    assert ended([*paths.values()]) == [0] * 4
    assert rounds(paths["1.1"]) > at  # it took part again
    require_one_of_each(folder)

    more = tmp_path / "more"
    assert "go to another path" in typed_to_the_end(maker, tmp_path, "reshard", folder, more, "--rounds", "2")
    after, again = tmp_path / "tickets_after.txt", {name: shells(f"again {name}") for name in paths}
    after.touch()
    for (name, shell), num in zip(again.items(), (3, 1, 1, 0), strict=True):
        begin(shell, more, name, after, num)
    assert ended([*again.values()]) == [0] * 4
    require_one_of_each(more)
    first, second = (last_modules(at, read_shared(at)[0]).vectors for at in (folder, more))
    seed = read_folder(folder / SEED)[1]
    for module, vector in second.items():
        began = Modules.of(read_shared(folder)[0].cut, seed).vectors[module]
        assert (vector - first[module]).norm() < (vector - began).norm()  # it went on from there
    assert "the router has learnt from" in typed_to_the_end(maker, tmp_path, "reroute", more, "--every", "24")
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(more, elsewhere)
    serving = shells("serving")
    serving.run("serve", str(elsewhere), "--port", PORT, "--numbers", "fp32", "--threads", "1", "--route-every", "24")
    wait(lambda: f"http://127.0.0.1:{PORT}" in serving.said.read_text(), [serving])
    assert "go by rerouter-24.bin" in serving.said.read_text()
    body = json.dumps(
        {"model": "elsewhere", "prompt": KINDS[0].format(n=7), "max_tokens": 30, "temperature": 0}
    ).encode()
    asked = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=ENDS_S) as answer:
        assert json.load(answer)["choices"][0]["text"]


def ended(paths: list[Shell]) -> list[int]:
    """Return what the processes of paths exit with."""
    found = []
    for shell in paths:
        assert shell.process is not None
        found.append(shell.process.wait(ENDS_S))
        assert found[-1] == 0, shell.said.read_text()
        assert "held out" in shell.said.read_text()
    return found


def require_one_of_each(folder: Path) -> None:
    """Check that paths that share a module have the same one, to the bit, and that each is a model."""
    shared, _ = read_shared(folder)
    config, begun = read_folder(folder / SEED)
    for module, vector in last_modules(folder, shared).vectors.items():
        for path in shared.cut.paths_of(module):
            assert torch.equal(read_module(folder / TRAINED / path_called(path), shared.cut, module), vector)
        assert not torch.equal(vector, cut(config, begun, shared.cut.section_of(module)))
    for path in shared.cut.paths:
        assert read_folder(folder / TRAINED / path_called(path))[0] == config


def typed_to_the_end(shell: Shell, folder: Path, *line: str | Path) -> str:
    """Return what a command of `weft compose` says."""
    command = [*shell.program, "--home", str(shell.home), "compose", *map(str, line)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=ENDS_S, check=False, cwd=folder)
    assert found.returncode == 0, found.stderr
    return found.stderr


def maker_run(maker: Shell) -> Path:
    """Return the checkpoint of the run that a shell has trained."""
    (found,) = maker.home.glob("runs/*/*/checkpoint")
    return found
