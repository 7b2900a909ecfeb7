"""What strangers may send, each line of it bounded: sizes, counts, time, slow readers; and nothing of it is logged."""

import asyncio
import gzip
import json
import logging
import socket
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import uvicorn

from unit.serve.scripted import asking, scripted
from weft.chat.grammar import MAX_SCHEMA_NBYTES
from weft.cli.listener import listen
from weft.engine.draw import MAX_BIASED
from weft.serve import app as served
from weft.serve import stream
from weft.serve.app import app
from weft.serve.generation import Model
from weft.serve.keys import Keys, Limits, new_key
from weft.serve.schemas import MAX_MESSAGES
from weft.serve.stream import Connection

MESSAGE = {"role": "user", "content": "hi"}
MARK = "giraffe"


@contextmanager
def running(model: Model, limits: Limits, keys: Keys | None = None) -> Iterator[tuple[tuple[str, int], uvicorn.Server]]:
    """Serve on a thread; yield host and port, and the server."""
    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(
        app({"tiny": model}, limits=limits, keys=keys),
        http=Connection,
        log_level="debug",
        timeout_graceful_shutdown=1,
        lifespan="off",
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield listener.getsockname()[:2], server
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def request(body: bytes, more: str = "") -> bytes:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


def said(connection: socket.socket) -> bytes:
    """Return all that comes until the other side hangs up."""
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def answered(place: tuple[str, int], asked: bytes) -> bytes:
    """Return all that comes for a request."""
    with socket.create_connection(place) as connection:
        connection.sendall(asked)
        return said(connection)


async def soon(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# --- sizes and counts ---

BOUNDS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": [MESSAGE] * (MAX_MESSAGES + 1)}, "messages"),
    ("/v1/chat/completions", {"messages": [MESSAGE], "tools": [{"type": "function"}] * 65}, "tools"),
    ("/v1/chat/completions", {"messages": [MESSAGE], "n": 5}, "n"),
    ("/v1/chat/completions", {"messages": [MESSAGE], "top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ("/v1/chat/completions", {"messages": [MESSAGE], "stop": ["x" * 1025]}, "stop"),
    (
        "/v1/chat/completions",
        {"messages": [MESSAGE], "logit_bias": {str(each): 1 for each in range(MAX_BIASED + 1)}},
        "logit_bias",
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [MESSAGE],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"type": "object", "description": "x" * MAX_SCHEMA_NBYTES}},
            },
        },
        "response_format",
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [MESSAGE],
            "tool_choice": "required",
            "tools": [
                {"type": "function", "function": {"name": f"f{n}", "parameters": {"description": "x" * 33_000}}}
                for n in range(2)
            ],
        },
        "tools",
    ),
    ("/v1/responses", {"input": [{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1)}, "input"),
    ("/v1/completions", {"prompt": ["x"] * 5}, "prompt"),
    ("/v1/completions", {"prompt": ["x", "x"], "n": 3}, "prompt"),
    ("/v1/embeddings", {"input": ["x"] * 2049}, "input"),
    ("/tokenize", {"messages": [MESSAGE] * (MAX_MESSAGES + 1)}, "messages"),
]


@pytest.mark.parametrize(("path", "fields", "param"), BOUNDS)
async def test_each_count_and_size_is_bounded(path: str, fields: dict[str, Any], param: str) -> None:
    model = scripted("x")
    engine: Any = model.engine
    async with asking(model) as client:
        answer = await client.post(path, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert len(answer.content) < 1000
    assert engine.begun == []


async def test_a_body_is_bounded_whether_or_not_its_length_is_told() -> None:
    num_sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_sent
        while True:
            num_sent += 1
            yield b"x" * 1000

    async with asking(scripted("x"), limits=Limits(max_body_nbytes=5000)) as client:
        answer = await client.http.post("/v1/chat/completions", content=endless())
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        assert num_sent <= 6
        told = await client.http.post("/v1/chat/completions", content=b"{}", headers={"content-length": "99999999"})
        assert told.status_code == 413
    assert Limits().max_body_nbytes == 4 << 20


@pytest.mark.parametrize("how", ["gzip", "deflate", "br", "zstd", "GZIP, gzip"])
async def test_a_body_that_is_compressed_is_refused_and_not_unpacked(how: str) -> None:
    model = scripted("x")
    engine: Any = model.engine
    plain = json.dumps({"model": "tiny", "messages": [MESSAGE]}).encode()
    bomb = gzip.compress(bytes(64 << 20))
    tracemalloc.start()
    async with asking(model) as client:
        for path in ("/v1/chat/completions", "/v1/responses", "/tokenize"):
            for body in (bomb, gzip.compress(plain), plain):
                answer = await client.http.post(path, content=body, headers={"content-encoding": how})
                assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_encoding")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
        tracemalloc.stop()
        assert engine.begun == []
        for same in ("identity", ""):
            answer = await client.http.post("/v1/chat/completions", content=plain, headers={"content-encoding": same})
            assert answer.status_code == 200


async def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "BODY_S", 0.02)

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(60)

    async with asking(scripted("x")) as client:
        answer = await client.http.post("/v1/chat/completions", content=slow())
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "request_timeout")


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":' * 50_000, b'{"messages":' + b"[" * 50_000])
async def test_what_is_nested_deeply_is_refused(body: bytes) -> None:
    async with asking(scripted("x")) as client:
        for path in ("/v1/chat/completions", "/v1/responses", "/tokenize"):
            assert (await client.http.post(path, content=body)).status_code == 400


# --- who reads slowly ---


async def sip(connections: list[socket.socket]) -> None:
    """Read a byte now and then."""
    while True:
        for connection in connections:
            with suppress(OSError):
                connection.recv(1, socket.MSG_DONTWAIT)
        await asyncio.sleep(0.1)


@pytest.mark.full
async def test_slow_readers_hold_up_nobody_and_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SLOW_READER_S", 1.0)
    model = scripted(*["word " * 150] * 8, "quick")
    engine: Any = model.engine
    fields = {"model": "tiny", "messages": [MESSAGE], "stream": True, "logprobs": True, "top_logprobs": 20}
    body = json.dumps(fields).encode()
    slow = []
    with running(model, Limits()) as (place, server):
        try:
            for _ in range(8):
                connection = socket.socket()
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.connect(place)
                connection.sendall(request(body))
                slow.append(connection)  # and reads nothing
            sipping = asyncio.ensure_future(sip(slow[::2]))
            await soon(lambda: len(engine.begun) == 8)
            with socket.create_connection(place) as connection:
                asked = json.dumps({"model": "tiny", "messages": [MESSAGE]}).encode()
                connection.sendall(request(asked, "connection: close\r\n"))
                answer = await asyncio.to_thread(said, connection)
            assert b'"content":"quick"' in answer
            await soon(lambda: not server.server_state.connections)
            await soon(lambda: engine.totals.num_running == 0)
            sipping.cancel()
            assert max(map(engine.num_told, engine.begun[:8])) < 150 * len("word ")
            for connection in slow:
                with pytest.raises(ConnectionResetError):
                    await asyncio.to_thread(said, connection)
        finally:
            for connection in slow:
                connection.close()


ASKS = request(json.dumps({"model": "tiny", "messages": [MESSAGE]}).encode())
HEAD = b"GET /version HTTP/1.1\r\nx-slow: "
REFUSED = request(b"{}").replace(b"localhost", b"elsewhere.example")[:-2]  # before its body has come


@pytest.mark.parametrize(("before", "more"), [(b"", b""), (HEAD, b"x"), (ASKS + HEAD, b"x"), (REFUSED, b"{")])
async def test_who_asks_nothing_is_let_go(before: bytes, more: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SILENT_S", 0.3)
    with running(scripted("quick"), Limits()) as (place, server), socket.create_connection(place) as connection:
        connection.sendall(before)
        await soon(lambda: bool(server.server_state.connections))
        for _ in range(200):
            if not server.server_state.connections:
                break
            with suppress(OSError):
                connection.sendall(more)
            await asyncio.sleep(0.01)
        assert not server.server_state.connections


@pytest.mark.full
async def test_who_reads_a_long_answer_slowly_has_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SLOW_READER_S", 0.5)
    asked = request(json.dumps({"model": "tiny", "prompt": "x" * 200_000}).encode(), "connection: close\r\n")
    found = bytearray()
    with running(scripted("x"), Limits()) as (place, _), socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(place)
        connection.sendall(asked.replace(b"/v1/chat/completions", b"/tokenize"))
        began = time.monotonic()
        while part := await asyncio.to_thread(connection.recv, 4096):
            found += part
            await asyncio.sleep(0.01)
        assert time.monotonic() - began > 2 * stream.SLOW_READER_S
    assert found.endswith(b"}")
    assert len(json.loads(bytes(found).partition(b"\r\n\r\n")[2])["tokens"]) == 200_000


async def test_who_hangs_up_has_paid_for_what_was_drawn_and_not_read() -> None:
    secret, key = new_key("a", tokens_per_day=9)
    model = scripted(["a", 60.0], "quick")
    engine: Any = model.engine
    asked = json.dumps({"model": "tiny", "prompt": "ab", "stream": True}).encode()
    bearer = f"authorization: Bearer {secret}\r\n"
    asks = request(asked, bearer).replace(b"chat/completions", b"completions")
    with running(model, Limits(), (key,)) as (place, _):
        with socket.create_connection(place) as connection:
            connection.sendall(asks)
            while b"data:" not in await asyncio.to_thread(connection.recv, 1 << 16):
                pass
            engine.begun[0].num_unread = 6  # beside two of the prompt and one that was read
        counts = f"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{bearer}\r\n".encode()
        await soon(lambda: b'finished_reason="abort"' in answered(place, counts))  # counted once it is charged
        with socket.create_connection(place) as connection:
            connection.sendall(asks.replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
            assert b"insufficient_quota" in await asyncio.to_thread(said, connection)


# --- nothing is logged ---


@pytest.mark.full
async def test_what_strangers_send_is_in_no_log(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(served, "BODY_S", 2.0)  # of the one that is cut short
    model = scripted([MARK, ValueError(MARK)])
    engine: Any = model.engine
    whole = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": MARK}]}).encode()
    broken = [
        request(whole),
        request(whole.replace(b"messages", b"massages")),
        request(whole[:-1] + b"]"),
        request(f'{{"model": "{MARK}", "messages": []}}'.encode()),
        request(whole, f"x-request-id: {MARK} x\r\n"),
        request(whole, f"authorization: Bearer {MARK}\r\n"),
        request(whole, f"origin: http://{MARK}\r\n"),
        request(whole.replace(b"tiny", MARK.encode())),
        request(whole)[:-5],
        f"{MARK} {MARK}\r\n\r\n".encode(),
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {MARK}\r\n\r\n".encode(),
    ]
    with running(model, Limits(max_wait_s=5.0)) as (place, _):
        for each in broken:
            with socket.create_connection(place) as connection:
                connection.sendall(each.replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
                await asyncio.to_thread(said, connection)
    assert engine.begun
    told = caplog.text + "".join(capfd.readouterr())
    assert "request req_" in told
    assert MARK not in told
