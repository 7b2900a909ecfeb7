"""An adapter of a model in three sections: processes that hold one each train it as one process does that holds all."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from slow.shell import COMMIT_S, LOCAL, START_S, Shell
from slow.test_stages import rounds, seen, wait
from weft.data.tokenizer import ByteTokenizer
from weft.events import Evaluated, StageHeld
from weft.model.config import ModelConfig
from weft.model.initial import initial_vector
from weft.model.weights import write_folder

pytestmark = pytest.mark.slow

MODEL = ModelConfig(
    vocab_size=257, num_layers=6, num_heads=4, num_kv_heads=2, width=64, ffn_width=128, max_seq_len=128, is_tied=True
)
NUM_STEPS, BATCH = 200, 4
HEAD = """
name = "{name}"
seed = 3
model = {{type = "folder", path = "model"}}
tokenizer = {{type = "json", path = "model"}}
adapter = {{type = "lora", rank = 8}}
data = {{source = {{type = "text", paths = ["text.txt"]}}}}
method = {{type = "ddp"}}
train = {{seq_len = 128, batch_size = {batch}, tokens = {tokens}, schedule = {{type = "constant", lr = 3e-3}}, \
evaluate_every = 0, evaluate_windows = 64}}
"""
STAGES = 'peers = 3\nstages = 3\npipeline = {micro_batch = 2, activations = {type = "fp32"}}\n'
END_S = 600.0


def files(shell: Shell) -> Shell:
    write_folder(shell.folder / "model", MODEL, initial_vector(MODEL, 3), ByteTokenizer().to_json())
    (shell.folder / "text.txt").write_text("".join(f"def f{n}(x):\n    return x * {n}\n" for n in range(20_000)))
    head = HEAD.format(name="adapter", batch=BATCH, tokens=NUM_STEPS * BATCH * 128)
    (shell.folder / "cut.toml").write_text(STAGES + head)
    (shell.folder / "whole.toml").write_text("peers = 1\n" + head)
    return shell


def test_three_that_hold_a_section_each_train_as_one_that_holds_all(tmp_path: Path) -> None:
    first, second, third, alone, visitor = shells = [
        Shell(tmp_path / name) for name in ("first", "second", "third", "alone", "visitor")
    ]
    try:
        for shell in (first, second, alone):  # the second has the model, too
            files(shell)
        first.run("train", "cut.toml", "--wait-for", "3", *LOCAL)
        ticket = first.ticket()
        second.run("join", "-", "--yes", "--model", "model", *LOCAL, given=ticket)
        third.run("join", "-", "--yes", *LOCAL, given=ticket)
        wait(lambda: rounds(first) >= 20, START_S + COMMIT_S)
        visitor.run("gather", "-", "--transports", "tls", given=ticket)
        assert visitor.process is not None
        assert visitor.process.wait(COMMIT_S) == 0, visitor.said.read_text()
        for shell in (first, second, third):
            assert shell.process is not None
            assert shell.process.wait(END_S) == 0, shell.said.read_text()
        assert {each.stage for shell in (first, second, third) for each in seen(shell, StageHeld)} == {0, 1, 2}
        alone.run("train", "whole.toml", *LOCAL)
        assert alone.process is not None
        assert alone.process.wait(END_S) == 0, alone.said.read_text()

        began, ended = seen(alone, Evaluated)[0].loss, seen(alone, Evaluated)[-1].loss
        assert ended < 0.85 * began, "it has learnt"
        assert seen(first, Evaluated)[-1].loss == pytest.approx(ended, rel=0.02)
        for shell in (first, visitor):
            shell.run("export", "--adapter", "last", "adapter")
            assert shell.process is not None
            assert shell.process.wait(COMMIT_S) == 0, shell.said.read_text()
            shell.run("export", "last", "merged")
            assert shell.process is not None
            assert shell.process.wait(COMMIT_S) == 0, shell.said.read_text()
            adapter = load_file(shell.folder / "adapter" / "adapter_model.safetensors")
            assert len(adapter) == 2 * 7 * MODEL.num_layers
            assert all(matrix.any() for name, matrix in adapter.items() if "lora_B" in name)
        had = {each.name for each in (second.home / "blobs").iterdir()}
        parts = [each for each in had if (second.home / "blobs" / each).stat().st_size > 100_000]
        assert len(parts) == 3, "of its folder it took all parts, whichever it was to hold"
        assert sum((third.home / "blobs" / each).exists() for each in parts) == 1, "who has none fetches its own"
    finally:
        for shell in shells:
            shell.end()
