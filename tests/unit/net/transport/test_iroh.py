"""What of the iroh transport needs no network: what is loaded when, the mended copy, addresses, errors.

Its streams are tested by tests/contract/test_transport.py, in a network namespace.
"""

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from weft.config import from_tree
from weft.errors import ConfigError, DialError, NetError
from weft.keys import Identity
from weft.net.transport.base import Lane, Stream
from weft.net.transport.iroh import IrohConfig, IrohTransport, explain, mend


async def nobody(stream: Stream, lane: Lane) -> None:
    raise AssertionError("no stream was expected")


def test_nothing_of_iroh_is_loaded_or_opened_before_start() -> None:
    script = (
        "import sys, socket\n"
        "opened = []\n"
        "sys.addaudithook(lambda event, args: opened.append(event) if event == 'socket.__new__' else None)\n"
        "from weft.keys import Identity\n"
        "from weft.net.transport.iroh import IrohConfig, IrohTransport\n"
        "from weft.net.transport.tls import TlsConfig, TlsTransport\n"
        "identity = Identity.generate()\n"
        "IrohTransport(identity, IrohConfig()), TlsTransport(identity, TlsConfig())\n"
        "assert 'iroh' not in sys.modules, 'iroh was imported'\n"
        "assert opened == [], opened\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


async def test_a_machine_without_iroh_is_told_to_use_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "iroh", None)
    with pytest.raises(NetError, match=r"does not run on this machine.*with tls only.*transports = \['tls'\]"):
        await IrohTransport(Identity.generate(), IrohConfig()).start(nobody)


async def test_dialling_before_start_is_an_error() -> None:
    with pytest.raises(DialError, match="not running"):
        await IrohTransport(Identity.generate(), IrohConfig()).dial(Identity.generate().peer, "iroh://x", "bulk")


# --- the mended copy ---


class Builder:
    """The binding's buffer, with its loop over single bytes and a buffer of our own instead of Rust's."""

    def __init__(self) -> None:
        self.rbuf = self._make(0)

    def _make(self, capacity: int) -> SimpleNamespace:
        memory = (ctypes.c_char * max(capacity, 1))()
        data = ctypes.cast(memory, ctypes.POINTER(ctypes.c_char))
        return SimpleNamespace(memory=memory, data=data, len=0, capacity=capacity, free=lambda: None)

    @contextmanager
    def _reserve(self, num_bytes: int) -> Iterator[None]:
        old, self.rbuf = self.rbuf, self._make(self.rbuf.len + num_bytes)
        ctypes.memmove(self.rbuf.data, old.data, old.len)
        self.rbuf.len = old.len
        yield
        self.rbuf.len += num_bytes

    def write(self, value: Any) -> None:
        with self._reserve(len(value)):
            for i, byte in enumerate(value):
                self.rbuf.data[self.rbuf.len + i] = byte

    def finalize(self) -> SimpleNamespace:
        return self.rbuf


def make_binding(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(_UniffiRustBufferBuilder=type("Fresh", (Builder,), changes))


def test_the_loop_is_replaced_by_one_that_copies_right() -> None:
    binding = make_binding()
    original = binding._UniffiRustBufferBuilder.write
    assert mend(binding)
    assert binding._UniffiRustBufferBuilder.write is not original
    builder = binding._UniffiRustBufferBuilder()
    for value in (b"read", bytearray(b" and "), memoryview(b"written")[0:], memoryview(bytearray(b"XX!X"))[2:3]):
        builder.write(value)
    assert ctypes.string_at(builder.rbuf.data, builder.rbuf.len) == b"read and written!"


def test_a_binding_without_the_loop_is_left_alone() -> None:
    def write(self: Any, value: bytes) -> None:
        """What uniffi 0.32 does, for all we care."""

    binding = make_binding(write=write)
    assert mend(binding)
    assert binding._UniffiRustBufferBuilder.write is write


def test_mending_twice_changes_nothing() -> None:
    binding = make_binding()
    mend(binding)
    mended = binding._UniffiRustBufferBuilder.write
    assert mend(binding)
    assert binding._UniffiRustBufferBuilder.write is mended


@pytest.mark.parametrize(
    "binding", [SimpleNamespace(), SimpleNamespace(_UniffiRustBufferBuilder=type("Other", (), {"write": print}))]
)
def test_a_binding_of_another_shape_is_left_alone(binding: SimpleNamespace) -> None:
    before = dict(vars(binding))
    assert not mend(binding)
    assert vars(binding) == before


def test_a_copy_that_fails_its_test_is_undone() -> None:
    @contextmanager
    def _reserve(self: Any, num_bytes: int) -> Iterator[None]:
        with Builder._reserve(self, num_bytes):
            yield
            self.rbuf.data[0] = b"?"  # as if the buffer were laid out otherwise

    binding = make_binding(_reserve=_reserve)
    original = binding._UniffiRustBufferBuilder.write
    assert not mend(binding)
    assert binding._UniffiRustBufferBuilder.write is original


def test_the_iroh_that_is_installed_sends_fast() -> None:
    iroh = pytest.importorskip("iroh", reason="iroh has no wheel for this platform")
    assert mend(iroh.iroh_ffi)
    assert "enumerate" not in iroh.iroh_ffi._UniffiRustBufferBuilder.write.__code__.co_names


# --- addresses and errors ---


@pytest.fixture
def dialer() -> IrohTransport:
    transport = IrohTransport(Identity.generate(), IrohConfig(relays=("https://mine.example",)))
    transport._iroh = pytest.importorskip("iroh", reason="iroh has no wheel for this platform")
    return transport


def test_an_address_holds_all_ways_to_a_peer(dialer: IrohTransport) -> None:
    peer = Identity.generate().peer
    target = dialer._target(peer, f"iroh://{peer}?addr=192.0.2.1:7&addr=[2001:db8::1]:8")
    assert target.id().to_bytes().hex() == peer
    assert target.direct_addresses() == ["192.0.2.1:7", "[2001:db8::1]:8"]
    assert target.relay_url() is None


def test_only_a_relay_that_the_user_named_is_used(dialer: IrohTransport) -> None:
    peer = Identity.generate().peer
    foreign = dialer._target(peer, f"iroh://{peer}?addr=192.0.2.1:7&relay=https://theirs.example/")
    assert foreign.relay_url() is None
    own = dialer._target(peer, f"iroh://{peer}?relay=https://theirs.example&relay=https://mine.example/")
    assert own.relay_url() == "https://mine.example/"


@pytest.mark.parametrize("shape", ["tls://{peer}?addr=192.0.2.1:7", "iroh://{other}?addr=192.0.2.1:7", "iroh:{peer}"])
def test_an_address_of_somebody_else_is_refused(dialer: IrohTransport, shape: str) -> None:
    peer, other = Identity.generate().peer, Identity.generate().peer
    with pytest.raises(ValueError, match="not an iroh address of"):
        dialer._target(peer, shape.format(peer=peer, other=other))


def test_an_error_says_what_iroh_hides() -> None:
    message = "Failed to bind (/home/somebody/src/socket.rs:943:24)\nCaused by:\n    Address in use"
    error = SimpleNamespace(message=lambda: message, kind=lambda: SimpleNamespace(name="BIND"))
    assert explain(error) == "Failed to bind: Address in use (bind)"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "ConnectingError::ConnectionError (/home/somebody/x.rs:1:2)\nCaused by:\n    aborted by peer: 0",
            "the other side ended the connection",
        ),
        ("ConnectError::Connect\n\nCaused by:\n    0: no route\n    1: net::Down", "no route (internal)"),
    ],
)
def test_an_error_names_no_place_in_its_source(message: str, said: str) -> None:
    error = SimpleNamespace(message=lambda: message, kind=lambda: SimpleNamespace(name="INTERNAL"))
    assert explain(error) == said


@pytest.mark.parametrize("relays", [(), ("https://mine.example", "http://192.0.2.7:3340")])
async def test_the_endpoint_gets_the_relays_of_the_settings_and_no_others(relays: tuple[str, ...]) -> None:
    bound: list[Any] = []

    async def bind(options: SimpleNamespace) -> str:
        bound.append(options)
        return "endpoint"

    transport = IrohTransport(Identity.generate(), IrohConfig(hosts=("127.0.0.1",), relays=relays))
    transport._iroh = SimpleNamespace(
        Preset=object,
        RelayMode=SimpleNamespace(custom_from_urls=lambda urls: ("custom", urls), disabled=lambda: "disabled"),
        EndpointOptions=SimpleNamespace,
        Endpoint=SimpleNamespace(bind=bind),
    )
    assert await transport._bind_to(("127.0.0.1",), 0) == "endpoint"
    assert bound[0].relay_mode == (("custom", list(relays)) if relays else "disabled")


def test_a_relay_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="relays"):
        from_tree({"relays": ["mine.example"]}, IrohConfig, where="machine.toml")
