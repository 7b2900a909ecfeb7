"""A server that speaks the OpenAI API, as whoever asks it sees it: its models, and an answer piece by piece.

    GET  /models                              names
    POST /chat/completions {"stream": true}   events ──► Piece, Piece, ... until one says that it is whole

weft's own server is one of many. What an answer lacks that others need not send (usage, a version) is None. An answer
that ends without a reason or `[DONE]` was cut short, which is an error and never an end.
"""

import http.client
import ipaddress
import json
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from weft.errors import CallFailed, ConfigError, DeadlineExceeded, PeerError, Refused, Unreachable, WeftError
from weft.reading import json_of, server_address
from weft.wire import printable

CONNECT_S = 10.0
SILENT_S = 600.0  # a server may read a long prompt, or wait for peers, and say nothing meanwhile
MAX_LINE = 4_000_000  # bytes of one event: no piece of an answer has as many
MAX_BODY = 1_000_000  # of a list of models or an error
_MAX_SAID = 400  # letters of what a server says itself


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What an event adds to an answer, and what is known of the answer by then."""

    text: str = ""
    model: str | None = None
    version: str | None = None  # which weights answered
    finish: str | None = None  # stop, length, ...
    num_tokens: int | None = None
    num_read: int | None = None  # tokens of the conversation, before the answer
    is_whole: bool = False


class Server:
    """One server.

    Args:
        address: as http://127.0.0.1:8000/v1; without a path, /v1 is meant.
        key: the API key; None: none is sent.

    Raises:
        ConfigError: the address is none.
    """

    def __init__(self, address: str, key: str | None = None) -> None:
        parts = server_address(address)
        if parts is None or not parts.hostname:
            raise ConfigError(
                f"{printable(address[:200])}: no address of a server. Give one as http://127.0.0.1:8000/v1; a key goes "
                "into a file, for --key-file."
            )
        self.key = key
        self.contexts: dict[str, int] = {}  # tokens of a conversation with its answer, by model, as far as it tells
        self._is_safe = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path.rstrip("/") or "/v1"
        self.address = f"{parts.scheme}://{parts.netloc}{self._path}"

    @property
    def is_private(self) -> bool:
        """Whether nobody on the way reads what is sent: it is encrypted, or stays on this machine."""
        if self._is_safe or self._host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self._host).is_loopback
        except ValueError:
            return False

    def models(self) -> list[str]:
        """Return the names of its models.

        Raises:
            Unreachable, DeadlineExceeded, Refused, CallFailed: as `answer`.
            PeerError: what it answers is no list of models.
        """
        with self._asked("GET", "/models", None) as reply:
            try:
                told = json_of(reply.read(MAX_BODY))
                models = {str(model["id"]): model.get("max_model_len") for model in told["data"]}
            except (ValueError, TypeError, KeyError, AttributeError, OSError, http.client.HTTPException):
                raise PeerError(self._no_api("answers with something else than a list of models")) from None
        self.contexts = {name: most for name, most in models.items() if isinstance(most, int)}
        return list(models)

    def _no_api(self, how: str) -> str:
        ending = "" if self._path.endswith("/v1") else "; such an address often ends in /v1"
        return (
            f"{self.address}/models {how}, so another kind of server is there. Give the address of one that speaks the "
            f"OpenAI API{ending}. `weft serve last` starts one, and prints its address."
        )

    def answer(self, asked: dict[str, Any]) -> Generator[Piece, None, None]:
        """Yield the pieces of an answer as they come; whoever stops early hangs up.

        Args:
            asked: model, messages and what else the API takes.

        Raises:
            Unreachable: nobody is at the address.
            Refused: the key is none there, or may not do this.
            CallFailed: the server says that it cannot answer, before or in the middle of the answer.
            DeadlineExceeded: it said nothing for `SILENT_S`.
            PeerError: the answer was cut short.
        """
        body = json.dumps(asked | {"stream": True, "stream_options": {"include_usage": True}}).encode()
        piece = Piece()
        with self._asked("POST", "/chat/completions", body) as reply:
            try:
                for data in _events(reply):
                    piece = self._next(piece, data)
                    yield piece
                    if data.strip() == b"[DONE]":
                        return
            except PeerError:  # of the system's kinds, too
                raise
            except TimeoutError:
                raise self._silent() from None
            except (OSError, http.client.HTTPException):
                pass  # the line broke: what is there may be whole
        if not piece.is_whole:
            raise PeerError(
                f"the answer broke off: {self.address} ended it without saying why. Ask again; if that does not help, "
                "see whether the server still runs."
            )

    def _next(self, before: Piece, data: bytes) -> Piece:
        """Return the piece that an event's data tell."""
        if data.strip() == b"[DONE]":
            return replace(before, text="", is_whole=True)
        try:
            told = json_of(data)
        except ValueError:
            raise PeerError(f"{self.address} sent an event that is no JSON. Ask again.") from None
        if not isinstance(told, dict):
            return replace(before, text="")
        if told.get("error"):
            raise self._failed(200, told)
        choices, usage = told.get("choices"), told.get("usage")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        delta = choice.get("delta")
        text = delta.get("content") if isinstance(delta, dict) else None
        num_tokens, num_read = (
            usage.get(name) if isinstance(usage, dict) else None for name in ("completion_tokens", "prompt_tokens")
        )
        finish = _text(choice.get("finish_reason")) or before.finish
        return Piece(
            text=_text(text) or "",
            model=_text(told.get("model")) or before.model,
            version=_text(told.get("system_fingerprint")) or before.version,
            finish=finish,
            num_tokens=num_tokens if isinstance(num_tokens, int) else before.num_tokens,
            num_read=num_read if isinstance(num_read, int) else before.num_read,
            is_whole=before.is_whole or finish is not None,
        )

    @contextmanager
    def _asked(self, method: str, path: str, body: bytes | None) -> Iterator[http.client.HTTPResponse]:
        """Ask, and hold the answer; on leaving hang up, whatever is left to read."""
        kind = http.client.HTTPSConnection if self._is_safe else http.client.HTTPConnection
        headers = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        with ExitStack() as held:
            line = held.enter_context(closing(kind(self._host, self._port, timeout=CONNECT_S)))
            try:
                try:
                    line.connect()
                except OSError as error:
                    raise Unreachable(
                        f"nobody answers at {self.address}: {error.strerror or error}. Start a server there, or give "
                        "the address of one that runs."
                    ) from None
                line.sock.settimeout(SILENT_S)
                line.request(method, f"{self._path}{path}", body, headers)
                reply = held.enter_context(closing(line.getresponse()))
                told = None if reply.status == http.client.OK else _told(reply)
            except TimeoutError:
                raise self._silent() from None
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, WeftError):  # of the system's kinds, too
                    raise
                raise Unreachable(
                    f"what answers at {self.address} hangs up, or speaks no HTTP. See whether the address and the "
                    "scheme (http or https) are right."
                ) from None
            if reply.status == http.client.NOT_FOUND and path == "/models":
                raise CallFailed(self._no_api("is not there"))
            if reply.status != http.client.OK:
                raise self._failed(reply.status, told, reply.getheader("retry-after"))
            yield reply

    def _failed(self, status: int, told: object, retry_after: str | None = None) -> Refused | CallFailed:
        """Return what a server's own word of a failure is, with what to do."""
        error = told.get("error") if isinstance(told, dict) else None
        message, code = (error.get("message"), error.get("code")) if isinstance(error, dict) else (error, None)
        said = printable(str(message or "")[:_MAX_SAID]).strip()
        says = f" It says: {said.rstrip('.')}." if said else ""
        again = f"in {retry_after} s" if retry_after is not None and retry_after.isdecimal() else "in a moment"
        if status == http.client.UNAUTHORIZED:
            if self.key is None:
                why, do = "takes API keys only", "Put yours into a file, and name it with --key-file."
            else:
                why = "does not know this API key"
                do = "Compare it with the key that you were given: letters may be missing, or it was removed there."
            return Refused(f"{self.address} {why}.{says} {do}")
        if code in ("host_not_allowed", "origin_not_allowed"):
            return Refused(f"{self.address} does not answer to that name.{says} Give its number, as 127.0.0.1.")
        if status == http.client.FORBIDDEN:
            return Refused(f"{self.address} does not let this API key do that.{says} Use another key or model.")
        match code:
            case "context_length_exceeded":
                what, do = (
                    "the conversation is longer than the model reads",
                    "Begin a new one, or ask for fewer tokens.",
                )
            case "model_not_found":
                what, do = "the server does not have this model", "Choose another with --model."
            case "insufficient_quota":
                what, do = "what this API key may use is spent", "Wait until it is given more, or use another key."
            case "no_path":
                what, do = "members of the run cannot compute the answer just now", f"Try again {again}."
            case _:
                what, do = _of_status(status, again)
        return CallFailed(f"{what}: {self.address}.{says} {do}")

    def _silent(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{self.address} said nothing for {SILENT_S / 60:.0f} minutes. See whether it still runs."
        )


def _of_status(status: int, again: str) -> tuple[str, str]:
    if status == http.client.OK:
        return "the server failed in the middle of its answer", "Ask again."
    if status == http.client.NOT_FOUND:
        return "the server knows no such address or model", "See whether its address ends in /v1; or choose a model."
    if status == http.client.TOO_MANY_REQUESTS:
        return "the server takes no more requests for the moment", f"Try again {again}."
    if status == http.client.SERVICE_UNAVAILABLE:
        return "the server cannot answer now", f"Try again {again}."
    if status >= http.client.INTERNAL_SERVER_ERROR:
        return f"the server failed ({status})", "Ask again; if it fails again, tell whoever runs it."
    if status < http.client.BAD_REQUEST:
        return f"the server sends elsewhere ({status})", "Give the address that it sends to."
    return f"the server refuses the request ({status})", "Change what it names."


def _events(reply: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield the data of server-sent events. Comments, as what keeps a line open, are passed over."""
    held: list[bytes] = []
    while line := reply.readline(MAX_LINE):
        if not line.endswith(b"\n") and len(line) == MAX_LINE:
            raise PeerError("the server sends a line without an end. Ask again.")
        line = line.rstrip(b"\r\n")
        if line.startswith(b"data:"):
            held.append(line[5:].removeprefix(b" "))
        elif not line and held:
            yield b"\n".join(held)
            held = []
    if held:
        yield b"\n".join(held)


def _told(reply: http.client.HTTPResponse) -> object:
    try:
        return json_of(reply.read(MAX_BODY))
    except ValueError:
        return None


def _text(told: object) -> str | None:
    return told if isinstance(told, str) else None
