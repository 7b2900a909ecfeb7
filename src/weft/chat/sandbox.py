"""Code that a model wrote is run where it can do no harm: in a process of bubblewrap's, which Linux has.

    require()                   this machine has it, and it works
    passes(code, tests)         whether code, and then tests in the same process, run through
    map_together(function, ..)  of many at a time

It sees what the system has installed and Python, read-only, and no other files of the machine, no network, no other
process, no environment. It may take `SECONDS`, 16 threads and processes, and address `MEMORY_NBYTES` in each; where
memory runs out, it is what the kernel ends first. What ends before its tests do has not passed.

What it does not hold: shared memory that is let go, and a namespace of its own with a file system in memory, take more
than those bounds; code that looks for the word which says that tests have passed finds it; and as root all sandboxes
have 16 processes together, so that code with threads may fail beside others.
"""

import json
import math
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from shutil import which
from tempfile import TemporaryFile
from typing import Any, TypeVar

from weft import rng
from weft.errors import ConfigError

R = TypeVar("R")

SECONDS = 10.0
MEMORY_NBYTES = 1 << 30
_SAID_NBYTES = 1 << 16  # that it may print
_INSTALL = "Install bubblewrap: apt install bubblewrap, dnf install bubblewrap, pacman -S bubblewrap"

# What runs inside. The word that says that all has run through is made for each call, is told by a pipe that is closed
# before any code runs, and is printed where the code's own output does not go. Code may still find both in `__main__`.
_RUN = """
import json, os, resource, sys
NOBODY = 65534
told = json.load(sys.stdin)
sys.stdin.close()
sys.stdin, out = open(os.devnull), os.dup(1)
null = os.open(os.devnull, os.O_WRONLY)
os.dup2(null, 1)
os.dup2(null, 2)
with open("/proc/self/oom_score_adj", "w") as first:
    first.write("1000")
for kind, most in (("AS", told["memory"]), ("CPU", told["seconds"]), ("FSIZE", told["said"]), ("NPROC", 16)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (most, most))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
if os.getuid() == 0:  # of whom processes are not counted
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
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
    with ThreadPoolExecutor(os.cpu_count()) as pool:
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
    if not _runs_through("", ""):
        done = subprocess.run(_command("pass"), capture_output=True, text=True, check=False, timeout=60.0)
        raise ConfigError(
            f"{what}, and here it does not run: {done.stderr.strip()[:300] or 'it says nothing'}. Systems that forbid "
            "unprivileged namespaces need a profile that allows bwrap them."
        )


def _runs_through(code: str, tests: str) -> bool:
    word = rng.fresh_secret(16).hex()
    told = {
        "code": code, "tests": tests, "word": word, "memory": MEMORY_NBYTES, "seconds": math.ceil(SECONDS),
        "said": _SAID_NBYTES,
    }  # fmt: skip
    with TemporaryFile() as said:
        done = None
        with suppress(subprocess.TimeoutExpired):  # who started it ends all that it started
            done = subprocess.run(
                _command(_RUN),
                input=json.dumps(told).encode(),
                stdout=said,
                stderr=subprocess.DEVNULL,
                timeout=SECONDS,
                check=False,
            )
        said.seek(0)
        return done is not None and done.returncode == 0 and said.read(2 * len(word)) == word.encode()


def _command(program: str) -> list[str]:
    """Return how Python runs a program in a sandbox."""
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
        str(python), "-I", "-S", "-c", program,
    ]  # fmt: skip
