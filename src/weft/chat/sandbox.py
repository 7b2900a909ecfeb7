"""Code that a model wrote is run where it can do no harm: in a process of bubblewrap's, which Linux has.

    require()                   this machine has it, and it works
    passes(code, tests)         whether code, and then tests in the same process, run through
    map_together(function, ..)  of many at a time

It sees what the system has installed and Python, read-only, and no other files of the machine, no network, no other
process, no environment, and no calls of the system that would take what no limit counts (`seccomp`). It may take
`SECONDS`, 16 threads and processes, and address `MEMORY_NBYTES` in each; where memory runs out, it is what the kernel
ends first. What ends before its tests do has not passed.

What it does not hold: code and tests are one process, so code that sets out to cheat its tests can.
"""

import json
import math
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from itertools import count
from pathlib import Path
from shutil import which
from tempfile import TemporaryFile
from typing import IO, Any, TypeVar

from weft import rng
from weft.chat import seccomp
from weft.errors import ConfigError

R = TypeVar("R")

SECONDS = 10.0
MEMORY_NBYTES = 1 << 30
_SAID_NBYTES = 1 << 16  # that it may print
_MAX_PROCESSES, _MAX_FILES = 16, 64
_TURNS = count()
_INSTALL = "Install bubblewrap: apt install bubblewrap, dnf install bubblewrap, pacman -S bubblewrap"

# What runs inside. The word that says that all has run through is made for each call, is told by a pipe that is closed
# before any code runs, and is printed where the code's own output does not go. Code may still find both in `__main__`.
_RUN = """
import json, os, resource, sys
told = json.load(sys.stdin)
sys.stdin.close()
sys.stdin, out = open(os.devnull), os.dup(1)
null = os.open(os.devnull, os.O_WRONLY)
os.dup2(null, 1)
os.dup2(null, 2)
with open("/proc/self/oom_score_adj", "w") as first:
    first.write("1000")
for kind, most in told["limits"].items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (most, most))
if os.getuid() == 0:  # of whom processes are not counted
    os.setgroups([])
    os.setgid(told["nobody"])
    os.setuid(told["nobody"])
space = {"__name__": "answer"}
exec(compile(told["code"], "answer", "exec"), space)
exec(compile(told["tests"], "tests", "exec"), space)
os.write(out, told["word"].encode())
"""


def passes(code: str, tests: str) -> bool:
    """Return whether `code`, and then `tests` where its names are known, run through.

    Raises:
        ConfigError: this machine has nothing to run it in.
    """
    require()
    return _runs_through(code, tests)


def map_together(function: Callable[..., R], *columns: Iterable[Any]) -> list[R]:
    """Return what a function that runs code returns of each row, of many at a time: each waits for its own process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with ThreadPoolExecutor(cores) as pool:
        return list(pool.map(function, *columns))


@lru_cache(1)
def require() -> None:
    """
    Raises:
        ConfigError: this machine runs no code of a model's; says what to install.
    """
    what = "the answers are code, which weft runs in a sandbox of bubblewrap (bwrap)"
    if sys.platform != "linux":
        raise ConfigError(f"{what}, and that is of Linux alone. Use a machine with Linux, or tasks without tests.")
    if which("bwrap") is None:
        raise ConfigError(f"{what}, and this machine has none. {_INSTALL}.")
    if seccomp.program(platform.machine()) is None:
        raise ConfigError(
            f"{what}, and for processors like this one ({platform.machine()}) weft has no filter of calls. Use another."
        )
    with TemporaryFile() as error:
        if not _runs_through("", "", error):
            error.seek(0)
            told = error.read(300).decode(errors="replace").strip()
            raise ConfigError(
                f"{what}, and here it does not run: {told or 'it says nothing'}. Systems that forbid unprivileged "
                "namespaces need a profile that allows bwrap them."
            )


def _runs_through(code: str, tests: str, error: IO[bytes] | int = subprocess.DEVNULL) -> bool:
    """
    Args:
        error: where what the sandbox itself says goes.
    """
    word, seconds = rng.fresh_secret(16).hex(), math.ceil(SECONDS)
    limits = {"AS": MEMORY_NBYTES, "CPU": seconds, "FSIZE": _SAID_NBYTES, "NPROC": _MAX_PROCESSES, "CORE": 0}
    limits["NOFILE"] = _MAX_FILES
    told = {"code": code, "tests": tests, "word": word, "limits": limits, "nobody": _nobody()}
    with TemporaryFile() as said, TemporaryFile() as calls:
        calls.write(seccomp.program(platform.machine()) or b"")
        calls.seek(0)
        done = None
        with suppress(subprocess.TimeoutExpired):  # who started it ends all that it started
            done = subprocess.run(
                _command(calls.fileno()),
                input=json.dumps(told).encode(),
                stdout=said,
                stderr=error,
                timeout=SECONDS,
                pass_fds=(calls.fileno(),),
                check=False,
            )
        said.seek(0)
        return done is not None and done.returncode == 0 and said.read(2 * len(word)) == word.encode()


def _nobody() -> int:
    """Return a user that nobody is, another one for each sandbox, whose processes are counted for themselves.

    Where few users are known, as in a container without a system's rights, they come again soon.
    """
    first, num = _nobodies()
    return first + next(_TURNS) % num


@lru_cache(1)
def _nobodies() -> tuple[int, int]:
    """Return the first of some users that nobody is, and how many they are."""
    with suppress(OSError, ValueError, IndexError):
        begin, _, num = map(int, Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()[-1].split())
        if begin + num > 1 << 31:
            return (1 << 30) + os.getpid() % (1 << 19) * 1024, 1024
    return 65520, 14  # which neither systemd nor a distribution gives to anybody


def _command(calls: int) -> list[str]:
    """Return how Python runs `_RUN` in a sandbox.

    Args:
        calls: the open file of the filter.
    """
    python = Path(sys.executable).resolve()
    seen = ["/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/nix/store"]
    for path in (sys.base_prefix, sys.base_exec_prefix, sysconfig.get_path("stdlib"), str(python.parent)):
        if not any(Path(path).is_relative_to(each) for each in seen):
            seen.append(path)
    binds = list[str]()
    for path in filter(os.path.lexists, seen):
        folders = reversed(Path(path).parents[:-1])  # which else nobody but their owner might read
        binds += [word for folder in folders for word in ("--dir", str(folder))]
        binds += ["--ro-bind", path, path]
    apart = ["--unshare-all", "--cap-drop", "ALL"]
    if os.geteuid() == 0:  # it can become somebody else, which in a namespace of its own it could not
        apart = [f"--unshare-{each}" for each in ("ipc", "pid", "net", "uts", "cgroup-try")]
        apart += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return [
        "bwrap", *apart, "--die-with-parent", "--new-session", "--clearenv", *binds,
        "--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/",
        "--seccomp", str(calls), str(python), "-I", "-S", "-c", _RUN,
    ]  # fmt: skip
