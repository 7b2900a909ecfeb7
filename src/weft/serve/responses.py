"""The Responses API: the same answers as items of text and calls, with an event for each step of their making.

Nothing is stored, so `previous_response_id` is refused: send the turns again.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from weft.rng import fresh_secret
from weft.serve.chat import Choice, ToolUse, chat_plan, course_tree, logprobs_tree
from weft.serve.failures import Fault, fault_of, wrong
from weft.serve.generation import Generation, Model, Serving
from weft.serve.keys import Visit
from weft.serve.schemas import (
    Call,
    CalledFunction,
    ChatRequest,
    Format,
    Function,
    Item,
    Message,
    NamedTool,
    ResponseRequest,
    ResponseTool,
    Tool,
    text_of,
)
from weft.serve.tools import Arguments, CallBegun, Reader, Said, Told

Tree = dict[str, Any]
_WITH_LIKELY = "message.output_text.logprobs"  # in `include`
_NO_PARAMETERS: Tree = {"type": "object", "properties": {}}


class Response:
    """A response under way."""

    def __init__(self, request: ResponseRequest, use: ToolUse, generation: Generation, created: int) -> None:
        self._request, self._use, self._generation, self._created = request, use, generation, created
        self._id = f"resp_{fresh_secret(16).hex()}"
        reader = Reader(generation.model.style, list(use.functions)) if use.functions else None
        self._choice = Choice(0, reader, is_named=use.named is not None, is_parallel=use.is_parallel)
        self._items: list[Tree] = []
        self._number = 0  # of the next event

    async def whole(self) -> Tree:
        """Return the response when it is whole."""
        async for delta in self._generation.deltas():
            told = self._choice.take(delta)
            for each, likely in zip(told, self._likely_of(told), strict=True):
                self._take(each)
                self._add_likely(likely)
        for item in self._items:
            item["status"] = "completed"
        if self._items:  # the last is where the answer was cut off
            self._items[-1]["status"] = self._status
        return self._tree(self._status)

    async def events(self) -> AsyncIterator[Tree]:
        """Yield what happens, each with its type; a failure is `response.failed`, and the stream's last event."""
        yield self._event("response.created", response=self._tree("in_progress"))
        yield self._event("response.in_progress", response=self._tree("in_progress"))
        try:
            async with aclosing(self._generation.deltas()) as deltas:
                async for delta in deltas:
                    told = self._choice.take(delta)
                    for each, likely in zip(told, self._likely_of(told), strict=True):
                        for event in self._told(each, likely):
                            yield event
        except Exception as error:
            fault = fault_of(error)
            yield self._event("response.failed", response=self._tree("failed", fault))
            raise fault from error
        status = self._status
        for event in self._closed(status):
            yield event
        kind = "response.completed" if status == "completed" else "response.incomplete"
        yield self._event(kind, response=self._tree(status))

    def cancel(self) -> None:
        """Draw no more."""
        self._generation.cancel()

    @property
    def _status(self) -> str:
        return "incomplete" if self._choice.reason == "length" else "completed"

    def _likely_of(self, told: Sequence[Told]) -> list[list[Tree]]:
        """Return what log-probabilities go out with each of `told`: those of tokens of a message. What a call was
        written with goes out with nothing."""
        found: list[list[Tree]] = []
        for each in told:
            found.append(logprobs_tree(self._choice.likely)["content"] if isinstance(each, Said) else [])
            self._choice.likely = []
        return found

    def _add_likely(self, likely: list[Tree]) -> None:
        if likely:
            self._items[-1]["content"][0]["logprobs"] += likely

    def _event(self, type: str, **fields: Any) -> Tree:
        self._number += 1
        return {"type": type, "sequence_number": self._number - 1, **fields}

    def _take(self, told: Told) -> Tree:
        """Put what was told into its item, and return that."""
        last = self._items[-1] if self._items else None
        match told:
            case Said(text):
                if last is None or last["type"] != "message":
                    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                    id = f"msg_{fresh_secret(16).hex()}"
                    last = {
                        "id": id,
                        "type": "message",
                        "status": "in_progress",
                        "role": "assistant",
                        "content": [part],
                    }
                    self._items.append(last)
                last["content"][0]["text"] += text
            case CallBegun(_, id, name):
                last = {"id": f"fc_{fresh_secret(16).hex()}", "type": "function_call", "status": "in_progress"}
                last |= {"call_id": id, "name": name, "arguments": ""}
                self._items.append(last)
            case Arguments(_, text):
                assert last is not None
                last["arguments"] += text
        assert last is not None
        return last

    def _told(self, told: Told, likely: list[Tree]) -> list[Tree]:
        num_before = len(self._items)
        begins = isinstance(told, CallBegun) or not num_before or self._items[-1]["type"] != "message"
        events = self._closed() if begins and not isinstance(told, Arguments) else []
        item = self._take(told)
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        if len(self._items) > num_before:
            nothing: Tree = {"content": []} if item["type"] == "message" else {"arguments": ""}
            empty = item | nothing
            events.append(self._event("response.output_item.added", output_index=num_before, item=empty))
            if item["type"] == "message":
                part = item["content"][0] | {"text": "", "logprobs": []}
                events.append(self._event("response.content_part.added", **place, content_index=0, part=part))
        self._add_likely(likely)
        match told:
            case Said(text):
                kind = "response.output_text.delta"
                events.append(self._event(kind, **place, content_index=0, delta=text, logprobs=likely))
            case Arguments(_, text):
                events.append(self._event("response.function_call_arguments.delta", **place, delta=text))
        return events

    def _closed(self, status: str = "completed") -> list[Tree]:
        """Return the events that end the last item, if it is under way."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return []
        item = self._items[-1]
        item["status"] = status
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        events = []
        if item["type"] == "message":
            part = item["content"][0]
            done = {"content_index": 0, "text": part["text"], "logprobs": list(part["logprobs"])}
            events.append(self._event("response.output_text.done", **place, **done))
            events.append(self._event("response.content_part.done", **place, content_index=0, part=dict(part)))
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._event("response.function_call_arguments.done", **place, **done))
        done_item = self._event("response.output_item.done", output_index=place["output_index"], item=dict(item))
        return [*events, done_item]

    def _tree(self, status: str, fault: Fault | None = None) -> Tree:
        request, usage = self._request, self._generation.usage
        error = None if fault is None else {"code": fault.code or "server_error", "message": str(fault)}
        is_over = status != "in_progress"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": self._generation.model.id,
            "output": [dict(item) for item in self._items] if is_over else [],
            "parallel_tool_calls": self._use.is_parallel,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": self._generation.plan.drawing.temperature,
            "text": {"format": _format_tree(request)},
            "tool_choice": _choice_tree(request),
            "tools": [_tool_tree(tool) for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": self._generation.plan.drawing.top_p,
            "truncation": "disabled",
            "metadata": request.metadata or {},
            "usage": {
                "input_tokens": usage.num_prompt,
                "input_tokens_details": {"cached_tokens": usage.num_shared},
                "output_tokens": usage.num_drawn,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.num_prompt + usage.num_drawn,
            }
            if is_over
            else None,
            **course_tree(self._choice.course if is_over else None),
        }


def _format_tree(request: ResponseRequest) -> Tree:
    format = None if request.text is None else request.text.format
    if format is None or format.type != "json_schema":
        return {"type": "text" if format is None or format.type is None else format.type}
    given = format if format.json_schema is None else format.json_schema
    tree = {"type": "json_schema", "name": given.name or "answer", "schema": given.schema}
    return tree | {"strict": bool(given.strict)}


def _choice_tree(request: ResponseRequest) -> str | Tree:
    choice = request.tool_choice
    if isinstance(choice, NamedTool):
        return {"type": "function", "name": choice.name if choice.function is None else choice.function.name}
    return choice or "auto"


def _tool_tree(tool: ResponseTool) -> Tree:
    tree = {"type": "function", "name": tool.name, "description": tool.description or ""}
    return tree | {"parameters": tool.parameters or _NO_PARAMETERS, "strict": bool(tool.strict)}


def messages_of(request: ResponseRequest) -> list[Message]:
    """Return the turns as messages.

    Raises:
        Fault: an item that is no turn.
    """
    found = [] if request.instructions is None else [Message(role="system", content=request.instructions)]
    if isinstance(request.input, str):
        return [*found, Message(role="user", content=request.input)]
    for number, item in enumerate(request.input):
        param = f"input[{number}]"
        match item:
            case Item(type="message", role=role) if role is not None:
                found.append(Message(role=role, content=text_of(item.content, f"{param}.content")))
            case Item(type="function_call", name=str(name), call_id=call_id):
                call = Call(id=call_id, function=CalledFunction(name=name, arguments=item.arguments or "{}"))
                if found and found[-1].tool_calls:
                    found[-1] = Message(
                        role="assistant", content=found[-1].content, tool_calls=[*found[-1].tool_calls, call]
                    )
                else:
                    found.append(Message(role="assistant", tool_calls=[call]))
            case Item(type="function_call_output", call_id=call_id):
                text = text_of(item.output, f"{param}.output")
                found.append(Message(role="tool", content=text, tool_call_id=call_id))
            case Item(type="reasoning"):
                continue
            case _:
                raise wrong(f"{param}.type: {item.type[:40]!r} cannot be read here, or lacks a field.", f"{param}.type")
    if not found:
        raise wrong("input: give at least one turn.", "input")
    return found


def _tools(request: ResponseRequest) -> list[Tool]:
    tools = []
    for number, tool in enumerate(request.tools or ()):
        if tool.type != "function" or tool.name is None:
            param = f"tools[{number}].type"
            raise wrong(f"{param}: only functions can be called here, not {tool.type[:40]!r}.", param)
        function = Function(
            name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
        )
        tools.append(Tool(type="function", function=function))
    return tools


def _as_chat(
    request: ResponseRequest, messages: Sequence[Message], tools: list[Tool], format: Format | None
) -> ChatRequest:
    """Return the chat that makes the same text."""
    shared = {name: getattr(request, name) for name in ResponseRequest.__struct_fields__ if hasattr(ChatRequest, name)}
    shared |= {"messages": list(messages), "tools": tools or None, "response_format": format, "n": 1}
    has_likely = request.top_logprobs is not None or _WITH_LIKELY in (request.include or ())
    most = request.max_output_tokens
    return ChatRequest(**{**shared, "stream": None, "logprobs": has_likely, "max_tokens": most})


async def begin(request: ResponseRequest, model: Model, visit: Visit, serving: Serving) -> Response:
    """Begin a response.

    Raises:
        Fault: it cannot be answered as it is.
        Full: too many wait.
    """
    if request.previous_response_id is not None:
        said = "previous_response_id: nothing is stored here; send the turns before as input."
        raise wrong(said, "previous_response_id")
    if request.background:
        raise wrong("background: answers are made while the request waits; leave it out.", "background")
    tools = _tools(request)
    use = ToolUse(tools, request.tool_choice, is_parallel=request.parallel_tool_calls)
    format = None if request.text is None else request.text.format
    chat = _as_chat(request, messages_of(request), tools, format)
    wall_s = serving.clock.wall()
    plan = await chat_plan(chat, use, model, visit, wall_s)
    return Response(request, use, Generation(model, replace(plan, n=1), visit, serving), int(wall_s))
