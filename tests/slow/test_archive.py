"""`weft anchor --keep all` and `weft ledger check`: any lease of a finished run, on a machine that was never in it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slow.shell import LOCAL, START_S, Shell
from slow.test_anchor import NETWORK, Anchor
from weft.anchor.archive import stretches
from weft.events import Entry, PeerStopped, RoundCommitted, StateJoined
from weft.ids import PeerId
from weft.keys import read_peer

pytestmark = pytest.mark.slow

NUM_PEERS, NUM_ROUNDS, EVERY = 8, 40, 6
AUDITED = (
    *("--set", 'trust={type = "audited", numerics = "exact", audit_rate = 0.2}'),
    *("--set", f"peers={NUM_PEERS}", "--set", f"method.every={EVERY}"),
    *("--set", f"train.tokens={NUM_PEERS * NUM_ROUNDS * EVERY * 4 * 64}"),
)
KEPT_S = 60.0


def check(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `weft ledger check` on the last run of a home."""
    command = [sys.executable, "-P", "-m", "weft", "--home", str(home), "ledger", "check", "last", "--threads", "1"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300, check=False)


def is_round(number: int) -> Callable[[Entry], bool]:
    return lambda entry: isinstance(entry.event, RoundCommitted) and entry.event.round >= number


def lacks(anchor: Shell, last: int, killed: set[PeerId]) -> list[tuple[int, str]]:
    """Return what an archive has not got yet: rounds, works, and what those began with of all but who was killed."""
    (folder,) = anchor.home.glob("runs/*/*/archive")
    (stretch,) = stretches(folder)
    works = stretch.lacking(last + 1)
    found = [(wanted.round, wanted.peer) for wanted, kept in works if kept is None or wanted.peer not in killed]
    return found if last in stretch.numbers else [*found, (last, "the round")]


def test_any_lease_of_a_run_is_made_again_by_who_was_never_in_it(
    shells: Callable[..., Shell], run_file: Path, tmp_path: Path
) -> None:
    maker, *others = [shells(name) for name in "abcdefgh"]
    late, anchor = shells("late"), Anchor(tmp_path / "anchor")
    try:
        train = ("train", str(run_file), "--name", "a", *LOCAL, *AUDITED)
        maker.run(*train, "--wait-for", str(NUM_PEERS))
        ticket = maker.ticket()
        anchor.run("anchor", "-", "--name", "rock", "--keep", "all", *NETWORK, given=ticket + "\n")
        for shell in others:
            shell.run("join", "-", "--yes", "--name", shell.folder.name, *LOCAL, given=ticket)
        anchor.wait(lambda entry: isinstance(entry.event, StateJoined), within_s=2 * START_S)
        maker.wait(is_round(6), within_s=START_S)
        late.run("join", "-", "--yes", "--name", "late", *LOCAL, given=ticket)
        for shell in others[:2]:
            assert shell.process is not None
            os.kill(shell.process.pid, signal.SIGKILL)
            shell.process.wait()
        staying = [maker, late, *others[2:]]
        for shell in staying:
            shell.wait(lambda entry: isinstance(entry.event, PeerStopped), within_s=4 * START_S)
        last = max(entry.event.round for entry in maker.entries() if isinstance(entry.event, RoundCommitted))
        killed = {each.peer for shell in others[:2] for each in shell.entries()}
        deadline = time.monotonic() + KEPT_S
        while lacking := lacks(anchor, last, killed):
            assert time.monotonic() < deadline, f"{lacking}; {anchor.said.read_text()}"
            time.sleep(0.5)
        assert anchor.send(signal.SIGINT) == 0
    finally:
        anchor.end()
    assert "Traceback" not in anchor.said.read_text()

    # Another machine is given a copy of the anchor's home.
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(anchor.home, elsewhere, ignore=shutil.ignore_patterns("keys", "anchored"))
    some = check(elsewhere, "--segments", "100")
    assert some.returncode == 0, some.stdout + some.stderr
    lines = [line for line in some.stdout.splitlines() if line.startswith("round ")]
    assert len(lines) >= 100
    assert all(line.endswith("equal to the bit") for line in lines)
    whole = check(elsewhere, "--all", "--json")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    report = json.loads(whole.stdout)
    (key,) = (maker.home / "keys").glob("*.pem")
    assert report["founder"] == read_peer(key)
    assert (report["rounds"], report["altered"]) == (last, [])
    assert report["segments"] == report["drawn"] == len(report["found"])
    assert {each["outcome"] for each in report["found"]} == {"equal"}
    assert len({each["peer"] for each in report["found"]}) == NUM_PEERS + 1

    # One byte of one result is another: it is found, and named.
    result = next(path for path in elsewhere.glob("runs/*/*/archive/blobs/*") if path.stat().st_size < 100_000)
    data = bytearray(result.read_bytes())
    data[len(data) // 2] ^= 1
    result.chmod(0o644)
    result.write_bytes(data)
    broken = check(elsewhere, "--all")
    assert broken.returncode == 11
    assert "altered" in broken.stderr
