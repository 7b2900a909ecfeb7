"""Everything that only a GPU can tell, in at most nine minutes on one card.

    python -m benchmarks.gpu             or make gpu; without a card it says so and runs small
    python -m benchmarks.gpu --small     on the CPU, with small shapes: a test of itself; its figures mean nothing

Each part is a process of its own with seconds of its own, and is cut off when they are spent: what it had by then is in
the report, with a row that says so. What fails is a row, too, with the error's first line, and the others go on. The
report is written anew after each part. The exit code is 1 where any row is not "ok".
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from benchmarks import report

OK = "ok"
ALL_S = 540.0
END_S = 3.0  # for processes that were killed to be gone: the next part measures without them
SMALL_TIMES = 6  # as long may all take on the CPU, which may be busy with other work: nobody rents it
SPARE_S = 10.0  # for the report, and for what is under way to end


@dataclass(frozen=True)
class Part:
    """One part of the report.

    Args:
        most_s: seconds, its start included.
        header: of its rows, less the last column, which says whether a row is ok.
    """

    title: str
    most_s: float
    header: tuple[str, ...]


STEP = ("model, batch x tokens: precision", "weft tokens/s", "bare PyTorch", "weft / bare", "last loss, weft / bare")
PLAYED = ("processes", "tokens/s, all", "against one", "rounds", "held-out loss", "seconds in all")
# In the order in which they run: what others rest on first, what takes longest last.
PARTS: Mapping[str, Part] = {
    "digests": Part(
        "Digests of the shared path, CPU against GPU", 30, ("on", "stages", "with the CPU", "with all machines")
    ),
    "step": Part("A step against bare PyTorch", 55, STEP),
    "memory": Part(
        "Memory of the device against cost.py",
        25,
        ("model, batch x tokens: method", "cost.py, GB", "allocated, GB", "reserved, GB", "allocated / cost.py"),
    ),
    "pause": Part("Pause and VRAM cap", 30, ("what", "device", "then", "parameters and moments")),
    "codecs": Part(
        "Encode and merge, on the host, beside a copy on the device",
        60,
        ("what", "numbers", "seconds", "GB/s of fp32", "times a copy on the device"),
    ),
    "site": Part("A site of one card", 90, PLAYED),
    "peers": Part("Peers that share the card", 70, PLAYED),
    "serving": Part(
        "Serving in bf16, tokens/s, beside transformers",
        60,
        ("model", "step", "engine", "transformers", "step / transformers", "engine / transformers"),
    ),
    "compiled": Part("A compiled step against bare PyTorch, compiled", 110, STEP),
}


@dataclass(frozen=True)
class Found:
    """The rows of a part: of each the cells, and whether it is ok or what is not."""

    rows: tuple[tuple[tuple[object, ...], str], ...]
    seconds: float

    @property
    def wrong(self) -> list[str]:
        return [f"{cells[0]}: {verdict}" for cells, verdict in self.rows if not verdict.startswith(OK)]


def run_part(name: str, command: Sequence[str], width: int, most_s: float, folder: Path) -> Found:
    """Run a part in a process, and end it with all that it started when its seconds are spent.

    Args:
        command: what is run, less the file where rows are to come to lie.
        width: cells of a whole row.
    """
    began, path, said = time.monotonic(), folder / f"{name}.rows", folder / f"{name}.said"
    if most_s <= 0:
        return Found((((name,), "not run: the time of all parts is spent"),), 0.0)
    with said.open("wb") as out:
        process = subprocess.Popen(
            [*command, str(path)], stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=Path(__file__).parents[1]
        )
        try:
            code: int | None = process.wait(most_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    rows = [_parted(line, width) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    if code is None:
        rows.append(((name,), f"cut off: its {most_s:.0f} s are spent"))
    elif code:
        last = (said.read_text("utf-8", "replace").strip().splitlines() or ["it said nothing"])[-1]
        rows.append(((name,), f"failed: ended with code {code}: {last[:300]}"))
    elif not rows:
        rows.append(((name,), "failed: it told nothing"))
    return Found(tuple(rows), time.monotonic() - began)


def _parted(line: str, width: int) -> tuple[tuple[object, ...], str]:
    """Return the cells of a row, and its verdict: where the line is cut short or the row is none, that it is so."""
    try:
        *cells, verdict = json.loads(line)
    except ValueError:
        return (("a row",), "failed: it was cut short")
    if len(cells) != width and str(verdict).startswith(OK):
        return (tuple(cells[:1]), f"failed: {len(cells)} cells of {width}")
    return tuple(cells), str(verdict)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started, whatever sessions these have of their own."""
    with suppress(psutil.NoSuchProcess):
        began = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        if process.poll() is None:
            process.kill()
        for child in began:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(began, END_S)
    process.wait()


def section(part: Part, found: Found) -> str:
    header = [*part.header, "verdict"]
    rows = [
        [*cells, *[""] * (len(part.header) - len(cells)), verdict.replace("|", "/")] for cells, verdict in found.rows
    ]
    return f"## {part.title}\n\n{report.table(header, rows)}\n\n{found.seconds:.0f} of at most {part.most_s:.0f} s."


def summary(found: Mapping[str, Found]) -> str:
    wrong = [f"- {name}: {text}" for name, each in found.items() for text in each.wrong]
    num = sum(len(each.rows) for each in found.values())
    return "\n".join([f"{num - len(wrong)} of {num} rows are ok.", *([""] if wrong else []), *wrong])


def no_card() -> str:
    """Return why there is no card to measure, and what to do."""
    if torch.version.cuda is None and torch.version.hip is None:
        why = (
            f"this torch ({torch.__version__}) is built for the CPU. With a card: make gpu TORCH=torch, which installs "
        )
        return why + "the build that pip finds for CUDA (docs/your_machine.md)"
    return f"torch {torch.__version__} sees no card: nvidia-smi and weft doctor say more"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all, where none is named")
    parser.add_argument("--small", action="store_true", help="on the CPU, with small shapes")
    parser.add_argument("--out", type=Path, help="the report; else reports/gpu.md, or with --small the screen alone")
    options = parser.parse_args()
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}. There are {', '.join(PARTS)}")
    is_small = options.small or not torch.cuda.is_available()
    if is_small and not options.small:
        print(f"No GPU here, so this runs small, as a test of itself: {no_card()}.", file=sys.stderr, flush=True)
    path = options.out or (None if is_small else report.FOLDER / "gpu.md")
    times = SMALL_TIMES if is_small else 1
    load, deadline = report.load(), time.monotonic() + times * ALL_S - SPARE_S
    title, _, text = (__doc__ or "").partition("\n")
    title = f"{title.rstrip('.')}{': small, on a CPU' if is_small else ''}"
    words = ["python -m benchmarks.gpu", *sys.argv[1:]]
    about = text.strip().split("\n\n")[1]
    parts = {key: replace(part, most_s=times * part.most_s) for key, part in PARTS.items()}
    found: dict[str, Found] = {}
    whole = ""
    with tempfile.TemporaryDirectory(prefix="weft-gpu-") as name:
        for key in options.parts or PARTS:
            part = parts[key]
            command = [sys.executable, "-m", "benchmarks._gpu_parts", key, *(["--small"] if is_small else [])]
            left = min(part.most_s, deadline - time.monotonic())
            found[key] = run_part(key, command, len(part.header), left, Path(name))
            print(
                f"{key}: {found[key].seconds:.0f} s; {'; '.join(found[key].wrong) or OK}", file=sys.stderr, flush=True
            )
            sections = [
                summary(found),
                about,
                _machine(load),
                *(section(parts[key], each) for key, each in found.items()),
            ]
            whole = report.whole(title, " ".join(words), sections)
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(whole, encoding="utf-8")
    print(whole)
    return 1 if any(each.wrong for each in found.values()) else 0


def _machine(load: float | None) -> str:
    """Return what of this machine decides the figures."""
    said = f"CUDA {torch.version.cuda or 'none'}"
    if torch.cuda.is_available():
        with suppress(OSError, subprocess.SubprocessError):
            query = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
            done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
            said += f"; driver, power limit, highest clock: {done.stdout.strip().splitlines()[0]}"
    return f"{said}. {report.load_line(load)}"


if __name__ == "__main__":
    raise SystemExit(main())
