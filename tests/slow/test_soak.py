"""Minutes of what volunteers' machines do: killed, frozen, stopped and started again; one history comes out of it.

Four peers, a home each. Every few seconds one of them is killed, frozen for a while, or told to stop, and comes back.
In the end all four train together again, and no two of them ever committed different manifests for one branch and
round. What befalls whom is drawn from a seed; when it happens depends on the machine.
"""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from slow.shell import LOCAL, START_S, Shell
from weft.events import RoundCommitted
from weft.rng import stream

pytestmark = pytest.mark.slow

CHAOS_S = 300.0
SETTLE_S = 180.0
GROWTH_NBYTES = 150 << 20  # of a process, in these minutes


def tickets(shells: list[Shell]) -> list[str]:
    """Return what the members keep for those they invite, the newest first."""
    kept = [path for shell in shells for path in shell.home.glob("runs/*/*/ticket")]
    kept.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    return [path.read_text().strip() for path in kept]


@pytest.mark.parametrize("seed", [1])
def test_minutes_of_kills_freezes_and_returns_leave_one_history(
    shells: Callable[..., Shell], run_file: Path, seed: int
) -> None:
    all_four = [shells(name) for name in ("anna", "bert", "cleo", "dora")]
    maker, *guests = all_four

    num_said = dict.fromkeys(all_four, 0)

    def start(shell: Shell) -> None:
        num_said[shell] = shell.said.stat().st_size if shell.said.exists() else 0
        if shell is maker:
            shell.run("train", str(run_file), "--name", shell.folder.name, *LOCAL)
        else:
            ticket = tickets([each for each in all_four if each is not shell])[0]
            shell.run("join", "-", "--yes", "--name", shell.folder.name, *LOCAL, given=ticket + "\n")

    start(maker)
    maker.ticket()
    for guest in guests:
        start(guest)
    for guest in guests:
        guest.wait(lambda entry: isinstance(entry.event, RoundCommitted), within_s=START_S)
    held = [psutil.Process(shell.process.pid).memory_info().rss for shell in all_four if shell.process]

    generator, ends = stream(seed, "soak"), time.monotonic() + CHAOS_S
    num_done = {"kill": 0, "stop": 0, "freeze": 0}
    while time.monotonic() < ends:
        victim = all_four[int(generator.integers(4))]
        what = ("kill", "stop", "freeze")[int(generator.integers(3))]
        away_s = float(generator.integers(1, 12))
        assert victim.process is not None
        assert victim.process.poll() is None, victim.said.read_text()
        num_done[what] += 1
        if what == "freeze":
            victim.process.send_signal(signal.SIGSTOP)
            time.sleep(away_s)
            victim.process.send_signal(signal.SIGCONT)
        else:
            number = signal.SIGKILL if what == "kill" else signal.SIGTERM
            has_begun = victim.said.stat().st_size > num_said[victim]  # else Python itself is still starting
            code = victim.send(number)
            assert code == (0 if what == "stop" and has_begun else -number), victim.said.read_text()
            time.sleep(away_s)
            start(victim)
        time.sleep(float(generator.integers(3, 10)))
    assert min(num_done.values()) > 0, num_done

    at = time.time()
    for shell in all_four:
        shell.wait(
            lambda entry: isinstance(entry.event, RoundCommitted) and len(entry.event.contributors) == 4,
            after=at,
            within_s=SETTLE_S,
        )
    manifests: dict[tuple[str, int], set[str]] = {}
    for shell in all_four:
        for entry in shell.entries():
            if isinstance(entry.event, RoundCommitted):
                manifests.setdefault((entry.event.branch, entry.event.round), set()).add(entry.event.manifest)
    assert {where: named for where, named in manifests.items() if len(named) > 1} == {}
    grown = [
        psutil.Process(shell.process.pid).memory_info().rss - before
        for shell, before in zip(all_four, held, strict=True)
        if shell.process
    ]
    assert max(grown) < GROWTH_NBYTES, grown
    for shell in all_four:
        assert shell.send(signal.SIGTERM) == 0
        assert "Traceback" not in shell.said.read_text()
