"""What a browser asks of `weft watch`: the page, its assets, the history, and what comes.

    /                the page            /static/...    its assets
    /api/history     everything so far   /api/stream    server-sent events: what comes after a cursor
    /metrics         for Prometheus      /healthz       ok

It answers GET alone: there is nothing to control. Who is not on this machine needs a token, once in the address
(`?token=`), then as a cookie. No asset is from another host, and the page may load none.
"""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.resources import files
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from weft.dashboard.page.feed import Feed
from weft.dashboard.page.metrics import CONTENT_TYPE, metrics_of

COOKIE = "weft-token"
STILL_S = 15.0  # a comment is sent where nothing comes, so that proxies do not take the stream for dead
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_NO_TOKEN = "This page needs the address that weft watch printed, with its token.\n"


def make_app(feed: Feed, token: str | None = None) -> Starlette:
    """Return the application.

    Args:
        token: what a browser must bring; None: nothing.
    """
    static = Path(str(files("weft") / "dashboard" / "static"))

    async def page(_request: Request) -> Response:
        return FileResponse(static / "index.html")

    async def history(_request: Request) -> Response:
        return JSONResponse(feed.whole())

    async def stream(request: Request) -> Response:
        try:
            cursor = int(request.headers.get("last-event-id") or request.query_params.get("after", "0"))
        except ValueError:
            return PlainTextResponse("after: a whole number is needed.\n", 400)
        return StreamingResponse(_pieces(feed, cursor), media_type="text/event-stream")

    async def metrics(_request: Request) -> Response:
        return Response(metrics_of(feed.history), media_type=CONTENT_TYPE)

    async def health(_request: Request) -> Response:
        return PlainTextResponse("ok\n")

    return Starlette(
        routes=[
            Route("/", page),
            Route("/api/history", history),
            Route("/api/stream", stream),
            Route("/metrics", metrics),
            Route("/healthz", health),
            Mount("/static", StaticFiles(directory=static)),
        ],
        middleware=[
            Middleware(BaseHTTPMiddleware, dispatch=_guard(token)),
            Middleware(GZipMiddleware, minimum_size=4096, compresslevel=1),
        ],
    )


def _guard(token: str | None) -> Callable[[Request, Callable[[Request], Awaitable[Response]]], Awaitable[Response]]:
    """Return what lets requests through that bring the token, and gives the answers their headers."""

    def fits(given: str | None) -> bool:
        return token is None or (given is not None and hmac.compare_digest(given.encode(), token.encode()))

    async def dispatch(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        given = request.query_params.get("token")
        if token is not None and given is not None and fits(given):
            answer: Response = RedirectResponse(request.url.path, 303)  # without it, which nobody should see or copy
            answer.set_cookie(COOKIE, token, httponly=True, samesite="strict")
        elif fits(request.cookies.get(COOKIE)) or request.url.path == "/healthz" or fits(_bearer(request)):
            answer = await go_on(request)
        else:
            answer = PlainTextResponse(_NO_TOKEN, 401)
        answer.headers.update(_HEADERS)
        return answer

    return dispatch


def _bearer(request: Request) -> str | None:
    """Return the token of a program, which keeps no cookies."""
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    return given if kind.lower() == "bearer" else None


async def _pieces(feed: Feed, cursor: int) -> AsyncIterator[str]:
    yield "retry: 2000\n\n"
    while True:
        try:
            async with asyncio.timeout(STILL_S):
                has_more = await feed.wait(cursor)
        except TimeoutError:
            yield ": still here\n\n"
            continue
        if not has_more:
            yield "event: end\ndata: {}\n\n"
            return
        piece = feed.since(cursor)
        cursor = piece["cursor"]
        yield f"event: more\nid: {cursor}\ndata: {json.dumps(piece, allow_nan=False)}\n\n"
