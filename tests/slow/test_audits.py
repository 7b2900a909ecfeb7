"""Members that audit each other, as real processes with threads of their own: audits beside training, and a kill."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from slow.shell import LOCAL, START_S, Shell
from weft.events import ActEnacted, AuditorDoubted, PeerStopped, RoundCommitted, RoundMissed, WorkAudited, WorkDoubted

pytestmark = pytest.mark.slow

NUM_ROUNDS = 30


def audited(num_rounds: int) -> tuple[str, ...]:
    return (
        *("--set", 'trust={type = "audited", audit_rate = 1.0, trace_every = 3}'),
        *("--set", "peers=3", "--set", "method.every=8"),
        *("--set", f"train.tokens={3 * num_rounds * 8 * 4 * 64}"),
    )


@pytest.mark.parametrize("more", [(), ("--set", 'method.codec={type = "fp32"}')], ids=["int8", "fp32"])
def test_honest_processes_audit_each_other_and_find_no_fault(
    shells: Callable[..., Shell], run_file: Path, more: tuple[str, ...]
) -> None:
    """Several threads read and move what an audit lends: payloads, outer steps, checkpoints."""
    anna, bert, clara = (shells(name) for name in ("anna", "bert", "clara"))
    anna.run("train", str(run_file), "--name", "anna", *LOCAL, "--wait-for", "3", *audited(NUM_ROUNDS), *more)
    ticket = anna.ticket()
    for shell in (bert, clara):
        shell.run("join", "-", "--yes", "--name", shell.folder.name, *LOCAL, given=ticket)
    bert.wait(lambda entry: isinstance(entry.event, RoundCommitted) and entry.event.round == 8, within_s=START_S)
    assert clara.process is not None
    os.kill(clara.process.pid, signal.SIGKILL)
    clara.process.wait()
    clara.run("join", "-", "--yes", "--name", "clara", *LOCAL, given=ticket)
    for shell in (anna, bert, clara):
        shell.wait(lambda entry: isinstance(entry.event, PeerStopped), within_s=2 * START_S)
    events = [entry.event for shell in (anna, bert, clara) for entry in shell.entries()]
    assert [event for event in events if isinstance(event, WorkDoubted | ActEnacted)] == []
    assert [event for event in events if isinstance(event, AuditorDoubted)] == [], "who was killed seals the same again"
    audits = [event for event in events if isinstance(event, WorkAudited)]
    assert len(audits) >= NUM_ROUNDS
    assert max(audit.distance for audit in audits) < 1e-6
    assert all("Traceback" not in shell.said.read_text() for shell in (anna, bert, clara))


def test_a_process_that_joins_later_is_looked_at_before_it_counts(shells: Callable[..., Shell], run_file: Path) -> None:
    """A round takes less time than a look at it, so of its first works one counts in many rounds."""
    anna, bert, clara, dora = (shells(name) for name in ("anna", "bert", "clara", "dora"))
    anna.run("train", str(run_file), "--name", "anna", *LOCAL, "--wait-for", "3", *audited(5 * NUM_ROUNDS))
    ticket = anna.ticket()
    for shell in (bert, clara):
        shell.run("join", "-", "--yes", "--name", shell.folder.name, *LOCAL, given=ticket)
    anna.wait(lambda entry: isinstance(entry.event, RoundCommitted) and entry.event.round == 3, within_s=START_S)
    dora.run("join", "-", "--yes", "--name", "dora", *LOCAL, given=ticket)
    for shell in (anna, bert, clara, dora):
        shell.wait(lambda entry: isinstance(entry.event, PeerStopped), within_s=2 * START_S)
    events = [entry.event for shell in (anna, bert, clara, dora) for entry in shell.entries()]
    assert [event for event in events if isinstance(event, WorkDoubted | ActEnacted)] == []
    missed = [entry.event for entry in dora.entries() if isinstance(entry.event, RoundMissed)]
    assert any("it is new" in event.reason for event in missed)
    rounds = [entry.event for entry in anna.entries() if isinstance(entry.event, RoundCommitted)]
    assert sum(len(event.contributors) == 4 for event in rounds) >= 2, "its works count in the end"
    assert all("Traceback" not in shell.said.read_text() for shell in (anna, bert, clara, dora))
