"""A process that is told twice within a moment to end is told once; a second wish ends it at once."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from weft.cli import process
from weft.cli.demo.run import Follower
from weft.cli.process import Stopper
from weft.cli.screen.screen import PlainScreen, Screen
from weft.cli.signals import NOTHING_TO_SAVE
from weft.clock import VirtualClock, Wish
from weft.library.thread import PeerThread


class Ended(BaseException):
    pass


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr("os._exit", end)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_what_comes_within_a_moment_of_the_first_signal_is_the_first() -> None:
    clock = VirtualClock()
    wish = Wish(clock)
    told = []
    for wait_s in (0.0, 0.1, 1.8, 0.2):
        clock.advance(wait_s)
        told.append(wish.is_again())
    assert told == [False, False, False, True]


@pytest.mark.parametrize("wait_s", [0.0, 1.5, 2.5])
def test_a_peer_that_is_told_twice_within_two_seconds_saves(wait_s: float) -> None:
    clock, reasons = VirtualClock(), list[str]()
    stopper = Stopper(Screen(), clock)

    async def main() -> None:
        stopper.install(asyncio.get_running_loop())
        stopper.started(reasons.append, lambda: False)
        signal.raise_signal(signal.SIGTERM)
        clock.advance(wait_s)
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0.0)

    try:
        if wait_s > Wish.ONE_S:
            with pytest.raises(Ended, match="143"):
                process.run_loop(main())
        else:
            process.run_loop(main())
            assert reasons == ["stopped by SIGTERM"]
    finally:
        stopper.remove()


def test_a_signal_told_twice_does_not_end_a_process_that_has_just_saved(capsys: pytest.CaptureFixture[str]) -> None:
    clock, reasons = VirtualClock(), list[str]()
    stopper = Stopper(PlainScreen(), clock)

    async def main() -> None:
        stopper.install(asyncio.get_running_loop())
        stopper.started(reasons.append, lambda: False)
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0.0)

    process.run_loop(main())
    assert reasons == ["stopped by Ctrl-C"]  # as a person calls it
    assert capsys.readouterr().err == "Ctrl-C: this peer saves and says goodbye\n"
    stopper.remove()
    signal.raise_signal(signal.SIGINT)  # were it as before, a KeyboardInterrupt
    clock.advance(3.0)
    with pytest.raises(Ended, match="130"):
        signal.raise_signal(signal.SIGINT)


def test_a_demo_that_is_told_twice_lets_its_peers_save(capsys: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []

    class Swarm:
        def stop(self) -> None:
            done.append("stop")

        def kill(self) -> None:
            done.append("kill")

    follower = Follower(Swarm(), Screen())  # type: ignore[arg-type]
    follower._on_signal(signal.SIGTERM, None)
    follower._on_signal(signal.SIGTERM, None)
    assert done == ["stop"]
    assert capsys.readouterr().err.count("stopping") == 1


def test_a_loop_that_is_interrupted_twice_within_a_moment_waits_for_its_checkpoint() -> None:
    clock = VirtualClock()
    interrupts = [0.5, 1.0, 3.0]
    waits: list[float] = []

    class Thread:
        def is_alive(self) -> bool:
            return True

        def join(self, left_s: float) -> None:
            waits.append(left_s)
            clock.advance(interrupts[0] - clock.now())
            interrupts.pop(0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PeerThread.see_off(Thread(), 60.0, clock)  # type: ignore[arg-type]
    assert waits == [60.0, 59.5, 59.0]


WAITS = """
import asyncio, signal, threading, time
from weft.cli import process
from weft.cli.screen.screen import Screen

process._REST_S, process._CLOSES_S, process._PATIENCE_S = {rests}, {closes}, {patience}

async def main():
    stopper.install(asyncio.get_running_loop())
    stopper.started(lambda reason: None, lambda: {at_rest})
    print("here", flush=True)
    await asyncio.to_thread(time.sleep, 30.0)  # what nobody can break off

began = time.monotonic()
stopper = process.Stopper(Screen())
process.run_loop(main())
"""


@pytest.mark.parametrize(
    ("waits", "code", "said"),
    [
        ({"rests": 0.5, "closes": 60.0, "patience": 60.0, "at_rest": True}, 0, NOTHING_TO_SAVE),
        (
            {"rests": 60.0, "closes": 60.0, "patience": 0.5, "at_rest": False},
            1,
            "still not done 0 s after SIGTERM: ended at once",
        ),
        (
            {"rests": 60.0, "closes": 0.5, "patience": 60.0, "at_rest": "time.monotonic() > began + 1.5"},
            0,
            "stopped: all is saved, and what still computes is not waited for",
        ),
    ],
    ids=["nothing to save", "busy", "saved"],
)
def test_what_computes_is_waited_for_only_while_something_is_to_be_saved(
    waits: dict[str, object], code: int, said: str
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITS.format(**waits)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "here\n"
        run.send_signal(signal.SIGTERM)
        assert (*run.communicate(timeout=20), run.returncode) == ("", f"weft: {said}\n", code)


PROCESS = """
import asyncio, signal, sys
from weft.cli.process import Stopper, run_loop
from weft.cli.screen.screen import Screen

async def main():
    stopper.install(asyncio.get_running_loop())
    stopped = asyncio.Event()
    stopper.started(lambda reason: stopped.set(), lambda: False)
    print("here", flush=True)
    await stopped.wait()
    await asyncio.sleep(0.5)
    print("saved", flush=True)

stopper = Stopper(Screen())
run_loop(main())
stopper.remove()
"""


def test_a_process_that_timeout_ends_has_saved() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROCESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "here\n"
        run.send_signal(signal.SIGTERM)  # as `timeout` does: its child, and then the group
        os.killpg(run.pid, signal.SIGTERM)
        assert (*run.communicate(timeout=60), run.returncode) == ("saved\n", "", 0)
