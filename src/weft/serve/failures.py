"""Errors as programs of this API know them: a status, and a body with message, type, parameter and code.

    {"error": {"message": "...", "type": "invalid_request_error", "param": "messages[0].content", "code": null}}

In a stream that has begun the same body is an event. A client takes a stream that merely ends for a success.
"""

from collections.abc import Mapping
from math import ceil
from typing import Any

from weft.engine.text import Full, Unread
from weft.errors import ConfigError, WeftError
from weft.texts.asking.no_path import NoPath


class Fault(WeftError):
    """A request that is not answered.

    Args:
        status: of HTTP.
        kind: the error's `type`.
        param: which field of the request is meant.
        code: for programs.
        headers: beside the body: when to ask again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind, self.param, self.code = kind, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def wrong(message: str, param: str | None = None, code: str | None = None) -> Fault:
    """Return what is said of a request that cannot be answered as it is."""
    return Fault(400, message, param=param, code=code)


def no_model(name: str, known: str) -> Fault:
    message = f"The model {name[:100]!r} does not exist here. Ask for one of these: {known}."
    return Fault(404, message, param="model", code="model_not_found")


def not_built(what: str) -> Fault:
    return Fault(404, f"{what} is not served here.", code="not_found")


def no_key(message: str) -> Fault:
    return Fault(401, message, "authentication_error", code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def too_many(message: str, retry_s: float | None, headers: Mapping[str, str] | None = None) -> Fault:
    """Return what is said of a request that comes too soon.

    Args:
        retry_s: when to ask again, in seconds; None: the same request is never answered.
    """
    told = dict(headers or {}) | ({"x-should-retry": "false"} if retry_s is None else retry_after(retry_s))
    return Fault(429, message, "rate_limit_error", code="rate_limit_exceeded", headers=told)


def no_quota(message: str, headers: Mapping[str, str]) -> Fault:
    told = {**headers, "x-should-retry": "false"}
    return Fault(429, message, "insufficient_quota", code="insufficient_quota", headers=told)


def retry_after(retry_s: float) -> dict[str, str]:
    return {"retry-after": str(max(1, ceil(retry_s))), "retry-after-ms": str(max(1, ceil(retry_s * 1000)))}


def unavailable(message: str, code: str, retry_s: float = 1.0) -> Fault:
    return Fault(503, message, "service_unavailable", code=code, headers=retry_after(retry_s))


def fault_of(error: Exception) -> Fault:
    """Return what a client is told of an error. What is none of weft's own may hold anything, so it is not shown."""
    match error:
        case Fault():
            return error
        case Full(retry_s=retry_s):
            return too_many(str(error), retry_s)
        case Unread():
            return unavailable(str(error), "read_too_slowly")
        case NoPath(retry_s=retry_s):
            return unavailable(str(error), "no_path", retry_s)
        case ConfigError() if "maximum context length" in str(error):
            return wrong(str(error), "messages", "context_length_exceeded")
        case ConfigError():
            return wrong(str(error))
        case RecursionError():
            return wrong("The request is nested too deeply.")
        case WeftError():
            return Fault(500, str(error), "server_error", code="server_error")
        case _:
            message = f"The server failed ({type(error).__name__}). Ask again; its log says more."
            return Fault(500, message, "server_error", code="server_error")
