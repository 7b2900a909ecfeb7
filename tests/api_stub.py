"""A server that speaks the OpenAI API and holds no model: what it answers is told by the question.

slow       a word each few milliseconds, until whoever asked is gone
error      some words, then an event of an error
bare       some words, then the stream ends without a word
busy       429, to be tried again in 7 seconds
count      sixty numbers
long       some words, cut off at the most tokens; nothing: an answer without a letter
code       a fenced block; hostile: what a careless page would run
members    words that members of a run drew, one of which died in the middle
anything   the question again, and how many messages it was asked with
"""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

HOSTILE = "<img src=x onerror=alert(1)> \x1b[2J"
CODE = "Look:\n```py\nprint(1)\n```\nThat is all."
SOME = ["Some ", "words."]
CONTEXT = 4096  # tokens, which a long answer has with its question
COURSE = {
    "members": ["anna0000", "ben00000"],
    "rounds": [{"round": 12, "after_tokens": 0}],
    "mends": [],
    "num_mends": 0,
}
MEND = {"stage": 2, "before": "ben00000", "member": "carl0000", "after_tokens": 37, "why": "parted", "pause_s": 0.8}
MENDED = COURSE | {"members": ["anna0000", "carl0000"], "mends": [MEND], "num_mends": 1}
COUNT = [f"{number} " for number in range(60)]


class Stub:
    """What it was asked, and what it wants."""

    def __init__(self, key: str | None, models: Sequence[str]) -> None:
        self.key = key
        self.models = models
        self.asked: list[dict[str, Any]] = []
        self.is_left = threading.Event()  # by whoever asked, before the end
        self.address = ""

    def routes(self) -> list[BaseRoute]:
        return [Route("/v1/models", self._list), Route("/v1/chat/completions", self._answer, methods=["POST"])]

    def _refused(self, request: Request) -> Response | None:
        if self.key is None or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return failed(401, "Incorrect API key provided.", "invalid_api_key")

    async def _list(self, request: Request) -> Response:
        listed = [{"id": name, "object": "model", "max_model_len": CONTEXT} for name in self.models]
        return self._refused(request) or JSONResponse({"object": "list", "data": listed})

    async def _answer(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        body = await request.json()
        self.asked.append(body)
        if body["model"] not in self.models:
            return failed(404, f"There is no model {body['model']}.", "model_not_found")
        question = body["messages"][-1]["content"]
        if question == "busy":
            return failed(429, "Too many.", "rate_limit_exceeded", {"retry-after": "7"})
        return StreamingResponse(self._events(question, len(body["messages"])), media_type="text/event-stream")

    async def _events(self, question: str, num_messages: int) -> AsyncIterator[str]:
        words = {
            "code": [CODE],
            "hostile": [HOSTILE],
            "error": SOME,
            "bare": SOME,
            "count": COUNT,
            "members": COUNT,
        }.get(question)
        words = {"long": SOME, "nothing": []}.get(question, words)
        if words is None:
            words = [f"word{n} " for n in range(5000)] if question == "slow" else [f"{question}! ", f"({num_messages})"]
        yield piece({"role": "assistant", "content": ""})
        yield ": still here\n\n"
        num = 0
        try:
            for word in words:
                yield piece({"content": word})
                num += 1
                if question == "members" and num in (1, 38):
                    yield piece({}, weft=COURSE if num == 1 else MENDED)
                    await asyncio.sleep(0.5)  # that it can be seen
                await asyncio.sleep(0.004)
        except asyncio.CancelledError:
            self.is_left.set()
            raise
        if question == "bare":
            return
        if question == "error":
            yield event({"error": {"message": "stage 2 is gone", "type": "server_error", "code": "internal"}})
            return
        yield piece({}, "length" if question == "long" else "stop")
        read = CONTEXT - num if question == "long" else 9
        usage = {"prompt_tokens": read, "completion_tokens": num, "total_tokens": num + read}
        yield event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"


def failed(status: int, message: str, code: str, headers: dict[str, str] | None = None) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": error}, status, headers)


def piece(delta: dict[str, str], finish: str | None = None, **more: Any) -> str:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish, **more}]})


def event(told: dict[str, Any]) -> str:
    told = {"id": "c", "object": "chat.completion.chunk", "model": "stub", "system_fingerprint": "round-7"} | told
    return f"data: {json.dumps(told)}\n\n"


@contextmanager
def serving(
    key: str | None = None, models: Sequence[str] = ("stub", "other"), more: Sequence[BaseRoute] = ()
) -> Iterator[Stub]:
    """Serve on a port of this machine, on a thread of its own."""
    stub = Stub(key, models)
    app = Starlette(routes=[*stub.routes(), *more])
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1, lifespan="off")
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
        thread.start()
        stub.address = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        try:
            yield stub
        finally:
            server.should_exit = True
            thread.join(10)
