"""The chat page in a real browser, against a server without a model.

Needs `pip install -e '.[page]'` and a Chromium on the path; where they are not, it says so.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api_stub import CODE, HOSTILE, Stub, serving
from slow.browser import IS_NEEDED, opened, waits_for
from weft.web.web import page_routes

pytestmark = IS_NEEDED

LAST = ".message:last-of-type"
KEY = "sk-secret"


@pytest.fixture
def stub() -> Iterator[Stub]:
    with serving(more=page_routes("serve")) as found:
        yield found


@pytest.fixture
def page(browser: Any, stub: Stub) -> Iterator[Any]:
    with opened(browser, stub.address, "#model:enabled") as page:
        yield page
        assert page.faults == []
        assert all(url.startswith((stub.address, f"blob:{stub.address}")) for url in page.asked)


def ask(page: Any, question: str) -> None:
    page.fill("#question", question)
    page.press("#question", "Enter")


def is_done(page: Any) -> None:
    page.wait_for_selector("#send:visible")


def test_an_answer_comes_with_its_figures_and_the_next_question_goes_on(page: Any, stub: Stub) -> None:
    page.fill("#question", "hello")
    page.press("#question", "Shift+Enter")
    page.type("#question", "there")
    page.press("#question", "Enter")
    waits_for(page, LAST, "there! (1)")
    waits_for(page, LAST, "first after")
    waits_for(page, LAST, "version round-7")
    waits_for(page, "#said", "there!")
    assert stub.asked[0]["messages"] == [{"role": "user", "content": "hello\nthere"}]
    assert stub.asked[0]["stream_options"] == {"include_usage": True}
    ask(page, "count")
    waits_for(page, LAST, "tokens/s")
    waits_for(page, LAST, "60 tokens")
    assert len(stub.asked[1]["messages"]) == 3
    assert page.inner_text("#name") == "hello"


def test_below_an_answer_of_members_stands_whom_it_came_by_and_who_went_on_in_whose_place(page: Any) -> None:
    ask(page, "members")
    waits_for(page, f"{LAST} .course", "stage 1: anna0000 · stage 2: ben00000 · weights of round 12")
    assert page.locator("#stop").is_visible()  # it is told while the answer is written
    is_done(page)
    mended = "ben00000 → carl0000 after 37 tokens, 0.8\u00a0s (its link broke)"
    told = f"stage 1: anna0000 · stage 2: {mended} · weights of round 12"
    assert page.inner_text(f"{LAST} .course") == told
    page.reload()
    page.wait_for_selector("#model:enabled")
    assert page.inner_text(f"{LAST} .course") == told  # it is kept with the answer
    ask(page, "hello")
    waits_for(page, LAST, "hello!")
    is_done(page)
    assert page.locator(f"{LAST} .course").count() == 0  # nobody told of members


def test_an_answer_grows_and_stops_and_what_is_there_stays(page: Any, stub: Stub) -> None:
    ask(page, "slow")
    waits_for(page, LAST, "word3")
    page.click("#stop")
    waits_for(page, LAST, "stopped")
    text = page.inner_text(f"{LAST} .text")
    assert text.startswith("word0 word1")
    assert "word4999" not in text
    assert stub.is_left.wait(10)  # the server was told
    page.reload()
    waits_for(page, LAST, "word3")
    page.click(f"{LAST} button:text('Retry')")
    waits_for(page, LAST, "word3")
    page.keyboard.press("Escape")
    waits_for(page, LAST, "stopped")
    assert len(stub.asked) == 2
    assert stub.asked[1] == stub.asked[0]


def test_an_edited_message_goes_on_from_there(page: Any, stub: Stub) -> None:
    for question in ("one", "two"):
        ask(page, question)
        waits_for(page, LAST, f"{question}!")
        is_done(page)
    page.click(".message:first-of-type button:text('Edit')")
    page.fill(".message textarea", "three")
    page.press(".message textarea", "Enter")
    waits_for(page, LAST, "three! (1)")
    assert page.locator(".message").count() == 2


def test_what_goes_wrong_is_said_with_what_to_do(page: Any, stub: Stub) -> None:
    ask(page, "error")
    waits_for(page, ".fault", "failed in the middle of the answer. It says: stage 2 is gone.")
    waits_for(page, LAST, "Some words.")
    waits_for(page, LAST, "broke off")
    page.click(".message[data-role=user] button:text('Edit')")
    page.fill(".message textarea", "bare")
    page.click("button:text('Send from here')")
    waits_for(page, ".fault", "broke off: its end is missing")
    page.click(".fault button:text('Retry')")
    waits_for(page, ".fault", "broke off: its end is missing")
    assert len(stub.asked) == 3
    ask(page, "busy")
    waits_for(page, ".fault", "Retry in 7 seconds")
    page.faults[:] = [fault for fault in page.faults if "429" not in fault]  # the browser notes each itself


def test_code_is_set_apart_and_markup_is_text(page: Any) -> None:
    ask(page, "code")
    waits_for(page, f"{LAST} pre", "print(1)")
    waits_for(page, f"{LAST} figcaption", "py")
    assert page.inner_text(f"{LAST} pre") == CODE.split("\n")[2]
    ask(page, "hostile")
    waits_for(page, LAST, HOSTILE[:20])
    ask(page, HOSTILE)
    waits_for(page, LAST, "(5)")
    waits_for(page, "#talks", "code")
    assert page.locator("img").count() == 0


def test_conversations_are_kept_exported_deleted_and_brought_back(page: Any, stub: Stub) -> None:
    ask(page, "first")
    waits_for(page, LAST, "first!")
    is_done(page)
    page.click("#new")
    ask(page, "second")
    waits_for(page, LAST, "second!")
    is_done(page)
    assert page.locator("#talks button").all_inner_texts() == ["second", "first"]
    page.click("#talks button:text('first')")
    waits_for(page, LAST, "first!")
    with page.expect_download() as download:
        page.click("#export")
    told = json.loads(Path(download.value.path()).read_text())
    assert download.value.suggested_filename == "first.json"
    assert [each["content"] for each in told["messages"]] == ["first", "first! (1)"]
    page.click("#delete")
    waits_for(page, "#status", "“first” is deleted.")
    assert page.locator("#talks button").all_inner_texts() == ["second"]
    page.click("#status button")
    waits_for(page, LAST, "first!")
    page.click("#delete")
    page.reload()
    page.wait_for_selector("#model:enabled")
    assert page.locator("#talks button").all_inner_texts() == ["second"]


def test_settings_and_the_model_are_sent(page: Any, stub: Stub) -> None:
    page.select_option("#model", "other")
    page.click("#settings summary")
    page.fill("#system", "Be brief.")
    page.fill("#temperature", "3")
    ask(page, "no")
    assert stub.asked == []  # the browser says what is allowed
    page.fill("#temperature", "0.5")
    page.fill("#max-tokens", "7")
    page.press("#question", "Enter")
    waits_for(page, LAST, "no! (2)")
    asked = stub.asked[0]
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("other", 0.5, 7)
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
    page.reload()
    assert page.input_value("#max-tokens") == "7"


def test_an_answer_goes_on_while_another_conversation_is_read(page: Any) -> None:
    ask(page, "slow")
    waits_for(page, LAST, "word3")
    page.click("#new")
    ask(page, "beside")
    waits_for(page, LAST, "beside!")
    page.click("#talks button:text('slow')")
    waits_for(page, LAST, "word9")
    page.click("#stop")
    waits_for(page, LAST, "stopped")


def test_a_key_is_asked_for_and_kept_for_the_tab_alone(browser: Any) -> None:
    with serving(KEY, more=page_routes("serve")) as stub, opened(browser, stub.address, "#key") as page:
        waits_for(page, ".fault", "wants an API key")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        waits_for(page, ".fault", "does not take this API key")
        page.fill("#key", KEY)
        page.press("#key", "Enter")
        page.wait_for_selector("#model:enabled")
        ask(page, "hello")
        waits_for(page, LAST, "hello!")
        page.reload()
        page.wait_for_selector("#model:enabled")
        assert page.evaluate("() => JSON.stringify(localStorage)").count(KEY) == 0
        assert all(re.search("401", fault) for fault in page.faults)  # the browser notes each itself
        page.click("#settings summary")
        page.click("#forget")
        assert page.evaluate("() => sessionStorage.length") == 0


def test_a_server_that_is_gone_is_said_and_found_again(browser: Any) -> None:
    with serving(more=page_routes("serve")) as stub, opened(browser, stub.address, "#model:enabled") as page:
        page.route("**/v1/**", lambda route: route.abort())
        ask(page, "hello")
        waits_for(page, ".fault", "The server cannot be reached.")
        page.unroute("**/v1/**")
        page.click(".fault button")
        waits_for(page, LAST, "hello!")


@pytest.mark.parametrize(("width", "theme"), [(390, "dark"), (390, "light"), (1440, "light"), (1440, "dark")])
def test_it_can_be_read_by_everybody(browser: Any, stub: Stub, width: int, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="the extra page is not installed")
    shape = {"viewport": {"width": width, "height": 844}, "color_scheme": theme, "bypass_csp": True}
    with opened(browser, stub.address, "#model:enabled", **shape) as page:
        for question in ("code", "members", "x" * 300, "error"):
            ask(page, question)
            page.wait_for_selector(".message[data-role=assistant]:last-of-type .note:not(:empty)")
            is_done(page)
        page.click("#settings summary")
        found = axe.Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width
        assert page.evaluate("() => document.getElementById('send').getBoundingClientRect().bottom") <= 844
        if width < 760:
            page.click("#list-toggle")
            waits_for(page, "#talks", "code")
            found = axe.Axe().run(page)
            assert found.violations_count == 0, found.generate_report()
        assert page.evaluate("() => document.getAnimations().length") == 0
