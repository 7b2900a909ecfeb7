"""A model that no peer could hold, trained in sections by peers whose address space is limited: peak memory of each
against the planner.

    python -m benchmarks.too_large        # twenty minutes, 12 GB

Real processes, one of each stage. Each may map as much as Python, torch and weft do when they are loaded, what the
largest section needs, and some room (`prlimit --as`). The whole model needs more: a process that is to train it under
the same limit is run, too. Memory is what a process has taken without the files that it maps, looked at every 50 ms.
Where it can (root on Linux), the benchmark moves itself to a network namespace that has loopback only.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TypeVar

import psutil

from benchmarks._company import SOURCE
from benchmarks._isolated import isolate
from benchmarks._simulation import read_run_file
from benchmarks.report import load, load_line, table, write
from weft.cost import pipeline as cost_pipeline
from weft.events import Event, RoundCommitted, StageHeld
from weft.log import read_jsonl
from weft.model.config import num_parameters
from weft.model.sections import Section, sections, whole
from weft.run.genesis import seal
from weft.run.staged import StagedConfig
from weft.store.home import Home
from weft.training.section_memory import Holding, of_run, section_memory, usual_taken

STAGES, STEPS = 4, 50
SEQ_LEN, BATCH = 32, 4
RUN = f"""
name = "too large"
peers = {STAGES}
stages = {{stages}}
model = {{{{type = "shape", num_layers = 28, num_heads = 16, width = 1024, ffn_width = 2816, is_tied = false}}}}
pipeline = {{{{micro_batch = 1}}}}
train = {{{{seq_len = {SEQ_LEN}, batch_size = {BATCH}, tokens = {STEPS * BATCH * SEQ_LEN}, evaluate_every = 0, \
evaluate_windows = 1, schedule = {{{{type = "constant", lr = 1e-4}}}}}}}}
method = {{{{type = "ddp"}}}}
data = {{{{source = {{{{type = "text", paths = ["text.txt"]}}}}}}}}
"""
# No copies of others' sections: they are fetched at each checkpoint, and take memory that the planner does not count.
MACHINE = """
device = "cpu"
threads = 1
transports = ["tls"]
checkpoint_every_s = 0
[tls]
host = "127.0.0.1"
"""
ROOM = 4_000_000_000  # files that are mapped (states on disk), stacks, and what allocators reserve and do not touch
LOOK_S, TICKET_S, END_S = 0.05, 300.0, 2400.0

E = TypeVar("E", bound=Event)


class Peer:
    """One process, and the most memory that it was seen with."""

    def __init__(self, folder: Path, name: str, words: list[str], limit: int, given: str = "") -> None:
        self.home, self.peak, self.mapped = folder / name, 0, 0
        self._said = self.home.with_suffix(".out")
        where = ["--machine", "machine.toml", "--quiet"]
        command = [sys.executable, "-P", "-m", "weft", "--home", str(self.home), *words, *where]
        env = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
        with self._said.open("wb") as out:
            self.process = subprocess.Popen(
                ["prlimit", f"--as={limit}", *command],
                cwd=folder,
                env=env | {"WEFT_TICKET": given},
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    @property
    def said(self) -> str:
        return self._said.read_text()

    def look(self) -> None:
        try:
            memory = psutil.Process(self.process.pid).memory_info()
        except psutil.Error:
            return
        self.peak, self.mapped = max(self.peak, memory.rss - memory.shared), max(self.mapped, memory.vms)

    def seen(self, kind: type[E]) -> list[E]:
        logs = self.home.glob("runs/*/*/log.jsonl")
        return [entry.event for path in logs for entry in read_jsonl(path) if isinstance(entry.event, kind)]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def main() -> None:
    if "--isolated" not in sys.argv:
        isolate("benchmarks.too_large")
    before, loaded = load(), _loaded_nbytes()
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as place:
        folder = Path(place)
        lines = (f"{number} squared is {number * number}.\n" for number in range(40_000))
        (folder / "text.txt").write_text("".join(lines))
        (folder / "machine.toml").write_text(MACHINE)
        holding = of_run(_run(folder, STAGES))
        said = [_planned(holding, section) for section in sections(holding.model, STAGES)]
        limit = loaded + max(said) + ROOM
        alone = section_memory(holding, whole(holding.model), num_members=1, num_taken=1).on_cpu
        peers, took_s = _train(folder, limit)
        refusal = _alone(folder, limit)
        rows = []
        for peer in sorted(peers, key=_stage_of):
            stage = _stage_of(peer)
            planned = said[stage] + cost_pipeline.BASE_NBYTES
            rows.append(
                (
                    stage + 1,
                    f"{peer.seen(StageHeld)[0].num_parameters / 1e6:.1f}",
                    f"{peer.peak / 1e9:.3f}",
                    f"{planned / 1e9:.3f}",
                    f"{peer.peak / planned - 1:+.1%}",
                    f"{peer.mapped / 1e9:.2f}",
                    len(peer.seen(RoundCommitted)),
                )
            )
    head = ("stage", "million parameters", "peak, GB", "planner, GB", "difference", "most mapped, GB", "rounds")
    write(
        "too_large",
        "A model that no peer could hold",
        "python -m benchmarks.too_large",
        [
            f"{num_parameters(holding.model) / 1e6:.0f} million parameters in {STAGES} sections, one peer each; AdamW, "
            f"{STEPS} steps of {BATCH} samples of {SEQ_LEN} tokens, one sample at a time; {took_s:.0f} s. "
            f"{load_line(before)}",
            f"A process maps {loaded / 1e9:.2f} GB when all is loaded and may map {limit / 1e9:.2f} GB. The whole "
            f"model needs {alone / 1e9:.2f} GB beside what is loaded; a process that was to train it said: {refusal}",
            table(head, rows),
        ],
    )


def _loaded_nbytes() -> int:
    """Return the bytes that a process maps once Python, torch and weft are loaded, and a product has been made."""
    code = "import psutil, torch, weft.cli.main, weft.stages.launch; torch.set_num_threads(1)\n"
    code += "torch.ones(64, 64) @ torch.ones(64, 64); print(psutil.Process().memory_info().vms)"
    env = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    return int(subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True).stdout)


def _run(folder: Path, stages: int) -> StagedConfig:
    (folder / "run.toml").write_text(RUN.format(stages=stages))
    keeper = Home(folder / "planner")
    try:
        sealed = seal(read_run_file(folder / "run.toml", {}), folder, keeper, lambda _event: None)
    finally:
        keeper.close()
    assert isinstance(sealed.config, StagedConfig)
    return sealed.config


def _planned(holding: Holding, section: Section) -> int:
    num_taken = min(BATCH, usual_taken(STAGES))  # all of a step are under way together
    return section_memory(holding, section, num_members=1, num_taken=num_taken).on_cpu


def _train(folder: Path, limit: int) -> tuple[list[Peer], float]:
    """Return the peers of a run that has ended, and how long it took."""
    began, peers = time.monotonic(), list[Peer]()
    try:
        first = Peer(folder, "peer0", ["train", "run.toml", "--wait-for", str(STAGES)], limit)
        peers.append(first)
        while not first.said.partition("\n")[0].startswith("weft2") and first.process.poll() is None:
            if time.monotonic() - began > TICKET_S:
                raise RuntimeError(f"no ticket came: {first.said}")
            time.sleep(LOOK_S)
        ticket = first.said.partition("\n")[0]
        peers += [Peer(folder, f"peer{number}", ["join", "--yes"], limit, ticket) for number in range(1, STAGES)]
        while any(peer.process.poll() is None for peer in peers):
            if time.monotonic() - began > END_S:
                raise RuntimeError("it took too long: " + " | ".join(peer.said[-500:] for peer in peers))
            for peer in peers:
                peer.look()
            time.sleep(LOOK_S)
        if any(peer.process.returncode for peer in peers):
            raise RuntimeError(" | ".join(peer.said[-1000:] for peer in peers))
    finally:
        for peer in peers:
            peer.end()
    return peers, time.monotonic() - began


def _alone(folder: Path, limit: int) -> str:
    """Return what a process says at its end that is to train the whole model under the same limit."""
    (folder / "run.toml").write_text(RUN.format(stages=1))
    peer = Peer(folder, "alone", ["train", "run.toml"], limit)
    try:
        is_refused = peer.process.wait(END_S) != 0
    finally:
        peer.end()
    return peer.said.strip().splitlines()[-1] if is_refused else "nothing: it trained it all"


def _stage_of(peer: Peer) -> int:
    return peer.seen(StageHeld)[0].stage


if __name__ == "__main__":
    main()
