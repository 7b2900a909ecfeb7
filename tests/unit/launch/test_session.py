"""What watches over a running peer does not end in silence."""

import asyncio
import socket
from contextlib import closing
from datetime import UTC
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.clock import VirtualClock
from weft.errors import ConfigError, Refused
from weft.events import VERSION, Entry, Event, Notice, PeerStarted, PeerStopped, StepDone
from weft.ids import Digest, PeerId, RunId, Step, short, start_of
from weft.keys import Identity
from weft.launch import control
from weft.launch.guard import DayCount
from weft.launch.session import Options, Session, session
from weft.log import JsonlSink
from weft.net.messages import Contact
from weft.net.ticket import read
from weft.net.transport.tls import TlsConfig
from weft.run.machine import CapsConfig, PeerConfig
from weft.store.home import Home, PeerFolder


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


RUN = RunId("e" * 64)


class Told:
    def __init__(self) -> None:
        self.notices: list[str] = []

    def write(self, entry: Entry) -> None:
        if isinstance(entry.event, Notice):
            self.notices.append(entry.event.text)

    def close(self) -> None:
        pass


def test_a_name_holds_at_the_next_start_until_another_is_given(tmp_path: Path) -> None:
    def named(name: str) -> tuple[str, list[str]]:
        told = Told()
        options = Options(home=Home(tmp_path), key=None, settings=PeerConfig(name=name), sinks=(told,))

        async def main() -> str:
            async with session(options, RUN, Identity.from_seed(bytes(32))) as s:
                return s.node.passport.name

        return asyncio.run(main()), told.notices

    assert named("anna") == ("anna", [])
    name, notices = named("")
    assert name == "anna"
    assert "called anna" in notices[0]
    assert named("bert") == ("bert", [])
    assert named("")[0] == "bert"


@pytest.mark.parametrize("kept", ["a port", "another program's", "no port"])
def test_a_peer_listens_where_it_did_before_and_says_where_it_cannot(tmp_path: Path, kept: str) -> None:
    home, identity = Home(tmp_path), Identity.from_seed(bytes(32))

    def started() -> tuple[str, list[str]]:
        told = Told()
        settings = PeerConfig(name="anna", transports=("tls",), tls=TlsConfig(host="127.0.0.1"))
        options = Options(home=home, key=None, settings=settings, sinks=(told,))

        async def main() -> str:
            async with session(options, RUN, identity) as s:
                await s.start()
                return s.node.addresses[0]

        return asyncio.run(main()), told.notices

    first, notices = started()
    assert notices == []
    if kept == "a port":
        assert started() == (first, [])
    elif kept == "another program's":
        with socket.create_server(("127.0.0.1", int(first.rpartition(":")[2]))):
            second, notices = started()
        assert second != first
        assert len(notices) == 1
        assert "could not listen on its last port" in notices[0]
        assert started() == (second, [])
    else:
        home.folder(RUN, identity.peer).ports.write_text('{"tls": 70000}')
        assert started()[1] == []


def test_an_error_names_who_is_known_by_name(tmp_path: Path) -> None:
    peer = PeerId("ab" * 32)
    options = Options(home=Home(tmp_path), key=None, settings=PeerConfig())

    async def main() -> None:
        async with session(options, RUN, Identity.from_seed(bytes(32))) as s:
            s.node.remember(peer, ["tls://127.0.0.1:1"], "bert")
            raise Refused(f"{short(peer)} refuses this peer, blob {short(Digest('cd' * 32))} or not")

    with pytest.raises(Refused, match=r"^bert \(abababab\) refuses this peer, blob cdcdcdcd or not$"):
        asyncio.run(main())


def test_a_ticket_names_an_anchor_first_and_nobody_who_watches(tmp_path: Path) -> None:
    identity = Identity.from_seed(bytes(32))
    standing = {PeerId("aa" * 32): None, PeerId("bb" * 32): 1, PeerId("cc" * 32): 0, identity.peer: None}
    contacts = [Contact(peer=peer, name="", addresses=("tls://127.0.0.1:1",)) for peer in standing]
    node: Any = SimpleNamespace(
        peer=identity.peer,
        run=RUN,
        passport=SimpleNamespace(admission=None),
        contacts=lambda: contacts,
        on_contacts_settled=lambda _renew: None,
    )
    absent: Any = None
    s = Session(
        options=absent,
        identity=identity,
        folder=PeerFolder(tmp_path),
        node=node,
        emit=lambda event: None,
        clock=absent,
        compute=absent,
        day=absent,
    )

    async def main() -> list[PeerId]:
        with s.ticket(lambda peer: standing[peer]) as text:
            return [contact.peer for contact in read(text).contacts]

    assert asyncio.run(main()) == ["c" * 30, start_of(identity.peer), "b" * 30]


def test_who_was_killed_is_told_at_the_next_start_what_is_lost(tmp_path: Path) -> None:
    identity = Identity.from_seed(bytes(32))

    def begun(*before: Event) -> list[str]:
        log = Home(tmp_path).folder(RUN, identity.peer).log
        log.parent.mkdir(parents=True, exist_ok=True)
        with closing(JsonlSink(log)) as sink:
            for event in before:
                sink.write(Entry(v=VERSION, at=1.0, peer=identity.peer, event=event))
        told = Told()
        options = Options(home=Home(tmp_path), key=None, settings=PeerConfig(name="anna"), sinks=(told,))

        async def main() -> None:
            async with session(options, RUN, identity):
                pass

        asyncio.run(main())
        return told.notices

    step = StepDone(step=Step(1), loss=1.0, learning_rate=0.1, gradient_norm=1.0, num_tokens=1024, duration_s=1.0)
    assert begun() == []
    killed = begun(PeerStarted(run=RUN, name="anna", software="", device="cpu", num_parameters=1), step)
    assert killed == [
        "this peer was killed, or failed, last time: 1,024 tokens that it had trained were not saved and are lost"
    ]
    assert begun(PeerStopped(reason="stopped by Ctrl-C")) == []


@pytest.mark.parametrize("apart", [False, True])
def test_what_was_moved_today_is_counted_over_starts_that_nothing_guards(tmp_path: Path, apart: bool) -> None:
    moved = tmp_path / "counted" if apart else None
    settings = PeerConfig(caps=CapsConfig(day_nbytes=10**8))

    def started(name: str, spent: int) -> int:
        options = Options(home=Home(tmp_path / name), key=None, settings=settings, moved=moved)

        async def main() -> int:
            async with session(options, RUN, Identity.from_seed(bytes(32))) as s:
                before = s.day.moved.nbytes
                s.day.ration.spend(spent)
                return before

        return asyncio.run(main())

    assert started("first", 10**6) == 0
    assert started("first", 2 * 10**6) == 10**6
    assert started("second", 10**8) == (3 * 10**6 if apart else 0)
    with pytest.raises(ConfigError, match="midnight"):
        started("second", 0)
