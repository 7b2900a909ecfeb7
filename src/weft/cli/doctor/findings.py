"""What `weft doctor` looks at. Each check yields findings; one that fails says so and stops no other.

block   weft cannot run here until it is fixed
note    weft runs, but slower, or reachable by fewer
ok      as it should be

Ports are tried on this machine only: what a router lets in, nobody outside is asked to try.
"""

import errno
import importlib.metadata
import importlib.util
import ipaddress
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from weft.clock import SystemClock
from weft.errors import NetError, PortInUse
from weft.ids import several
from weft.run.host import host_free_nbytes, system_nbytes

if TYPE_CHECKING:
    from weft.net.transport.tls import TlsConfig

_PYTHONS = ((3, 11), (3, 13))
_LEAST_MEMORY = 1 << 30  # torch, the data and a nano model
_LEAST_DISK = 1 << 30
_LEAST_FILES = 256  # sockets and shards of a small swarm
_MEASURE_S = 0.2
_CLOCK_RATE = 0.05  # share by which two clocks of one machine may differ while measured
_FILE_CLOCK_S = 5.0  # and a file system's clock from the machine's: network disks are seconds off
_EPOCH_2024 = 1_704_067_200.0  # weft is younger: a clock before this is wrong
_ASK_TIMEOUT_S = 10.0

Fact = str | float | bool | None | list[str]


@dataclass(frozen=True)
class Finding:
    topic: str
    level: Literal["ok", "note", "block"]
    text: str
    fix: str = ""  # what to type or do
    facts: Mapping[str, Fact] = field(default_factory=dict)  # the same for programs: docs/doctor.md lists the names


Check = Callable[[], Iterator[Finding]]


def examine(home: Path, tls: "TlsConfig", check_models: Check) -> Iterator[Finding]:
    """Yield all findings about this machine, as they are made.

    Args:
        home: where identities, data and runs would lie.
        tls: where the person means to listen.
        check_models: what this machine can train, and how fast.
    """
    checks: tuple[tuple[str, Check], ...] = (
        ("platform", check_platform),
        ("python", check_python),
        ("memory", check_memory),
        ("disk", lambda: check_disk(home)),
        ("files", check_files),
        ("clock", lambda: check_clock(home)),
        ("network", lambda: check_network(tls)),
        ("iroh", check_iroh),
        ("torch", check_torch),
        ("models", check_models),
    )
    for topic, check in checks:
        try:
            yield from check()
        except Exception as error:  # a check that breaks is a finding, not the end of the examination
            yield Finding(topic, "note", f"could not be checked: {type(error).__name__}: {error}")


def check_platform() -> Iterator[Finding]:
    kernel = platform.release()
    name = f"{platform.system()} {kernel}, {platform.machine()}, {several(os.cpu_count() or 1, 'CPU')}"
    if "microsoft" not in kernel.lower():
        yield Finding("platform", "ok", name)
    elif "wsl2" in kernel.lower():
        text = f"{name}: WSL 2 is behind Windows' own address translation, so others cannot connect to it over tls"
        fix = "put networkingMode=mirrored under [wsl2] in %UserProfile%\\.wslconfig, then run: wsl --shutdown"
        yield Finding("platform", "note", text, fix)
    else:
        text = f"{name}: WSL 1 emulates sockets and locks"
        yield Finding("platform", "note", text, "run: wsl --set-version DISTRO 2")


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Iterator[Finding]:
    name = f"{platform.python_implementation()} {platform.python_version()}"
    low, high = _PYTHONS
    if not low <= version <= high:
        wanted = f"{low[0]}.{low[1]} to {high[0]}.{high[1]}"
        yield Finding("python", "block", f"{name}: weft needs Python {wanted}", f"install Python {high[0]}.{high[1]}")
    elif struct.calcsize("P") != 8:
        text = f"{name} is a 32-bit build; torch needs 64 bits"
        yield Finding("python", "block", text, "install a 64-bit Python")
    else:
        yield Finding("python", "ok", name)


def check_memory() -> Iterator[Finding]:
    (available, total), free = system_nbytes(), host_free_nbytes()
    text = f"{available / 1e9:.1f} GB free of {total / 1e9:.1f} GB"
    if free < available:
        text += f"; this container may use {free / 1e9:.1f} GB more"
    if free < _LEAST_MEMORY:
        fix = f"close programs or raise the limit until {_LEAST_MEMORY / 1e9:.0f} GB are free"
        yield Finding("memory", "block", text, fix)
    else:
        yield Finding("memory", "ok", text)


def check_disk(home: Path) -> Iterator[Finding]:
    place = next(folder for folder in (home, *home.parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        text = f"{place} cannot be written: {error.strerror or error}"
        yield Finding("disk", "block", text, "choose another home: --home FOLDER")
        return
    free = shutil.disk_usage(place).free
    text = f"{free / 1e9:.1f} GB free for {home}"
    if free < _LEAST_DISK:
        yield Finding("disk", "block", text, f"free {_LEAST_DISK / 1e9:.0f} GB, or choose another home: --home FOLDER")
    else:
        yield Finding("disk", "ok", text)


def check_files() -> Iterator[Finding]:
    if os.name != "posix":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} open files allowed"
    if soft >= _LEAST_FILES:
        yield Finding("files", "ok", text)
    else:
        yield Finding("files", "block", f"{text}; a swarm needs {_LEAST_FILES}", f"run: ulimit -n {min(hard, 4096)}")


def check_clock(home: Path) -> Iterator[Finding]:
    clock = SystemClock()
    now, wall = clock.now(), clock.wall()
    threading.Event().wait(_MEASURE_S)
    passed, wall_passed = clock.now() - now, clock.wall() - wall
    place = next(folder for folder in (home, *home.parents) if folder.exists())
    file_ahead_s = _file_time(place) - clock.wall()
    if passed < _MEASURE_S * 0.9:
        text = f"the monotonic clock advanced {passed:.3f} s in {_MEASURE_S} s"
        yield Finding("clock", "block", text, "restart the machine")
    elif clock.wall() < _EPOCH_2024:
        text = "the date is before 2024: times in logs will be wrong"
        yield Finding("clock", "note", text, "set the clock: timedatectl set-ntp true")
    elif abs(wall_passed - passed) > _CLOCK_RATE:
        text = f"the wall clock jumps ({wall_passed - passed:+.2f} s): times in logs will be wrong"
        yield Finding("clock", "note", text, "run only one time service")
    elif abs(file_ahead_s) > _FILE_CLOCK_S:
        text = f"the clock of the disk of {place} is {file_ahead_s:+.0f} s off"
        yield Finding("clock", "note", text, "set the clocks of machine and disk by the same service")
    else:
        yield Finding("clock", "ok", "wall, monotonic and file-system clocks agree")


def _file_time(folder: Path) -> float:
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        return os.stat(file.name).st_mtime


def check_network(tls: "TlsConfig") -> Iterator[Finding]:
    from weft.net.transport import tcp
    from weft.net.transport.address import reachable_hosts

    try:
        with tcp.listen(tls.host, tls.port) as listener:
            host, found = listener.getsockname()[:2]
            own = "127.0.0.1" if ipaddress.ip_address(host).is_unspecified else host
            with socket.create_connection((own, found), timeout=2):
                pass
    except NetError as error:
        if not isinstance(error, PortInUse) and tls.host:
            fix = 'name an address of this machine as host of [tls] in the machine file, or leave it out: ""'
        elif tls.port:
            fix = "choose another with --port, or --port 0 for a free one"
        else:
            fix = "allow this program to listen"
        yield Finding("network", "block", str(error).partition(". ")[0], fix)  # its own advice is of other commands
        return
    except OSError as error:
        yield Finding("network", "block", f"a connection to {own} failed: {error}", "run: ip link set lo up")
        return
    hosts = reachable_hosts(host)
    public = [each for each in hosts if ipaddress.ip_address(each).is_global]
    families = "IPv4 and IPv6" if ":" in host else "IPv4 only"
    if public:
        yield Finding("network", "ok", f"listening works ({families}); public addresses: {', '.join(public)}")
        return
    others = [each for each in hosts if each != "127.0.0.1"]
    where = f"at {', '.join(others)}" if others else "for programs of this machine alone"
    text = f"listening works ({families}), {where}: this machine has no public address of its own"
    fix = "for peers outside: forward a port of the router to --port, or have one member that all of you can reach"
    yield Finding("network", "note", text, fix)


def check_iroh() -> Iterator[Finding]:
    if importlib.util.find_spec("iroh") is None:
        where = f"{platform.system()} {platform.machine()}"
        if where in ("Linux x86_64", "Linux aarch64", "Darwin arm64", "Windows AMD64"):  # there is a wheel for these
            fix = "run: pip install --force-reinstall weft"
        else:
            fix = "use tls: --transports tls,via, with a port that others can reach"
        yield Finding("iroh", "note", f"not installed ({where}): peers behind routers cannot connect directly", fix)
        return
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("", 0))
    except OSError as error:
        reason = error.strerror or errno.errorcode.get(error.errno or 0, "")
        text = f"no UDP socket can be opened: {reason}"
        yield Finding("iroh", "note", text, "allow UDP, or use --transports tls,via")
        return
    yield Finding("iroh", "ok", f"iroh {importlib.metadata.version('iroh')}; UDP sockets open")


# --- torch: whether its build fits the graphics card ---


def check_torch() -> Iterator[Finding]:
    """Yield what is found of torch and the GPU."""
    try:
        import torch  # takes seconds
    except (ImportError, OSError) as error:
        yield Finding("torch", "block", f"torch cannot be loaded: {error}", "run: pip install --force-reinstall torch")
        return
    build = f"torch {torch.__version__}, {several(torch.get_num_threads(), 'thread')}"
    card = _nvidia_card()
    if torch.cuda.is_available():
        yield from _check_cuda(build)
    elif torch.backends.mps.is_available():
        yield Finding("torch", "ok", f"{build}, on the Apple GPU")
    elif card is not None:
        yield _unused_card(build, card)
    else:
        yield Finding("torch", "ok", f"{build}; no GPU, trains on the CPU")


def _check_cuda(build: str) -> Iterator[Finding]:
    import torch

    compiled = torch.cuda.get_arch_list()
    for number in range(torch.cuda.device_count()):
        name, (major, minor) = torch.cuda.get_device_name(number), torch.cuda.get_device_capability(number)
        free, total = torch.cuda.mem_get_info(number)
        text = f"{build}: cuda:{number} is {name}, {free / 1e9:.0f} GB free of {total / 1e9:.0f} GB"
        # Code for a lower minor version runs on a higher one of the same major version.
        fits = any(arch == f"sm_{major}{m}" for arch in compiled for m in range(minor + 1))
        if fits or any(arch.startswith("compute_") for arch in compiled):
            yield Finding("gpu", "ok", text)
        else:
            wanted = f"this build has no code for sm_{major}{minor} (only {', '.join(compiled)})"
            yield Finding("gpu", "note", f"{text}; {wanted}", f"{_reinstall()}, or train with --device cpu")


def _unused_card(build: str, card: str) -> Finding:
    import torch

    if torch.version.cuda is None:
        return Finding("gpu", "note", f"{card} is not used: {build} is a build for CPUs", _reinstall())
    text = f"{card} is not used: {build} is built for CUDA {torch.version.cuda}, which the driver does not run"
    return Finding("gpu", "note", text, f"update the NVIDIA driver to one for CUDA {torch.version.cuda} or newer")


def _reinstall() -> str:
    if sys.platform == "linux":  # the default build there has CUDA
        return "run: pip install --force-reinstall --no-cache-dir torch"
    return 'run the pip command that "Get Started" on the PyTorch site gives for this platform and CUDA'


def _nvidia_card() -> str | None:
    """Return the name of an NVIDIA card that the driver sees, whatever torch thinks."""
    program = shutil.which("nvidia-smi")
    if program is not None:
        try:
            answer = subprocess.run(
                [program, "--query-gpu=name", "--format=csv,noheader"],
                capture_output=True,
                text=True,
                timeout=_ASK_TIMEOUT_S,
                check=True,
            )
            return answer.stdout.strip().splitlines()[0]
        except (OSError, subprocess.SubprocessError, IndexError):
            pass
    return "an NVIDIA card" if Path("/proc/driver/nvidia/version").exists() else None
