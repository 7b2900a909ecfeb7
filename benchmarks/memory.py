"""Peak memory of a peer with 100M parameters, by component, against the closed forms of `weft.cost.training`.

    python -m benchmarks.memory

One peer trains alone, so it owns the whole vector, which is the most that merging can ask for. Its process notes its
resident memory every few milliseconds and what it was doing. What the process held before it began (the interpreter
and torch) is not the peer's and is subtracted.
"""

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.report import load, load_line, table, write
from weft.cost import training as cost
from weft.data.corpus import CorpusConfig, TextSource
from weft.launch.corpus import Corpus
from weft.launch.peer import Opened, Participant, found
from weft.launch.session import Options
from weft.model.config import num_parameters
from weft.model.flat import layout
from weft.net.transport.tls import TlsConfig
from weft.peer.peer import Peer
from weft.run.config import RunConfig, RunFile, ShapedModel, TrainConfig
from weft.run.machine import PeerConfig
from weft.store.home import Home
from weft.sync.costs import peer_memory
from weft.sync.method.presets import (
    DdpConfig,
    DeMoConfig,
    DiLoCoConfig,
    MethodConfig,
    PowerSgdConfig,
    SparseLoCoConfig,
    StreamingConfig,
)
from weft.sync.method.schedule import ConstantConfig
from weft.training.device import decoder

MODEL = ShapedModel(num_layers=10, num_heads=14, width=896, ffn_width=2432)
SEQ_LEN, BATCH, ROUNDS = 128, 4, 3
METHODS: dict[str, MethodConfig] = {
    "diloco": DiLoCoConfig(every=1),
    "ddp": DdpConfig(),
    "streaming": StreamingConfig(every=2, fragments=2, overlap=0),
    "sparseloco": SparseLoCoConfig(every=1),
    "demo": DeMoConfig(),
    "powersgd": PowerSgdConfig(),
}
SAMPLE_S = 0.004
DEADLINE_S = 280.0


def run_file(method: MethodConfig, text: Path) -> RunFile:
    return RunFile(
        name="memory",
        peers=1,
        model=MODEL,
        data=CorpusConfig(source=TextSource(paths=(str(text),))),
        train=TrainConfig(
            seq_len=SEQ_LEN,
            batch_size=BATCH,
            tokens=ROUNDS * SEQ_LEN * BATCH,
            schedule=ConstantConfig(lr=1e-4),
            evaluate_every=0,
            evaluate_windows=1,
        ),
        method=method,
    )


class Watch(threading.Thread):
    """Notes the highest resident memory in each round, and for each thing the peer says it does."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        gc.collect()
        self._process = psutil.Process()
        self.base = self._process.memory_info().rss
        self.peaks: dict[str, int] = {}
        self.peer: Peer | None = None
        self.has_ended = threading.Event()

    def run(self) -> None:
        while not self.has_ended.wait(SAMPLE_S):
            state, number = "starting", 0
            if self.peer is not None:
                head = self.peer.replica.head
                state, number = self.peer._report.state, 0 if head is None else head.round + 1
            where = f"round {number}, {state}" if number else state
            self.peaks[where] = max(self.peaks.get(where, 0), self._process.memory_info().rss - self.base)


def child(name: str, folder: Path) -> None:
    """Train, and print what was seen as JSON."""
    torch.set_num_threads(1)
    torch.ones(64, 64) @ torch.ones(64, 64)  # loads what the first product loads
    text = folder / "text.txt"
    text.write_text("".join(f"{number} squared is {number * number}.\n" for number in range(40_000)))
    settings = PeerConfig(
        name="memory",
        device="cpu",
        threads=1,
        transports=("tls",),
        tls=TlsConfig(host="127.0.0.1"),
        checkpoint_every_s=0,
    )
    watch = Watch()
    watch.start()

    def started(peer: Participant, _opened: Opened) -> None:
        assert isinstance(peer, Peer)
        watch.peer = peer

    options = Options(home=Home(folder / "home"), key=None, settings=settings)
    work = Corpus(described=(run_file(METHODS[name], text), folder))
    outcome = asyncio.run(found(work, options, on_started=started))
    watch.has_ended.set()
    watch.join()
    run = outcome.run
    assert isinstance(run, RunConfig)
    choices, num = run.method, num_parameters(run.model)
    memory = peer_memory(
        choices,
        run.train.optimizer,
        tuple(span.shape for span in layout(run.model)),
        num,
        1,
        activations=cost.activation_nbytes(decoder(run.model), BATCH, SEQ_LEN),
        num_rounds=ROUNDS,
    )
    print(json.dumps({"num": num, "base": watch.base, "peaks": watch.peaks, "said": asdict(memory)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("methods", nargs="*", default=list(METHODS))
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.methods[0], options.child)
        return
    before, sections = load(), []
    for name in options.methods:
        with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
            command = [sys.executable, "-m", "benchmarks.memory", name, "--child", folder]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=True)
        sections += _sections(name, json.loads(done.stdout.splitlines()[-1]))
    write(
        "memory",
        "Peak memory of a peer with 100M parameters",
        "python -m benchmarks.memory",
        [load_line(before), *sections],
    )


def _sections(name: str, seen: dict[str, Any]) -> list[str]:
    said, peaks = cost.Memory(**seen["said"]), seen["peaks"]
    at_first = said.always_nbytes - said.merged - said.kept
    measured = max(peaks.values())
    points = [
        ("begun, before the first round", at_first, max(peaks.get("waiting for peers", 0), peaks["starting"])),
        (
            "first round: trained and encoded",
            at_first + said.activations + said.delta + said.payload,
            peaks["round 1, training"],
        ),
        ("peak", said.peak_nbytes, measured),
    ]
    return [
        f"## {name}",
        f"{seen['num']:,} parameters, batch {BATCH} of {SEQ_LEN} tokens in fp32, {ROUNDS} rounds of a step. Before it "
        f"began the process held {_mb(seen['base'])} MB, which are subtracted below.",
        table(("component", "closed form, MB"), [(part, _mb(nbytes)) for part, nbytes in asdict(said).items()]),
        table(
            ("at most", "closed form, MB", "measured, MB", "difference"),
            [(when, _mb(a), _mb(b), f"{100 * (b / a - 1):+.1f} %") for when, a, b in points],
        ),
        "Highest in each state, MB: " + "; ".join(f"{state} {_mb(nbytes)}" for state, nbytes in peaks.items()) + ".",
    ]


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f}"


if __name__ == "__main__":
    main()
