"""The page of a run as it happens: four real processes, one of them killed, seen in a real browser by its ticket."""

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slow.browser import IS_NEEDED, Watched, opened, waits_for
from slow.shell import LOCAL, START_S, Shell
from weft.events import RoundCommitted

pytestmark = IS_NEEDED
NAMES = ("anna", "bert", "carl", "dora")
SHOWN_S = 10.0  # by when a death is on the page


@dataclass
class Run:
    shells: dict[str, Shell]
    ticket: str

    def told(self, path: Path) -> Path:
        """Write the ticket where `weft watch -` may read it."""
        path.write_text(self.ticket + "\n")
        return path


@pytest.fixture
def run(shells: Callable[..., Shell], run_file: Path) -> Run:
    four = {name: shells(name) for name in NAMES}
    first, *others = NAMES
    four[first].run("train", str(run_file), "--wait-for", "4", "--name", first, *LOCAL)
    ticket = four[first].ticket()
    for name in others:
        four[name].run("join", "-", "--yes", "--name", name, *LOCAL, given=ticket + "\n")
    for shell in four.values():
        shell.wait(
            lambda entry: isinstance(entry.event, RoundCommitted) and len(entry.event.contributors) == 4,
            within_s=START_S,
        )
    return Run(four, ticket)


@pytest.fixture
def watched(run: Run, tmp_path: Path) -> Iterator[Watched]:
    found = Watched(tmp_path / "watcher", run.ticket, "--transports", "tls")
    yield found
    found.close()


def round_of(page: Any) -> int:
    return int(page.inner_text("#round").replace(",", ""))


def test_a_run_is_seen_as_it_happens_and_a_death_within_ten_seconds(browser: Any, run: Run, watched: Watched) -> None:
    with opened(browser, watched.address) as page:
        waits_for(page, "#alive", "4")
        for name in NAMES:
            waits_for(page, "#peers", name)
        waits_for(page, "#loss-words", "Training loss is")
        waits_for(page, "#proven", "of 4")
        before = round_of(page), page.inner_text("#loss-words")
        page.wait_for_function(
            "([round, words]) => Number(document.getElementById('round').textContent.replace(/,/g, '')) > round + 3"
            " && document.getElementById('loss-words').textContent !== words",
            arg=list(before),
        )
        page.select_option("#event-severity", "2")  # warnings, and what is worse
        at = time.time()
        run.shells["dora"].send(signal.SIGKILL)
        waits_for(page, "#alive", "3", within_ms=1000 * SHOWN_S)
        waits_for(page, "#events", "dora is silent (", within_ms=1000 * (SHOWN_S - (time.time() - at)))
        assert time.time() - at < SHOWN_S
        after = round_of(page)
        page.wait_for_function(
            f"() => Number(document.getElementById('round').textContent.replace(/,/g, '')) > {after}"
        )
        assert all(url.startswith(watched.address) for url in page.asked)
        assert page.faults == []


def test_strangers_see_no_address_ticket_or_path(browser: Any, run: Run, tmp_path: Path) -> None:
    public = Watched(tmp_path / "watcher", run.ticket, "--transports", "tls", "--public")
    try:
        with opened(browser, public.address) as page:
            waits_for(page, "#alive", "4")
            page.select_option("#event-severity", "0")
            whole = page.evaluate("async () => (await fetch('api/history')).text()")
            shown = page.content()
            for text in (whole, shown):
                for secret in ("127.0.0.1", "tls://", run.ticket, str(tmp_path)):
                    assert secret not in text
            page.select_option("#me", label="bert")
            waits_for(page, "#me-share", "%")
    finally:
        public.close()
