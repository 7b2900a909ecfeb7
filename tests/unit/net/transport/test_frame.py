"""Frames survive any cut of the stream; nothing else is taken for one."""

import asyncio
import itertools
import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import WireError
from weft.ids import PeerId
from weft.net.transport.frame import FRAME_VERSION, MAX_FRAME_NBYTES, FrameReader, encode_frame, write_frame


class Script:
    """A stream that yields given pieces, then its orderly end; what is sent is kept."""

    peer = PeerId("00" * 32)

    def __init__(self, pieces: Sequence[bytes] = ()) -> None:
        self._pieces = [piece for piece in pieces if piece]
        self.sent: list[bytes] = []
        self.largest_request = 0

    async def send(self, data: bytes | bytearray | memoryview) -> None:
        self.sent.append(bytes(data))

    async def recv_into(self, buffer: memoryview) -> int:
        self.largest_request = max(self.largest_request, len(buffer))
        if not self._pieces:
            return 0
        piece = self._pieces.pop(0)
        if len(piece) > len(buffer):
            self._pieces.insert(0, piece[len(buffer) :])
        num_bytes = min(len(piece), len(buffer))
        buffer[:num_bytes] = piece[:num_bytes]
        return num_bytes

    async def close(self) -> None:
        pass


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:stop] for start, stop in itertools.pairwise(edges)]


def read_all(reader: FrameReader) -> list[bytes]:
    async def run() -> list[bytes]:
        found = []
        while (payload := await reader.read()) is not None:
            found.append(payload)
        return found

    return asyncio.run(run())


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(min_value=0), max_size=12), st.booleans())
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(
    payloads: list[bytes], places: list[int], reads_ahead: bool
) -> None:
    data = b"".join(encode_frame(payload) for payload in payloads)
    stream = Script(cut(data, places))
    reader = FrameReader(stream) if reads_ahead else FrameReader(stream, read_ahead_nbytes=0)
    assert read_all(reader) == payloads


@given(st.binary(max_size=200), st.lists(st.integers(min_value=0), max_size=5))
def test_garbage_is_frames_or_a_wire_error(data: bytes, places: list[int]) -> None:
    try:
        found = read_all(FrameReader(Script(cut(data, places)), max_nbytes=100))
    except WireError:
        return
    assert b"".join(encode_frame(payload) for payload in found) == data


@given(st.binary(min_size=1, max_size=50), st.data())
def test_a_frame_that_stops_short_is_a_wire_error(payload: bytes, data: st.DataObject) -> None:
    frame = encode_frame(payload)
    stop = data.draw(st.integers(min_value=1, max_value=len(frame) - 1))
    with pytest.raises(WireError, match="stream ended after"):
        read_all(FrameReader(Script([frame[:stop]])))


def test_the_layout_is_the_documented_one() -> None:
    assert encode_frame(b"weft") == bytes.fromhex("0000000401") + b"weft"


def test_a_frame_is_sent_in_one_piece() -> None:
    stream = Script()
    asyncio.run(write_frame(stream, memoryview(b"abc")))
    assert stream.sent == [encode_frame(b"abc")]


def test_a_payload_over_the_bound_is_not_sent() -> None:
    stream = Script()
    with pytest.raises(WireError, match="blob"):
        asyncio.run(write_frame(stream, bytes(MAX_FRAME_NBYTES + 1)))
    assert stream.sent == []
    asyncio.run(write_frame(stream, bytes(MAX_FRAME_NBYTES)))
    assert read_all(FrameReader(Script(stream.sent))) == [bytes(MAX_FRAME_NBYTES)]


def test_a_frame_over_the_bound_is_dropped_before_its_payload_is_read() -> None:
    stream = Script([struct.pack(">IB", 0xFFFFFFFF, FRAME_VERSION), b"x" * 100])
    with pytest.raises(WireError, match="exceeds the bound"):
        read_all(FrameReader(stream))
    assert stream.largest_request < MAX_FRAME_NBYTES


def test_another_version_is_named() -> None:
    with pytest.raises(WireError, match="version 9"):
        read_all(FrameReader(Script([struct.pack(">IB", 1, 9), b"x"])))


def test_raw_bytes_follow_a_frame() -> None:
    body = bytes(range(256)) * 1000
    stream = Script(cut(encode_frame(b"header") + body + encode_frame(b"trailer"), [3, 50, 100_000]))
    reader = FrameReader(stream)

    async def run() -> None:
        assert await reader.read() == b"header"
        into, filled = memoryview(bytearray(len(body))), 0
        while filled < len(body):
            filled += await reader.recv_into(into[filled:])
        assert into == body
        assert await reader.read() == b"trailer"
        assert await reader.read() is None

    asyncio.run(run())


def test_what_has_come_whole_is_at_hand() -> None:
    async def run() -> None:
        reader = FrameReader(Script([b"".join(map(encode_frame, (b"one", b"two", b""))) + encode_frame(b"four")[:-1]]))
        assert reader.at_hand() is None  # nothing was read yet
        assert await reader.read() == b"one"
        assert [reader.at_hand() for _ in range(3)] == [b"two", b"", None]
        with pytest.raises(WireError, match="3 of the 4"):
            await reader.read()

    asyncio.run(run())


def test_what_is_wrong_with_a_frame_at_hand_is_told_where_it_is_read() -> None:
    async def run() -> None:
        too_long = encode_frame(bytes(11))
        reader = FrameReader(Script([encode_frame(b"one") + too_long]), max_nbytes=10)
        assert await reader.read() == b"one"
        assert reader.at_hand() is None
        with pytest.raises(WireError, match="exceeds the bound"):
            await reader.read()

    asyncio.run(run())


def test_a_reader_that_reads_nothing_ahead_leaves_the_rest() -> None:
    stream = Script([encode_frame(b"first") + b"rest"])

    async def run() -> bytes:
        assert await FrameReader(stream, read_ahead_nbytes=0).read() == b"first"
        buffer = bytearray(10)
        return bytes(buffer[: await stream.recv_into(memoryview(buffer))])

    assert asyncio.run(run()) == b"rest"


@pytest.mark.parametrize(("num", "size", "ready"), [(8, 10, 7), (1, 10, 0), (3, 40_000, 1), (300, 1000, 65)])
def test_how_many_frames_came_with_the_one_that_was_read(num: int, size: int, ready: int) -> None:
    """The buffer holds 64 KiB: as much as fits counts for any number."""

    async def run() -> None:
        reader = FrameReader(Script([b"".join([encode_frame(bytes(size))] * num)]))
        await reader.read()
        assert reader.num_refills == 1
        assert reader.has_ready(ready)
        assert reader.has_ready(ready + 1) == (num * size >= 1 << 16)

    asyncio.run(run())
