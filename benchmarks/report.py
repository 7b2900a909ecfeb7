"""A benchmark's report: benchmarks/reports/<name>.md, with what is needed to believe it and to run it again.

    report = Report("averaging", "Averaging a vector among four processes")
    report.say("...")
    report.table(("what", "seconds"), [("weft", "1.20")])
    report.write()

Every report holds the command, the versions, the machine's class and how busy it was. What a figure means is for the
benchmark to say: ratios are taken against a peer measured in the same run, since the machine may be shared.
"""

import math
import os
import platform
import shlex
import ssl
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path

import psutil

FOLDER = Path(__file__).parent / "reports"


class Report:
    """Collects paragraphs and tables. `write` puts them below what all reports begin with.

    Args:
        name: the benchmark's module and the report's file.
        versions: of what was measured beside weft.
    """

    def __init__(self, name: str, title: str) -> None:
        self.versions = {"python": platform.python_version(), "openssl": ssl.OPENSSL_VERSION.split()[1]}
        self._name = name
        self._title = title
        self._lines: list[str] = []
        self._load_before = load()

    def say(self, *paragraphs: str) -> None:
        """Add paragraphs of Markdown."""
        for paragraph in paragraphs:
            self._lines += ["", paragraph]

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Add a table; numbers are the caller's to format."""
        self._lines += ["", _row(columns), _row(["---"] * len(columns)), *map(_row, rows)]

    def write(self) -> Path:
        """Write the report, print it, and return where it is."""
        versions = ", ".join(f"{name} {version}" for name, version in {"weft": _commit(), **self.versions}.items())
        head = [
            f"# {self._title}",
            "",
            f"    python -m benchmarks.{self._name} {shlex.join(sys.argv[1:])}".rstrip(),
            "",
            f"- date: {date.today().isoformat()}",
            f"- versions: {versions}",
            f"- machine: {machine_class()}; load average {self._load_before} before, {load()} after",
        ]
        FOLDER.mkdir(exist_ok=True)
        path = FOLDER / f"{self._name}.md"
        path.write_text("\n".join([*head, *self._lines]) + "\n")
        print(path.read_text())
        return path


def machine_class() -> str:
    """Return what kind of machine this is, not which."""
    gib = math.ceil(psutil.virtual_memory().total / (1 << 30))
    return f"{psutil.cpu_count()}-core {platform.machine().replace('_', '-')}, {gib} GiB"


def load() -> str:
    """Return how many processes wanted a core in the last minute: above the number of cores, somebody waited."""
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


def _row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _commit() -> str:
    """Return the commit of this checkout, marked where the sources differ from it."""
    root = Path(__file__).parents[1]

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + (" with changes" if git("status", "--porcelain", "src") else "")
    except (OSError, subprocess.CalledProcessError):
        return "of an unknown commit"
