"""How fast one large blob crosses a path that delays and loses packets, on one TCP connection and on several.

    python -m benchmarks.lossy

Two peers, in network namespaces, on a line between them that a process of this benchmark makes: it delays every packet
by half a round trip and drops some by lot. Congestion control is CUBIC, Linux's and most systems' default.

It needs root, or user namespaces with a TUN device in them, and says so where it has neither.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn, Self

from benchmarks._paths_nets import sh
from benchmarks.paths import CANNOT, ENTER
from benchmarks.report import load, load_line, table, write
from weft.keys import Identity

HERE = Path(__file__).parent
MBIT, RTT_S = 20, 0.08
NBYTES = 12 << 20
LOSSES = (0.0, 0.002, 0.005, 0.01, 0.02)
DEADLINE_S = 240.0
ADDRESSES = {"a": "10.9.0.1", "b": "10.9.0.2"}
SEEDS = {"a": 1, "b": 2}
PROBE = "mount -t tmpfs tmpfs /run; ip netns add x; ip tuntap add dev probe mode tun; ip link set probe netns x"


class Process:
    """One that says lines of JSON."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._begin(" ".join(command), self.process.stdin, self.process.stdout)

    def _begin(self, named: str, told: IO[str], said: IO[str]) -> None:
        self._named, self._told = named, told
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()  # None: it has ended
        self._listening = threading.Thread(target=self._listen, args=(said,), daemon=True)
        self._listening.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        with suppress(BrokenPipeError):  # of what was told last
            self._told.close()
        self._listening.join()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def tell(self, **order: Any) -> None:
        self._told.write(json.dumps(order) + "\n")
        self._told.flush()

    def hear(self, *events: str) -> dict[str, Any]:
        """Return the next word of these kinds.

        Raises:
            RuntimeError: it has ended, or says nothing any more.
        """
        while True:
            try:
                word = self._said.get(timeout=DEADLINE_S)
            except queue.Empty:
                raise RuntimeError(f"nothing was said for {DEADLINE_S:g} s by: {self._named}") from None
            if word is None:
                raise RuntimeError(f"this process has ended: {self._named}")
            if word["event"] in events:
                return word

    def _listen(self, said: IO[str]) -> None:
        with said:
            for line in said:
                self._said.put(json.loads(line))
        self._said.put(None)


def measure(loss: float, num_streams: int) -> float:
    """Return the Mbit/s at which a fetches the blob from b."""
    for name in ADDRESSES:
        sh(f"ip netns add {name}; ip -n {name} link set lo up")
    line = {"mbit": MBIT, "rtt_s": RTT_S, "loss": loss, "ends": list(ADDRESSES.items())}
    try:
        with Process([sys.executable, str(HERE / "_lossy_line.py"), json.dumps(line)]) as laid:
            laid.hear("laid")
            with peer("b", num_streams) as b:
                port = next(each for each in b.hear("started")["addresses"] if ADDRESSES["b"] in each)
                key = Identity.from_seed(bytes([SEEDS["b"]]) * 32).peer
                with peer("a", num_streams, {key: [port]}) as a:
                    a.hear("up")
                    a.tell(fetch=key)
                    word = a.hear("fetched", "failed")
                    if word["event"] == "failed":
                        raise RuntimeError(word["reason"])
                    return 8 * NBYTES / 1e6 / float(word["seconds"])
    finally:
        for name in ADDRESSES:
            sh(f"ip netns del {name}")


def peer(name: str, num_streams: int, known: dict[str, list[str]] | None = None) -> Process:
    settings = {
        "seed": SEEDS[name],
        "name": name,
        "transports": ["tls"],
        "nbytes": NBYTES,
        "known": known or {},
        "num_streams": num_streams,
    }
    return Process(["ip", "netns", "exec", name, sys.executable, str(HERE / "_paths_peer.py"), json.dumps(settings)])


def may_run() -> str | None:
    """Return why the line cannot be laid here, or None."""
    done = subprocess.run([*ENTER, "sh", "-ec", PROBE], capture_output=True, text=True, timeout=20, check=False)
    return f"cannot lay a line of its own here: {done.stderr.strip()[:200]}" if done.returncode else None


def isolate(name: str) -> NoReturn:
    """Begin a benchmark again where it may lay lines; end with `CANNOT` where it cannot."""
    if (reason := may_run()) is not None:
        print(f"benchmarks.{name} {reason}", file=sys.stderr)
        raise SystemExit(CANNOT)
    again = [sys.executable, "-m", f"benchmarks.{name}", *sys.argv[1:], "--isolated"]
    script = 'mount -t tmpfs tmpfs /run; ip link set lo up; exec "$@"'
    os.execvp("unshare", [*ENTER, "sh", "-ec", script, "sh", *again])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--loss", type=float, help="of this share of the packets alone; no report is written")
    parser.add_argument("--isolated", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.isolated:
        isolate("lossy")
    before, rows = load(), []
    for loss in LOSSES if options.loss is None else (options.loss,):
        one, several = measure(loss, 1), measure(loss, 4)
        rows.append([f"{100 * loss:g} %", one, several, several / one])
        print(rows[-1], file=sys.stderr, flush=True)
    if options.loss is not None:
        return
    header = ["packets lost", "one connection, Mbit/s", "up to four, Mbit/s", "ratio"]
    sections = [
        f"A fetches one blob of {NBYTES >> 20} MiB from b over `tls`. The line has {MBIT} Mbit/s each way, a round "
        f"trip of {1000 * RTT_S:.0f} ms, a queue of 100 ms, and loses packets by lot, both ways. CUBIC at both ends. "
        "Up to four connections is what weft does: it opens another where the rest would take over 4 s, and no further "
        "one where the last gained less than 15 %.",
        table(header, rows),
        load_line(before),
    ]
    write("lossy", "A large blob over a path that loses packets", "python -m benchmarks.lossy", sections)


if __name__ == "__main__":
    main()
