"""Peers that break the rules, over real sockets: the connection is dropped, an event says why, others are served."""

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest

from weft.clock import SystemClock
from weft.errors import PayloadError, PeerError, WireError
from weft.events import AdmissionRefused, ConnectionDropped
from weft.ids import Digest, RunId
from weft.keys import Identity
from weft.net.admission import ByTicket
from weft.net.blobs import blobs
from weft.net.link import handshake, links
from weft.net.link.handshake import Passport
from weft.net.messages import PROTOCOL, Admitted, BlobHeader, BlobRequest, Call, Greeting, Hello, Note, Rejected, Reply
from weft.net.node import Node
from weft.net.transport.frame import FrameReader, encode_frame, write_frame
from weft.net.transport.tls import TlsConfig, TlsTransport
from weft.wire import Record, decode, digest, encode

RUN = RunId("ab" * 32)
SECRET = bytes(range(16))
BLOB = bytes(range(256)) * 1024
DEADLINE_S = 20  # only ends a test that would hang


class Ask(Record, frozen=True, kw_only=True):
    text: str


class Answer(Record, frozen=True, kw_only=True):
    text: str


def passport(identity):
    return Passport(identity=identity, run=RUN, name="", admission=ByTicket(secret=SECRET))


class Victim:
    """A node under attack, and an honest peer whose calls must go on."""

    def __init__(self):
        self.events = []
        self.dropped = asyncio.Event()
        identity, honest = Identity.generate(), Identity.generate()
        config = TlsConfig(host="127.0.0.1")
        self.node = Node(passport(identity), [TlsTransport(identity, config)], SystemClock(), self.emit)
        self.honest = Node(passport(honest), [TlsTransport(honest, config)], SystemClock(), lambda event: None)
        self.node.serve(Ask, self.answer)
        self.node.serve_blobs(lambda peer, name: BLOB if name == digest(BLOB) else None)
        self.mallory = Identity.generate()
        self.attack = TlsTransport(self.mallory, config)

    def emit(self, event):
        self.events.append(event)
        if isinstance(event, ConnectionDropped):
            self.dropped.set()

    async def answer(self, peer, request):
        if request.text == "for ever":
            await asyncio.Event().wait()
        return Answer(text=request.text)

    async def dial(self, lane="control"):
        return await self.attack.dial(self.node.peer, self.node.addresses[0], lane)

    def hello(self, proof=None):
        return Hello(
            version=PROTOCOL,
            run=RUN,
            name="mallory",
            proof=passport(self.mallory).proof_for(self.node.peer) if proof is None else proof,
            addresses=(),
            link=bytes(8),
            instance=bytes(8),
        )

    async def admitted(self):
        """Return a control stream of a peer that has a ticket and bad intentions."""
        stream = await self.dial()
        await write_frame(stream, encode(self.hello()))
        reader = FrameReader(stream)
        assert isinstance(decode(await reader.read(), Greeting), Admitted)
        return stream, reader

    async def must_have_dropped(self, reason):
        await self.dropped.wait()
        (event,) = (event for event in self.events if isinstance(event, ConnectionDropped))
        assert event.remote == self.mallory.peer
        assert reason in event.reason
        assert repr(SECRET) not in repr(self.events)
        answer = await self.honest.call(self.node.peer, Ask(text="still there?"), Answer, deadline_s=5)
        assert answer.text == "still there?"
        assert await self.honest.fetch_small(self.node.peer, digest(BLOB), len(BLOB)) == BLOB
        assert self.node.peers == (self.honest.peer,)


@asynccontextmanager
async def under_attack():
    victim = Victim()
    async with asyncio.timeout(DEADLINE_S):
        async with victim.node, victim.honest:
            victim.honest.remember(victim.node.peer, victim.node.addresses)
            await victim.honest.connect(victim.node.peer)
            try:
                yield victim
            finally:
                await victim.attack.aclose()


async def drained(stream):
    scrap = memoryview(bytearray(1 << 16))
    with suppress(PeerError):
        while await stream.recv_into(scrap):
            pass


def call(number, text="for ever"):
    body = encode(Ask(text=text))
    return encode_frame(encode(Call(number=number, method="Ask", deadline_s=100.0, body=body)))


AFTER_ADMISSION = {
    "oversize frame": (b"\xff\xff\xff\xff\x01", "exceeds the bound"),
    "wrong version": (b"\x00\x00\x00\x01\x02x", "frame of version 2"),
    "garbage": (bytes(range(255, 0, -1)), "frame of version"),
    "garbage in a frame": (encode_frame(bytes(range(200))), "bytes are no"),
    "sender that never finishes": (call(0)[:-1], "not finished within"),
    "call flood": (b"".join(call(number) for number in range(65)), "more than 64 calls"),
    "malformed note": (encode_frame(encode(Note(method="Acquaint", body=b"\x80"))), "bytes are no Acquaint"),
    "answer to nothing": (encode_frame(encode(Reply(number=0, body=b""))), "never made"),
}


@pytest.mark.parametrize("offence", AFTER_ADMISSION)
async def test_admitted_offender_is_dropped(offence, monkeypatch):
    sent, reason = AFTER_ADMISSION[offence]
    monkeypatch.setattr(links, "FRAME_S", 0.2)
    async with under_attack() as victim:
        stream, _ = await victim.admitted()
        await stream.send(sent)
        await drained(stream)
        await victim.must_have_dropped(reason)


async def test_truncated_frame_is_dropped():
    async with under_attack() as victim:
        stream, _ = await victim.admitted()
        await stream.send(call(0)[:-3])
        await stream.close()
        await victim.must_have_dropped("stream ended after")


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (encode_frame(b"\xc1"), "bytes are no Hello"),
        (encode_frame(bytes(100_000)), "exceeds the bound of 65536"),
        (call(0), "bytes are no Hello"),
        (b"\x00\x00\x00\x09\x01weft", "within 0.3 s"),
        (b"", "no hello within"),
    ],
)
async def test_stranger_that_is_no_peer_is_dropped(sent, reason, monkeypatch):
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.3)
    async with under_attack() as victim:
        stream = await victim.dial()
        await stream.send(sent)
        await drained(stream)
        await victim.must_have_dropped(reason)


@pytest.mark.parametrize("of", ["honest peer", "nobody"])
async def test_replayed_or_missing_proof_is_refused(of):
    async with under_attack() as victim:
        proof = victim.honest.passport.proof_for(victim.node.peer) if of == "honest peer" else b""
        stream = await victim.dial()
        await write_frame(stream, encode(victim.hello(proof)))
        rejected = decode(await FrameReader(stream).read(), Greeting)
        assert isinstance(rejected, Rejected)
        assert "weft ticket" in rejected.reason
        (refused,) = (event for event in victim.events if isinstance(event, AdmissionRefused))
        assert refused.remote == victim.mallory.peer
        assert victim.node.peers == (victim.honest.peer,)


async def test_bulk_stream_of_an_unadmitted_peer_is_dropped():
    async with under_attack() as victim:
        stream = await victim.dial("bulk")
        with suppress(PeerError):
            await write_frame(stream, encode(BlobRequest(digest=digest(BLOB))))
        await drained(stream)
        await victim.must_have_dropped("before admission")


async def test_garbage_on_a_bulk_stream_is_dropped():
    async with under_attack() as victim:
        await victim.admitted()
        stream = await victim.dial("bulk")
        await stream.send(encode_frame(b"\xc1"))
        await drained(stream)
        victim.node.drop(victim.mallory.peer, "seen enough")
        await victim.must_have_dropped("bytes are no")


def header(num):
    return encode_frame(encode(BlobHeader(nbytes=num)))


HOLDERS = {
    "wrong length": (header(len(BLOB) + 1) + BLOB, PayloadError, "bytes at"),
    "wrong bytes": (header(len(BLOB)) + bytes(len(BLOB)), PayloadError, "sent bytes of blob"),
    "never finished": (header(len(BLOB)) + BLOB[:-1], PeerError, "sent nothing of a blob"),
    "no header": (b"", PeerError, "sent no header"),
    "oversize header": (encode_frame(bytes(1000)), WireError, "exceeds the bound"),
    "garbage": (encode_frame(b"\xc1"), WireError, "bytes are no BlobHeader"),
}


@pytest.mark.parametrize("lie", HOLDERS)
async def test_holder_that_lies_about_a_blob_is_dropped(lie):
    sent, error, reason = HOLDERS[lie]
    async with under_attack() as victim:

        async def accept(stream, lane):
            reader = FrameReader(stream)
            if lane == "control":
                await reader.read()
                welcome = Admitted(
                    name="",
                    proof=passport(victim.mallory).proof_for(victim.node.peer),
                    addresses=(),
                    instance=bytes(8),
                    contacts=(),
                )
                await write_frame(stream, encode(welcome))
            else:
                assert decode(await reader.read(), BlobRequest).digest == digest(BLOB)
                await stream.send(sent)
            await drained(stream)
            await stream.close()

        victim.node.remember(victim.mallory.peer, await victim.attack.start(accept))
        with pytest.raises(error, match=reason):
            await victim.node.fetch(victim.mallory.peer, digest(BLOB), bytearray(len(BLOB)), stall_s=0.3)
        victim.node.drop(victim.mallory.peer, "seen enough")
        await victim.must_have_dropped(reason)


async def test_honest_blob_of_many_pieces_is_hashed_in_threads_while_it_arrives():
    async with under_attack() as victim:
        large = BLOB * 40
        victim.node.serve_blobs(lambda peer, name: large)
        into = bytearray(len(large))
        await victim.honest.fetch(victim.node.peer, digest(large), into)
        assert into == large
        # The victim did not dial the link, so it asks the other side to dial the stream.
        victim.honest.serve_blobs(lambda peer, name: large)
        victim.node._book._entries.clear()
        assert await victim.node.fetch_any([victim.honest.peer], digest(large), len(large)) == large
        assert len(large) > 2 * blobs.PIECE_NBYTES
        with pytest.raises(PeerError):
            await victim.node.fetch(victim.honest.peer, Digest("0" * 64), into)
