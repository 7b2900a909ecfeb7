"""How members of a run in one local network find each other, where each of them asks for it.

    machine                               every machine of its networks
      beacon: I ask, I am K, I listen at... ─────►  239.255.87.70, UDP port 8770, not beyond a router
      ◄──────────────────────────────────── beacon: I am L, I listen at... of those that are in the run and ask, too

    packet      8 letters, the nonce (12 bytes), and sealed with ChaCha20-Poly1305: asks or tells (1 byte), the member
                with its whole key (`transport.compact`)

What seals it is made from what a ticket holds, the run and its secret, which never travel. So the beacon tells who has
no ticket that this machine runs weft and how long its packet is: neither the run, nor the key, nor where it listens.
Who has one learns addresses as from any member, hearsay that a dial proves or refuses.

A peer asks three times as it starts, tells once a minute, and answers whoever asks, at most once a second.

Failure:
- networks that carry no multicast (guests of many access points, most clouds and VPNs): nobody is found there.
- a packet that was recorded and sent again: an address that another key answers at, or nobody.
"""

import asyncio
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from weft.clock import Clock
from weft.errors import NetError
from weft.events import Emit, Notice
from weft.ids import PeerId, RunId, is_start, short
from weft.net.admission import secret_of
from weft.net.messages import Contact
from weft.net.node import Node
from weft.net.transport.address import hosts_of, ip_version, is_loopback
from weft.net.transport.compact import pack, unpack
from weft.rng import fresh_secret
from weft.tasks import Tasks

GROUP, PORT = "239.255.87.70", 8770  # of the addresses that stay within an organisation (RFC 2365)
MAX_NBYTES = 1200  # of a packet: one Ethernet frame, tunnels included
ASK_AT_S = (0.0, 1.0, 3.0)  # after the start: a packet may be lost
TELL_EVERY_S = 60.0
ANSWER_EVERY_S = 1.0  # at most so often
LISTEN_S = 1.0  # who is there answers in milliseconds
_MAGIC = b"weftlan1"
_NONCE_NBYTES, _TAG_NBYTES, _KEY_NBYTES = 12, 16, 32
_ROOM_NBYTES = MAX_NBYTES - len(_MAGIC) - _NONCE_NBYTES - _TAG_NBYTES - 1
_TELLS, _ASKS = b"\x00", b"\x01"


def beacon_key(run: RunId, secret: bytes | None) -> bytes:
    """Return what seals the beacons of a run: who holds its ticket can make it."""
    return blake3(bytes.fromhex(run) + (secret or b""), derive_key_context="weft 2026 lan beacon v1").digest()


def seal_beacon(key: bytes, nonce: bytes, member: Contact, *, asks: bool) -> bytes:
    """Return a packet that says where `member` listens."""
    words = (_ASKS if asks else _TELLS) + pack([member], _ROOM_NBYTES)
    return _MAGIC + nonce + ChaCha20Poly1305(key).encrypt(nonce, words, _MAGIC)


def open_beacon(key: bytes, packet: bytes) -> tuple[Contact, bool] | None:
    """Return who says where it listens, and whether it asks; None: no beacon of this run."""
    if not packet.startswith(_MAGIC) or len(packet) > MAX_NBYTES:
        return None
    sealed = packet[len(_MAGIC) :]
    try:
        words = ChaCha20Poly1305(key).decrypt(sealed[:_NONCE_NBYTES], sealed[_NONCE_NBYTES:], _MAGIC)
        (member,) = unpack(words[1:])
    except (InvalidTag, ValueError):  # of another run, or of nobody's making
        return None
    return None if is_start(member.peer) else (member, words[:1] == _ASKS)


class Lan:
    """Tells a node of members in its local networks, and them of it."""

    def __init__(self, node: Node, clock: Clock, emit: Emit) -> None:
        self._node = node
        self._key = bytes(_KEY_NBYTES)
        self._clock = clock
        self._emit = emit
        self._tasks = Tasks()
        self._senders: list[socket.socket] = []
        self._listener: asyncio.DatagramTransport | None = None
        self._told_at = -ANSWER_EVERY_S
        self._found: dict[PeerId, None] = {}
        self._has_found = asyncio.Event()

    @property
    def found(self) -> tuple[PeerId, ...]:
        """Return who was heard here, first those heard first."""
        return tuple(self._found)

    async def start(self) -> None:
        """Listen, and ask from now on. The node has started, and its passport holds what the ticket does.

        Raises:
            NetError: no network of this machine takes part, or the port is another program's.
        """
        self._key = beacon_key(self._node.run, secret_of(self._node.passport.admission))
        hosts = _hosts(self._node.addresses)
        try:
            self._senders = [_sender(host) for host in hosts]
            listener = _listener(hosts)
        except OSError as error:
            await self.aclose()
            raise NetError(
                f"--lan: weft cannot look for members in the local network ({error.strerror or error}). Leave it "
                f"out, or free UDP port {PORT} and check that a network is up."
            ) from error
        loop = asyncio.get_running_loop()
        self._listener, _ = await loop.create_datagram_endpoint(lambda: _Ears(self), sock=listener)
        self._tasks.spawn(self._speak())

    async def listen(self) -> tuple[PeerId, ...]:
        """Return who is here as soon as anybody has answered; after a second nobody may have."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LISTEN_S):
                await self._has_found.wait()
        return self.found

    async def aclose(self) -> None:
        await self._tasks.aclose()
        if self._listener is not None:
            self._listener.close()
        for sender in self._senders:
            sender.close()
        self._senders.clear()

    def hear(self, packet: bytes) -> None:
        """Take what came from the network: of anybody."""
        heard = open_beacon(self._key, packet)
        if heard is None or heard[0].peer == self._node.peer:
            return
        contact, asks = heard
        if contact.peer not in self._found:
            self._found[contact.peer] = None
            self._emit(Notice(text=f"{short(contact.peer)} is a member in this local network"))
        self._node.hear(contact)
        self._has_found.set()
        if asks and self._clock.now() - self._told_at >= ANSWER_EVERY_S:
            self._tell(asks=False)

    async def _speak(self) -> None:
        passed_s = 0.0
        for at_s in ASK_AT_S:
            await asyncio.sleep(at_s - passed_s)
            passed_s = at_s
            self._tell(asks=True)
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            self._tell(asks=False)

    def _tell(self, *, asks: bool) -> None:
        if not asks:
            self._told_at = self._clock.now()
        me = self._node.contact(self._node.peer)
        packet = seal_beacon(self._key, fresh_secret(_NONCE_NBYTES), me, asks=asks)
        for sender in self._senders:
            with suppress(OSError):  # that network is down for now
                sender.sendto(packet, (GROUP, PORT))


class _Ears(asyncio.DatagramProtocol):
    def __init__(self, lan: Lan) -> None:
        self._lan = lan

    def datagram_received(self, data: bytes, _source: object) -> None:
        self._lan.hear(data)


def _hosts(addresses: Sequence[str]) -> list[str]:
    """Return the IPv4 addresses at which a peer listens in networks of this machine, or that of loopback."""
    found = dict.fromkeys(host for each in addresses for host in hosts_of(each) if ip_version(host) == 4)
    away = [host for host in found if not is_loopback(host) and _is_here(host)]
    return away or [host for host in found if is_loopback(host)]


def _is_here(host: str) -> bool:
    """Return whether this machine has an address, which may be its router's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def _sender(host: str) -> socket.socket:
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sender.setblocking(False)
    sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(host))
    sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)  # no router passes it on
    sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)  # members on this machine hear it, too
    return sender


def _listener(hosts: Sequence[str]) -> socket.socket:
    """Return a socket on which the group is heard in the networks of `hosts`; several processes may have one."""
    if not hosts:
        raise OSError("this machine listens in no IPv4 network")
    listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform == "darwin":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Bound to the group, it hears nothing that is sent to this machine alone; Windows knows no such binding.
        listener.bind(("" if sys.platform == "win32" else GROUP, PORT))
        for host in hosts:
            member = socket.inet_aton(GROUP) + socket.inet_aton(host)
            listener.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
    except OSError:
        listener.close()
        raise
    return listener
