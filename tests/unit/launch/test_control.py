"""What a person asks a running peer on the same machine: files that come and go, and an answer."""

import asyncio
import os
from pathlib import Path

import pytest

from weft.clock import VirtualClock
from weft.launch import control
from weft.launch.control import ASKED, Control, Wish, put_wish, read_answer, take_wish
from weft.store.home import PeerFolder


class Peer:
    """A peer that leaves its device in two seconds."""

    def __init__(self) -> None:
        self.held: list[str] = []
        self.num_settled = 0

    @property
    def pausing(self) -> "Peer":
        return self

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(self.held)

    def stop(self, reason: str) -> None:
        raise AssertionError("nobody asked for that")

    def fail(self, error: Exception) -> None:
        raise error

    def want(self, reason: str) -> None:
        self.held.append(reason)

    def want_no_more(self, reason: str) -> None:
        self.held.remove(reason)

    async def settled(self) -> None:
        await asyncio.sleep(2.0)
        self.num_settled += 1


def test_a_wish_is_heeded_and_answered_once_the_device_is_free(tmp_path: Path) -> None:
    folder, peer = PeerFolder(tmp_path), Peer()

    async def main() -> None:
        put_wish(folder, Wish(word="pause", number="of before"))
        watching = asyncio.ensure_future(Control(folder, peer).watch())
        await asyncio.sleep(10.0)
        assert peer.held == []  # what an earlier process was asked is nobody's wish any more
        put_wish(folder, Wish(word="pause", number="1"))
        await asyncio.sleep(1.0)
        assert peer.held == [ASKED]
        assert read_answer(folder, "1") is None
        await asyncio.sleep(2.0)
        assert "the device is free" in (read_answer(folder, "1") or "")
        assert read_answer(folder, "0") is None
        peer.held.insert(0, "outside its hours, until 22:00")
        put_wish(folder, Wish(word="resume", number="2"))
        await asyncio.sleep(3.0)
        assert read_answer(folder, "2") == "still paused: outside its hours, until 22:00"
        assert take_wish(folder) is None
        watching.cancel()

    VirtualClock().run(main())


@pytest.mark.parametrize("data", [b"", b"{", b'{"word": "stop", "number": "1"}', b"x" * 10_000])
def test_what_is_no_wish_is_taken_away_and_not_heeded(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "wish").write_bytes(data)
    assert take_wish(PeerFolder(tmp_path)) is None
    assert not (tmp_path / "wish").exists()


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="this system tells no owner of a file")
def test_the_wish_of_another_user_is_not_heeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control.os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    put_wish(PeerFolder(tmp_path), Wish(word="pause", number="1"))
    found = take_wish(PeerFolder(tmp_path))
    assert found is None or os.stat(tmp_path).st_uid == 0  # root may do anything
