"""The `openai` client against a real server on loopback: what programs that know this API meet."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import jsonschema
import openai
import pytest
import uvicorn
from pydantic import BaseModel

from budget import piece_s, slowness_of
from unit.chat.test_grammar import schemas
from unit.engine.test_step import CPU, vector_of
from unit.serve.scripted import Script, scripted
from weft import rng
from weft.data.tokenizer import ByteTokenizer
from weft.engine.engine import Engine
from weft.engine.step import KeysAndValues, Stepper, Weights
from weft.model.came_with import CameWith
from weft.model.config import ModelConfig
from weft.serve.app import app
from weft.serve.generation import Model, model_of
from weft.serve.keys import new_key

CONFIG = ModelConfig(
    vocab_size=320, num_layers=2, num_heads=2, num_kv_heads=1, width=32, ffn_width=48, max_seq_len=2048, is_tied=True
)
CALL = '<tool_call>\n{"name": "look", "arguments": {"n": 1}}\n</tool_call>'
PARAMETERS = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "c": {"enum": ["red", "blue"]}},
    "required": ["n", "c"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]
ASK: list[Any] = [{"role": "user", "content": "Hello"}]

FREE_S = 1.0  # until the place of who has gone is free, on a machine that does nothing else
FREE, FREE_KEY = new_key("free")
SLOW, SLOW_KEY = new_key("slow", requests_per_minute=60)


def random_model() -> Model:
    """Return a model of random weights, which writes any bytes."""
    pages = 48
    stepper = Stepper(Weights(CONFIG, vector_of(CONFIG), "fp32"), KeysAndValues(CONFIG, pages, CPU, "fp32"))
    engine = Engine(stepper, vocab_size=CONFIG.vocab_size, context=CONFIG.max_seq_len, num_pages=pages)
    return model_of("random", 1, engine, ByteTokenizer(), CameWith(), "fp")


def named(id: str, *scripts: Script) -> Model:
    return replace(scripted(*scripts), id=id)


class Server:
    """uvicorn on a thread."""

    def __init__(self, models: dict[str, Model]) -> None:
        self.models = models
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        config = uvicorn.Config(app(models, (FREE_KEY, SLOW_KEY)), log_level="warning", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve(sockets=[listener])))
        self._thread.start()
        self._clients: list[openai.OpenAI] = []

    def close(self) -> None:
        for each in self._clients:
            each.close()
        self._server.should_exit = True
        self._thread.join()

    def client(self, secret: str = FREE, **options: Any) -> openai.OpenAI:
        client = openai.OpenAI(base_url=self.url, api_key=secret, **{"max_retries": 0, **options})
        self._clients.append(client)
        return client


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    random = random_model()
    models = [
        random,
        named("says", "héllo wörld. STOP and more"),
        named("calls", CALL),
        named("breaks", ["ab", ValueError("x")]),
        named("json", '{"n": 7, "c": "red"}'),
    ]
    server = Server({model.id: model for model in models})
    yield server
    server.close()
    random.engine.close()


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client()


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["random", "says", "calls", "breaks", "json"]
    assert client.models.retrieve("says").owned_by == "weft"


def test_a_chat_is_answered_whole_and_in_a_stream_with_its_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="says", messages=ASK, stop="STOP")
    assert whole.choices[0].message.content == "héllo wörld. "
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    chunks = list(
        client.chat.completions.create(
            model="says", messages=ASK, stop="STOP", stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == "héllo wörld. "
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == "stop"


def test_a_real_model_says_the_same_with_a_seed(client: openai.OpenAI) -> None:
    def text(seed: int, **options: Any) -> list[str | None]:
        answer = client.chat.completions.create(model="random", messages=ASK, seed=seed, max_tokens=12, **options)
        return [choice.message.content for choice in answer.choices]

    [one], [again], [other] = text(7), text(7), text(8)
    assert one == again != other
    first, second = text(7, n=2)
    assert first == one != second


def test_log_probabilities_are_those_of_what_was_drawn(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="random", messages=ASK, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 5
    for token in logprobs.content:
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob)  # greedy: the likeliest
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob >= token.top_logprobs[2].logprob
    text = b"".join(bytes(token.bytes or ()) for token in logprobs.content)
    assert text.decode("utf-8", "replace") == answer.choices[0].message.content


def test_tools_are_called_whole_and_in_pieces(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="calls", messages=ASK, tools=TOOLS)
    assert answer.choices[0].finish_reason == "tool_calls"
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("look", '{"n": 1}')
    again: list[Any] = [*ASK, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "9"}]
    assert client.chat.completions.create(model="says", messages=again, tools=TOOLS).choices[0].message.content
    pieces = [
        piece
        for chunk in client.chat.completions.create(model="calls", messages=ASK, tools=TOOLS, stream=True)
        for piece in chunk.choices[0].delta.tool_calls or ()
    ]
    assert (pieces[0].type, pieces[0].function and pieces[0].function.name) == ("function", "look")
    assert pieces[0].id
    assert not any(piece.id or piece.type for piece in pieces[1:])
    assert "".join(piece.function.arguments or "" for piece in pieces if piece.function) == '{"n": 1}'


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_real_model_calls_a_tool_where_it_must(client: openai.OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(
        model="random", messages=ASK, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, seed=1, max_tokens=400
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    assert answer.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")


class Look(BaseModel):
    n: int
    c: str


def test_an_answer_is_parsed_into_a_class(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model="json", messages=ASK, response_format=Look)
    assert answer.choices[0].message.parsed == Look(n=7, c="red")


SCHEMAS = list(enumerate(schemas()))
# Random weights end what may end, and write little white space.
ENDING = {str(ord(letter)): 5 for letter in '"}],'} | {str(ord(letter)): -5 for letter in " \n\r\t"}


@pytest.mark.parametrize("part", range(5))
def test_a_real_model_keeps_to_each_of_fifty_strict_schemas(client: openai.OpenAI, part: int) -> None:
    assert len(SCHEMAS) == 50
    for number, schema in SCHEMAS[part::5]:
        format: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
        answer = client.chat.completions.create(
            model="random", messages=ASK, response_format=format, seed=number, max_tokens=400, logit_bias=ENDING
        )
        assert answer.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(answer.choices[0].message.content or ""), schema)


def test_completions_and_responses(client: openai.OpenAI) -> None:
    completion = client.completions.create(model="says", prompt="a", stop="STOP", max_tokens=50)
    assert completion.choices[0].text == "héllo wörld. "
    response = client.responses.create(model="says", input="hi")
    assert response.output_text.startswith("héllo")
    assert response.status == "completed"
    with client.responses.stream(model="says", input="hi") as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text.startswith("héllo")
    assert "response.output_text.delta" in kinds
    called = client.responses.create(
        model="calls",
        input="hi",
        tools=[{"type": "function", "name": "look", "parameters": PARAMETERS, "strict": False}],
    )
    assert called.output[0].type == "function_call"


def test_embeddings_are_the_same_as_numbers_and_as_the_client_asks_for_them(client: openai.OpenAI) -> None:
    texts = ["one text", "another one, longer", "one text"]
    coded = [each.embedding for each in client.embeddings.create(model="random", input=texts).data]
    plain = client.embeddings.create(model="random", input=texts, encoding_format="float")
    for one, other in zip(coded, plain.data, strict=True):
        assert one == pytest.approx(other.embedding, abs=1e-6)
        assert sum(each**2 for each in one) == pytest.approx(1.0, abs=1e-5)
    assert (len(coded[0]), coded[0]) == (CONFIG.width, pytest.approx(coded[2], abs=1e-6))
    assert coded[0] != pytest.approx(coded[1], abs=1e-3)
    assert plain.usage.prompt_tokens == sum(map(len, texts))


def test_a_failure_on_the_way_is_an_error_of_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIError) as failed:
        list(client.chat.completions.create(model="breaks", messages=ASK, stream=True))
    assert failed.value.code == "server_error"
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="breaks", messages=ASK)


FORM = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"not": {}}}}
PICTURE = [{"type": "image_url", "image_url": {"url": "data:"}}]


def turn(content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


ERRORS: list[tuple[type[openai.APIStatusError], str | None, str | None, dict[str, Any]]] = [
    (openai.NotFoundError, "model", "model_not_found", {"model": "nobody"}),
    (openai.BadRequestError, "temperature", None, {"temperature": 9}),
    (openai.BadRequestError, "messages", None, {"messages": []}),
    (openai.BadRequestError, "messages", "context_length_exceeded", turn("x" * 5000)),
    (openai.BadRequestError, "messages[0].role", None, turn("x", "me")),
    (openai.BadRequestError, "messages[0].content[0].type", None, turn(PICTURE)),
    (openai.BadRequestError, "n", None, {"n": 100}),
    (openai.BadRequestError, "stop", None, {"stop": list("abcde")}),
    (openai.BadRequestError, "tool_choice", None, {"tool_choice": "required"}),
    (openai.BadRequestError, "response_format", None, {"response_format": FORM}),
    (openai.BadRequestError, "logit_bias", None, {"logit_bias": {"99999": 1}}),
]


@pytest.mark.parametrize(("kind", "param", "code", "fields"), ERRORS)
def test_errors_are_of_their_class_with_field_and_code(
    client: openai.OpenAI,
    kind: type[openai.APIStatusError],
    param: str | None,
    code: str | None,
    fields: dict[str, Any],
) -> None:
    with pytest.raises(kind) as failed:
        client.chat.completions.create(**{"model": "random", "messages": ASK, **fields})
    assert (failed.value.param, failed.value.code, failed.value.type) == (param, code, "invalid_request_error")
    assert failed.value.request_id


def test_a_wrong_key_is_an_error_of_its_own(server: Server) -> None:
    with pytest.raises(openai.AuthenticationError) as failed:
        server.client("sk-weft-wrong").models.list()
    assert failed.value.code == "invalid_api_key"


def test_a_client_waits_as_long_as_it_is_told(server: Server) -> None:
    patient, hasty = server.client(SLOW, max_retries=3), server.client(SLOW)
    for _ in range(60):
        patient.chat.completions.create(model="says", messages=ASK, max_tokens=1)
    with pytest.raises(openai.RateLimitError) as failed:  # noqa: PT012
        for _ in range(30):
            hasty.chat.completions.create(model="says", messages=ASK, max_tokens=1)
    assert 0 < int(failed.value.response.headers["retry-after-ms"]) <= 1000
    patient.chat.completions.create(model="says", messages=ASK, max_tokens=1)


def test_who_goes_away_frees_pages_within_a_second(server: Server, client: openai.OpenAI) -> None:
    engine = server.models["random"].engine
    stream = client.chat.completions.create(model="random", messages=ASK, stream=True, extra_body={"ignore_eos": True})
    for number, _ in enumerate(stream):
        if number == 3:
            break
    assert engine.totals.num_running == 1
    stream.close()
    began_s = time.monotonic()
    while engine.totals.num_held or engine.totals.num_running:
        time.sleep(0.01)
        assert time.monotonic() - began_s < 60, "its place is never free"
    took_s = time.monotonic() - began_s
    assert took_s < FREE_S * slowness_of(lambda: piece_s(time.monotonic))
    assert cast(int, engine.totals.num_held) == 0


def test_health_is_a_token_that_was_drawn(server: Server) -> None:
    import httpx2

    root = server.url.removesuffix("/v1")
    assert httpx2.get(f"{root}/health").status_code in (200, 503)  # `breaks` does not draw
    assert httpx2.get(f"{root}/metrics", headers={"authorization": f"Bearer {FREE}"}).text.startswith("# HELP")


def test_a_prompt_that_was_read_is_told_as_cached(client: openai.OpenAI) -> None:
    """A text that is asked for twice is read once."""
    long: list[Any] = [{"role": "user", "content": "x" * 300 + rng.fresh_secret(4).hex()}]
    first, second = (
        client.chat.completions.create(model="random", messages=long, max_tokens=2, temperature=0) for _ in range(2)
    )
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= 256
    assert first.choices[0].message.content == second.choices[0].message.content
