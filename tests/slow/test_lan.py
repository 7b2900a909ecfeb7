"""`--lan` over a real link: two network namespaces, a cable between them, a ticket whose address is of yesterday."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slow.shell import COMMIT_S, START_S, Shell
from weft.events import Entry, Notice, RoundCommitted
from weft.keys import read_peer
from weft.net.messages import Contact
from weft.net.ticket import issue, read

pytestmark = pytest.mark.slow

UNREACHABLE = 22  # docs/exit_codes.md
HERE = ("--threads", "1", "--transports", "tls", "--device", "cpu")
ENTER_S = 10.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[tuple[int, int]]:
    """Yield a process in each of two networks that a cable joins: 10.88.0.1 and 10.88.0.2."""
    missing = [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]
    if missing or not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("network namespaces need Linux, root, iproute2 and util-linux")
    holders = [subprocess.Popen(["unshare", "-n", "sleep", "1000"]) for _ in range(2)]
    try:
        own, deadline = os.readlink("/proc/self/ns/net"), time.monotonic() + ENTER_S
        while any(os.readlink(f"/proc/{each.pid}/ns/net") == own for each in holders):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        one, two = (each.pid for each in holders)
        try:
            ip("link", "add", "cable", "netns", str(one), "type", "veth", "peer", "name", "cable", "netns", str(two))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no cable between networks can be made here: {error.stderr.decode()}")
        for number, pid in enumerate((one, two), start=1):
            inside = ["nsenter", "-t", str(pid), "-n", "ip"]
            for words in (
                ["link", "set", "lo", "up"],
                ["addr", "add", f"10.88.0.{number}/24", "dev", "cable"],
                ["link", "set", "cable", "up"],
            ):
                subprocess.run([*inside, *words], check=True)
        yield one, two
    finally:
        for each in holders:
            each.kill()
            each.wait()


def test_a_member_is_found_in_the_local_network_where_both_ask(
    machines: tuple[int, int], shells: Callable[..., Shell], run_file: Path
) -> None:
    anna, bert = shells("anna"), shells("bert")
    for shell, pid in zip((anna, bert), machines, strict=True):
        shell.enter = ("nsenter", "-t", str(pid), "-n")
    anna.run("train", str(run_file), "--name", "anna", "--lan", *HERE)
    fresh = read(anna.ticket())
    (member,) = fresh.contacts
    yesterday = Contact(peer=member.peer, name="", addresses=("tls://10.88.0.1:1",))
    stale = issue(fresh.run, [yesterday], fresh.secret)

    bert.run("join", "-", "--yes", "--name", "bert", *HERE, given=stale)
    assert bert.process is not None
    assert bert.process.wait(START_S) == UNREACHABLE

    bert.run("join", "-", "--yes", "--name", "bert", "--lan", *HERE, given=stale)
    bert.wait(lambda entry: isinstance(entry.event, Notice) and "local network" in entry.event.text, within_s=START_S)
    bert_is = read_peer(bert.home / "keys" / "peer-0.pem")

    def is_counted(entry: Entry) -> bool:
        return isinstance(entry.event, RoundCommitted) and {member.peer, bert_is} <= set(entry.event.contributors)

    anna.wait(is_counted, within_s=START_S + COMMIT_S)
    for shell in (bert, anna):
        assert shell.send(signal.SIGINT) == 0
        assert "Traceback" not in shell.said.read_text()
