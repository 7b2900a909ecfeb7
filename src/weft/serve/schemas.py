"""What is asked for, as programs of this API write it. What is not known here is passed over; wrong types are refused.

`read` turns a body into one of these, or into a fault that names the field.
"""

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from weft.engine.draw import LEAST_REPETITION, MAX_BIASED
from weft.serve.failures import Fault, wrong

MAX_MESSAGES = 2048
MAX_TOOLS = 64
MAX_STOPS = 4
MAX_TEXTS = 4
MAX_INPUTS = 2048  # texts of a request for embeddings, as the API has it
MAX_LIKELIEST = 20

R = TypeVar("R", bound="Asked")

Unit = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
Count = Annotated[int, Meta(ge=1, le=1 << 31)]
Ids = list[Annotated[int, Meta(ge=0, lt=1 << 31)]]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what is read from a body."""


class Function(Asked, frozen=True, kw_only=True):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Asked, frozen=True, kw_only=True):
    type: str
    function: Function | None = None


class NamedFunction(Asked, frozen=True, kw_only=True):
    name: str


class NamedTool(Asked, frozen=True, kw_only=True):
    """A choice of one tool; the Responses API writes the name beside the type."""

    type: str = "function"
    function: NamedFunction | None = None
    name: str | None = None


class Part(Asked, frozen=True, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(Asked, frozen=True, kw_only=True):
    name: str
    arguments: str = ""


class Call(Asked, frozen=True, kw_only=True):
    function: CalledFunction
    id: str | None = None
    type: str = "function"


class Message(Asked, frozen=True, kw_only=True):
    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class JsonSchema(Asked, frozen=True, kw_only=True):
    name: str = "answer"
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class Format(Asked, frozen=True, kw_only=True):
    """`response_format`; the Responses API writes the schema beside the type."""

    type: Literal["text", "json_object", "json_schema"] | None = None
    json_schema: JsonSchema | None = None
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class StreamOptions(Asked, frozen=True, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class TextRequest(Asked, frozen=True, kw_only=True):
    """How tokens are drawn, in all kinds of requests that draw some. What is null is as the model's folder says."""

    model: str
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Unit | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    min_p: Unit | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=LEAST_REPETITION, le=10.0)] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_BIASED)] | None = None
    stop: str | list[str] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_TEXTS)] | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None


class ChatRequest(TextRequest, frozen=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LIKELIEST)] | None = None
    response_format: Format | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None


class CompletionRequest(TextRequest, frozen=True, kw_only=True):
    prompt: str | list[Any]
    max_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LIKELIEST)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    response_format: Format | None = None


class TextSettings(Asked, frozen=True, kw_only=True):
    format: Format | None = None


class ResponseTool(Asked, frozen=True, kw_only=True):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Item(Asked, frozen=True, kw_only=True):
    """A turn of the Responses API: a message, a call, or what came of one."""

    type: str = "message"
    role: Literal["developer", "system", "user", "assistant"] | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


class ResponseRequest(TextRequest, frozen=True, kw_only=True):
    input: str | Annotated[list[Item], Meta(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    text: TextSettings | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LIKELIEST)] | None = None
    metadata: dict[str, Any] | None = None


class EmbeddingRequest(Asked, frozen=True, kw_only=True):
    model: str
    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    stream: bool | None = None


class TokenizeRequest(Asked, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Asked, frozen=True, kw_only=True):
    tokens: Ids
    model: str | None = None


_PLACE = re.compile(r" - at `(?:key in )?\$\.?(.*?)`$", re.DOTALL)


def read(body: bytes, kind: type[R]) -> R:
    """Return the request of a body.

    Raises:
        Fault: no JSON, or a field of another type or out of range.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _of_field(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise wrong(f"The body is no JSON object: {str(error)[:200]}.") from None


def _of_field(said: str) -> Fault:
    place = _PLACE.search(said)
    param = place[1] if place else None
    if missing := re.match(r"Object missing required field `(\w+)`", said):
        param = f"{param}.{missing[1]}" if param else missing[1]
        return wrong(f"{param} is missing.", param, "missing_required_parameter")
    what = _PLACE.sub("", said)
    return wrong(f"{param or 'The body'}: {what[:1].lower()}{what[1:]}.", param or None)


def text_of(content: str | list[Part] | None, place: str) -> str:
    """Return the text of a message's content.

    Raises:
        Fault: a part is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "input_text", "output_text", "refusal") or text is None:
            param = f"{place}[{number}].type"
            raise wrong(f"{param}: {part.type[:40]!r} cannot be read: this model takes text alone.", param)
        texts.append(text)
    return "".join(texts)


def stops_of(stop: str | list[str] | None) -> list[str]:
    """Return the stop strings.

    Raises:
        Fault: more than `MAX_STOPS`, or an empty one.
    """
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    if len(stops) > MAX_STOPS:
        raise wrong(f"stop: at most {MAX_STOPS} strings, not {len(stops)}.", "stop")
    if any(not each or len(each) > 1024 for each in stops):
        raise wrong("stop: each string has 1 to 1,024 characters.", "stop")
    return stops
