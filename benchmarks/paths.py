"""Which way two peers find to each other, how soon and how fast, on networks that stand in each other's way.

    python -m benchmarks.paths

Two peers, a and b, each know the address of a third alone, the member they were invited by. In every network but the
last that one can be reached. Set-up time runs from the moment a hears of b until their link stands. Then a fetches a
blob from b. Networks are namespaces of Linux with virtual cables, `tc tbf` for their rate and iptables for routers; the
kernel adds no delay to them.

It needs root, or user namespaces with iptables in them, and says so where it has neither.
"""

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._paths_nets import Nets
from benchmarks.report import load, load_line, table, write
from weft.keys import Identity

HERE = Path(__file__).parent
MBPS = 100
NBYTES = 24 << 20
DEADLINE_S = 60.0
PORT = 7077
PROXY_PORT = 3128
CANNOT = 3  # exit code where no networks can be made
ENTER = ("unshare", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
PROBE = (
    "mount -t tmpfs tmpfs /run; ip netns add x; ip netns exec x iptables -t nat -L -n;"
    "ip -n x link add c type veth peer name d; tc -n x qdisc add dev c root tbf rate 1mbit burst 9kb latency 9ms"
)
SEEDS = {"a": 1, "b": 2, "relay": 3}
KEYS = {name: Identity.from_seed(bytes([seed]) * 32).peer for name, seed in SEEDS.items()}
ALL = ("tls", "iroh", "via")
RELAY = "203.0.113.1"
AT_CABLE = {"a": "10.1.1.1", "b": "10.1.2.1"}


class Peer:
    """A process in a namespace, and what it said."""

    def __init__(self, nets: Nets, name: str, relay: str, **options: Any) -> None:
        known = {} if name == "relay" else {KEYS["relay"]: [f"tls://{relay}:{PORT}", iroh(relay)]}
        settings = {
            "seed": SEEDS[name],
            "name": name,
            "transports": ALL,
            "nbytes": NBYTES,
            "known": known,
            "port": PORT if name == "relay" else 0,
            **options,
        }
        command = [sys.executable, str(HERE / "_paths_peer.py"), json.dumps(settings)]
        self._process = nets.run(name, command)
        self._said: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.heard: list[dict[str, Any]] = []

    def tell(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def await_word(
        self, is_it: Callable[[dict[str, Any]], bool], deadline_s: float = DEADLINE_S
    ) -> dict[str, Any] | None:
        """Return the next word of that kind, or None when none comes in time."""
        ends = time.monotonic() + deadline_s
        while (left_s := ends - time.monotonic()) > 0:
            try:
                word = self._said.get(timeout=left_s)
            except queue.Empty:
                break
            self.heard.append(word)
            if is_it(word):
                return word
        return None

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put(json.loads(line))


def iroh(host: str) -> str:
    return f"iroh://{KEYS['relay']}?addr={host}:{PORT}"


def open_network(nets: Nets) -> None:
    nets.wide("a", "203.0.113.2")
    nets.wide("b", "203.0.113.3")


def udp_blocked(nets: Nets) -> None:
    open_network(nets)
    nets.rule("a", "-A OUTPUT -p udp -j DROP")


def tcp_blocked(nets: Nets) -> None:
    open_network(nets)
    nets.rule("b", "-A INPUT -p tcp -s 203.0.113.2 -j DROP")
    nets.rule("a", "-A INPUT -p tcp -s 203.0.113.3 -j DROP")


def third_alone(nets: Nets) -> None:
    nets.pair("a", "relay", "10.1.1")
    nets.pair("b", "relay", "10.1.2")


def one_cone(nets: Nets) -> None:
    nets.home("a", "203.0.113.10", "192.168.1", symmetric=False)
    nets.wide("b", "203.0.113.3")


def proxied(nets: Nets) -> None:
    nets.run("a-proxy", [sys.executable, str(HERE / "_paths_proxy.py"), nets.proxied("a", "10.1.1"), str(PROXY_PORT)])
    nets.wide("b", "203.0.113.3")


def homes(symmetric: bool, double: bool = False) -> Callable[[Nets], None]:
    def build(nets: Nets) -> None:
        nets.home("a", "203.0.113.10", "192.168.1", symmetric=symmetric, double=double)
        nets.home("b", "203.0.113.20", "192.168.2", symmetric=symmetric, double=double)

    return build


def cone_without_udp(nets: Nets) -> None:
    homes(False)(nets)
    for name in ("a", "b"):
        nets.rule(f"{name}-router", "-I FORWARD -p udp -j DROP")


NETWORKS: dict[str, Callable[[Nets], None]] = {
    "open": open_network,
    "UDP blocked at a": udp_blocked,
    "TCP swallowed between a and b": tcp_blocked,
    "each on a cable to the third alone": third_alone,
    "a behind a cone NAT, b open": one_cone,
    "both behind cone NATs": homes(False),
    "both behind symmetric NATs": homes(True),
    "both behind two cone NATs": homes(False, double=True),
    "both behind cone NATs, UDP blocked": cone_without_udp,
    "a reaches nothing but an HTTP proxy, b open": proxied,
}


def measure(name: str) -> list[object]:
    """Return the row of one network."""
    with Nets(MBPS) as nets:
        nets.wide("relay", RELAY)
        NETWORKS[name](nets)
        relay_at = AT_CABLE if NETWORKS[name] is third_alone else dict.fromkeys(("a", "b"), RELAY)
        relay = Peer(nets, "relay", RELAY)
        if relay.await_word(lambda word: word["event"] == "started") is None:
            raise RuntimeError(f"{name}: the third peer did not start")
        options = {"proxy": f"http://10.1.1.1:{PROXY_PORT}"} if NETWORKS[name] is proxied else {}
        a, _ = Peer(nets, "a", relay_at["a"], **options), Peer(nets, "b", relay_at["b"])
        heard = a.await_word(lambda word: word["event"] == "heard" and word["peer"] == KEYS["b"])
        up = heard and a.await_word(lambda word: word["event"] == "up" and word["peer"] == KEYS["b"])
        if not heard or not up:
            return [name, "none", "-", "-", "-"]
        took_s = up["at"] - heard["at"]
        a.tell(fetch=KEYS["b"])
        fetched = a.await_word(lambda word: word["event"] in ("fetched", "failed"))
        rate = "-" if fetched is None or fetched["event"] == "failed" else NBYTES / 1e6 / fetched["seconds"]
        way = {"via": "via the third"}.get(up["transport"], up["transport"])
        to_third = next(
            word["transport"] for word in a.heard if word["event"] == "up" and word["peer"] == KEYS["relay"]
        )
        return [name, way, to_third, took_s, rate]


def nobody_open() -> str:
    """Return what a newcomer is told whose only contact sits behind a router."""
    with Nets(MBPS) as nets:
        nets.home("relay", "203.0.113.10", "192.168.1", symmetric=False)
        nets.home("a", "203.0.113.20", "192.168.2", symmetric=False)
        relay = Peer(nets, "relay", RELAY)
        relay.await_word(lambda word: word["event"] == "started")
        a = Peer(nets, "a", "192.168.1.2")
        a.await_word(lambda word: word["event"] == "started")
        a.tell(connect=KEYS["relay"])
        word = a.await_word(lambda word: word["event"] in ("connected", "failed"))
        return "a link" if word is None or word["event"] == "connected" else str(word["reason"])


def may_run() -> str | None:
    """Return why the networks cannot be made here, or None."""
    missing = [tool for tool in ("unshare", "ip", "tc", "iptables", "sysctl") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (Linux) for networks of its own"
    done = subprocess.run([*ENTER, "sh", "-ec", PROBE], capture_output=True, text=True, timeout=20, check=False)
    return f"cannot make networks of its own here: {done.stderr.strip()[:200]}" if done.returncode else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="part of a network's name: its row is printed as JSON, and no report is written")
    parser.add_argument("--isolated", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.isolated:
        if (reason := may_run()) is not None:
            print(f"benchmarks.paths {reason}", file=sys.stderr)
            raise SystemExit(CANNOT)
        again = [sys.executable, "-m", "benchmarks.paths", *sys.argv[1:], "--isolated"]
        os.execvp(
            "unshare", [*ENTER, "sh", "-ec", 'mount -t tmpfs tmpfs /run; ip link set lo up; exec "$@"', "sh", *again]
        )
    before = load()
    if options.only:
        for name in NETWORKS:
            if options.only in name:
                print(json.dumps(measure(name)), flush=True)
        return
    rows = []
    for name in NETWORKS:
        rows.append(measure(name))
        print(rows[-1], file=sys.stderr, flush=True)
    header = ["network", "way from a to b", "from a to the third", "set-up, s", "a fetches, MB/s"]
    sections = [
        f"A fetches {NBYTES >> 20} MiB; a line has {MBPS} Mbit/s each way. What passes through the third is bounded "
        "by its own settings, here the default of 20 Mbit/s.",
        table(header, rows),
        f'Where nobody can be reached from outside there is no way, and joining says: "{nobody_open()}"',
        load_line(before),
    ]
    write("paths", "Ways to each other", "python -m benchmarks.paths", sections, packages=("iroh",))


if __name__ == "__main__":
    main()
