"""Answers of members say whom they came by, in a field of their own; all others are as they were."""

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from unit.engine.test_step import CONFIG, vector_of
from unit.serve.scripted import Script, ScriptedEngine, ScriptedText, asking, scripted
from unit.texts.stages import STEP_S, Served, tokens_of, wanted
from weft.engine.engine import Engine
from weft.engine.text import Wanted
from weft.ids import PeerId
from weft.serve.generation import Model
from weft.serve.metrics import Metrics
from weft.texts.asking.course import Course
from weft.texts.asking.under_way import TextOfMembers

ANNA, BEN, CARL = (PeerId(letter * 64) for letter in "abc")
BEGUN = {"members": ["aaaaaaaa", "bbbbbbbb"], "rounds": [{"round": 7, "after_tokens": 0}], "mends": [], "num_mends": 0}
MEND = {"stage": 2, "before": "bbbbbbbb", "member": "cccccccc", "after_tokens": 1, "why": "silent", "pause_s": 0.8}
MENDED = BEGUN | {"members": ["aaaaaaaa", "cccccccc"], "mends": [MEND], "num_mends": 1}


class TextByMembers(ScriptedText, TextOfMembers):
    """A script's text whose second stage goes on with another member after the first token."""

    num = 0  # tokens so far
    last_round = 7

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
        self.course.runs(path, self.last_round if self.num else 7, self.num)
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


async def test_the_fingerprint_names_the_run_and_the_weights_that_a_text_was_drawn_with_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with asking(by_members("hello")) as client:
        assert (await client.chat(n=2)).json()["system_fingerprint"] == "fp-r7"
        assert (await client.post("/v1/completions", prompt=["a", "b"])).json()["system_fingerprint"] == "fp-r7"
        for path, more in (("/v1/chat/completions", {}), ("/v1/completions", {"prompt": "hi"})):
            chunks = await client.chunks(path, stream_options={"include_usage": True}, **more)
            told = [each["system_fingerprint"] for each in chunks]
            assert told[-1] == "fp-r7"
            assert told[0] == (None if "chat" in path else "fp-r7")  # of the role, before there is a path
        monkeypatch.setattr(TextByMembers, "last_round", 9)
        assert (await client.chat()).json()["system_fingerprint"] == "fp-r9"
        assert (await client.chunks())[-1]["system_fingerprint"] == "fp-r9"


async def test_mends_are_counted_with_their_pauses() -> None:
    async with asking(by_members("hello")) as client:
        await client.chat(n=2)
        await client.chat(max_tokens=1)  # no token comes after its mend
        text = (await client.http.get("/metrics")).text
    found = {
        (each.name, *(each.labels.get(name) for name in ("model_name", "stage", "cause"))): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
        if each.name.startswith("weft_serve_mend") and each.labels.get("le") in (None, "0.5", "1.0")
    }
    assert found.pop(("weft_serve_mends_total", "tiny", "2", "silent")) == 3.0
    assert found.pop(("weft_serve_mend_seconds_count", "tiny", None, None)) == 2.0
    assert found.pop(("weft_serve_mend_seconds_sum", "tiny", None, None)) == pytest.approx(1.6)


def test_figures_of_members_are_those_of_the_path_and_of_weights_that_all_stages_have() -> None:
    served = Served()

    def told() -> dict[str, float]:
        text = Metrics({"tiny": replace(scripted(""), engine=served.entry)}).text().decode()
        families = text_string_to_metric_families(text)
        found = {each.name: each.value for family in families for each in family.samples}
        assert found["vllm:healthy_pods_total"] == len(served.members)
        return {name: found[name] for name in found if name.startswith(("weft_serve_edition", "weft_serve_path"))}

    async def play() -> None:
        assert told() == {"weft_serve_edition_round": 0.0}
        await tokens_of(served.entry.begin(wanted([1, 2, 3], 6)))
        took_s = told()["weft_serve_path_seconds"]
        assert 3 * STEP_S <= took_s < 1
        first, *others = served.members
        for number, member in (
            (3, first),
            (2, others[1]),
            (2, others[3]),
        ):  # the first stage has newer ones than others
            vector = vector_of(CONFIG)
            member.renew(number, served.section(member.stage, vector, served.kept[served.members.index(member)]))
        await asyncio.sleep(3)
        assert told()["weft_serve_edition_round"] == 0.0
        served.renew(4, vector_of(CONFIG))
        await asyncio.sleep(3)
        assert told()["weft_serve_edition_round"] == 4.0

    served.run(play)
    assert "weft_serve_edition" not in Metrics({"tiny": scripted("")}).text().decode()


async def test_an_answer_of_this_machine_says_nothing_of_members() -> None:
    async with asking(scripted("hello")) as client:
        assert "weft" not in (await client.chat()).text
        assert not [each for each in await client.chunks() if "weft" in each["choices"][0]]
        assert "weft" not in (await client.post("/v1/responses", input="hi")).text
