"""Addresses as text, and which ones this machine can be reached at.

tls://203.0.113.7:4433      tls://[2001:db8::1]:4433
"""

import ipaddress
import re
import socket
from contextlib import suppress
from urllib.parse import parse_qsl, urlsplit

import psutil

from weft.net.messages import MAX_ADDRESSES

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
_HOMES = [ipaddress.ip_network(net) for net in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")]
_PROVIDERS = ipaddress.ip_network("100.64.0.0/10")  # between a provider's own translation and its customers


def join_address(scheme: str, host: str, port: int) -> str:
    """Return the text of an address; an IPv6 host gets its brackets."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def split_address(scheme: str, address: str) -> tuple[str, int]:
    """Return the host and port of an address.

    Raises:
        ValueError: another scheme, or no host and port.
    """
    parts = urlsplit(address)
    port = parts.port  # raises ValueError when it is no number up to 65535
    if parts.scheme != scheme or not parts.hostname or not port or parts.path or parts.query:
        raise ValueError(f"{address[:200]!r} does not read {scheme}://host:port")
    return parts.hostname, port


def fault_of(place: str) -> str | None:
    """Return why `place` is no `host:port` that others can be told, in words; None where it is one."""
    host, colon, port = place.rpartition(":")
    if "/" in place:
        return "it is a URL"
    if not colon or not port.isascii() or not port.isdecimal():
        return "it has no port" if place.strip() else "it is empty"
    if not 1 <= int(port) <= 65535:
        return f"port {port} is none from 1 to 65535"
    if host.startswith("[") and host.endswith("]"):
        return None if isinstance(_ip(host[1:-1]), ipaddress.IPv6Address) else f"{host} is not an IPv6 address"
    if ":" in host:
        return "an IPv6 address needs brackets, as in [2001:db8::1]:4433"
    if not host.isascii():
        with suppress(UnicodeError):
            return f"a name in an address has only ASCII letters: {host.encode('idna').decode()}"
    is_name = re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?", host) is not None
    return None if is_name else f"{host!r} is not the name of a host"


def hosts_of(address: str) -> list[str]:
    """Return the hosts that an address of any transport leads to."""
    parts = urlsplit(address)
    if parts.scheme == "iroh":
        return [host_of(place) for place in direct_places(address)]
    return [parts.hostname] if parts.hostname else []


def direct_places(address: str) -> list[str]:
    """Return each `host:port` that an iroh address names beside its relay."""
    return [value for name, value in parse_qsl(urlsplit(address).query) if name == "addr"]


def host_of(place: str) -> str:
    """Return the host of `host:port`, an IPv6 address without its brackets."""
    return place.rpartition(":")[0].strip("[]")


def is_private(host: str) -> bool:
    """Return whether a host means something only within one home or provider; a name is taken to mean more."""
    found = _ip(host)
    if found is None:
        return False
    nets = (*_HOMES, _PROVIDERS)
    return found.is_loopback or found.is_link_local or any(found in net for net in nets if net.version == found.version)


def is_loopback(host: str) -> bool:
    found = _ip(host)
    return found is not None and found.is_loopback


def network_of(host: str) -> str | None:
    """Return what one owner has: an IPv4 address, 64 bits of an IPv6 one. None: this machine, or no address."""
    found = _ip(host)
    found = getattr(found, "ipv4_mapped", None) or found
    if found is None or found.is_loopback:
        return None
    if found.version == 4 or found.is_link_local:
        return str(found)
    return str(ipaddress.IPv6Network((int(found), 64), strict=False))


def ip_version(host: str) -> int | None:
    """Return 4 or 6; None where `host` is no IP address, or one with a zone."""
    found = _ip(host)
    return None if found is None or "%" in host else found.version


def reachable_hosts(listening_on: str) -> list[str]:
    """Return the hosts at which others may reach a socket bound to `listening_on`, best first.

    A socket on one address has that one; a socket on all of them ("0.0.0.0", or "::" for both families) has those of
    every interface that is up, the public ones first and 127.0.0.1 last. Of the others, the one that leads away from
    here comes before those of virtual networks: a ticket has room for a few.
    """
    bound = ipaddress.ip_address(listening_on)
    if not bound.is_unspecified:
        return [listening_on]
    found = [ip for ip in _interface_addresses() if bound.version == 6 or ip.version == 4]
    leads_away = _leading_away()
    found.sort(key=lambda ip: (not ip.is_global, ip.version, ip not in leads_away, int(ip)))
    return [str(ip) for ip in found[: MAX_ADDRESSES - 1]] + ["127.0.0.1"]


def _leading_away() -> set[IpAddress]:
    """Return the addresses that this machine has towards the rest of the world. Nothing is sent."""
    found: set[IpAddress] = set()
    for family, anywhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((anywhere, 9))
            found.add(ipaddress.ip_address(probe.getsockname()[0].partition("%")[0]))
    return found


def _interface_addresses() -> list[IpAddress]:
    """Return the addresses of interfaces that are up, without loopback and those that are valid on one link only."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = []
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if name in up and entry.family in (socket.AF_INET, socket.AF_INET6):
                ip = ipaddress.ip_address(entry.address.partition("%")[0])
                if not (ip.is_loopback or ip.is_link_local or ip.is_unspecified):
                    found.append(ip)
    return found


def _ip(host: str) -> IpAddress | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:  # a name
        return None
