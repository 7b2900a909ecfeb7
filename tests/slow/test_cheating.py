"""Fourteen members that cheat, each a real process beside three honest ones, over tls."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slow.cheating import FOURTEEN
from slow.shell import LOCAL, START_S, Shell
from weft.events import ActEnacted, LieProven, RoundCommitted
from weft.ids import PeerId

pytestmark = pytest.mark.slow

NUM_ROUNDS = 80
MOST_NBYTES = 384 * 1024
BY_VOTES = ("another error", "another start")  # what nobody outside the run can check (docs/audits.md)


def settings(way: str) -> tuple[str, ...]:
    return (
        *("--set", 'trust={type = "audited", audit_rate = 1.0, numerics = "exact"}'),
        *("--set", "peers=4", "--set", "method.every=8"),
        *("--set", f"train.tokens={4 * NUM_ROUNDS * 8 * 4 * 64}"),
        *(("--set", "method.feedback=1.0") if way == "another error" else ()),
    )


@pytest.mark.parametrize("way", FOURTEEN)
def test_who_cheats_is_struck_out_and_anybody_can_be_shown_why(
    shells: Callable[..., Shell], run_file: Path, tmp_path: Path, way: str
) -> None:
    anna, bert, clara, dora = (shells(name) for name in ("anna", "bert", "clara", "dora"))
    anna.run("train", str(run_file), "--name", "anna", *LOCAL, "--wait-for", "4", *settings(way))
    ticket = anna.ticket()
    dora.program = (*dora.python, str(Path(__file__).with_name("cheating.py")), way)
    for shell in (bert, clara, dora):
        shell.run("join", "-", "--yes", "--name", shell.folder.name, *LOCAL, given=ticket)
    enacted = anna.wait(lambda entry: isinstance(entry.event, ActEnacted), within_s=START_S).event
    assert isinstance(enacted, ActEnacted)
    assert (enacted.kind, enacted.subject) == ("strike out", peer_of(dora)), "and nobody else, and before anybody"
    lies = [entry.event for entry in anna.entries() if isinstance(entry.event, LieProven)]
    first = min(
        entry.event.round
        for entry in anna.entries()
        if isinstance(entry.event, RoundCommitted) and enacted.subject in entry.event.contributors
    )
    if way in BY_VOTES:
        assert len(enacted.by) >= 3
        assert lies == []
        print(f"\n{way}: round {enacted.round} of work since round {first}, by votes: {enacted.reason}")  # noqa: T201  # for docs/log.md
        return
    assert (enacted.by, {lie.member for lie in lies}) == ((), {enacted.subject})
    file = tmp_path / "evidence"
    weft("--home", str(anna.home), "ledger", "evidence", "last", "--round", str(enacted.round), "-o", str(file))
    assert file.stat().st_size <= MOST_NBYTES
    checked = json.loads(weft("ledger", "check", str(file), "--json"))
    assert checked["peer"] == enacted.subject
    told = f"round {enacted.round} of work since round {first}, {file.stat().st_size:,} bytes: {enacted.reason}"
    print(f"\n{way}: {told}")  # noqa: T201  # for docs/log.md


def peer_of(shell: Shell) -> PeerId:
    return shell.entries()[0].peer


def weft(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "weft", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
