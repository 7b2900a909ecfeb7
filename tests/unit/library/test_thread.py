"""How a loop leaves: what it made last is waited for, and a script that only ends lets go of everything."""

import subprocess
import sys
from pathlib import Path

import pytest

from commits import committed
from unit.library.loops import ENDS_S
from weft.events import Entry, Notice
from weft.ids import PeerId
from weft.library.thread import LEAST_S, RoundTimes, most_s


def entry(work_s: float, duration_s: float) -> Entry:
    return Entry(v=1, at=0.0, peer=PeerId("00"), event=committed(duration_s=duration_s, work_s=work_s))


def test_it_is_waited_twice_as_long_as_rounds_took_and_a_minute_at_least() -> None:
    times = RoundTimes()
    assert most_s(times.took_s) == LEAST_S
    times.write(entry(1.0, 2.0))
    assert most_s(times.took_s) == LEAST_S
    times.write(entry(80.0, 20.0))
    assert most_s(times.took_s) == 200.0  # two tell little of how they differ: the longest counts
    for _ in range(16):
        times.write(entry(300.0, 100.0))
    assert most_s(times.took_s) == 800.0


def test_rounds_without_work_of_this_peer_are_not_measured() -> None:
    times = RoundTimes()
    times.write(entry(500.0, 0.0))
    times.write(Entry(v=1, at=0.0, peer=PeerId("00"), event=Notice(text="other")))
    assert times.took_s == []


STARTS = """
import sys
import torch, weft
from torch import nn
from weft.net.transport.tls import TlsConfig
from weft.run.machine import PeerConfig
from weft.sync.method.presets import FedAvgConfig

settings = PeerConfig(device="cpu", transports=("tls",), tls=TlsConfig(host="127.0.0.1"))
config = weft.SyncConfig(samples=4000, batch_size=4, method=FedAvgConfig(every=2))
sync = weft.Sync(nn.Linear(2, 1), config, machine=weft.Machine(home=sys.argv[1], settings=settings))
sync.start()
for _ in range(7):
    sync.step(4)
"""

FORKS = """
import multiprocessing
from weft.library.thread import at_exit

at_exit(lambda: print("left", flush=True))
child = multiprocessing.get_context("fork").Process(target=print, args=("forked",))
child.start()
child.join()
print("joined", flush=True)
"""


@pytest.mark.full
def test_a_script_that_ends_without_finish_ends_with_a_goodbye(tmp_path: Path) -> None:
    script = [sys.executable, "-c", STARTS, str(tmp_path)]
    done = subprocess.run(script, check=True, capture_output=True, text=True, timeout=ENDS_S)
    assert "Error" not in done.stderr
    (log,) = tmp_path.rglob("*.jsonl")
    assert '"PeerStopped","reason":"stopped"' in log.read_text(encoding="utf-8")


@pytest.mark.full
def test_processes_that_are_forked_off_leave_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], check=True, capture_output=True, text=True, timeout=ENDS_S)
    assert sorted(done.stdout.split()) == ["forked", "joined", "left"]
    assert done.stdout.split()[-1] == "left"
