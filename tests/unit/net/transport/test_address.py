"""Addresses: written, read, and found on this machine."""

import ipaddress
import socket
from collections.abc import Callable
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import ConfigError
from weft.net.messages import MAX_ADDRESSES
from weft.net.transport import address
from weft.net.transport.address import fault_of, join_address, network_of, reachable_hosts, split_address
from weft.net.transport.iroh import IrohConfig
from weft.net.transport.tls import TlsConfig


@given(st.ip_addresses().map(str), st.integers(min_value=1, max_value=65535))
def test_an_address_is_read_as_it_was_written(host: str, port: int) -> None:
    assert split_address("tls", join_address("tls", host, port)) == (host, port)


@given(st.text(max_size=60))
def test_any_text_is_an_address_or_a_value_error(text: str) -> None:
    try:
        host, port = split_address("tls", text)
    except ValueError:
        return
    assert host
    assert 1 <= port <= 65535


@pytest.mark.parametrize(
    "text", ["", "tls://", "tls://host", "tls://host:0", "tls://host:1/path", "iroh://host:1", "tls://:1", "host:1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"tls://host:port"):
        split_address("tls", text)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def have(**interfaces: list[str]) -> None:
        entries = {
            name: [
                SimpleNamespace(family=socket.AF_INET6 if ":" in each else socket.AF_INET, address=each)
                for each in addresses
            ]
            for name, addresses in interfaces.items()
        }
        entries["mac"] = [SimpleNamespace(family=psutil.AF_LINK, address="00:00:5e:00:53:01")]
        stats = {name: SimpleNamespace(isup=not name.startswith("down")) for name in entries}
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: entries)
        monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)

    return have


def test_public_addresses_come_first_and_loopback_last(machine: Callable[..., None]) -> None:
    machine(lo=["127.0.0.1", "::1"], lan=["192.168.1.5", "fe80::1%lan"], wan=["8.8.8.8", "2a00::5"], down=["10.0.0.1"])
    assert reachable_hosts("::") == ["8.8.8.8", "2a00::5", "192.168.1.5", "127.0.0.1"]
    assert reachable_hosts("0.0.0.0") == ["8.8.8.8", "192.168.1.5", "127.0.0.1"]


def test_the_network_that_leads_away_comes_before_virtual_ones(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(docker=["172.17.0.1"], lan=["192.168.1.5"])
    monkeypatch.setattr(address, "_leading_away", lambda: {ipaddress.ip_address("192.168.1.5")})
    assert reachable_hosts("0.0.0.0") == ["192.168.1.5", "172.17.0.1", "127.0.0.1"]


def test_a_socket_on_one_address_has_that_one(machine: Callable[..., None]) -> None:
    machine(lan=["192.168.1.5"])
    assert reachable_hosts("192.168.1.5") == ["192.168.1.5"]


def test_a_machine_without_network_has_itself(machine: Callable[..., None]) -> None:
    machine(lo=["127.0.0.1"])
    assert reachable_hosts("0.0.0.0") == ["127.0.0.1"]


def test_many_interfaces_are_cut_to_the_best(machine: Callable[..., None]) -> None:
    machine(lan=[f"10.0.0.{number}" for number in range(1, 60)], wan=["8.8.8.8"])
    hosts = reachable_hosts("::")
    assert len(hosts) == MAX_ADDRESSES
    assert (hosts[0], hosts[-1]) == ("8.8.8.8", "127.0.0.1")


@pytest.mark.parametrize(
    "place",
    ["host:1", "a.b-c.example:65535", "203.0.113.7:4433", "[2001:db8::1]:4433", "xn--mller-kva.test:45", "a_b:9"],
)
def test_what_others_can_be_told_has_no_fault(place: str) -> None:
    assert fault_of(place) is None
    assert TlsConfig(advertise=(place,)).advertise == (place,)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("", "is empty"),
        (" ", "is empty"),
        ("host", "has no port"),
        ("host:", "has no port"),
        ("host:x", "has no port"),
        ("host:0", "port 0 is none"),
        ("host:99999", "port 99999 is none"),
        ("bad host:1", "not the name of a host"),
        ("-a:1", "not the name of a host"),
        (":1", "not the name of a host"),
        ("::1:45", "needs brackets"),
        ("[::g]:45", "not an IPv6 address"),
        ("[127.0.0.1]:45", "not an IPv6 address"),
        ("ü.test:45", "xn--tda.test"),
        ("tls://host:1", "is a URL"),
    ],
)
def test_what_others_could_not_use_is_refused_before_they_are_told(place: str, words: str) -> None:
    assert words in (fault_of(place) or "")
    with pytest.raises(ConfigError, match=r"tls\.advertise: .*Allowed: .host:port"):
        TlsConfig(advertise=("good:1", place))


def test_an_address_that_stands_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="is there twice"):
        TlsConfig(advertise=("host:1", "host:1"))


@pytest.mark.parametrize("hosts", [("localhost",), ("127.0.0.1:5",), ("",), ("fe80::1%e0",), ("0.0.0.0", "127.0.0.1")])
def test_what_iroh_cannot_bind_is_refused(hosts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"iroh\.hosts: "):
        IrohConfig(hosts=hosts)
    assert IrohConfig(hosts=("127.0.0.1", "::1")).hosts == ("127.0.0.1", "::1")


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("203.0.113.9", "203.0.113.9"),
        ("::ffff:203.0.113.9", "203.0.113.9"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("fe80::9", "fe80::9"),  # everybody's of one line
        ("127.0.0.1", None),
        ("::1", None),
        ("::ffff:127.0.0.1", None),
        ("", None),
        ("relay", None),
    ],
)
def test_one_owner_has_an_address_or_64_bits(host: str, network: str | None) -> None:
    assert network_of(host) == network
