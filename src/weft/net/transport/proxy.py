"""Through an HTTP proxy that lets connections pass: the CONNECT method of RFC 9110, section 9.3.6.

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
import re
import socket
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from weft.net.transport import tcp
from weft.wire import printable

MAX_ANSWER_NBYTES = 16 << 10  # head of an answer: proxies add a few hundred bytes
_MAX_SHOWN = 80
# What a person can do about an answer.
_HINTS = {
    403: "it does not let this address or port pass: ask a member to listen on port 443, or whoever runs the proxy",
    405: "it lets nothing pass by CONNECT: ask whoever runs it",
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
            connection = await tcp.connect(parts.hostname or "", parts.port or 0)
        except OSError as error:
            raise ConnectionError(f"the proxy {self.address} is not reached: {error}") from None
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
                raise ConnectionError(f"what {self.address} answers is no proxy's answer: it has no end")
        return head

    def _judge(self, head: bytes) -> None:
        line = head.partition(b"\r\n")[0].decode("latin-1")
        match = re.fullmatch(r"HTTP/1\.[01] (\d{3})(?: (.*))?", line)
        if match is None:
            raise ConnectionError(f"{self.address} is no HTTP proxy: it answers {printable(line[:_MAX_SHOWN])!r}")
        code = int(match[1])
        if 200 <= code < 300:
            if not head.endswith(b"\r\n\r\n"):  # nobody speaks before this peer does
                raise ConnectionError(f"the proxy {self.address} says more than that it is connected")
            return
        said = printable(f"{code} {match[2] or ''}".strip()[:_MAX_SHOWN])
        hint = _HINTS.get(code)
        raise ConnectionError(f"the proxy {self.address} answered {said}" + (f": {hint}" if hint else ""))
