"""What the tls transport promises beyond the contract: certificates, ports, addresses, threads."""

import asyncio
import contextlib
import datetime
import os
import socket
import ssl
import struct
import tempfile
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from weft.clock import SystemClock
from weft.config import from_tree
from weft.errors import ConfigError, DialError, NetError
from weft.keys import Identity, verify
from weft.net.transport import tcp, tls_certificate
from weft.net.transport.base import Lane, Stream
from weft.net.transport.limits import Budget
from weft.net.transport.rate_limit import ThrottledStream, Valve
from weft.net.transport.tls import LOOK_AWAY_S, TlsConfig, TlsTransport
from weft.net.transport.tls_certificate import certified_peer, client_context, make_certificate, server_context
from weft.net.transport.tls_stream import SMALL_NBYTES

TEST_ENDS_S = 20


@dataclass
class Listener:
    transport: TlsTransport
    identity: Identity
    addresses: tuple[str, ...] = ()
    streams: "asyncio.Queue[Stream]" = field(default_factory=asyncio.Queue)
    drops: list[str] = field(default_factory=list)


@contextlib.asynccontextmanager
async def listening(config: TlsConfig, budget: Budget = Budget()) -> AsyncIterator[Listener]:  # noqa: B008  # frozen
    identity = Identity.generate()
    drops: list[str] = []
    transport = TlsTransport(identity, config, on_drop=lambda _, why: drops.append(why), budget=budget)
    listener = Listener(transport, identity, drops=drops)

    async def accept(stream: Stream, lane: Lane) -> None:
        listener.streams.put_nowait(stream)

    async with asyncio.timeout(TEST_ENDS_S):
        listener.addresses = await listener.transport.start(accept)
        try:
            yield listener
        finally:
            await listener.transport.aclose()


@pytest.fixture
async def caller() -> AsyncIterator[TlsTransport]:
    transport = TlsTransport(Identity.generate(), TlsConfig())
    yield transport
    await transport.aclose()


# --- certificates ---


def test_a_certificate_is_a_function_of_the_key() -> None:
    identity = Identity.from_seed(bytes(range(32)))
    assert make_certificate(identity) == make_certificate(identity)
    assert certified_peer(make_certificate(identity)) == identity.peer


def test_a_certificate_is_what_others_take_for_one() -> None:
    """Checked against an implementation that is not ours."""
    identity = Identity.from_seed(bytes(range(32)))
    certificate = x509.load_der_x509_certificate(make_certificate(identity))
    key = certificate.public_key()
    assert isinstance(key, Ed25519PublicKey)
    assert key.public_bytes_raw().hex() == identity.peer
    certificate.verify_directly_issued_by(certificate)
    assert verify(identity.peer, certificate.tbs_certificate_bytes, certificate.signature)
    assert certificate.subject.rfc4514_string() == "CN=weft peer"
    assert certificate.not_valid_before_utc == datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    assert certificate.not_valid_after_utc.year == 9999
    assert certificate.serial_number == 1
    assert list(certificate.extensions) == []


def test_the_certificate_of_a_known_key_is_known() -> None:
    """A test vector for docs/formats.md."""
    certificate = make_certificate(Identity.from_seed(bytes(32))).hex()
    assert certificate == (
        "3081d6308189a003020102020101300506032b657030143112301006035504030c09776566742070656572"
        "3020170d3730303130313030303030305a180f39393939313233313030303030305a"
        "30143112301006035504030c09776566742070656572302a300506032b6570032100"
        "3b6a27bcceb6a42d62a3a8d02a6f0d73653215771de243a63ac048a18b59da29"
        "300506032b6570034100" + certificate[-128:]
    )


def test_the_key_lies_on_disk_encrypted_and_only_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[tuple[str, int]] = []
    load = ssl.SSLContext.load_cert_chain

    def spy(self: ssl.SSLContext, path: Path, **options: Any) -> None:
        seen.append((path.read_text(), path.parent.stat().st_mode & 0o777))
        load(self, path, **options)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", spy)
    identity = Identity.generate()
    server_context(identity, make_certificate(identity))
    [(text, mode)] = seen
    assert "BEGIN ENCRYPTED PRIVATE KEY" in text
    assert "BEGIN PRIVATE KEY" not in text
    assert mode == 0o700
    assert list(tmp_path.iterdir()) == []


async def test_a_clock_that_is_wrong_by_years_does_not_matter(
    caller: TlsTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen from a certificate that ended in 1971, every clock is wrong."""
    for name in ("_VALIDITY", "_BODY_HEAD", "_HEAD"):
        changed = getattr(tls_certificate, name).replace(b"99991231", b"19711231")
        monkeypatch.setattr(tls_certificate, name, changed)
    async with listening(TlsConfig(host="127.0.0.1")) as listener:
        shown = x509.load_der_x509_certificate(make_certificate(listener.identity))
        assert shown.not_valid_after_utc.year == 1971
        stream = await caller.dial(listener.identity.peer, listener.addresses[0], "control")
        assert stream.peer == listener.identity.peer


# --- ports and addresses ---


async def test_a_chosen_port_is_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    async with listening(TlsConfig(host="127.0.0.1", port=port)) as listener:
        assert listener.addresses == (f"tls://127.0.0.1:{port}",)


async def test_a_taken_port_names_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        message = rf"port {port}: .*process {os.getpid()}.*--port 0"
        with pytest.raises(NetError, match=message):
            async with listening(TlsConfig(host="127.0.0.1", port=port)):
                pass


async def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(NetError, match=r"203\.0\.113\.1.*--host"):
        async with listening(TlsConfig(host="203.0.113.1")):
            pass


async def test_every_address_of_the_machine_leads_here(caller: TlsTransport) -> None:
    async with listening(TlsConfig(advertise=("peer.example:4433",))) as listener:
        assert listener.addresses[0] == "tls://peer.example:4433"
        assert listener.addresses[-1].startswith("tls://127.0.0.1:")
        for address in listener.addresses[1:]:
            stream = await caller.dial(listener.identity.peer, address, "control")
            await stream.close()


def test_a_connection_that_was_reset_before_tls_leaves_no_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far.close()
    descriptor = near.fileno()
    near.setblocking(False)
    with pytest.raises(ConnectionResetError):
        client_context().wrap_socket(near, do_handshake_on_connect=False)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


async def test_all_of_ipv4_offers_no_ipv6() -> None:
    async with listening(TlsConfig(host="0.0.0.0")) as listener:
        assert all("[" not in address for address in listener.addresses)
        assert listener.addresses[-1].startswith("tls://127.0.0.1:")


async def test_ipv6_works(caller: TlsTransport) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    async with listening(TlsConfig(host="::1")) as listener:
        assert listener.addresses[0].startswith("tls://[::1]:")
        stream = await caller.dial(listener.identity.peer, listener.addresses[0], "bulk")
        other_end = await listener.streams.get()
        await stream.send(b"six")
        assert await other_end.recv_into(memoryview(bytearray(3))) == 3


async def test_a_machine_without_ipv6_listens_on_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket

    def without_ipv6(family: int = socket.AF_INET, *rest: Any, **options: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return real(family, *rest, **options)

    monkeypatch.setattr(socket, "socket", without_ipv6)
    listener = tcp.listen("", 0)
    assert listener.getsockname()[0] == "0.0.0.0"
    listener.close()


async def test_a_stream_on_this_machine_knows_that_it_takes_no_line(caller: TlsTransport) -> None:
    async with listening(TlsConfig(host="127.0.0.1")) as listener:
        stream = await caller.dial(listener.identity.peer, listener.addresses[0], "bulk")
        there = await listener.streams.get()
        assert stream.is_here
        assert there.is_here
        assert not ThrottledStream(stream, "bulk", Valve(SystemClock(), upload_bps=1e6)).is_here


async def test_a_name_leads_to_its_address(caller: TlsTransport) -> None:
    async with listening(TlsConfig(host="127.0.0.1")) as listener:
        address = listener.addresses[0].replace("127.0.0.1", "localhost")
        stream = await caller.dial(listener.identity.peer, address, "control")
        assert stream.peer == listener.identity.peer


async def test_a_dead_port_is_an_error_that_says_so(caller: TlsTransport) -> None:
    with pytest.raises(DialError, match=r"tls://127\.0\.0\.1:1: .*(refused|Connect call failed)"):
        await caller.dial(Identity.generate().peer, "tls://127.0.0.1:1", "control")


@pytest.mark.parametrize(
    "tree", [{"port": 70000}, {"port": "many"}, {"handshake_timeout_s": 0}, {"max_half_open": 0}, {"threads": 1}]
)
def test_settings_out_of_range_are_named(tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(tree))):
        from_tree(tree, TlsConfig, where="test.toml")


async def test_a_failing_accept_is_told_and_listening_goes_on(
    caller: TlsTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = tcp.accept, [OSError(24, "Too many open files")]

    async def accept(listener: socket.socket, look_away_s: float) -> tuple[socket.socket, str, int]:
        if failures:
            raise failures.pop()
        return await real(listener, look_away_s)

    monkeypatch.setattr(tcp, "accept", accept)
    async with listening(TlsConfig(host="127.0.0.1")) as listener:
        await caller.dial(listener.identity.peer, listener.addresses[0], "control")
        assert any("Too many open files" in reason for reason in listener.drops)


NO_FILES = Budget(files=0, spare=0)


async def turned_away(listener: Listener) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.transport.port)
    assert not await reader.read()
    writer.close()


async def test_after_somebody_was_turned_away_the_door_is_looked_at_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, given = tcp.accept, list[float]()

    async def accept(listener: socket.socket, look_away_s: float) -> tuple[socket.socket, str, int]:
        given.append(look_away_s)
        return await real(listener, look_away_s)

    monkeypatch.setattr(tcp, "accept", accept)
    async with listening(TlsConfig(host="127.0.0.1"), NO_FILES) as listener:
        for _ in range(3):
            await turned_away(listener)
        assert len(listener.drops) == 3
    assert given == [0.0, LOOK_AWAY_S, LOOK_AWAY_S, LOOK_AWAY_S]


async def test_a_farewell_waits_for_room_in_the_socket(caller: TlsTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refusals = ssl.SSLSocket.unwrap, [ssl.SSLWantWriteError(), ssl.SSLWantWriteError()]

    def unwrap(self: ssl.SSLSocket) -> socket.socket:
        if refusals:
            raise refusals.pop()
        return real(self)

    async with listening(TlsConfig(host="127.0.0.1")) as listener:
        near = await caller.dial(listener.identity.peer, listener.addresses[0], "control")
        far = await listener.streams.get()
        monkeypatch.setattr(ssl.SSLSocket, "unwrap", unwrap)
        await near.close()
        assert await far.recv_into(memoryview(bytearray(1))) == 0
        assert refusals == []


# --- threads ---


async def test_streams_that_wait_hold_no_thread(caller: TlsTransport) -> None:
    async with listening(TlsConfig(host="127.0.0.1", bulk_threads=1)) as listener:

        async def connect() -> tuple[Stream, Stream]:
            near = await caller.dial(listener.identity.peer, listener.addresses[0], "bulk")
            return near, await listener.streams.get()

        idle = [await connect() for _ in range(20)]
        readers = [asyncio.ensure_future(far.recv_into(memoryview(bytearray(1)))) for _, far in idle[:10]]
        stuck = [asyncio.ensure_future(far.send(bytes(32 << 20))) for _, far in idle[10:]]
        await asyncio.wait({*readers, *stuck}, timeout=0.3)
        near, far = await connect()
        sending = asyncio.ensure_future(far.send(b"x" * (8 << 20)))
        buffer, received = memoryview(bytearray(1 << 20)), 0
        while received < 8 << 20:
            received += await near.recv_into(buffer)
        await sending
        assert not any(task.done() for task in (*readers, *stuck))
        for task in (*readers, *stuck):
            task.cancel()
        await asyncio.wait({*readers, *stuck})


async def test_closing_ends_the_threads(caller: TlsTransport) -> None:
    before = threading.active_count()
    async with listening(TlsConfig(host="127.0.0.1", bulk_threads=3)) as listener:
        near = await caller.dial(listener.identity.peer, listener.addresses[0], "bulk")
        far = await listener.streams.get()
        await asyncio.gather(far.send(b"x"), near.recv_into(memoryview(bytearray(SMALL_NBYTES))))
        assert threading.active_count() == before  # not worth a change of threads
        large = memoryview(bytearray(SMALL_NBYTES + 1))
        await asyncio.gather(far.send(large), near.recv_into(large))
        assert threading.active_count() > before
        await near.close()
    await caller.aclose()
    assert threading.active_count() == before
