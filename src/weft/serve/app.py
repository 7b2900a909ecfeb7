"""The server's application: what may be asked for, who is let in, and how every failure is told.

    POST /v1/chat/completions   /v1/completions   /v1/responses   /v1/embeddings   /tokenize   /detokenize
    GET  /v1/models   /v1/models/{id}   /health   /metrics   /version

    app(models, keys, limits)  ──uvicorn──►  clients

Nothing that was asked or answered is logged: a failure is told by its kind and place.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from ipaddress import ip_address
from pathlib import PurePath
from traceback import extract_tb
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.responses import Response as Plain
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import weft
from weft.clock import Clock, SystemClock
from weft.engine.draw import Drawing
from weft.engine.text import Wanted
from weft.errors import DataError
from weft.rng import fresh_secret
from weft.serve import chat, completions, embeddings, responses
from weft.serve.failures import Fault, fault_of, no_model, not_built, wrong
from weft.serve.generation import Model, Serving
from weft.serve.keys import Admission, Asker, Keys, Limits, Visit
from weft.serve.metrics import CONTENT_TYPE_LATEST, Metrics
from weft.serve.schemas import (
    Asked,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    ResponseRequest,
    TokenizeRequest,
    read,
)
from weft.serve.stream import Answer, Gone, Wire

HEALTHY_S = 10.0  # a token that was drawn so lately need not be drawn again
DRAWN_S = 10.0  # a model from which none comes for so long is not healthy
BODY_S = 30.0  # a body that has not come by then is not waited for
_ID = "weft.request_id"  # in a request's scope
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")

R = TypeVar("R", bound=Asked)
M = TypeVar("M")
Work = Callable[[Wire, Asker, bytes], Awaitable[None]]


def app(
    models: Mapping[str, Model],
    keys: Keys | None = None,
    limits: Limits | None = None,
    *,
    clock: Clock | None = None,
    metrics: Metrics | None = None,
    page: Sequence[BaseRoute] = (),
) -> Starlette:
    """Return the application.

    Args:
        models: by the id that a request names; looked up anew each time, so another edition may take an id over.
        keys: who may ask; None: whoever reaches this server, which then should listen on this machine alone.
        limits: None: the usual ones.
        metrics: which engines tell their steps already (`metrics.Metrics.step`); None: new ones.
        page: more routes, such as a chat page's.
    """
    return _Server(models, keys, limits or Limits(), clock or SystemClock(), metrics or Metrics(models, clock)).app(
        page
    )


class Front:
    """Who is let in, and how every failure is told, whatever answers."""

    def __init__(self, keys: Keys | None, limits: Limits, clock: Clock, metrics: Metrics) -> None:
        self.limits, self.clock, self.metrics = limits, clock, metrics
        self._has_keys = keys is not None
        self.admission = Admission(keys, limits, clock)

    def app(
        self,
        posts: Mapping[str, Work],
        gets: Mapping[str, Work],
        one: Callable[[str, Wire, Asker], Awaitable[None]],
        health: Callable[[Request], Awaitable[Plain]],
        page: Sequence[BaseRoute],
    ) -> Starlette:
        """Return the application.

        Args:
            posts, gets: what answers, by path.
            one: answers for one model, by its id.
            page: more routes.
        """
        gets = {**gets, "/metrics": self._measure}
        routes: list[BaseRoute] = [
            *(Route(path, self._endpoint(work), methods=["POST"]) for path, work in posts.items()),
            *(Route(path, self._endpoint(work), methods=["GET"]) for path, work in gets.items()),
            Route("/v1/models/{id:path}", self._of_one(one), methods=["GET"]),
            Route("/health", health, methods=["GET"]),
            Route("/version", _version, methods=["GET"]),
            *page,
        ]
        return _Application(routes=routes, exception_handlers={HTTPException: _not_here})

    def _endpoint(self, work: Work) -> ASGIApp:
        """Return what reads a request, lets `work` answer it, and tells what fails."""

        async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
            headers = Headers(scope=scope)
            wire = Wire(receive, send, self.limits, {}, self._note)
            try:
                asker = self._asker(scope, headers)
                _refuse_packed(headers)
                length = headers.get("content-length", "0")
                if length.isdecimal() and int(length) > self.limits.max_body_nbytes:
                    raise _too_long(self.limits)
                await work(wire, asker, await _in_time(wire.body()))
            except Gone:
                return
            except Exception as error:
                _log(scope[_ID], error)
                try:
                    await wire.fail(error)
                except Gone:
                    return

        return _Endpoint(endpoint)

    def _of_one(self, one: Callable[[str, Wire, Asker], Awaitable[None]]) -> ASGIApp:
        async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
            async def work(wire: Wire, asker: Asker, _body: bytes) -> None:
                await one(scope["path_params"]["id"], wire, asker)

            await self._endpoint(work)(scope, receive, send)

        return _Endpoint(endpoint)

    def _asker(self, scope: Scope, headers: Headers) -> Asker:
        if not self._has_keys:
            _refuse_pages(headers)
        client = scope.get("client")
        return self.admission.asker(headers.get("authorization"), client[0] if client else "")

    def _note(self, fault: Fault) -> None:
        self.metrics.refused(fault.status)

    async def _measure(self, wire: Wire, _asker: Asker, _body: bytes) -> None:
        await wire.tell(self.metrics.text(), CONTENT_TYPE_LATEST)

    def pick(self, models: Mapping[str, M], asker: Asker, name: str | None) -> M:
        """Return the model that a request names; the first, where it names none.

        Raises:
            Fault: there is none of that name, or the key is for others.
        """
        if name is None and models:
            name = next(iter(models))
        if (model := models.get(name or "")) is None:
            seen = [each for each in models if self.admission.may_see(asker, each)]
            raise no_model(name or "", ", ".join(seen[:8]) or "none is loaded yet")
        self.admission.check_model(asker, name or "")
        return model


class _Server:
    def __init__(
        self, models: Mapping[str, Model], keys: Keys | None, limits: Limits, clock: Clock, metrics: Metrics
    ) -> None:
        self._models, self._clock = models, clock
        self._front = Front(keys, limits, clock, metrics)
        self._admission = self._front.admission
        self._serving = Serving(clock, metrics, limits)
        self._healths: dict[int, Health] = {}  # by engine

    def app(self, page: Sequence[BaseRoute]) -> Starlette:
        posts: dict[str, Work] = {
            "/v1/chat/completions": self._making(ChatRequest, chat.begin),
            "/v1/completions": self._making(CompletionRequest, completions.begin),
            "/v1/responses": self._making(ResponseRequest, responses.begin, are_named=True),
            "/v1/embeddings": self._making(EmbeddingRequest, embeddings.begin),
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }
        return self._front.app(posts, {"/v1/models": self._list}, self._one, self._health, page)

    def _model(self, asker: Asker, name: str | None) -> Model:
        return self._front.pick(self._models, asker, name)

    # --- texts ---

    def _making(
        self, kind: type[R], begin: Callable[[R, Model, Visit, Serving], Awaitable[Answer]], *, are_named: bool = False
    ) -> Work:
        async def work(wire: Wire, asker: Asker, body: bytes) -> None:
            request: Any = read(body, kind)
            model = self._model(asker, request.model)
            with self._admission.admit(asker) as visit:
                wire.headers |= visit.headers
                await wire.while_there(answer(wire, request, model, visit))

        async def answer(wire: Wire, request: Any, model: Model, visit: Visit) -> None:
            begun = await begin(request, model, visit, self._serving)
            try:
                if request.stream:
                    await wire.stream(begun.events(), are_named=are_named)
                else:
                    await wire.tell_tree(await begun.whole())
            finally:
                begun.cancel()

        return work

    async def _tokenize(self, wire: Wire, asker: Asker, body: bytes) -> None:
        request = read(body, TokenizeRequest)
        model = self._model(asker, request.model)
        with self._admission.admit(asker) as visit:
            wire.headers |= visit.headers
            await wire.tell(await asyncio.to_thread(_tokenized, request, model, self._clock.wall()))

    async def _detokenize(self, wire: Wire, asker: Asker, body: bytes) -> None:
        request = read(body, DetokenizeRequest)
        model = self._model(asker, request.model)
        with self._admission.admit(asker) as visit:
            wire.headers |= visit.headers
            await wire.tell(await asyncio.to_thread(_detokenized, request, model))

    # --- about this server ---

    async def _list(self, wire: Wire, asker: Asker, _body: bytes) -> None:
        trees = [_about(model) for model in self._models.values() if self._admission.may_see(asker, model.id)]
        await wire.tell_tree({"object": "list", "data": trees})

    async def _one(self, id: str, wire: Wire, asker: Asker) -> None:
        await wire.tell_tree(_about(self._model(asker, id)))

    async def _health(self, _request: Request) -> Plain:
        models = list(self._models.values())
        for engine in set(self._healths) - {id(model.engine) for model in models}:
            del self._healths[engine]
        healths = [
            self._healths.setdefault(id(model.engine), Health(partial(_draw_one, model), self._clock))
            for model in models
        ]
        said = await asyncio.gather(*(each.said() for each in healths))
        return tell_health({model.id: why for model, why in zip(models, said, strict=True)})


async def _version(_request: Request) -> Plain:
    return JSONResponse({"version": weft.__version__})


class _Application(Starlette):
    """Gives each answer, whoever makes it, the id of its request."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await super().__call__(scope, receive, send)
        scope[_ID] = id = _request_id(Headers(scope=scope))
        named = (b"x-request-id", id.encode("ascii"))

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), named]}
            await send(message)

        await super().__call__(scope, receive, send_named)
        return None


class _Endpoint:
    """An ASGI application: Starlette takes a function for one that answers requests."""

    def __init__(self, call: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._call(scope, receive, send)


class Health:
    """Whether tokens are drawn: one is drawn, at most every `HEALTHY_S`.

    Args:
        draw: draws one; returns what is wrong, None: nothing.
    """

    def __init__(self, draw: Callable[[], Awaitable[str | None]], clock: Clock) -> None:
        self._draw, self._clock = draw, clock
        self._lock = asyncio.Lock()
        self._at: float | None = None
        self._said: str | None = None

    async def said(self) -> str | None:
        """Return what is wrong; None: nothing."""
        async with self._lock:
            if self._at is None or self._clock.now() - self._at >= HEALTHY_S:
                self._said = await self._draw()
                self._at = self._clock.now()
            return self._said


def tell_health(said: Mapping[str, str | None]) -> Plain:
    """Return the answer to a question for health.

    Args:
        said: what is wrong, by model.
    """
    is_well = bool(said) and not any(said.values())
    status = "ok" if is_well else "; ".join(f"{name}: {why}" for name, why in said.items() if why) or "no model"
    return JSONResponse({"status": status}, 200 if is_well else 503)


async def _draw_one(model: Model) -> str | None:
    text = None
    try:
        async with asyncio.timeout(DRAWN_S):
            text = model.engine.begin(Wanted("health", (0,), 1, Drawing(temperature=0.0)))
            num = len([drawn async for drawn in text])
        return None if num == 1 else "no token came"
    except TimeoutError:
        return f"no token came within {DRAWN_S:g} s"
    except Exception as error:
        return f"it fails ({type(error).__name__})"
    finally:
        if text is not None:
            text.cancel()


def _about(model: Model) -> dict[str, Any]:
    tree = {"id": model.id, "object": "model", "created": model.created, "owned_by": "weft"}
    return tree | {"max_model_len": model.context}


def _tokenized(request: TokenizeRequest, model: Model, wall_s: float) -> bytes:
    tokens = _tokens_of(request, model, wall_s)
    tree: dict[str, Any] = {"count": len(tokens), "max_model_len": model.context, "tokens": tokens}
    if request.return_token_strs:
        tree["token_strs"] = [model.vocabulary.piece(token).decode("utf-8", "replace") for token in tokens]
    return msgspec.json.encode(tree)


def _detokenized(request: DetokenizeRequest, model: Model) -> bytes:
    if (wrong_one := next((each for each in request.tokens if each >= model.engine.vocab_size), None)) is not None:
        raise wrong(f"tokens: {wrong_one} is no token of this model.", "tokens")
    text = b"".join(map(model.vocabulary.piece, request.tokens)).decode("utf-8", "replace")
    return msgspec.json.encode({"prompt": text})


def _tokens_of(request: TokenizeRequest, model: Model, wall_s: float) -> list[int]:
    if request.messages is not None:
        use = chat.ToolUse(request.tools, None, is_parallel=None)
        return chat.prompt_of(model, request.messages, use, wall_s)
    if request.prompt is None:
        raise wrong("prompt: a prompt or messages are needed.", "prompt")
    vocabulary = model.vocabulary
    try:
        if request.add_special_tokens is not False:
            return vocabulary.encode_plain(request.prompt)
        return [int(each) for each in model.tokenizer.encode(request.prompt)]
    except DataError as error:
        raise wrong(f"prompt: {error}", "prompt") from None


async def _in_time(body: Awaitable[bytes]) -> bytes:
    try:
        async with asyncio.timeout(BODY_S):
            return await body
    except TimeoutError:
        raise Fault(408, f"The body has not come within {BODY_S:g} s.", code="request_timeout") from None


def _too_long(limits: Limits) -> Fault:
    return Fault(413, f"The body has more than {limits.max_body_nbytes} bytes.", code="request_too_large")


def _refuse_packed(headers: Headers) -> None:
    """
    Raises:
        Fault: the body is compressed, so that it may be of any length.
    """
    packed = headers.get("content-encoding", "identity")
    if packed.strip().lower() not in ("", "identity"):
        message = f"Bodies that are compressed ({packed[:40]!r}) are not read here. Send it as it is."
        raise Fault(415, message, code="unsupported_encoding")


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req_{fresh_secret(12).hex()}"


def _refuse_pages(headers: Headers) -> None:
    """Accept a request that no page of elsewhere made: without keys, any page in a browser of this machine could ask.

    Raises:
        Fault: it comes from another page, or by a name that anybody may point to this machine.
    """
    host = headers.get("host", "localhost")
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    if not _is_own_name(name.strip("[]")):
        raise Fault(
            403,
            f"This server has no keys, so it is not asked by the name {name[:80]!r}, but by its address.",
            "permission_error",
            code="host_not_allowed",
        )
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host:
        raise Fault(
            403,
            "This server has no keys, so it answers no page of another address.",
            "permission_error",
            code="origin_not_allowed",
        )


def _is_own_name(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return "." not in name or name.endswith(".local")
    return True


def _log(id: str, error: Exception) -> None:
    """Log a fault of this server, without its message, which may hold what was asked."""
    if fault_of(error).status < 500:
        return
    last = extract_tb(error.__traceback__)[-1:]
    where = "".join(f" at {PurePath(frame.filename).name}:{frame.lineno}" for frame in last)
    logging.getLogger("weft.serve").error("request %s failed: %s%s", id, type(error).__name__, where)


async def _not_here(request: Request, error: Exception) -> Plain:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        message = f"{request.method} is not what {request.url.path[:100]} takes."
        fault = Fault(405, message, code="method_not_allowed")
    else:
        fault = not_built(request.url.path[:100])
    return JSONResponse(fault.body, error.status_code, headers=error.headers)
