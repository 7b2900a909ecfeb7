"""A port of this machine that browsers and other programs ask, and its address as a person types it."""

import socket

from weft.errors import ConfigError

LOCAL = {"127.0.0.1", "::1", "localhost"}


UNREAD_S = 60.0  # a connection whose other end takes nothing for so long is ended by the system, where it can


def listen(host: str, port: int) -> socket.socket:
    """Listen on a port; 0 lets the system choose.

    Raises:
        ConfigError: it is taken, or not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen there: {error.strerror or error}. Choose another port, or "
            "--port 0 for any that is free."
        ) from error
    # Connections have what their listener has. Without the first the second part of an answer waits 40 ms for the other
    # end to confirm the first: asyncio sets it only for sockets that were made with their protocol's number.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_S * 1000))
    return listener


def address(listener: socket.socket) -> str:
    """Return the address of what listens: http://127.0.0.1:8000/."""
    host, port = listener.getsockname()[:2]
    name = {"0.0.0.0": "THIS-MACHINE", "::": "THIS-MACHINE"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}/"
