"""Who holds a ticket, or only an address, and floods a member: each attack by itself, from a process of its own.

    with Flood("heartbeats", ticket, 30.0) as flood:      # begins; another process
        ...
    flood.done()                                          # what it did, and what that cost it

An attack goes to the first member of the ticket for so many seconds, as fast as one process can. Keys are made as it
needs them; one whose link ends comes back a second later. It speaks weft's own protocol, and lacks what holds an honest
peer back.
"""

import asyncio
import secrets
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType

import msgspec

from weft.errors import NetError, PeerError
from weft.ids import Attempt, BranchId, Digest, Round
from weft.keys import Identity
from weft.net.link.handshake import Passport
from weft.net.messages import PROTOCOL, Admitted, BlobRequest, Call, Greeting, Heartbeat, Hello, Note, Reply, RpcFrame
from weft.net.ticket import Ticket, read
from weft.net.transport.address import split_address
from weft.net.transport.base import Stream
from weft.net.transport.frame import FrameReader, encode_frame, write_frame
from weft.net.transport.tls import SCHEME, TlsConfig, TlsTransport
from weft.net.transport.tls_certificate import client_context
from weft.net.transport.tls_handshake import preamble
from weft.peer.messages import ChainRequest, Letter, StateOffer, StateRequest
from weft.sync.records.messages import Accept, RoundNote
from weft.wire import Record, decode, encode, seal

HOUSE = Path(__file__).parents[2]
AT_ONCE = 64  # frames in one send; also the calls that one link may have open
AGAIN_S = 1.0
NUM_KEYS, NUM_STREAMS = 60, 16  # of `streams`
END_S = 20.0  # for the process, after its time


class Done(msgspec.Struct, kw_only=True):
    """What an attack did."""

    attack: str
    num_sent: int = 0  # frames, connections or streams
    num_links: int = 0  # that stood, one after another
    num_refused: int = 0  # connections that were not let in, or ended
    wall_s: float = 0.0
    cpu_s: float = 0.0


class Key:
    """One key of whoever attacks."""

    def __init__(self, ticket: Ticket, done: Done) -> None:
        self.identity = Identity.generate()
        self.run, self.done = ticket.run, done
        self.contact = ticket.contacts[0]
        self._passport = Passport(identity=self.identity, run=ticket.run, name="flood", admission=ticket.admission())
        self._transport = TlsTransport(self.identity, TlsConfig(host="127.0.0.1"))

    @asynccontextmanager
    async def link(self) -> AsyncIterator[tuple[Stream, FrameReader]]:
        """Yield a control stream on which it is admitted."""
        hello = Hello(
            version=PROTOCOL,
            run=self.run,
            name="flood",
            proof=self._passport.proof_for(self.contact.peer),
            addresses=(),
            link=secrets.token_bytes(8),
            instance=secrets.token_bytes(8),
        )
        stream = await self.stream("control")
        try:
            await write_frame(stream, encode(hello))
            reader = FrameReader(stream)
            answer = await reader.read()
            if answer is None or not isinstance(decode(answer, Greeting), Admitted):
                raise PeerError("it was not let in")
            self.done.num_links += 1
            yield stream, reader
        finally:
            await stream.close()

    async def stream(self, lane: str = "bulk") -> Stream:
        return await self._transport.dial(self.contact.peer, self.contact.addresses[0], lane)  # type: ignore[arg-type]

    async def flood(self, stream: Stream, frames: Sequence[bytes]) -> None:
        """Send these again and again."""
        sent = [b"".join(frames[start : start + AT_ONCE]) for start in range(0, len(frames), AT_ONCE)]
        while True:
            for each in sent:
                await stream.send(each)
                self.done.num_sent += min(len(frames), AT_ONCE)

    def letter(self, branch: BranchId, round: int) -> bytes:
        """Return a letter of a round that no other is equal to."""
        vote = Accept(attempt=Attempt(1), manifest=Digest(secrets.token_hex(32)))
        note = RoundNote(branch=branch, round=Round(max(round, 0)), message=vote)
        return framed(Note(method="Letter", body=encode(Letter(signed=seal(self.identity, note)))))


def framed(record: Record) -> bytes:
    return encode_frame(encode(record))


async def frames_of(reader: FrameReader) -> AsyncIterator[RpcFrame]:
    while (data := await reader.read()) is not None:
        yield decode(data, RpcFrame)
    raise PeerError("the link ended")


async def heartbeat(reader: FrameReader) -> Heartbeat:
    """Return the next heartbeat of the member."""
    async for frame in frames_of(reader):
        if isinstance(frame, Note) and frame.method == "Heartbeat":
            beat: Heartbeat = decode(frame.body, Heartbeat)
            return beat
    raise AssertionError


async def drain(reader: FrameReader) -> None:
    while await reader.read() is not None:
        pass


async def heartbeats(key: Key) -> None:
    """One key says that it lives, thousands of times a second."""
    async with key.link() as (stream, reader):
        beat = msgspec.structs.replace(await heartbeat(reader), name="flood", state="training")
        frame = framed(Note(method="Heartbeat", body=encode(beat)))
        await _both(key.flood(stream, [frame] * AT_ONCE), drain(reader))


async def old_letters(key: Key) -> None:
    """One key sends letters that it has signed, of rounds that are decided."""
    async with key.link() as (stream, reader):
        beat = await heartbeat(reader)
        letters = [key.letter(beat.branch, beat.round - 2) for _ in range(8 * AT_ONCE)]
        await _both(key.flood(stream, letters), drain(reader))


async def letters(key: Key) -> None:
    """One key of ten sends letters of the present round and the next, each another."""
    async with key.link() as (stream, reader):
        beat = await heartbeat(reader)

        async def sign() -> None:
            while True:
                both = (key.letter(beat.branch, beat.round + ahead) for ahead in (1, 2))
                await stream.send(b"".join(each for _ in range(AT_ONCE // 8) for each in both))
                key.done.num_sent += 2

        async def follow() -> None:
            nonlocal beat
            while True:
                beat = await heartbeat(reader)

        await _both(sign(), follow())


async def calls(key: Key) -> None:
    """One key of four asks for all decisions that are remembered, as many at a time as one link may."""
    async with key.link() as (stream, reader):
        body = encode(ChainRequest(branch=(await heartbeat(reader)).branch, after=Round(0)))

        async def ask() -> None:
            call = Call(number=key.done.num_sent, method="ChainRequest", deadline_s=100.0, body=body)
            key.done.num_sent += 1
            await stream.send(framed(call))

        for _ in range(AT_ONCE):
            await ask()
        async for frame in frames_of(reader):
            if not isinstance(frame, Note):
                await ask()


async def requests(key: Key) -> None:
    """One key asks for blobs that nobody has, on eight streams, and waits for no answer."""
    async with key.link() as (_, reader):
        asked = framed(BlobRequest(digest=Digest("0" * 64)))
        streams = [await key.stream() for _ in range(8)]
        floods = [key.flood(stream, [asked] * AT_ONCE) for stream in streams]
        answers = [drain(FrameReader(stream)) for stream in streams]
        try:
            await _both(drain(reader), *floods, *answers)
        finally:
            for stream in streams:
                await stream.close()


async def silent_streams(key: Key) -> None:
    """One key of sixty opens as many bulk streams as it can, and says nothing on them."""
    async with key.link() as (_, reader):
        opened: list[Stream] = []
        try:
            for _ in range(NUM_STREAMS):
                opened.append(await key.stream())
                key.done.num_sent += 1
            await drain(reader)
        finally:
            for stream in opened:
                await stream.close()


async def unread_streams(key: Key) -> None:
    """One key of six asks for a blob again and again on sixteen streams, and reads nothing."""
    async with key.link() as (control, reader):
        request = StateRequest(run=key.run, wanted=Digest("0" * 64))
        await control.send(framed(Call(number=0, method="StateRequest", deadline_s=60.0, body=encode(request))))
        index = None
        async for frame in frames_of(reader):
            if isinstance(frame, Reply):
                index = decode(frame.body, StateOffer).index
                break
        asked = framed(BlobRequest(digest=index or Digest("0" * 64)))
        opened: list[Stream] = []
        try:
            while len(opened) < NUM_STREAMS:
                opened.append(await key.stream())
                key.done.num_sent += 1
            await _both(drain(reader), *(key.flood(stream, [asked] * AT_ONCE) for stream in opened))
        finally:
            for stream in opened:
                await stream.close()


def handshakes(ticket: Ticket, until: float, done: Done) -> None:
    """A stranger begins TLS handshakes, one after another, and hangs up before it proves a key."""
    host, port = split_address(SCHEME, ticket.contacts[0].addresses[0])
    context = client_context()
    while time.monotonic() < until:
        done.num_sent += 1
        try:
            with socket.create_connection((host, port), timeout=2.0) as connection:
                connection.sendall(preamble("control"))
                with context.wrap_socket(connection):
                    done.num_links += 1
        except (OSError, ssl.SSLError):
            done.num_refused += 1


ATTACKS: dict[str, tuple[Callable[[Key], Awaitable[None]], int]] = {
    "heartbeats": (heartbeats, 1),
    "old letters": (old_letters, 1),
    "letters of ten keys": (letters, 10),
    "calls over four links": (calls, 4),
    "requests": (requests, 1),
    "silent streams": (silent_streams, NUM_KEYS),
    "unread streams": (unread_streams, 6),
}
HANDSHAKES = "handshakes"
NAMES = (*ATTACKS, HANDSHAKES)


async def _both(*works: Awaitable[None]) -> None:
    """Do these at once, until the first ends."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _attack(name: str, ticket: Ticket, until: float, done: Done) -> None:
    flood, num_keys = ATTACKS[name]

    async def again_and_again() -> None:
        key = Key(ticket, done)
        while True:
            with suppress(NetError, PeerError):
                await flood(key)
            done.num_refused += 1
            await asyncio.sleep(AGAIN_S)

    with suppress(TimeoutError):
        async with asyncio.timeout(until - time.monotonic()):
            await asyncio.gather(*(again_and_again() for _ in range(num_keys)))


class Flood:
    """An attack that goes on while its context lasts, or for some seconds.

    Args:
        command: what starts it, given the words of a command; such as on another machine.
    """

    def __init__(
        self, attack: str, ticket: str, seconds: float, command: Callable[[list[str]], list[str]] = lambda words: words
    ) -> None:
        self._attack, self._ticket, self._seconds = attack, ticket, seconds
        self._command = command

    def __enter__(self) -> "Flood":
        words = [sys.executable, "-m", "benchmarks.rig.floods", self._attack, str(self._seconds)]
        self._process = subprocess.Popen(
            self._command(words), cwd=HOUSE, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        stdin, self._stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert self._stdout is not None
        stdin.write(self._ticket)
        stdin.close()
        self._stdout.readline()  # it begins
        return self

    def done(self) -> Done:
        """Wait for its end, and return what it did."""
        assert self._stdout is not None
        done = msgspec.json.decode(self._stdout.read(), type=Done)
        self._process.wait(END_S)
        return done

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        assert self._stdout is not None
        self._stdout.close()


def main(attack: str, seconds: float) -> None:
    ticket = read(sys.stdin.read().strip())
    print("begins", flush=True)
    done, began, cpu_s = Done(attack=attack), time.monotonic(), time.process_time()
    if attack == HANDSHAKES:
        handshakes(ticket, began + seconds, done)
    else:
        asyncio.run(_attack(attack, ticket, began + seconds, done))
    done.wall_s, done.cpu_s = time.monotonic() - began, time.process_time() - cpu_s
    print(msgspec.json.encode(done).decode())


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
