"""Another server behind: what is asked is passed on, what it answers passes through, and what fails there is told.

The other server is a socket that writes what a script says, so that it can die at any byte.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx2
import pytest

from unit.serve.scripted import Client
from weft.errors import CallFailed, ConfigError, PeerError, Refused, Unreachable
from weft.serve.backend.backend import MAX_UNDER_WAY, Backend, Model, app, models_of
from weft.serve.backend.client import Site, site_of
from weft.serve.keys import Key, Limits, new_key

DIES = b""  # in a script: the connection is reset
Script = Callable[[str, dict[str, Any]], Sequence[bytes | float]]
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}


def whole(tree: Any, status: int = 200, more: str = "") -> list[bytes | float]:
    body = json.dumps(tree).encode()
    return [f"HTTP/1.1 {status} x\r\n{more}content-length: {len(body)}\r\n\r\n".encode() + body]


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(tree: Any, name: str = "") -> bytes:
    return (f"event: {name}\n" if name else "").encode() + f"data: {json.dumps(tree)}\n\n".encode()


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def piece(text: str, reason: str | None = None) -> bytes:
    return event({"model": "theirs", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]})


LAST = event({"model": "theirs", "choices": [], "usage": USAGE})
ANSWER = [HEAD, chunk(b": hello\n\n" + piece("a")), chunk(piece("b", "stop")), chunk(LAST + b"data: [DONE]\n\n"), END]


class Behind:
    """The other server."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.num_open = 0
        self.site = Site("", 0, False, "/v1")

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {line.partition(":")[0].lower(): line.partition(":")[2].strip() for line in head[1:]}
            path = head[0].split(" ")[1]
            body = json.loads(await reader.readexactly(int(headers.get("content-length", "0"))) or b"{}")
            self.asked.append((path, headers, body))
            for part in self.script(path, body):
                if part == DIES:
                    writer.transport.abort()
                elif isinstance(part, float):
                    await asyncio.wait_for(reader.read(), part)  # until the other side has gone
                    return
                else:
                    writer.write(part)  # type: ignore[arg-type]
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass
        finally:
            self.num_open -= 1
            writer.close()


@asynccontextmanager
async def behind(script: Script) -> AsyncIterator[Behind]:
    other = Behind(script)
    server = await asyncio.start_server(other.answer, "127.0.0.1", 0)
    other.site = site_of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "sk-theirs")
    try:
        yield other
    finally:
        server.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(server.wait_closed(), 5)


@asynccontextmanager
async def passing(
    script: Script, keys: tuple[Key, ...] | None = None, limits: Limits | None = None
) -> AsyncIterator[tuple[Client, Behind, Backend]]:
    async with behind(script) as other:
        served, backend = app(other.site, {"tiny": Model("tiny", "theirs")}, keys, limits)
        transport = httpx2.ASGITransport(served, client=("127.0.0.1", 1))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
            yield Client(http), other, backend


def says(*parts: bytes | float) -> Script:
    return lambda _path, _body: parts


# --- what passes ---


async def test_a_request_goes_on_with_the_other_servers_name_and_key() -> None:
    answer = {"model": "theirs", "choices": [{"index": 0, "message": {"content": "ab"}}], "usage": USAGE, "extra": [1]}
    async with passing(says(*whole(answer))) as (client, other, _):
        got = await client.chat("hi", temperature=0.5, top_k=3, of_their_own={"a": 1})
    assert (got.status_code, got.json()) == (200, answer | {"model": "tiny"})
    path, headers, body = other.asked[0]
    assert (path, headers["authorization"]) == ("/v1/chat/completions", "Bearer sk-theirs")
    assert body == {
        **{"model": "theirs", "messages": [{"role": "user", "content": "hi"}]},
        **{"temperature": 0.5, "top_k": 3, "of_their_own": {"a": 1}},
    }


@pytest.mark.parametrize("has_usage", [False, True])
async def test_a_stream_passes_through_and_is_counted(has_usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if has_usage else {}
    async with passing(says(*ANSWER)) as (client, other, _):
        chunks = await client.chunks(**options)
        metrics = (await client.http.get("/metrics")).text
    assert [each["choices"][0]["delta"]["content"] for each in chunks[:2]] == ["a", "b"]
    assert {each["model"] for each in chunks} == {"tiny"}
    assert [each.get("usage") for each in chunks] == ([None, None, USAGE] if has_usage else [None, None])
    assert other.asked[0][2]["stream_options"] == {"include_usage": True}
    assert 'vllm:prompt_tokens_total{engine="0",model_name="tiny"} 9.0' in metrics
    assert 'finished_reason="stop",model_name="tiny"} 1.0' in metrics
    assert other.num_open == 0


async def test_responses_keep_their_names() -> None:
    done = {"type": "response.completed", "response": {"model": "theirs", "usage": {"input_tokens": 1}}}
    delta = {"type": "response.output_text.delta", "delta": "x"}
    parts = (HEAD, chunk(event(delta, "x") + event(done, "y")), END)
    async with passing(says(*parts)) as (client, other, _):
        answer = await client.post("/v1/responses", input="hi", stream=True)
    assert "event: response.output_text.delta\ndata: " in answer.text
    assert '"model":"tiny"' in answer.text
    assert "stream_options" not in other.asked[0][2]


async def test_other_paths_are_passed_on_to_where_they_are_there() -> None:
    async with passing(says(*whole({"model": "theirs", "data": [], "usage": {"prompt_tokens": 5}}))) as (
        client,
        other,
        _,
    ):
        for path in ("/v1/embeddings", "/v1/completions", "/tokenize", "/detokenize"):
            assert (await client.post(path, input="x")).json()["model"] == "tiny"
        assert [path for path, _, _ in other.asked] == ["/v1/embeddings", "/v1/completions", "/tokenize", "/detokenize"]
        assert [each["id"] for each in (await client.http.get("/v1/models")).json()["data"]] == ["tiny"]
        assert (await client.http.get("/v1/models/tiny")).status_code == 200
        assert (await client.http.get("/version")).status_code == 200


async def test_health_is_a_token_drawn_there_and_not_at_every_request() -> None:
    async with passing(says(*whole({"choices": []}))) as (client, other, _):
        for _ in range(2):
            assert (await client.http.get("/health")).status_code == 200
        assert [body["max_tokens"] for _, _, body in other.asked] == [1]
    async with passing(says(*whole({}, 500))) as (client, _, _):
        answer = await client.http.get("/health")
        assert (answer.status_code, "answers with 500" in answer.text) == (503, True)
    async with passing(says(DIES)) as (client, _, _):
        assert "does not answer" in (await client.http.get("/health")).text


# --- keys ---


async def test_keys_and_budgets_hold_in_front() -> None:
    secret, key = new_key("a", tokens_per_day=20, models=["tiny"])
    headers = {"authorization": f"Bearer {secret}"}
    async with passing(says(*ANSWER), (key,)) as (client, other, _):
        assert (await client.chat()).status_code == 401
        assert other.asked == []
        for _ in range(2):  # eleven tokens each
            assert (await client.chat(stream=True, headers=headers)).status_code == 200
        answer = await client.chat(stream=True, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "insufficient_quota")
        assert len(other.asked) == 2
        assert secret not in str(other.asked)


@pytest.mark.parametrize("parts", [(HEAD, chunk(piece("a") + piece("b")), DIES), (*ANSWER[:3], END)])
async def test_what_the_other_server_does_not_count_is_charged_by_pieces(parts: Sequence[bytes]) -> None:
    secret, key = new_key("a", tokens_per_day=4)
    headers = {"authorization": f"Bearer {secret}"}
    async with passing(says(*parts), (key,)) as (client, _, _):
        await client.chat("four bytes a token, of a body", stream=True, headers=headers)
        assert (await client.chat(headers=headers)).json()["error"]["code"] == "insufficient_quota"


TEXT = "eight by" * 2
CUT_CALL = {"function": {"name": "f", "arguments": TEXT}}
WHOLE: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"choices": [{"message": {"content": TEXT}, "finish_reason": "length"}]}, "length"),
    ("/v1/chat/completions", {"choices": [{"message": {"tool_calls": [CUT_CALL]}, "finish_reason": "stop"}]}, "stop"),
    ("/v1/completions", {"choices": [{"text": TEXT, "finish_reason": "length"}]}, "length"),
    (
        "/v1/responses",
        {"status": "incomplete", "output": [{"content": [{"type": "output_text", "text": TEXT}]}]},
        "length",
    ),
    ("/v1/responses", {"status": "completed", "output": [{"type": "function_call", "arguments": TEXT}]}, "stop"),
]


@pytest.mark.parametrize(("path", "tree", "reason"), WHOLE)
@pytest.mark.parametrize("is_counted", [False, True])
async def test_whole_answers_are_charged_and_measured_counted_or_not(
    path: str, tree: dict[str, Any], reason: str, is_counted: bool
) -> None:
    names = ("input_tokens", "output_tokens") if "responses" in path else ("prompt_tokens", "completion_tokens")
    answer = tree | {"model": "theirs"} | ({"usage": dict(zip(names, (9, 2), strict=True))} if is_counted else {})
    async with passing(says(*whole(answer)), keys=None) as (client, _, _):
        got = await client.post(path, input="0123456789")
        assert (got.status_code, got.json()) == (200, answer | {"model": "tiny"})
        metrics = (await client.http.get("/metrics")).text
    num_read, num_drawn = (9, 2) if is_counted else (len(got.request.content) // 4, len(TEXT) // 4)
    assert f'vllm:prompt_tokens_total{{engine="0",model_name="tiny"}} {num_read}.0' in metrics
    assert f'vllm:generation_tokens_total{{engine="0",model_name="tiny"}} {num_drawn}.0' in metrics
    assert f'finished_reason="{reason}",model_name="tiny"}} 1.0' in metrics
    secret, key = new_key("a", tokens_per_day=num_read + num_drawn)
    headers = {"authorization": f"Bearer {secret}"}
    async with passing(says(*whole(answer)), (key,)) as (client, _, _):
        assert (await client.post(path, headers, input="0123456789")).status_code == 200
        refused = await client.post(path, headers, input="0123456789")
        assert f"has used {num_read + num_drawn}." in refused.json()["error"]["message"]


async def test_the_tokens_of_a_stream_are_those_that_the_other_server_counts() -> None:
    usage = USAGE | {"completion_tokens": 5}  # of two pieces, and a chunk that has a role alone
    first = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    last = event({"choices": [], "usage": usage})
    parts = (HEAD, chunk(first), *ANSWER[1:3], chunk(last + b"data: [DONE]\n\n"), END)
    async with passing(says(*parts)) as (client, _, _):
        await client.chunks()
        metrics = (await client.http.get("/metrics")).text
    assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"} 5.0' in metrics


@pytest.mark.parametrize("stream", [False, True])
async def test_who_hangs_up_before_the_answer_has_its_question_charged(stream: bool) -> None:
    secret, key = new_key("a", tokens_per_day=10)
    headers = {"authorization": f"Bearer {secret}"}
    async with passing(says(*([HEAD] if stream else []), 60.0), (key,)) as (client, other, _):
        asking = asyncio.ensure_future(client.chat("four bytes a token, of a body", stream=stream, headers=headers))
        while not other.asked:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert (await client.chat(headers=headers)).json()["error"]["code"] == "insufficient_quota"


@pytest.mark.parametrize("parts", [[DIES], whole({"error": {"message": "no"}}, 400)])
async def test_what_the_other_server_does_not_take_is_not_charged(parts: Any) -> None:
    secret, key = new_key("a", tokens_per_day=1)
    headers = {"authorization": f"Bearer {secret}"}
    async with passing(says(*parts), (key,)) as (client, _, _):
        for _ in range(2):
            assert (await client.chat(headers=headers)).status_code in (400, 503)


async def test_tokens_of_a_text_alone_cost_nothing() -> None:
    secret, key = new_key("a", tokens_per_day=1)
    headers = {"authorization": f"Bearer {secret}"}
    async with passing(says(*whole({"tokens": [1]})), (key,)) as (client, _, _):
        for _ in range(2):
            assert (await client.post("/tokenize", headers, prompt="a" * 100)).status_code == 200


# --- what fails ---

BREAKS: list[tuple[tuple[bytes, ...], str]] = [
    ((HEAD, DIES), "backend_broke_off"),
    ((HEAD, END), "backend_broke_off"),
    ((HEAD, chunk(piece("a")), DIES), "backend_broke_off"),
    ((HEAD, chunk(piece("a")), b"5\r\nda"), "backend_broke_off"),
    ((HEAD, chunk(piece("a")), END), "backend_broke_off"),  # a bare end there is no bare end here
    ((HEAD, chunk(piece("a")), chunk(b"data: {no json\n\n"), END), "backend_broke_off"),
    ((HEAD, chunk(piece("a")), chunk(event({"error": {"message": "stage is gone", "code": "gone"}})), END), "gone"),
    ((HEAD, chunk(piece("a")), b"no chunk at all"), "backend_broke_off"),
]


@pytest.mark.parametrize(("parts", "code"), BREAKS)
async def test_a_server_that_dies_on_the_way_is_an_error_event(parts: tuple[bytes, ...], code: str) -> None:
    async with passing(says(*parts)) as (client, _, _):
        chunks = await client.chunks()
        assert chunks[-1]["error"]["code"] == code
        assert len(chunks) == 1 + (len(parts) > 2)
        metrics = (await client.http.get("/metrics")).text
    assert 'finished_reason="error",model_name="tiny"} 1.0' in metrics


@pytest.mark.parametrize(
    ("parts", "status", "code"),
    [
        ([DIES], 503, "backend_unreachable"),
        ([b"SSH-2.0-x\r\n"], 503, "backend_unreachable"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}", DIES], 503, "backend_broke_off"),
        (whole([1]), 503, "backend_broke_off"),
        (whole({"error": {"message": "no", "code": "x", "param": "n"}}, 400), 400, "x"),
        (whole({"message": "too many", "object": "error"}, 429, "retry-after: 7\r\n"), 429, None),
        (whole({"error": "boom"}, 500), 500, None),
        (whole({"error": {"message": "who are you"}}, 401), 503, "backend_refused"),
        (whole({}, 302, "location: http://elsewhere/\r\n"), 503, "backend_failed"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_other_server_refuses_is_told(parts: Any, status: int, code: str | None, stream: bool) -> None:
    if stream and status == 503 and code == "backend_broke_off":
        return
    async with passing(says(*parts)) as (client, _, _):
        answer = await client.chat(stream=stream)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert error["message"]
    if status == 429:
        assert answer.headers["retry-after"] == "7"


async def test_a_server_that_says_nothing_is_waited_for_so_long(caplog: pytest.LogCaptureFixture) -> None:
    limits = Limits(max_wait_s=0.05, max_time_s=0.1, still_s=0.02)
    for parts in ((60.0,), (HEAD, 60.0)):
        async with passing(says(*parts), limits=limits) as (client, _, _):
            text = (await client.chat("giraffe", stream=True)).text
            assert '"code":"overloaded"' in text
            assert (await client.chat("giraffe")).status_code == 503
    limits = Limits(max_wait_s=30.0, max_time_s=0.1)
    async with passing(says(HEAD, chunk(piece("zebra")), 60.0), limits=limits) as (client, _, _):
        text = (await client.chat("giraffe", stream=True)).text
        assert "zebra" in text
        assert '"code":"overloaded"' in text
    assert "request req_" in caplog.text
    for word in ("giraffe", "zebra"):
        assert word not in caplog.text.replace("HTTP Request", "")


async def test_who_goes_away_ends_the_work_there() -> None:
    async with passing(says(HEAD, chunk(piece("a")), 60.0)) as (client, other, backend):
        asking = asyncio.ensure_future(client.chat(stream=True))
        while not other.num_open:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        while other.num_open:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert not backend._under_way


async def test_an_end_of_this_server_is_an_event() -> None:
    async with passing(says(HEAD, chunk(piece("a")), 60.0)) as (client, other, backend):
        asking = asyncio.ensure_future(client.chunks())
        while not other.asked:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        backend.close()
        assert (await asking)[-1]["error"]["code"] == "unloaded"


async def test_bounds_hold_in_front() -> None:
    async with passing(says(*whole({})), limits=Limits(max_body_nbytes=100_000)) as (client, other, backend):
        message = {"role": "user", "content": "x"}
        for fields, status in (
            ({"messages": [message] * 2049}, 400),
            ({"messages": [message], "tools": [{}] * 65}, 400),
            ({"messages": [message | {"content": "x" * 100_000}]}, 413),
            ({"messages": [message], "model": "other"}, 404),
        ):
            assert (await client.post("/v1/chat/completions", **fields)).status_code == status
        assert (await client.http.post("/v1/completions", content=b"[]")).status_code == 400
        backend._under_way |= {object() for _ in range(MAX_UNDER_WAY)}  # type: ignore[misc]
        assert (await client.chat()).status_code == 429
        assert other.asked == []


# --- at the start ---


@pytest.mark.parametrize(
    ("parts", "error", "words"),
    [
        (whole({"data": [{"id": "a"}, {"id": "b"}]}), None, ""),
        (whole({"data": 5}), PeerError, "something else than a list"),
        (whole({}, 401), Refused, "does not take the key"),
        (whole({}, 404), CallFailed, "ends in /v1"),
        ([DIES], Unreachable, "nobody answers at"),
    ],
)
async def test_models_are_asked_for_at_the_start(parts: Any, error: type[Exception] | None, words: str) -> None:
    async with behind(says(*parts)) as other:
        if error is None:
            assert [each.id for each in await models_of(other.site)] == ["a", "b"]
        else:
            with pytest.raises(error, match=words):
                await models_of(other.site)


def test_addresses() -> None:
    assert site_of("127.0.0.1:8080").address == "http://127.0.0.1:8080/v1"
    assert site_of("https://there.example/api/v3/").address == "https://there.example:443/api/v3"
    assert site_of("http://[::1]:1").path("/tokenize") == "/tokenize"
    for wrong in ("ftp://x", "http://", "http://me:secret@there/v1", "http://x:99999", "http://a?b=c"):
        with pytest.raises(ConfigError, match=r"no address of a server.*--backend-key"):
            site_of(wrong)
