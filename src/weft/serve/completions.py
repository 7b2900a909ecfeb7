"""Completions of plain prompts, in the API's older form: text in, text out."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from weft.errors import DataError
from weft.rng import fresh_secret
from weft.serve.chat import ToolUse, course_tree, form_of, usage_tree
from weft.serve.failures import wrong
from weft.serve.generation import Generation, Model, Serving, Usage, fingerprint_of, planned
from weft.serve.keys import Visit
from weft.serve.schemas import MAX_TEXTS, CompletionRequest
from weft.serve.text import Likely

Tree = dict[str, Any]
_USUAL_TOKENS = 16  # what the API draws where nothing is said


class Completion:
    """Completions under way: those of each prompt one after the other.

    Args:
        prompts: as text, where they are told before their answers.
    """

    def __init__(
        self, request: CompletionRequest, generations: Sequence[Generation], prompts: Sequence[str], created: int
    ) -> None:
        self._request, self._generations, self._prompts = request, generations, prompts
        model = generations[0].model
        self._head: Tree = {"id": f"cmpl-{fresh_secret(12).hex()}", "object": "text_completion", "created": created}
        self._head |= {"model": model.id}
        self._lengths: dict[int, int] = {}  # characters of each choice so far, for offsets

    @property
    def _base(self) -> Tree:
        return self._head | {"system_fingerprint": fingerprint_of(self._generations)}

    async def whole(self) -> Tree:
        """Return the answer when it is whole."""
        choices: dict[int, Tree] = {}
        async for index, text, likely, reason, course in self._told():
            choice = choices.setdefault(index, {"index": index, "text": "", "logprobs": None, "finish_reason": None})
            choice["logprobs"] = _joined(choice["logprobs"], self._logprobs(index, text, likely))
            choice["text"] += text
            choice["finish_reason"] = reason
            choice |= course_tree(course)
        usage = usage_tree(self._usage)
        return self._base | {"choices": [choices[index] for index in sorted(choices)], "usage": usage}

    async def events(self) -> AsyncIterator[Tree]:
        """Yield the answer in chunks."""
        options = self._request.stream_options
        has_usage = options is not None and bool(options.include_usage)
        none_yet = {"usage": None} if has_usage else {}
        async with aclosing(self._told()) as told:
            async for index, text, likely, reason, course in told:
                logprobs = self._logprobs(index, text, likely)
                choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
                choice |= course_tree(course)
                yield self._base | {"choices": [choice]} | none_yet
        if has_usage:
            yield self._base | {"choices": [], "usage": usage_tree(self._usage)}

    def cancel(self) -> None:
        """Draw no more."""
        for generation in self._generations:
            generation.cancel()

    async def _told(self) -> AsyncGenerator[tuple[int, str, Sequence[Likely], str | None, Tree | None], None]:
        n = self._request.n or 1
        for number, generation in enumerate(self._generations):
            if self._request.echo:
                for index in range(n):
                    yield number * n + index, self._prompts[number], (), None, None
            async with aclosing(generation.deltas()) as deltas:
                async for delta in deltas:
                    yield number * n + delta.index, delta.text, delta.likely, delta.reason, delta.course

    @property
    def _usage(self) -> Usage:
        all_usage = [generation.usage for generation in self._generations]
        return Usage(
            sum(each.num_prompt for each in all_usage),
            sum(each.num_shared for each in all_usage),
            sum(each.num_drawn for each in all_usage),
        )

    def _logprobs(self, index: int, text: str, all_likely: Sequence[Likely]) -> Tree | None:
        place = self._lengths.get(index, 0)
        self._lengths[index] = place + len(text)
        if self._request.logprobs is None:
            return None
        tokens = [each.piece.decode("utf-8", "replace") for each in all_likely]
        offsets = []
        for token in tokens:
            offsets.append(place)
            place += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [each.logprob for each in all_likely],
            "top_logprobs": [
                {piece.decode("utf-8", "replace"): logprob for piece, logprob in each.likeliest} for each in all_likely
            ],
            "text_offset": offsets,
        }


def _joined(one: Tree | None, other: Tree | None) -> Tree | None:
    if one is None or other is None:
        return other
    return {name: [*one[name], *other[name]] for name in one}


def texts_of(given: str | list[Any], model: Model, most: int, param: str) -> list[list[int]]:
    """Return texts as tokens: one, as text or tokens, or a list of such. It may take a while: call it from a thread of
    its own.

    Args:
        most: of them.
        param: the field that they stand in.

    Raises:
        Fault: one is neither text nor tokens of the model, or there are too many.
    """
    many: list[Any] = [given] if isinstance(given, str) or all(type(each) is int for each in given) else given
    if not 1 <= len(many) <= most:
        raise wrong(f"{param}: 1 to {most} texts together, not {len(many)}.", param)
    found = []
    for number, each in enumerate(many):
        place = param if len(many) == 1 else f"{param}[{number}]"
        if isinstance(each, str):
            try:
                found.append(model.vocabulary.encode_plain(each))
            except DataError as error:
                raise wrong(f"{place}: {error}", place) from None
        elif isinstance(each, list) and all(type(token) is int and token >= 0 for token in each):
            if (token := next((one for one in each if one >= model.engine.vocab_size), None)) is not None:
                raise wrong(f"{place}: token {token} is outside the model's {model.engine.vocab_size}.", place)
            found.append(each)
        else:
            raise wrong(f"{place}: text or a list of tokens is needed.", place)
    return found


async def begin(request: CompletionRequest, model: Model, visit: Visit, serving: Serving) -> Completion:
    """Begin completions.

    Raises:
        Fault: it cannot be answered as it is.
        Full: too many wait.
    """
    if request.suffix:
        raise wrong("suffix: text cannot be filled in between here; leave it out.", "suffix")
    if request.best_of not in (None, request.n or 1):
        raise wrong("best_of: only what n says can be made here; leave it out.", "best_of")
    if request.echo and request.logprobs is not None:
        raise wrong("echo: the prompt's log-probabilities are not known; leave out echo or logprobs.", "echo")
    use = ToolUse(None, None, is_parallel=None)
    form = await form_of(model, use, request.response_format)
    prompts = await asyncio.to_thread(texts_of, request.prompt, model, MAX_TEXTS // (request.n or 1), "prompt")
    plans = [
        planned(request, model, prompt, request.max_tokens or _USUAL_TOKENS, visit, "prompt") for prompt in prompts
    ]
    echoed = await asyncio.to_thread(_texts, prompts, model) if request.echo else []
    generations: list[Generation] = []
    try:
        for num_left, plan in zip(reversed(range(len(plans))), plans, strict=True):
            drawing = replace(plan.drawing, num_likeliest=request.logprobs)
            made = replace(plan, form=form, drawing=drawing)
            generations.append(Generation(model, made, visit, serving, num_left * plan.n))
    except BaseException:
        for generation in generations:
            generation.cancel()
        raise
    return Completion(request, generations, echoed, int(serving.clock.wall()))


def _texts(prompts: Sequence[Sequence[int]], model: Model) -> list[str]:
    return [model.tokenizer.decode(prompt) for prompt in prompts]
