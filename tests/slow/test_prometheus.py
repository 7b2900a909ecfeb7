"""Figures of `weft watch` and `weft serve` as operators read them: promtool finds nothing wrong, Prometheus scrapes
them, and answers what boards ask."""

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from example import EXAMPLES
from unit.cli.serve.test_serve import serving
from unit.cli.watch.test_status import A, B, commit, started, step, write_log
from unit.serve.boards import BOARDS, NOT_SERVED
from weft.data.tokenizer import ByteTokenizer
from weft.model.config import ModelConfig
from weft.model.initial import initial_vector
from weft.model.weights import write_folder

PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROMTOOL is None or PROMETHEUS is None, reason="Debian's package prometheus is not installed"),
]
ENDS_S = 60.0
NOT_IN_THE_LOG = {"weft_heldout_loss_nats_per_token", "weft_tokens_total / weft_wanted_tokens"}
TINY = ModelConfig(vocab_size=257, num_layers=1, num_heads=2, num_kv_heads=2, width=16, ffn_width=32, max_seq_len=256)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[str]:
    """Yield the address of a page that shows a log."""
    for peer, name in ((A, "anna"), (B, 'b"ert\\\n')):
        write_log(
            tmp_path / peer / "log.jsonl", peer, (1.0, started(name)), (2.0, step(3.0)), (3.0, commit(1, 9, A, B))
        )
    command = [sys.executable, "-m", "weft", "watch", str(tmp_path), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.communicate(timeout=ENDS_S)


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=ENDS_S) as answer:
        return bytes(answer.read())


def until_told(page: str) -> bytes:
    deadline = time.monotonic() + ENDS_S
    while b"weft_rounds_total 1.0" not in (told := get(f"{page}metrics")):
        assert time.monotonic() < deadline, told
        time.sleep(0.2)
    return told


def test_promtool_finds_nothing_wrong(page: str) -> None:
    assert findings(until_told(page)) == []


def test_prometheus_scrapes_it_and_answers_what_the_board_asks(page: str, tmp_path: Path) -> None:
    until_told(page)
    board = json.loads((EXAMPLES / "grafana.json").read_text(encoding="utf-8"))
    asks = {each["expr"] for panel in board["panels"] for each in panel["targets"]}
    with prometheus(tmp_path, page) as port:
        assert until_scraped(port, "weft_rounds_total")[0]["value"][1] == "1"
        assert {ask for ask in asks if not asked(port, ask)} <= NOT_IN_THE_LOG


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Yield the address of a server that has answered."""
    write_folder(tmp_path / "tiny", TINY, initial_vector(TINY, 3), ByteTokenizer().to_json())
    with serving(tmp_path / "home", tmp_path / "tiny", "--port", 0, "--threads", 1) as served:
        asks = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "ignore_eos": True}
        for stream in (False, True):
            assert served.ask("/v1/chat/completions", asks | {"stream": stream})[0] == 200
        assert served.ask("/v1/chat/completions", asks | {"n": 99})[0] == 400
        yield served.address


def test_promtool_finds_nothing_wrong_in_a_server_but_names_that_are_vllms(server: str) -> None:
    told = get(f"{server}metrics")
    assert b'weft_serve_refused_total{status="400"} 1.0' in told
    assert [each for each in findings(told) if not re.match(r"vllm:\w+ ", each)] == []


def test_prometheus_scrapes_a_server_and_answers_what_boards_ask(server: str, tmp_path: Path) -> None:
    names = set().union(*BOARDS.values()) - NOT_SERVED
    with prometheus(tmp_path, server) as port:
        until_scraped(port, "vllm:request_success_total")
        for name in sorted(names):
            ask = f"sum(rate({name}[10s]))" if re.search("_(total|sum|count)$", name) else name
            if name.endswith("_bucket"):
                ask = f"histogram_quantile(0.95, sum by (le) (rate({name}[10s])))"
            assert asked(port, ask), ask


def findings(told: bytes) -> list[str]:
    """Return what promtool has against metrics; what it cannot read is a failure."""
    assert PROMTOOL is not None
    checked = subprocess.run(
        [PROMTOOL, "check", "metrics"], input=told, capture_output=True, timeout=ENDS_S, check=False
    )
    found = (checked.stdout + checked.stderr).decode().splitlines()
    assert checked.returncode == (3 if found else 0), found  # 3: it is read, and could be named better
    return found


@contextmanager
def prometheus(tmp_path: Path, page: str) -> Iterator[int]:
    """Scrape a page each second; yield Prometheus' port."""
    assert PROMETHEUS is not None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = tmp_path / "prometheus.yml"
    target = urllib.parse.urlsplit(page).netloc
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: weft, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    where = [f"--web.listen-address=127.0.0.1:{port}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"]
    process = subprocess.Popen([PROMETHEUS, f"--config.file={config}", *where], stderr=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.terminate()
        process.wait(ENDS_S)


def until_scraped(port: int, name: str) -> list[dict[str, Any]]:
    """Wait until Prometheus has a series, and can tell rates; return it."""
    deadline = time.monotonic() + ENDS_S
    while not (found := asked(port, name)):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    time.sleep(3.0)  # rates need two scrapes
    return found


def asked(port: int, expression: str) -> list[dict[str, Any]]:
    """Return what Prometheus answers; nothing while it starts."""
    query = urllib.parse.urlencode({"query": expression})
    try:
        answer = json.loads(get(f"http://127.0.0.1:{port}/api/v1/query?{query}"))
    except OSError:
        return []
    assert answer["status"] == "success", expression
    return list(answer["data"]["result"])
