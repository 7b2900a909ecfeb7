"""The parts of `benchmarks.gpu`: each runs in a process of its own, and writes a row as soon as it has one.

    python -m benchmarks._gpu_parts step ROWS [--small]

A row is a line of JSON in ROWS: a list of cells, of which the last says whether it is as it should be, "ok" or what is
not. What fails is a row, too, and the rest goes on.
"""

import argparse
import ast
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from benchmarks import engine
from benchmarks._shells import run as run_shells
from benchmarks.step import BareLoop, WeftLoop, plain_model, ratio, ready_made, run_of, take_turns
from weft.cli.run.running import Report
from weft.codec.build import build
from weft.codec.codec import Codec
from weft.engine.draw import Drawing
from weft.engine.step import Weights
from weft.errors import TooLarge
from weft.model.config import ModelConfig, Size, named, num_parameters
from weft.model.flat import layout
from weft.model.initial import STD
from weft.model.weights import write_folder
from weft.run.host import host_free_nbytes
from weft.run.machine import CapsConfig, PeerConfig
from weft.sync.merge.reduce import Merger, coding_in
from weft.sync.method.presets import DdpConfig, DiLoCoConfig, MethodConfig, SparseLoCoConfig, spell_out
from weft.training.device import choose, needed_nbytes
from weft.wire import Buffer

INVARIANTS = Path(__file__).parents[1] / "tests" / "invariants"
LEAST = 0.97  # of bare PyTorch's speed
MOST_OVER = 1.10  # of the memory that cost.py names
AT_ONCE = 5.0  # seconds in which a pause is to free the device
VOCAB = 257
OK = "ok"


@dataclass(frozen=True)
class Case:
    """A model and its batch."""

    size: Size
    batch_size: int
    seq_len: int
    num_turns: int
    turn_steps: int
    has_one_layer: bool = False

    @property
    def model(self) -> ModelConfig:
        whole = named(self.size, VOCAB, self.seq_len)
        return replace(whole, num_layers=1) if self.has_one_layer else whole

    def __str__(self) -> str:
        return f"{self.size}, {self.batch_size} x {self.seq_len}"


LARGE = (Case("150m", 16, 1024, 5, 4), Case("1b", 4, 1024, 5, 2))
SMALL = (Case("nano", 4, 64, 2, 2, has_one_layer=True),)


class Bench:
    """What a part has: the device, the cases, and the file of its rows."""

    def __init__(self, rows: Path, *, is_small: bool) -> None:
        self.is_small = is_small
        self.device = torch.device("cuda" if torch.cuda.is_available() and not is_small else "cpu")
        self.cases = SMALL if is_small else LARGE
        self._rows = rows

    @property
    def has_gpu(self) -> bool:
        return self.device.type == "cuda"

    def row(self, *cells: object) -> None:
        with self._rows.open("a", encoding="utf-8") as rows:
            rows.write(json.dumps(cells) + "\n")

    @contextmanager
    def trying(self, label: str) -> Iterator[None]:
        """Make what fails inside a row. What cases before have left goes from memory first."""
        gc.collect()
        if self.has_gpu:
            torch.cuda.empty_cache()
        try:
            yield
        except Exception as error:  # whatever it is, the next case goes on
            self.row(label, f"failed: {first_line(error)}")

    def taken_nbytes(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.has_gpu else 0

    def seconds(self, act: Callable[[], object]) -> float:
        self.wait()
        began = time.perf_counter()
        act()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        if self.has_gpu:
            torch.cuda.synchronize(self.device)


def first_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of what it says."""
    said = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {said}"[:300].rstrip(": ")


@lru_cache(maxsize=1)
def weights(case: Case) -> Tensor:
    return drawn_weights(case.model)


def drawn_weights(config: ModelConfig) -> Tensor:
    """Return weights like a run's first ones, of other bits: those of 1b would take a core a quarter of a minute."""
    spans = layout(config)
    vector = torch.ones(spans.num_parameters)
    source = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(source).manual_seed(0)
    for span in spans:
        if span.has_decay:
            drawn = torch.randn(span.shape, generator=generator, device=source).mul_(STD)
            spans.view(vector, span).copy_(drawn)
    return vector


def gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.2f}"


# --- digests ---


def digests(bench: Bench) -> None:
    """The program of tests/invariants/test_exact.py, which all of the shared path is computed by, on both."""
    golden = _golden()
    found = {device: _exact(device) for device in dict.fromkeys(("cpu", bench.device.type))}
    for device, stages in found.items():
        here = found["cpu"]
        apart = [stage for stage in golden.keys() | stages.keys() if stages.get(stage) != here.get(stage)]
        wrong = [stage for stage in golden.keys() | stages.keys() if stages.get(stage) != golden.get(stage)]
        against = "" if device == "cpu" else _agree(apart)
        is_ok = not apart and not wrong
        bench.row(device, len(stages), against, _agree(wrong), OK if is_ok else "differs")


def _agree(apart: list[str]) -> str:
    return f"differ: {', '.join(sorted(apart))}" if apart else "agree"


def _exact(device: str) -> dict[str, str]:
    command = [sys.executable, str(INVARIANTS / "exact_program.py"), "1", device]
    paths = [str(Path(__file__).parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it said nothing"])[-1])
    return dict(json.loads(done.stdout))


def _golden() -> dict[str, str]:
    """Return the digests that every machine must have. The test has them; it needs pytest, which is not needed here."""
    for node in ast.parse((INVARIANTS / "test_exact.py").read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "GOLDEN":
            return dict(ast.literal_eval(node.value))
    raise RuntimeError("tests/invariants/test_exact.py has no GOLDEN")


# --- steps ---


def step(bench: Bench) -> None:
    """Weft and a bare PyTorch loop take turns, as in `benchmarks.step`, each precision by itself."""
    for case in bench.cases:
        _step(bench, case, PeerConfig(precision="bf16"))
    _step(bench, bench.cases[0], PeerConfig(precision="fp32"))


def compiled(bench: Bench) -> None:
    """As `step`, both compiled."""
    _step(bench, bench.cases[0], PeerConfig(precision="bf16", is_compiled=True))


def _step(bench: Bench, case: Case, ways: PeerConfig) -> None:
    how = f"{ways.precision}{', compiled' if ways.is_compiled else ''}"
    with bench.trying(f"{case}: {how}"), tempfile.TemporaryDirectory() as folder:
        run, batches = run_of(case.model, case.batch_size, case.seq_len, Path(folder))
        ready = ready_made(batches, case.batch_size, (case.num_turns + 1) * case.turn_steps)
        vector = weights(case)
        ours = WeftLoop(run, bench.device, batches, vector, ways)
        plain = BareLoop(plain_model(case.model, vector), bench.device, ready, ways)
        turns = take_turns({"weft": ours, "plain": plain}, case.num_turns, case.turn_steps, run.tokens_per_step)
        turns.require_same()
        speeds = turns.speeds
        found = ratio(speeds["weft"], speeds["plain"])
        verdict = OK if found >= LEAST or not bench.has_gpu else f"below {LEAST}"
        losses = f"{turns.losses['weft']:.4f} / {turns.losses['plain']:.4f}"
        cells = (median(speeds["weft"]), median(speeds["plain"]), found, losses)
        bench.row(f"{case}: {how}", *cells, "; ".join([verdict, *ours.fallbacks[:1]]))


# --- memory ---


def memory(bench: Bench) -> None:
    """What torch had allocated at most over two steps and an evaluation, against what `cost.py` says of the device."""
    first, last = bench.cases[0], bench.cases[-1]
    cases: list[tuple[Case, PeerConfig, MethodConfig]] = [
        (first, PeerConfig(precision="bf16"), DiLoCoConfig()),
        (first, PeerConfig(precision="fp32"), DiLoCoConfig()),
        (first, PeerConfig(precision="bf16", has_recompute=True), DiLoCoConfig()),
        (first, PeerConfig(precision="bf16"), DdpConfig()),
        (last, PeerConfig(precision="bf16"), DiLoCoConfig()),
    ]
    for case, ways, method in cases if bench.has_gpu else cases[:1]:
        kind = f"{type(method).__name__.removesuffix('Config').lower()}, {ways.precision}"
        label = f"{case}: {kind}{', recomputed' if ways.has_recompute else ''}"
        with bench.trying(label), tempfile.TemporaryDirectory() as folder:
            _memory(bench, label, case, ways, method, Path(folder))


def _memory(bench: Bench, label: str, case: Case, ways: PeerConfig, method: MethodConfig, folder: Path) -> None:
    run, batches = run_of(case.model, case.batch_size, case.seq_len, folder, method)
    vector, before = weights(case), bench.taken_nbytes()
    if bench.has_gpu:
        torch.cuda.reset_peak_memory_stats(bench.device)
    loop = WeftLoop(run, bench.device, batches, vector, ways)
    trainer = loop.trainer
    for number in range(2):
        positions = np.arange(number * case.batch_size, (number + 1) * case.batch_size)
        trainer.gradient(positions, 0, 1) if run.method.send == "gradient" else trainer.train(positions, 0, 1)
    trainer.evaluate(vector, batches, case.batch_size)
    needed = needed_nbytes(run, ways, trainer.device, trainer.micro_batch)[str(trainer.device.torch)]
    if not bench.has_gpu:
        bench.row(label, gb(needed), "a CPU's is that of benchmarks.memory", "", "", OK)
        return
    taken, reserved = (
        torch.cuda.max_memory_allocated(bench.device) - before,
        torch.cuda.max_memory_reserved(bench.device),
    )
    verdict = OK if taken <= MOST_OVER * needed else f"more than {MOST_OVER:.2f} of what is said"
    bench.row(label, gb(needed), gb(taken), gb(reserved), taken / needed, "; ".join([verdict, *loop.fallbacks[:1]]))


# --- encoding and merging ---


def codecs(bench: Bench) -> None:
    """Encoding and merging of a whole vector on the host, by the wall, beside copies of it."""
    free = host_free_nbytes() // 40
    if bench.has_gpu:
        free = min(free, torch.cuda.mem_get_info(bench.device)[0] // 10)
    num = min(1 << 20 if bench.is_small else num_parameters(named("1b", VOCAB, 1024)), free)
    there = torch.randn(num, device=bench.device, generator=torch.Generator(bench.device).manual_seed(1)) * 1e-3
    target, vector = torch.empty_like(there), there.cpu()
    target.copy_(there)
    copy_s = median(bench.seconds(lambda: target.copy_(there)) for _ in range(5))

    def row(what: str, seconds: float) -> None:
        bench.row(what, num, seconds, 4 * num / seconds / 1e9, seconds / copy_s, OK)

    row("copied on the device", copy_s)
    row("copied to the host", median(bench.seconds(there.cpu) for _ in range(2)))
    row("copied to the device", median(bench.seconds(lambda: target.copy_(vector)) for _ in range(2)))
    del target, there
    methods: tuple[MethodConfig, ...] = (DiLoCoConfig(), SparseLoCoConfig())
    for method in methods:
        choices = spell_out(method, 4)
        codec, name = build(choices.codec, 1), choices.codec.__struct_config__.tag
        with bench.trying(f"{name}: encoded, merged"):
            encoded: list[Buffer] = []
            row(f"{name}: encoded", bench.seconds(partial(_into, encoded, codec, vector)))
            merger = Merger(num, coding_in(choices, 1))
            add = partial(merger.add, 1, encoded[0])
            row(f"{name}: one contribution merged", bench.seconds(add))
            row(f"{name}: the mean encoded", bench.seconds(merger.result))


def _into(encoded: list[Buffer], codec: Codec, vector: Tensor) -> None:
    encoded.append(codec.encode(vector))


# --- pause and cap ---


def pause(bench: Bench) -> None:
    """Off the device and back with the same bits; and no more of it than the owner's cap."""
    case = bench.cases[-1]
    with bench.trying("pause"), tempfile.TemporaryDirectory() as folder:
        _pause(bench, case, Path(folder))
    case = bench.cases[0]
    if not bench.has_gpu:
        bench.row("VRAM cap", "a CPU has no such switch", "", "", OK)
        return
    with bench.trying("VRAM cap"), tempfile.TemporaryDirectory() as folder:
        _cap(bench, case, Path(folder))


def _pause(bench: Bench, case: Case, folder: Path) -> None:
    run, batches = run_of(case.model, case.batch_size, case.seq_len, folder)
    before = bench.taken_nbytes()
    loop = WeftLoop(run, bench.device, batches, weights(case))
    loop(2)
    trainer = loop.trainer
    held, state = loop.local(), {name: each.cpu().clone() for name, each in trainer.private_state().items()}
    taken = bench.taken_nbytes() - before
    away_s = bench.seconds(trainer.park)
    left = bench.taken_nbytes() - before
    back_s = bench.seconds(trainer.unpark)
    now = trainer.private_state()
    is_same = torch.equal(held, loop.local()) and all(
        torch.equal(each, now[name].cpu()) for name, each in state.items()
    )
    wrong = [] if is_same else ["it came back with other bits"]
    wrong += [f"longer than {AT_ONCE} s"] if bench.has_gpu and away_s > AT_ONCE else []
    wrong += [f"{gb(left)} GB stay on the device"] if left > taken / 100 else []
    loop(1)
    what = f"{gb(taken)} GB left the device in {away_s:.2f} s"
    bench.row(
        f"pause, {case}", what, f"back in {back_s:.2f} s", _agree([] if is_same else ["bits"]), "; ".join(wrong) or OK
    )


def _cap(bench: Bench, case: Case, folder: Path) -> None:
    run, batches = run_of(case.model, case.batch_size, case.seq_len, folder)
    device, vector = choose(PeerConfig(device=str(bench.device))), weights(case)
    name = str(device.torch)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(bench.device)
    few = max(1, case.batch_size // 4)
    already = torch.cuda.memory_reserved(bench.device)
    cap = already + int(needed_nbytes(run, PeerConfig(), device, few)[name] * 1.25)
    loop = WeftLoop(run, bench.device, batches, vector, PeerConfig(caps=CapsConfig(vram_nbytes=cap)))
    loop(2)
    most, micro = torch.cuda.max_memory_reserved(bench.device), loop.trainer.micro_batch
    verdict = OK if most <= cap else "above the cap"
    what = f"{gb(most)} of {gb(cap)} GB taken"
    bench.row(f"VRAM cap, {case}", what, f"{micro} of {case.batch_size} samples at a time", "", verdict)
    del loop
    low = 4 * num_parameters(case.model)
    try:
        WeftLoop(run, bench.device, batches, vector, PeerConfig(caps=CapsConfig(vram_nbytes=low)))
    except TooLarge as error:
        bench.row(f"VRAM cap of {gb(low)} GB", "refused", first_line(error), "", OK)
    else:
        bench.row(f"VRAM cap of {gb(low)} GB", "not refused", "", "", "a model that does not fit was taken")


# --- processes ---

RUN = """
name = "card"
seed = 1
peers = {peers}
[model]
{model}
[data.source]
type = "text"
paths = ["text.txt"]
[train]
seq_len = {seq_len}
batch_size = {batch_size}
tokens = {tokens}
evaluate_every = 0
evaluate_windows = 16
[train.schedule]
type = "constant"
lr = 1e-3
[method]
type = "diloco"
every = {every}
"""
TINY = 'type = "shape"\nnum_layers = 1\nnum_heads = 2\nwidth = 32\nffn_width = 48'
ROUNDS = 3


def site(bench: Bench) -> None:
    """`weft train` as one process, and as a site of one rank under torchrun: the way over NCCL and FSDP2 on a card."""
    alone = _played(bench, "one process", 1)
    _played(bench, "a site of one card", 1, num_ranks=1, alone=alone)


def peers(bench: Bench) -> None:
    """Members that share the card: `weft train` and `weft join`, TLS on loopback."""
    num = 2 if bench.is_small else 4
    alone = _played(bench, "one peer", 1)
    _played(bench, f"{num} peers", num, alone=alone)


def _played(bench: Bench, label: str, num_peers: int, num_ranks: int = 0, alone: float | None = None) -> float | None:
    batch_size, seq_len, every = (4, 64, 5) if bench.is_small else (16, 512, 20)
    model = TINY if bench.is_small else 'type = "size"\nsize = "35m"'
    per_round = num_peers * every * batch_size * seq_len
    text = RUN.format(
        peers=num_peers, model=model, seq_len=seq_len, batch_size=batch_size, every=every, tokens=ROUNDS * per_round
    )
    threads = str(max(1, (os.cpu_count() or 1) // num_peers))
    machine = ("--transports", "tls", "--host", "127.0.0.1", "--device", bench.device.type, "--threads", threads)
    speed = None
    with bench.trying(label), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.joinpath("run.toml").write_text(text)
        shutil.copy(Path(np.__file__).parent / "__init__.pyi", folder / "text.txt")
        ended = run_shells("run.toml", num_peers, folder, machine, num_ranks)
        # The first step of each is the one that time begins after.
        steps = [
            (num - 1) * batch_size * seq_len / s for num, s in zip(ended.num_steps, ended.steps_s, strict=True) if s
        ]
        speed = sum(steps)
        replicas = {report.replica for report in ended.reports}
        wrong = [] if len(replicas) == 1 else ["replicas differ"]
        wrong += [f"{ended.num_short_rounds} rounds left somebody out"] if ended.num_short_rounds else []
        compared = "" if not alone else f"{speed / alone:.3f}"
        cells = (speed, compared, ended.num_rounds, _losses(ended.reports), ended.wall_s)
        bench.row(label, *cells, "; ".join(wrong) or OK)
    return speed


def _losses(reports: tuple[Report, ...]) -> str:
    return " / ".join(sorted({"none" if report.loss is None else f"{report.loss:.4f}" for report in reports}))


# --- serving ---


def serving(bench: Bench) -> None:
    """The engine in bf16 against transformers in bf16, on the same weights and prompts, as in `benchmarks.engine`."""
    for case in bench.cases:
        with bench.trying(case.size):
            _serving(bench, replace(case.model, vocab_size=engine.VOCAB, max_seq_len=engine.CONTEXT), case.size)


def _serving(bench: Bench, config: ModelConfig, name: str) -> None:
    vector = drawn_weights(config)
    there = vector.to(bench.device)
    ours = engine.Steps(config, Weights(config, there, "bf16"))
    del there
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder) / "model", config, vector)
        theirs = engine.Transformers(Path(folder) / "model", torch.bfloat16, bench.device)
    served = engine.Served(config, vector, "bf16", Drawing(temperature=0.0), bench.device)
    try:
        for batch in (2,) if bench.is_small else (1, 64):
            with bench.trying(f"{name}, {batch} texts"):
                subjects: dict[str, engine.Subject] = {"step": ours, "transformers": theirs, "engine": served}
                found = engine.measure(subjects, batch, *((1, 2) if bench.is_small else (3, 16)))
                speeds = [median(found[each].speeds) for each in ("step", "engine", "transformers")]
                ratios = [engine.against(found, each, ["transformers"]) for each in ("step", "engine")]
                bench.row(f"{name}, {batch} texts", *speeds, *ratios, OK)
    finally:
        served.close()


PARTS: dict[str, Callable[[Bench], None]] = {
    part.__name__: part for part in (digests, step, memory, codecs, pause, site, peers, serving, compiled)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    bench = Bench(options.rows, is_small=options.small)
    if options.small:
        torch.set_num_threads(1)
    with bench.trying(options.part):
        PARTS[options.part](bench)
    with suppress(OSError):
        sys.stdout.flush()


if __name__ == "__main__":
    main()
