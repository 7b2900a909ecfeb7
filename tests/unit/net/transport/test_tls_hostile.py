"""What strangers may send to an open port, and what they may answer when dialled, over real sockets.

In every case: the connection is dropped, `on_drop` says why, and an honest peer connects afterwards.
"""

import asyncio
import contextlib
import datetime
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import DialError, PeerError
from weft.events import HUNG_UP
from weft.ids import Digest, PeerId
from weft.keys import Identity
from weft.net.transport.base import Lane, Stream
from weft.net.transport.frame import FRAME_VERSION, encode_frame
from weft.net.transport.tls import TlsConfig, TlsTransport
from weft.net.transport.tls_certificate import certified_peer, client_context, make_certificate, server_context
from weft.net.transport.tls_handshake import (
    MAX_MESSAGE_NBYTES,
    PREAMBLE_NBYTES,
    Challenge,
    ClientProof,
    NotWeft,
    Welcome,
    preamble,
    read_preamble,
    verify_client,
)
from weft.wire import Buffer, Signed, decode, digest, encode, seal

TEST_ENDS_S = 20
PATIENT_S = 10.0  # the default: never reached where something is dropped for what it sends
HASTY_S = 0.4  # where the deadline is what drops it


@dataclass
class Host:
    """A listening peer under attack, and an honest caller."""

    identity: Identity
    transport: TlsTransport
    honest: TlsTransport
    port: int = 0
    drops: "asyncio.Queue[tuple[str, str]]" = field(default_factory=asyncio.Queue)
    arrived: "asyncio.Queue[Stream]" = field(default_factory=asyncio.Queue)

    async def dropped(self) -> str:
        """Return why the next connection was dropped."""
        address, reason = await self.drops.get()
        assert address.startswith("tls://127.0.0.1:")
        return reason

    async def still_serves(self) -> None:
        stream = await self.honest.dial(self.identity.peer, f"tls://127.0.0.1:{self.port}", "control")
        other_end = await self.arrived.get()
        await other_end.send(b"hello")
        buffer = bytearray(5)
        assert await stream.recv_into(memoryview(buffer)) == 5
        await asyncio.gather(stream.close(), other_end.close())

    async def knock(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def begin(self, lane: Lane = "control") -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Challenge]:
        """Go through TLS up to the server's challenge, with other code than weft's."""
        reader, writer = await self.knock()
        writer.write(preamble(lane))
        await writer.start_tls(client_context())
        return reader, writer, decode(await read_frame(reader), Challenge)

    def proof(self, challenge: Challenge, lane: Lane = "control") -> ClientProof:
        certificate = digest(make_certificate(self.identity))
        return ClientProof(certificate=certificate, nonce=challenge.nonce, lane=lane)


@contextlib.asynccontextmanager
async def hosting(handshake_timeout_s: float) -> AsyncIterator[Host]:
    identity = Identity.generate()
    config = TlsConfig(host="127.0.0.1", handshake_timeout_s=handshake_timeout_s)
    drops: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    transport = TlsTransport(identity, config, on_drop=lambda address, reason: drops.put_nowait((address, reason)))
    host = Host(identity, transport, TlsTransport(Identity.generate(), TlsConfig(host="127.0.0.1")), drops=drops)

    async def accept(stream: Stream, lane: Lane) -> None:
        host.arrived.put_nowait(stream)

    host.port = int((await transport.start(accept))[0].rpartition(":")[2])
    deadline = asyncio.get_running_loop().call_later(TEST_ENDS_S, give_up)  # a fixture and its test are two tasks
    yield host
    deadline.cancel()
    await asyncio.gather(transport.aclose(), host.honest.aclose())


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    async with hosting(PATIENT_S) as host:
        yield host


@pytest.fixture
async def hasty_host() -> AsyncIterator[Host]:
    async with hosting(HASTY_S) as host:
        yield host


def give_up() -> None:
    for task in asyncio.all_tasks():
        task.cancel("the test took too long")


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    length, _ = struct.unpack(">IB", await reader.readexactly(5))
    return await reader.readexactly(length)


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    await asyncio.sleep(0)  # `wait_closed` may wait for ever after `start_tls`


# --- before TLS ---


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not those of a weft peer"),
        (bytes(64), "not those of a weft peer"),
        (struct.pack(">4sHBx", b"weft", 7, 0), "version 7"),
        (struct.pack(">4sHBx", b"weft", 1, 9), "lane that does not exist"),
        (struct.pack(">4sHBB", b"weft", 1, 0, 1), "lane that does not exist"),
        (preamble("control") + b"this is no TLS at all", "TLS handshake failed"),
        (preamble("bulk") + bytes(1000), "TLS handshake failed"),
        (preamble("bulk") + b"\x16\x03\x01\xff\xff" + bytes(1000), "TLS handshake failed"),
    ],
)
async def test_a_stranger_is_dropped_with_the_reason(host: Host, first: bytes, reason: str) -> None:
    _, writer = await host.knock()
    writer.write(first)
    assert reason in await host.dropped()
    await hang_up(writer)
    await host.still_serves()
    assert host.drops.empty()


@pytest.mark.parametrize("first", [b"", b"wef", preamble("bulk"), preamble("control") + b"\x16\x03\x01\x02\x00"])
async def test_who_hangs_up_is_dropped_at_once(host: Host, first: bytes) -> None:
    _, writer = await host.knock()
    writer.write(first)
    writer.close()
    assert (await host.dropped()).startswith(HUNG_UP)
    await host.still_serves()


@pytest.mark.parametrize("first", [b"", b"wef", preamble("bulk"), preamble("control") + b"\x16\x03\x01\x02\x00"])
async def test_who_breaks_off_is_dropped_in_words(host: Host, first: bytes) -> None:
    _, writer = await host.knock()
    writer.write(first)
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    await asyncio.sleep(0.05)  # so that it is read before
    writer.transport.abort()
    reason = await host.dropped()
    assert reason.startswith(HUNG_UP)
    assert "Errno" not in reason
    await host.still_serves()


@pytest.mark.parametrize("first", [b"", b"wef", preamble("bulk"), preamble("control") + b"\x16\x03\x01\x02\x00"])
async def test_who_stops_half_way_is_dropped_at_the_deadline(hasty_host: Host, first: bytes) -> None:
    reader, writer = await hasty_host.knock()
    writer.write(first)
    assert "did not prove its key within 0.4 s" in await hasty_host.dropped()
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    await hang_up(writer)


async def test_a_trickle_of_bytes_does_not_move_the_deadline(hasty_host: Host) -> None:
    hello = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = client_context().wrap_bio(*hello)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    _, writer = await hasty_host.knock()

    async def trickle() -> None:
        for byte in preamble("control") + hello[1].read():
            writer.write(bytes([byte]))
            await asyncio.sleep(HASTY_S / 20)

    trickling = asyncio.ensure_future(trickle())
    assert "did not prove its key" in await hasty_host.dropped()
    trickling.cancel()
    await hang_up(writer)


async def test_two_hundred_silent_connections_do_not_keep_an_honest_peer_out(host: Host) -> None:
    silent = [await host.knock() for _ in range(200)]
    await host.still_serves()
    for _ in range(200 - 64 + 1):  # one more made room for the honest peer
        assert "64 connections have proven no key; the oldest is dropped" in await host.dropped()
    assert host.drops.empty()
    for _, writer in silent:
        await hang_up(writer)
    for _ in range(64 - 1):
        assert "hung up" in await host.dropped()


# --- the proof ---


async def test_an_honest_proof_by_hand_is_welcome(host: Host) -> None:
    """Shows that the refusals below are for what they say."""
    me = Identity.generate()
    reader, writer, challenge = await host.begin()
    writer.write(encode_frame(encode(seal(me, host.proof(challenge)))))
    assert decode(await read_frame(reader), Welcome).peer == me.peer
    assert (await host.arrived.get()).peer == me.peer
    await hang_up(writer)


async def refused(host: Host, forge: Callable[[Challenge], bytes]) -> str:
    """Send what `forge` makes of the challenge; return why it was refused."""
    reader, writer, challenge = await host.begin()
    writer.write(forge(challenge))
    reason = await host.dropped()
    with contextlib.suppress(OSError):
        assert await reader.read() == b""
    await hang_up(writer)
    assert host.arrived.empty()
    await host.still_serves()
    return reason


async def test_a_replayed_proof_is_refused(host: Host) -> None:
    reader, writer, challenge = await host.begin()
    recorded = encode_frame(encode(seal(Identity.generate(), host.proof(challenge))))
    writer.write(recorded)
    await read_frame(reader)
    await host.arrived.get()
    assert "replay" in await refused(host, lambda _: recorded)
    await hang_up(writer)


async def test_a_proof_by_another_key_is_refused(host: Host) -> None:
    me, victim = Identity.generate(), Identity.generate()

    def forge(challenge: Challenge) -> bytes:
        mine = seal(me, host.proof(challenge))
        return encode_frame(encode(msgspec.structs.replace(mine, signer=victim.peer)))

    assert "does not hold" in await refused(host, forge)


async def test_a_proof_made_for_another_server_is_refused(host: Host) -> None:
    """A server that asks its own visitors to sign our challenge gains nothing."""
    visitor, attacker = Identity.generate(), Identity.generate()

    def forge(challenge: Challenge) -> bytes:
        relayed = msgspec.structs.replace(host.proof(challenge), certificate=digest(make_certificate(attacker)))
        return encode_frame(encode(seal(visitor, relayed)))

    assert "another connection" in await refused(host, forge)


async def test_a_proof_for_the_other_lane_is_refused(host: Host) -> None:
    me = Identity.generate()
    assert "another connection" in await refused(
        host, lambda challenge: encode_frame(encode(seal(me, host.proof(challenge, "bulk"))))
    )


async def test_a_signature_over_another_kind_of_record_is_refused(host: Host) -> None:
    me = Identity.generate()
    assert "expected a signed ClientProof" in await refused(
        host, lambda challenge: encode_frame(encode(seal(me, challenge)))
    )


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (struct.pack(">IB", 0xFFFFFFFF, FRAME_VERSION), "exceeds the bound"),
        (encode_frame(bytes(MAX_MESSAGE_NBYTES + 1)), "exceeds the bound"),
        (struct.pack(">IB", 10, 9) + bytes(10), "version 9"),
        (encode_frame(b""), "bytes are no Signed"),
        (encode_frame(b"\xc1 garbage"), "bytes are no Signed"),
        (encode_frame(b"\x84" * 900), "bytes are no Signed"),
        (encode_frame(encode(Challenge(nonce=bytes(32)))), "bytes are no Signed"),
        (encode_frame(encode(Signed(kind="ClientProof", body=b"", signer=PeerId("?"), signature=b""))), "not hold"),
    ],
)
async def test_a_malformed_proof_is_refused(host: Host, data: bytes, reason: str) -> None:
    assert reason in await refused(host, lambda _: data)


@pytest.mark.parametrize("lane", ["control", "bulk"])
async def test_a_client_that_never_proves_itself_is_dropped_at_the_deadline(hasty_host: Host, lane: Lane) -> None:
    reader, writer, _ = await hasty_host.begin(lane)
    assert "did not prove its key" in await hasty_host.dropped()
    with contextlib.suppress(OSError):
        assert await reader.read() == b""
    await hang_up(writer)


async def test_a_client_that_leaves_in_the_middle_is_dropped_at_once(host: Host) -> None:
    _, writer, _ = await host.begin()
    writer.write(b"\x00\x00")
    writer.close()
    assert "stream ended after 2 of the 5 bytes" in await host.dropped()


class Recorded:
    """A stream whose other end says `data` whatever it is asked, and then ends."""

    peer = PeerId("")

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def send(self, data: Buffer) -> None:
        pass

    async def recv_into(self, buffer: memoryview) -> int:
        num_bytes = min(len(buffer), len(self._data))
        buffer[:num_bytes], self._data = self._data[:num_bytes], self._data[num_bytes:]
        return num_bytes

    async def close(self) -> None:
        pass


@given(st.binary(max_size=600), st.booleans())
def test_whatever_a_client_says_is_a_peer_error(data: bytes, is_framed: bool) -> None:
    said = encode_frame(data) if is_framed else data
    with pytest.raises(PeerError):
        asyncio.run(verify_client(Recorded(said), Digest("00" * 32), "control"))


@given(st.binary(min_size=PREAMBLE_NBYTES, max_size=PREAMBLE_NBYTES))
def test_whatever_comes_first_is_a_preamble_or_refused(data: bytes) -> None:
    try:
        lane = read_preamble(data)
    except NotWeft:
        return
    assert preamble(lane) == data


@given(st.binary(max_size=500))
def test_whatever_a_server_shows_is_no_certificate(data: bytes) -> None:
    with pytest.raises(PeerError):
        certified_peer(data)


@given(st.integers(min_value=0), st.integers(min_value=1, max_value=255))
def test_a_damaged_certificate_is_refused_or_names_another_key_or_fails_in_tls(place: int, change: int) -> None:
    identity = Identity.from_seed(bytes(32))
    certificate = bytearray(make_certificate(identity))
    certificate[place % len(certificate)] ^= change
    is_signature = place % len(certificate) >= len(certificate) - 64  # TLS proves the key; its own signature is moot
    try:
        assert is_signature or certified_peer(bytes(certificate)) != identity.peer
    except PeerError:
        return


# --- servers ---


@contextlib.asynccontextmanager
async def impostor(context: ssl.SSLContext | None, answer: bytes = b"") -> AsyncIterator[tuple[str, list[bytes]]]:
    """Be a server that is no honest peer: do TLS, if there is a context, and say `answer`.

    Yields the address, and a list that holds what came in after that once the caller has hung up.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    heard: list[bytes] = []

    def serve() -> None:
        plain, _ = listener.accept()
        with plain, contextlib.suppress(OSError):
            plain.settimeout(TEST_ENDS_S)
            plain.recv(PREAMBLE_NBYTES, socket.MSG_WAITALL)
            with context.wrap_socket(plain, server_side=True) if context else plain as connection:
                connection.sendall(answer)
                while data := connection.recv(1000):
                    heard.append(data)

    serving = asyncio.ensure_future(asyncio.to_thread(serve))
    with listener:
        yield f"tls://127.0.0.1:{listener.getsockname()[1]}", heard
        await serving


async def dial_fails(peer: PeerId, address: str, handshake_timeout_s: float = PATIENT_S) -> str:
    transport = TlsTransport(Identity.generate(), TlsConfig(handshake_timeout_s=handshake_timeout_s))
    async with asyncio.timeout(TEST_ENDS_S):
        with pytest.raises(DialError) as caught:
            await transport.dial(peer, address, "control")
        await transport.aclose()
    return str(caught.value)


async def test_nothing_is_said_to_a_server_with_another_key() -> None:
    wanted, other = Identity.generate(), Identity.generate()
    context = server_context(other, make_certificate(other))
    async with impostor(context, encode_frame(encode(Challenge(nonce=bytes(32))))) as (address, heard):
        assert "answers there" in await dial_fails(wanted.peer, address)
    assert heard == []
    async with impostor(context, encode_frame(encode(Challenge(nonce=bytes(32))))) as (address, heard):
        assert "did not answer" in await dial_fails(other.peer, address, HASTY_S)
    assert heard != []  # the right one hears the proof


async def test_a_stolen_certificate_is_worth_nothing_without_its_key(tmp_path: Path) -> None:
    wanted, thief = Identity.generate(), Identity.generate()
    with pytest.raises(ssl.SSLError, match="key values mismatch"):
        server_context(thief, make_certificate(wanted))


async def test_a_certificate_with_another_kind_of_key_is_refused(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bank")])
    start = datetime.datetime(2000, 1, 1)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).serial_number(1)
    builder = (
        builder.public_key(key.public_key()).not_valid_before(start).not_valid_after(datetime.datetime(2100, 1, 1))
    )
    pem = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    encoding = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (tmp_path / "chain.pem").write_bytes(pem + key.private_bytes(*encoding))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "chain.pem")
    async with impostor(context) as (address, _):
        assert "not that of a weft peer" in await dial_fails(Identity.generate().peer, address)


async def test_old_tls_is_refused() -> None:
    identity = Identity.generate()
    context = server_context(identity, make_certificate(identity))
    context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
    async with impostor(context) as (address, _):
        assert "is not a weft peer" in await dial_fails(identity.peer, address)


async def test_a_server_of_another_version_is_a_dial_error() -> None:
    async with impostor(None, struct.pack(">4sHBx", b"weft", 2, 0)) as (address, _):
        assert "does not speak version 1" in await dial_fails(Identity.generate().peer, address)


async def test_a_caller_of_another_version_learns_that_at_once(host: Host) -> None:
    reader, writer = await host.knock()
    writer.write(struct.pack(">4sHBx", b"weft", 2, 0))
    assert await reader.read() == preamble("control")
    await hang_up(writer)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00" * 8, b"SSH-2.0-OpenSSH\r\n"])
async def test_a_server_of_another_protocol_is_a_dial_error(answer: bytes) -> None:
    async with impostor(None, answer) as (address, _):
        said = await dial_fails(Identity.generate().peer, address)
        assert "is not a weft peer" in said
        assert "[SSL" not in said


async def test_a_server_that_never_answers_is_a_dial_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tls://127.0.0.1:{silent.getsockname()[1]}"
        assert "did not answer within 0.4 s" in await dial_fails(Identity.generate().peer, address, HASTY_S)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (struct.pack(">IB", 0xFFFFFFFF, FRAME_VERSION), "exceeds the bound"),
        (encode_frame(b"\xc1"), "bytes are no Challenge"),
        (encode_frame(encode(Challenge(nonce=b"short"))), "its challenge has 5 bytes"),
        (encode_frame(encode(Challenge(nonce=bytes(32)))) + encode_frame(b"?"), "bytes are no Welcome"),
        (
            encode_frame(encode(Challenge(nonce=bytes(32)))) + encode_frame(encode(Welcome(peer=PeerId("?")))),
            "somebody else",
        ),
    ],
)
async def test_a_server_that_breaks_the_handshake_is_a_dial_error(answer: bytes, reason: str) -> None:
    identity = Identity.generate()
    context = server_context(identity, make_certificate(identity))
    async with impostor(context, answer) as (address, _):
        assert reason in await dial_fails(identity.peer, address)


async def test_a_server_that_says_nothing_after_tls_is_a_dial_error() -> None:
    identity = Identity.generate()
    context = server_context(identity, make_certificate(identity))
    async with impostor(context) as (address, heard):
        assert "did not answer" in await dial_fails(identity.peer, address, HASTY_S)
    assert heard == []
