"""Code that a model wrote passes its tests or does not, and reaches nothing of this machine."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from weft.chat import sandbox
from weft.chat.sandbox import passes, require
from weft.errors import ConfigError


def lack() -> str:
    try:
        require()
    except ConfigError as error:
        return str(error)
    return ""


needs_bwrap = pytest.mark.skipif(bool(lack()), reason=lack() or "it is there")
TWICE = "def twice(x):\n    return 2 * x"


@needs_bwrap
@pytest.mark.parametrize(
    ("code", "tests", "is_passed"),
    [
        (TWICE, "assert twice(4) == 8", True),
        (TWICE, "assert twice(4) == 9", False),
        ("import math, json, socket", "assert math.floor(2.5) == 2", True),
        ("print('x' * 10**7)", "", True),
        ("def twice(x", "", False),
        ("import sys; sys.exit(0)", "assert False", False),
        ("import os; os._exit(0)", "assert False", False),
        ("import os; os.kill(os.getpid(), 9)", "", False),
        ("raise SystemExit(0)", "", False),
        ("whole = bytearray(2 << 30)", "", False),
    ],
)
def test_what_runs_through_has_passed(code: str, tests: str, is_passed: bool) -> None:
    assert passes(code, tests) is is_passed


@needs_bwrap
def test_what_does_not_end_has_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.5)
    assert not passes("while True: pass", "")
    assert not passes("import time\ntime.sleep(60)", "")


@needs_bwrap
def test_nothing_of_the_machine_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the owner")
    monkeypatch.setenv("SECRET", "of the owner")
    tried = {
        "a file": f"open({str(secret)!r})",
        "a folder": f"os.listdir({str(Path.cwd())!r})",
        "passwords": "open('/etc/passwd')",
        "a new file": "open('/tmp/new', 'w')",
        "a new file in memory": "open('/dev/shm/new', 'w')",
        "a new device": "open('/dev/new', 'w')",
        "its own text": f"open({sys.executable!r}, 'a')",
        "the network": "socket.create_connection(('127.0.0.1', 22), 1)",
        "names": "socket.getaddrinfo('localhost', 22)",
        "another process": "os.kill(int([p for p in os.listdir('/proc') if p.isdigit() and int(p) > 9][0]), 0)",
        "the environment": "os.environ['SECRET']",
        "a mount": "subprocess.run(['mount', '-t', 'tmpfs', 'x', '/usr'], check=True)",
        "more rights": "os.setuid(0) if os.getuid() else os.chroot('/usr')",
    }
    attempt = "import os, socket, subprocess\ntry:\n    {}\n    reached = 1\nexcept Exception:\n    reached = 0"
    reached = [what for what, act in tried.items() if not passes(attempt.format(act), "assert not reached")]
    assert reached == []


@needs_bwrap
def test_it_is_what_ends_first_where_memory_runs_out() -> None:
    assert passes("told = open('/proc/self/oom_score_adj').read()", "assert told.strip() == '1000'")


@needs_bwrap
def test_it_may_have_few_processes_and_none_outlives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 3.0)
    forks = (
        "import os, time\ntry:\n    for num in range(500):\n        os.fork() or time.sleep(60)\nexcept OSError: pass"
    )
    assert passes(forks, "assert num < 20")
    for _ in range(50):
        left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        if (num := left.count("bwrap --unshare")) == 0:
            break
        time.sleep(0.1)
    assert num == 0


@pytest.mark.parametrize(("platform", "said"), [("darwin", "is of Linux alone"), ("linux", "apt install bubblewrap")])
def test_a_machine_without_one_is_told_what_to_do(platform: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(sandbox, "which", lambda _name: None)
    with pytest.raises(ConfigError, match=said):
        require.__wrapped__()


@needs_bwrap
def test_one_that_is_forbidden_says_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_command", lambda _program: ["bwrap", "--ro-bind", "/no/such", "/x", "true"])
    with pytest.raises(ConfigError, match=r"here it does not run: bwrap: .*no/such"):
        require.__wrapped__()
