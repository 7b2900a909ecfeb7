"""The Responses API: items, what they say of themselves, and the events of their making."""

from typing import Any

import pytest

from unit.serve.scripted import asking, scripted
from unit.serve.test_app import CALL, TOOL


async def test_a_response_has_the_log_probabilities_that_it_is_asked_for() -> None:
    async with asking(scripted("hi", "hi", f"so {CALL}")) as client:
        tree = (await client.post("/v1/responses", input="a", top_logprobs=2)).json()
        likely = tree["output"][0]["content"][0]["logprobs"]
        assert [(each["token"], each["logprob"], len(each["top_logprobs"])) for each in likely] == [
            ("h", -0.5, 2),
            ("i", -0.5, 2),
        ]
        assert tree["top_logprobs"] == 2
        events = await client.chunks("/v1/responses", input="a", include=["message.output_text.logprobs"])
        told = [each["logprobs"] for each in events if each["type"] == "response.output_text.delta"]
        [done] = [each["logprobs"] for each in events if each["type"] == "response.output_text.done"]
        assert [each["token"] for part in told for each in part] == [each["token"] for each in done] == ["h", "i"]
        assert done == events[-1]["response"]["output"][0]["content"][0]["logprobs"]
        assert {len(each["top_logprobs"]) for each in done} == {0}
        tools = [{"type": "function", **TOOL}]
        tree = (await client.post("/v1/responses", input="a", tools=tools, top_logprobs=0)).json()
        assert [each["token"] for each in tree["output"][0]["content"][0]["logprobs"]][:2] == ["s", "o"]
        assert "logprobs" not in tree["output"][1]


async def test_a_response_tells_what_it_was_asked_for() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    named = {"type": "json_schema", "name": "one", "schema": schema, "strict": True}
    tool = {"type": "function", **TOOL, "strict": True, "description": "d"}
    function = {"type": "function", "name": "look"}
    async with asking(scripted('{"a": 1}')) as client:

        async def told(**fields: Any) -> dict[str, Any]:
            return (await client.post("/v1/responses", input="a", **fields)).json()

        for given, format in (
            ({}, {"type": "text"}),
            ({"text": {"format": {"type": None}}}, {"type": "text"}),
            ({"text": {"format": {"type": "json_object"}}}, {"type": "json_object"}),
            ({"text": {"format": named}}, named),
        ):
            assert (await told(**given))["text"]["format"] == format
    async with asking(scripted(CALL)) as client:
        for choice, expected in ((None, "auto"), ("none", "none"), ("required", "required"), (function, function)):
            tree = await told(tools=[tool], tool_choice=choice)
            assert tree["tool_choice"] == expected
            assert tree["tools"] == [tool]
        assert (await told(tools=[tool | {"strict": None}]))["tools"][0]["strict"] is False


@pytest.mark.parametrize(
    ("script", "cut", "fields"), [("hello", 3, {}), (CALL, CALL.index("1"), {"tools": [{"type": "function", **TOOL}]})]
)
async def test_an_item_that_is_cut_off_is_as_incomplete_as_its_response(
    script: str, cut: int, fields: dict[str, Any]
) -> None:
    async with asking(scripted(script)) as client:
        for most, status in ((cut, "incomplete"), (200, "completed")):
            tree = (await client.post("/v1/responses", input="a", max_output_tokens=most, **fields)).json()
            assert (tree["status"], tree["output"][-1]["status"]) == (status, status)
            events = await client.chunks("/v1/responses", input="a", max_output_tokens=most, **fields)
            [done] = [each["item"] for each in events if each["type"] == "response.output_item.done"]
            assert (done["status"], events[-1]["response"]["output"][-1]["status"]) == (status, status)


async def test_responses_of_text_and_of_calls() -> None:
    async with asking(scripted("hi", CALL, "hi", CALL)) as client:
        tools = [{"type": "function", **TOOL}]
        tree = (await client.post("/v1/responses", input="a", instructions="be")).json()
        assert tree["output"][0]["content"][0]["text"] == "hi"
        assert tree["usage"]["input_tokens_details"] == {"cached_tokens": 0}
        tree = (await client.post("/v1/responses", input="a", tools=tools)).json()
        assert (tree["output"][0]["type"], tree["output"][0]["arguments"]) == ("function_call", '{"n": 1}')
        given = [
            *tree["output"],
            {"type": "function_call_output", "call_id": tree["output"][0]["call_id"], "output": "9"},
        ]
        events = await client.chunks("/v1/responses", input=[{"role": "user", "content": "a"}, *given])
        kinds = [each["type"] for each in events]
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        assert [each["sequence_number"] for each in events] == list(range(len(events)))
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == "hi"
        events = await client.chunks("/v1/responses", input="a", tools=tools)
        done = next(each for each in events if each["type"] == "response.function_call_arguments.done")
        assert done["arguments"] == '{"n": 1}'
