"""Three processes train a model in stages, with four texts drawn beside and without: the same model, to the bit."""

import http.client
import threading
from pathlib import Path

import pytest
import torch

from slow.shell import LOCAL, START_S, Shell
from slow.test_serve_stages import Answers, Asked, draws
from weft.events import RoundCommitted
from weft.peer.state.checkpoint import load_model

pytestmark = pytest.mark.slow

NUM_ROUNDS = 400
# Of two micro-batches, whichever comes first: their sum is the same.
RUN = f"""
name = "answers"
peers = 3
stages = 3
seed = 3
model = {{type = "shape", num_layers = 6, num_heads = 4, width = 64, ffn_width = 128, is_tied = false}}
pipeline = {{micro_batch = 2, activations = {{type = "int8"}}}}
data = {{source = {{type = "text", paths = ["text.txt"]}}}}
train = {{seq_len = 128, batch_size = 4, tokens = {NUM_ROUNDS * 4 * 128}, schedule = {{type = "constant", lr = 1e-3}}, \
evaluate_every = 0, evaluate_windows = 4}}
method = {{type = "ddp"}}
"""
ENDS_S = 1200.0
NUM_TRIES = 3


def trained(root: Path, num_texts: int) -> tuple[torch.Tensor, int, int]:
    """Return the model that a run ends with, its rounds, and how many texts were drawn meanwhile.

    A stage whose machine stands still for a second counts two steps of the others in one of its own, which is as right
    and other bits: such a run is made again.

    Args:
        num_texts: at a time; 0: peers draw none.
    """
    for number in range(NUM_TRIES):
        *found, counted = _trained(root / f"try{number}", num_texts)
        if counted == {4 * 128}:
            return found[0], found[1], found[2]
    raise AssertionError(f"stages counted {counted} tokens in a step, {NUM_TRIES} times: this machine is too busy")


def _trained(root: Path, num_texts: int) -> tuple[torch.Tensor, int, int, set[int]]:
    """Return the same, and how many tokens steps of all stages counted."""
    root.mkdir(parents=True)
    shells = [Shell(root / f"peer{number}") for number in range(3)]
    first, *others = shells
    (first.folder / "text.txt").write_text("".join(f"def f{n}(x):\n    return x * {n}\n" for n in range(20_000)))
    (first.folder / "run.toml").write_text(RUN)
    for shell in shells:
        (shell.folder / "machine.toml").write_text("serve_nbytes = 50_000_000\n" if num_texts else "")
    machine = (*LOCAL, "--machine", "machine.toml")
    served: Answers | None = None
    found: list[str] = []
    try:
        first.run("train", "run.toml", "--wait-for", "3", *machine)
        ticket = first.ticket()
        for shell in others:
            shell.run("join", "-", "--yes", *machine, given=ticket)
        threads = []
        if num_texts:
            for shell in shells:
                shell.wait(draws, within_s=START_S)
            served = Answers(root / "serves", ticket)
            threads = [threading.Thread(target=draw, args=(served, found, number)) for number in range(num_texts)]
        for thread in threads:
            thread.start()
        assert first.process is not None
        assert first.process.wait(ENDS_S) == 0, first.said.read_text()
        for thread in threads:
            thread.join()
        for shell in others:
            assert shell.process is not None
            assert shell.process.wait(ENDS_S) == 0, shell.said.read_text()
        rounds = [each.event for shell in shells for each in shell.entries() if isinstance(each.event, RoundCommitted)]
        committed = {each.round for each in rounds}
        (checkpoint,) = first.home.glob("runs/*/*/checkpoint/checkpoint.json")
        return load_model(checkpoint.parent)[2], len(committed), len(found), {each.tokens for each in rounds}
    finally:
        for shell in shells:
            shell.end()
        if served is not None:
            served.end()


def draw(served: Answers, found: list[str], number: int) -> None:
    """Draw texts until there is nobody to draw them."""
    try:
        while True:
            found.append("".join(served.texts(Asked(f"def f{number}(x):", 120))))
    except (AssertionError, OSError, http.client.HTTPException):
        return


def test_what_is_trained_beside_texts_is_what_is_trained_without_to_the_bit(tmp_path: Path) -> None:
    alone, num_alone, _ = trained(tmp_path / "alone", 0)
    both, num_both, num_drawn = trained(tmp_path / "both", 4)
    assert num_drawn >= 4
    assert num_alone == num_both >= NUM_ROUNDS // 2
    assert torch.equal(alone, both)
