"""What every transport must do, run by all of them.

iroh opens UDP sockets and sends a multicast when it starts, so its turn comes in a network namespace of its own:
`test_iroh_keeps_the_contract` runs this module again in there.
"""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from weft.clock import SystemClock
from weft.errors import DialError, PeerError, PortInUse
from weft.ids import PeerId, RunId, is_start, short, start_of
from weft.keys import Identity
from weft.net.admission import Anyone
from weft.net.blobs.relay import RelayConfig, relay_address
from weft.net.link.handshake import Passport
from weft.net.node import Node
from weft.net.transport.base import Lane, OnDrop, Stream, Transport, ignore_drop
from weft.net.transport.iroh import IrohConfig, IrohTransport
from weft.net.transport.memory import MemoryNetwork
from weft.net.transport.rate_limit import Throttled, Valve
from weft.net.transport.tls import TlsConfig, TlsTransport
from weft.wire import digest

IN_NAMESPACE = "WEFT_TEST_IN_NAMESPACE"
LARGE = "WEFT_TEST_LARGE"  # in a namespace: with transfers as large as those over tls
KINDS = ("iroh",) if IN_NAMESPACE in os.environ else ("memory", "tls", "via", "throttled")
REAL = ("tls", "iroh")  # sockets of this machine
DEADLINE_S = 20  # an honest answer takes milliseconds; this only ends a test that would hang
MIB = 1 << 20

T = TypeVar("T")


@dataclass
class Pair:
    """Two started transports; `accepted` holds the streams that came in at the second.

    `hasty` is another one, for dials that fail: where nothing tells that an address is dead it soon gives up.
    """

    kind: str
    near: Transport
    far: Transport
    hasty: Transport
    near_peer: PeerId
    far_peer: PeerId
    address: str = ""
    dead_address: str = ""
    drops: list[str] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)  # via: the three peers and, last, the relay between them
    accepted: "asyncio.Queue[tuple[Stream, Lane]]" = field(default_factory=asyncio.Queue)

    @property
    def more_than_buffers_hold(self) -> int:
        return {"memory": 4 * MIB, "throttled": 4 * MIB, "via": 12 * MIB, "iroh": 16 * MIB}.get(self.kind, 48 * MIB)

    @property
    def a_lot(self) -> int:
        return {
            "memory": 8 * MIB,
            "throttled": 8 * MIB,
            "via": 16 * MIB,
            "iroh": 64 * MIB if LARGE in os.environ else 16 * MIB,
        }.get(self.kind, 64 * MIB)

    async def connect(self, lane: Lane = "control") -> tuple[Any, Any]:
        near = await self.near.dial(self.far_peer, self.address, lane)
        far, got = await self.accepted.get()
        assert got == lane
        return near, far


@pytest.fixture(params=KINDS)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    near, far = Identity.generate(), Identity.generate()
    pair = _pair(request.param, near, far)
    ended = asyncio.Event()

    async def accept(stream: Stream, lane: Lane) -> None:
        await pair.accepted.put((stream, lane))
        await ended.wait()

    for node in pair.nodes:
        await node.start()
    if pair.nodes:
        await _meet(pair)
    await pair.near.start(accept)
    await pair.hasty.start(accept)
    addresses = await pair.far.start(accept)
    pair.address = addresses[0] if addresses else relay_address(pair.nodes[-1].peer)
    pair.dead_address = _dead_address(pair.kind, pair.far_peer)
    deadline = asyncio.get_running_loop().call_later(DEADLINE_S, give_up)  # a fixture and its test are two tasks
    yield pair
    deadline.cancel()
    ended.set()
    await asyncio.gather(pair.near.aclose(), pair.far.aclose(), pair.hasty.aclose())
    await asyncio.gather(*(node.aclose() for node in pair.nodes))


def give_up() -> None:
    for task in asyncio.all_tasks():
        task.cancel("the test took too long")


def _pair(kind: str, near: Identity, far: Identity) -> Pair:
    drops: list[str] = []

    def on_drop(address: str, reason: str) -> None:
        drops.append(reason)

    if kind == "via":
        return _relayed(near, far, on_drop)
    if kind in ("memory", "throttled"):
        network = MemoryNetwork()
        made: list[Transport] = [network.transport(peer) for peer in (near.peer, far.peer, Identity.generate().peer)]
        if kind == "throttled":  # by caps that no test reaches
            made = [Throttled(each, Valve(SystemClock(), upload_bps=1e11, download_bps=1e11)) for each in made]
    else:
        made = [_real(kind, each, on_drop=on_drop) for each in (near, far)]
        made.append(_real(kind, Identity.generate(), dial_timeout_s=0.3))
    return Pair(kind, *made, near.peer, far.peer, drops=drops)


def _relayed(near: Identity, far: Identity, on_drop: OnDrop) -> Pair:
    """Return the `via` transports of three peers that share a fourth, all on a memory network."""
    network = MemoryNetwork()
    identities = [near, far, Identity.generate(), Identity.generate()]
    generous = RelayConfig(max_streams=200, max_streams_per_peer=200, max_bps=1e10)
    nodes = []
    for identity in identities:
        passport = Passport(identity=identity, run=RunId("ab" * 32), name="", admission=Anyone())
        transports = [network.transport(identity.peer)]
        nodes.append(Node(passport, transports, SystemClock(), lambda _: None, relay=generous, via=identity))
    vias = [node._via for node in nodes[:3] if node._via is not None]
    vias[1]._handshakes._on_drop = on_drop
    made: list[Transport] = list(vias)
    return Pair("via", *made, near.peer, far.peer, nodes=nodes)


async def _meet(pair: Pair) -> None:
    relay = pair.nodes[-1]
    for index, node in enumerate(pair.nodes[:3]):
        there, here = (relay, node) if index == 1 else (node, relay)  # the far one is linked the other way round
        there.remember(here.peer, here.addresses)
        await there.connect(here.peer)


def _real(
    kind: str,
    identity: Identity,
    port: int = 0,
    *,
    dial_timeout_s: float = 10.0,
    on_drop: OnDrop = ignore_drop,
    last_port: int = 0,
) -> TlsTransport | IrohTransport:
    if kind == "tls":
        return TlsTransport(identity, TlsConfig(host="127.0.0.1", port=port), on_drop=on_drop, last_port=last_port)
    # One family, so that the port is one number.
    config = IrohConfig(hosts=("127.0.0.1",), port=port, dial_timeout_s=dial_timeout_s)
    return IrohTransport(identity, config, on_drop=on_drop, last_port=last_port)


def _dead_address(kind: str, peer: PeerId) -> str:
    port = 1  # reserved, and nothing listens there
    addresses = {
        "memory": "memory://nobody",
        "throttled": "memory://nobody",
        "via": relay_address(Identity.generate().peer),
        "tls": f"tls://127.0.0.1:{port}",
    }
    return addresses.get(kind, f"iroh://{peer}?addr=127.0.0.1:{port}")


async def receive(stream: Stream, num_bytes: int) -> bytes:
    """Return the next `num_bytes`, fewer if the stream ends before."""
    buffer, filled = bytearray(num_bytes), 0
    while filled < num_bytes:
        got = await stream.recv_into(memoryview(buffer)[filled:])
        if got == 0:
            break
        filled += got
    return bytes(buffer[:filled])


async def flood(stream: Stream) -> None:
    """Send until it fails: what is sent first may still be taken."""
    for _ in range(1000):
        await stream.send(bytes(100_000))


async def still_waits(call: Awaitable[T]) -> "asyncio.Task[T]":
    """Start `call` and return its task, which must not end by itself."""
    task = asyncio.ensure_future(call)
    done, _ = await asyncio.wait({task}, timeout=0.05)
    assert not done
    return task


@pytest.mark.parametrize("lane", ["control", "bulk"])
async def test_bytes_pass_both_ways(pair: Pair, lane: Lane) -> None:
    near, far = await pair.connect(lane)
    for data in (b"x", b"hello" * 1000, bytes(300_000)):  # the last is more than a link holds unread
        for sender, receiver in ((near, far), (far, near)):
            _, received = await asyncio.gather(sender.send(data), receive(receiver, len(data)))
            assert received == data


async def test_any_buffer_can_be_sent(pair: Pair) -> None:
    near, far = await pair.connect()
    writable = bytearray(b"0123456789")
    for data in (b"", writable, memoryview(writable)[2:7], memoryview(b"frozen")[1:]):
        await near.send(data)
        assert await receive(far, len(data)) == bytes(data)


async def test_the_side_that_was_dialled_may_speak_first(pair: Pair) -> None:
    near, far = await pair.connect()
    await far.send(b"welcome")
    assert await receive(near, 7) == b"welcome"


@pytest.mark.parametrize("lane", ["control", "bulk"])
async def test_both_ends_know_each_other(pair: Pair, lane: Lane) -> None:
    near, far = await pair.connect(lane)
    assert near.peer == pair.far_peer
    assert far.peer == pair.near_peer
    assert near.source == ""
    relayed = f"via {short(pair.nodes[-1].peer)}" if pair.nodes else "127.0.0.1"
    assert far.source == (pair.near_peer if pair.kind in ("memory", "throttled") else relayed)


async def test_another_key_at_the_address_is_refused(pair: Pair) -> None:
    somebody = Identity.generate().peer
    with pytest.raises(DialError):
        await pair.hasty.dial(somebody, pair.address.replace(pair.far_peer, somebody), "control")
    near, _ = await pair.connect()  # the listener lives on, and saw no stream before this one
    assert near.peer == pair.far_peer
    assert pair.accepted.empty()


async def test_the_first_digits_of_a_key_lead_to_it_or_nowhere_and_to_no_other(pair: Pair) -> None:
    start = start_of(pair.far_peer)
    for wrong in (start_of(Identity.generate().peer), PeerId(start[:-1]), PeerId(start + "0"), PeerId("")):
        with pytest.raises(DialError):
            await pair.hasty.dial(wrong, pair.address, "control")
    if pair.kind in ("iroh", "via"):  # which dial by the whole key
        with pytest.raises(DialError):
            await pair.hasty.dial(start, pair.address, "control")
        return
    near = await pair.near.dial(start, pair.address, "control")
    far, _ = await pair.accepted.get()
    assert is_start(start)
    assert (near.peer, far.peer) == (pair.far_peer, pair.near_peer)


async def test_a_dead_address_is_an_error(pair: Pair) -> None:
    with pytest.raises(DialError):
        await pair.hasty.dial(pair.far_peer, pair.dead_address, "control")


@pytest.mark.parametrize(
    "address", ["", "nonsense", "tls://", "tls://127.0.0.1:99999", "iroh://00", "memory://", "via://00", "\x00"]
)
async def test_a_malformed_address_is_an_error(pair: Pair, address: str) -> None:
    with pytest.raises(DialError):
        await pair.hasty.dial(pair.far_peer, address, "control")


async def test_bulk_bytes_arrive_as_they_were(pair: Pair) -> None:
    near, far = await pair.connect("bulk")
    data = os.urandom(pair.a_lot)
    sending = asyncio.ensure_future(near.send(data))
    received = await receive(far, len(data))
    await sending
    assert digest(received) == digest(data)


@pytest.mark.parametrize("lane", ["control", "bulk"])
async def test_a_slow_reader_holds_its_sender_back(pair: Pair, lane: Lane) -> None:
    near, far = await pair.connect(lane)
    num_bytes = pair.more_than_buffers_hold
    sending = await still_waits(near.send(bytes(num_bytes)))
    assert len(await receive(far, num_bytes)) == num_bytes
    await sending


@pytest.mark.parametrize("lane", ["control", "bulk"])
async def test_an_orderly_end_comes_after_the_last_byte(pair: Pair, lane: Lane) -> None:
    near, far = await pair.connect(lane)
    data = os.urandom(MIB - 1)

    async def send_and_close() -> None:
        await near.send(data)  # more than a link holds unread
        await near.close()

    _, received = await asyncio.gather(send_and_close(), receive(far, 2 * MIB))
    assert received == data
    assert await far.recv_into(memoryview(bytearray(10))) == 0


@pytest.mark.parametrize("lane", ["control", "bulk"])
async def test_an_orderly_end_waits_for_a_slow_reader(pair: Pair, lane: Lane) -> None:
    near, far = await pair.connect(lane)
    for _ in range(2):
        await far.send(b"heartbeat")  # crosses the farewell on its way; nobody reads it
    piece, sent, received = 50_000, 0, 0
    while True:  # until everything on the way is full
        sending = asyncio.ensure_future(near.send(bytes(piece)))
        sent += piece
        done, _ = await asyncio.wait({sending}, timeout=0.1)
        if not done:
            break
    while not sending.done():
        received += len(await receive(far, 1000))
        await asyncio.sleep(0)
    await near.close()
    await asyncio.sleep(0.05)
    assert received + len(await receive(far, sent)) == sent
    assert await far.recv_into(memoryview(bytearray(1))) == 0


@pytest.mark.parametrize("lane", ["control", "bulk"])
async def test_a_crash_is_no_orderly_end(pair: Pair, lane: Lane) -> None:
    near, far = await pair.connect(lane)
    waiting = await still_waits(far.recv_into(memoryview(bytearray(10))))
    getattr(near, "_stream", near).abort()  # of what is throttled: the stream inside
    with pytest.raises(PeerError):
        await waiting


@pytest.mark.parametrize("lane", ["control", "bulk"])
async def test_sending_to_somebody_who_left_fails(pair: Pair, lane: Lane) -> None:
    near, far = await pair.connect(lane)
    await far.close()
    await asyncio.sleep(0.05)  # its farewell is said before the first byte comes
    with pytest.raises(PeerError):
        await flood(near)


@pytest.mark.parametrize("lane", ["control", "bulk"])
async def test_closing_twice_does_no_harm(pair: Pair, lane: Lane) -> None:
    near, far = await pair.connect(lane)
    await near.close()
    await near.close()
    await far.close()
    with pytest.raises(PeerError):
        await near.send(b"x")
    with pytest.raises(PeerError):
        await near.recv_into(memoryview(bytearray(1)))


@pytest.mark.parametrize("lane", ["control", "bulk"])
async def test_closing_ends_calls_that_wait(pair: Pair, lane: Lane) -> None:
    near, _ = await pair.connect(lane)
    receiving = await still_waits(near.recv_into(memoryview(bytearray(10))))
    sending = await still_waits(near.send(bytes(pair.more_than_buffers_hold)))
    await near.close()
    for waiting in (receiving, sending):
        with pytest.raises(PeerError):
            await waiting


@pytest.mark.parametrize("lane", ["control", "bulk"])
async def test_a_cancelled_call_leaves_the_buffer_alone(pair: Pair, lane: Lane) -> None:
    near, far = await pair.connect(lane)
    buffer = bytearray(10)
    waiting = await still_waits(near.recv_into(memoryview(buffer)))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await near.close()
    with pytest.raises(PeerError):
        await flood(far)
    assert buffer == bytes(10)


@pytest.mark.parametrize("lane", ["control", "bulk"])
async def test_senders_that_share_a_stream_take_turns(pair: Pair, lane: Lane) -> None:
    near, far = await pair.connect(lane)
    size = 2_500_000 if pair.kind in REAL else 300_000  # more than the buffers on the way take at once
    async with asyncio.TaskGroup() as group:
        for letter in b"abcdef":
            group.create_task(near.send(bytes([letter]) * size))
        received = await receive(far, 6 * size)
    pieces = [received[start : start + size] for start in range(0, len(received), size)]
    assert sorted(pieces) == [bytes([letter]) * size for letter in b"abcdef"]


@pytest.mark.parametrize("lane", ["control", "bulk"])
async def test_many_streams_work_at_once(pair: Pair, lane: Lane) -> None:
    async def serve() -> None:
        stream, _ = await pair.accepted.get()
        await stream.send(await receive(stream, 20_000))
        await stream.close()

    async def ask(number: int) -> None:
        data = number.to_bytes(2, "big") * 10_000
        stream = await pair.near.dial(pair.far_peer, pair.address, lane)
        await stream.send(data)
        assert await receive(stream, 30_000) == data
        await stream.close()

    async with asyncio.TaskGroup() as group:
        for number in range(50):
            group.create_task(serve())
            group.create_task(ask(number))
    assert pair.drops == []


async def test_closing_a_transport_ends_every_stream(pair: Pair) -> None:
    streams = [await pair.connect(lane) for lane in ("control", "bulk") for _ in range(3)]
    await pair.far.aclose()
    for near, far in streams:
        assert await receive(near, 1) == b""
        with pytest.raises(PeerError):
            await far.send(b"x")
    with pytest.raises(DialError):
        await pair.hasty.dial(pair.far_peer, pair.address, "control")
    with pytest.raises(DialError):
        await pair.far.dial(pair.near_peer, pair.address, "control")


async def test_a_transport_closes_twice(pair: Pair) -> None:
    await pair.far.aclose()
    await pair.far.aclose()


async def nobody(stream: Stream, lane: Lane) -> None:
    raise AssertionError("no stream was expected")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in REAL])
async def test_a_taken_port_is_named(kind: str) -> None:
    first = _real(kind, Identity.generate())
    port = int((await first.start(nobody))[0].rpartition(":")[2])
    second = _real(kind, Identity.generate(), port)
    with pytest.raises(PortInUse, match=rf"{port}.*port 0"):
        await second.start(nobody)
    await asyncio.gather(first.aclose(), second.aclose())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in REAL])
async def test_the_port_of_the_last_start_is_taken_where_it_is_free_and_none_is_asked_for(kind: str) -> None:
    async def started(last_port: int, port: int = 0) -> TlsTransport | IrohTransport:
        transport = _real(kind, Identity.generate(), port, last_port=last_port)
        address = (await transport.start(nobody))[0]
        assert int(address.rpartition(":")[2]) == transport.port
        return transport

    first = await started(0)
    beside = await started(first.port)
    assert beside.port != first.port
    await asyncio.gather(first.aclose(), beside.aclose())
    again = await started(beside.port)
    assert again.port == beside.port
    asked_for = await started(beside.port, port=first.port)
    assert asked_for.port == first.port
    await asyncio.gather(again.aclose(), asked_for.aclose())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in REAL])
async def test_a_peer_comes_back_at_its_address(kind: str) -> None:
    identity, port = Identity.generate(), 0
    caller = _real(kind, Identity.generate())
    await caller.start(nobody)
    for _ in range(2):
        greeted: asyncio.Queue[Stream] = asyncio.Queue()

        async def greet(stream: Stream, lane: Lane, greeted: "asyncio.Queue[Stream]" = greeted) -> None:
            greeted.put_nowait(stream)

        transport = _real(kind, identity, port)
        [address] = await transport.start(greet)
        port = int(address.rpartition(":")[2])
        near = await caller.dial(identity.peer, address, "control")
        far = await greeted.get()
        await far.send(b"here")
        assert await receive(near, 4) == b"here"
        await asyncio.gather(near.close(), transport.aclose())
        del transport, greet
    await caller.aclose()


@pytest.mark.full
@pytest.mark.skipif(IN_NAMESPACE in os.environ, reason="is what runs in there")
@pytest.mark.parametrize("extra", [(), pytest.param((LARGE,), marks=pytest.mark.slow)], ids=["small", "large"])
def test_iroh_keeps_the_contract(extra: tuple[str, ...]) -> None:
    pytest.importorskip("iroh", reason="iroh has no wheel for this platform")
    if not (shutil.which("unshare") and shutil.which("ip")):
        pytest.skip("needs unshare and ip (Linux) to keep iroh's packets off the network")
    enter = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*enter, "true"], capture_output=True, timeout=10).returncode != 0:
        pytest.skip("this machine does not permit network namespaces")
    script = 'ip link set lo up && exec "$@"'
    run = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--no-header", __file__]
    result = subprocess.run(
        [*enter, "sh", "-c", script, "sh", *run],
        env={**os.environ, **dict.fromkeys((IN_NAMESPACE, *extra), "1")},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
