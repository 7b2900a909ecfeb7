"""One peer of `benchmarks.text_lines`: it computes a stage of a model for texts, asks for texts, or has all of it.

    python _text_peer.py '{"seed": 1, "folder": "model", "role": "stage", "stage": 0, "num_stages": 3, ...}'

A line {"prompt": ids, "num": 160, "temperature": 0.0} on the input of who asks, or has all, makes it draw a text:
{"event": "drawn", "tokens": ids, "first_s": ..., "token_s": ...}.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from weft.clock import SystemClock
from weft.codec.dense import Bf16
from weft.engine.draw import Drawing
from weft.engine.engine import Engine, Serves, Wanted
from weft.engine.numbers import Kind
from weft.engine.step import KeysAndValues, Stepper, Weights
from weft.ids import PeerId, RunId
from weft.keys import Identity
from weft.model.flat import cut, layout
from weft.model.sections import sections
from weft.model.weights import read_folder
from weft.net.admission import Anyone
from weft.net.link.handshake import Passport
from weft.net.node import Node
from weft.net.transport.tls import TlsConfig, TlsTransport
from weft.pipeline.link import StageLink
from weft.texts.entry import Entry
from weft.texts.member import Member, listen
from weft.texts.section import Section

RUN = RunId("ab" * 32)
CPU = torch.device("cpu")
T = TypeVar("T")
KIND: Kind = "int8"
CONTEXT, NUM_PAGES = 2048, 64


class Thread:
    """Computes steps, one after the other."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def run(self, work: Callable[[], T]) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, work)


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


async def draw(served: Serves, order: dict[str, Any]) -> dict[str, Any]:
    """Draw a text; return its tokens, and when they came."""
    drawing = Drawing(temperature=order["temperature"], seed=bytes([order.get("seed", 0)]) * 32)
    wanted = Wanted("bench", tuple(order["prompt"]), order["num"], drawing)
    began, tokens, at = time.perf_counter(), list[int](), list[float]()
    async for drawn in served.begin(wanted):
        tokens.append(drawn.token)
        at.append(time.perf_counter())
    return {"tokens": tokens, "first_s": at[0] - began, "token_s": (at[-1] - at[0]) / max(1, len(at) - 1)}


async def orders() -> Any:
    while line := await asyncio.to_thread(sys.stdin.readline):
        yield json.loads(line)


async def whole(options: dict[str, Any]) -> None:
    config, vector = read_folder(Path(options["folder"]))
    stepper = Stepper(Weights(config, vector, KIND), KeysAndValues(config, NUM_PAGES, CPU, KIND))
    engine = Engine(
        stepper, vocab_size=config.vocab_size, context=CONTEXT, num_pages=NUM_PAGES, has_guesses=options["has_guesses"]
    )
    say(event="started")
    async for order in orders():
        say(event="drawn", **await draw(engine, order))
    engine.close()


async def peer(options: dict[str, Any]) -> None:
    config, vector = read_folder(Path(options["folder"]))
    identity = Identity.from_seed(bytes([options["seed"]]) * 32)
    passport = Passport(identity=identity, run=RUN, name=f"peer-{options['seed']}", admission=Anyone())
    clock, codec = SystemClock(), Bf16()
    async with Node(passport, [TlsTransport(identity, TlsConfig())], clock, lambda _event: None) as node:
        link = StageLink(node)
        listen(link)
        for key, addresses in options["known"].items():
            node.remember(PeerId(key), addresses)
            await node.connect(PeerId(key))
            node.keep(PeerId(key))
        if options["role"] == "stage":
            section = sections(config, options["num_stages"])[options["stage"]]
            table = None
            if config.is_tied and not section.is_first and section.is_last:
                spans = layout(config)
                (span,) = [each for each in spans if each.name == "embed.weight"]
                table = spans.view(vector, span)
            weights = Weights(config, cut(config, vector, section), KIND, section, table)
            kept = KeysAndValues(config, NUM_PAGES, CPU, KIND, len(section.layers))
            del vector
            member = Member(
                link,
                options["stage"],
                Section(weights, kept, codec),
                round=0,
                num_pages=NUM_PAGES,
                log_nbytes=1 << 26,
                clock=clock,
                run=Thread().run,
                num_stages=options["num_stages"],
                has_guesses=options["has_guesses"],
            )
            member.start()
            say(event="started", addresses=node.addresses, key=node.peer)
            async for _ in orders():
                pass
            await member.aclose()
            return
        entry = Entry(
            link,
            num_stages=options["num_stages"],
            vocab_size=config.vocab_size,
            context=CONTEXT,
            row_nbytes=codec.nbytes(config.width),
            clock=clock,
            emit=lambda event: say(event="moved", what=str(event)),
        )
        say(event="started", addresses=node.addresses, key=node.peer)
        async for order in orders():
            say(event="drawn", **await draw(entry, order))
        await entry.aclose()


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    asyncio.run(whole(told) if told["role"] == "whole" else peer(told))
