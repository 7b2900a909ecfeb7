"""Codecs: bits, errors and speed, beside a copy in memory, hivemind's 8-bit codecs and torch's PowerSGD hook.

    python -m benchmarks.codecs

Bits are those of the payload by the numbers of the vector. Beside them stands what a perfect code of Gaussian numbers
needs for the same error: log2(1 / error), by Shannon's rate-distortion function. Errors are relative: the length of
what is wrong by that of the vector.

Speed is that of a copy of the same vector into memory that was used before, measured in the same turn, by the time that
encoding or decoding takes: 1 is as fast as the copy. One core, one thread, CPU time of all threads of this process, the
median over turns in which all take part.

hivemind's codecs get the vector in parts of 2^19 bytes, as its averager cuts it. Its third 8-bit codec is measured
where bitsandbytes is installed. torch's hook gets its own recommended settings (warm start, error feedback; rank 4 as
ours), one bucket with all matrices, and gloo with one process, so that nothing is sent.
"""

import argparse
import contextlib
import importlib.util
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from benchmarks import report
from benchmarks._against_copy import error, speeds
from benchmarks._power_sgd import RANK, best_error, low_rank_rows, matrices, one_process
from benchmarks.step import BareLoop, WeftLoop, own_model, run_of
from weft.codec.build import build
from weft.codec.codec import Codec
from weft.codec.config import (
    Bf16Config,
    CodecConfig,
    E3m0Config,
    Fp8Config,
    Fp32Config,
    Int2Config,
    Int4Config,
    Int8Config,
    RandomKConfig,
    SignConfig,
    TopKConfig,
)
from weft.codec.sparse import rank
from weft.model.config import named
from weft.model.flat import layout
from weft.model.initial import initial_vector
from weft.sync.merge.method import build_basis
from weft.sync.method.choices import MuonConfig

CODECS: dict[str, CodecConfig] = {
    "fp32": Fp32Config(),
    "bf16": Bf16Config(),
    "fp8": Fp8Config(),
    "int8": Int8Config(),
    "int4": Int4Config(),
    "e3m0": E3m0Config(),
    "int2": Int2Config(),
    "sign": SignConfig(),
    "top-k 64, sign (sparseloco)": TopKConfig(),
    "top-k 32, bf16 (demo)": TopKConfig(kept=32, values="bf16"),
    "top-k 256, int8": TopKConfig(kept=256, values="int8"),
    "random-k 64, sign": RandomKConfig(),
    "random-k 410, of those 82, int4 (cocktail)": RandomKConfig(kept=410, largest=82, values="int4"),
}
LEAST = {"int8": 0.25, "int4": 0.25, "e3m0": 0.25, "top-k 64, sign (sparseloco)": 0.03}  # of a copy's speed
MOST_BITS = 0.14  # a number, of sparseloco
CHUNK = 4096
KEPT = (16, 32, 64, 128, 256, 410, 1024)
NEAR = 1.02  # index bits by their bound
PART_NUM = 1 << 19  # numbers, a byte each: hivemind's part_size_bytes
STEPS = (60, 30)  # before the delta that is measured, and of it


# --- vectors ---


@dataclass(frozen=True)
class Trained:
    """What a small model gave: a round's delta and a step's gradient, with the shapes that lie in them.

    Args:
        muon: the delta of as many steps with Muon in the place of AdamW.
    """

    delta: Tensor
    muon: Tensor
    gradient: Tensor
    shapes: tuple[tuple[int, ...], ...]


def gaussian(num: int, seed: int = 1) -> Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed)) * 1e-3


def heavy_tailed(num: int) -> Tensor:
    """Student's t with 3 degrees of freedom."""
    normal, a, b, c = torch.unbind(gaussian(4 * num, 2).view(4, num))
    return normal * (3 / (a.square() + b.square() + c.square())).sqrt() * 1e-3


def trained() -> Trained:
    """Train `nano` on the types of numpy, a text of some hundred KB."""
    config = named("nano", 257, 128)
    spans = layout(config)
    with tempfile.TemporaryDirectory() as folder:
        run, batches = run_of(config, 8, 128, Path(folder))
        ready = [batches.at(np.arange(step * 8, (step + 1) * 8)) for step in range(sum(STEPS))]
        muon = msgspec.structs.replace(run, train=msgspec.structs.replace(run.train, optimizer=MuonConfig()))
        ours = WeftLoop(muon, torch.device("cpu"), batches, initial_vector(config, 0))
        ours(STEPS[0])
        at_first = ours.local()
        ours(STEPS[1])
        by_muon = at_first - ours.local()
    model = own_model(config, initial_vector(config, 0))
    loop = BareLoop(model, torch.device("cpu"), ready)

    def vector(of: Callable[[torch.nn.Parameter], Tensor]) -> Tensor:
        return torch.cat([of(model.get_parameter(span.name)).detach().reshape(-1) for span in spans])

    loop(STEPS[0])
    before = vector(lambda parameter: parameter)
    loop(STEPS[1])
    return Trained(
        delta=before - vector(lambda parameter: parameter),
        muon=by_muon,
        gradient=vector(lambda parameter: parameter.grad),  # type: ignore[arg-type, return-value]
        shapes=tuple(tuple(model.get_parameter(span.name).shape) for span in spans),
    )


# --- codecs, ours and hivemind's ---


@dataclass(frozen=True)
class Subject:
    encode: Callable[[Tensor], Any]
    decode: Callable[[Any, Tensor], Tensor]
    nbytes: Callable[[Any], int]

    def error(self, vector: Tensor) -> float:
        return error(self.decode(self.encode(vector), torch.empty_like(vector)), vector)


def ours(config: CodecConfig) -> Subject:
    codec: Codec = build(config)
    return Subject(codec.encode, lambda data, out: codec.decode(data, out.numel(), out), len)


def hivemind_codecs() -> dict[str, Subject]:
    """Return hivemind's 8-bit codecs, on parts of its averager's size."""
    if not importlib.util.find_spec("hivemind"):
        return {}
    from hivemind.compression import (
        BlockwiseQuantization,
        CompressionInfo,
        Quantile8BitQuantization,
        Uniform8BitQuantization,
        quantization,
    )

    # Where `extract` reads a length it converts an array of one number, which numpy refuses since 2.4.
    quantization.int = lambda array: array.item()
    names = {"uniform": Uniform8BitQuantization(), "quantile": Quantile8BitQuantization()}
    if importlib.util.find_spec("bitsandbytes"):
        names["blockwise"] = BlockwiseQuantization()

    def subject(codec: Any) -> Subject:
        def encode(vector: Tensor) -> list[Any]:
            return [codec.compress(part, CompressionInfo.from_tensor(part)) for part in torch.split(vector, PART_NUM)]

        def decode(parts: list[Any], out: Tensor) -> Tensor:
            for part, place in zip(parts, torch.split(out, PART_NUM), strict=True):
                place.copy_(codec.extract(part))
            return out

        return Subject(encode, decode, lambda parts: sum(len(part.buffer) for part in parts))

    return {f"hivemind {name}": subject(codec) for name, codec in names.items()}


def codec_speeds(vector: Tensor, subjects: dict[str, Subject], turns: int) -> tuple[dict[str, float], float]:
    target = torch.empty_like(vector)
    acts: dict[str, Callable[[], object]] = {}
    for name, subject in subjects.items():
        data = subject.encode(vector)
        acts[f"{name}: encode"] = partial(subject.encode, vector)
        acts[f"{name}: decode"] = partial(subject.decode, data, target)
    return speeds(vector, acts, turns)


# --- the report ---


def index_rows() -> tuple[list[list[object]], float]:
    """Return what places take in a payload of many chunks, by what all choices need; and the worst ratio."""
    rows: list[list[object]] = []
    worst, num = 0.0, 256
    for kept in KEPT:
        bound = math.log2(math.comb(CHUNK, kept)) / kept
        found = 8 * rank.nbytes(rank.build(CHUNK, kept), num) / (num * kept)
        worst = max(worst, found / bound)
        rows.append([kept, found, bound, found / bound, found * kept / CHUNK])
    return rows, worst


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num", type=int, default=1 << 24, help="numbers of the vector whose speed is measured")
    parser.add_argument("--turns", type=int, default=9)
    options, before = parser.parse_args(), report.load()
    warnings.filterwarnings("ignore", module="hivemind|torch")
    torch.set_num_threads(1)
    with one_core():
        sections, is_met = measure(options.num, options.turns)
    command = f"python -m benchmarks.codecs {' '.join(sys.argv[1:])}".rstrip()
    packages = [name for name in ("hivemind", "bitsandbytes") if importlib.util.find_spec(name)]
    title, _, text = (__doc__ or "").split("\n\n", 2)
    report.write(
        "codecs", title.rstrip("."), command, [text.strip(), report.load_line(before), *sections], ["numpy", *packages]
    )
    return 0 if is_met else 1


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Run on one core, where that can be asked for: no library's threads help it."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def measure(num: int, turns: int) -> tuple[list[str], bool]:
    """Return the report's sections, and whether the aims are met."""
    found = trained()
    vectors = {
        "Gaussian": gaussian(1 << 20),
        "heavy-tailed": heavy_tailed(1 << 20),
        "delta": found.delta,
        "gradient": found.gradient,
        "Muon's delta": found.muon,
    }
    large = gaussian(num)
    print("trained", file=sys.stderr, flush=True)
    what = f"Speed: {num:,} Gaussian numbers, {turns} turns. `delta` and `gradient` are those of a model of "
    what += f"{found.delta.numel():,} parameters after {sum(STEPS)} steps of AdamW; the delta is that of {STEPS[1]}. "
    what += "`Muon's delta` is that of as many steps with Muon, at the same rate."
    sections, is_met = [what], []
    for make in (codec_section, hivemind_section, index_section):
        text, met = make(vectors, large, turns)
        sections += text
        is_met.append(met)
        print(make.__name__, file=sys.stderr, flush=True)
    sections += basis_section(found, turns)
    sections += power_section(found, turns)
    return sections, all(is_met)


def codec_section(vectors: dict[str, Tensor], large: Tensor, turns: int) -> tuple[list[str], bool]:
    subjects = {name: ours(config) for name, config in CODECS.items()}
    fractions, copied = codec_speeds(large, subjects, turns)
    rows = []
    for name, subject in subjects.items():
        bits = 8 * subject.nbytes(subject.encode(large)) / large.numel()
        errors = [subject.error(vector) for vector in vectors.values()]
        needed = math.log2(1 / errors[0]) if errors[0] else "all"
        rows.append([name, bits, needed, *errors, fractions[f"{name}: encode"], fractions[f"{name}: decode"]])
    header = ["codec", "bits a number", "a perfect code", *(f"error, {name}" for name in vectors), "encode", "decode"]
    bits = 8 * build(TopKConfig()).nbytes(large.numel()) / large.numel()
    is_met = bits <= MOST_BITS
    aims = []
    for name, least in LEAST.items():
        slower = min(fractions[f"{name}: encode"], fractions[f"{name}: decode"])
        is_met &= slower >= least
        aims.append(f"{name} {slower:.3f} (aim {least})")
    text = f"A copy takes over {copied / 1e9:.1f} GB/s. The slower of both ways: {'; '.join(aims)}. "
    text += f"sparseloco: {bits:.4f} bits a number and round (aim {MOST_BITS})."
    return ["## All codecs", report.table(header, rows), text], is_met


def hivemind_section(vectors: dict[str, Tensor], large: Tensor, turns: int) -> tuple[list[str], bool]:
    theirs = hivemind_codecs()
    if not theirs:
        return ["## hivemind's codecs", "hivemind was not measured: it is not installed."], True
    configs: dict[str, CodecConfig] = {
        "weft int8": Int8Config(),
        "weft int8, block 4096": Int8Config(block=4096),
        "weft fp8": Fp8Config(),
    }
    subjects = {name: ours(config) for name, config in configs.items()} | theirs
    fractions, _ = codec_speeds(large, subjects, max(turns // 3, 3))
    base = {way: fractions[f"weft int8: {way}"] for way in ("encode", "decode")}
    rows = [
        [
            name,
            8 * subject.nbytes(subject.encode(large)) / large.numel(),
            *(subject.error(vector) for vector in vectors.values()),
            *(cell for way in base for cell in (fractions[f"{name}: {way}"], fractions[f"{name}: {way}"] / base[way])),
        ]
        for name, subject in subjects.items()
    ]
    header = ["codec", "bits a number", *(f"error, {name}" for name in vectors)]
    header += ["encode", "of weft's int8", "decode", "of weft's int8"]
    return ["## 8 bits a number, beside hivemind's", report.table(header, rows)], True


def index_section(vectors: dict[str, Tensor], large: Tensor, turns: int) -> tuple[list[str], bool]:  # noqa: ARG001
    rows, worst = index_rows()
    header = ["kept of 4096", "bits a place", "log2 C(4096, k) / k", "ratio", "bits a number"]
    text = (
        f"As one number a chunk, or above {rank.MAX_BITS} bits as five, places take {worst:.4f} times their bound at "
        f"most (aim {NEAR})."
    )
    return ["## Places that are kept", report.table(header, rows), text], worst <= NEAR


def basis_section(found: Trained, turns: int) -> list[str]:
    large, shapes = gaussian(1 << 22), ((2048, 2048),)
    rows: list[list[object]] = []
    for name in ("flat", "tiles", "dct"):
        here, wide = build_basis(name, found.shapes), build_basis(name, shapes)
        sent = wide.forward(large, {}, 1)
        acts: dict[str, Callable[[], object]] = {
            "there": partial(wide.forward, large, {}, 1),
            "back": partial(wide.inverse, sent, {}, 1),
        }
        fractions, _ = speeds(large, acts, turns)
        errors = [
            ours(TopKConfig(kept=64, values=values)).error(here.forward(vector, {}, 1))
            for vector in (found.delta, found.gradient)
            for values in ("sign", "fp32")
        ]
        cells: list[object] = ["", ""] if name == "flat" else [fractions["there"], fractions["back"]]
        rows.append([name, *errors, *cells])
    header = ["basis", "delta, sign", "delta, fp32", "gradient, sign", "gradient, fp32", "there", "back"]
    text = (
        "Error of top-k 64 in each basis, with signs and with the values themselves, and the speed of going there and "
    )
    text += "back with a matrix of 2048 x 2048. The way back of `dct` is exact arithmetic in float64: the same bits "
    return ["## Bases", text + "everywhere.", report.table(header, rows)]


def power_section(found: Trained, turns: int) -> list[str]:
    header = ["PowerSGD", "bits a number", "error after 1 step", "4", "16", "mean of 16, feedback", "speed"]
    sections = ["## PowerSGD, beside torch's hook"]
    with one_process():
        for name, (vector, shapes) in {
            "The gradient of the small model": (found.gradient, found.shapes),
            "Four matrices of 2048 x 2048, directions as 1 / k, and noise": matrices(4, 2048),
        }.items():
            rows = low_rank_rows(vector, shapes, max(turns // 3, 3))
            best = best_error(vector, shapes)
            sections += [f"{name}; matrices of rank {RANK} leave {best:.4f} at best:", report.table(header, rows)]
    text = (
        "Errors are those of the same gradient given in each step, without feedback; the last but one column is that "
    )
    text += (
        "of the mean of all that 16 steps decoded, with feedback. Speed is that of all a step computes, with feedback. "
    )
    text += (
        "A step of torch's sends one factor and then the other, which follows from it; a round of weft's sends both "
    )
    text += "at once, on bases of the round before: its first says little, and later ones hold up to twice the rank. "
    text += "weft's products are exact (float64, the same bits "
    return [*sections, text + "everywhere), and fp32 is counted for what is sent on both sides."]


if __name__ == "__main__":
    raise SystemExit(main())
