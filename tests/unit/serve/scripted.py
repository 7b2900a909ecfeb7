"""An engine that writes what a script says, token by token, and the application around it."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx2
import numpy as np

from weft.chat.template import Template
from weft.clock import Clock, SystemClock
from weft.data.tokenizer import ByteTokenizer, Tokenizer
from weft.engine.draw import Drawn
from weft.engine.engine import Engine, Totals
from weft.engine.text import Wanted
from weft.serve.app import app
from weft.serve.generation import Model
from weft.serve.keys import Key, Limits

ENDED = object()  # in a script: somebody else ends the text, not who reads it
READ = object()  # likewise: something of the prompt was computed
Script = str | list[Any]  # text, or texts, tokens, exceptions, seconds to wait, ENDED, READ


class ScriptedText:
    def __init__(self, engine: "ScriptedEngine", wanted: Wanted, script: Script) -> None:
        self.wanted = wanted
        self.ended: str | None = None
        self.num_shared = 0
        self.num_unread = 0
        self.came_s = self._began_s = SystemClock().now()
        self.began_s: float | None = None
        self.busy_s = 0.0
        self.mean = np.array([len(wanted.prompt), 1, 0], dtype=np.float32) if wanted.is_mean else None
        self.is_cancelled = False
        self._engine = engine
        self._steps = self._tokens([script] if isinstance(script, str) else script)
        engine.totals.num_running += 1

    def _tokens(self, script: list[Any]) -> Iterator[Any]:
        for each in script:
            yield from self._engine.tokenizer.encode(each).tolist() if isinstance(each, str) else [each]

    def __aiter__(self) -> "ScriptedText":
        return self

    async def __anext__(self) -> Drawn:
        if self.ended is None:
            await asyncio.sleep(0)
            if self.is_cancelled:
                self._end("cancelled")
        if self.ended is not None:
            raise StopAsyncIteration
        step = next(self._steps, None)
        if isinstance(step, float):
            await asyncio.sleep(step)
            return await self.__anext__()
        if step is READ:
            self.busy_s = SystemClock().now()
            return await self.__anext__()
        if step is ENDED:
            self._end("cancelled")
            raise StopAsyncIteration
        step = None if self.wanted.is_mean else step
        if isinstance(step, Exception):
            self._end("cancelled")
            raise step
        constraint = self.wanted.constraint
        if constraint is not None:
            allowed = constraint.allowed()
            if not allowed.any():
                step = None
            elif step is not None:
                assert allowed[step], f"the form does not allow {bytes([step])!r}"
                constraint.take(step)
        if step is None or step in self.wanted.stop_ids:
            self._end("stop")
        elif self._engine.num_told(self) >= self.wanted.max_new_tokens:
            self._end("length")
        if self.ended is not None:
            raise StopAsyncIteration
        self.came_s = self._began_s + self._engine.step_s * (self._engine.num_told(self) // self._engine.at_once)
        self._engine.told[id(self)] += 1
        num = self.wanted.drawing.num_likeliest
        if num is None:
            return Drawn(step)
        return Drawn(step, -0.5, tuple((step + place, -0.5 - place) for place in range(num)))

    def _end(self, ended: str) -> None:
        if self.ended is None:
            self.ended = ended
            self._engine.totals.num_running -= 1

    def cancel(self) -> None:
        self.is_cancelled = True
        if self.ended is None:
            self._end("cancelled")


class ScriptedEngine:
    """Begins its scripts in turn, the last one again and again."""

    def __init__(self, *scripts: Script | Exception, context: int = 4096, tokenizer: Tokenizer | None = None) -> None:
        self.tokenizer = tokenizer or ByteTokenizer()
        self.vocab_size = self.tokenizer.vocab_size
        self.context = context
        self.totals = Totals(num_pages=8)
        self.begun: list[ScriptedText] = []
        self.num_more: list[int] = []  # as each was asked for
        self.step_s, self.at_once = 0.0, 1  # seconds between steps, as it tells them, and tokens of each
        self.told: dict[int, int] = {}
        self._scripts = scripts

    def num_told(self, text: ScriptedText) -> int:
        return self.told[id(text)]

    def begin(self, wanted: Wanted, num_more: int = 0) -> ScriptedText:
        self.num_more.append(num_more)
        script = self._scripts[min(len(self.begun), len(self._scripts) - 1)]
        if isinstance(script, Exception):
            raise script
        text = ScriptedText(self, wanted, script)
        self.told[id(text)] = 0
        self.begun.append(text)
        return text

    def prompt(self, number: int = -1) -> str:
        """Return the prompt of a text that was begun."""
        return self.tokenizer.decode(self.begun[number].wanted.prompt)


def scripted(*scripts: Script | Exception, template: str | None = None, **options: Any) -> Model:
    engine = ScriptedEngine(*scripts, **options)
    made = None if template is None else Template(template, {"bos_token": "", "eos_token": "<|endoftext|>"})
    tokenizer = engine.tokenizer
    return Model("tiny", 7, cast(Engine, engine), tokenizer, made, engine.context, frozenset({256}), fingerprint="fp")


class Client:
    """Asks an application as a program would."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self.http = http

    async def post(self, path: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx2.Response:
        return await self.http.post(path, json={"model": "tiny", **fields}, headers=headers)

    async def chat(self, text: str = "hi", **fields: Any) -> httpx2.Response:
        return await self.post("/v1/chat/completions", messages=[{"role": "user", "content": text}], **fields)

    async def chunks(self, path: str = "/v1/chat/completions", **fields: Any) -> list[dict[str, Any]]:
        """Return the events of a stream; `[DONE]` must end it, unless an error does."""
        fields = (
            {"messages": [{"role": "user", "content": "hi"}]} | fields if path.endswith("chat/completions") else fields
        )
        answer = await self.post(path, stream=True, **fields)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        if data[-1] == "[DONE]":
            return [json.loads(each) for each in data[:-1]]
        found = [json.loads(each) for each in data]
        assert "error" in found[-1] or found[-1]["type"].startswith("response."), "a bare end"
        return found


@asynccontextmanager
async def asking(
    *models: Model,
    keys: tuple[Key, ...] | None = None,
    limits: Limits | None = None,
    clock: Clock | None = None,
    address: str = "127.0.0.1",
) -> AsyncIterator[Client]:
    served = app({model.id: model for model in models}, keys, limits, clock=clock or SystemClock())
    transport = httpx2.ASGITransport(served, client=(address, 1))
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
        yield Client(http)
