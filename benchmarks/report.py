"""What every report says beside its figures: the command, the versions, the kind of machine, how busy it was.

A report is Markdown in `reports/`, one per benchmark, written anew by each run. It names no host and no path.
"""

import importlib.metadata
import math
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import psutil
import torch

FOLDER = Path(__file__).parent / "reports"


def machine() -> str:
    """Return the class of this machine, such as "2-core x86-64 (AVX2), 16 GiB"."""
    names = {"x86_64": "x86-64", "amd64": "x86-64", "aarch64": "arm64", "arm64": "arm64"}
    kind = names.get(platform.machine().lower(), platform.machine())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    vectors = torch.backends.cpu.get_cpu_capability()
    memory = math.ceil(psutil.virtual_memory().total / (1 << 30))
    return ", ".join([f"{cores}-core {kind} ({vectors})", f"{memory} GiB", *gpus])


def commit() -> str:
    """Return the commit of this checkout, marked where the sources differ from it."""
    try:
        short = _git("rev-parse", "--short", "HEAD")
        return short + (" with changes" if _git("status", "--porcelain", "src") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=FOLDER.parent, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def versions(*packages: str) -> str:
    """Return "python 3.11.2, torch 2.6.0, ..." for `packages`, weft among them."""
    found = [f"python {platform.python_version()}"]
    for package in ("weft", "torch", *packages):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} (not installed)")
    return ", ".join(found)


def load() -> float | None:
    """Return how many processes wanted a core over the last minute, on average; None where nobody counts."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def load_line(before: float | None) -> str:
    """Return a line that says whether other programs ran meanwhile. `before` is `load()` from before the benchmark."""
    if before is None:
        return "Whether other programs ran meanwhile is not known here."
    cores = os.cpu_count() or 1
    busy = (
        "others were working: times are longer than on an idle machine, and ratios noisier"
        if before > 0.3 * cores
        else "idle"
    )
    return f"Load before the start: {before:.1f} on {cores} cores ({busy})."


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table; floats get four significant digits."""
    lines = [list(map(_cell, header)), ["---"] * len(header), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def write(name: str, title: str, command: str, sections: Sequence[str], packages: Sequence[str] = ()) -> Path:
    """Write `reports/name.md` and print it. The arguments are those of `whole`."""
    text = whole(title, command, sections, packages)
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.md"
    path.write_text(text, encoding="utf-8")
    print(text)
    return path


def whole(title: str, command: str, sections: Sequence[str], packages: Sequence[str] = ()) -> str:
    """Return a report.

    Args:
        command: what a reader types to repeat it.
        sections: Markdown.
        packages: whose versions matter, beside weft and torch.
    """
    head = [
        f"# {title}",
        f"`{command}`",
        f"{date.today().isoformat()}, commit {commit()}. {machine()}; {versions(*packages)}.",
    ]
    return "\n\n".join([*head, *sections]) + "\n"
