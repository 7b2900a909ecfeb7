"""Chat completions: messages and tools in, a message or calls of tools out, whole or in chunks.

    messages ─template─► prompt ─generation─► Deltas ─tools.Reader─► content and calls ─► choices

The first chunk of a text has the role, the last one why it ended; with `include_usage` one more has counts of tokens.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from weft.chat.grammar import Calls, Form, FormRefused, FormWanted
from weft.chat.template import PLAIN_STOPS, plain
from weft.chat.vocabulary import Vocabulary
from weft.errors import DataError
from weft.rng import fresh_secret
from weft.serve.failures import wrong
from weft.serve.generation import Delta, Generation, Model, Plan, Serving, Usage, fingerprint_of, planned
from weft.serve.keys import Visit
from weft.serve.schemas import ChatRequest, Format, Function, Message, NamedTool, Tool, text_of
from weft.serve.text import Likely
from weft.serve.tools import Arguments, CallBegun, Reader, Said, Told, described

Tree = dict[str, Any]


class ToolUse:
    """Which tools a request offers, and whether the answer must call one.

    Raises:
        Fault: a tool that is no function, or a choice of one that is not there.
    """

    def __init__(
        self, tools: Sequence[Tool] | None, choice: str | NamedTool | None, *, is_parallel: bool | None
    ) -> None:
        self.functions: dict[str, Function] = {}
        for number, tool in enumerate(tools or ()):
            if tool.type != "function" or tool.function is None:
                param = f"tools[{number}].type"
                raise wrong(f"{param}: only functions can be called here, not {tool.type[:40]!r}.", param)
            if tool.function.name in self.functions:
                param = f"tools[{number}].function.name"
                raise wrong(f"{param}: two tools are named {tool.function.name!r}.", param)
            self.functions[tool.function.name] = tool.function
        self.is_parallel = is_parallel is not False
        self.named: str | None = None
        self.is_required = choice == "required"
        if isinstance(choice, NamedTool):
            self.named = choice.function.name if choice.function is not None else choice.name
            if self.named not in self.functions:
                raise wrong(f"tool_choice: there is no tool {self.named!r} in tools.", "tool_choice")
        elif choice not in (None, "none", "auto", "required"):
            raise wrong(f"tool_choice: none, auto, required or a tool, not {choice[:40]!r}.", "tool_choice")
        elif choice == "required" and not self.functions:
            raise wrong("tool_choice: a call is required, but there are no tools.", "tool_choice")
        if choice == "none":
            self.functions = {}

    @property
    def is_forced(self) -> bool:
        return self.is_required or self.named is not None

    def trees(self) -> list[Tree]:
        """Return the tools as templates know them."""
        found = []
        for function in self.functions.values():
            parameters = function.parameters or {"type": "object", "properties": {}}
            tree = {"name": function.name, "description": function.description or "", "parameters": parameters}
            found.append({"type": "function", "function": tree})
        return found

    def calls(self, model: Model) -> Calls:
        """Return how the answer's calls are written."""
        style = model.style
        allowed = {name: each for name, each in self.functions.items() if self.named in (None, name)}
        return Calls(
            {name: dict(each.parameters or {"type": "object"}) for name, each in allowed.items()},
            tuple(name for name, each in allowed.items() if each.strict),
            style.arguments,
            style.begin,
            style.between,
            style.end,
            are_many=self.is_parallel and self.named is None,
        )


def schema_of(format: Format | None) -> tuple[Tree, bool] | None:
    """Return the schema that an answer must follow, and whether strictly; None: it is free.

    Raises:
        Fault: a schema is announced and not there.
    """
    if format is None or format.type in (None, "text"):
        return None
    if format.type == "json_object":
        return {"type": "object"}, False
    given = format.json_schema
    schema = format.schema if given is None else given.schema
    if schema is None:
        raise wrong("response_format: json_schema.schema is missing.", "response_format")
    return schema, bool(format.strict if given is None else given.strict)


async def form_of(model: Model, use: ToolUse, format: Format | None) -> Form | None:
    """Return what the answer must look like; None: it is free.

    Raises:
        Fault: a schema that cannot be held to.
    """
    wanted = schema_of(format)
    if wanted is None and not use.is_forced:
        return None
    schema, is_strict = (None, False) if wanted is None or use.is_forced else wanted
    calls = use.calls(model) if use.functions else None
    form = FormWanted(schema=schema, is_strict=is_strict, calls=calls, ends=tuple(sorted(model.ends)))
    param = "tools" if use.is_forced else "response_format"
    try:
        return await asyncio.to_thread(model.forms.made, form)
    except FormRefused as error:
        raise wrong(f"{param}: {error}.", param) from None


def prompt_of(
    model: Model,
    messages: Sequence[Message],
    use: ToolUse,
    wall_s: float,
    settings: Mapping[str, Any] | None = None,
    *,
    is_continued: bool = False,
) -> list[int]:
    """Return the prompt of a chat. It may take a while: call it from a thread of its own.

    Raises:
        Fault: the template refuses it, or the tokenizer does not know a character.
    """
    vocabulary, template = model.vocabulary, model.template
    trees = [_tree(message, number, vocabulary) for number, message in enumerate(messages)]
    if is_continued and trees[-1]["role"] != "assistant":
        raise wrong("continue_final_message: the last message is not the assistant's.", "continue_final_message")
    tools: list[Tree] = vocabulary.guarded_tree(use.trees())
    if tools and (template is None or not template.takes_tools):
        trees = _with_system(trees, described(tools))
        tools = []
    try:
        if template is None:
            text = plain([_flat(tree) for tree in trees])
        else:
            known = vocabulary.guarded_tree(dict(settings or {}))
            text = template.render(trees, tools, wall_s=wall_s, settings=known, is_continued=is_continued)
        if is_continued:
            text = _cut_after(text, (trees[-1]["content"] or "").strip())
        return vocabulary.encode(text)
    except DataError as error:
        raise wrong(f"messages: {error}", "messages") from None


def _cut_after(text: str, last: str) -> str:
    before, found, _ = text.rpartition(last) if last else (text, "", "")
    if last and not found:
        said = "continue_final_message: the model's template changes the last message, so it cannot be gone on with."
        raise wrong(said, "continue_final_message")
    return before + found


def _tree(message: Message, number: int, vocabulary: Vocabulary) -> Tree:
    """Return a message as templates know it."""
    text = text_of(message.content, f"messages[{number}].content")
    text = vocabulary.guarded(text, is_assistants=message.role == "assistant")
    tree: Tree = {"role": "system" if message.role == "developer" else message.role, "content": text}
    if message.name is not None:
        tree["name"] = vocabulary.guarded(message.name)
    if message.reasoning_content is not None:
        is_said = message.role == "assistant"
        tree["reasoning_content"] = vocabulary.guarded(message.reasoning_content, is_assistants=is_said)
    if message.tool_call_id is not None:
        tree["tool_call_id"] = vocabulary.guarded(message.tool_call_id)
    if message.tool_calls:
        tree["content"] = text or None
        tree["tool_calls"] = [
            {
                "id": vocabulary.guarded(call.id or f"call_{place:04d}"),
                "type": "function",
                "function": {
                    "name": vocabulary.guarded(call.function.name),
                    "arguments": _arguments(call.function.arguments, number, place, vocabulary),
                },
            }
            for place, call in enumerate(message.tool_calls)
        ]
    return tree


def _arguments(text: str, number: int, place: int, vocabulary: Vocabulary) -> Any:
    param = f"messages[{number}].tool_calls[{place}].function.arguments"
    try:
        return vocabulary.guarded_tree(json.loads(text or "{}"))
    except ValueError:
        raise wrong(f"{param}: no JSON.", param) from None
    except RecursionError:
        raise wrong(f"{param}: nested too deep. Make it flatter.", param) from None


def _with_system(trees: list[Tree], text: str) -> list[Tree]:
    if trees[0]["role"] == "system":
        return [trees[0] | {"content": f"{trees[0]['content']}\n\n{text}"}, *trees[1:]]
    return [{"role": "system", "content": text}, *trees]


def _flat(tree: Tree) -> Tree:
    """Return a message with its calls as text, for where there is no template."""
    calls = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in tree.get("tool_calls", ())
    ]
    return tree | {"content": "\n".join([*([tree["content"]] if tree["content"] else []), *calls])}


# --- an answer ---


class Choice:
    """One text of an answer, as content and calls."""

    def __init__(self, index: int, reader: Reader | None, *, is_named: bool, is_parallel: bool) -> None:
        self.index = index
        self.content = ""
        self.calls: list[Tree] = []
        self.likely: list[Likely] = []
        self.reason: str | None = None
        self.course: Tree | None = None
        self._reader = reader
        self._is_named, self._is_parallel = is_named, is_parallel

    def take(self, delta: Delta) -> list[Told]:
        """Take more of the text; return what that says."""
        if self._reader is None:
            told: list[Told] = [Said(delta.text)] if delta.text else []
        else:
            told = self._reader.feed(delta.text)
            told += self._reader.finish() if delta.reason is not None else []
        if not self._is_parallel:
            told = [each for each in told if isinstance(each, Said) or each.number == 0]
        for each in told:
            self._note(each)
        self.likely += delta.likely
        self.course = delta.course or self.course
        if delta.reason is not None:
            is_called = self.calls and not self._is_named and delta.reason == "stop"
            self.reason = "tool_calls" if is_called else delta.reason
        return told

    def _note(self, told: Told) -> None:
        match told:
            case Said(text):
                self.content += text
            case CallBegun(_, id, name):
                self.calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": ""}})
            case Arguments(number, text):
                self.calls[number]["function"]["arguments"] += text

    @property
    def message(self) -> Tree:
        content = self.content if self.content or not self.calls else None
        tree: Tree = {"role": "assistant", "content": content, "refusal": None}
        return tree | ({"tool_calls": self.calls} if self.calls else {})


class Chat:
    """A chat completion under way."""

    def __init__(self, request: ChatRequest, use: ToolUse, generation: Generation, created: int) -> None:
        self._request, self._generation = request, generation
        model = generation.model
        self.choices = [
            Choice(
                index,
                Reader(model.style, list(use.functions)) if use.functions else None,
                is_named=use.named is not None,
                is_parallel=use.is_parallel,
            )
            for index in range(generation.plan.n)
        ]
        self._head: Tree = {"id": f"chatcmpl-{fresh_secret(12).hex()}", "created": created, "model": model.id}

    @property
    def _base(self) -> Tree:
        return self._head | {"system_fingerprint": fingerprint_of([self._generation])}

    async def whole(self) -> Tree:
        """Return the answer when it is whole."""
        async for delta in self._generation.deltas():
            self.choices[delta.index].take(delta)
        choices = [
            {
                "index": choice.index,
                "message": choice.message,
                "logprobs": logprobs_tree(choice.likely) if self._request.logprobs else None,
                "finish_reason": choice.reason,
                **course_tree(choice.course),
            }
            for choice in self.choices
        ]
        usage = usage_tree(self._generation.usage)
        return self._base | {"object": "chat.completion", "choices": choices, "usage": usage}

    async def events(self) -> AsyncIterator[Tree]:
        """Yield the answer in chunks."""
        for choice in self.choices:
            yield self._chunk(choice.index, {"role": "assistant", "content": ""})
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                choice = self.choices[delta.index]
                told = choice.take(delta)
                for tree in map(_delta_tree, told):
                    yield self._chunk(choice.index, tree, self._unsaid(choice))
                if choice.reason is not None or delta.course is not None:
                    yield self._chunk(choice.index, {}, self._unsaid(choice), choice.reason, delta.course)
        if self._has_usage:
            usage = usage_tree(self._generation.usage)
            yield self._base | {"object": "chat.completion.chunk", "choices": [], "usage": usage}

    def cancel(self) -> None:
        """Draw no more."""
        self._generation.cancel()

    def _unsaid(self, choice: Choice) -> Tree | None:
        """Return log-probabilities that no chunk has told yet."""
        if not self._request.logprobs or not choice.likely:
            return None
        tree = logprobs_tree(choice.likely)
        choice.likely = []
        return tree

    @property
    def _has_usage(self) -> bool:
        options = self._request.stream_options
        return options is not None and bool(options.include_usage)

    def _chunk(
        self,
        index: int,
        delta: Tree,
        logprobs: Tree | None = None,
        reason: str | None = None,
        course: Tree | None = None,
    ) -> Tree:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason, **course_tree(course)}
        chunk = self._base | {"object": "chat.completion.chunk", "choices": [choice]}
        options = self._request.stream_options
        if options is not None and options.include_obfuscation:
            length = len(json.dumps(delta))
            chunk["obfuscation"] = fresh_secret(64).hex()[: -length % 64]  # whoever sees lengths sees multiples of 64
        return chunk | ({"usage": None} if self._has_usage else {})


def _delta_tree(told: Told) -> Tree:
    match told:
        case Said(text):
            return {"content": text}
        case CallBegun(number, id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": number, "id": id, "type": "function", "function": function}]}
        case Arguments(number, text):
            return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}


def logprobs_tree(all_likely: Sequence[Likely]) -> Tree:
    def tree(piece: bytes, logprob: float) -> Tree:
        return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}

    content = [
        tree(each.piece, each.logprob) | {"top_logprobs": [tree(*other) for other in each.likeliest]}
        for each in all_likely
    ]
    return {"content": content, "refusal": None}


def course_tree(course: Tree | None) -> Tree:
    """Return whom a text has come by, as a field that the API does not have: programs pass it over, or show it."""
    return {} if course is None else {"weft": course}


def usage_tree(usage: Usage) -> Tree:
    return {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_drawn,
        "total_tokens": usage.num_prompt + usage.num_drawn,
        "prompt_tokens_details": {"cached_tokens": usage.num_shared},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def chat_plan(request: ChatRequest, use: ToolUse, model: Model, visit: Visit, wall_s: float) -> Plan:
    """Return the plan of a chat.

    Raises:
        Fault: a field that does not fit the model.
    """
    if request.top_logprobs is not None and not request.logprobs:
        raise wrong("top_logprobs: needs logprobs to be true.", "top_logprobs")
    form = await form_of(model, use, request.response_format)
    prompt = await asyncio.to_thread(
        prompt_of,
        model,
        request.messages,
        use,
        wall_s,
        request.chat_template_kwargs,
        is_continued=bool(request.continue_final_message),
    )
    plan = planned(request, model, prompt, request.max_completion_tokens or request.max_tokens, visit, "messages")
    stops = [*plan.stops, *(PLAIN_STOPS if model.template is None else ())]
    mark = model.style.mark
    shown = {token: mark.encode() for name, token in model.vocabulary.control.items() if use.functions and name == mark}
    num_likeliest = (request.top_logprobs or 0) if request.logprobs else None
    drawing = replace(plan.drawing, num_likeliest=num_likeliest)
    return replace(plan, stops=stops, form=form, shown=shown, drawing=drawing)


async def begin(request: ChatRequest, model: Model, visit: Visit, serving: Serving) -> Chat:
    """Begin a chat completion.

    Raises:
        Fault: it cannot be answered as it is.
        Full: too many wait.
    """
    use = ToolUse(request.tools, request.tool_choice, is_parallel=request.parallel_tool_calls)
    wall_s = serving.clock.wall()
    plan = await chat_plan(request, use, model, visit, wall_s)
    return Chat(request, use, Generation(model, plan, visit, serving), int(wall_s))
