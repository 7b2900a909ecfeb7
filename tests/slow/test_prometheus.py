"""Figures of `weft watch` as operators read them: Prometheus scrapes the page and answers what the board asks."""

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from example import EXAMPLES
from unit.cli.watch.test_status import A, B, commit, started, step, write_log

PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROMTOOL is None or PROMETHEUS is None, reason="Debian's package prometheus is not installed"),
]
ENDS_S = 60.0
NOT_IN_THE_LOG = {"weft_heldout_loss_nats_per_token", "weft_tokens_total / weft_wanted_tokens"}


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
    assert PROMTOOL is not None
    told = until_told(page)
    checked = subprocess.run(
        [PROMTOOL, "check", "metrics"], input=told, capture_output=True, timeout=ENDS_S, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_prometheus_scrapes_it_and_answers_what_the_board_asks(page: str, tmp_path: Path) -> None:
    assert PROMETHEUS is not None
    until_told(page)
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
        board = json.loads((EXAMPLES / "grafana.json").read_text(encoding="utf-8"))
        found = asked(port, "weft_rounds_total")
        deadline = time.monotonic() + ENDS_S
        while not found:
            assert time.monotonic() < deadline
            time.sleep(0.5)
            found = asked(port, "weft_rounds_total")
        assert found[0]["value"][1] == "1"
        time.sleep(3.0)  # rates need two scrapes
        has_answer = {}
        for panel in board["panels"]:
            for each in panel["targets"]:
                has_answer[each["expr"]] = bool(asked(port, each["expr"]))
        missing = {expr for expr, has in has_answer.items() if not has}
        assert missing <= {
            "weft_heldout_loss_nats_per_token",
            "weft_tokens_total / weft_wanted_tokens",
        }  # not in the log
    finally:
        process.terminate()
        process.wait(ENDS_S)


def asked(port: int, expression: str) -> list[dict[str, Any]]:
    """Return what Prometheus answers; nothing while it starts."""
    query = urllib.parse.urlencode({"query": expression})
    try:
        answer = json.loads(get(f"http://127.0.0.1:{port}/api/v1/query?{query}"))
    except OSError:
        return []
    assert answer["status"] == "success", expression
    return list(answer["data"]["result"])
