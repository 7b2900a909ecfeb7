"""Four machines that nothing connects train a member each; a fifth puts two of them on each other, and serves them."""

import json
import time
import urllib.request
from pathlib import Path

import pytest
import torch

from slow.shell import LOCAL, START_S, Shell, typed
from weft.cli.model.trained import open_trained
from weft.compose.composed import Stacked, read_composed, read_stack
from weft.compose.member import read_member
from weft.data.tokenizer import ByteTokenizer
from weft.events import LinkUp

pytestmark = pytest.mark.slow

ALONE = ("unshare", "-n", "bash", "-c", 'ip link set lo up; exec "$@"', "alone")  # a network of its own, of nobody else
PORT = 8321
KINDS = {
    "code": "def f{n}(x):\n    return x + {n}\n",
    "tables": "{n},{n}0,name {n}\n",
    "letters": "Dear reader number {n}, all is well here.\n",
    "lists": "- item {n}\n  - part of {n}\n",
}
RUN = """
name = "{name}"
peers = 1
seed = {seed}
[model]
{model}
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
SHALLOW = 'type = "shape"\nnum_layers = 1\nnum_heads = 2\nwidth = 32\nffn_width = 64'
LAYERS = 'type = "space"\npath = "../space"\nnum_layers = 2\nnum_heads = 2\nffn_width = 64'


def text(*kinds: str, first: int = 0, num: int = 4000) -> str:
    return "".join(KINDS[kind].format(n=n) for n in range(first, first + num) for kind in kinds)


def weft(home: Path, *arguments: str | Path) -> str:
    return typed(home, home.parent, *arguments, enter=ALONE)


def train(shell: Shell, name: str, seed: int, model: str, words: str) -> None:
    (shell.folder / "text.txt").write_text(words)
    (shell.folder / "run.toml").write_text(RUN.format(name=name, seed=seed, model=model))
    weft(shell.home, "train", shell.folder / "run.toml", *LOCAL)


def test_members_that_never_met_are_composed_aligned_and_served(tmp_path: Path) -> None:
    maker = Shell(tmp_path / "maker")
    train(maker, "ends", 0, SHALLOW, text(*KINDS))
    weft(maker.home, "compose", "space", "last", tmp_path / "space")
    for seed, name in enumerate(KINDS):
        shell = Shell(tmp_path / name)
        train(shell, name, seed + 1, LAYERS, text(name, "code"))
        assert not [entry for entry in shell.entries() if isinstance(entry.event, LinkUp)]
        weft(shell.home, "compose", "member", "last", "--to", tmp_path / f"carried-{name}", "--name", name)
    fifth = Shell(tmp_path / "fifth")
    for name in KINDS:
        weft(fifth.home, "compose", "member", tmp_path / f"carried-{name}", "--name", name)
    members = [read_member(fifth.home / "members" / name) for name in KINDS]
    assert len({each.space for each in members}) == 1
    assert len({each.parent for each in members}) == len(KINDS)
    assert {each.tokens for each in members} == {53_760}  # whole rounds

    (tmp_path / "all.txt").write_text(text(*KINDS))
    (tmp_path / "other.txt").write_text(text(*KINDS, first=4000, num=300))
    short = ("--seq-len", "64")
    chosen = json.loads(
        weft(fifth.home, "compose", "select", *KINDS, "--data", tmp_path / "other.txt", *short, "--json")
    )
    assert len(chosen["pairs"]) == len(KINDS) ** 2
    lower, upper = next(each["members"] for each in chosen["stacks"] if len(each["members"]) == 2)
    how = ("--how", "one-way", "--handover", "pre", "--steps", "60", *short)
    weft(fifth.home, "compose", "align", lower, upper, "--data", tmp_path / "all.txt", "--name", "both", *how)
    told = json.loads(
        weft(fifth.home, "compose", "evaluate", "both", "--data", tmp_path / "other.txt", "--no-monolith", "--json")
    )
    assert set(told["controls"]) == {"best single", "ensemble", "identity", "continued", "monolith"}
    alone = {each["name"]: each["loss"] for each in told["members"]}
    assert told["loss"] < alone[lower] - 0.05  # what was trained on all kinds of text reads the others', too
    weft(fifth.home, "compose", "export", "both", tmp_path / "one")
    expected = drawn(fifth, "def f")
    assert answer(tmp_path / "one", fifth) == expected
    assert answer(fifth.home / "composed" / "both", fifth) == expected


def answer(folder: Path, shell: Shell) -> str:
    """Return what a server of a folder says to a prompt."""
    shell.enter = ()
    shell.run("serve", str(folder), "--port", str(PORT), "--numbers", "fp32", "--name", "both", "--threads", "1")
    try:
        body = {"model": "both", "prompt": "def f", "max_tokens": 12, "temperature": 0}
        asked = urllib.request.Request(
            f"http://127.0.0.1:{PORT}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        deadline = time.monotonic() + START_S
        while True:
            try:
                with urllib.request.urlopen(asked, timeout=START_S) as found:
                    said: str = json.load(found)["choices"][0]["text"]
                    return said
            except OSError:
                assert time.monotonic() < deadline, shell.said.read_text()
                time.sleep(0.3)
    finally:
        shell.end()


def drawn(shell: Shell, prompt: str) -> str:
    """Return what the stack itself would say, its likeliest token each time."""
    folder, words = shell.home / "composed" / "both", ByteTokenizer()
    told = read_composed(folder)
    assert isinstance(told, Stacked)

    def read(place: Path) -> tuple[object, torch.Tensor]:
        trained = open_trained(str(place), shell.home)
        return trained.config, trained.vector

    stack = read_stack(folder, told.stack, read)  # type: ignore[arg-type]
    tokens = [int(each) for each in words.encode(prompt)]
    begun = len(tokens)
    with torch.no_grad():
        for _ in range(12):
            tokens.append(int(stack.logits(torch.tensor([tokens]))[0, -1].argmax()))
    return words.decode(tokens[begun:])
