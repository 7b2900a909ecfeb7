"""Machines that are network namespaces of this one, each on a line of its own to a switch.

    with Lines("weft-join", 5, mbit=20) as lines:
        process = lines.start(2, ["python", ...], ...)       # on machine 2, at lines.address(2)
        lines.set(2, mbit=10)
        lines.cut({(0, 2), (1, 2)})                          # nothing passes between 2 and the other two

A line is a veth pair with a token bucket (`tc tbf`) at either end. Packets of a cut pair are dropped where they come
in, as where a router has gone: nothing is reset. It needs root, iproute2, tc, and iptables to cut.
"""

import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

BURST_NBYTES = 32_000
LATENCY_MS = 100  # how long the bucket holds a packet back before it drops it


class Lines:
    """So many machines, and their lines of so many Mbit/s each way."""

    def __init__(self, name: str, num: int, *, mbit: float) -> None:
        self._name, self._num, self.mbit = name, num, mbit

    def __enter__(self) -> "Lines":
        self._remove()
        self._ip("netns", "add", self._switch)
        self._ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        self._ip("-n", self._switch, "link", "set", "br0", "up")
        for number in range(self._num):
            space, port = self._space(number), f"port{number}"
            self._ip("netns", "add", space)
            self._ip("-n", space, "link", "add", "line", "type", "veth", "peer", "name", port, "netns", self._switch)
            self._ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
            self._ip("-n", space, "addr", "add", f"{self.address(number)}/24", "dev", "line")
            self._ip("-n", space, "link", "set", "line", "up")
            self._ip("-n", space, "link", "set", "lo", "up")
            self.set(number, mbit=self.mbit)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def address(self, number: int) -> str:
        return f"10.77.0.{number + 1}"

    def set(self, number: int, *, mbit: float, down_mbit: float | None = None) -> None:
        """Change a machine's line: both ways alike, unless another rate is given for what it receives."""
        ends = ((self._space(number), "line", mbit), (self._switch, f"port{number}", down_mbit or mbit))
        for space, device, rate in ends:
            limit = ("rate", f"{rate}mbit", "burst", str(BURST_NBYTES), "latency", f"{LATENCY_MS}ms")
            _run("ip", "netns", "exec", space, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *limit)

    def cut(self, pairs: Collection[tuple[int, int]]) -> None:
        """Let nothing pass between the machines of each pair, and everything between all others."""
        for number in range(self._num):
            here = ("ip", "netns", "exec", self._space(number), "iptables")
            _run(*here, "-F", "INPUT")
            for one, other in pairs:
                if number in (one, other):
                    _run(*here, "-A", "INPUT", "-s", self.address(other if number == one else one), "-j", "DROP")

    def command(self, number: int, words: Sequence[str]) -> list[str]:
        """Return what runs a command on a machine; its process id is that of the command itself."""
        return ["ip", "netns", "exec", self._space(number), *words]

    def start(self, number: int, command: Sequence[str], folder: Path, **options: Any) -> "subprocess.Popen[bytes]":
        """Start a process on a machine."""
        return subprocess.Popen(self.command(number, command), cwd=folder, stdin=subprocess.DEVNULL, **options)

    @property
    def _switch(self) -> str:
        return f"{self._name}-switch"

    def _space(self, number: int) -> str:
        return f"{self._name}-{number}"

    def _remove(self) -> None:
        for space in (*(self._space(number) for number in range(self._num)), self._switch):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    def _ip(self, *words: str) -> None:
        _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(words)}: {done.stderr.strip()}. Network namespaces need root, iproute2, tc and iptables."
        )
