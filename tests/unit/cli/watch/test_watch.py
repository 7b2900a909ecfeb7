"""`weft watch` as a process: it prints where its page is, shows logs as they grow, and ends when it is asked to."""

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from unit.cli.small import Weft
from unit.cli.test_bad_input import refused
from unit.cli.watch.test_status import A, B, commit, started, step, write_log
from weft.events import VERSION, Entry, PeerStopped

ENDS_S = 60


@contextmanager
def watching(tmp_path: Path, *arguments: str) -> Iterator[str]:
    """Yield the address that it prints."""
    command = [sys.executable, "-m", "weft", "--home", str(tmp_path / "home"), "watch", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, process.stderr.read() if process.stderr is not None else ""
        yield address
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=ENDS_S) == 0
        assert process.stderr is not None
        assert process.stderr.read().endswith("stopped\n")
    finally:
        process.kill()
        process.communicate()


def read(address: str, path: str) -> Any:
    with urllib.request.urlopen(address + path, timeout=ENDS_S) as answer:
        return json.load(answer)


@pytest.mark.full
def test_a_finished_log_is_shown_whole_and_its_stream_ends(tmp_path: Path) -> None:
    end = PeerStopped(reason="complete")
    log = write_log(
        tmp_path / "log.jsonl", A, (1.0, started("anna")), (2.0, step(3.0)), (3.0, commit(1, 512, A)), (4.0, end)
    )
    with watching(tmp_path, str(log)) as address:
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(address + "api/stream", timeout=ENDS_S) as answer:
            stream = answer.read().decode()  # it ends, so all was read
        assert "event: end" in stream
        told = read(address, "api/history")
        assert (told["is_live"], told["train"]) == (False, [[3.0, 512, 3.0]])


@pytest.mark.slow
def test_a_log_is_shown_as_it_grows(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", A, (1.0, started("anna")))
    with watching(tmp_path, str(log)) as address:
        request = urllib.request.urlopen(address + "api/stream", timeout=ENDS_S)
        with request as stream:
            seen = b""
            while b"anna" not in seen:
                seen += stream.readline()
            with log.open("ab") as file:
                entry = Entry(v=VERSION, at=2.0, peer=B, event=started("bob"))
                file.write(msgspec.json.encode(entry) + b"\n")
            while b"bob" not in seen:
                seen += stream.readline()


@pytest.mark.slow
def test_beyond_this_machine_a_token_is_asked_for_unless_it_is_public(tmp_path: Path) -> None:
    log = str(write_log(tmp_path / "log.jsonl", A, (1.0, started("anna"))))
    with watching(tmp_path, log, "--host", "0.0.0.0") as address:
        assert "?token=" in address
        bare = f"http://127.0.0.1:{address.split(':')[2].split('/')[0]}/"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            read(bare, "api/history")
    with watching(tmp_path, log, "--host", "0.0.0.0", "--public") as address:
        assert "token" not in address
        port = address.split(":")[2].split("/")[0]
        assert read(f"http://127.0.0.1:{port}/", "api/history")["is_public"] is True


def test_a_port_that_is_taken_is_said(weft: Weft, tmp_path: Path) -> None:
    import socket

    write_log(tmp_path / "log.jsonl", A, (1.0, started("anna")))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(weft, 2, "cannot listen there", "watch", tmp_path, "--port", port)
