"""The application: each answer in the API's shape, each failure told, and whoever goes away leaves nothing."""

import asyncio
import base64
import json
import logging
import struct
import threading
from typing import Any

import httpx2
import pytest
import tokenizers
from starlette.responses import Response as Plain
from starlette.routing import Route

from unit.chat.templates import HERMES, LLAMA3, MISTRAL
from unit.serve.scripted import READ, ScriptedEngine, asking, scripted
from weft.chat.vocabulary import Vocabulary
from weft.data.tokenizer import ByteTokenizer, Ids, JsonTokenizer
from weft.engine.text import Full
from weft.errors import NotFinite
from weft.serve.app import app
from weft.serve.keys import Limits, new_key

TOOL = {"name": "look", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}
TOOLS = [{"type": "function", "function": TOOL}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"n": 1}}\n</tool_call>'
TURNS = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content or '' }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.n }}{% endif %}]{% endfor %}{{ eos_token }}"
)
NAMED = {"type": "function", "function": {"name": "look"}}


async def test_an_answer_is_a_message_with_its_count_of_tokens() -> None:
    async with asking(scripted("hello wörld")) as client:
        answer = await client.chat(max_completion_tokens=50)
    tree = answer.json()
    assert tree["object"] == "chat.completion"
    assert tree["choices"][0]["message"] == {"role": "assistant", "content": "hello wörld", "refusal": None}
    assert tree["choices"][0]["finish_reason"] == "stop"
    assert tree["usage"]["completion_tokens"] == 12
    assert (tree["model"], tree["system_fingerprint"]) == ("tiny", "fp")
    assert answer.headers["x-request-id"].startswith("req_")


async def test_a_stream_says_role_text_and_why_it_ended_and_then_the_count() -> None:
    async with asking(scripted("hello")) as client:
        *chunks, last = await client.chunks(max_tokens=3, stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in chunks) == "hel"
    assert [each["choices"][0]["finish_reason"] for each in chunks][-2:] == [None, "length"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert {each["id"] for each in [*chunks, last]} == {last["id"]}
    assert all(each["usage"] is None for each in chunks)


async def test_lengths_of_pieces_are_hidden_where_that_is_asked_for() -> None:
    words = ["a", "bcd", "e" * 30, "fg"]
    async with asking(scripted("".join(words))) as client:
        plain = await client.chunks()
        hidden = await client.chunks(stream_options={"include_obfuscation": True})
    assert not any("obfuscation" in each for each in plain)
    pieces = [each["choices"][0]["delta"] for each in hidden]
    assert pieces == [each["choices"][0]["delta"] for each in plain]
    lengths = {len(json.dumps(piece)) for piece in pieces}
    assert len(lengths) > 1
    told = {len(json.dumps(each["choices"][0]["delta"])) + len(each["obfuscation"]) for each in hidden}
    assert all(length % 64 == 0 for length in told)
    assert len({each["obfuscation"] for each in hidden}) == len(hidden)


async def test_a_stop_string_is_not_told_and_ends_the_work() -> None:
    model = scripted("hello world and more")
    async with asking(model) as client:
        chunks = await client.chunks(stop=["xyz", "o w"])
        assert "".join(each["choices"][0]["delta"].get("content", "") for each in chunks) == "hell"
    engine: Any = model.engine
    assert engine.begun[0].is_cancelled


async def test_log_probabilities_come_with_their_bytes() -> None:
    async with asking(scripted("é!")) as client:
        tree = (await client.chat(logprobs=True, top_logprobs=2)).json()
        streamed = await client.chunks(logprobs=True, top_logprobs=2)
    content = tree["choices"][0]["logprobs"]["content"]
    assert [each["bytes"] for each in content] == [[0xC3], [0xA9], [33]]
    assert [len(each["top_logprobs"]) for each in content] == [2, 2, 2]
    assert content[0]["logprob"] == -0.5
    parts = [each["choices"][0]["logprobs"] for each in streamed if each["choices"][0]["logprobs"]]
    assert [each for part in parts for each in part["content"]] == content


async def test_several_texts_are_told_apart() -> None:
    async with asking(scripted("one", "two")) as client:
        tree = (await client.chat(n=2)).json()
        assert [each["message"]["content"] for each in tree["choices"]] == ["one", "two"]
        chunks = await client.chunks(n=2)
    assert {each["choices"][0]["index"] for each in chunks} == {0, 1}
    assert sum(each["choices"][0]["finish_reason"] == "stop" for each in chunks) == 2


async def test_seeds_and_settings_reach_the_engine() -> None:
    model = scripted("a")
    engine: Any = model.engine
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 1,
        "logit_bias": {"65": -100},
    }
    async with asking(model) as client:
        for _ in range(2):
            await client.chat(seed=-3, n=2, **fields)
        await client.chat()
    first, second, again, _, free = (each.wanted.drawing for each in engine.begun)
    assert (first.temperature, first.top_p, first.top_k, first.min_p, first.presence) == (0.5, 0.9, 5, 0.1, 1.0)
    assert first.bias == {65: -100.0}
    assert first.seed == again.seed != second.seed
    assert free.seed != first.seed
    assert free.temperature == 1.0


async def test_keys_do_not_share_pages_but_one_may_share_by_name() -> None:
    secrets = [new_key(name) for name in ("a", "b")]
    model = scripted("x")
    engine: Any = model.engine
    async with asking(model, keys=tuple(key for _, key in secrets)) as client:
        for secret, fields in ((0, {}), (1, {}), (0, {}), (0, {"prompt_cache_key": "team"})):
            await client.chat(headers={"authorization": f"Bearer {secrets[secret][0]}"}, **fields)
    salts = [each.wanted.salt for each in engine.begun]
    assert salts[0] == salts[2]
    assert len(set(salts)) == 3
    assert [each.wanted.key for each in engine.begun] == ["a", "b", "a", "a"]


# --- tools ---


@pytest.mark.parametrize(("choice", "reason"), [(None, "tool_calls"), ("required", "tool_calls"), (NAMED, "stop")])
async def test_a_call_of_a_tool_is_told_whole_and_in_pieces(choice: Any, reason: str) -> None:
    async with asking(scripted(CALL)) as client:
        [whole] = (await client.chat(tools=TOOLS, tool_choice=choice)).json()["choices"]
        chunks = await client.chunks(tools=TOOLS, tool_choice=choice)
    assert (whole["finish_reason"], whole["message"]["content"]) == (reason, None)
    assert whole["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"n": 1}'}
    first, *rest = [
        each["choices"][0]["delta"]["tool_calls"][0] for each in chunks if "tool_calls" in each["choices"][0]["delta"]
    ]
    assert (first["type"], first["function"], first["index"]) == ("function", {"name": "look", "arguments": ""}, 0)
    assert first["id"].startswith("call_")
    assert all(set(each) == {"index", "function"} for each in rest)
    assert "".join(each["function"]["arguments"] for each in rest) == '{"n": 1}'
    assert len(rest) > 3


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (LLAMA3, '{"name": "look", "parameters": {"n": 1}}'),
        (MISTRAL, '[TOOL_CALLS][{"name": "look", "arguments": {"n": 1}}]'),
        (HERMES, CALL),
    ],
)
async def test_each_way_of_calling_is_asked_for_and_read(template: str, said: str) -> None:
    async with asking(scripted(said, template=template)) as client:
        for choice in ("auto", "required"):
            [choice_made] = (await client.chat(tools=TOOLS, tool_choice=choice)).json()["choices"]
            assert choice_made["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"n": 1}'}


async def test_tools_that_may_not_be_called_are_not_told_to_the_model() -> None:
    model = scripted(CALL)
    engine: Any = model.engine
    async with asking(model) as client:
        [choice] = (await client.chat(tools=TOOLS, tool_choice="none")).json()["choices"]
    assert choice["message"]["content"] == CALL
    assert "look" not in engine.prompt()


async def test_one_call_is_all_where_no_more_are_wanted() -> None:
    async with asking(scripted(f"{CALL}\n{CALL}")) as client:
        [choice] = (await client.chat(tools=TOOLS, parallel_tool_calls=False)).json()["choices"]
        assert len(choice["message"]["tool_calls"]) == 1
        [choice] = (await client.chat(tools=TOOLS)).json()["choices"]
        assert len(choice["message"]["tool_calls"]) == 2


async def test_a_schema_may_be_answered_beside_tools() -> None:
    format = {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object", "properties": {"a": {"const": 1}}}},
    }
    async with asking(scripted('{"a": 1}', CALL)) as client:
        [one] = (await client.chat(tools=TOOLS, response_format=format)).json()["choices"]
        [other] = (await client.chat(tools=TOOLS, response_format=format)).json()["choices"]
    assert one["message"]["content"] == '{"a": 1}'
    assert other["finish_reason"] == "tool_calls"


async def test_a_strict_schema_that_cannot_be_held_to_is_refused_beside_tools_too() -> None:
    schema = {"type": "object", "not": {"required": ["a"]}}
    async with asking(scripted("{}")) as client:
        for is_strict, status in ((True, 400), (False, 200)):
            format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": is_strict}}
            for more in ({}, {"tools": TOOLS}):
                answer = await client.chat(response_format=format, **more)
                assert answer.status_code == status, answer.text


async def test_messages_reach_the_template_with_calls_and_letters_that_look_like_control_tokens() -> None:
    model = scripted("x", template=TURNS)
    engine: Any = model.engine
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"n": 41}'}}
    async with asking(model) as client:
        await client.post(
            "/v1/chat/completions",
            messages=[
                {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "user", "content": "<|endoftext|>"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
            ],
        )
    assert engine.prompt() == "[system:ab][user:<|endoftext|>][assistant:41]"
    assert list(engine.begun[0].wanted.prompt).count(256) == 1


async def test_marks_that_the_template_writes_are_tokens_of_the_assistant_alone() -> None:
    engine_of_marks = tokenizers.Tokenizer.from_str(ByteTokenizer().to_json().decode())
    engine_of_marks.add_tokens([tokenizers.AddedToken("</think>", special=False, normalized=False)])
    tokenizer = JsonTokenizer(engine_of_marks.to_str().encode(), 256)
    model = scripted("x", template=TURNS + "</think>", tokenizer=tokenizer)
    engine: Any = model.engine
    async with asking(model) as client:
        said = [{"role": role, "content": "hm</think>"} for role in ("system", "user", "assistant", "user")]
        await client.post("/v1/chat/completions", messages=said)
        assert engine.prompt().count("</think>") == len(said) + 1
        assert list(engine.begun[0].wanted.prompt).count(model.vocabulary.marks["</think>"]) == 2


async def test_the_last_message_can_be_gone_on_with() -> None:
    turns = [MESSAGE, {"role": "assistant", "content": "Well, "}]
    for template in (None, TURNS):
        model = scripted("x", template=template)
        engine: Any = model.engine
        async with asking(model) as client:
            answer = await client.post("/v1/chat/completions", messages=turns, continue_final_message=True)
            assert answer.status_code == 200
            assert engine.prompt().endswith("Well,")
            answer = await client.chat(continue_final_message=True)
            assert answer.json()["error"]["param"] == "continue_final_message"


async def test_settings_of_a_template_make_no_control_tokens() -> None:
    model = scripted("x", template="{{ mood }}")
    engine: Any = model.engine
    async with asking(model) as client:
        await client.chat(chat_template_kwargs={"mood": "<|endoftext|>", "messages": []})
    assert engine.prompt() == "<|endoftext|>"
    assert 256 not in engine.begun[0].wanted.prompt


# --- the other paths ---


async def test_completions_of_text_and_of_tokens() -> None:
    async with asking(scripted("one", "two", "three")) as client:
        tree = (await client.post("/v1/completions", prompt=["ab", "cd"], echo=True)).json()
        assert [each["text"] for each in tree["choices"]] == ["abone", "cdtwo"]
        assert tree["usage"]["prompt_tokens"] == 4
        tree = (await client.post("/v1/completions", prompt=[97, 98], logprobs=1, max_tokens=2)).json()
        [choice] = tree["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("th", "length")
        assert choice["logprobs"]["tokens"] == ["t", "h"]
        assert choice["logprobs"]["text_offset"] == [0, 1]
        chunks = await client.chunks("/v1/completions", prompt="x", stream_options={"include_usage": True})
        assert "".join(each["choices"][0]["text"] for each in chunks if each["choices"]) == "three"
        assert chunks[-1]["usage"]["prompt_tokens"] == 1


async def test_embeddings_of_texts_and_of_tokens_as_numbers_and_as_base64() -> None:
    async with asking(scripted("x")) as client:
        for given, lengths in (("abc", [3]), ([97, 98], [2]), (["a", "abcd"], [1, 4]), ([[97], [98, 99, 1]], [1, 3])):
            answer = (await client.post("/v1/embeddings", input=given)).json()
            assert [each["index"] for each in answer["data"]] == list(range(len(lengths)))
            for each, length in zip(answer["data"], lengths, strict=True):
                size = (length**2 + 1) ** 0.5
                assert each["embedding"] == pytest.approx([length / size, 1 / size, 0.0])
            assert answer["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}
            coded = (await client.post("/v1/embeddings", input=given, encoding_format="base64")).json()
            for each, other in zip(answer["data"], coded["data"], strict=True):
                numbers = struct.unpack("<3f", base64.b64decode(other["embedding"]))
                assert each["embedding"] == pytest.approx(numbers)
        metrics = (await client.http.get("/metrics")).text
    assert 'vllm:prompt_tokens_total{engine="0",model_name="tiny"} 28.0' in metrics


async def test_embeddings_are_charged_and_share_no_pages() -> None:
    secret, key = new_key("a", tokens_per_day=10)
    model = scripted("x")
    engine: Any = model.engine
    headers = {"authorization": f"Bearer {secret}"}
    async with asking(model, keys=(key,)) as client:
        assert (await client.post("/v1/embeddings", headers, input=["a" * 5] * 2)).status_code == 200
        assert (await client.post("/v1/embeddings", headers, input="a")).status_code == 429
    assert len({text.wanted.salt for text in engine.begun}) == 2
    async with asking(scripted(Full(2.0))) as client:
        assert (await client.post("/v1/embeddings", input="a")).status_code == 429


async def test_embeddings_are_charged_where_nobody_waits_for_their_end_and_not_where_there_is_no_place() -> None:
    secret, key = new_key("a", tokens_per_day=5)
    headers = {"authorization": f"Bearer {secret}"}
    async with asking(scripted([60.0]), keys=(key,), limits=Limits(max_time_s=0.05)) as client:
        assert (await client.post("/v1/embeddings", headers, input="a" * 5)).status_code == 503
        assert (await client.post("/v1/embeddings", headers, input="a")).status_code == 429
    async with asking(scripted(Full(2.0), "x"), keys=(key,)) as client:
        for _ in range(3):
            answer = await client.post("/v1/embeddings", headers, input="a" * 5)
            assert answer.json()["error"]["message"].startswith("Too many texts wait")


async def test_models_tokens_version() -> None:
    async with asking(scripted("x")) as client:
        listed = (await client.http.get("/v1/models")).json()["data"]
        assert [(each["id"], each["created"], each["max_model_len"]) for each in listed] == [("tiny", 7, 4096)]
        assert (await client.http.get("/v1/models/tiny")).json() == listed[0]
        assert (await client.post("/tokenize", prompt="ab")).json() == {
            "count": 2,
            "max_model_len": 4096,
            "tokens": [97, 98],
        }
        counted = (await client.post("/tokenize", messages=[{"role": "user", "content": "ab"}])).json()["count"]
        assert counted == len("User: ab\n\nAssistant:")
        assert (await client.post("/detokenize", tokens=[97, 256, 98])).json() == {"prompt": "ab"}
        assert "version" in (await client.http.get("/version")).json()


class Watched(ByteTokenizer):
    """Notes on which threads it works."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def encode(self, text: str) -> Ids:
        self.threads.add(threading.get_ident())
        return super().encode(text)

    def decode(self, ids: Any) -> str:
        self.threads.add(threading.get_ident())
        return super().decode(ids)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": ["a", "b"], "echo": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}),
    ],
)
async def test_nobody_waits_while_somebodys_text_is_made_tokens(path: str, fields: dict[str, Any]) -> None:
    tokenizer = Watched()
    model = scripted([97], tokenizer=tokenizer)
    assert model.vocabulary
    tokenizer.threads.clear()
    async with asking(model) as client:
        assert (await client.post(path, **fields)).status_code == 200
    assert tokenizer.threads
    assert threading.get_ident() not in tokenizer.threads


async def test_tokens_are_made_text_beside_others_and_within_a_keys_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()
    piece = Vocabulary.piece

    def watched(self: Vocabulary, token: int) -> bytes:
        threads.add(threading.get_ident())
        return piece(self, token)

    monkeypatch.setattr(Vocabulary, "piece", watched)
    secret, key = new_key("a", requests_per_minute=1)
    headers = {"authorization": f"Bearer {secret}"}
    async with asking(scripted("x"), keys=(key,)) as client:
        answer = await client.post("/detokenize", headers, tokens=[97, 98])
        assert (answer.json(), answer.headers["x-ratelimit-limit-requests"]) == ({"prompt": "ab"}, "1")
        assert (await client.post("/detokenize", headers, tokens=[97])).status_code == 429
    assert threads
    assert threading.get_ident() not in threads


async def test_health_draws_a_token_and_not_at_every_request() -> None:
    model, broken = scripted("x"), scripted(["x"[:0], NotFinite("nan")])
    engine: Any = model.engine
    async with asking(model) as client:
        for _ in range(3):
            assert (await client.http.get("/health")).status_code == 200
    assert len(engine.begun) == 1
    async with asking(broken) as client:
        answer = await client.http.get("/health")
        assert answer.status_code == 503
        assert "NotFinite" in answer.text
    async with asking() as client:
        assert (await client.http.get("/health")).status_code == 503


# --- what is refused ---

MESSAGE = {"role": "user", "content": "x"}
NESTED = "[" * 900 + "]" * 900  # JSON's own reader takes so many
WRONG: list[tuple[dict[str, Any], int, str | None, str | None]] = [
    ({"temperature": "hot"}, 400, "temperature", None),
    ({"temperature": 3}, 400, "temperature", None),
    ({"n": 5}, 400, "n", None),
    ({"max_tokens": 0}, 400, "max_tokens", None),
    ({"messages": []}, 400, "messages", None),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role", None),
    ({"messages": [MESSAGE] * 2049}, 400, "messages", None),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content[0].type", None),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        400,
        "messages[0].tool_calls[0].function.arguments",
        None,
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": NESTED}}]}]},
        400,
        "messages[0].tool_calls[0].function.arguments",
        None,
    ),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "messages", "context_length_exceeded"),
    ({"model": "other"}, 404, "model", "model_not_found"),
    ({"stop": ["a"] * 5}, 400, "stop", None),
    ({"stop": ""}, 400, "stop", None),
    ({"logit_bias": {"257": 1}}, 400, "logit_bias", None),
    ({"top_logprobs": 3}, 400, "top_logprobs", None),
    ({"tools": [{"type": "code_interpreter"}]}, 400, "tools[0].type", None),
    ({"tools": TOOLS * 2}, 400, "tools[1].function.name", None),
    ({"tools": TOOLS * 65}, 400, "tools", None),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, 400, "tool_choice", None),
    ({"tool_choice": "required"}, 400, "tool_choice", None),
    ({"response_format": {"type": "xml"}}, 400, "response_format.type", None),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format", None),
    ({"seed": 1 << 70}, 400, "seed", None),
]


@pytest.mark.parametrize(("fields", "status", "param", "code"), WRONG)
async def test_what_is_wrong_is_told_with_its_field(
    fields: dict[str, Any], status: int, param: str | None, code: str | None
) -> None:
    async with asking(scripted("x")) as client:
        answer = await client.post("/v1/chat/completions", **{"messages": [MESSAGE], **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code)
    assert error["type"] == "invalid_request_error"
    assert error["message"]


async def test_what_is_no_json_or_lacks_a_field_or_is_too_long_is_refused() -> None:
    async with asking(scripted("x"), limits=Limits(max_body_nbytes=1000)) as client:
        for body, status in ((b"{", 400), (b"[]", 400), (b"\xff", 400), (b"[" * 900, 400), (b"x" * 1001, 413)):
            answer = await client.http.post("/v1/chat/completions", content=body)
            assert answer.status_code == status, body[:10]
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        error = (await client.post("/v1/chat/completions")).json()["error"]
        assert (error["param"], error["code"]) == ("messages", "missing_required_parameter")


async def test_unknown_fields_and_nulls_are_passed_over() -> None:
    nulls = dict.fromkeys(("temperature", "n", "stop", "tools", "tool_choice", "logprobs", "stream", "seed", "user"))
    async with asking(scripted("x")) as client:
        answer = await client.chat(**nulls, store=True, verbosity="low", safety_identifier="a", metadata={"a": "b"})
        assert answer.status_code == 200
        for path, fields in (
            ("/v1/embeddings", {"input": "x", "encoding_format": None}),
            ("/v1/chat/completions", {"messages": [MESSAGE], "response_format": {"type": None}}),
            ("/v1/responses", {"input": [{"role": None, "type": "reasoning"}, MESSAGE], "text": {"format": None}}),
            ("/tokenize", {"prompt": "x", "add_special_tokens": None, "return_token_strs": None}),
        ):
            answer = await client.post(path, **fields)
            assert answer.status_code == 200, answer.text


async def test_what_is_not_here_is_told_in_the_same_shape() -> None:
    async with asking(scripted("x")) as client:
        answers = [
            (await client.http.get("/v1/models/no"), 404),
            (await client.http.get("/nowhere"), 404),
            (await client.http.get("/v1/chat/completions"), 405),
            (await client.post("/v1/embeddings", input="x", dimensions=2), 400),
            (await client.post("/v1/embeddings", input=[]), 400),
            (await client.post("/v1/embeddings", input=["x", ""]), 400),
            (await client.post("/v1/embeddings", input=["x", 5]), 400),
            (await client.post("/v1/embeddings", input=["x"] * 2049), 400),
            (await client.post("/v1/embeddings", input="x" * 5000), 400),
            (await client.post("/v1/embeddings", input=[300]), 400),
            (await client.post("/v1/embeddings", input="x", encoding_format="int8"), 400),
            (await client.post("/v1/completions", prompt="a", suffix="b"), 400),
            (await client.post("/v1/completions", prompt=["a"] * 5), 400),
            (await client.post("/v1/completions", prompt=[-1]), 400),
            (await client.post("/v1/completions", prompt=[300]), 400),
            (await client.post("/v1/responses", input="a", previous_response_id="r"), 400),
            (await client.post("/detokenize", tokens=[999]), 400),
        ]
    for answer, status in answers:
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_each_answer_has_an_id() -> None:
    page = [Route("/page", lambda _request: Plain("page")), Route("/broken", lambda _request: 1 / 0)]
    served = app({"tiny": scripted("x")}, page=page)
    transport = httpx2.ASGITransport(served, client=("127.0.0.1", 1), raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
        for path, status in (
            ("/health", 200),
            ("/version", 200),
            ("/metrics", 200),
            ("/page", 200),
            ("/v1/models", 200),
            ("/nowhere", 404),
            ("/v1/chat/completions", 405),
            ("/broken", 500),
        ):
            for given in ("", "mine-1", "not one"):
                answer = await http.get(path, headers={"x-request-id": given} if given else {})
                assert answer.status_code == status, path
                [id] = answer.headers.get_list("x-request-id")
                assert id == given if given == "mine-1" else id.startswith("req_")


async def test_keys_and_limits_are_told_by_their_status() -> None:
    secret, key = new_key("a", requests_per_minute=1, models=["tiny"])
    async with asking(scripted("x"), keys=(key,)) as client:
        answer = await client.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        headers = {"authorization": f"Bearer {secret}"}
        answer = await client.chat(headers=headers)
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "1"
        answer = await client.chat(headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert (await client.http.get("/v1/models")).status_code == 401
        assert (await client.http.get("/metrics")).status_code == 401
        assert (await client.http.get("/health")).status_code == 200


async def test_pages_of_elsewhere_cannot_ask_a_server_without_keys() -> None:
    async with asking(scripted("x")) as client:
        for headers, status in (
            ({"host": "evil.example"}, 403),
            ({"origin": "http://evil.example"}, 403),
            ({"origin": "null"}, 403),
            ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}, 200),
            ({"host": "[::1]:8000"}, 200),
        ):
            assert (await client.chat(headers=headers)).status_code == status


async def test_a_full_queue_says_when_to_come_back() -> None:
    async with asking(scripted(Full(2.5))) as client:
        answer = await client.chat()
        assert answer.status_code == 429
        assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("3", "2500")
        streamed = await client.chat(stream=True)
        assert streamed.status_code == 429


# --- failures on the way ---


async def test_silence_is_filled_and_then_is_an_event() -> None:
    limits = Limits(still_s=0.02, max_wait_s=0.1, max_time_s=0.3)
    async with asking(scripted([5.0, "x"], ["x", 5.0, "y"]), limits=limits) as client:
        answer = await client.chat(stream=True)
        assert ": still here\n\n" in answer.text
        assert '"code":"overloaded"' in answer.text
        answer = await client.chat(stream=True)
        assert '"code":"timeout"' in answer.text
        assert "[DONE]" not in answer.text


async def test_a_long_prompt_may_be_read_for_longer_than_a_request_may_wait() -> None:
    reading = [each for _ in range(20) for each in (0.05, READ)]
    async with asking(scripted([*reading, "x"], [READ, 5.0]), limits=Limits(max_wait_s=0.6)) as client:
        answer = await client.chat()
        assert answer.json()["choices"][0]["message"]["content"] == "x"
        stuck = await client.chat()
        assert (stuck.status_code, stuck.json()["error"]["code"]) == (503, "overloaded")
    async with asking(scripted([*reading, "x"]), limits=Limits(max_wait_s=0.6, max_time_s=0.7)) as client:
        late = await client.chat()
        assert (late.status_code, late.json()["error"]["code"]) == (503, "timeout")


async def ask_and_go(
    fields: dict[str, Any],
    engine: ScriptedEngine,
    served: Any,
    *,
    takes: bool,
    path: str = "/v1/chat/completions",
    secret: str = "",
) -> None:
    """Ask, and go away once something is under way; `takes`: whether what is sent is taken."""
    body = json.dumps({"model": "tiny", **({"messages": [MESSAGE]} if "chat" in path else {}), **fields}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    gone = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if not takes and message["type"] == "http.response.body":
            gone.set()
            await asyncio.Event().wait()

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(b"host", b"localhost"), (b"authorization", f"Bearer {secret}".encode())],
        "query_string": b"",
    }
    doing = asyncio.ensure_future(served(scope | {"client": ("127.0.0.1", 1)}, receive, send))
    while not engine.begun:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    if takes:
        gone.set()
    await asyncio.wait_for(doing, 5)


@pytest.mark.parametrize("stream", [True, False])
async def test_who_goes_away_ends_the_work(stream: bool) -> None:
    model = scripted(["x", 60.0, "y"])
    engine: Any = model.engine
    await ask_and_go({"stream": stream, "n": 2}, engine, app({"tiny": model}), takes=True)
    assert all(each.is_cancelled for each in engine.begun)
    assert engine.totals.num_running == 0


async def test_who_takes_nothing_and_goes_ends_the_work_too() -> None:
    model = scripted(["x"] * 50)
    engine: Any = model.engine
    await ask_and_go({"stream": True}, engine, app({"tiny": model}), takes=False)
    assert all(each.is_cancelled for each in engine.begun)
    assert engine.totals.num_running == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_who_goes_away_pays_for_texts_that_were_not_read_yet_and_their_end_is_counted(stream: bool) -> None:
    secret, key = new_key("a", tokens_per_day=67)
    model = scripted(["x", 60.0])
    engine: Any = model.engine
    begin = engine.begin

    def drawn_ahead(*asked: Any) -> Any:
        text = begin(*asked)
        text.num_unread = 64 if len(engine.begun) == 2 else 0
        return text

    engine.begin = drawn_ahead
    served = app({"tiny": model}, (key,))
    asks = {"prompt": ["a", "b"], "stream": stream}
    await ask_and_go(asks, engine, served, takes=True, path="/v1/completions", secret=secret)
    transport = httpx2.ASGITransport(served, client=("127.0.0.1", 1))
    headers = {"authorization": f"Bearer {secret}"}
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as http:
        metrics = (await http.get("/metrics")).text
        assert 'finished_reason="abort",model_name="tiny"} 2.0' in metrics
        answer = await http.post("/v1/completions", json={"model": "tiny", "prompt": "a"})  # 2 read, 1 and 64 drawn
        assert answer.status_code == 429, answer.text
        assert "has used 67." in answer.json()["error"]["message"]


async def test_neither_question_nor_answer_is_logged_or_measured(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    secret, key = new_key("anna")
    headers = {"authorization": f"Bearer {secret}"}
    async with asking(scripted("zebra", ["zebra", ValueError("giraffe zebra")]), keys=(key,)) as client:
        for _ in range(3):
            await client.chat("giraffe", headers=headers)
        await client.chat("giraffe", headers=headers, temperature="giraffe")
        measured = (await client.http.get("/metrics", headers=headers)).text
    told = measured + caplog.text.replace("HTTP Request", "") + "".join(capsys.readouterr())
    assert "request req_" in told
    for word in ("giraffe", "zebra", secret):
        assert word not in told


# --- metrics ---


@pytest.mark.parametrize("at_once", [1, 2])
async def test_gaps_are_those_between_steps_and_not_of_a_slow_reader(at_once: int) -> None:
    def told(text: str, name: str) -> float:
        return float(text.partition(f'vllm:{name}{{engine="0",model_name="tiny"}} ')[2].split()[0])

    model = scripted("hell")
    engine: Any = model.engine
    engine.step_s, engine.at_once = 8.0, at_once  # whenever they are read
    async with asking(model) as client:
        await client.chat()
        metrics = (await client.http.get("/metrics")).text
    num = 4 // at_once - 1
    assert told(metrics, "inter_token_latency_seconds_count") == num
    assert told(metrics, "inter_token_latency_seconds_sum") == pytest.approx(8.0 * num)
    assert told(metrics, "request_decode_time_seconds_sum") == pytest.approx(8.0 * num)


async def test_answers_of_one_request_are_asked_for_together() -> None:
    model = scripted("hello")
    engine: Any = model.engine
    async with asking(model) as client:
        await client.chat(n=3)
        await client.post("/v1/completions", prompt=["a", "b"], n=2)
    assert engine.num_more == [2, 1, 0, 3, 2, 1, 0]


async def test_metrics_count_what_was_asked() -> None:
    async with asking(scripted("hello")) as client:
        await client.chat()
        await client.chat(n=9)
        text = (await client.http.get("/metrics")).text
    assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"} 5.0' in text
    assert 'weft_serve_refused_total{status="400"} 1.0' in text
