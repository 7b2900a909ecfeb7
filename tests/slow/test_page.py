"""The page of `weft watch` in a real browser: Debian's Chromium, headless, driven by Playwright.

Needs `pip install -e '.[page]'` and a Chromium on the path; where they are not, it says so.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slow.browser import IS_NEEDED, SHOWN, Watched, opened, waits_for
from unit.cli.watch.test_status import A, B, commit, started, step
from weft.events import (
    VERSION,
    Entry,
    Evaluated,
    Event,
    LinkUp,
    MemberGone,
    MemberSuspected,
    Notice,
    PeerStopped,
    Sampled,
    WorkAudited,
    WorkDoubted,
)
from weft.ids import Digest, PeerId, Round, Tokens

pytestmark = IS_NEEDED

HOSTILE = "<img src=x onerror=alert(1)>"
NUM_ROUNDS = 40


def told(peer: PeerId, at: float, event: Event) -> bytes:
    return msgspec.json.encode(Entry(v=VERSION, at=at, peer=peer, event=event)) + b"\n"


def rounds() -> Iterator[bytes]:
    """Yield a run of two peers; the second has a name that a careless page would run."""
    yield told(A, 1000.0, started("anna"))
    yield told(B, 1000.5, started(HOSTILE))
    yield told(A, 1001.0, LinkUp(remote=B, transport="tls", address="tls://10.1.2.3:4"))
    for number in range(1, NUM_ROUNDS + 1):
        at = 1000.0 + 10 * number
        yield from (told(peer, at - 2, step(4.0 - number / 20)) for peer in (A, B))
        yield from (told(peer, at, commit(number, 1024, A, B)) for peer in (A, B))
    yield told(A, 1401.0, Sampled(round=Round(40), prompt="once ", text="upon a time"))
    evaluated = Evaluated(
        round=Round(40), loss=2.1, nats_per_byte=1.9, num_tokens=64, committed_tokens=Tokens(1024 * NUM_ROUNDS)
    )
    yield told(A, 1402.0, evaluated)
    yield told(A, 1403.0, Notice(text=HOSTILE))


class Log(Watched):
    """The page of a log that grows."""

    def __init__(self, log: Path) -> None:
        self.log = log
        super().__init__(log.parent / "home", str(log))

    def grow(self, *lines: bytes) -> None:
        with self.log.open("ab") as file:
            file.write(b"".join(lines))


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Log]:
    log = tmp_path / "log.jsonl"
    log.write_bytes(b"".join(rounds()))
    watched = Log(log)
    yield watched
    watched.close()


@pytest.fixture
def page(browser: Any, live: Log) -> Iterator[Any]:
    with opened(browser, live.address) as page:
        yield page


def test_it_shows_the_run_and_asks_nobody_else(page: Any, live: Log) -> None:
    waits_for(page, "#round", "40")
    waits_for(page, "#alive", "2")
    waits_for(page, "#loss-words", "Training loss is 2.000 nats per token (perplexity 7.39) after 41.0")
    waits_for(
        page, "#loss-words", "down from 3.950. Held-out loss after round 40 is 2.100 nats per token (perplexity 8.17)"
    )
    waits_for(page, "#loss-words", "1.900 nats per byte (2.741 bits)")
    waits_for(page, "#peers", "anna")
    waits_for(page, "#graph-words", "2 peers of 2 here, 1 link up: 1 over tls.")
    waits_for(page, "#samples", "once upon a time")
    assert all(url.startswith(live.address) for url in page.asked)
    assert page.faults == []


def test_what_a_stranger_wrote_is_text(page: Any) -> None:
    waits_for(page, "#events", HOSTILE)
    waits_for(page, "#peers", HOSTILE)
    assert page.locator("#main img").count() == 0
    assert page.faults == []


def test_a_peer_that_dies_is_shown_with_its_reason_and_curves_move(page: Any, live: Log) -> None:
    live.grow(
        told(A, 1410.0, MemberSuspected(member=B, silent_s=5.0, reason="no heartbeat")),
        told(A, 1411.0, MemberGone(member=B, silent_s=11.0)),
        told(A, 1412.0, step(1.5)),
        told(A, 1413.0, commit(41, 1024, A)),
    )
    waits_for(page, "#round", "41")
    waits_for(page, "#alive", "1")
    waits_for(page, "#loss-words", "Training loss is 1.500 nats per token")
    waits_for(page, "#advice", "has been silent for 11 s and is gone.")
    waits_for(page, "#events", "is silent (no heartbeat)")


def test_the_slider_goes_back_and_live_returns(page: Any) -> None:
    page.evaluate(
        "() => { const s = document.getElementById('time'); s.value = 1000; s.dispatchEvent(new Event('input')); }"
    )
    waits_for(page, "#round", "20")
    waits_for(page, "#standing", "In the past")
    page.click("#live")
    waits_for(page, "#round", "40")


def test_a_finished_log_is_replayed(browser: Any, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    ends = [told(peer, 1404.0, PeerStopped(reason="complete")) for peer in (A, B)]
    log.write_bytes(b"".join([*rounds(), *ends]))
    watched = Log(log)
    try:
        page = browser.new_page()
        page.goto(watched.address)
        waits_for(page, "#standing", "Finished log")
        page.select_option("#speed", "60")
        page.click("#play")
        waits_for(page, "#standing", "Replaying")
        waits_for(page, "#round", "3")  # on its way
        waits_for(page, "#round", "40")
    finally:
        watched.close()


def test_events_can_be_searched_and_filtered_by_keyboard(page: Any) -> None:
    page.select_option("#event-severity", "0")
    page.focus("#event-search")
    page.keyboard.type("round 17:")
    waits_for(page, "#events", "round 17: 2 counted")
    assert page.locator("#events").get_attribute("aria-rowcount") == "3"  # of both peers, and the head


def test_it_is_not_live_once_all_is_trained_though_nobody_said_goodbye(browser: Any, live: Log) -> None:
    with opened(browser, live.address) as page:
        page.route("**/api/history", lambda route: route.fulfill(json=wanting(route.fetch().json())))
        page.reload()
        waits_for(page, "#standing", "Finished")
        waits_for(page, "#done", "100")
        assert page.inner_text("#tokens") == "41.0\u00a0k tokens"
        assert not page.is_visible("#live")


def wanting(told: dict[str, Any]) -> dict[str, Any]:
    """Return a history of a run that wanted less than its last round counted."""
    told["run"]["total_tokens"] = 1024 * NUM_ROUNDS - 100
    return told


@pytest.mark.parametrize(("width", "theme"), [(360, "dark"), (375, "dark"), (1440, "light")])
def test_it_can_be_read_by_everybody(browser: Any, live: Log, width: int, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="the extra page is not installed")
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme, bypass_csp=True)
    page = context.new_page()
    page.goto(live.address)
    page.wait_for_selector(SHOWN)
    found = axe.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    assert page.get_attribute("#theme", "aria-pressed") == str(theme == "dark").lower()
    context.close()


def audits() -> Iterator[bytes]:
    """Yield what two members that audit each other have found."""
    name = Digest("d" * 64)
    for number in range(1, 13):
        equal = WorkAudited(round=Round(number), member=B, work=name, num_steps=1, distance=2e-6)
        yield told(A, 1405.0 + number / 10, equal)
    found = {"round": Round(13), "member": A, "work": name, "num_steps": 1, "why": "it came to other parameters"}
    yield told(B, 1407.0, WorkDoubted(**found, outcome="differs", distance=0.25))


def test_a_run_that_audits_shows_who_audited_whom_and_another_shows_nothing(page: Any, live: Log) -> None:
    waits_for(page, "#round", "40")
    assert not page.is_visible("#audits-panel")
    live.grow(*audits())
    waits_for(page, "#audits-words", "13 of 80 contributions audited (16 %). Done again: 13 training steps")
    rows = page.locator("#audits-peers tr").all_inner_texts()
    assert [row.split("\t") for row in rows] == [
        ["anna", "1", "0", "1", "0", "0.25"],
        [HOSTILE, "12", "12", "0", "0", "2.0e−6"],
    ]
    assert page.locator("#audits-latest tr").count() == 8
    assert page.locator("#audits-latest tr").first.inner_text().split("\t")[1:6] == [
        *("13", HOSTILE, "anna", "1 training step", "differs")
    ]
    page.focus("#audits-more")
    page.keyboard.press("Enter")
    waits_for(page, "#audits-more", "Show fewer")
    assert page.locator("#audits-latest tr").count() == 13
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="the extra page is not installed")
    assert page.locator("#audits-panel caption").count() == 2
    assert page.faults == []
    found = axe.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
