"""The page of `weft watch`: what a browser asks for, and what it is told as it happens.

    /                the page            /static/...    its assets
    /api/history     everything so far   /api/stream    server-sent events: what comes after a cursor
    /metrics         for Prometheus      /healthz       ok

    sources ──take──► Feed ──whole, since──► any number of pages

A page asks for what came after its cursor, and waits where there is nothing. A slow page gets larger pieces, and holds
nobody up: nothing is queued for it.

It answers GET alone: there is nothing to control. Who is not on this machine needs a token, once in the address
(`?token=`), then as a cookie. No asset is from another host, and the page may load none.
"""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette import responses
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.routing import Route

from weft.clock import Clock, SystemClock
from weft.dashboard.audits import OUTCOMES, WHATS
from weft.dashboard.history import History, Now
from weft.dashboard.words import SEVERITIES
from weft.events import Entry
from weft.ids import PeerId
from weft.observe.redact import public_entry
from weft.web.web import HEADERS, page_routes

TOGETHER_S = 0.25  # what comes within so long is one piece
COOKIE = "weft-token"
STILL_S = 15.0  # a comment is sent where nothing comes, so that proxies do not take the stream for dead
_NO_TOKEN = "This page needs the address that weft watch printed, with its token.\n"


class Feed:
    """Of one run.

    Args:
        clock: says how long nothing was told; None: the system's.
        is_public: leave out what strangers should not see.
    """

    def __init__(self, clock: Clock | None = None, *, is_public: bool = False) -> None:
        self._clock = clock or SystemClock()
        self.history = History()
        self.is_public = is_public
        self.is_live = True  # more may come
        self._news = asyncio.Event()

    def take(self, entry: Entry) -> None:
        """Take an entry, on the event loop's thread."""
        told = public_entry(entry) if self.is_public else entry
        if told is not None:
            self.history.take(told)
            self._wake()

    def finish(self) -> None:
        """Nothing more will come."""
        self.is_live = False
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def whole(self) -> dict[str, Any]:
        return self._told(self.history.whole())

    def since(self, cursor: int) -> dict[str, Any]:
        return self._told(self.history.since(cursor))

    def _told(self, tree: dict[str, Any]) -> dict[str, Any]:
        heard_at = self.history.view.now
        silent_s = max(0.0, self._clock.wall() - heard_at) if heard_at else 0.0  # it begins to listen now
        return tree | {"is_live": self.is_live, "is_public": self.is_public, "silent_s": silent_s}

    async def wait(self, cursor: int) -> bool:
        """Wait until there is something after `cursor`, and a little for what comes with it; False: nothing will."""
        while self.history.cursor <= cursor:
            if not self.is_live:
                return False
            await self._news.wait()
        if self.is_live:
            await asyncio.sleep(TOGETHER_S)
        return True


def make_app(feed: Feed, token: str | None = None) -> Starlette:
    """Return the application.

    Args:
        token: what a browser must bring; None: nothing.
    """

    async def history(_request: Request) -> responses.Response:
        return responses.JSONResponse(feed.whole())

    async def stream(request: Request) -> responses.Response:
        try:
            cursor = int(request.headers.get("last-event-id") or request.query_params.get("after", "0"))
        except ValueError:
            return responses.PlainTextResponse("after: a whole number is needed.\n", 400)
        return responses.StreamingResponse(_pieces(feed, cursor), media_type="text/event-stream")

    async def metrics(_request: Request) -> responses.Response:
        return responses.Response(metrics_of(feed.history), media_type=CONTENT_TYPE_LATEST)

    async def health(_request: Request) -> responses.Response:
        return responses.PlainTextResponse("ok\n")

    return Starlette(
        routes=[
            *page_routes("dashboard"),
            Route("/api/history", history),
            Route("/api/stream", stream),
            Route("/metrics", metrics),
            Route("/healthz", health),
        ],
        middleware=[
            Middleware(BaseHTTPMiddleware, dispatch=_guard(token)),
            Middleware(GZipMiddleware, minimum_size=4096, compresslevel=1),
        ],
    )


def _guard(
    token: str | None,
) -> Callable[[Request, Callable[[Request], Awaitable[responses.Response]]], Awaitable[responses.Response]]:
    """Return what lets requests through that bring the token, and gives the answers their headers."""

    def fits(given: str | None) -> bool:
        return token is None or (given is not None and hmac.compare_digest(given.encode(), token.encode()))

    async def dispatch(
        request: Request, go_on: Callable[[Request], Awaitable[responses.Response]]
    ) -> responses.Response:
        given = request.query_params.get("token")
        if token is not None and given is not None and fits(given):
            answer: responses.Response = responses.RedirectResponse(
                request.url.path, 303
            )  # without it, which nobody should see or copy
            answer.set_cookie(COOKIE, token, httponly=True, samesite="strict")
        elif fits(request.cookies.get(COOKIE)) or request.url.path == "/healthz" or fits(_bearer(request)):
            answer = await go_on(request)
        else:
            answer = responses.PlainTextResponse(_NO_TOKEN, 401)
        answer.headers.update(HEADERS)
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


# --- for Prometheus ---


def metrics_of(history: History) -> bytes:
    """Return a history's figures in Prometheus' text format.

    Names begin with weft_ and end in their unit. A peer is a label, by name and the first digits of its key; a stage is
    one by its number from 1.
    """
    registry = CollectorRegistry()
    registry.register(_Collector(history))
    return generate_latest(registry)


class _Collector:
    def __init__(self, history: History) -> None:
        self._history = history

    def collect(self) -> Iterator[Metric]:
        now = self._history.now
        yield CounterMetricFamily("weft_rounds", "Rounds that were committed.", value=now.num_rounds)
        yield CounterMetricFamily("weft_tokens", "Tokens that rounds have counted.", value=now.committed_tokens)
        if now.total_tokens is not None:
            yield GaugeMetricFamily("weft_wanted_tokens", "Tokens that the run is to count.", value=now.total_tokens)
        yield CounterMetricFamily(
            "weft_moved_bytes",
            "Sent and received by the peers that are heard, for their rounds.",
            value=now.moved_nbytes,
        )
        yield CounterMetricFamily(
            "weft_ring_bytes", "What ring data-parallel training would have moved for the same.", value=now.ring_nbytes
        )
        if now.loss is not None:
            yield GaugeMetricFamily(
                "weft_loss_nats_per_token", "Mean loss of the last round's training steps.", value=now.loss
            )
        if now.heldout is not None:
            yield GaugeMetricFamily("weft_heldout_loss_nats_per_token", "Loss on held-out text.", value=now.heldout)
        events = CounterMetricFamily("weft_events", "Events by severity.", labels=["severity"])
        for name, count in zip(SEVERITIES, now.num_events, strict=True):
            events.add_metric([name], count)
        yield events
        yield GaugeMetricFamily(
            "weft_watching", "Linked to peers, but taking no part: they watch, or ask to join.", value=now.num_watching
        )
        labels = ["peer", "name"]
        up = GaugeMetricFamily("weft_peer_up", "1 while a peer takes part, as far as is known.", labels=labels)
        speed = GaugeMetricFamily("weft_peer_tokens_per_second", "Training speed.", labels=labels)
        at_round = GaugeMetricFamily("weft_peer_round", "The last round that a peer has applied.", labels=labels)
        counted = CounterMetricFamily("weft_peer_tokens", "Tokens of a peer that rounds counted.", labels=labels)
        missed = CounterMetricFamily("weft_peer_missed_rounds", "Rounds without its contribution.", labels=labels)
        moved = CounterMetricFamily("weft_peer_bytes", "Sent and received by a peer.", labels=[*labels, "direction"])
        for peer in now.peers:
            of = [peer.key[:16], peer.name]
            up.add_metric(of, float(peer.is_here))
            speed.add_metric(of, peer.tokens_per_s)
            counted.add_metric(of, peer.counted_tokens)
            if peer.round is not None:
                at_round.add_metric(of, peer.round)
            if peer.is_heard:
                missed.add_metric(of, peer.num_missed)
                moved.add_metric([*of, "sent"], peer.sent_nbytes)
                moved.add_metric([*of, "received"], peer.received_nbytes)
        yield from (up, speed, at_round, counted, missed, moved)
        if now.stages:
            yield from _of_stages(now)
        rate = self._history.run.audit_rate
        if rate is not None:
            yield GaugeMetricFamily("weft_audit_rate", "Chance that a contribution is audited.", value=rate)
        if rate is not None or now.audits.num:
            yield from _of_audits(now)


def _of_audits(now: Now) -> Iterator[Metric]:
    audits = now.audits
    yield CounterMetricFamily("weft_contributions", "Contributions that rounds counted.", value=audits.num_counted)
    yield CounterMetricFamily(
        "weft_audited_contributions", "Of these, whose training steps others looked at.", value=audits.num_audited
    )
    yield CounterMetricFamily("weft_audited_steps", "Training steps that were done again.", value=audits.num_steps)
    found = CounterMetricFamily("weft_audits", "Audits by what was done again and the result.", labels=["of", "result"])
    for of in WHATS:
        for result in OUTCOMES:
            found.add_metric([of, result], audits.num_by.get((of, result), 0))
    yield found
    each = CounterMetricFamily("weft_peer_audits", "Audits of a peer by result.", labels=["peer", "name", "result"])
    for peer in now.peers:
        if (of_it := audits.of.get(PeerId(peer.key))) is not None:
            for result, num in zip(OUTCOMES, of_it.nums, strict=True):
                each.add_metric([peer.key[:16], peer.name, result], num)
    yield each


def _of_stages(now: Now) -> Iterator[Metric]:
    labels = ["stage"]
    members = GaugeMetricFamily("weft_stage_peers", "Peers that compute a stage.", labels=labels)
    speed = GaugeMetricFamily("weft_stage_samples_per_second", "Their rate, if they never waited.", labels=labels)
    waiting = GaugeMetricFamily("weft_stage_waiting_micro_batches", "Micro-batches that wait there.", labels=labels)
    for number, stage in enumerate(now.stages, 1):
        members.add_metric([str(number)], len(stage.members))
        speed.add_metric([str(number)], stage.rate)
        waiting.add_metric([str(number)], stage.waiting)
    yield from (members, speed, waiting)
