"""Answers on their way: a body, or events as they come (server-sent), until the client has them or has gone.

    data: {...}          each event; the last one is `data: [DONE]`
    : still here         where nothing came for a while, so that nobody takes the stream for dead
    data: {"error": ...} where the answer fails: a client takes a stream that merely ends for a success

Who goes away ends the work within the moment, whether it is a stream or not. Who reads slowly holds up nobody: little
is written ahead of it, its text waits (`engine.text`), and after `SLOW_READER_S` its connection ends.
"""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import msgspec
from starlette.types import Receive, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from weft.serve.failures import Fault, fault_of
from weft.serve.keys import Limits

SLOW_READER_S = 30.0  # what is written for a client has to leave within it, or some of it
LEAST_NBYTES = 1 << 10  # so much
SILENT_S = 30.0  # for the head of a request
MAX_UNSENT_NBYTES = 4 << 10  # that the system takes ahead of a client
_AT_ONCE = struct.pack("ii", 1, 0)
Tree = dict[str, Any]
_JSON = "application/json"


class Answer(Protocol):
    """What an endpoint has begun."""

    async def whole(self) -> Tree:
        """Return the body."""
        ...

    def events(self) -> AsyncIterator[Tree]:
        """Yield the body piece by piece."""
        ...

    def cancel(self) -> None:
        """Draw no more."""
        ...


class Gone(Exception):
    """The client has gone, or was cut off."""


class Wire:
    """A request's connection: what is sent on it, and that it is still there.

    Args:
        headers: of every answer.
        on_fault: told of each one that is sent.
    """

    def __init__(
        self, receive: Receive, send: Send, limits: Limits, headers: dict[str, str], on_fault: Callable[[Fault], None]
    ) -> None:
        self._receive, self._send, self._limits = receive, send, limits
        self.headers = headers
        self._on_fault = on_fault
        self.has_begun = False

    async def body(self) -> bytes:
        """Return the request's body.

        Raises:
            Fault: it is too long.
            Gone: the client has gone.
        """
        most = self._limits.max_body_nbytes
        parts, num = [], 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Gone
            parts.append(message.get("body", b""))
            num += len(parts[-1])
            if num > most:
                raise Fault(413, f"The body has more than {most} bytes.", code="request_too_large")
            if not message.get("more_body"):
                return b"".join(parts)

    async def while_there(self, work: Awaitable[Any]) -> Any:
        """Do `work` until it is done, or the client has gone.

        Raises:
            Gone: it has.
        """
        doing = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(self._left())
        try:
            await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                return doing.result()
            raise Gone
        finally:
            for task in (doing, leaving):
                task.cancel()
            await asyncio.gather(doing, leaving, return_exceptions=True)

    async def _left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # --- answers ---

    async def tell(
        self, body: bytes, kind: str = _JSON, status: int = 200, more: Mapping[str, str] | None = None
    ) -> None:
        """Send a whole answer."""
        await self._begin(status, {"content-type": kind, "content-length": str(len(body)), **(more or {})})
        await self._put(body, is_last=True)

    async def tell_tree(self, tree: Any) -> None:
        await self.tell(msgspec.json.encode(tree))

    async def fail(self, error: Exception) -> None:
        """Send an error: as the answer, or as the last event of one that has begun."""
        fault = fault_of(error)
        self._on_fault(fault)
        if self.has_begun:
            await self._put(_event(fault.body), is_last=True)
        else:
            await self.tell(msgspec.json.encode(fault.body), status=fault.status, more=fault.headers)

    async def stream(self, events: AsyncIterator[Tree], *, are_named: bool = False) -> None:
        """Send events as they come.

        Args:
            are_named: each is sent with its type, and no `[DONE]` ends them, as in the Responses API.
        """
        first = asyncio.ensure_future(anext(events, None))
        pending: asyncio.Future[Tree | None] = first
        try:
            await self._begin(
                200,
                {
                    "content-type": "text/event-stream; charset=utf-8",
                    "cache-control": "no-cache",
                    "x-accel-buffering": "no",
                },
            )
            while True:
                done, _ = await asyncio.wait((pending,), timeout=self._limits.still_s)
                if not done:
                    await self._put(b": still here\n\n")
                    continue
                tree = pending.result()
                if tree is None:
                    await self._put(b"" if are_named else b"data: [DONE]\n\n", is_last=True)
                    return
                await self._put(_event(tree, str(tree["type"]) if are_named else None))
                pending = asyncio.ensure_future(anext(events, None))
        finally:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
            close = getattr(events, "aclose", None)
            if close is not None:
                await close()

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.has_begun = True
        told = [
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in {**self.headers, **headers}.items()
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": told})

    async def _put(self, body: bytes, *, is_last: bool = False) -> None:
        try:
            await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})
        except OSError:
            raise Gone from None


class Connection(H11Protocol):
    """A client's connection. It holds little that the client has not taken. It ends where that does not leave, and
    where nothing is asked.

    uvicorn alone closes a connection once all that was written has left. A client that reads some bytes now and then
    puts that off for ever. And it waits for the head of a request as long as there is some byte of it.
    """

    _impatience: asyncio.TimerHandle | None = None
    _head_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()
        transport.set_write_buffer_limits(high=0)  # nothing is written behind what has not left
        with suppress(OSError, AttributeError):  # not every system knows it
            line = transport.get_extra_info("socket")
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_NBYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        self._keep_patience()
        self._has_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._has_head()
        elif self._head_due is None:
            self._wait_for_head()

    def _wait_for_head(self) -> None:
        self._head_due = self.loop.call_later(SILENT_S, self.transport.close)

    def _has_head(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._keep_patience()
        self._wait_for_reader()

    def _wait_for_reader(self) -> None:
        nbytes = self.transport.get_write_buffer_size()
        self._impatience = self.loop.call_later(SLOW_READER_S, self._look, nbytes)

    def _look(self, before_nbytes: int) -> None:
        """Cut a connection off where next to nothing left of what is written there."""
        if before_nbytes - self.transport.get_write_buffer_size() >= LEAST_NBYTES:
            self._wait_for_reader()
        else:
            self._cut()

    def _cut(self) -> None:
        with suppress(OSError, AttributeError):  # what it has not sent the system forgets, too, and tells the client so
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self.transport.abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._keep_patience()

    def _keep_patience(self) -> None:
        if self._impatience is not None:
            self._impatience.cancel()
            self._impatience = None


def _event(tree: Any, name: str | None = None) -> bytes:
    line = b"data: " + msgspec.json.encode(tree) + b"\n\n"
    return line if name is None else b"event: " + name.encode() + b"\n" + line
