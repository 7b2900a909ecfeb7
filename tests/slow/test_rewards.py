"""Two machines train by rewards, two draw answers for them: real processes, one of which may forge."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from slow.shell import LOCAL, START_S, Shell
from unit.training.test_rewarded import LENGTH, likes_digits, write_model
from weft.events import AnswersForged, Entry, Evaluated, Rewarded, RoundCommitted

pytestmark = pytest.mark.slow

NUM_ROUNDS = 30
RUN = f"""
name = "digits"
peers = 2
[model]
type = "folder"
path = "model"
[tokenizer]
type = "json"
path = "model"
[data]
heldout_fraction = 0.2
[data.source]
type = "tasks"
paths = ["tasks.jsonl"]
[reward]
type = "match"
samples = 8
max_tokens = 1
[train]
seq_len = {LENGTH}
batch_size = 4
tokens = {NUM_ROUNDS * 2 * 4 * 4 * LENGTH}
evaluate_every = 10
[train.schedule]
type = "constant"
lr = 2e-3
[method]
type = "fedavg"
every = 4
"""
FORGING = str(Path(__file__).with_name("forging.py"))


def committed(at_least: int) -> Callable[[Entry], bool]:
    return lambda entry: isinstance(entry.event, RoundCommitted) and entry.event.round >= at_least


def crew(shells: Callable[..., Shell], *, forges: bool) -> tuple[list[Shell], list[Shell]]:
    """Start two that train and two that draw, one of which may forge; return them once the first round is over."""
    anna, ben, cid, dora = (shells(name) for name in ("anna", "ben", "cid", "dora"))
    write_model(anna.folder / "model", likes_digits())
    rows = [{"question": f"say {number}", "answer": ["1", "2"]} for number in range(60)]
    (anna.folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (anna.folder / "run.toml").write_text(RUN)
    anna.run("train", "run.toml", "--wait-for", "4", *LOCAL)
    ticket = anna.ticket() + "\n"
    if forges:
        dora.program = (*dora.python, FORGING)
    for shell in (cid, dora):
        shell.run("join", "-", "--yes", "--draw-only", *LOCAL, given=ticket)
    ben.run("join", "-", "--yes", *LOCAL, given=ticket)
    anna.wait(committed(1), within_s=2 * START_S)
    return [anna, ben], [cid, dora]


def rewarded(shell: Shell) -> list[Rewarded]:
    return [entry.event for entry in shell.entries() if isinstance(entry.event, Rewarded)]


def mean(events: list[Rewarded]) -> float:
    return float(np.mean([event.reward for event in events]))


def test_rewards_rise_by_answers_that_others_draw(shells: Callable[..., Shell]) -> None:
    trains, draws = crew(shells, forges=False)
    by_two = []
    for shell in trains:
        shell.wait(committed(NUM_ROUNDS), within_s=10 * START_S)
    for shell in trains:
        told = rewarded(shell)
        assert mean(told[:4]) < 0.3
        assert mean(told[-8:]) > 0.6
        # What is drawn here takes no time, so this machine has often begun before the others know of the round.
        assert sum(event.num_brought for event in told) > 0.25 * sum(event.num_tasks for event in told)
        assert not [entry for entry in shell.entries() if isinstance(entry.event, AnswersForged)]
        evaluated = [entry.event for entry in shell.entries() if isinstance(entry.event, Evaluated)]
        assert evaluated[-1].reward > evaluated[0].reward  # type: ignore[operator]
        by_two.append(mean(told[-8:]))
    for shell in draws:
        assert not rewarded(shell)
        counted = [entry.event for entry in shell.entries() if isinstance(entry.event, RoundCommitted)]
        assert counted
        own = {entry.peer for entry in shell.entries()}
        assert not any(own & set(event.contributors) for event in counted)
    for shell in (*trains, *draws):
        shell.end()
    alone = shells("alone")
    for name in ("model", "tasks.jsonl"):
        (alone.folder / name).symlink_to(trains[0].folder / name)
    (alone.folder / "run.toml").write_text(
        RUN.replace("peers = 2", "peers = 1").replace("batch_size = 4", "batch_size = 8")
    )
    alone.run("train", "run.toml", *LOCAL)
    alone.ticket()
    alone.wait(committed(NUM_ROUNDS), within_s=10 * START_S)
    assert sum(event.num_brought for event in rewarded(alone)) == 0
    assert abs(mean(rewarded(alone)[-8:]) - np.mean(by_two)) < 0.05


def test_who_forges_is_found_out_and_left_out_and_nobody_else(shells: Callable[..., Shell]) -> None:
    trains, (cid, dora) = crew(shells, forges=True)
    forger, honest = (next(iter({entry.peer for entry in shell.entries()})) for shell in (dora, cid))
    for shell in trains:
        found = shell.wait(lambda entry: isinstance(entry.event, AnswersForged), within_s=4 * START_S)
        assert found.event.member == forger
    trains[0].wait(committed(10), within_s=10 * START_S)
    for shell in trains:
        told = [entry.event.member for entry in shell.entries() if isinstance(entry.event, AnswersForged)]
        assert set(told) == {forger}
        assert honest not in told
