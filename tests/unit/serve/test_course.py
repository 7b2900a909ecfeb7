"""Answers of members say whom they came by, in a field of their own; all others are as they were."""

import asyncio
from dataclasses import replace
from typing import Any, cast

from unit.serve.scripted import Script, ScriptedEngine, ScriptedText, asking, scripted
from weft.engine.engine import Engine, Wanted
from weft.ids import PeerId
from weft.serve.generation import Model
from weft.texts.entry import TextOfMembers
from weft.texts.path import Course

ANNA, BEN, CARL = (PeerId(letter * 64) for letter in "abc")
BEGUN = {"members": ["aaaaaaaa", "bbbbbbbb"], "rounds": [{"round": 7, "after_tokens": 0}], "mends": [], "num_mends": 0}
MEND = {"stage": 2, "before": "bbbbbbbb", "member": "cccccccc", "after_tokens": 1, "why": "silent", "pause_s": 0.8}
MENDED = BEGUN | {"members": ["aaaaaaaa", "cccccccc"], "mends": [MEND], "num_mends": 1}


class TextByMembers(ScriptedText, TextOfMembers):
    """A script's text whose second stage goes on with another member after the first token."""

    num = 0  # tokens so far

    async def __anext__(self) -> Any:
        if self.num == 0:
            self._runs((ANNA, BEN))
            await asyncio.sleep(0.01)
        if self.num == 1:
            self.course.stopped("silent", 10.5)
            self._runs((ANNA, CARL))
            await asyncio.sleep(0.01)
        drawn = await ScriptedText.__anext__(self)
        self.course.came(10.0 + 0.8 * self.num)
        self.num += 1
        return drawn

    def _runs(self, path: tuple[PeerId, ...]) -> None:
        self.course.runs(path, 7, self.num)
        if self.on_moved is not None:
            self.on_moved()


class Members(ScriptedEngine):
    def begin(self, wanted: Wanted, num_more: int = 0) -> ScriptedText:
        text = super().begin(wanted, num_more)
        text.__class__ = TextByMembers
        text.course, text.on_moved = Course(), None  # type: ignore[attr-defined]
        return text


def by_members(*scripts: Script) -> Model:
    return replace(scripted(""), engine=cast(Engine, Members(*scripts)))


async def test_a_stream_tells_it_as_soon_as_it_is_known_at_each_change_and_at_the_end() -> None:
    async with asking(by_members("hello")) as client:
        for path, more in (("/v1/chat/completions", {}), ("/v1/completions", {"prompt": "hi"})):
            chunks = [each["choices"][0] for each in await client.chunks(path, **more)]
            told = [(at, each["weft"]) for at, each in enumerate(chunks) if "weft" in each]
            texts = [each["delta"].get("content", "") if "delta" in each else each["text"] for each in chunks]
            assert "".join(texts) == "hello"
            (first, begun), (second, pausing), *_, (last, whole) = told
            assert begun == BEGUN
            assert "".join(texts[: first + 1]) == ""  # before the first token
            assert pausing == BEGUN | {
                "members": ["aaaaaaaa", "cccccccc"],
                "mends": [MEND | {"pause_s": None}],
                "num_mends": 1,
            }
            assert "".join(texts[: second + 1]) == "h"
            assert whole == MENDED
            assert last == len(chunks) - 1
            assert chunks[-1]["finish_reason"] == "stop"


async def test_a_whole_answer_has_it_beside_each_text() -> None:
    async with asking(by_members("hello")) as client:
        chat = (await client.chat(n=2)).json()
        assert [each["weft"] for each in chat["choices"]] == [MENDED, MENDED]
        plain = (await client.post("/v1/completions", prompt="hi")).json()
        assert [each["weft"] for each in plain["choices"]] == [MENDED]
        response = (await client.post("/v1/responses", input="hi")).json()
        assert response["weft"] == MENDED
        assert response["output"][0]["content"][0]["text"] == "hello"


async def test_an_answer_of_this_machine_says_nothing_of_members() -> None:
    async with asking(scripted("hello")) as client:
        assert "weft" not in (await client.chat()).text
        assert not [each for each in await client.chunks() if "weft" in each["choices"][0]]
        assert "weft" not in (await client.post("/v1/responses", input="hi")).text
