"""Loops of somebody's own in processes, one of which is killed, and one comes later."""

import time
from pathlib import Path

import pytest

from unit.library.processes import Process, ending, replica
from weft.events import Entry, Event, RoundCommitted, StateJoined
from weft.log import read_jsonl

pytestmark = pytest.mark.slow

WITHIN_S = 60.0
USUAL = ("--samples", "240000")  # longer than a process takes to start


def entries(process: Process, kind: type[Event]) -> list[Entry]:
    """Return what the peer of a process has said so far."""
    logs = process.home.glob("runs/*/*/log.jsonl")
    return [entry for log in logs for entry in read_jsonl(log) if isinstance(entry.event, kind)]


def first(process: Process, kind: type[Event]) -> Entry:
    deadline = time.monotonic() + WITHIN_S
    while not (found := entries(process, kind)):
        assert time.monotonic() < deadline
        assert process.process.poll() is None
        time.sleep(0.1)
    return found[0]


def test_loops_outlive_a_kill_and_count_who_comes_later(tmp_path: Path) -> None:
    a = Process(tmp_path, "a", "plain_loop.py", *USUAL, "--wait-for", "3")
    with ending(a):
        ticket = a.ticket()
        b = Process(tmp_path, "b", "plain_loop.py", *USUAL, "--seed", "1", ticket=ticket)
        c = Process(tmp_path, "c", "plain_loop.py", *USUAL, "--seed", "2", ticket=ticket)
        with ending(b, c):
            killed = first(c, RoundCommitted).peer
            c.kill()
            late = Process(tmp_path, "late", "plain_loop.py", *USUAL, "--seed", "3", ticket=ticket)
            with ending(late):
                said = [each.done() for each in (a, b, late)]
                newcomer = first_said(late)
    assert len({replica(each) for each in said}) == 1
    assert all("complete after round" in each for each in said)
    counted = [entry.event.contributors for entry in entries(a, RoundCommitted)]  # type: ignore[attr-defined]
    assert any(killed in peers for peers in counted)
    assert not any(killed in peers for peers in counted[-5:])
    assert any(newcomer in peers for peers in counted[-5:])


def first_said(process: Process) -> str:
    """Return the key of a peer that has taken over a state."""
    return entries(process, StateJoined)[0].peer
