"""A model that is served, and the texts of one request: up to four of one prompt, told in pieces as they come.

    Plan ──engine.begin, n times──► tokens ──Unfolding──► Delta, Delta, ... with the index of their text

Whoever stops reading ends the texts: `generate` cancels what is left when it is closed.
"""

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

from blake3 import blake3

from weft.chat.grammar import Form, Forms
from weft.chat.speech import speech_of
from weft.chat.template import Template, defaults_of, template_of
from weft.chat.vocabulary import Vocabulary
from weft.clock import Clock
from weft.data.tokenizer import Tokenizer
from weft.engine.draw import Drawing
from weft.engine.engine import Serves
from weft.engine.text import Full, Text, Wanted
from weft.model.came_with import CameWith
from weft.rng import fresh_secret
from weft.serve.failures import Fault, unavailable, wrong
from weft.serve.keys import Limits, Visit
from weft.serve.metrics import Metrics
from weft.serve.schemas import TextRequest, stops_of
from weft.serve.text import Likely, Unfolding, likely
from weft.serve.tools import Style, style_of
from weft.texts.asking.under_way import TextOfMembers

_SEED = "weft 2026 serve seed v1"
_SALT = "weft 2026 serve salt v1"
MAX_TOLD = 8  # pieces of an answer that wait to be sent, beside what waits in its texts


@dataclass(frozen=True)
class Model:
    """What is served under one name.

    Args:
        id: what a request calls it.
        created: seconds since 1970.
        context: tokens of prompt and answer together.
        template: how messages become its prompt; None: plain turns.
        ends: tokens that end an answer.
        defaults: how tokens are drawn where a request does not say, by the API's names.
        fingerprint: names weights and numbers: the same, and a seed, give the same text. Of what members compute, the
            run: `fingerprint_of` names weights.
    """

    id: str
    created: int
    engine: Serves
    tokenizer: Tokenizer
    template: Template | None
    context: int
    ends: frozenset[int] = frozenset()
    defaults: Mapping[str, float] = field(default_factory=dict)
    fingerprint: str = ""

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.tokenizer, "" if self.template is None else self.template.writes)

    @cached_property
    def style(self) -> Style:
        return style_of(self.template)

    @cached_property
    def forms(self) -> Forms:
        return Forms(self.vocabulary, self.engine.vocab_size)


def model_of(
    id: str, created: int, engine: Serves, tokenizer: Tokenizer, came_with: CameWith, fingerprint: str = ""
) -> Model:
    """Return a model with the template, the ends and the defaults that came with its folder.

    Raises:
        TemplateFault: its template cannot be read.
    """
    ends = speech_of(tokenizer, came_with).ends
    return Model(
        id,
        created,
        engine,
        tokenizer,
        template_of(came_with),
        engine.context,
        frozenset(end for end in ends if end < engine.vocab_size),
        defaults_of(came_with),
        fingerprint,
    )


@dataclass(frozen=True)
class Serving:
    """What all requests of a server share."""

    clock: Clock
    metrics: Metrics
    limits: Limits


@dataclass(frozen=True)
class Plan:
    """What a request comes to.

    Args:
        n: texts.
        form: what each of them must look like.
        shown: control tokens that are told as text: marks of calls.
    """

    prompt: tuple[int, ...]
    drawing: Drawing
    max_new_tokens: int
    stops: Sequence[str] = ()
    ends: Collection[int] = ()
    n: int = 1
    form: Form | None = None
    shown: Mapping[int, bytes] = field(default_factory=dict)
    salt: bytes = b""


@dataclass(frozen=True)
class Delta:
    """More of a text.

    Args:
        index: of the text.
        likely: the tokens whose last characters are in it, where they were asked for.
        reason: why it ended, "stop" or "length", in the last one.
        course: of what members compute, in the last one and where it has changed: whom the text has come by.
    """

    index: int
    text: str
    likely: tuple[Likely, ...] = ()
    reason: str | None = None
    course: dict[str, Any] | None = None


@dataclass
class Usage:
    """Tokens of a request, so far."""

    num_prompt: int = 0
    num_shared: int = 0
    num_drawn: int = 0


def planned(
    request: TextRequest, model: Model, prompt: Sequence[int], max_new_tokens: int | None, visit: Visit, param: str
) -> Plan:
    """Return the plan of a request that has no form.

    Args:
        param: the field that the prompt was made of.

    Raises:
        Fault: a field that does not fit the model.
    """
    if not prompt:
        raise wrong(f"{param}: the prompt is empty. Give at least one token.", param)
    if len(prompt) >= model.context:  # before each of its tokens is looked at
        said = f"This model's maximum context length is {model.context} tokens. The prompt has {len(prompt)}."
        raise wrong(said, param, "context_length_exceeded")
    if (token := next((each for each in prompt if each >= model.engine.vocab_size), None)) is not None:
        raise wrong(f"{param}: token {token} is outside the model's {model.engine.vocab_size}.", param)
    visit.check(len(prompt))
    left = model.context - len(prompt)
    return Plan(
        tuple(prompt),
        _drawing(request, model),
        min(max_new_tokens or left, left),
        stops_of(request.stop),
        () if request.ignore_eos else model.ends,
        request.n or 1,
        salt=blake3(
            visit.asker.secret + (request.cache_salt or request.prompt_cache_key or "").encode(),
            derive_key_context=_SALT,
        ).digest(),
    )


def _drawing(request: TextRequest, model: Model) -> Drawing:
    def chosen(name: str, otherwise: float) -> float:
        given = getattr(request, name)
        return float(model.defaults.get(name, otherwise) if given is None else given)

    seed = fresh_secret(32) if request.seed is None else _seed(request.seed)
    return Drawing(
        temperature=chosen("temperature", 1.0),
        top_k=max(0, int(chosen("top_k", 0))),
        top_p=chosen("top_p", 1.0),
        min_p=chosen("min_p", 0.0),
        presence=request.presence_penalty or 0.0,
        frequency=request.frequency_penalty or 0.0,
        repetition=chosen("repetition_penalty", 1.0),
        bias=_bias(request.logit_bias or {}, model.engine.vocab_size),
        seed=seed,
    )


def _seed(number: int) -> bytes:
    return blake3(number.to_bytes(8, "little", signed=True), derive_key_context=_SEED).digest()


def _bias(given: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    bias = {}
    for name, value in given.items():
        token = int(name) if name.isdecimal() and len(name) < 10 else vocab_size
        if token >= vocab_size:
            raise wrong(f"logit_bias: {name[:20]!r} is no token of this model.", "logit_bias")
        bias[token] = value
    return bias


def of_text(drawing: Drawing, index: int) -> Drawing:
    """Return how the text of this index is drawn: the first as if it were alone."""
    if index == 0:
        return drawing
    seed = blake3(drawing.seed + index.to_bytes(4, "little"), derive_key_context=_SEED).digest()
    return replace(drawing, seed=seed)


# --- texts under way ---


@dataclass
class _Under:
    """A text under way."""

    index: int
    text: Text
    out: Unfolding[Likely]
    num_drawn: int = 0
    first_s: float | None = None
    last_s: float | None = None
    is_over: bool = False  # and charged
    num_changes: int = 0  # of its course, that were told
    num_mends: int = 0  # that were counted

    def course(self, *, is_last: bool = False) -> dict[str, Any] | None:
        """Return whom the text has come by, where members compute it and that is news, or its last word."""
        if not isinstance(self.text, TextOfMembers):
            return None
        course = self.text.course
        if course.num_changes == self.num_changes and not is_last:
            return None
        self.num_changes = course.num_changes
        return course.tree() if course.peers else None


class Generation:
    """The texts of one request; iterate over it once.

    Args:
        model: it stays with this one, whatever is served under its name later.
        num_more: texts of the same request that begin after these.

    Raises:
        Fault: the prompt does not fit, or too many wait; nothing has begun then.
    """

    def __init__(self, model: Model, plan: Plan, visit: Visit, serving: Serving, num_more: int = 0) -> None:
        self.model, self.plan, self.usage = model, plan, Usage(num_prompt=len(plan.prompt))
        self._visit, self._clock, self._metrics, self._limits = visit, serving.clock, serving.metrics, serving.limits
        self._asked_s = self._read_s = self._clock.now()
        self._texts: list[_Under] = []
        self._is_followed = False
        try:
            for index in range(plan.n):
                self._texts.append(self._begun(index, plan.n - 1 - index + num_more))
        except BaseException:
            self._cancel_texts()
            raise
        visit.charge(len(plan.prompt))
        self._metrics.asked(model.id, len(plan.prompt), plan.n, plan.max_new_tokens)

    def _begun(self, index: int, num_more: int) -> _Under:
        plan = self.plan
        wanted = Wanted(
            self._visit.asker.name,
            plan.prompt,
            plan.max_new_tokens,
            of_text(plan.drawing, index),
            plan.ends,
            plan.salt,
            None if plan.form is None else plan.form.copy(),
            room=self._visit.asker.room,
        )
        return _Under(index, self.model.engine.begin(wanted, num_more), Unfolding(plan.stops))

    def cancel(self) -> None:
        """Draw no more; what was drawn already is charged, and not told."""
        self._cancel_texts()
        if not self._is_followed:  # else `deltas` does so, once nobody follows any more
            self._end_rest()

    def _cancel_texts(self) -> None:
        for under in self._texts:
            if under.text.ended is None:
                under.text.cancel()

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yield the texts piece by piece, as they come, each until its reason.

        Raises:
            Fault: nothing came in time, or not all of it.
        """
        self._is_followed = True
        self._read_s = self._clock.now()
        told: asyncio.Queue[Delta | Exception] = asyncio.Queue(MAX_TOLD)
        tasks = [asyncio.ensure_future(self._follow(under, told)) for under in self._texts]
        try:
            num_left = len(tasks)
            while num_left:
                one = await self._next(told)
                if isinstance(one, Full) and not self.usage.num_drawn:  # it made way for others
                    self._visit.charge(-len(self.plan.prompt))
                if isinstance(one, Exception):
                    raise one
                num_left -= one.reason is not None
                yield one
        finally:
            self._cancel_texts()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._end_rest()

    async def _next(self, told: "asyncio.Queue[Delta | Exception]") -> "Delta | Exception":
        limits = self._limits
        end_s = self._read_s + limits.max_time_s
        while (left_s := min(self._waits_until_s(), end_s) - self._clock.now()) > 0:
            # what waits there already would be read all the same, without any time left
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    return await told.get()
        if self._clock.now() >= end_s:
            raise Fault(503, f"The answer took longer than {limits.max_time_s:g} s.", "timeout", code="timeout")
        raise unavailable(f"Nothing was computed for {limits.max_wait_s:g} s: too much is asked.", "overloaded", 5.0)

    def _waits_until_s(self) -> float:
        """Return when the first token has been waited for long enough: a long prompt may be read for minutes."""
        if any(under.num_drawn for under in self._texts):
            return inf
        return max(self._read_s, *(under.text.busy_s for under in self._texts)) + self._limits.max_wait_s

    async def _follow(self, under: _Under, told: "asyncio.Queue[Delta | Exception]") -> None:
        reason = "error"

        def tell_course() -> None:
            if not told.full():  # else with what comes next
                told.put_nowait(Delta(under.index, "", course=under.course()))

        if isinstance(under.text, TextOfMembers):
            under.text.on_moved = tell_course
        try:
            reason = await self._read(under, told)
            text, rest = under.out.finish()
            await told.put(Delta(under.index, text, tuple(rest), reason, under.course(is_last=True)))
        except asyncio.CancelledError:
            reason = "abort"
            raise
        except Exception as error:  # whoever reads the deltas raises it
            await told.put(error)
        finally:
            self._tell_end(under, reason)

    async def _read(self, under: _Under, told: "asyncio.Queue[Delta | Exception]") -> str:
        """Tell what comes of a text; return why it ended."""
        vocabulary, shown = self.model.vocabulary, self.plan.shown
        async for drawn in under.text:
            came_s = under.text.came_s  # not when it is read: the reader may be slow
            if under.last_s is None:
                under.first_s = came_s
                self._metrics.drawn(self.model.id, first_s=came_s - self._asked_s)
            else:  # what one step draws comes together: a gap is between steps
                self._metrics.drawn(self.model.id, gap_s=came_s - under.last_s if came_s > under.last_s else None)
            under.last_s = came_s
            self._count_mends(under)
            under.num_drawn += 1
            self.usage.num_drawn += 1
            self._visit.charge(1)
            piece = shown.get(drawn.token) or vocabulary.piece(drawn.token)
            text, out = under.out.feed(piece, likely(drawn, vocabulary))
            if text or out:
                delta = Delta(under.index, text, tuple(out), course=under.course())
                await told.put(delta)  # what nobody takes waits in the text
            if under.out.is_stopped:
                under.text.cancel()
                return "stop"
        if under.text.ended == "cancelled":
            raise unavailable("The model is being unloaded; the answer ends here. Ask again.", "unloaded", 1.0)
        return str(under.text.ended)

    def _count_mends(self, under: _Under) -> None:
        if not isinstance(under.text, TextOfMembers):
            return
        course = under.text.course
        num = min(course.num_mends - under.num_mends, len(course.mends))
        under.num_mends = course.num_mends
        for mend in course.mends[len(course.mends) - num :]:
            self._metrics.mended(self.model.id, mend.stage + 1, mend.why)

    def _end_rest(self) -> None:
        """End texts that nobody has begun to read."""
        for under in self._texts:
            if not under.is_over:
                self._tell_end(under, "abort")

    def _tell_end(self, under: _Under, reason: str) -> None:
        under.is_over = True
        self._count_mends(under)
        if isinstance(under.text, TextOfMembers):
            paused = {mend.num_drawn: mend.pause_s for mend in under.text.course.mends}  # several stages had one pause
            for pause_s in paused.values():
                if pause_s is not None:
                    self._metrics.paused(self.model.id, pause_s)
        self.usage.num_shared = max(self.usage.num_shared, under.text.num_shared)
        if reason == "abort":  # nobody reads on, but these were drawn all the same
            self._visit.charge(under.text.num_unread)
        times = None
        if under.first_s is not None and under.last_s is not None:
            began_s = self._asked_s if under.text.began_s is None else under.text.began_s
            times = (self._asked_s, began_s, under.first_s, under.last_s)
        self._metrics.ended(self.model.id, reason, times, under.num_drawn)


def fingerprint_of(generations: Sequence[Generation]) -> str | None:
    """Return what names the weights of texts of one model, where members compute them those that they went on with
    last; None: they are not known yet."""
    model = generations[0].model
    courses = [
        under.text.course
        for generation in generations
        for under in generation._texts
        if isinstance(under.text, TextOfMembers)
    ]
    if not courses:
        return model.fingerprint or None
    rounds = sorted({course.rounds[-1][0] for course in courses if course.rounds})
    return f"{model.fingerprint}-{'+'.join(f'r{round}' for round in rounds)}" if rounds else None
