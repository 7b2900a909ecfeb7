"""Libraries of others against weft's server: what a program gets that speaks to it through LiteLLM or LangChain."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, SecretStr

from conformance.test_openai import CALL, FREE, PARAMETERS, Server, named

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of theirs


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    models = [named("says", "héllo wörld"), named("calls", CALL), named("breaks", ["ab", ValueError("x")])]
    models.append(named("json", '{"n": 7, "c": "red"}'))
    server = Server({model.id: model for model in models})
    yield server
    server.close()


class Look(BaseModel):
    """Look something up."""

    n: int
    c: str


# --- LiteLLM ---


@pytest.fixture
def litellm() -> Any:
    return pytest.importorskip("litellm", reason="the package litellm is not installed")


def ask(litellm: Any, server: Server, model: str, **fields: Any) -> Any:
    message = [{"role": "user", "content": "hi"}]
    where = {"api_base": server.url, "api_key": FREE, "num_retries": 0, "max_retries": 0}
    return litellm.completion(model=f"openai/{model}", messages=message, **where, **fields)


def test_litellm_completes_whole_and_in_a_stream(litellm: Any, server: Server) -> None:
    answer = ask(litellm, server, "says")
    assert answer.choices[0].message.content == "héllo wörld"
    assert answer.usage.completion_tokens == len("héllo wörld".encode())
    chunks = list(ask(litellm, server, "says", stream=True, stream_options={"include_usage": True}))
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == "héllo wörld"
    assert [each.usage.completion_tokens for each in chunks if getattr(each, "usage", None)][-1] == 13


def test_litellm_has_tools_and_errors(litellm: Any, server: Server) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]
    (call,) = ask(litellm, server, "calls", tools=tools).choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("look", '{"n": 1}')
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(
            model="openai/says", messages=[{"role": "user", "content": "x" * 5000}], api_base=server.url, api_key=FREE
        )
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(
            model="openai/says", messages=[{"role": "user", "content": "x"}], api_base=server.url, api_key="no"
        )
    with pytest.raises(litellm.NotFoundError):
        ask(litellm, server, "nobody")
    with pytest.raises(Exception, match="server failed"):  # never a stream that merely ends
        for _ in ask(litellm, server, "breaks", stream=True):
            pass


# --- LangChain ---


@pytest.fixture
def chat(server: Server) -> Any:
    langchain = pytest.importorskip("langchain_openai", reason="the package langchain-openai is not installed")

    def made(model: str) -> Any:
        return langchain.ChatOpenAI(model=model, base_url=server.url, api_key=SecretStr(FREE), max_retries=0)

    return made


def test_langchain_invokes_and_streams(chat: Any) -> None:
    answer = chat("says").invoke("hi")
    assert answer.content == "héllo wörld"
    assert answer.usage_metadata["output_tokens"] == 13
    assert "".join(each.content for each in chat("says").stream("hi")) == "héllo wörld"


def test_langchain_calls_tools_and_parses(chat: Any) -> None:
    from langchain_core.tools import tool

    @tool
    def look(n: int) -> str:
        """Look something up."""
        return str(n)

    (call,) = chat("calls").bind_tools([look]).invoke("hi").tool_calls
    assert (call["name"], call["args"]) == ("look", {"n": 1})
    assert chat("json").with_structured_output(Look, method="json_schema").invoke("hi") == Look(n=7, c="red")


def test_langchain_embeds(server: Server) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="the package langchain-openai is not installed")
    embeddings = langchain.OpenAIEmbeddings(
        model="says", base_url=server.url, api_key=SecretStr(FREE), check_embedding_ctx_length=False
    )
    assert [len(each) for each in embeddings.embed_documents(["one text", "another"])] == [3, 3]
