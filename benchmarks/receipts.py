"""Receipts of served text: are cheats found, are honest members left alone, and what do receipts cost?

    python -m benchmarks.receipts FOLDER                # of a model that has learnt something, with its tokenizer.json
    python -m benchmarks.receipts FOLDER --texts 40     # sooner

One process serves all layers, many texts at a time, and gives receipts as a member does. An audit with one thread reads
each text in pieces of 64 tokens, with the weights that the receipts name. Cheats: int8 in place of bf16 (bf16 in place
of exact numbers), half the layers, one token told that was not drawn, a page of keys and values of another text.

For bf16, bounds are those of other honest texts, `SLACK` times the largest. Honest texts are served with one thread and
with two, prompts in pieces of other sizes, and by processors as they are, held to AVX2, and to AVX-512 without bf16.
Exact numbers have no bounds: what went out, and the fingerprint, have to be the same to the bit.
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
import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks import report
from benchmarks._signed_texts import HONEST, Cheat, SignedText, audited, play, stages_of
from weft import rng
from weft.engine.draw import Drawing
from weft.engine.fingerprint import bounds_of
from weft.engine.numbers import Kind
from weft.model.config import ModelConfig
from weft.model.weights import read_folder
from weft.net.link.rpc import note_frame
from weft.texts.audit import EXACT, Bounds, Finding
from weft.texts.messages import Receipts, ReceiptTold
from weft.texts.receipt import ReceiptHeader
from weft.texts.section import Section
from weft.wire import encode

PROMPT, DRAWN, BATCH = 40, 33, 50  # 72 rows: three receipts
SLACK, AIM_SHARE, AIM_NBYTES = 1.5, 0.01, 12
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
    header: ReceiptHeader
    told: list[ReceiptTold]

    @property
    def text(self) -> SignedText:
        drawing = Drawing(temperature=self.temperature, seed=self.seed)
        return SignedText(self.tokens, self.num_prompt, 0, drawing, [], [self.header], [{}], [self.told])


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

    def served(self, kind: Kind, num: int, seed: int, cheat: Cheat = HONEST, piece: int = 64) -> list[SignedText]:
        """Return texts that are served here, `BATCH` at a time."""
        stages = stages_of(self.config, self.vector, kind, 1, 2 * BATCH, cheat)
        found: list[SignedText] = []
        for start in range(0, num, BATCH):
            some = self.prompts(min(BATCH, num - start), seed + start)
            found += play(stages, some, DRAWN, piece=piece, cheat=cheat, seed=(seed + start) % 256)
        return found

    def served_elsewhere(self, kind: Kind, num: int, seed: int, way: Way) -> list[SignedText]:
        """Return texts that a process of its own has served."""
        with tempfile.TemporaryDirectory(prefix="weft-bench-") as place:
            path = Path(place) / "texts"
            told = [str(each) for each in (self.folder, "--serve", path, kind, num, seed, way.piece, way.threads)]
            command = [sys.executable, "-m", "benchmarks.receipts", *told]
            subprocess.run(command, env=os.environ | way.env, cwd=Path(__file__).parents[1], check=True)
            return [each.text for each in msgspec.msgpack.decode(path.read_bytes(), type=list[Served])]


def model_of(folder: Path) -> Model:
    return Model(folder, *read_folder(folder))


def serve(folder: Path, path: str, kind: Any, num: str, seed: str, piece: str, threads: str) -> None:
    """Serve texts, and write them down: what `Model.served_elsewhere` starts."""
    torch.set_num_threads(int(threads))
    texts = model_of(folder).served(kind, int(num), int(seed), piece=int(piece))
    told = [
        Served(text.tokens, text.num_prompt, text.drawing.temperature, text.drawing.seed, text.headers[0], text.told[0])
        for text in texts
    ]
    Path(path).write_bytes(msgspec.msgpack.encode(told))


def cheats(kind: Kind) -> dict[str, Cheat]:
    other: Kind = "int8" if kind == "bf16" else "bf16"
    return {
        f"{kind} served as {other}": Cheat(numbers=other),
        "half the layers": Cheat(share=0.5),
        "one token that was not drawn": Cheat(tells="any"),
        "one token, the next likely": Cheat(tells="second"),
        "a swapped page": Cheat(swaps=True),
    }


class Judged(NamedTuple):
    """Of many texts.

    Args:
        num_found: texts of which a receipt is not honest.
    """

    num_found: int
    num: int
    findings: list[Finding]

    @property
    def apart(self) -> str:
        """Return figures of fingerprints that are farthest apart."""
        each = [one for found in self.findings for one in found.apart]
        off, mean, median = (max(figures) for figures in zip(*each, strict=True))
        return f"{off}, {mean:.2f}, {median:.1f}"

    @property
    def margin(self) -> float:
        return max((one for found in self.findings for one in found.margins), default=0.0)


def judged(section: Section, texts: list[SignedText], bounds: Bounds) -> Judged:
    findings = [audited(section, text, 0, bounds) for text in texts]
    num_found = sum(not all(each.is_honest for each in found) for found in findings)
    return Judged(num_found, len(texts), [each for found in findings for each in found])


def ways(model: Model, kind: Kind, num: int, seed: int) -> list[SignedText]:
    """Return honest texts, as many in each of the ways."""
    return [
        text
        for number, way in enumerate(WAYS)
        for text in model.served_elsewhere(kind, num // len(WAYS), seed + 1000 * number, way)
    ]


def compared(model: Model, kind: Kind, num: int) -> list[list[object]]:
    (section,) = stages_of(model.config, model.vector, kind, 1, 2)
    bounds = EXACT
    rows: list[list[object]] = []

    def row(name: str, found: Judged) -> None:
        rows.append([f"{kind}: {name}", f"{found.num_found} of {found.num}", found.apart, f"{found.margin:.3f}"])
        print(*rows[-1], sep="; ", file=sys.stderr, flush=True)

    if kind != "exact":
        found = judged(section, ways(model, kind, num // 2, 50_000), EXACT)
        margins = [one for each in found.findings for one in each.margins]
        bounds = Bounds(bounds_of([one for each in found.findings for one in each.apart], SLACK), SLACK * max(margins))
        rows.append([f"{kind}: bounds, of {found.num} others", "", f"{bounds.apart}", f"{bounds.margin:.3f}"])
        print(*rows[-1], sep="; ", file=sys.stderr, flush=True)
    row("honest", judged(section, ways(model, kind, num, 0), bounds))
    for number, (name, cheat) in enumerate(cheats(kind).items()):
        row(name, judged(section, model.served(kind, num, 100_000 * (number + 1), cheat), bounds))
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
        for name in ("receipt.Signing.computed", "receipt.Signing.notes", "section.fingerprint"):
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
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--kinds", default="exact,bf16")
    parser.add_argument("--batches", default="1,8,32", help="texts at a time, for what receipts cost")
    parser.add_argument("--serve", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.folder, *options.serve)
        return
    before = report.load()
    torch.set_num_threads(1)
    model = model_of(options.folder)
    cost = costs(model, [int(batch) for batch in options.batches.split(",")])
    found = [row for kind in options.kinds.split(",") for row in compared(model, kind, options.texts)]
    header = ["", "not honest, by an audit", "farthest apart: off, mean, median", "largest margin"]
    report.write(
        "receipts",
        "Receipts of served text",
        "python -m benchmarks.receipts FOLDER",
        [
            f"{options.folder.name}, all layers at one member; prompts of {PROMPT} tokens and {DRAWN} drawn at "
            f"temperature 0.8, up to {BATCH} texts at a time; audits with one thread. {report.load_line(before)}",
            f"Bounds are {SLACK:g} times the largest figures of other honest texts. Honest ones are served in turn "
            f"with {'; '.join(way.name for way in WAYS)}.",
            report.table(header, found),
            f"Receipts' share of the CPU time of a member that draws (aim: {AIM_SHARE:.0%}), and bytes on the wire for "
            f"a token, of prompts and answers alike (aim: {AIM_NBYTES}):",
            report.table(["numbers", "texts at a time", "share", "bytes a token"], cost),
        ],
    )


if __name__ == "__main__":
    main()
