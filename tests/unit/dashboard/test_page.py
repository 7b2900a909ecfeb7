"""The page's server: what it answers, to whom, and with which headers."""

import asyncio
import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from unit.dashboard.test_history import A, B, C, commit, said, started, step
from weft.dashboard.page import COOKIE, Feed, make_app
from weft.events import ConnectionDropped, LinkUp, Notice

TOKEN = "ab" * 16


@pytest.fixture
def feed() -> Feed:
    found = Feed()
    for entry in (said(A, started("anna")), said(A, step(3.0)), said(A, commit(1, 100, A, B))):
        found.take(entry)
    return found


def browser(feed: Feed, token: str | None = None) -> TestClient:
    return TestClient(make_app(feed, token), follow_redirects=False)


def pieces(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the kinds and the data of server-sent events."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "data" in fields:
            found.append((fields["event"], json.loads(fields["data"])))
    return found


def test_the_page_is_served_with_headers_that_let_it_load_nothing_from_elsewhere(feed: Feed) -> None:
    answer = browser(feed).get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_history_is_what_was_folded(feed: Feed) -> None:
    told = browser(feed).get("/api/history").json()
    assert told["is_live"] is True
    assert told["is_public"] is False
    assert told["train"] == [[1.0, 100, 3.0]]
    assert told["peers"][1][1] == "anna"


def test_a_finished_stream_tells_what_came_after_and_ends(feed: Feed) -> None:
    cursor = feed.history.cursor
    feed.take(said(A, Notice(text="more")))
    feed.finish()
    (kind, piece), (last, _) = pieces(browser(feed).get(f"/api/stream?after={cursor}").text)
    assert (kind, last) == ("more", "end")
    assert [row[-1] for row in piece["events"]] == ["more"]
    assert pieces(browser(feed).get("/api/stream", headers={"last-event-id": str(feed.history.cursor)}).text) == [
        ("end", {})
    ]


def test_a_stream_waits_for_what_comes() -> None:
    async def main() -> None:
        feed = Feed()
        waiting = asyncio.ensure_future(feed.wait(0))
        await asyncio.sleep(0)
        assert not waiting.done()
        feed.take(said(A, Notice(text="it came")))
        assert await waiting
        feed.finish()
        assert not await feed.wait(feed.history.cursor)

    asyncio.run(main())


def test_nothing_can_be_posted_and_nonsense_is_refused(feed: Feed) -> None:
    assert browser(feed).post("/").status_code == 405
    assert browser(feed).get("/api/stream?after=x").status_code == 400
    assert browser(feed).get("/static/../app.py").status_code == 404
    assert browser(feed).get("/static/%2e%2e/app.py").status_code == 404


def test_who_has_no_token_sees_nothing(feed: Feed) -> None:
    stranger = browser(feed, TOKEN)
    for path in ("/", "/api/history", "/api/stream", "/metrics", "/static/index.html"):
        answer = stranger.get(path)
        assert answer.status_code == 401
        assert "anna" not in answer.text
    assert stranger.get("/?token=wrong").status_code == 401
    assert stranger.get("/healthz").text == "ok\n"


def test_the_token_is_taken_once_and_leaves_the_address(feed: Feed) -> None:
    guest = browser(feed, TOKEN)
    answer = guest.get(f"/?token={TOKEN}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert "httponly" in answer.headers["set-cookie"].lower()
    assert guest.cookies[COOKIE] == TOKEN
    assert guest.get("/api/history").status_code == 200
    program = browser(feed, TOKEN).get("/metrics", headers={"authorization": f"Bearer {TOKEN}"})
    assert program.status_code == 200


def test_the_public_feed_has_no_address() -> None:
    feed = Feed(is_public=True)
    link = LinkUp(remote=B, transport="tls", address="tls://10.1.2.3:4", tried=("10.9.9.9:1 reset",))
    dropped = ConnectionDropped(address="10.7.7.7:2", remote=None, reason="no hello")
    feed.take(said(B, started("bert")))
    feed.take(said(A, started("anna")))
    for event in (link, dropped, Notice(text="dial 10.1.2.3:4 or /home/anna/key.pem")):
        feed.take(said(A, event))
    told = browser(feed).get("/api/history")
    assert told.json()["is_public"] is True
    assert told.json()["links"]
    for private in ("10.1.2.3", "10.9.9.9", "10.7.7.7", "/home/anna"):
        assert private not in told.text


def test_who_takes_no_part_is_a_figure_and_no_peer(feed: Feed) -> None:
    feed.take(said(A, LinkUp(remote=C, transport="tls", address="")))
    told = browser(feed).get("/metrics").text
    assert "weft_watching 1.0" in told
    assert C[:16] not in told


def test_metrics_are_those_of_the_history(feed: Feed) -> None:
    text = browser(feed).get("/metrics").text
    assert "weft_rounds_total 1.0" in text
    assert "weft_tokens_total 100.0" in text
    assert "weft_loss_nats_per_token 3.0" in text
    assert f'weft_peer_up{{name="anna",peer="{A[:16]}"}} 1.0' in text
    assert f'weft_peer_tokens_per_second{{name="anna",peer="{A[:16]}"}} 100.0' in text
    assert 'weft_events_total{severity="routine"} 1.0' in text


def test_what_all_pages_share_is_served_beside_the_pages_own(feed: Feed) -> None:
    page = browser(feed).get("/").text
    for name in ("base.css", "style.css", "main.js", "dom.js", "theme.js", "words.js", "icon.svg"):
        answer = browser(feed).get(f"/static/{name}")
        assert answer.status_code == 200
        assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert 'href="static/base.css"' in page
