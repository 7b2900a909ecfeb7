"""Code that a model wrote passes its tests or does not, and reaches nothing of this machine."""

import errno
import platform
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from weft.chat import sandbox, seccomp
from weft.chat.sandbox import passes, require
from weft.errors import ConfigError


def lack() -> str:
    try:
        require()
    except ConfigError as error:
        return str(error)
    return ""


needs_bwrap = pytest.mark.skipif(bool(lack()), reason=lack() or "it is there")
CLONE, ADD_KEY, IO_SETUP = (220, 217, 0) if platform.machine() == "aarch64" else (56, 248, 206)
REFUSED = (errno.EPERM, errno.ENOSYS)
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
        "another process": "[each for each in os.listdir('/proc') if each.isdigit() and int(each) > 9][0]",
        "the environment": "os.environ['SECRET']",
        "a mount": "subprocess.run(['mount', '-t', 'tmpfs', 'x', '/usr'], check=True)",
        "more rights": "os.setuid(0) if os.getuid() else os.chroot('/usr')",
        "many files": "[open('/dev/null') for _ in range(100)]",
    }
    attempt = "import os, socket, subprocess\ntry:\n    {}\n    reached = 1\nexcept Exception:\n    reached = 0"
    reached = [what for what, act in tried.items() if not passes(attempt.format(act), "assert not reached")]
    assert reached == []


@needs_bwrap
def test_what_no_limit_counts_is_refused_by_the_system() -> None:
    tried = {
        "a namespace": "libc.unshare(0x10000000)",
        "a process in a namespace": f"libc.syscall({CLONE}, 0x10000000 | 17, 0, 0, 0, 0) or os._exit(0)",
        "a process by flags that no filter sees": "libc.syscall(435, 0, 0)",
        "shared memory": "libc.shmget(0, 1 << 20, 0o1600)",
        "queues": "libc.msgget(0, 0o1600)",
        "semaphores": "libc.semget(0, 9, 0o1600)",
        "rings": "libc.syscall(425, 1, bytes(120))",
        "requests": f"libc.syscall({IO_SETUP}, 9, ctypes.byref(ctypes.c_ulong()))",
        "connections": "libc.socket(2, 1, 0)",
        "keys": f"libc.syscall({ADD_KEY}, b'user', b'x', b'x', 1, -3)",
        "the machine around this one": "libc.socket(40, 1, 0)",
    }
    attempt = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nfound = {}\nerror = ctypes.get_errno()"
    allowed = [
        what
        for what, act in tried.items()
        if not passes(attempt.format(act), f"assert found < 0 and error in {REFUSED}")
    ]
    assert allowed == []


@needs_bwrap
def test_sandboxes_beside_one_another_have_their_processes_each() -> None:
    threads = "import threading, time\neach = [threading.Thread(target=time.sleep, args=(1,)) for _ in range(9)]\n"
    code = threads + "for one in each: one.start()\nfor one in each: one.join()"
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(passes, [code] * 4, ["assert len(each) == 9"] * 4)) == [True] * 4


@pytest.mark.parametrize(
    ("machine", "header"), [("x86_64", "x86_64-linux-gnu/asm/unistd_64.h"), ("aarch64", "asm-generic/unistd.h")]
)
def test_calls_have_the_numbers_that_the_kernel_gives_them(machine: str, header: str) -> None:
    path = Path("/usr/include", header)
    if not path.is_file():
        pytest.skip(f"{path} is not there: install the kernel's headers")
    numbers = dict(re.findall(r"#define __NR_(\w+)\s+(\d+)", path.read_text(encoding="utf-8")))
    names = (
        "shmget msgget semget unshare setns mount fsopen io_uring_setup add_key request_key keyctl bpf perf_event_open "
        "userfaultfd io_setup"
    )
    calls = seccomp.CALLS[machine]
    assert calls.refused == tuple(int(numbers[name]) for name in names.split())
    assert [calls.clone, calls.clone3, calls.socket] == [int(numbers[name]) for name in ("clone", "clone3", "socket")]


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
