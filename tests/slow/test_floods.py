"""Real members under floods from another process: rounds go on, no process ends, memory and open files come back.

`WEFT_FLOODS_S` says for how many seconds all attacks go on by turns; half an hour tells what two minutes cannot.
"""

import asyncio
import os
import resource
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import psutil
import pytest
from benchmarks.rig.floods import NAMES, Flood

from slow.shell import COMMIT_S, LOCAL, START_S, Shell
from weft.events import CheckpointSaved, RoundCommitted

pytestmark = pytest.mark.slow

TURNS_S = float(os.environ.get("WEFT_FLOODS_S", "120"))
TURN_S = 10.0  # of one attack
STREAMS_S = 20.0
RELEASED_S, RECOVERED_S = 2.0, 30.0
MOST_MEMORY = 1.1  # times what it was
# What is loaded, compiled and pooled when an attack is met for the first time is no leak; on a busy machine the first
# attack is a weak one.
WARM_UP = 2 * len(NAMES)  # attacks


def rounds(shell: Shell, since: float = 0.0) -> int:
    return sum(isinstance(entry.event, RoundCommitted) and entry.at > since for entry in shell.entries())


def process_of(shell: Shell) -> psutil.Process:
    assert shell.process is not None
    return psutil.Process(shell.process.pid)


def is_well(shell: Shell) -> None:
    assert shell.process is not None
    assert shell.process.poll() is None, shell.said.read_text()
    assert "Traceback" not in shell.said.read_text()


def started(shell: Shell, run_file: Path, num: int = 1, files: int | None = None) -> str:
    """Begin a run, and return its ticket; `files`: how many the process may open."""
    shell.run("train", str(run_file), "--wait-for", str(num), "--set", "orphan_after_s=2.0", *LOCAL)
    if files is not None:
        resource.prlimit(process_of(shell).pid, resource.RLIMIT_NOFILE, (files, files))
    return shell.ticket()


def joined(shell: Shell, ticket: str) -> None:
    """Join a run until a round has counted the newcomer, and leave again."""
    began = time.time()
    shell.run("join", "-", "--yes", *LOCAL, given=ticket)
    shell.wait(lambda entry: isinstance(entry.event, RoundCommitted), after=began, within_s=START_S)
    shell.end()


@pytest.mark.parametrize("files", [64, 256, 1024])
async def test_streams_of_many_keys_take_no_member_along(
    files: int, shells: Callable[..., Shell], run_file: Path
) -> None:
    anna, bert = shells("anna"), shells("bert")
    ticket = started(anna, run_file, files=files)
    process = process_of(anna)
    anna.wait(lambda entry: isinstance(entry.event, RoundCommitted), within_s=START_S)
    before = process.num_fds()
    with Flood("silent streams", ticket, STREAMS_S * 6):
        async with asyncio.timeout(STREAMS_S * 3):
            while process.num_fds() <= min(before + 16, files // 2):  # noqa: ASYNC110  # it takes what it can get
                await asyncio.sleep(1.0)
        await asyncio.sleep(STREAMS_S)
        assert process.num_fds() < files - 8  # a checkpoint, its folder and its log always find one
        began = time.time()
        anna.wait(lambda entry: isinstance(entry.event, RoundCommitted), after=began)
        anna.wait(lambda entry: isinstance(entry.event, CheckpointSaved), within_s=COMMIT_S)
        if files >= 1024:  # fewer files are fewer links than the flood has keys: it may hold them all
            joined(bert, ticket)
    await asyncio.sleep(RELEASED_S)  # the flood was killed
    assert process.num_fds() <= before + 8
    joined(bert, ticket)
    is_well(anna)


async def test_all_floods_by_turns_end_no_process_and_leave_nothing(
    shells: Callable[..., Shell], run_file: Path
) -> None:
    anna, bert = shells("anna"), shells("bert")
    ticket = started(anna, run_file, 2)
    bert.run("join", "-", "--yes", *LOCAL, given=ticket)
    for each in (anna, bert):
        each.wait(lambda entry: isinstance(entry.event, RoundCommitted), within_s=START_S)
    process, ends_at = process_of(anna), time.monotonic() + TURNS_S
    num_files, memory = process.num_fds(), 0
    for number, attack in enumerate(cycle(NAMES)):
        if number == WARM_UP:
            await asyncio.sleep(RECOVERED_S)
            memory = process.memory_info().rss
        if number > WARM_UP and time.monotonic() > ends_at:
            break
        before = rounds(anna)
        with Flood(attack, ticket, TURN_S) as flood:
            done = await asyncio.to_thread(flood.done)
        assert done.num_sent or done.num_links, attack
        anna.wait(lambda entry: isinstance(entry.event, RoundCommitted), after=time.time())
        assert rounds(anna) > before + 1, attack
        for each in (anna, bert):
            is_well(each)
    await asyncio.sleep(RECOVERED_S)
    rss = process.memory_info().rss
    assert rss <= MOST_MEMORY * memory, f"{rss >> 20} of {memory >> 20} MiB"
    assert process.num_fds() <= num_files + 16
