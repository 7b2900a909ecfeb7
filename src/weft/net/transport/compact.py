"""Addresses of one peer in few bytes: what a ticket holds of them, and a beacon (`net.lan`).

An entry is a place, with the ports that listen there, or what else leads to the peer:

    first byte   kind, plus 8 where tls listens there, 16 where iroh does, 32 where their ports are those of the entry
                 of this kind before
    0 and 1      4 bytes of IPv4, 16 of IPv6
    2            a host's name, its length in a byte before it
    3 and 4      an iroh relay without its https:// or http://, its length in a byte before it
    5            an address as it is spelled, its length in two bytes before it
    ports        2 bytes each, tls before iroh; none with 32

What fits into the room there is, is named: places that mean something everywhere first, then a relay, which somebody
named because nothing else leads there, then those of one home. A peer's addresses come whole from whoever answers.
"""

import ipaddress
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import parse_qsl, quote, urlsplit

from weft.ids import PeerId
from weft.net.messages import MAX_ADDRESS_CHARS, MAX_ADDRESSES
from weft.net.transport.address import (
    fault_of,
    hosts_of,
    ip_version,
    is_loopback,
    is_private,
    join_address,
    split_address,
)

_IPV4, _IPV6, _NAME, _HTTPS, _HTTP, _SPELLED = range(6)
_KINDS = 8
_TLS, _IROH, _SAME_PORTS = 8, 16, 32
_SCHEMES = {_HTTPS: "https://", _HTTP: "http://"}
_TRANSPORTS: tuple[tuple[Literal["tls", "iroh"], int], ...] = (("tls", _TLS), ("iroh", _IROH))


@dataclass
class _Place:
    host: str
    ports: dict[str, int]  # by transport


@dataclass
class _Known:
    """What a peer's addresses come to."""

    places: list[_Place] = field(default_factory=list)
    relay: str = ""
    spelled: list[str] = field(default_factory=list)  # those of other transports, or in words of their own

    def add(self, host: str, transport: str, port: int) -> None:
        here = [place for place in self.places if place.host == host]
        if any(place.ports.get(transport) == port for place in here):
            return
        for place in here:
            if transport not in place.ports:
                place.ports[transport] = port
                return
        self.places.append(_Place(host, {transport: port}))


def pack(peer: PeerId, addresses: Iterable[str], room: int) -> bytes:
    """Return entries for as many of `addresses` as `room` bytes hold, the most useful first.

    The first place and a relay are there whatever they take.
    """
    known = _read_all(peer, addresses)
    packed, last = b"", dict[int, dict[str, int]]()
    ranked = _ranked(known)
    musts = [each for each in ranked if not _is_relay(each)][:1] + [each for each in ranked if _is_relay(each)]
    for each in ranked:
        entry, ports = _pack_one(each, last)
        if each not in musts and len(packed) + len(entry) > room:
            continue
        packed += entry
        last |= ports
    return packed


def unpack(peer: PeerId, data: bytes) -> tuple[str, ...]:
    """Return the addresses of `peer` that the entries in `data` name.

    Raises:
        ValueError: they end too early, name what no address has, or are too many.
    """
    reader = _Reader(data)
    direct: list[str] = []
    found: list[str] = []
    relay = ""
    while reader.left:
        kind = (head := reader.number(1)) % _KINDS
        if kind in _SCHEMES:
            relay = _SCHEMES[kind] + reader.text(1)
        elif kind == _SPELLED:
            found.append(reader.text(2))
            if re.match(r"[a-z]+://.", found[-1]) is None:
                raise ValueError(f"{found[-1]!a} is no address")
        else:
            host, ports = reader.host(kind), reader.ports(head)
            found += [join_address("tls", host, ports["tls"])] if "tls" in ports else []
            direct += [join_address("", host, ports["iroh"])[3:]] if "iroh" in ports else []
    if direct or relay:
        query = "&".join(f"addr={each}" for each in direct)
        asked = f"relay={quote(relay, safe=':/')}" if relay else ""
        found.append(f"iroh://{peer}?" + "&".join(filter(None, (query, asked))))
    if len(found) > MAX_ADDRESSES or max(map(len, found), default=0) > MAX_ADDRESS_CHARS:
        raise ValueError("more or longer addresses than a peer has")
    return tuple(found)


def relay_of(addresses: Iterable[str]) -> str:
    """Return the relay that iroh addresses name, or ''."""
    named = (value for each in addresses for name, value in _options(each) if name == "relay")
    return next(named, "")


def is_from_outside(addresses: Iterable[str]) -> bool:
    """Return whether one of a peer's addresses means something outside its own network."""
    hosts = [host for each in addresses for host in hosts_of(each)]
    return bool(relay_of(addresses)) or any(not is_private(host) for host in hosts)


# --- from addresses to entries ---


def _read_all(peer: PeerId, addresses: Iterable[str]) -> _Known:
    known = _Known()
    for address in addresses:
        if not (_read_tls(known, address) or _read_iroh(known, peer, address)):
            known.spelled.append(address)
    return known


def _read_tls(known: _Known, address: str) -> bool:
    try:
        host, port = split_address("tls", address)
    except ValueError:
        return False
    if fault_of(f"[{host}]:{port}" if ":" in host else f"{host}:{port}") is not None:
        return False
    known.add(host, "tls", port)
    return True


def _read_iroh(known: _Known, peer: PeerId, address: str) -> bool:
    options = list(_options(address))
    if not options or urlsplit(address).hostname != peer or {name for name, _ in options} - {"addr", "relay"}:
        return False
    direct = [value for name, value in options if name == "addr"]
    if any(fault_of(place) is not None for place in direct):
        return False
    relay = relay_of([address])
    if relay and not (relay.startswith(tuple(_SCHEMES.values())) and len(relay) < 256 and relay.isascii()):
        return False
    for place in direct:
        host, _, port = place.rpartition(":")
        known.add(host.strip("[]"), "iroh", int(port))
    known.relay = known.relay or relay
    return True


def _options(address: str) -> Iterator[tuple[str, str]]:
    if address.startswith("iroh://"):
        yield from parse_qsl(urlsplit(address).query)


_Named = _Place | tuple[int, str]  # a place, or the kind and the words of what is none


def _ranked(known: _Known) -> list[_Named]:
    away = [place for place in known.places if not is_private(place.host)]
    home = [place for place in known.places if is_private(place.host) and not is_loopback(place.host)]
    others = {transport for place in (*away, *home) for transport in place.ports}
    own = [place for place in known.places if is_loopback(place.host) and place.ports.keys() - others]
    kind = _HTTP if known.relay.startswith(_SCHEMES[_HTTP]) else _HTTPS
    relay = [(kind, known.relay.removeprefix(_SCHEMES[kind]))] if known.relay else []
    return [*away, *relay, *home, *own, *((_SPELLED, each) for each in known.spelled)]


def _is_relay(named: _Named) -> bool:
    return isinstance(named, tuple) and named[0] in _SCHEMES


def _pack_one(named: _Named, last: dict[int, dict[str, int]]) -> tuple[bytes, dict[int, dict[str, int]]]:
    """Return an entry, and the ports that an entry of its kind may repeat from now on."""
    if isinstance(named, tuple):
        kind, words = named
        return bytes([kind]) + len(words).to_bytes(2 if kind == _SPELLED else 1, "big") + words.encode(), {}
    kind, where = _pack_host(named.host)
    head = kind | sum(bit for transport, bit in _TRANSPORTS if transport in named.ports)
    ports = last.get(kind, {}) | named.ports
    if all(last.get(kind, {}).get(transport) == port for transport, port in named.ports.items()):
        return bytes([head | _SAME_PORTS]) + where, {kind: ports}
    spelled = b"".join(named.ports[each].to_bytes(2, "big") for each, _ in _TRANSPORTS if each in named.ports)
    return bytes([head]) + where + spelled, {kind: ports}


def _pack_host(host: str) -> tuple[int, bytes]:
    version = ip_version(host)
    if version is None:
        return _NAME, bytes([len(host)]) + host.encode()
    return (_IPV4 if version == 4 else _IPV6), ipaddress.ip_address(host).packed


# --- and back ---


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.left = data
        self._last: dict[int, dict[str, int]] = {}

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self._take(nbytes), "big")

    def text(self, length_nbytes: int) -> str:
        words = self._take(self.number(length_nbytes)).decode("ascii")
        if re.fullmatch(r"[!-~]+", words) is None:
            raise ValueError("an address with strange letters")
        return words

    def host(self, kind: int) -> str:
        if kind == _IPV4:
            return str(ipaddress.IPv4Address(self._take(4)))
        if kind == _IPV6:
            return str(ipaddress.IPv6Address(self._take(16)))
        if kind == _NAME:
            name = self.text(1)
            if ":" in name or fault_of(f"{name}:1") is not None:
                raise ValueError(f"{name!a} is no name of a host")
            return name
        raise ValueError(f"kind {kind} of address, which this weft does not know")

    def ports(self, head: int) -> dict[str, int]:
        wanted = [transport for transport, bit in _TRANSPORTS if head & bit]
        known = self._last.setdefault(head % _KINDS, {})
        if not head & _SAME_PORTS:
            known |= {transport: self.number(2) for transport in wanted}
        if not wanted or not all(known.get(transport) for transport in wanted):
            raise ValueError("a place without a port")
        return {transport: known[transport] for transport in wanted}

    def _take(self, nbytes: int) -> bytes:
        if len(self.left) < nbytes:
            raise ValueError("the last address is cut off")
        taken, self.left = self.left[:nbytes], self.left[nbytes:]
        return taken
