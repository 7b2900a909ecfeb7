"""How long the page of `weft watch` takes to open, how it scrolls, and what it holds in memory.

    python -m benchmarks.page log FILE [PEERS]    # plays a run of 1,000 peers, and keeps its first 100,000 events
    python -m benchmarks.page FILE                # opens that log in Debian's Chromium, headless
    python -m benchmarks.page                     # both, a quarter of an hour

The log is what production peers said on a virtual clock (`benchmarks.thousand`). The browser is on this machine and has
no GPU: what it draws, the processor draws. Needs `pip install -e '.[page]'` and a Chromium on the path.
"""

import gc
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import psutil

from benchmarks.report import load, load_line, table, write
from benchmarks.thousand import Crowd, play
from weft.events import VERSION, Entry, Event, LinkDown, LinkUp, MemberJoined, MemberProgress
from weft.ids import PeerId
from weft.sim.world import Life

NUM_EVENTS = 100_000
FEW = 4
NUM_OPENINGS = 5
NUM_FRAMES = 300
STEP_PX = 120  # of a frame: seven thousand pixels a second
SCROLL = """
([selector, frames, step]) => new Promise((done) => {
  const list = document.querySelector(selector);
  const took = [];
  let last = performance.now();
  function frame(now) {
    took.push(now - last);
    last = now;
    const most = list.scrollHeight - list.clientHeight;
    list.scrollTop = list.scrollTop + step > most ? 0 : list.scrollTop + step;
    took.length < frames ? requestAnimationFrame(frame) : done(took.slice(1));
  }
  requestAnimationFrame(frame);
})
"""


def keep_log(path: Path, num_peers: int) -> None:
    """Play a run, and write events of its peers: of links those that last, of hearsay that of one peer.

    While all come, each dials many and says of each other that it came: that would be all there is.
    """
    kept: list[Entry] = []
    links: dict[tuple[PeerId, PeerId], Entry] = {}

    class Logged(Crowd):
        def hear(self, life: Life, event: Event) -> None:
            super().hear(life, event)
            if len(kept) + len(links) >= NUM_EVENTS:
                return
            entry = Entry(v=VERSION, at=self.clock.wall(), peer=life.member.id, event=event)
            if isinstance(event, LinkUp):
                links[life.member.id, event.remote] = entry
            elif isinstance(event, LinkDown):
                links.pop((life.member.id, event.remote), None)
            elif life.member.is_founder or not isinstance(event, MemberProgress | MemberJoined):
                kept.append(entry)

    print(play(num_peers, Logged))
    entries = sorted((*kept, *links.values()), key=lambda entry: entry.at)
    path.write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))
    print(f"{len(entries)} events of {num_peers} peers in {path}")


@contextmanager
def watched(log: Path) -> Iterator[str]:
    """Serve the page of a log; yield its address."""
    command = [sys.executable, "-m", "weft", "--home", str(log.parent / "home"), "watch", "--port", "0", str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def opened_s(browser: Any, address: str) -> float:
    """Return the seconds until all that is there is shown."""
    context = browser.new_context(viewport={"width": 1440, "height": 1000})
    page = context.new_page()
    began = time.perf_counter()
    page.goto(address)
    page.wait_for_selector('#round:not(:text-is("–"))', timeout=60_000)
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    took = time.perf_counter() - began
    context.close()
    return took


def scrolled(page: Any, selector: str) -> "np.ndarray[Any, Any]":
    """Return the milliseconds between frames while a list is scrolled."""
    page.locator(selector).scroll_into_view_if_needed()
    page.wait_for_timeout(500)
    return np.array(page.evaluate(SCROLL, [selector, NUM_FRAMES, STEP_PX]))


def memory_mib(page: Any) -> tuple[float, float]:
    """Return the heap of the page's scripts once garbage is gone, and the memory of the process that shows it."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    session.send("Performance.enable")
    heap = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}["JSHeapUsedSize"]
    shown_by = [
        each for each in psutil.Process().children(recursive=True) if "--type=renderer" in " ".join(each.cmdline())
    ]
    most = max(each.memory_full_info().uss for each in shown_by)
    return heap / 2**20, most / 2**20


def few_of(log: Path, path: Path) -> int:
    """Write the events of the first peers of a log; return how many."""
    lines = log.read_bytes().splitlines(keepends=True)
    peers = list(dict.fromkeys(msgspec.json.decode(line)["peer"] for line in lines[:1000]))[:FEW]
    kept = [line for line in lines if any(peer.encode() in line[:200] for peer in peers)]
    path.write_bytes(b"".join(kept))
    return len(kept)


def measure(log: Path) -> None:
    """Open both logs, and write the report."""
    from playwright.sync_api import sync_playwright

    before = load()
    rows, frames, memory = [], [], []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        few = Path(folder) / "few.jsonl"
        num_few = few_of(log, few)
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        for name, path, num in ((f"{FEW} peers", few, num_few), ("all peers", log, len(log.read_bytes().splitlines()))):
            with watched(path) as address:
                first = opened_s(browser, address)
                took = sorted(opened_s(browser, address) for _ in range(NUM_OPENINGS))
                rows.append((name, f"{num:,}", f"{first:.2f}", f"{median(took):.2f}", f"{took[0]:.2f}–{took[-1]:.2f}"))
                page = browser.new_page(viewport={"width": 1440, "height": 1000})
                page.goto(address)
                page.wait_for_selector('#round:not(:text-is("–"))', timeout=60_000)
                for selector in ("#peers", "#events"):
                    took_ms = scrolled(page, selector)
                    slow = 100 * float((took_ms > 50).mean())
                    worst = np.percentile(took_ms, 99)
                    frames.append((name, selector, f"{median(took_ms):.1f}", f"{worst:.1f}", f"{slow:.1f} %"))
                memory.append((name, *(f"{mib:.0f}" for mib in memory_mib(page))))
                page.close()
        browser.close()
    write(
        "page",
        "The page: opening, scrolling, memory",
        "python -m benchmarks.page",
        [
            f"Chromium, headless, 1440 x 1000, on this machine. {load_line(before)}",
            "Until everything is shown, in seconds: the first time, when the command has just begun and reads the log; "
            f"then {NUM_OPENINGS} times, each in a fresh browser context.",
            table(("log", "events", "first", "median", "from–to"), rows),
            f"Milliseconds between {NUM_FRAMES} frames while a list is scrolled by {STEP_PX} pixels a frame.",
            table(("log", "list", "median", "99 %", "over 50 ms"), frames),
            "MiB: what scripts hold once garbage is collected, and what the process that shows the page has to itself.",
            table(("log", "heap of scripts", "process"), memory),
        ],
        ("playwright", "starlette", "uvicorn"),
    )


def main() -> None:
    match sys.argv[1:]:
        case ["log", path, *rest]:
            gc.set_threshold(200_000, 20, 50)
            keep_log(Path(path), int(rest[0]) if rest else 1000)
        case [path]:
            measure(Path(path))
        case []:
            with tempfile.TemporaryDirectory() as folder:
                gc.set_threshold(200_000, 20, 50)
                keep_log(Path(folder) / "thousand.jsonl", 1000)
                measure(Path(folder) / "thousand.jsonl")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
