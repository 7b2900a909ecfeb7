"""Receipts of served text: are cheats found, are honest members left alone, and what do receipts cost?

    python -m benchmarks.receipts FOLDER                # of a model that has learnt something, with its tokenizer.json
    python -m benchmarks.receipts FOLDER --texts 40     # sooner

Sections serve many texts at a time, and give receipts as members do. An audit with one thread reads each text in pieces
of 64 tokens, with the weights that the receipts name. Cheats: int8 in place of bf16 (bf16 in place of exact numbers),
half the layers, one token of a text told that was not drawn, a page of keys and values of another text.

With exact numbers each text is judged by itself: what went out, and the fingerprint, have to be the same to the bit.
With others members are, by many receipts (`weft.texts.receipts.audit.verdict`). Members are simulated: each has texts
drawn, with replacement, of those that were served and audited; an honest one all of one way. Bounds are those of other
texts.
Honest texts are served with one thread and with two, prompts in pieces of other sizes, and by processors as they are,
held to AVX2, and to AVX-512 without bf16.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks import report
from benchmarks._signed_texts import HONEST, Cheat, SignedText, audited, play, stages_of
from weft import rng
from weft.engine.draw import Drawing
from weft.engine.numbers import Kind
from weft.model.config import ModelConfig
from weft.model.weights import read_folder
from weft.net.link.rpc import note_frame
from weft.texts.messages import Receipts, ReceiptTold
from weft.texts.receipts.audit import Bounds, Finding, Verdict, calibrated, verdict
from weft.texts.receipts.receipt import ReceiptHeader
from weft.wire import encode

PROMPT, DRAWN, BATCH = 40, 65, 50  # 104 rows: four receipts, three of them with rows that are drawn after
MEMBERS, MOST = 1000, 300  # members of each kind, and receipts at most until a verdict
AIM_SHARE, AIM_NBYTES = 0.01, 12
HELD = {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


class Way(NamedTuple):
    """How honest texts are served."""

    name: str
    threads: int
    piece: int
    env: dict[str, str]


WAYS = (
    Way("one thread", 1, 64, {}),
    Way("two threads", 2, 64, {}),
    Way("one thread, prompts in pieces of 7", 1, 7, {}),
    Way("two threads, AVX-512 without bf16", 2, 64, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}),
    Way("one thread, AVX2", 1, 64, HELD),
)


class Served(msgspec.Struct):
    """A text that another process has served."""

    tokens: list[int]
    num_prompt: int
    temperature: float
    seed: bytes
    headers: list[ReceiptHeader]
    sent: list[dict[int, bytes]]
    told: list[list[ReceiptTold]]

    @property
    def text(self) -> SignedText:
        drawing = Drawing(temperature=self.temperature, seed=self.seed)
        return SignedText(self.tokens, self.num_prompt, 0, drawing, [], self.headers, self.sent, self.told)


class Model(NamedTuple):
    folder: Path
    config: ModelConfig
    vector: Tensor

    def prompts(self, num: int, seed: int) -> list[list[int]]:
        """Return pieces of a source of Python's library: text that a model goes on with."""
        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        tokens = tokenizer.encode(Path(statistics.__file__).read_text(encoding="utf-8")).ids
        starts = rng.stream(seed, "prompts").integers(0, len(tokens) - PROMPT, num)
        return [tokens[start : start + PROMPT] for start in starts.tolist()]

    def served(
        self, kind: Kind, num_stages: int, num: int, seed: int, cheat: Cheat = HONEST, piece: int = 64
    ) -> list[SignedText]:
        """Return texts that are served here, `BATCH` at a time."""
        stages = stages_of(self.config, self.vector, kind, num_stages, 2 * BATCH, cheat)
        found: list[SignedText] = []
        for start in range(0, num, BATCH):
            some = self.prompts(min(BATCH, num - start), seed + start)
            found += play(stages, some, DRAWN, piece=piece, cheat=cheat, seed=(seed + start) % 256)
        return found

    def served_elsewhere(self, kind: Kind, num_stages: int, num: int, seed: int, way: Way) -> list[SignedText]:
        """Return texts that a process of its own has served."""
        with tempfile.TemporaryDirectory(prefix="weft-bench-") as place:
            path = Path(place) / "texts"
            how = path, kind, num_stages, num, seed, way.piece, way.threads
            told = [str(each) for each in (self.folder, "--serve", *how)]
            command = [sys.executable, "-m", "benchmarks.receipts", *told]
            subprocess.run(command, env=os.environ | way.env, cwd=Path(__file__).parents[1], check=True)
            return [each.text for each in msgspec.msgpack.decode(path.read_bytes(), type=list[Served])]


def model_of(folder: Path) -> Model:
    return Model(folder, *read_folder(folder))


def serve(folder: Path, path: str, kind: Any, *how: str) -> None:
    """Serve texts, and write them down: what `Model.served_elsewhere` starts."""
    num_stages, num, seed, piece, threads = map(int, how)
    torch.set_num_threads(threads)
    texts = model_of(folder).served(kind, num_stages, num, seed, piece=piece)
    told = [
        Served(
            text.tokens,
            text.num_prompt,
            text.drawing.temperature,
            text.drawing.seed,
            text.headers,
            text.sent,
            text.told,
        )
        for text in texts
    ]
    Path(path).write_bytes(msgspec.msgpack.encode(told))


def cheats(kind: Kind, stage: int, *, is_last: bool) -> dict[str, Cheat]:
    other: Kind = "int8" if kind == "bf16" else "bf16"
    found = {
        f"{kind} served as {other}": Cheat(stage, numbers=other),
        "half the layers": Cheat(stage, share=0.5),
        "a swapped page": Cheat(stage, swaps=True),
    }
    if is_last:
        found["one token that was not drawn"] = Cheat(stage, tells="any")
        found["one token, the next likely"] = Cheat(stage, tells="second")
    return found


Texts = list[list[Finding]]  # what was found of the receipts of each


class Judged(NamedTuple):
    """Of many members.

    Args:
        num_receipts: until each verdict.
    """

    verdicts: list[Verdict]
    num_receipts: list[int]

    @property
    def cells(self) -> list[str]:
        num, many = len(self.verdicts), self.num_receipts
        counts = [f"{self.verdicts.count(each)} of {num}" for each in ("cheating", "not enough")]
        return [*counts, f"{statistics.median(many):g}, {max(many)}"]


def members(pools: list[Texts], bounds: Bounds | None, seed: int) -> Judged:
    """Judge members, each by texts of one of the pools; with exact numbers each text by itself."""
    if bounds is None:
        texts = [text for pool in pools for text in pool]
        return Judged([verdict(text, None) for text in texts], [len(text) for text in texts])
    draws = rng.stream(seed, "members")
    judged = [_judged(pools[number % len(pools)], bounds, draws) for number in range(MEMBERS)]
    return Judged([said for said, _ in judged], [num for _, num in judged])


def _judged(pool: Texts, bounds: Bounds, draws: np.random.Generator) -> tuple[Verdict, int]:
    found: list[Finding] = []
    while len(found) < MOST:
        for each in pool[int(draws.integers(len(pool)))]:
            found.append(each)
            if (said := verdict(found, bounds)) != "not enough":
                return said, len(found)
    return "not enough", len(found)


def figures(texts: Texts, bounds: Bounds | None) -> list[str]:
    """Return the least, middle and largest distance, and how many receipts are far, by numbers and by tokens."""
    apart = [each.apart for text in texts for each in text if each.apart is not None]
    margins = [each.margin for text in texts for each in text if each.margin is not None]
    told = [f"{min(apart):.3f}, {statistics.median(apart):.3f}, {max(apart):.3f}"]
    if bounds is None:
        return [*told, "", ""]
    far = sum(each > bounds.apart for each in apart), sum(each > bounds.margin for each in margins)
    return [*told, f"{far[0]} of {len(apart)}", f"{far[1]} of {len(margins)}" if margins else ""]


def compared(model: Model, kind: Kind, num_stages: int, num: int) -> list[list[object]]:
    """Judge members of the middle one of the stages."""
    stage = num_stages // 2
    section = stages_of(model.config, model.vector, kind, num_stages, 2)[stage]
    what = f"{kind}, stage {stage + 1} of {num_stages}" if num_stages > 1 else f"{kind}, all layers"
    rows: list[list[object]] = []

    def honest(seed: int) -> list[Texts]:
        return [
            [
                audited(section, text, stage)
                for text in model.served_elsewhere(kind, num_stages, num, seed + 1000 * number, way)
            ]
            for number, way in enumerate(WAYS)
        ]

    def row(name: str, pools: list[Texts], bounds: Bounds | None) -> None:
        found = figures([text for pool in pools for text in pool], bounds)
        rows.append([f"{what}: {name}", *found, *members(pools, bounds, len(rows)).cells])
        print(*rows[-1], sep="; ", file=sys.stderr, flush=True)

    bounds = None
    if kind != "exact":
        bounds = calibrated([[each for text in texts for each in text] for texts in honest(50_000)])
        rows.append([f"{what}: bounds", f"{bounds.apart:.3f}", "", f"{bounds.margin:.3f}", "", "", ""])
    row("honest", honest(0), bounds)
    for number, (name, cheat) in enumerate(cheats(kind, stage, is_last=section.is_last).items()):
        texts = model.served(kind, num_stages, num, 100_000 * (number + 1), cheat)
        row(name, [[audited(section, text, stage) for text in texts]], bounds)
    return rows


# --- what they cost ---


class Timed:
    """Adds up the CPU seconds of functions of this thread."""

    def __init__(self) -> None:
        self.total_s = 0.0

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*given, **named)
            finally:
                self.total_s += time.thread_time() - began

        return timed


def share(model: Model, kind: Kind, batch: int, num: int) -> tuple[float, float]:
    """Return the share that receipts take of all CPU time of drawing, and the bytes on the wire for a token."""
    (stage,) = stages_of(model.config, model.vector, kind, 1, 3 * batch)
    play([stage], model.prompts(batch, 1), 3)
    timed, whole = Timed(), Timed()
    with ExitStack() as stack:
        for name in ("receipts.receipt.Signing.computed", "receipts.receipt.Signing.notes", "section.fingerprint"):
            where = f"weft.texts.{name}"
            stack.enter_context(patch(where, timed.of(resolve_name(where))))
        texts = whole.of(play)([stage], model.prompts(batch, 2), num)
    nbytes = [_nbytes(text, told, at) for text in texts for at, told in enumerate(text.told[0])]
    rows = sum(told.num for text in texts for told in text.told[0])
    return timed.total_s / whole.total_s, sum(nbytes) / rows


def _nbytes(text: SignedText, told: ReceiptTold, number: int) -> int:
    header = text.headers[0]
    note = Receipts(
        sequence=header.sequence,
        attempt=0,
        stage=0,
        receipts=(told,),
        weights=None if number else header.weights,
        numbers=None if number else header.numbers,
    )
    return len(note_frame("Receipts", encode(note)))


def costs(model: Model, batches: list[int]) -> list[list[object]]:
    found: list[list[object]] = []
    for kind in ("bf16", "int8", "exact"):
        for batch in batches:
            part, nbytes = share(model, kind, batch, 89)  # of 128 rows: four receipts
            found.append([kind, batch, f"{part:.2%}", f"{nbytes:.1f}"])
            print(*found[-1], sep="; ", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--texts", type=int, default=50, help="of each way and each cheat")
    parser.add_argument(
        "--stages", default="1,3", help="into how many the model is cut; members of the middle one are judged"
    )
    parser.add_argument("--kinds", default="exact,bf16")
    parser.add_argument("--batches", default="1,8,32", help="texts at a time, for what receipts cost")
    parser.add_argument("--serve", nargs=7, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.folder, *options.serve)
        return
    before = report.load()
    torch.set_num_threads(1)
    model = model_of(options.folder)
    cost = costs(model, [int(batch) for batch in options.batches.split(",")])
    cuts = [int(each) for each in options.stages.split(",")]
    found = [
        row
        for kind in options.kinds.split(",")
        for num_stages in cuts
        for row in compared(model, kind, num_stages, options.texts)
    ]
    header = ["", "apart: least, median, most", "far: numbers", "far: tokens"]
    header += ["cheating", "not enough", "receipts until a verdict: median, most"]
    report.write(
        "receipts",
        "Receipts of served text",
        "python -m benchmarks.receipts FOLDER",
        [
            f"{options.folder.name}; prompts of {PROMPT} tokens and {DRAWN} drawn at temperature 0.8, up to {BATCH} "
            f"texts at a time; audits with one thread. {report.load_line(before)}",
            f"{options.texts} texts of each way and each cheat. Honest ones are served with "
            f"{'; '.join(way.name for way in WAYS)}. Where numbers are not exact, {MEMBERS} members of each kind have "
            "texts drawn of these with replacement.",
            report.table(header, found),
            f"Receipts' share of the CPU time of a member that draws (aim: {AIM_SHARE:.0%}), and bytes on the wire for "
            f"a token, of prompts and answers alike (aim: {AIM_NBYTES}):",
            report.table(["numbers", "texts at a time", "share", "bytes a token"], cost),
        ],
    )


if __name__ == "__main__":
    main()
