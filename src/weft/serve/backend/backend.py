"""The application in front of another server: who may ask and how much is decided here, what is asked is passed on.

    request ──key, limits──► the other server ──► its answer, or its events one by one ──► the client

Requests go on as they are, but for the model's name, and `include_usage`, by which tokens are counted. What fails there
is told here as any failure is: a stream whose server dies ends with an error event, never without a word.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from weft.clock import Clock, SystemClock
from weft.engine.engine import Totals
from weft.engine.text import Full
from weft.errors import CallFailed, PeerError, Refused, Unreachable
from weft.serve.app import DRAWN_S, Front, Health, Work, tell_health
from weft.serve.backend.client import BrokeOff, Reply, Site, Unreached, ask
from weft.serve.failures import Fault, unavailable
from weft.serve.keys import Asker, Keys, Limits, Visit
from weft.serve.metrics import Metrics
from weft.serve.schemas import MAX_MESSAGES, MAX_TOOLS, Asked, read
from weft.serve.stream import Wire

Tree = dict[str, Any]
MAX_UNDER_WAY = 256  # requests: each has a connection, and the other server queues what it cannot begin
BYTES_A_TOKEN = 4  # of a prompt or a whole answer, where the other server does not count
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize")
_NAMED = "/v1/responses"
_WITH_USAGE = ("/v1/chat/completions", "/v1/completions")
_CHARGED = (*_WITH_USAGE, _NAMED, "/v1/embeddings")
_ENDS = ("response.completed", "response.incomplete", "response.failed")
_MAX_DEPTH = 8  # of an answer, as far as its text is looked for
_BROKE_OFF = "The answer broke off: the server behind this one ended it before its end. Ask again."


class Passed(Asked, frozen=True, kw_only=True):
    """What of a request is looked at here."""

    model: str | None = None
    stream: bool | None = None
    messages: Annotated[list[Any], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Any], Meta(max_length=MAX_TOOLS)] | None = None
    stream_options: dict[str, Any] | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None

    @property
    def has_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.get("include_usage"))


@dataclass
class Under:
    """What is under way there, as far as it is measured."""

    totals: Totals = field(default_factory=Totals)


@dataclass(frozen=True)
class Model:
    """A model of the other server.

    Args:
        id: what requests call it here.
        theirs: what it is called there.
        about: what the other server tells of it.
    """

    id: str
    theirs: str
    about: Mapping[str, Any] = field(default_factory=dict)
    engine: Under = field(default_factory=Under)

    def tree(self) -> Tree:
        kept = {name: self.about[name] for name in ("created", "owned_by", "max_model_len") if name in self.about}
        return {"created": 0, "owned_by": "backend"} | kept | {"id": self.id, "object": "model"}


async def models_of(site: Site) -> list[Model]:
    """Return the models of another server.

    Raises:
        Unreachable: nobody is there.
        Refused: it does not take the key.
        CallFailed, PeerError: it does not tell.
    """
    try:
        async with asyncio.timeout(DRAWN_S), ask(site, "GET", "/v1/models") as reply:
            if reply.status in (401, 403):
                key = "does not take the key of --backend-key" if site.key else "wants an API key: give --backend-key"
                raise Refused(f"{site.address} {key}.")
            if reply.status != 200:
                raise CallFailed(
                    f"{site.address}/models answers with {reply.status}. See whether that server speaks the OpenAI "
                    "API, and whether its address ends in /v1."
                )
            listed = msgspec.json.decode(await reply.body())["data"]
            return [Model(str(each["id"]), str(each["id"]), each) for each in listed]
    except (Unreached, TimeoutError) as error:
        raise Unreachable(
            f"nobody answers at {site.address}: {error or 'it says nothing'}. Start that server first, or give its "
            "address with --backend."
        ) from None
    except (BrokeOff, msgspec.DecodeError, KeyError, TypeError):
        raise PeerError(f"{site.address}/models answers with something else than a list of models.") from None


def app(
    site: Site,
    models: Mapping[str, Model],
    keys: Keys | None = None,
    limits: Limits | None = None,
    *,
    clock: Clock | None = None,
    page: Sequence[BaseRoute] = (),
) -> "tuple[Starlette, Backend]":
    """Return the application, and what ends its answers; arguments are those of `weft.serve.app`."""
    backend = Backend(site, models, keys, limits or Limits(), clock or SystemClock())
    return backend.app(page), backend


class Backend:
    """Passes requests on to another server."""

    def __init__(
        self, site: Site, models: Mapping[str, Model], keys: Keys | None, limits: Limits, clock: Clock
    ) -> None:
        self._site, self._models, self._clock, self._limits = site, models, clock, limits
        self._metrics = Metrics(models, clock)
        self._front = Front(keys, limits, clock, self._metrics)
        self._health = Health(self._draw_one, clock)
        self._under_way: set[Relay] = set()

    def app(self, page: Sequence[BaseRoute]) -> Starlette:
        posts = {path: self._passing(path) for path in PATHS}
        return self._front.app(posts, {"/v1/models": self._list}, self._one, self._tell_health, page)

    def close(self) -> None:
        """End all answers, from any thread: those that are under way end with an error."""
        for relay in tuple(self._under_way):
            relay.end()

    def _passing(self, path: str) -> Work:
        async def work(wire: Wire, asker: Asker, body: bytes) -> None:
            request = read(body, Passed)
            model = self._front.pick(self._models, asker, request.model)
            with self._front.admission.admit(asker) as visit:
                wire.headers |= visit.headers
                if len(self._under_way) >= visit.asker.room * MAX_UNDER_WAY:
                    raise Full(1.0)
                await wire.while_there(self._relayed(wire, Relay(self._site, path, request, model, visit), body))

        return work

    async def _relayed(self, wire: Wire, relay: "Relay", body: bytes) -> None:
        self._under_way.add(relay)
        relay.model.engine.totals.num_running += 1
        times = _Times(self._metrics, relay, self._clock)
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(
                    self._limits.max_wait_s if relay.request.stream else self._limits.max_time_s
                ):
                    reply = await relay.begin(stack, body)
                    if not relay.request.stream:
                        tree = await relay.whole(reply)
                if relay.request.stream:
                    await wire.stream(self._events(relay, reply, times), are_named=relay.path == _NAMED)
                else:
                    await wire.tell_tree(tree)
            times.reason = relay.reason or "stop"
        except asyncio.CancelledError:
            times.reason = "abort"
            raise
        except TimeoutError:
            raise unavailable("No answer came in time from the server behind this one.", "overloaded", 5.0) from None
        except (Unreached, BrokeOff) as error:
            is_there = isinstance(error, BrokeOff)
            logging.getLogger("weft.serve").error(
                "the backend %s: %s", self._site.address, "an answer broke off" if is_there else error
            )
            if is_there:
                raise unavailable(_BROKE_OFF, "backend_broke_off") from None
            raise unavailable("The server behind this one does not answer. Ask again.", "backend_unreachable") from None
        finally:
            self._under_way.discard(relay)
            relay.model.engine.totals.num_running -= 1
            relay.settle(len(body))
            times.end()

    async def _events(self, relay: "Relay", reply: Reply, times: "_Times") -> AsyncIterator[Tree]:
        """Yield the events, each in its time."""
        events = relay.events(reply)
        began_s = self._clock.now()
        try:
            while True:
                limit_s = self._limits.max_wait_s if times.first_s is None else self._limits.max_time_s
                async with asyncio.timeout(max(0.0, began_s + limit_s - self._clock.now())):
                    tree = await anext(events, None)
                if tree is None:
                    return
                times.came()
                yield tree
        finally:
            await events.aclose()

    # --- about this server ---

    async def _list(self, wire: Wire, asker: Asker, _body: bytes) -> None:
        seen = [model.tree() for model in self._models.values() if self._front.admission.may_see(asker, model.id)]
        await wire.tell_tree({"object": "list", "data": seen})

    async def _one(self, id: str, wire: Wire, asker: Asker) -> None:
        await wire.tell_tree(self._front.pick(self._models, asker, id).tree())

    async def _tell_health(self, _request: Request) -> Response:
        name = next(iter(self._models), "")
        return tell_health({name: await self._health.said()} if name else {})

    async def _draw_one(self) -> str | None:
        """Have a token drawn of the first model; return what is wrong."""
        model = next(iter(self._models.values()))
        asks = {"model": model.theirs, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        body = msgspec.json.encode(asks)
        try:
            async with asyncio.timeout(DRAWN_S), ask(self._site, "POST", "/v1/chat/completions", body) as reply:
                return None if reply.status == 200 else f"the server behind answers with {reply.status}"
        except TimeoutError:
            return f"no token came within {DRAWN_S:g} s"
        except (Unreached, BrokeOff):
            return "the server behind does not answer"


class Relay:
    """One request, passed on.

    Args:
        path: of this server.
    """

    def __init__(self, site: Site, path: str, request: Passed, model: Model, visit: Visit) -> None:
        self.path, self.request, self.model = path, request, model
        self._site, self._visit = site, visit
        self._ending = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.reason: str | None = None
        self.num_pieces = 0  # of text, or tokens of a whole answer by its length
        self._is_taken = False  # the other server has it, and has not refused it
        self.usage: tuple[int, int] | None = None  # tokens read and drawn, as the other server counts

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)

    async def begin(self, stack: AsyncExitStack, body: bytes) -> Reply:
        """Pass the request on, and return the answer that begins.

        Raises:
            Fault: the other server refuses it.
        """
        tree = msgspec.json.decode(body)
        tree["model"] = self.model.theirs
        if self.request.stream and self.path in _WITH_USAGE:
            tree["stream_options"] = {**(self.request.stream_options or {}), "include_usage": True}
        self._is_taken = True
        try:
            reply = await stack.enter_async_context(ask(self._site, "POST", self.path, msgspec.json.encode(tree)))
        except Unreached:
            self._is_taken = False
            raise
        if reply.status != 200:
            self._is_taken = False
            raise _fault(reply, await reply.body())
        return reply

    async def whole(self, reply: Reply) -> Tree:
        """Return the whole answer."""
        tree = _decoded(await reply.body())
        self._take(tree)
        self.num_pieces = -(-sum(_texts_nbytes(each) for each in (*_choices(tree), *_items(tree))) // BYTES_A_TOKEN)
        return tree

    async def events(self, reply: Reply) -> AsyncGenerator[Tree, None]:
        """Yield the events of the answer, but for the last word of a stream that needs none.

        Raises:
            Fault: one of them is a failure.
            BrokeOff: they end before the end.
        """
        open_texts, is_over = {0}, False
        events = reply.events()
        while (data := await self._next(events)) is not None:
            if data.strip() == b"[DONE]":
                return
            tree = _decoded(data)
            if tree.get("error") or tree.get("object") == "error" or tree.get("type") == "error":
                raise _fault_of(500, tree, {})
            self._take(tree)
            self.num_pieces += sum(_texts_nbytes(each) > 0 for each in _choices(tree)) + _is_delta(tree)
            for choice in _choices(tree):
                (open_texts.discard if choice.get("finish_reason") else open_texts.add)(choice.get("index", 0))
            is_over |= tree.get("type") in _ENDS
            is_count = not _choices(tree) and self.path in _WITH_USAGE and tree.get("usage") is not None
            if is_count and not self.request.has_usage:
                continue
            if not self.request.has_usage and self.path in _WITH_USAGE:
                tree.pop("usage", None)
            yield tree
        if not is_over and (self.path == _NAMED or open_texts):
            raise BrokeOff

    async def _next(self, events: AsyncIterator[bytes]) -> bytes | None:
        """Return what comes next, unless this server ends meanwhile."""
        coming = asyncio.ensure_future(anext(events, None))
        ending = asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait((coming, ending), return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                raise unavailable("This server is ending; the answer ends here. Ask again.", "unloaded")
            return coming.result()
        finally:
            for each in (coming, ending):
                each.cancel()
            await asyncio.gather(coming, ending, return_exceptions=True)

    def _take(self, tree: Tree) -> None:
        """Note what was used and why it ended, and call the model by its name here."""
        for choice in _choices(tree):
            self.reason = choice.get("finish_reason") or self.reason
        inner = tree.get("response")
        for each in (tree, inner if isinstance(inner, dict) else {}):
            if "model" in each:
                each["model"] = self.model.id
            if self.path == _NAMED and each.get("status") == "incomplete":
                self.reason = "length"
            if isinstance(usage := each.get("usage"), dict):
                num_read = _count(usage, "prompt_tokens", "input_tokens")
                self.usage = (num_read, _count(usage, "completion_tokens", "output_tokens"))

    def settle(self, num_bytes: int) -> None:
        """Charge what was used: as the other server counts, else by the pieces that came and the question's length. The
        question is charged once the other server has it, whoever hangs up then."""
        if self.usage is None and self._is_taken and self.path in _CHARGED:
            self.usage = (num_bytes // BYTES_A_TOKEN, self.num_pieces)
        if self.usage is not None:
            self._visit.charge(sum(self.usage))


class _Times:
    """When an answer's pieces came, for figures."""

    def __init__(self, metrics: Metrics, relay: Relay, clock: Clock) -> None:
        self._metrics, self._relay, self._clock = metrics, relay, clock
        self._asked_s = clock.now()
        self._num_told = 0  # tokens, by pieces
        self.first_s: float | None = None
        self._last_s: float | None = None
        self.reason = "error"

    def came(self) -> None:
        now, model = self._clock.now(), self._relay.model.id
        num = self._relay.num_pieces - self._num_told
        self._num_told += num
        if self._last_s is None:
            self.first_s = now
            self._metrics.drawn(model, first_s=now - self._asked_s, num_tokens=num)
        else:
            self._metrics.drawn(model, gap_s=now - self._last_s, num_tokens=num)
        self._last_s = now

    def end(self) -> None:
        """Tell what it came to."""
        relay, request = self._relay, self._relay.request
        num_read, num_drawn = relay.usage or (0, 0)
        most = request.max_completion_tokens or request.max_tokens or 0
        self._metrics.asked(relay.model.id, num_read, request.n or 1, most)
        self._metrics.drawn(relay.model.id, num_tokens=max(0, num_drawn - self._num_told))  # a piece may be several
        times = None
        if self.first_s is not None and self._last_s is not None:
            times = (self._asked_s, self._asked_s, self.first_s, self._last_s)
        self._metrics.ended(relay.model.id, self.reason, times, num_drawn)


def _choices(tree: Tree) -> list[Tree]:
    found = tree.get("choices")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _items(tree: Tree) -> list[Tree]:
    """Return the items of a whole response."""
    found = tree.get("output")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _is_delta(tree: Tree) -> bool:
    kind = tree.get("type")
    return isinstance(kind, str) and kind.endswith(".delta")


_DRAWN = (
    "text",
    "content",
    "reasoning",
    "reasoning_content",
    "refusal",
    "arguments",
)  # what stands under these was drawn
_HOLDERS = ("message", "delta", "content", "tool_calls", "function")


def _texts_nbytes(tree: Any, depth: int = 0) -> int:
    """Return how much text a choice or an item has, in messages, parts and calls."""
    if isinstance(tree, list):
        return sum(_texts_nbytes(each, depth + 1) for each in tree)
    if not isinstance(tree, dict) or depth > _MAX_DEPTH:
        return 0
    own = sum(len(text.encode()) for name in _DRAWN if isinstance(text := tree.get(name), str))
    return own + sum(_texts_nbytes(tree.get(name), depth + 1) for name in _HOLDERS)


def _count(usage: Mapping[str, Any], *names: str) -> int:
    return next((found for name in names if isinstance(found := usage.get(name), int) and found >= 0), 0)


def _decoded(data: bytes) -> Tree:
    try:
        tree = msgspec.json.decode(data)
    except msgspec.DecodeError:
        raise BrokeOff from None
    if not isinstance(tree, dict):
        raise BrokeOff
    return tree


def _fault(reply: Reply, body: bytes) -> Fault:
    """Return what the client is told where the other server refuses."""
    if reply.status in (401, 403):
        message = "The server behind this one does not take its key. Tell whoever runs this server."
        return Fault(503, message, "service_unavailable", code="backend_refused", headers={"x-should-retry": "false"})
    if reply.status < 400:
        return unavailable(
            "The server behind this one sends elsewhere. Tell whoever runs this server.", "backend_failed"
        )
    try:
        tree = _decoded(body)
    except BrokeOff:
        tree = {}
    kept = {name: value for name, value in reply.headers.items() if name in ("retry-after", "retry-after-ms")}
    return _fault_of(reply.status, tree, kept)


def _fault_of(status: int, tree: Tree, headers: Mapping[str, str]) -> Fault:
    """Return a failure in the other server's words, as far as it has some."""
    told = tree.get("error", tree)
    told = told if isinstance(told, dict) else {"message": told}

    def text(name: str) -> str | None:
        value = told.get(name)
        return value[:1000] if isinstance(value, str) else None

    kind = "invalid_request_error" if status < 500 else "server_error"
    message = text("message") or f"The server behind this one failed ({status})."
    return Fault(status, message, text("type") or kind, text("param"), text("code"), headers)
