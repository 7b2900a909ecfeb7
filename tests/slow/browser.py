"""Debian's Chromium, headless, driven by Playwright, and what a test asks of a page.

Needs `pip install -e '.[page]'` and a Chromium on the path.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
IS_NEEDED = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path: the page was looked at by nobody"),
]
MOST_MS = 10_000
SHOWN = '#round:not(:text-is("–"))'


@contextmanager
def launched() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="the extra page is not installed")
    with sync_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield found
        found.close()


class Watched:
    """`weft watch` as a process; `address` is what it prints."""

    def __init__(self, home: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "weft", "--home", str(home), "watch", "--port", "0", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def opened(browser: Any, address: str, shown: str = SHOWN, **options: Any) -> Iterator[Any]:
    """Open a page and wait until `shown` is; it notes faults, what it asks for, and who rang."""
    context = browser.new_context(**{"viewport": {"width": 1440, "height": 1000}} | options)
    page = context.new_page()
    page.set_default_timeout(MOST_MS)
    page.faults, page.asked = [], []
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.on("console", lambda said: page.faults.append(said.text) if said.type == "error" else None)
    page.on("request", lambda request: page.asked.append(request.url))
    page.on("dialog", lambda dialog: (page.faults.append(dialog.message), dialog.dismiss()))
    page.goto(address)
    page.wait_for_selector(shown)
    yield page
    context.close()


def waits_for(page: Any, selector: str, text: str, within_ms: float = MOST_MS) -> None:
    from playwright.sync_api import expect

    expect(page.locator(selector)).to_contain_text(text, timeout=within_ms)
