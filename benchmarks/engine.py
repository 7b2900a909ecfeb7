"""Serving on a CPU: tokens a second of weft's engine, against transformers and llama.cpp on the same weights.

    python -m benchmarks.engine
    python -m benchmarks.engine --llama .venv-llama/bin/python     # a Python that has llama-cpp-python; here: gguf

A model of 150M parameters with random weights reads a prompt per text, then all texts go on by their likeliest token.
`step` is a forward pass over all of them and the likeliest token, for weft and for transformers alike, keys and values
kept as each keeps them. `engine` is what a person gets of weft: scheduler, thread and drawing among it, less guesses
(`benchmarks.guessing`), which random weights make too easy.

All take turns, a few steps each, so that what else the machine does hits all. Tokens a second are those of the wall;
CPU time is told beside it. The ratio is the median over turns to the faster of transformers' two kinds of numbers.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from benchmarks import report
from weft import rng
from weft.data.tokenizer import ByteTokenizer
from weft.engine.batch import Piece
from weft.engine.draw import Drawing
from weft.engine.engine import Engine
from weft.engine.load import engine_of, plan
from weft.engine.numbers import Kind
from weft.engine.scheduling.pages import PAGE
from weft.engine.step import KeysAndValues, Stepper, Weights
from weft.engine.text import Wanted
from weft.model.config import ModelConfig, named, num_parameters
from weft.model.gguf import Words, write_gguf
from weft.model.weights import FileDtype, write_folder

VOCAB, CONTEXT, PROMPT = 32_000, 2048, 128
AROUND = 8  # tokens that the engine draws beyond those of a turn, and as many for each text: they begin one by one
BATCHES = (1, 8, 32)
LLAMA_FILES: dict[str, FileDtype] = {"f32": "float32", "bf16": "bfloat16"}  # it makes q8_0 of the first
CPU = torch.device("cpu")
AIMS = {"step int8": (2.2, 1.8, 2.1), "step exact": (1.8, 1.2, 1.0)}  # times transformers, by batch
LLAMA_AIMS = (0.4, 1.0, 1.3)  # times llama.cpp q8_0


class Subject(Protocol):
    def begin(self, num: int) -> None:
        """Read a prompt each for `num` texts."""
        ...

    def steps(self, num: int) -> None:
        """Go on with each text by `num` tokens."""
        ...


def prompts(num: int) -> list[list[int]]:
    found: list[list[int]] = rng.stream(num, "prompts").integers(0, VOCAB, (num, PROMPT)).tolist()
    return found


class Transformers:
    """What people run by default: the library's own model and cache, a forward pass per token."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device = CPU) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).train(mode=False).to(device)
        self._cache: Any = None
        self._last = torch.empty(0)

    def begin(self, num: int) -> None:
        from transformers import DynamicCache

        self._cache = DynamicCache()
        self._forward(torch.tensor(prompts(num), device=self._model.device))

    def steps(self, num: int) -> None:
        for _ in range(num):
            self._forward(self._last)
        self._last.tolist()  # until then a GPU may be at work

    @torch.inference_mode()
    def _forward(self, tokens: Tensor) -> None:
        found = self._model(input_ids=tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._last = found.logits[:, -1].argmax(-1, keepdim=True)


class Steps:
    """Weft's step alone."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._config, self._weights = config, weights
        self._texts: list[list[int]] = []

    def begin(self, num: int) -> None:
        room = CONTEXT // PAGE // 2
        kept = KeysAndValues(self._config, num * room, self._weights.device, self._weights.kind)
        self._stepper = Stepper(self._weights, kept)
        self._pages = [list(range(each * room, (each + 1) * room)) for each in range(num)]
        self._texts = prompts(num)
        for text, pages in zip(self._texts, self._pages, strict=True):
            text.append(int(self._stepper.step([Piece(text, 0, pages, num_draws=1)])[0].argmax()))

    def steps(self, num: int) -> None:
        for _ in range(num):
            pieces = [
                Piece(text[-1:], len(text) - 1, pages, num_draws=1)
                for text, pages in zip(self._texts, self._pages, strict=True)
            ]
            for text, token in zip(self._texts, self._stepper.step(pieces).argmax(-1).tolist(), strict=True):
                text.append(token)


class Served:
    """All of the engine. Each turn begins the texts anew: their prompts' pages are found again, but for the last."""

    def __init__(
        self, config: ModelConfig, vector: Tensor, kind: Kind, drawing: Drawing, device: torch.device = CPU
    ) -> None:
        room = plan(config, device, kind, CONTEXT, None, 1 << 33)
        self._engine: Engine = engine_of(config, vector, device, room, CONTEXT, has_guesses=False)
        self._drawing = drawing
        self._num = 0
        self.token_s = 0.0  # of the last turn: seconds a token, while all texts were under way

    def begin(self, num: int) -> None:
        self._num = num
        self.steps(1)

    def steps(self, num: int) -> None:
        asyncio.run(self._all(num))

    async def _all(self, num: int) -> None:
        async def one(prompt: list[int]) -> list[float]:
            text = self._engine.begin(Wanted("bench", tuple(prompt), num + AROUND + AROUND * self._num, self._drawing))
            return [time.perf_counter() async for _ in text]

        times = await asyncio.gather(*(one(prompt) for prompt in prompts(self._num)))
        start, stop = max(each[0] for each in times), min(each[-1] for each in times)
        if stop <= start:
            raise RuntimeError(f"{self._num} texts were never under way together: draw more tokens of each (AROUND)")
        self.token_s = (stop - start) / max(1, sum(start < at <= stop for each in times for at in each))

    def close(self) -> None:
        self._engine.close()


class Llama:
    """llama.cpp in a process of its own: a batch of one token a text, as its own server makes it."""

    def __init__(self, python: Path, folder: Path, kind: str, threads: int) -> None:
        command = [str(python), str(Path(__file__).parent / "_engine_llama.py"), str(folder), kind, str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.cpu_s = 0.0

    def begin(self, num: int) -> None:
        self._ask("begin", num, prompts(num))

    def steps(self, num: int) -> None:
        self.cpu_s = self._ask("steps", num, None)

    def _ask(self, what: str, num: int, given: Any) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([what, num, given]), file=self._process.stdin, flush=True)
        return float(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass
class Figures:
    """Tokens a second by the wall, and CPU milliseconds a step, turn by turn."""

    speeds: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)


def measure(subjects: dict[str, Subject], batch: int, turns: int, steps: int) -> dict[str, Figures]:
    """Let all take turns, in an order that turns round."""
    for name, subject in subjects.items():
        print(f"batch {batch}: {name} reads", file=sys.stderr, flush=True)
        subject.begin(batch)
        subject.steps(2)
    found = {name: Figures() for name in subjects}
    order = list(subjects)
    for _ in range(turns):
        order.append(order.pop(0))
        for name in order:
            subject = subjects[name]
            began, began_cpu = time.perf_counter(), time.process_time()
            subject.steps(steps)
            took_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
            if isinstance(subject, Served):
                took_s = subject.token_s * batch * steps  # the prompt's end is no step
            elif isinstance(subject, Llama):
                cpu_s = subject.cpu_s
            found[name].speeds.append(batch * steps / took_s)
            found[name].cpu_ms.append(1e3 * cpu_s / steps)
    return found


def against(found: dict[str, Figures], name: str, others: list[str]) -> float | None:
    """Return the median over turns of one's speed by the fastest of others."""
    if not others:
        return None
    best = max(others, key=lambda other: statistics.median(found[other].speeds))
    return statistics.median(a / b for a, b in zip(found[name].speeds, found[best].speeds, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", default="150m")
    parser.add_argument("--threads", default="1", help="of torch, such as 1,2")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--llama", type=Path, help="python of an environment that holds llama-cpp-python")
    options, before = parser.parse_args(), report.load()
    config = named(options.size, VOCAB, CONTEXT)
    vector = torch.from_numpy(rng.stream(0, "weights").standard_normal(num_parameters(config), np.float32)) * 0.02
    sections = [
        f"{num_parameters(config):,} random parameters, prompts of {PROMPT} tokens; tokens a second of all texts "
        f"together, and in brackets the CPU milliseconds of a step. {report.load_line(before)}"
    ]
    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        found = [_all(config, vector, options, batch, threads) for batch in BATCHES]
        sections += [f"## {threads} thread{'s' if threads > 1 else ''}", _table(found), _ratios(found)]
    report.write("engine", "Serving on a CPU", "python -m benchmarks.engine", sections, ["transformers"])


def _all(
    config: ModelConfig, vector: Tensor, options: argparse.Namespace, batch: int, threads: int
) -> dict[str, Figures]:
    weights: Callable[[Kind], Weights] = cache(lambda kind: Weights(config, vector, kind))
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as temporary, ExitStack() as stack:
        folder = Path(temporary)
        write_folder(folder / "model", config, vector)
        subjects: dict[str, Subject] = {
            "transformers fp32": Transformers(folder / "model", torch.float32),
            "transformers bf16": Transformers(folder / "model", torch.bfloat16),
        }
        kinds: tuple[Kind, ...] = ("fp32", "bf16", "int8", "exact")
        subjects |= {f"step {kind}": Steps(config, weights(kind)) for kind in kinds}
        served = {
            "engine int8, likeliest": Served(config, vector, "int8", Drawing(temperature=0.0)),
            "engine int8, top_p 0.9": Served(config, vector, "int8", Drawing(temperature=0.8, top_p=0.9)),
        }
        subjects |= served
        if options.llama:
            for kind, dtype in LLAMA_FILES.items():
                words = Words("bench", ByteTokenizer().to_json())
                write_gguf(folder / "model" / f"{kind}.gguf", config, vector, words, dtype=dtype)
            llamas = {
                f"llama.cpp {kind}": Llama(options.llama, folder / "model", kind, threads)
                for kind in ("f32", "bf16", "q8_0")
            }
            subjects |= llamas
            for llama in llamas.values():
                stack.callback(llama.close)
        for each in served.values():
            stack.callback(each.close)
        return measure(subjects, batch, options.turns, options.steps)


def _table(found: list[dict[str, Figures]]) -> str:
    def cell(figures: Figures) -> str:
        return f"{statistics.median(figures.speeds):.1f} ({statistics.median(figures.cpu_ms):.1f})"

    header = ["", *(f"batch {batch}" for batch in BATCHES)]
    return report.table(header, [[name, *(cell(each[name]) for each in found)] for name in found[0]])


def _ratios(found: list[dict[str, Figures]]) -> str:
    rows = list[list[object]]()
    for name in found[0]:
        if name.startswith(("step", "engine")):
            for other, aims in (("transformers", AIMS.get(name)), ("llama.cpp q8_0", LLAMA_AIMS)):
                others = [each for each in found[0] if each.startswith(other)]
                if not others or (other != "transformers" and name != "step int8"):
                    continue
                row = [against(each, name, others) for each in found]
                rows.append([f"{name} / {other}", *row, "" if aims is None else ", ".join(map(str, aims))])
    return report.table(["times as fast", *(f"batch {batch}" for batch in BATCHES), "aim"], rows)


if __name__ == "__main__":
    main()
