"""What watches over a running peer does not end in silence."""

import asyncio
from datetime import UTC
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.clock import VirtualClock
from weft.keys import Identity
from weft.launch import control
from weft.launch.guard import DayCount
from weft.launch.session import Session
from weft.run.machine import CapsConfig
from weft.store.home import PeerFolder


class Peer:
    pausing = None

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.stops: list[str] = []

    def stop(self, reason: str) -> None:
        self.stops.append(reason)

    def fail(self, error: Exception) -> None:
        self.failures.append(error)


def broken(*_given: Any) -> None:
    raise PermissionError("not any more")


@pytest.mark.parametrize("breaks", ["caps", "wishes", ""])
def test_a_peer_whose_caps_or_wishes_are_watched_no_more_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    clock, peer = VirtualClock(), Peer()
    absent: Any = None
    identity = Identity.from_seed(bytes(32))
    day = DayCount(tmp_path / "moved", CapsConfig(), clock, UTC)
    options: Any = SimpleNamespace(settings=SimpleNamespace(caps=CapsConfig()), until=None)
    s = Session(
        options=options,
        identity=identity,
        folder=PeerFolder(tmp_path),
        node=absent,
        emit=lambda event: None,
        clock=clock,
        compute=absent,
        day=day,
    )

    async def main() -> None:
        async with s.guarded(peer):
            await asyncio.sleep(5.0)
            assert peer.failures == []
            if breaks == "caps":
                monkeypatch.setattr(day, "look", broken)
            elif breaks == "wishes":
                monkeypatch.setattr(control, "take_wish", broken)
            await asyncio.sleep(5.0)
            monkeypatch.undo()
            assert [str(error) for error in peer.failures] == (["not any more"] if breaks else [])
            assert peer.stops == []
        assert peer.stops == ["it has ended"]

    clock.run(main())
