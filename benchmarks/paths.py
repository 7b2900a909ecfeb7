"""Which way two peers find to each other, how soon and how fast, where networks stand in between; and what is said.

    python -m benchmarks.paths

Two peers, a and b, each know the address of a third alone, the member they were invited by. Set-up time runs from the
moment a hears of b until their link stands. Then a fetches a blob from b, and `weft doctor` examines on a's machine a
ticket that names the third. In the networks of `CLOSED` a reaches nobody: there `weft join` is tried, too, and
what both say is kept word by word. Networks are namespaces of Linux with virtual cables, `tc tbf` for their rate and
iptables for routers; the kernel adds no delay to them.

It needs root, or user namespaces with iptables in them, and says so where it has neither.
"""

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._paths_nets import Nets
from benchmarks._paths_peer import RUN
from benchmarks.report import load, load_line, table, write
from weft.errors import Unreachable
from weft.ids import PeerId
from weft.keys import Identity
from weft.net.messages import Contact
from weft.net.ticket import issue

HERE = Path(__file__).parent
MBPS = 100
NBYTES = 24 << 20
DEADLINE_S = 60.0
COMMAND_S = 240.0  # for a command to end on a busy machine
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
        self.name = name
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
    nets.rule("a", "-A OUTPUT -o wide0 -p udp -j DROP")


def tcp_blocked_at_a(nets: Nets) -> None:
    open_network(nets)
    nets.rule("a", "-A OUTPUT -o wide0 -p tcp -j DROP")


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
    "TCP swallowed at a": tcp_blocked_at_a,
    "TCP swallowed between a and b": tcp_blocked,
    "each on a cable to the third alone": third_alone,
    "a behind a cone NAT, b open": one_cone,
    "both behind cone NATs": homes(False),
    "both behind symmetric NATs": homes(True),
    "both behind two cone NATs": homes(False, double=True),
    "both behind cone NATs, UDP blocked": cone_without_udp,
    "a reaches nothing but an HTTP proxy, b open": proxied,
}


def nobody_open(nets: Nets) -> None:
    nets.home("relay", "203.0.113.40", "192.168.4", symmetric=False)
    nets.home("a", "203.0.113.10", "192.168.1", symmetric=False)


def proxy_unnamed(nets: Nets) -> None:
    nets.wide("relay", RELAY)
    proxied(nets)


CLOSED: dict[str, Callable[[Nets], None]] = {
    "nobody open: a and the third behind cone NATs": nobody_open,
    "a reaches nothing but an HTTP proxy, which it is not told of": proxy_unnamed,
}


def measure(name: str) -> dict[str, Any]:
    """Return what one network comes to."""
    with Nets(MBPS) as nets, tempfile.TemporaryDirectory() as home:
        nets.wide("relay", RELAY)
        NETWORKS[name](nets)
        relay_at = AT_CABLE if NETWORKS[name] is third_alone else dict.fromkeys(("a", "b"), RELAY)
        relay = Peer(nets, "relay", RELAY)
        third = contact(relay)
        options = {"proxy": f"http://10.1.1.1:{PROXY_PORT}"} if NETWORKS[name] is proxied else {}
        a, _b = Peer(nets, "a", relay_at["a"], **options), Peer(nets, "b", relay_at["b"])
        ticket = issue(RUN, [third], None)
        found = {"network": name, "way": "none", **meet(a)}
        return {**found, "doctor": doctor(nets, Path(home), ticket, options.get("proxy", ""))}


def meet(a: Peer) -> dict[str, Any]:
    """Return how a found to b, and how fast bytes come from there; nothing where it did not."""
    heard = a.await_word(lambda word: word["event"] == "heard" and word["peer"] == KEYS["b"])
    up = heard and a.await_word(lambda word: word["event"] == "up" and word["peer"] == KEYS["b"])
    if not heard or not up:
        return {}
    a.tell(fetch=KEYS["b"])
    fetched = a.await_word(lambda word: word["event"] in ("fetched", "failed"))
    is_fetched = fetched is not None and fetched["event"] == "fetched"
    return {
        "way": {"via": "via the third"}.get(up["transport"], up["transport"]),
        "to_third": next(
            word["transport"] for word in a.heard if word["event"] == "up" and word["peer"] == KEYS["relay"]
        ),
        "set_up_s": up["at"] - heard["at"],
        "megabytes_per_s": NBYTES / 1e6 / fetched["seconds"] if fetched is not None and is_fetched else None,
    }


def shut(name: str) -> dict[str, Any]:
    """Return what is said on the machine a, from which no way leads into the run."""
    with Nets(MBPS) as nets, tempfile.TemporaryDirectory() as home:
        CLOSED[name](nets)
        ticket = issue(RUN, [contact(Peer(nets, "relay", RELAY))], None)
        done = weft(nets, Path(home), "join", at(Path(home), ticket), "--yes", "--quiet")
        if done.returncode != Unreachable.exit_code:
            raise RuntimeError(f"{name}: join ended with {done.returncode}: {done.stderr}")
        join = {"exit": done.returncode, "said": done.stderr.strip()}
        return {"network": name, "way": "none", "join": join, "doctor": doctor(nets, Path(home), ticket)}


def contact(peer: Peer) -> Contact:
    """Return what a ticket says of a peer, once it listens."""
    started = peer.await_word(lambda word: word["event"] == "started")
    if started is None:
        raise RuntimeError(f"the peer {peer.name} did not start")
    shown = {"relay": "third"}.get(peer.name, peer.name)
    return Contact(peer=PeerId(KEYS[peer.name]), name=shown, addresses=tuple(started["addresses"]))


def doctor(nets: Nets, home: Path, ticket: str, proxy: str = "") -> dict[str, Any]:
    """Return what `weft doctor -` finds on the machine a of the network: level and words, by topic."""
    machine = home / "machine.toml"
    machine.write_text(f'[tls]\nproxy = "{proxy}"\n' if proxy else "")
    done = weft(nets, home, "doctor", at(home, ticket), "--json", "--machine", str(machine))
    told = json.loads(done.stdout)
    paths = [each["facts"]["outcome"] for each in told["findings"] if each["topic"] == "path"]
    network = [each for each in told["findings"] if each["topic"] in ("ways", "place", "speed")]
    return {
        "exit": done.returncode,
        "blocks": [each["topic"] for each in told["findings"] if each["level"] == "block"],
        "paths": {outcome: paths.count(outcome) for outcome in sorted(set(paths))},
        **{each["topic"]: {key: each[key] for key in ("level", "text", "fix", "facts")} for each in network},
    }


def at(folder: Path, ticket: str) -> str:
    """Return the word by which a command finds a ticket and no list of processes shows it."""
    file = folder / "ticket.txt"
    file.write_text(ticket)
    return f"@{file}"


def weft(nets: Nets, home: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "weft", "--home", str(home), *words]
    return nets.call("a", command, COMMAND_S)


def may_run() -> str | None:
    """Return why the networks cannot be made here, or None."""
    missing = [tool for tool in ("unshare", "ip", "tc", "iptables", "sysctl") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (Linux) for networks of its own"
    done = subprocess.run([*ENTER, "sh", "-ec", PROBE], capture_output=True, text=True, timeout=20, check=False)
    return f"cannot make networks of its own here: {done.stderr.strip()[:200]}" if done.returncode else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", default="", help="part of a network's name: what it comes to is printed as JSON, no report written"
    )
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
    measured = []
    for name in (*NETWORKS, *CLOSED):
        if options.only in name:
            measured.append(measure(name) if name in NETWORKS else shut(name))
            print(json.dumps(measured[-1]), file=sys.stdout if options.only else sys.stderr, flush=True)
    if not options.only:
        report(measured, load_line(before))


def report(measured: list[dict[str, Any]], busy: str) -> None:
    joined = [each for each in measured if "join" not in each]
    figures = ("way", "to_third", "set_up_s", "megabytes_per_s")
    sections = [
        f"A fetches {NBYTES >> 20} MiB; a line has {MBPS} Mbit/s each way. What passes through the third is bounded "
        "by its own settings, here the default of 20 Mbit/s.",
        table(
            ["network", "way from a to b", "from a to the third", "set-up, s", "a fetches, MB/s"],
            [[each["network"], *("-" if each.get(key) is None else each[key] for key in figures)] for each in joined],
        ),
        "## What `weft doctor -` says at a\n\nThe ticket names the third. Outcomes are "
        "those of the ticket's addresses, among which are the private and loopback ones of its members.",
        table(
            ["network", "outcomes", "`ways`", "`place`", "exit code"],
            [
                [
                    each["network"],
                    ", ".join(f"{number} {outcome}" for outcome, number in each["doctor"]["paths"].items()),
                    said_of(each, "ways"),
                    said_of(each, "place"),
                    each["doctor"]["exit"],
                ]
                for each in measured
            ],
        ),
        "## What is said where there is no way",
        *(quoted(each) for each in measured if "join" in each),
        busy,
    ]
    write("paths", "Ways to each other", "python -m benchmarks.paths", sections, packages=("iroh",))


def said_of(each: dict[str, Any], topic: str) -> str:
    found = each["doctor"].get(topic)
    return "-" if found is None else f"{found['level']}: {found['text'].partition(':')[0]}"


def quoted(each: dict[str, Any]) -> str:
    """Return what a person reads who joins, and what the doctor says, word by word."""
    ways = each["doctor"]["ways"]
    return (
        f"{each['network']}. `weft join` ends with {each['join']['exit']}:\n\n> {each['join']['said']}\n\n"
        f"`weft doctor` ends with {each['doctor']['exit']}:\n\n> {ways['level']}: {ways['text']}\n>\n"
        f"> fix: {ways['fix']}"
    )


if __name__ == "__main__":
    main()
