"""TCP sockets as the tls transport wants them: never blocking, listening on both families, clear when they fail.

Through an HTTP proxy that lets connections pass: the CONNECT method of RFC 9110, section 9.3.6.

    peer ──► proxy   CONNECT 203.0.113.7:4433 HTTP/1.1
    peer ◄── proxy   HTTP/1.1 200 ...
    peer ◄─► 203.0.113.7:4433                                from then on as if the proxy were not there

The proxy sees whom this peer reaches, when and how much; inside is TLS to a key that was checked. It is named in the
machine's settings and nowhere else: no environment variable is read.

Failure:
- the proxy refuses, wants a password, or does not reach the address: `ConnectionError` says what it answered.
- it answers at length or never: bounded by `MAX_ANSWER_NBYTES`, and by the deadline of the caller.
"""

import asyncio
import base64
import errno
import re
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import psutil

from weft.errors import NetError, PortInUse
from weft.wire import printable

_BACKLOG = 256  # connections the system holds while the loop is busy
_MAPPED = "::ffff:"  # how a socket of both families shows an IPv4 address
# Probes after 10 s of silence, and an end 15 to 25 s after the other host vanished; deadlines of callers are shorter.
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 25_000))
# Of a stream the system takes so much and has not sent it. Else it is a megabyte, which then stands before all that is
# more urgent and looks as if it had left. Twice a slice of what is patient: a line never waits for the next.
_NOTSENT_NBYTES = 256 << 10


def listen(host: str, port: int, last: int = 0) -> socket.socket:
    """Return a listening socket.

    Args:
        host: an address or name of this machine; "" is every address, of both families where it has both.
        port: 0 is `last` if that is free, else the system chooses.
        last: the port of the last start, at which others look for this peer; 0: there was none.

    Raises:
        PortInUse: the port is taken.
        NetError: the address is not this machine's.
    """
    if last and not port:
        with suppress(PortInUse):
            return listen(host, last)
    if host == "":
        try:
            return _bind("::", port)
        except NetError as error:
            if isinstance(error, PortInUse):
                raise
            return _bind("0.0.0.0", port)  # no IPv6 here
    return _bind(host, port)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = None
    try:
        listener = socket.socket(family, socket.SOCK_STREAM)
        if sys.platform == "win32":  # there SO_REUSEADDR would let another program take the port over
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        if listener is not None:
            listener.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES) and port:
            raise PortInUse(
                f"cannot listen on port {port}: {_holder(port)}. Stop that one, choose another port with --port, "
                f"or let weft find one with --port 0."
            ) from None
        raise NetError(
            f"cannot listen on {host or 'any address'}: {error.strerror or error}. Name an address of this machine "
            "with --host, or leave it out to listen on all."
        ) from None
    return listener


def _holder(port: int) -> str:
    """Return who seems to hold a port, for the message of `PortInUse`."""
    if port < 1024:
        return "it is taken, or only an administrator may use it, as all ports below 1024"
    with suppress(psutil.Error, OSError):
        for entry in psutil.net_connections("tcp"):
            if entry.status == psutil.CONN_LISTEN and getattr(entry.laddr, "port", None) == port and entry.pid:
                return f"{psutil.Process(entry.pid).name()} (process {entry.pid}) listens there"
    return "another program listens there, perhaps another weft peer"


async def connect(host: str, port: int) -> socket.socket:
    """Return a connection to the first of the host's IP addresses that answers.

    Raises:
        OSError: none does.
    """
    loop = asyncio.get_running_loop()
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = list(await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    failure: OSError = ConnectionError("the name has no address")
    for family, kind, protocol, _, target in found:
        try:
            connection = socket.socket(family, kind, protocol)
        except OSError as error:
            failure = error
            continue
        try:
            connection.setblocking(False)
            _tune(connection)
            await loop.sock_connect(connection, target)
        except OSError as error:
            connection.close()
            failure = error
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise failure


async def accept(listener: socket.socket, look_away_s: float = 0.0) -> tuple[socket.socket, str, int]:
    """Return the next incoming connection, and the IP address and port it comes from.

    Args:
        look_away_s: how long to do without a look once nobody is there; who comes meanwhile waits at the system.
    """
    while True:
        try:
            connection, (host, port, *_) = listener.accept()
        except BlockingIOError:
            await asyncio.sleep(look_away_s)
            await _readable(listener)
            continue
        connection.setblocking(False)
        _tune(connection)
        return connection, host.removeprefix(_MAPPED), port  # nothing awaited since: nobody's end can lose it


async def _readable(listener: socket.socket) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(listener.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(listener.fileno())


def _tune(connection: socket.socket) -> None:
    with suppress(OSError):  # hints: the connection works without them
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _NOTSENT_NBYTES)
        for option, value in _KEEPALIVE:
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


MAX_ANSWER_NBYTES = 16 << 10  # head of an answer: proxies add a few hundred bytes
_MAX_SHOWN = 80
# What a person can do about an answer.
_HINTS = {
    403: "it blocks this address or port: ask a member to listen on port 443, or ask whoever runs the proxy",
    405: "it does not allow CONNECT: ask whoever runs it",
    407: "it wants a user and a password: set proxy_user and proxy_password under [tls] in the machine file",
    502: "it did not reach the address",
    503: "it did not reach the address",
    504: "it did not reach the address in time",
}


@dataclass(frozen=True)
class Proxy:
    address: str  # http://host:port
    user: str = ""
    password: str = field(default="", repr=False)

    async def connect(self, host: str, port: int) -> socket.socket:
        """Return a connection that the proxy has opened to `host`.

        Raises:
            OSError: the proxy is not reached, or refuses.
        """
        parts = urlsplit(self.address)
        try:
            connection = await connect(parts.hostname or "", parts.port or 0)
        except OSError as error:
            raise ConnectionError(f"cannot reach the proxy {self.address}: {error}") from None
        try:
            await asyncio.get_running_loop().sock_sendall(connection, self._request(host, port))
            self._judge(await self._head(connection))
        except BaseException:
            connection.close()
            raise
        return connection

    def _request(self, host: str, port: int) -> bytes:
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
        if self.user or self.password:
            secret = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
            lines.append(f"Proxy-Authorization: Basic {secret}")
        return "\r\n".join([*lines, "", ""]).encode()

    async def _head(self, connection: socket.socket) -> bytes:
        loop, head = asyncio.get_running_loop(), b""
        while b"\r\n\r\n" not in head:
            more = await loop.sock_recv(connection, MAX_ANSWER_NBYTES)
            if not more:
                raise ConnectionError(f"the proxy {self.address} hung up without an answer")
            head += more
            if len(head) > MAX_ANSWER_NBYTES:
                raise ConnectionError(f"{self.address} does not answer as a proxy does: its answer does not end")
        return head

    def _judge(self, head: bytes) -> None:
        line = head.partition(b"\r\n")[0].decode("latin-1")
        match = re.fullmatch(r"HTTP/1\.[01] (\d{3})(?: (.*))?", line)
        if match is None:
            raise ConnectionError(f"{self.address} is not an HTTP proxy: it answers {printable(line[:_MAX_SHOWN])!r}")
        code = int(match[1])
        if 200 <= code < 300:
            if not head.endswith(b"\r\n\r\n"):  # nobody speaks before this peer does
                raise ConnectionError(f"the proxy {self.address} sent more than its answer")
            return
        said = printable(f"{code} {match[2] or ''}".strip()[:_MAX_SHOWN])
        hint = _HINTS.get(code)
        raise ConnectionError(f"the proxy {self.address} answered {said}" + (f": {hint}" if hint else ""))
