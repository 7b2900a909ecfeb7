"""`weft serve` as a process on a small checkpoint, what it refuses, and that every option of its help has an effect."""

import asyncio
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
import torch
from starlette.applications import Starlette

from api_stub import serving as stub
from unit.cli.small import RUN, TEXT, Kept, Weft
from unit.cli.test_bad_input import refused
from unit.serve.test_course import Members
from weft.cli.model.trained import Trained, open_trained
from weft.cli.options import Numbers
from weft.cli.serve.loading import How, Loaded, load, open_model, prepared
from weft.cli.serve.serve import Where, answering, keys_of, serve_members
from weft.data.tokenizer import CharTokenizer
from weft.errors import ConfigError
from weft.ids import RunId
from weft.model.came_with import CameWith
from weft.serve.keys import new_key, save_keys

ENDS_S = 60
LONG = {"ignore_eos": True, "max_tokens": 400}


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    """A run of a model that reads 512 tokens."""
    (tmp_path / "text.txt").write_text(TEXT)
    path = tmp_path / "run.toml"
    path.write_text(RUN.replace("seq_len = 16", "seq_len = 512").replace("tokens = 320", "tokens = 2048"))
    return path


@dataclass
class Served:
    process: "subprocess.Popen[str]"
    address: str
    said: list[str]

    def ask(
        self, path: str, body: dict[str, Any] | None = None, key: str | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Ask as curl does; return status, headers and body."""
        line, reply = self.begin(path, body, key)
        with line, reply:
            return reply.status, dict(reply.headers.items()), reply.read()

    def begin(self, path: str, body: dict[str, Any] | None, key: str | None = None) -> tuple[Any, Any]:
        """Ask, and return the connection and the answer that comes."""
        parts = urlsplit(self.address)
        line = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=ENDS_S)
        headers = {"content-type": "application/json"} | ({} if key is None else {"authorization": f"Bearer {key}"})
        line.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
        return _closing(line), line.getresponse()


@contextmanager
def _closing(line: http.client.HTTPConnection) -> Iterator[None]:
    try:
        yield
    finally:
        line.close()


@contextmanager
def serving(home: Path, *arguments: object, sent: signal.Signals = signal.SIGINT) -> Iterator[Served]:
    """Serve, and hold the process to ending with 0 once it is told to."""
    command = [sys.executable, "-P", "-m", "weft", "--home", str(home), "serve", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    said: list[str] = []
    errors = process.stderr
    hears = threading.Thread(target=lambda: said.extend(errors), daemon=True)
    hears.start()
    try:
        address = process.stdout.readline().strip()
        assert address, said
        yield Served(process, address, said)
        process.send_signal(sent)
        assert process.wait(timeout=ENDS_S) == 0, said
        assert process.stdout.read() == ""
    finally:
        process.kill()
        process.wait()
        hears.join(ENDS_S)
        process.stdout.close()
        process.stderr.close()


# --- a process ---


@pytest.mark.full
def test_a_checkpoint_is_asked_as_curl_asks_until_ctrl_c(kept: Kept, home: Path) -> None:
    with serving(home, "last", "--port", 0, "--threads", 1, "--device", "cpu", "--name", "mine") as served:
        assert served.address.startswith("http://127.0.0.1:")
        assert json.loads(served.ask("/health")[2]) == {"status": "ok"}
        status, _, page = served.ask("/")
        assert (status, b"<html" in page) == (200, True)
        assert [each["id"] for each in json.loads(served.ask("/v1/models")[2])["data"]] == ["mine"]
        asks = {"model": "mine", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
        status, headers, body = served.ask("/v1/chat/completions", asks)
        assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 4), body
        assert headers["x-request-id"]
        asked = {"model": "mine", "prompt": "def", "max_tokens": 5, "temperature": 0}
        text = json.loads(served.ask("/v1/completions", asked)[2])["choices"][0]["text"]
        status, headers, body = served.ask("/v1/completions", asked | {"stream": True})
        assert headers["content-type"].startswith("text/event-stream")
        events = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        assert "".join(json.loads(each)["choices"][0]["text"] for each in events[:-1]) == text
        assert json.loads(served.ask("/v1/completions", {"model": "no", "prompt": "x"})[2])["error"]["code"]
        # Ctrl-C in the middle of an answer: it ends with an error, never bare.
        line, reply = served.begin("/v1/completions", {"model": "mine", "prompt": "a", "stream": True, **LONG})
        with line:
            assert reply.readline().startswith(b"data: {")
            served.process.send_signal(signal.SIGINT)
            rest = reply.read().decode()
    last = [each for each in rest.splitlines() if each.startswith("data: ")][-1]
    assert "[DONE]" in last or json.loads(last[6:])["error"]["code"] == "unloaded"
    said = "".join(served.said)
    for words in (
        "reading run small",
        "round 0",
        "mine: ",
        "rather than holds a conversation",
        f"weft chat {served.address}v1\n",
    ):
        assert words in said
    assert said.endswith("stopped\n")
    for words in ("Traceback", "TLS"):
        assert words not in said


@pytest.mark.full
def test_other_machines_need_a_key_and_the_file_is_read_again(kept: Kept, home: Path, weft: Weft) -> None:
    anna = weft("serve", "key", "add", "anna", "--model", "small").out.strip()
    keys = ("--keys", home / "serve.keys", "--host", "0.0.0.0")
    with serving(home, "last", "--port", 0, "--threads", 1, *keys, sent=signal.SIGTERM) as served:
        served.address = served.address.replace("THIS-MACHINE", "127.0.0.1")
        assert served.ask("/v1/models")[0] == 401
        assert served.ask("/v1/models", key=anna)[0] == 200
        bert = weft("serve", "key", "add", "bert").out.strip()
        weft("serve", "key", "remove", "anna")
        assert served.ask("/v1/models", key=bert)[0] == 200
        assert served.ask("/v1/models", key=anna)[0] == 401
        (home / "serve.keys").write_text("key = 5")
        assert served.ask("/v1/models", key=bert)[0] == 200
    said = "".join(served.said)
    assert said.count("The keys from before go on being taken.") == 1
    assert "put a proxy with TLS before it" in said
    assert "v1 --key-file FILE\n" in said
    assert anna not in said
    assert bert not in said


@pytest.mark.full
def test_another_server_computes_and_keys_are_still_asked_for(home: Path, weft: Weft, tmp_path: Path) -> None:
    key = weft("serve", "key", "add", "anna").out.strip()
    (tmp_path / "theirs").write_text("sk-theirs\n")
    options = ("--keys", home / "serve.keys", "--backend-key", tmp_path / "theirs", "--name", "mine", "--port", 0)
    with (
        stub(key="sk-theirs") as behind,
        serving(home, "other", "--backend", f"{behind.address}v1", *options) as served,
    ):
        asks = {"model": "mine", "messages": [{"role": "user", "content": "hello"}], "stream": True}
        assert served.ask("/v1/chat/completions", asks)[0] == 401
        assert b"<html" in served.ask("/")[2]
        body = served.ask("/v1/chat/completions", asks, key)[2]
        assert b'"content":"hello! "' in body
        assert body.endswith(b"data: [DONE]\n\n")
        asks["messages"] = [{"role": "user", "content": "bare"}]
        body = served.ask("/v1/chat/completions", asks, key)[2]
        assert b'"code":"backend_broke_off"' in body
        assert b"[DONE]" not in body
        asks["messages"] = [{"role": "user", "content": "slow"}]
        line, reply = served.begin("/v1/chat/completions", asks, key)
        with line:
            assert reply.readline().startswith(b"data: {")
            served.process.send_signal(signal.SIGINT)
            assert b'"code":"unloaded"' in reply.read()
        assert [each["model"] for each in behind.asked] == ["other"] * 3
    said = "".join(served.said)
    assert f"mine: computed by {behind.address}v1" in said
    assert "given up for it" in said
    assert "sk-theirs" not in said


# --- what is refused ---


def test_another_server_that_cannot_be_asked_is_refused(weft: Weft, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    with stub(key="sk-theirs") as behind:
        address = f"{behind.address}v1"
        refused(weft, 24, "wants an API key: give --backend-key", "serve", "--backend", address)
        refused(weft, 2, "is no API key", "serve", "--backend", address, "--backend-key", empty)
        refused(weft, 2, "cannot be read", "serve", "--backend", address, "--backend-key", tmp_path / "none")
    with stub() as behind:
        address = f"{behind.address}v1"
        refused(weft, 2, "has no model 'mine', but stub, other", "serve", "mine", "--backend", address)
        refused(weft, 2, "1 name, and 2 models would have them", "serve", "--backend", address, "--name", "mine")
        twice = ("--name", "mine", "--name", "mine")
        refused(weft, 2, "two models are called mine", "serve", "stub", "other", "--backend", address, *twice)
        refused(weft, 2, "nobody would be refused", "serve", "--backend", address, "--host", "0.0.0.0")
    refused(weft, 22, "nobody answers at", "serve", "--backend", address)
    refused(weft, 2, "no address of a server", "serve", "--backend", "vlm://x")
    refused(weft, 2, "which model?", "serve")


def test_vllm_and_llama_cpp_are_looked_for_where_they_usually_are(weft: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def none(site: Any) -> list[Any]:
        asked.append(site.address)
        return []

    monkeypatch.setattr("weft.serve.backend.backend.models_of", none)
    for name in ("vllm", "llama.cpp"):
        refused(weft, 2, "lists no models", "serve", "x", "--backend", name)
    assert asked == ["http://127.0.0.1:8000/v1", "http://127.0.0.1:8080/v1"]


def test_what_cannot_be_served_is_refused_before_anything_is_loaded(weft: Weft, tmp_path: Path, kept: Kept) -> None:
    refused(weft, 17, "nobody", "serve", "nobody")
    refused(weft, 2, "weft serve key add", "serve", "last", "--host", "0.0.0.0")
    refused(weft, 2, "no such file", "serve", "last", "--keys", tmp_path / "none")
    keys = tmp_path / "keys"
    for text, words in (
        ("key = 5", "key is 5. Allowed: a list"),
        ("[[key]\n", "not valid TOML"),
        ('[[key]]\nname = "a"\nsalt = "00"\nhash = "00"\n', "salt"),
    ):
        keys.write_text(text)
        refused(weft, 2, words, "serve", "last", "--keys", keys)
    save_keys(keys, [new_key("a")[1], new_key("a")[1]])
    refused(weft, 2, "two keys are named 'a'", "serve", "last", "--keys", keys)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused(weft, 2, "cannot listen there", "serve", "last", "--port", taken.getsockname()[1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--max-context", 513), "small reads 512 tokens at most"),
        (("--cache", "1kB"), "for keys and values hold"),
        (("--cache", "much"), "Allowed: a number of bytes"),
        (("--device", "cuda:99"), "CUDA devices"),
        (("--port", 65536), "--port"),
        (("--numbers", "int3"), "--numbers"),
    ],
)
def test_an_option_that_asks_for_what_there_is_not_is_refused(
    weft: Weft, kept: Kept, options: tuple[object, ...], words: str
) -> None:
    answer = weft("serve", "last", "--port", 0, *options)
    assert answer.code == 2
    assert words in answer.err
    assert answer.out == ""


# --- every option has an effect ---


@pytest.fixture
def trained(kept: Kept, home: Path) -> Trained:
    return open_trained("last", home)


def loaded(how: How, *models: tuple[Trained, str], draft: Trained | None = None) -> Loaded:
    here = prepared(how)
    return load([open_model(trained, name, here, draft) for trained, name in models], here)


def shown(trained: Trained, how: How, name: str = "small") -> dict[str, Any]:
    """Return what a server loaded so shows of itself."""
    found = loaded(how, (trained, name))
    found.close()
    (planned,), (model,) = found.plans, found.models.values()
    return {
        "name": model.id,
        "threads": torch.get_num_threads(),
        "numbers": (planned.kind, model.fingerprint.rpartition("-")[2]),
        "max_context": model.context,
        "cache": planned.num_tokens,
    }


def test_a_draft_model_takes_room_and_has_to_have_the_same_tokens(trained: Trained) -> None:
    how = How(threads=1, device="cpu", numbers=Numbers.fp32, draft="small")
    alone, both = loaded(how, (trained, "a")), loaded(how, (trained, "a"), draft=trained)
    alone.close()
    both.close()
    assert 1.2 < both.plans[0].weights_nbytes / alone.plans[0].weights_nbytes < 2.1
    assert alone.models["a"].fingerprint == both.models["a"].fingerprint, "the text is the same"
    with pytest.raises(ConfigError, match=r"--draft small: its tokens are not those of a"):
        loaded(how, (trained, "a"), draft=replace(trained, tokenizer=CharTokenizer("abc")))


def test_each_option_changes_what_is_served_and_nothing_else(trained: Trained) -> None:
    usual = How(threads=1, device="cpu", numbers=Numbers.bf16)
    before = shown(trained, usual)
    for option, given, expected in (
        ("threads", {"threads": 2}, 2),
        ("numbers", {"numbers": Numbers.fp32}, ("fp32", "fp32")),
        ("max_context", {"max_context": 64}, 64),
    ):
        after = shown(trained, replace(usual, **given))
        changed = {name for name in before if before[name] != after[name]} - {"cache"}
        assert (changed, after[option]) == ({option}, expected)
    torch.set_num_threads(1)
    assert shown(trained, usual, "other")["name"] == "other"
    assert shown(trained, replace(usual, cache="150kB"))["cache"] < before["cache"]


def test_who_may_ask_follows_from_where_it_listens(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    _secret, key = new_key("a")
    save_keys(keys, [key])
    assert keys_of(Where()) is None
    assert keys_of(Where(host="::1")) is None
    for where in (Where(keys=keys), Where(keys=keys, host="0.0.0.0")):
        found = keys_of(where)
        assert found is not None
        assert found.now() == (key,)
    with pytest.raises(ConfigError, match="nobody would be refused"):
        keys_of(Where(host="10.1.2.3"))


def test_answers_of_members_name_the_run_of_the_ticket_and_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    engine = Members("hello")
    engine.num_stages = 2  # type: ignore[attr-defined]

    @asynccontextmanager
    async def asking(*_: object) -> AsyncIterator[Any]:
        ended = asyncio.get_running_loop().create_future()
        run = SimpleNamespace(name="mine")
        yield SimpleNamespace(ended=ended, entry=engine, run=run, tokenizer=engine.tokenizer, came_with=CameWith())

    async def answering(served: Starlette, *_: object) -> None:
        transport = httpx2.ASGITransport(served, client=("127.0.0.1", 1))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
            answer = await http.post("/v1/completions", json={"model": "mine", "prompt": "x"})
            told.append(answer.json()["system_fingerprint"])

    monkeypatch.setattr("weft.stages.asking.asking", asking)  # imports it, before what it reads tickets by is changed
    monkeypatch.setattr("weft.net.ticket.read", lambda _: SimpleNamespace(run=RunId("1f0c55aa" * 8)))
    monkeypatch.setattr("weft.cli.serve.serve.answering", answering)
    options: Any = None
    serve_members("a ticket", "", Where(port=0), options, 0, None)
    assert told == ["1f0c55aa-r7"]


def test_it_listens_where_it_is_told(weft: Weft, kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.cli.serve.serve.run_until_told", lambda *_: None)
    answer = weft("serve", "last", "--host", "localhost", "--port", 0, "--threads", 1, "--name", "mine")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("http://127.0.0.1:")
    assert "mine: " in answer.err


def test_a_server_whose_time_is_up_ends_as_with_ctrl_c() -> None:
    told = threading.Event()

    async def main() -> None:
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            asyncio.get_running_loop().call_later(0.3, ended.set_result, "0.1 GB moved today")
            await asyncio.wait_for(answering(Starlette(), listener, told.set, ended), ENDS_S)
        assert ended.done()

    before = sys.getswitchinterval()
    asyncio.run(main())
    sys.setswitchinterval(before)
    assert told.wait(ENDS_S)
