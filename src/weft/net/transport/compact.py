"""Members and where they listen, in few bytes: what a ticket holds of them, and a beacon (`net.lan`).

An entry is a place, with the ports that listen there, or what else leads to the member:

    first byte   kind, plus 8 where tls listens there, 16 where iroh does, 32 where their ports are those of the entry
                 of this kind before, 64 where a member begins, 128 where its key is whole
    with 64      the member's key: its first 15 bytes, or with 128 all 32
    0 and 1      4 bytes of IPv4, 16 of IPv6
    2            a host's name, its length in a byte before it
    3 and 4      an iroh relay without its https:// or http://, its length in a byte before it
    5            an address as it is spelled, its length in two bytes before it
    ports        2 bytes each, tls before iroh; none with 32

The first bytes of a key are enough over tls: whoever answers proves a whole key, which has to begin so
(`ids.is_named`). iroh dials by the whole key. So it is there for a member that iroh reaches from farther than tls does,
and where nobody else is named.

What fits into the room there is, is named. Of each member, places that mean something everywhere come first, then a
relay, which somebody named because nothing else leads there, then those of one home. The first member has a place of
both sorts, each further one the first place that fits, and what room is left is shared out in turns. All addresses
come from whoever answers.
"""

import ipaddress
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import parse_qsl, quote, urlsplit

from weft.ids import START_NBYTES, PeerId, is_start, start_of
from weft.net.messages import MAX_ADDRESS_CHARS, MAX_ADDRESSES, Contact
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
_TLS, _IROH, _SAME_PORTS, _BEGINS, _WHOLE = 8, 16, 32, 64, 128
_KEY_NBYTES = 32
MAX_NAMED = 3  # members: with more there is no room for where they listen
_MAX_READ = 8  # of another weft, which may name more
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


def pack(members: Sequence[Contact], room: int) -> bytes:
    """Return entries for as many of the first `MAX_NAMED` members as `room` bytes hold.

    The first place of the first member, and its relay, are there whatever they take.

    Args:
        members: the most useful first; each has an address.
    """
    leads = [_lead(member, is_alone=len(members) == 1) for member in members[:MAX_NAMED]]
    for named in _musts(leads[0].ranked):
        leads[0].chosen.append(named)
    at_home = (named for named in leads[0].ranked if isinstance(named, _Place) and is_private(named.host))
    for named in at_home:
        if leads[0].takes(named, leads, room):
            break
    for lead in leads[1:]:
        for named in lead.ranked:
            if lead.takes(named, leads, room):
                break
    for turn in range(MAX_ADDRESSES):
        for lead in leads:
            if lead.chosen and turn < len(lead.ranked):
                lead.takes(lead.ranked[turn], leads, room)
    return _pack_all(leads)


def unpack(data: bytes) -> tuple[Contact, ...]:
    """Return the members that the entries in `data` name: each by its key, or the first digits of it.

    Raises:
        ValueError: they end too early, name what no member has, or are too many.
    """
    reader = _Reader(data)
    found: list[_Found] = []
    while reader.left:
        head = reader.number(1)
        if head & _BEGINS:
            found.append(_Found(reader.key(_KEY_NBYTES if head & _WHOLE else START_NBYTES), bool(head & _WHOLE)))
        elif not found or head & _WHOLE:
            raise ValueError("an address of nobody")
        _read_entry(reader, head, found[-1])
    if len(found) > _MAX_READ:
        raise ValueError(f"{len(found)} members")
    return tuple(each.contact() for each in found)


@dataclass
class _Found:
    """A member as it is read."""

    peer: PeerId
    is_whole: bool
    others: list[str] = field(default_factory=list)  # its addresses of other transports than iroh
    direct: list[str] = field(default_factory=list)  # host:port of iroh
    relay: str = ""

    def contact(self) -> Contact:
        addresses = list(self.others)
        if self.direct or self.relay:
            if not self.is_whole:
                raise ValueError("iroh without the whole key")
            query = [f"addr={each}" for each in self.direct]
            query += [f"relay={quote(self.relay, safe=':/')}"] if self.relay else []
            addresses.append(f"iroh://{self.peer}?" + "&".join(query))
        if len(addresses) > MAX_ADDRESSES or max(map(len, addresses), default=0) > MAX_ADDRESS_CHARS:
            raise ValueError("more or longer addresses than a peer has")
        return Contact(peer=self.peer, name="", addresses=tuple(addresses))


def _read_entry(reader: "_Reader", head: int, member: _Found) -> None:
    kind = head % _KINDS
    if kind in _SCHEMES:
        member.relay = _SCHEMES[kind] + reader.text(1)
    elif kind == _SPELLED:
        member.others.append(reader.text(2))
        if re.match(r"[a-z]+://.", member.others[-1]) is None:
            raise ValueError(f"{member.others[-1]!a} is no address")
    else:
        host, ports = reader.host(kind), reader.ports(head)
        member.others += [join_address("tls", host, ports["tls"])] if "tls" in ports else []
        member.direct += [join_address("", host, ports["iroh"])[3:]] if "iroh" in ports else []


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


@dataclass
class _Lead:
    """A member as it is packed."""

    peer: PeerId
    is_whole: bool
    ranked: list[_Named]  # what leads to it, the most useful first
    chosen: list[_Named] = field(default_factory=list)

    def takes(self, named: _Named, leads: "Sequence[_Lead]", room: int) -> bool:
        """Choose `named` where all that is chosen fits into `room` bytes then; return whether it is chosen."""
        if named not in self.chosen:
            self.chosen.append(named)
            if len(_pack_all(leads)) > room:
                self.chosen.remove(named)
        return named in self.chosen


def _lead(member: Contact, *, is_alone: bool) -> _Lead:
    known = _read_all(member.peer, member.addresses)
    ranked, by_start = _ranked(known), _ranked(_without_iroh(known))
    is_whole = not is_start(member.peer) and (is_alone or _reach(ranked) > _reach(by_start))
    return _Lead(member.peer, is_whole, ranked if is_whole else by_start)


def _without_iroh(known: _Known) -> _Known:
    places = [_Place(place.host, {"tls": place.ports["tls"]}) for place in known.places if "tls" in place.ports]
    return _Known(places, "", [each for each in known.spelled if not each.startswith("iroh:")])


def _reach(ranked: Sequence[_Named]) -> int:
    """Return from how far it leads there: 3 from everywhere, 2 from one home, 1 from one machine, 0 from nowhere."""
    hosts = [named.host for named in ranked if isinstance(named, _Place)]
    if any(map(_is_relay, ranked)) or not all(map(is_private, hosts)):
        return 3
    return 2 if not all(map(is_loopback, hosts)) else int(bool(ranked))


def _musts(ranked: Sequence[_Named]) -> list[_Named]:
    return [each for each in ranked if not _is_relay(each)][:1] + [each for each in ranked if _is_relay(each)]


def _pack_all(leads: Sequence[_Lead]) -> bytes:
    packed, last = b"", dict[int, dict[str, int]]()
    for lead in leads:
        key = bytes.fromhex(lead.peer if lead.is_whole else start_of(lead.peer))
        begins = _BEGINS | (_WHOLE if lead.is_whole else 0)
        for named in (each for each in lead.ranked if each in lead.chosen):
            entry, ports = _pack_one(named, last)
            packed += bytes([entry[0] | begins]) + key + entry[1:]
            last |= ports
            begins, key = 0, b""
    return packed


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

    def key(self, nbytes: int) -> PeerId:
        return PeerId(self._take(nbytes).hex())

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
