"""What this peer answers: one handler per record type, for calls and for notes.

A method is named after its record type. Handlers are registered before the node starts or at any time later; a
call to a method that nobody serves fails at the caller, a note that nobody heeds is dropped.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from weft.errors import CallFailed, PayloadError, PeerError
from weft.ids import PeerId
from weft.net.messages import MAX_BODY_NBYTES, MAX_REASON_CHARS
from weft.wire import decode

Q = TypeVar("Q", bound=msgspec.Struct)
CallHandler = Callable[[PeerId, Q], Awaitable[msgspec.Struct]]
NoteHandler = Callable[[PeerId, Q], Awaitable[None]]
_Handlers = dict[str, tuple[type[Any], Callable[[PeerId, Any], Awaitable[Any]]]]


class Handlers:
    def __init__(self) -> None:
        self._calls: _Handlers = {}
        self._notes: _Handlers = {}

    def serve(self, kind: type[Q], handler: CallHandler[Q], method: str = "") -> None:
        """Answer calls of `kind` with the record that `handler(peer, request)` returns.

        Args:
            method: under another name than the type's.
        """
        _register(self._calls, method or kind.__name__, kind, handler)

    def on_note(self, kind: type[Q], handler: NoteHandler[Q], method: str = "") -> None:
        """Give notes of `kind` to `handler(peer, note)`, one at a time and in order for each peer."""
        _register(self._notes, method or kind.__name__, kind, handler)

    def ignore(self, kind: type[Q], method: str = "") -> None:
        """Heed notes of `kind` no more, until there is another handler."""
        self._notes.pop(method or kind.__name__, None)

    def forget(self, prefix: str) -> None:
        """Serve and heed nothing whose name begins so."""
        for handlers in (self._calls, self._notes):
            for method in [each for each in handlers if each.startswith(prefix)]:
                del handlers[method]

    def answer(self, peer: PeerId, method: str, body: bytes) -> Callable[[], Awaitable[msgspec.Struct]] | None:
        """Return what computes the answer to a call, or None when nobody serves `method`.

        Raises:
            WireError: `body` is no such request.
        """
        return _bind(self._calls, peer, method, body)

    def heed(self, peer: PeerId, method: str, body: bytes) -> Callable[[], Awaitable[None]] | None:
        """Return what handles a note, or None when nobody heeds `method`.

        Raises:
            WireError: `body` is no such note.
        """
        return _bind(self._notes, peer, method, body)


def public_reason(error: Exception) -> str:
    """Return what a remote may learn of a handler's failure: the text of an error that is about peers, else its type.

    Other errors may name files of this machine.
    """
    if isinstance(error, (CallFailed, PayloadError)) or type(error) is PeerError:
        return str(error)[:MAX_REASON_CHARS]
    return type(error).__name__


def _register(
    handlers: _Handlers, method: str, kind: type[Any], handler: Callable[[PeerId, Any], Awaitable[Any]]
) -> None:
    if method in handlers:
        raise ValueError(f"{method} has a handler already")
    handlers[method] = (kind, handler)


def _bind(handlers: _Handlers, peer: PeerId, method: str, body: bytes) -> Callable[[], Awaitable[Any]] | None:
    found = handlers.get(method)
    if found is None:
        return None
    kind, handler = found
    record = decode(body, kind, max_nbytes=MAX_BODY_NBYTES)
    return lambda: handler(peer, record)
