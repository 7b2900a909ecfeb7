"""Canonical bytes: one record, one byte string, one digest; anything else is a WireError."""

from typing import Any

import msgspec
import pytest
from blake3 import blake3
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weft import keys, wire
from weft.errors import WireError
from weft.ids import PeerId

IDENTITY = keys.Identity.from_seed(bytes(range(32)))


class Point(wire.Record, frozen=True, kw_only=True):
    y: int
    x: int


class Cloud(wire.Record, frozen=True, kw_only=True, tag=True):
    name: str
    points: tuple[Point, ...] = ()
    weights: dict[str, float] = msgspec.field(default_factory=dict)
    blob: bytes = b""
    parent: "Cloud | None" = None
    is_open: bool = False


class Rain(wire.Record, frozen=True, kw_only=True, tag=True):
    amount: float


Weather = Cloud | Rain

POINTS = st.builds(Point, x=st.integers(-(2**63), 2**64 - 1), y=st.integers(-(2**63), 2**64 - 1))
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
CLOUDS = st.recursive(
    st.builds(
        Cloud,
        name=TEXT,
        points=st.lists(POINTS, max_size=4).map(tuple),
        weights=st.dictionaries(TEXT, st.floats(allow_nan=False), max_size=4),
        blob=st.binary(max_size=40),
        is_open=st.booleans(),
    ),
    lambda inner: st.builds(lambda cloud, parent: msgspec.structs.replace(cloud, parent=parent), inner, inner),
    max_leaves=4,
)


def test_the_bytes_are_those_written_down() -> None:
    cloud = Cloud(name="é", points=(Point(y=-1, x=300),), weights={"b": 1.0, "a": -0.5}, blob=b"\x00\xff")
    assert wire.encode(cloud).hex() == (
        "87a4626c6f62c40200ffa769735f6f70656ec2a46e616d65a2c3a9a6706172656e74c0a6706f696e74739182a178cd012ca1"
        "79ffa474797065a5436c6f7564a77765696768747382a161cbbfe0000000000000a162cb3ff0000000000000"
    )
    assert wire.digest_of(cloud) == "96e22fb4932151b085d2d2eb899ced0df7ccdede90e746e5866f4c41dd180a34"


def test_the_digest_is_the_published_blake3() -> None:
    # First vector of the BLAKE3 authors' test set: the empty input.
    assert wire.digest(b"") == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


def test_a_signed_record_is_the_one_written_down() -> None:
    signed = wire.seal(IDENTITY, Point(y=2, x=1))
    assert signed.signer == "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"
    assert signed.signature.hex() == (
        "775e0cabf917ab699e744b547d30ae9e608cc559b77865f897e641b38fe6d26c"
        "4bf29c337f8956e4167e5cc7f76238bcf4e801925a11419a14a2151a4d22df03"
    )
    assert wire.digest_of(signed) == "965dea9f4497dcb573280667ec0ba32a57b577a665c8c937b863cf01dd3b1cc5"


@pytest.mark.parametrize("nbytes", [0, 1, 1023, 1 << 20, (1 << 20) + 1, (1 << 20) - 1, 3 << 20])
def test_threads_do_not_change_a_digest(nbytes: int) -> None:
    data = bytes(nbytes)
    assert wire.digest(data) == blake3(data, max_threads=1).hexdigest()
    assert wire.digest(memoryview(data)) == wire.digest(bytearray(data)) == wire.digest(data)


@given(CLOUDS)
def test_a_record_comes_back_equal(cloud: Cloud) -> None:
    assert wire.decode(wire.encode(cloud), Weather) == cloud


@given(st.permutations(["a", "b", "c", "dd", ""]))
def test_the_order_of_a_mapping_does_not_matter(names: list[str]) -> None:
    weights = {name: float(len(name)) for name in names}
    assert wire.encode(Cloud(name="", weights=weights)) == wire.encode(
        Cloud(name="", weights=dict(sorted(weights.items())))
    )


def decodes_or_refuses(data: bytes, kind: Any) -> None:
    try:
        record = wire.decode(data, kind)
    except WireError:
        return
    assert wire.encode(record) == data


@settings(max_examples=200)
@given(st.binary(max_size=200))
@example(b"")
@example(b"\x81" * 4000)  # deeply nested
@example(b"\x83\xa1x\x01\xa1x\x01\xa1y\x02")  # a field twice
@example(b"\xdd\xff\xff\xff\xff")  # four thousand million elements announced
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\xc6\xff\xff\xff\xff")
@example(b"\xc7\x05\xff12345")  # an extension
def test_no_bytes_do_more_than_a_wire_error(data: bytes) -> None:
    for kind in (Point, Weather, wire.Signed):
        decodes_or_refuses(data, kind)


@pytest.mark.full
@settings(max_examples=150)
@given(CLOUDS, st.data())
def test_no_damaged_record_does_more_than_a_wire_error(cloud: Cloud, data: st.DataObject) -> None:
    raw = bytearray(wire.encode(cloud))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
        if not raw:
            break
    decodes_or_refuses(bytes(raw), Weather)


@given(CLOUDS, st.data())
def test_a_truncated_record_is_refused(cloud: Cloud, data: st.DataObject) -> None:
    raw = wire.encode(cloud)
    with pytest.raises(WireError):
        wire.decode(raw[: data.draw(st.integers(0, len(raw) - 1))], Weather)


@given(CLOUDS, st.binary(min_size=1, max_size=8))
def test_a_record_with_bytes_after_it_is_refused(cloud: Cloud, tail: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode(wire.encode(cloud) + tail, Weather)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"\x82\xa1y\x02\xa1x\x01", "fields out of order"),
        (b"\x82\xa1x\xcc\x01\xa1y\x02", "a number longer than needed"),
        (b"\x82\xa1x\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00\xa1y\x02", "a float for an integer"),
        (b"\xde\x00\x02\xa1x\x01\xa1y\x02", "a map header longer than needed"),
        (b"\x82\xd9\x01x\x01\xa1y\x02", "a text header longer than needed"),
        (b"\x83\xa1x\x01\xa1x\x01\xa1y\x02", "a field twice"),
    ],
)
def test_another_spelling_of_a_record_is_refused(raw: bytes, why: str) -> None:
    assert wire.decode(b"\x82\xa1x\x01\xa1y\x02", Point) == Point(x=1, y=2)
    with pytest.raises(WireError):
        wire.decode(raw, Point)


def test_float32_is_not_another_spelling_of_float64() -> None:
    raw = wire.encode(Rain(amount=1.5))
    short = raw.replace(b"\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00", b"\xca\x3f\xc0\x00\x00")
    assert short != raw
    with pytest.raises(WireError, match="not canonical"):
        wire.decode(short, Rain)


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(WireError, match="unknown field"):
        wire.decode(msgspec.msgpack.encode({"x": 1, "y": 2, "z": 3}), Point)


def test_what_a_peer_wrote_does_not_flood_the_error() -> None:
    with pytest.raises(WireError, match="unknown field") as caught:
        wire.decode(msgspec.msgpack.encode({"x" * 100_000: 1}), Point)
    assert len(str(caught.value)) < 400


def test_a_record_over_the_bound_is_refused_unread() -> None:
    raw = wire.encode(Cloud(name="", blob=bytes(100)))
    assert wire.decode(raw, Cloud, max_nbytes=len(raw)).blob == bytes(100)
    with pytest.raises(WireError, match="dropped unread"):
        wire.decode(raw, Cloud, max_nbytes=len(raw) - 1)
    with pytest.raises(WireError, match=str(wire.MAX_RECORD_NBYTES)):
        wire.decode(bytes(wire.MAX_RECORD_NBYTES + 1), Cloud)


@pytest.mark.parametrize("buffer", [bytes, bytearray, memoryview])
def test_any_buffer_is_read(buffer: Any) -> None:
    assert wire.decode(buffer(wire.encode(Point(x=1, y=2))), Point) == Point(x=1, y=2)


# --- signatures ---


@given(CLOUDS)
def test_a_sealed_record_unseals(cloud: Cloud) -> None:
    assert wire.unseal(wire.seal(IDENTITY, cloud), Cloud, keys.verify) == cloud


def test_a_signed_envelope_is_itself_a_record() -> None:
    signed = wire.seal(IDENTITY, Point(x=1, y=2))
    assert wire.decode(wire.encode(signed), wire.Signed) == signed


@pytest.mark.parametrize("bit", [0, 7, 100, 511])
def test_a_changed_signature_does_not_hold(bit: int) -> None:
    signed = wire.seal(IDENTITY, Point(x=1, y=2))
    signature = bytearray(signed.signature)
    signature[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError, match="does not hold"):
        wire.unseal(msgspec.structs.replace(signed, signature=bytes(signature)), Point, keys.verify)


def test_a_changed_body_does_not_hold() -> None:
    signed = wire.seal(IDENTITY, Point(x=1, y=2))
    forged = msgspec.structs.replace(signed, body=wire.encode(Point(x=1, y=3)))
    with pytest.raises(WireError, match="does not hold"):
        wire.unseal(forged, Point, keys.verify)


def test_another_signer_does_not_hold() -> None:
    signed = wire.seal(IDENTITY, Point(x=1, y=2))
    other = keys.Identity.from_seed(bytes(32)).peer
    with pytest.raises(WireError, match=f"signature of {other[:8]}"):
        wire.unseal(msgspec.structs.replace(signed, signer=other), Point, keys.verify)


@pytest.mark.parametrize(
    "name", ["", "zz", "é" * 64, IDENTITY.peer.upper(), f" {IDENTITY.peer}", IDENTITY.peer[:-2], "00" * 32]
)
def test_a_signer_that_is_no_peer_does_not_hold(name: str) -> None:
    signed = msgspec.structs.replace(wire.seal(IDENTITY, Point(x=1, y=2)), signer=PeerId(name))
    with pytest.raises(WireError, match="does not hold"):
        wire.unseal(signed, Point, keys.verify)


def test_one_kind_does_not_pass_as_another() -> None:
    class Drop(wire.Record, frozen=True, kw_only=True):  # the same fields as Point, hence the same bytes
        y: int
        x: int

    signed = wire.seal(IDENTITY, Point(x=1, y=2))
    with pytest.raises(WireError, match="expected a signed Drop, got a Point"):
        wire.unseal(signed, Drop, keys.verify)
    with pytest.raises(WireError, match="does not hold"):
        wire.unseal(msgspec.structs.replace(signed, kind="Drop"), Drop, keys.verify)


def test_a_signed_body_that_is_no_such_record_is_refused() -> None:
    body = b"\x82\xa1y\x02\xa1x\x01"  # fields out of order
    message = b"weft.signed.v1\x00Point\x00" + body
    signed = wire.Signed(kind="Point", body=body, signer=IDENTITY.peer, signature=IDENTITY.sign(message))
    with pytest.raises(WireError, match="not canonical"):
        wire.unseal(signed, Point, keys.verify)


def test_a_long_kind_is_cut_in_the_error() -> None:
    signed = msgspec.structs.replace(wire.seal(IDENTITY, Point(x=1, y=2)), kind="k" * 10_000)
    with pytest.raises(WireError) as caught:
        wire.unseal(signed, Point, keys.verify)
    assert len(str(caught.value)) < 200
