"""One peer of `benchmarks.text_lines` and `text_hops`: it computes a stage of a model for texts, asks for texts, or has
all of it.

    python _text_peer.py '{"seed": 1, "folder": "model", "role": "stage", "stage": 0, "num_stages": 3, ...}'

The model is a folder's, or one that was never trained: {"shape": {"vocab_size": 256, ...}} in place of "folder".

A line {"prompt": ids, "num": 160, "temperature": 0.0} on the input of who asks, or has all, makes it draw a text:
{"event": "drawn", "tokens": ids, "first_s": ..., "token_s": ..., "gap_s": ...}, or "failed". {"do": "tell"} makes
anyone say what it has computed, and what that took.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks._text_star import Chain, Client, Star
from weft.clock import SystemClock
from weft.codec.build import build
from weft.codec.codec import Codec
from weft.codec.config import Int8Config
from weft.codec.dense import Bf16, Fp32
from weft.engine.draw import Drawing, Drawn
from weft.engine.engine import Engine
from weft.engine.numbers import Kind
from weft.engine.scheduling.guess import Guesses
from weft.engine.step import KeysAndValues, Stepper, Weights
from weft.engine.text import Wanted
from weft.errors import WeftError
from weft.events import Event, Notice
from weft.ids import PeerId, RunId
from weft.keys import Identity
from weft.model.config import ModelConfig
from weft.model.flat import cut, layout
from weft.model.initial import initial_vector
from weft.model.sections import Section as Part
from weft.model.sections import sections
from weft.model.sections import whole as all_of
from weft.model.weights import read_config, read_folder
from weft.net.admission import Anyone
from weft.net.link.handshake import Passport
from weft.net.node import Node
from weft.net.transport.tls import TlsConfig, TlsTransport
from weft.pipeline.link import StageLink
from weft.texts import guessed
from weft.texts.asking.entry import Entry
from weft.texts.member import Member, listen
from weft.texts.section import Section

RUN = RunId("ab" * 32)
CPU = torch.device("cpu")
T = TypeVar("T")
CONTEXT, NUM_PAGES = 2048, 64
CODECS: dict[str, Callable[[], Codec]] = {"bf16": Bf16, "fp32": Fp32, "int8": lambda: build(Int8Config())}
EVERY = 8  # tokens: so often is said how many there are
NEVER = 0  # a token that is forbidden where guesses are to be wrong


Begin = Callable[[Wanted], AsyncIterator[Drawn]]


class Thread:
    """Computes steps, one after the other, and counts what they take."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self.num = 0
        self.wall_s = self.cpu_s = 0.0

    def run(self, work: Callable[[], T]) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, self._timed, work)

    def _timed(self, work: Callable[[], T]) -> T:
        began, cpu_s = time.perf_counter(), time.thread_time()
        try:
            return work()
        finally:
            self.num += 1
            self.wall_s += time.perf_counter() - began
            self.cpu_s += time.thread_time() - cpu_s


class Wrong(Guesses):
    """Guesses as often as pays, by how many were right: none ever is."""

    def guess(self, tokens: Sequence[int], most: int, row_share: float) -> list[int]:
        return [NEVER for _ in super().guess(tokens, most, row_share)]

    def _last(self, tokens: Sequence[int]) -> int | None:
        return len(tokens) - 1


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def warn(event: Event) -> None:
    if isinstance(event, Notice):
        print(event.text, file=sys.stderr, flush=True)


async def draw(begin: Begin, order: dict[str, Any]) -> None:
    """Draw a text; say its tokens, and when they came."""
    bias = {NEVER: -100.0} if order.get("is_never_right") else {}
    drawing = Drawing(temperature=order["temperature"], bias=bias, seed=bytes([order.get("seed", 0)]) * 32)
    wanted = Wanted("bench", tuple(order["prompt"]), order["num"], drawing)
    began, tokens, at = time.perf_counter(), list[int](), list[float]()
    try:
        async for drawn in begin(wanted):
            tokens.append(drawn.token)
            at.append(time.perf_counter())
            if len(tokens) % EVERY == 0:
                say(event="token", num=len(tokens))
    except WeftError as error:
        say(event="failed", why=str(error), tokens=tokens, after_s=time.perf_counter() - (at[-1] if at else began))
        return
    gaps = [b - a for a, b in pairwise(at)]
    say(event="drawn", tokens=tokens, first_s=at[0] - began, token_s=sum(gaps) / len(gaps), gap_s=max(gaps))


async def obey(begin: Begin | None = None, thread: Thread | None = None) -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        if order.get("do") == "tell":
            computed = {} if thread is None else {"num": thread.num, "wall_s": thread.wall_s, "its_cpu_s": thread.cpu_s}
            say(event="told", cpu_s=time.process_time(), **computed)
        elif begin is not None:
            await draw(begin, order)


def model_of(options: dict[str, Any]) -> tuple[ModelConfig, Callable[[Part], torch.Tensor], torch.Tensor | None]:
    """Return a model, what gives the numbers of a part of it, and all of them, where they are read from a folder."""
    if "shape" in options:
        config = ModelConfig(**options["shape"])
        return config, lambda part: initial_vector(config, 0, part), None
    config, vector = read_folder(Path(options["folder"]))
    return config, lambda part: cut(config, vector, part), vector


def section_of(options: dict[str, Any]) -> Section:
    """Return what computes a stage, or a model whole."""
    config, numbers_of, vector = model_of(options)
    part = sections(config, options["num_stages"])[options["stage"]]
    table = None
    if vector is not None and config.is_tied and not part.is_first and part.is_last:
        spans = layout(config)
        (span,) = [each for each in spans if each.name == "embed.weight"]
        table = spans.view(vector, span)
    kind = kind_of(options)
    weights = Weights(config, numbers_of(part), kind, part, table)
    return Section(weights, KeysAndValues(config, NUM_PAGES, CPU, kind, len(part.layers)), codec_of(options))


def kind_of(options: dict[str, Any]) -> Kind:
    kind: Kind = options.get("kind", "int8")
    return kind


def codec_of(options: dict[str, Any]) -> Codec:
    return CODECS[options.get("codec", "bf16")]()


async def alone(options: dict[str, Any]) -> None:
    config, numbers_of, _ = model_of(options)
    kind = kind_of(options)
    weights = Weights(config, numbers_of(all_of(config)), kind)
    engine = Engine(
        Stepper(weights, KeysAndValues(config, NUM_PAGES, CPU, kind)),
        vocab_size=config.vocab_size,
        context=min(config.max_seq_len, CONTEXT),
        num_pages=NUM_PAGES,
        has_guesses=options["has_guesses"],
    )
    say(event="started")
    await obey(engine.begin)
    engine.close()


async def peer(options: dict[str, Any]) -> None:
    identity = Identity.from_seed(bytes([options["seed"]]) * 32)
    passport = Passport(identity=identity, run=RUN, name=f"peer-{options['seed']}", admission=Anyone())
    clock, num_stages = SystemClock(), options["num_stages"]
    transport = TlsTransport(identity, TlsConfig(host=options.get("host", "")))
    async with Node(passport, [transport], clock, warn) as node:
        link = StageLink(node)
        listen(link)
        for key, addresses in options["known"].items():
            node.remember(PeerId(key), addresses)
            await node.connect(PeerId(key))
            node.keep(PeerId(key))
        if options["role"] == "stage":
            thread = Thread()
            member = Member(
                link,
                options["stage"],
                section_of(options),
                round=0,
                num_pages=NUM_PAGES,
                log_nbytes=1 << 26,
                clock=clock,
                run=thread.run,
                num_stages=num_stages,
                has_guesses=options["has_guesses"],
            )
            member.start()
            say(event="started", addresses=node.addresses, key=node.peer)
            await obey(thread=thread)
            await member.aclose()
            return
        config = ModelConfig(**options["shape"]) if "shape" in options else read_config(Path(options["folder"]))
        row_nbytes = codec_of(options).nbytes(config.width)
        if options["role"] in ROUTES:
            say(event="started", addresses=node.addresses, key=node.peer)
            await obey(ROUTES[options["role"]](link, num_stages=num_stages, row_nbytes=row_nbytes).begin)
            return
        entry = Entry(
            link,
            num_stages=num_stages,
            vocab_size=config.vocab_size,
            context=min(config.max_seq_len, CONTEXT),
            row_nbytes=row_nbytes,
            clock=clock,
            emit=lambda event: say(event="moved", what=str(event)),
        )
        say(event="started", addresses=node.addresses, key=node.peer)
        await obey(entry.begin)
        await entry.aclose()


ROUTES: dict[str, Callable[..., Client]] = {
    "star": Star,
    "star as it is": partial(Star, is_mended=False),
    "chain": Chain,
}


def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    if options.get("is_never_right"):
        guessed.Guesses = Wrong  # type: ignore[attr-defined]
    asyncio.run(alone(options) if options["role"] == "whole" else peer(options))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
