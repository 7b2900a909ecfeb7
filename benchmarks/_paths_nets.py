"""Networks of `benchmarks.paths`: machines, home routers and a wide network between, as network namespaces.

    with Nets() as nets:
        nets.wide("relay", "203.0.113.1")                              # a machine with an address of its own
        nets.home("a", "203.0.113.10", "192.168.1", symmetric=False)   # one behind a router
        nets.run("a", [...])                                           # a process there

    a ── 192.168.1.0/24 ── a-router ══ 203.0.113.0/24 ══ relay
                                           ╚═ .254: drops what is for elsewhere, as the internet does private addresses

It must run as root in mount, network and process namespaces of its own: all of it ends with them.
"""

import subprocess
from collections.abc import Sequence
from types import TracebackType

WIDE = "203.0.113"
NOWHERE = f"{WIDE}.254"


def sh(script: str) -> None:
    done = subprocess.run(["sh", "-ec", script], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{script}: {done.stderr.strip()}")


class Nets:
    """Namespaces that are removed at the end, with what runs in them.

    Args:
        mbps: rate of every machine's line, both ways.
    """

    def __init__(self, mbps: int) -> None:
        self._mbps = mbps
        self._names: list[str] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._num_cables = 0

    def __enter__(self) -> "Nets":
        self._add("wide")
        sh(
            "ip -n wide link add bridge type bridge; ip -n wide link set bridge up;"
            f"ip -n wide addr add {NOWHERE}/24 dev bridge"
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        for name in self._names:
            sh(f"ip netns del {name}")

    def wide(self, name: str, address: str) -> None:
        """Add a machine on the wide network."""
        self._add(name)
        self._plug(name, address)

    def pair(self, name: str, other: str, subnet: str) -> None:
        """Add the machine `name` on a cable of its own to `other`: it reaches nobody else."""
        self._add(name)
        far = self._cable(name, other, f"{subnet}.2")
        sh(f"ip -n {other} addr add {subnet}.1/24 dev {far}; ip -n {name} route add default via {subnet}.1")

    def home(self, name: str, address: str, subnet: str, *, symmetric: bool, double: bool = False) -> None:
        """Add the machine `name` behind a router that has `address`.

        Args:
            symmetric: every destination sees another port; else a port is kept where it is free.
            double: behind two routers, as where the provider has one address for many homes.
        """
        router = f"{name}-router"
        self._add(router)
        self._plug(router, address)
        self._translate(router, "wide0", symmetric)
        if double:
            inner = f"{name}-inner"
            self._add(inner)
            far = self._cable(inner, router, "100.64.0.2")
            sh(f"ip -n {router} addr add 100.64.0.1/24 dev {far}; ip -n {inner} route add default via 100.64.0.1")
            self._translate(inner, "eth0", symmetric)
            router = inner
        self.pair(name, router, subnet)

    def proxied(self, name: str, subnet: str) -> str:
        """Add the machine `name`, which reaches a machine with a proxy and nothing else; return the proxy's place."""
        self.wide(f"{name}-proxy", "203.0.113.30")
        self.pair(name, f"{name}-proxy", subnet)
        return f"{subnet}.1"

    def rule(self, name: str, rule: str) -> None:
        """Add an iptables rule in a machine."""
        sh(f"ip netns exec {name} iptables {rule}")

    def run(self, name: str, command: Sequence[str]) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            ["ip", "netns", "exec", name, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._processes.append(process)
        return process

    def call(self, name: str, command: Sequence[str], deadline_s: float) -> "subprocess.CompletedProcess[str]":
        """Run a command in a machine to its end."""
        inside = ["ip", "netns", "exec", name, *command]
        return subprocess.run(inside, capture_output=True, text=True, timeout=deadline_s, check=False)

    def _add(self, name: str) -> None:
        sh(f"ip netns add {name}; ip -n {name} link set lo up")
        self._names.append(name)

    def _plug(self, name: str, address: str) -> None:
        self._num_cables += 1
        port = f"port{self._num_cables}"
        sh(
            f"ip -n {name} link add wide0 type veth peer name {port} netns wide;"
            f"ip -n wide link set {port} master bridge up; ip -n {name} addr add {address}/24 dev wide0;"
            f"ip -n {name} link set wide0 up; ip -n {name} route add default via {NOWHERE}"
        )
        self._limit("wide", port)
        self._limit(name, "wide0")

    def _cable(self, name: str, other: str, address: str) -> str:
        self._num_cables += 1
        far = f"cable{self._num_cables}"
        sh(
            f"ip -n {name} link add eth0 type veth peer name {far} netns {other};"
            f"ip -n {name} addr add {address}/24 dev eth0; ip -n {name} link set eth0 up;"
            f"ip -n {other} link set {far} up"
        )
        self._limit(name, "eth0")
        self._limit(other, far)
        return far

    def _limit(self, name: str, device: str) -> None:
        sh(f"tc -n {name} qdisc add dev {device} root tbf rate {self._mbps}mbit burst 128kb latency 50ms")

    def _translate(self, router: str, outside: str, symmetric: bool) -> None:
        how = "--random-fully" if symmetric else ""
        sh(
            f"ip netns exec {router} sh -ec '"
            "sysctl -qw net.ipv4.ip_forward=1;"
            f"iptables -t nat -A POSTROUTING -o {outside} -j MASQUERADE {how};"
            f"iptables -A FORWARD -i {outside} -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT;"
            f"iptables -A FORWARD -i {outside} -j DROP;"
            f"iptables -A INPUT -i {outside} -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT;"
            f"iptables -A INPUT -i {outside} -j DROP'"
        )
