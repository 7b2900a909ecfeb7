"""Whatever fails, before the first token or after some: a stream ends with an error and its code, never bare, and an
answer that is whole is an error with its status."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from unit.engine.test_step import CPU, vector_of
from unit.serve.scripted import ENDED, Client, asking, scripted
from unit.serve.test_backend import DIES, HEAD, chunk, event, passing, says
from weft.chat.grammar import GrammarFault
from weft.data.tokenizer import ByteTokenizer
from weft.engine.engine import Engine
from weft.engine.step import KeysAndValues, Stepper, Weights
from weft.engine.text import Full, Unread
from weft.errors import NotFinite
from weft.model.came_with import CameWith
from weft.model.config import ModelConfig
from weft.serve.generation import model_of
from weft.texts.asking.no_path import NoPath

CONFIG = ModelConfig(
    vocab_size=257, num_layers=1, num_heads=2, num_kv_heads=1, width=16, ffn_width=16, max_seq_len=2048, is_tied=True
)
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
}
LONG = "x" * 900  # a prompt of several steps
Fails = tuple[int, str]  # the status of a whole answer, and the code


async def told(client: Client, path: str, body: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a stream's events before its last, which is an error, and the error."""
    *events, last = await client.chunks(path, **body)
    assert not any("error" in each for each in events)
    return events, last["error"]


def letters(events: list[dict[str, Any]]) -> str:
    """Return what a stream told of its text, in whichever of the three ways."""
    found = []
    for each in events:
        if str(each.get("type", "")) == "response.output_text.delta":
            found.append(each["delta"])
        found += [
            choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in each.get("choices", ())
        ]
    return "".join(found)


SCRIPTED: list[tuple[Exception, Fails]] = [
    (NoPath("Nobody serves stage 2 of 3 just now. Ask again soon."), (503, "no_path")),
    (Unread(), (503, "read_too_slowly")),
    (Full(2.5), (429, "rate_limit_exceeded")),
    (GrammarFault("no token of the model goes on with it"), (500, "server_error")),
    (NotFinite("the logits are NaN"), (500, "server_error")),
    (ValueError("a secret"), (500, "server_error")),
    (MemoryError(), (500, "server_error")),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_before", [0, 1, 3])
@pytest.mark.parametrize(("error", "fails"), SCRIPTED, ids=lambda each: type(each).__name__)
async def test_a_failure_is_an_event_never_a_bare_end(
    path: str, num_before: int, error: Exception, fails: Fails
) -> None:
    async with asking(scripted(["abc"[:num_before], error])) as client:
        events, fault = await told(client, path, PATHS[path])
        assert letters(events) == "abc"[:num_before]
        assert fault["code"] == fails[1]
        assert "secret" not in json.dumps([events, fault])
        answer = await client.post(path, **PATHS[path])
    assert (answer.status_code, answer.json()["error"]["code"]) == fails
    assert answer.json()["error"] == fault
    assert ("retry-after-ms" in answer.headers) == (fails[0] in (429, 503))


async def test_who_is_refused_at_once_has_a_status_in_a_stream_too() -> None:
    for error, fails in SCRIPTED:
        async with asking(scripted(error)) as client:
            for stream in (True, False):
                answer = await client.chat(stream=stream)
                assert (answer.status_code, answer.json()["error"]["code"]) == fails


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_before", [0, 3])
async def test_a_text_that_is_ended_elsewhere_is_an_error(path: str, num_before: int) -> None:
    async with asking(scripted(["abc"[:num_before], ENDED])) as client:
        events, fault = await told(client, path, PATHS[path])
        assert (letters(events), fault["code"]) == ("abc"[:num_before], "unloaded")
        answer = await client.post(path, **PATHS[path])
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unloaded")


# --- of a real engine ---

Happens = Callable[[Engine, Weights], None]


def dies(engine: Engine, _weights: Weights) -> None:
    """A fault of weft's own, which no step tells."""

    def plan(_alone_s: float) -> Any:
        raise KeyError("a secret")

    engine._schedule.plan = plan  # type: ignore[method-assign]


def breaks(_engine: Engine, weights: Weights) -> None:
    """Weights are NaN from now on, as of a broken memory."""
    assert weights.norm is not None
    weights.norm.fill_(torch.nan)


def ends(engine: Engine, _weights: Weights) -> None:
    """The server ends, as by Ctrl-C."""
    threading.Thread(target=engine.close).start()


class Happening(Stepper):
    """Something happens once, at a step."""

    at_step: int | None = None
    num_steps = 0
    happens: Callable[[], None]

    def step(self, pieces: Any) -> Any:
        if self.num_steps == self.at_step:
            self.happens()
        self.num_steps += 1
        return super().step(pieces)


@asynccontextmanager
async def real(happens: Happens, at_step: int) -> AsyncIterator[tuple[Client, Engine]]:
    """Yield a client of a server, to whose engine something happens."""
    weights = Weights(CONFIG, vector_of(CONFIG), "fp32")
    stepper = Happening(weights, KeysAndValues(CONFIG, 40, CPU, "fp32"))
    engine = Engine(stepper, vocab_size=CONFIG.vocab_size, context=CONFIG.max_seq_len, num_pages=40, has_guesses=False)
    stepper.happens = lambda: happens(engine, weights)
    stepper.at_step = at_step
    try:
        async with asking(model_of("tiny", 1, engine, ByteTokenizer(), CameWith(), "fp")) as client:
            yield client, engine
    finally:
        await asyncio.to_thread(engine.close)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("at_step", [0, 9])
@pytest.mark.parametrize(
    ("happens", "fails"), [(dies, (500, "server_error")), (breaks, (500, "server_error")), (ends, (503, "unloaded"))]
)
@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_ends_is_an_error(
    path: str, at_step: int, happens: Happens, fails: Fails, stream: bool
) -> None:
    most = "max_output_tokens" if "responses" in path else "max_tokens"
    body = json.loads(json.dumps(PATHS[path]).replace("hi", LONG)) | {most: 800, "ignore_eos": True, "seed": 1}
    async with real(happens, at_step) as (client, engine):
        if stream:
            events, fault = await told(client, path, body)
            assert bool(letters(events)) == (at_step > 0)
        else:
            answer = await client.post(path, **body)
            assert answer.status_code == fails[0]
            fault = answer.json()["error"]
        assert fault["code"] == fails[1]
        assert "secret" not in json.dumps(fault)
        assert engine.totals.num_held == 0 or happens is dies


async def test_an_engine_that_has_died_says_so_to_who_comes_later() -> None:
    async with real(dies, 0) as (client, _):
        for _ in range(3):
            answer = await client.chat(LONG)
            assert answer.status_code == 500
            assert "The engine has ended after a fault (KeyError at test_failures.py:" in answer.text
        health = await client.http.get("/health")
    assert (health.status_code, "EngineBroken" in health.text) == (503, True)


# --- of a server behind ---


def piece_of(path: str) -> bytes:
    if "responses" in path:
        return event({"type": "response.output_text.delta", "delta": "a"})
    choice = {"text": "a"} if path == "/v1/completions" else {"delta": {"content": "a"}}
    return event({"model": "theirs", "choices": [{"index": 0, "finish_reason": None, **choice}]})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_before", [0, 1, 3])
async def test_another_server_that_dies_is_an_error(path: str, num_before: int) -> None:
    parts = [HEAD, *([chunk(piece_of(path))] * num_before), DIES]
    async with passing(says(*parts)) as (client, _, _):
        events, fault = await told(client, path, PATHS[path])
    assert (letters(events), fault["code"]) == ("a" * num_before, "backend_broke_off")
    for start, code in ((b"", "unreachable"), (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}", "broke_off")):
        async with passing(says(*filter(None, (start,)), DIES)) as (client, _, _):
            answer = await client.post(path, **PATHS[path])
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, f"backend_{code}")
