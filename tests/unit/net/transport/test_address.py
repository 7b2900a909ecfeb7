"""Addresses: written, read, and found on this machine."""

import socket
from collections.abc import Callable
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.net.messages import MAX_ADDRESSES
from weft.net.transport.address import join_address, reachable_hosts, split_address


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
