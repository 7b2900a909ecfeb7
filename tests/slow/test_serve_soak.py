"""A server under whatever its clients do, for as long as one likes: it grows no more, and writes nothing of it down.

    WEFT_SOAK_S=1800 pytest -m slow tests/slow/test_serve_soak.py           # half an hour

Clients stream, hang up in the middle, hang up before the first token, ask with wrong keys, send what is no request, and
ask for embeddings and tokens. What they do is drawn from a seed. Every prompt holds a word that stands nowhere else.
"""

import http.client
import json
import os
import threading
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from benchmarks.rig.served import NAME, Served, make_model

from weft.rng import stream

pytestmark = pytest.mark.slow

SOAK_S = float(os.environ.get("WEFT_SOAK_S", "240"))
NUM_CLIENTS = 6
# By then every kind of request has been answered many times, and pages of keys and values have all been written to.
WARM_S = max(60.0, SOAK_S / 3)
GROWTH = 0.02
CACHE = ("--cache", "100MB")  # all of it is in use soon: memory of pages is the process's once one is first written
MARK = "quokka"
ALL_ENDED_S = 30.0
ANSWER_LETTERS = 24  # of an answer: random letters, so that nothing else holds as many of them in a row


class Client(threading.Thread):
    """One that does something else each time, until it is told to stop."""

    def __init__(self, served: Served, key: str, seed: int) -> None:
        super().__init__()
        self.served, self.secret = served, served.secrets[key]
        self.draws = stream(seed, "client")
        self.did, self.failed = Counter[str](), list[str]()
        self.answers = list[str]()
        self.stopping = threading.Event()
        self.number = 0

    def run(self) -> None:
        ways = (
            self.read,
            self.hang_up,
            self.hang_up_at_once,
            self.ask_whole,
            self.wrong_key,
            self.nonsense,
            self.embed,
            self.tokenize,
        )
        while not self.stopping.is_set():
            way = ways[int(self.draws.integers(len(ways)))]
            try:
                way()
            except Exception as error:
                self.failed.append(f"{way.__name__}: {error!r}")
            self.did[way.__name__] += 1

    def prompt(self) -> str:
        self.number += 1
        letters = "".join(chr(97 + each) for each in self.draws.integers(0, 26, int(self.draws.integers(5, 300))))
        return f"{MARK} {self.number} {letters}"

    def open(self, path: str, fields: dict[str, Any] | bytes, secret: str = "") -> http.client.HTTPConnection:
        line = http.client.HTTPConnection(self.served.host, self.served.port, timeout=60)
        body = fields if isinstance(fields, bytes) else json.dumps({"model": NAME, **fields}).encode()
        head = {"authorization": f"Bearer {secret or self.secret}", "content-type": "application/json"}
        line.request("POST", path, body, head)
        return line

    def completion(self, *, streams: bool) -> http.client.HTTPConnection:
        num = int(self.draws.integers(8, 120))
        asked = {"prompt": self.prompt(), "max_tokens": num, "stream": streams, "ignore_eos": True}
        return self.open("/v1/completions", asked)

    def read(self) -> None:
        line = self.completion(streams=True)
        reply = line.getresponse()
        told = reply.read().decode()
        line.close()
        assert reply.status == 200, told
        assert told.endswith("data: [DONE]\n\n"), told[-300:]
        pieces = [json.loads(each[6:]) for each in told.split("\n\n") if each.startswith("data: {")]
        self.answers.append("".join(each["choices"][0]["text"] for each in pieces if each["choices"]))

    def hang_up(self) -> None:
        line = self.completion(streams=True)
        line.getresponse().read(int(self.draws.integers(1, 2000)))
        line.close()

    def hang_up_at_once(self) -> None:
        self.completion(streams=bool(self.draws.integers(2))).close()

    def ask_whole(self) -> None:
        line = self.completion(streams=False)
        reply = line.getresponse()
        answer = json.loads(reply.read())
        line.close()
        assert reply.status == 200, answer
        self.answers.append(answer["choices"][0]["text"])

    def wrong_key(self) -> None:
        self._is_answered(self.open("/v1/completions", {"prompt": self.prompt()}, "weft-nothing"), 401)

    def nonsense(self) -> None:
        bodies = (f'{{"prompt": "{MARK}'.encode(), b"\xff" * 100, json.dumps({"prompt": {MARK: 1}}).encode())
        self._is_answered(self.open("/v1/completions", bodies[int(self.draws.integers(len(bodies)))]), 400)

    def embed(self) -> None:
        self._is_answered(self.open("/v1/embeddings", {"input": [self.prompt(), self.prompt()]}), 200)

    def tokenize(self) -> None:
        self._is_answered(self.open("/tokenize", {"prompt": self.prompt()}), 200)

    def _is_answered(self, line: http.client.HTTPConnection, status: int) -> None:
        reply = line.getresponse()
        told = reply.read()
        line.close()
        assert reply.status == status, told[:300]


def written(folder: Path) -> dict[Path, bytes]:
    """Return all that the server has written, but for the model that it was given."""
    return {
        path: path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and folder / "model" not in path.parents
    }


def test_a_server_neither_grows_nor_tells(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "tiny")
    keys: dict[str, dict[str, object]] = {f"client{number}": {} for number in range(NUM_CLIENTS)}
    with Served(tmp_path, tmp_path / "model", keys, ["--device", "cpu", "--threads", "1", *CACHE]) as served:
        clients = [Client(served, f"client{number}", number) for number in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        sizes, began = list[tuple[float, int]](), time.monotonic()
        try:
            while (now_s := time.monotonic() - began) < SOAK_S:
                assert served.process.poll() is None
                sizes.append((now_s, served.nbytes()))
                time.sleep(0.5)
        finally:
            for client in clients:
                client.stopping.set()
            for client in clients:
                client.join()
        assert [each for client in clients for each in client.failed] == []
        did = sum((client.did for client in clients), Counter[str]())
        assert len(did) == 8
        assert min(did.values()) > 5

        metrics = served.metrics()
        deadline = time.monotonic() + ALL_ENDED_S
        while metrics["vllm:num_requests_running"] + metrics["vllm:kv_cache_usage_perc"] > 0:
            assert time.monotonic() < deadline, "texts, or pages, are held that nobody waits for"
            time.sleep(0.5)
            metrics = served.metrics()
        assert metrics["vllm:num_requests_waiting"] == 0
        told = served.get("/metrics")
        late = [nbytes for at_s, nbytes in sizes if at_s > WARM_S]
        third = len(late) // 3
        growth = median(late[-third:]) / median(late[:third]) - 1
        assert growth < GROWTH, f"{dict(did)}; {late[0] / 1e6:.0f} MB, {growth:+.2%} from the first third to the last"
    answers = [answer.strip() for client in clients for answer in client.answers]
    long = [answer[:ANSWER_LETTERS].encode() for answer in answers if len(answer) >= ANSWER_LETTERS]
    assert len(long) > 20
    sample = [long[int(at)] for at in np.linspace(0, len(long) - 1, 20)]
    for path, data in {**written(tmp_path), Path("metrics"): told}.items():
        assert MARK.encode() not in data, path
        assert not [answer for answer in sample if answer in data], path
