"""`weft serve` of stacks, and of several models by one server, which requests tell apart by their names."""

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from unit.cli.compose.made import WORDS, likeliest, served, write_all, write_stack
from unit.cli.serve.test_serve import serving
from unit.cli.small import Weft
from unit.cli.test_bad_input import a_ticket, refused
from weft.cli.model.trained import open_trained
from weft.cli.options import Numbers
from weft.cli.serve.composed import composed_at, open_composed
from weft.cli.serve.loading import How, Loaded, load, open_model, prepared
from weft.compose.stacks.stack import AffineConfig, Handover, PostConfig, PreConfig, ScaledConfig
from weft.engine import load as engine_load
from weft.engine.draw import Drawing
from weft.engine.text import Wanted
from weft.errors import ConfigError, TooLarge

HOW = How(device="cpu", cache="1MB", numbers=Numbers.fp32)
PROMPT = "the harbour"


@pytest.mark.parametrize("handover", [PostConfig(), PreConfig(), ScaledConfig(alpha=0.5), AffineConfig()])
async def test_a_stack_is_served_as_it_is_computed(home: Path, handover: Handover) -> None:
    write_all(home, ["a", "b"])
    stack = write_stack(home, "both", "ab", handover)
    folder = composed_at("both", home)
    assert folder == home / "composed" / "both"
    model = served(folder, "", HOW, home)
    try:
        assert (model.id, model.context) == ("both", 64)
        prompt = tuple(int(each) for each in WORDS.encode(PROMPT))
        text = model.engine.begin(Wanted("key", prompt, 20, Drawing(temperature=0.0)))
        assert [each.token async for each in text] == likeliest(stack, PROMPT, 20)
    finally:
        model.engine.close()


def test_what_names_a_stack_in_answers_changes_with_its_seams(home: Path) -> None:
    write_all(home, ["a", "b"])
    found = set()
    for number, handover in enumerate((PostConfig(), ScaledConfig(alpha=2.0), AffineConfig())):
        write_stack(home, f"stack{number}", "ab", handover)
        model = served(home / "composed" / f"stack{number}", "", HOW, home)
        model.engine.close()
        found.add(model.fingerprint)
    assert len(found) == 3


# --- several models ---


def all_of(home: Path, *names: str) -> Loaded:
    here = prepared(HOW)
    composed = {name: composed_at(name, home) for name in names}
    return load(
        [
            open_model(open_trained(name, home), name, here) if at is None else open_composed(at, name, here, home)
            for name, at in composed.items()
        ],
        here,
    )


def asking(loaded: Loaded) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(loaded.app(None), client=("127.0.0.1", 1))  # type: ignore[arg-type]
    return httpx2.AsyncClient(transport=transport, base_url="http://localhost")


def wants(model: str | None, num: int = 12) -> dict[str, Any]:
    named = {} if model is None else {"model": model}
    return {"prompt": PROMPT, "max_tokens": num, "temperature": 0, "ignore_eos": True, **named}


async def test_each_of_several_models_answers_by_its_name(home: Path) -> None:
    write_all(home, ["a", "b"])
    stack = write_stack(home, "both", "ab", PostConfig())
    loaded = all_of(home, "b", "a", "both")
    try:
        async with asking(loaded) as http:
            listed = (await http.get("/v1/models")).json()["data"]
            assert [each["id"] for each in listed] == ["b", "a", "both"]
            answers = {
                name: (await http.post("/v1/completions", json=wants(name))).json() for name in ("b", "a", "both")
            }
            texts = {name: answer["choices"][0]["text"] for name, answer in answers.items()}
            assert texts["both"] == WORDS.decode(likeliest(stack, PROMPT, 12))
            assert len(set(texts.values())) == 3
            assert {name: answer["model"] for name, answer in answers.items()} == {name: name for name in answers}
            assert len({answer["system_fingerprint"] for answer in answers.values()}) == 3
            unnamed = await http.post("/v1/completions", json=wants(None))  # as of a single model
            assert (unnamed.status_code, unnamed.json()["error"]["code"]) == (400, "missing_required_parameter")
            assert (await http.post("/tokenize", json={"prompt": PROMPT})).status_code == 200  # by the first
            unknown = await http.post("/v1/completions", json=wants("c"))
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
            assert "b, a, both" in unknown.json()["error"]["message"]
            metrics = (await http.get("/metrics")).text
            drawn = {
                line.split('model_name="')[1].split('"')[0]: float(line.split()[-1])
                for line in metrics.splitlines()
                if line.startswith("vllm:generation_tokens_total{")
            }
            assert drawn == {"b": 12, "a": 12, "both": 12}
            assert (await http.get("/health")).json() == {"status": "ok"}
    finally:
        loaded.close()


async def test_a_server_is_well_as_long_as_each_of_its_models_is(home: Path) -> None:
    write_all(home, ["a", "b"])
    loaded = all_of(home, "a", "b")
    loaded.models["b"].engine.close()
    try:
        async with asking(loaded) as http:
            health = await http.get("/health")
            assert (health.status_code, health.json()) == (503, {"status": "b: no token came"})
    finally:
        loaded.close()


def test_memory_is_planned_for_all_models_together(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all(home, ["a", "b"])
    write_stack(home, "both", "ab", PostConfig())
    loaded = all_of(home, "a", "both")
    loaded.close()
    one, stack = loaded.plans
    assert one.num_pages == stack.num_pages
    assert one.kv_nbytes + stack.kv_nbytes <= 1e6
    assert stack.kv_nbytes == 2 * one.kv_nbytes
    free = one.weights_nbytes + stack.weights_nbytes + one.kv_nbytes // one.num_pages  # a text of 64 tokens has a page
    monkeypatch.setattr(engine_load, "free_nbytes", lambda _device: free)
    with pytest.raises(TooLarge, match=r"2 models take .* serve fewer models"):
        all_of(home, "a", "both")


def test_engines_of_one_server_take_turns_with_each_other(home: Path) -> None:
    write_all(home, ["a", "b"])
    write_stack(home, "both", "ab", PostConfig())
    loaded = all_of(home, "a", "b", "both")
    loaded.close()
    engines: list[Any] = [each.engine for each in loaded.models.values()]
    assert len({each._turns for each in engines}) == 1


def test_models_that_are_called_alike_are_refused_and_named_apart(home: Path) -> None:
    write_all(home, ["a", "b"])
    here = prepared(HOW)
    given = [open_model(open_trained("a", home), name, here) for name in ("x", "y", "x")]
    with pytest.raises(ConfigError, match=r"two models are called x.*: --name x-1 --name y --name x-3"):
        load(given, here)


def test_what_several_models_cannot_have_is_refused(
    weft: Weft, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(home, ["a", "b"])
    refused(weft, 2, "it guesses for one model, and here are several", "serve", "a", "b", "--draft", "a")
    refused(weft, 2, "1 name, and 2 models would have them", "serve", "a", "b", "--name", "x")
    refused(weft, 2, "two models are called a", "serve", "a", "a", "--port", 0)
    refused(weft, 2, "two models are called x", "serve", "a", "c", "--name", "x", "--name", "x")  # before any is sought
    refused(weft, 2, "of a ticket is served alone", "serve", a_ticket(), "b")
    refused(weft, 17, "'c' is not", "serve", "a", "c", "--port", 0)
    monkeypatch.setattr("weft.cli.serve.serve.run_until_told", lambda *_: None)
    answer = weft("serve", "a", "b", "a", "--name", "one", "--name", "b", "--name", "two", "--port", 0, "--threads", 1)
    assert answer.code == 0, answer.err
    assert [line.partition(":")[0] for line in answer.err.splitlines() if "conversation has at most" in line] == [
        "one",
        "b",
        "two",
    ]


@pytest.mark.full
def test_a_server_is_asked_for_a_stack_and_its_members_as_curl_asks(weft: Weft, home: Path) -> None:
    write_all(home, ["a", "b"])
    stack = write_stack(home, "both", "ab", ScaledConfig(alpha=0.5))
    anna = weft("serve", "key", "add", "anna", "--model", "both").out.strip()
    options = ("--port", 0, "--threads", 1, "--device", "cpu", "--numbers", "fp32", "--keys", home / "serve.keys")
    with serving(home, "a", "both", *options) as served_:
        assert [each["id"] for each in json.loads(served_.ask("/v1/models", key=anna)[2])["data"]] == ["both"]
        status, _, body = served_.ask("/v1/completions", wants("both", 20), anna)
        assert (status, json.loads(body)["choices"][0]["text"]) == (200, WORDS.decode(likeliest(stack, PROMPT, 20)))
        status, _, body = served_.ask("/v1/completions", wants("a"), anna)
        assert (status, json.loads(body)["error"]["code"]) == (403, "model_not_allowed")
        assert json.loads(served_.ask("/health")[2]) == {"status": "ok"}
    said = "".join(served_.said)
    assert "a: fp32 weights" in said
    assert "both: fp32 weights" in said
