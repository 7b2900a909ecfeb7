"""TCP sockets as the tls transport wants them: never blocking, listening on both families, clear when they fail.

It does not know what is said over them.
"""

import asyncio
import errno
import socket
import sys
from contextlib import suppress

import psutil

from weft.errors import NetError, PortInUse

_BACKLOG = 256  # connections the system holds while the loop is busy
_MAPPED = "::ffff:"  # how a socket of both families shows an IPv4 address
# Probes after 10 s of silence, and an end 15 to 25 s after the other host vanished; deadlines of callers are shorter.
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 25_000))
# Of a stream the system takes so much and has not sent it. Else it is a megabyte, which then stands before all that is
# more urgent and looks as if it had left. Twice a slice of what is patient: a line never waits for the next.
_NOTSENT_NBYTES = 256 << 10


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Args:
        host: an address or name of this machine; "" is every address, of both families where it has both.
        port: 0 lets the system choose.

    Raises:
        PortInUse: the port is taken.
        NetError: the address is not this machine's.
    """
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
                f"or let the system choose with --port 0."
            ) from None
        raise NetError(
            f"cannot listen on {host or 'any address'}: {error.strerror or error}. Name an address of this machine "
            "with --host, or leave it out to listen on all."
        ) from None
    return listener


def _holder(port: int) -> str:
    """Return who seems to hold a port, for the message of `PortInUse`."""
    if port < 1024:
        return "it is taken, or reserved for the administrator as all below 1024"
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


async def accept(listener: socket.socket) -> tuple[socket.socket, str, int]:
    """Return the next incoming connection, and the IP address and port it comes from."""
    while True:
        try:
            connection, (host, port, *_) = listener.accept()
        except BlockingIOError:
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
