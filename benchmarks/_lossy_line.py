"""Lines that delay and lose packets, between network namespaces: what `benchmarks.lossy` and others lay.

    python _lossy_line.py '{"mbit": 20, "rtt_s": 0.08, "loss": 0.01, "ends": [["a", "10.9.0.1"], ["b", "10.9.0.2"]]}'

Of two ends or more, each with a line of its own. A packet waits for its turn, of which there are so many a second; it
is dropped where `QUEUE_S` of packets wait already, or by lot; else it comes half a round trip later. At each end is a
TUN device, so whole packets pass through this process, those of TCP, too, and the kernels at the ends see a wide
network. Needs root, or a user namespace.

A line on the input makes it say how many bytes of packets went from whom to whom so far:
{"event": "counted", "nbytes": [["a", "b", 12345], ...]}.
"""

import fcntl
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections import Counter, deque
from typing import Any

from weft.rng import stream

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 1500
QUEUE_S = 0.1  # of packets, that wait at most


class Way:
    """From one device to the others.

    Args:
        outs: by address, its four bytes.
        lots: one number from 0 to 1 for each packet.
    """

    def __init__(self, outs: dict[bytes, int], options: dict[str, Any], lots: Any) -> None:
        self._outs = outs
        self._bps = options["mbit"] * 1e6
        self._delay_s = options["rtt_s"] / 2
        self._loss = options["loss"]
        self._lots = lots
        self._free_at = 0.0
        self._on_way: deque[tuple[float, int, bytes]] = deque()
        self.nbytes: Counter[bytes] = Counter()  # by where they go

    def take(self, packet: bytes, now: float) -> None:
        to = packet[16:20]  # of IPv4
        self.nbytes[to] += len(packet)
        out = self._outs.get(to)
        if out is None:
            return
        starts = max(now, self._free_at)
        if starts - now > QUEUE_S or self._lots.random() < self._loss:
            return
        self._free_at = starts + 8 * len(packet) / self._bps
        self._on_way.append((self._free_at + self._delay_s, out, packet))

    def deliver(self, now: float) -> None:
        while self._on_way and self._on_way[0][0] <= now:
            _, out, packet = self._on_way.popleft()
            os.write(out, packet)

    @property
    def next_at(self) -> float | None:
        return self._on_way[0][0] if self._on_way else None


def device(space: str, address: str) -> int:
    """Put one end of a line into a namespace; return where its packets are read and written."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    name, net = f"line-{space}", address.rpartition(".")[0] + ".0/24"
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22s", name.encode(), IFF_TUN | IFF_NO_PI, b""))
    script = (
        f"ip link set {name} netns {space}; ip -n {space} addr add {address}/24 dev {name};"
        f"ip -n {space} link set {name} mtu {MTU} txqueuelen 1000 up;"
        f"ip -n {space} route replace {net} dev {name} src {address} congctl cubic"
    )
    subprocess.run(["sh", "-ec", script], check=True)
    return end


def main(options: dict[str, Any]) -> None:
    ends = [device(space, address) for space, address in options["ends"]]
    by_address = {socket.inet_aton(address): end for end, (_, address) in zip(ends, options["ends"], strict=True)}
    ways = {end: Way(by_address, options, stream(number, "lost")) for number, end in enumerate(ends, 1)}
    names = {socket.inet_aton(address): space for space, address in options["ends"]}
    asked = sys.stdin.fileno()
    print(json.dumps({"event": "laid"}), flush=True)
    while True:
        times = [way.next_at for way in ways.values() if way.next_at is not None]
        timeout_s = max(0.0, min(times) - time.monotonic()) if times else 1.0
        ready, _, _ = select.select([*ends, asked], (), (), timeout_s)
        now = time.monotonic()
        for end in ready:
            if end == asked:
                if not sys.stdin.readline():
                    return
                counted = [(space, ways[end]) for end, (space, _) in zip(ends, options["ends"], strict=True)]
                nbytes = [
                    [space, names[to], way.nbytes[to]] for space, way in counted for to in names if to in way.nbytes
                ]
                print(json.dumps({"event": "counted", "nbytes": nbytes}), flush=True)
                continue
            while True:
                try:
                    ways[end].take(os.read(end, 2048), now)
                except BlockingIOError:
                    break
        for way in ways.values():
            way.deliver(time.monotonic())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
