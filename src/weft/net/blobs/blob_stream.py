"""One blob, or a range of one, on one bulk stream: the request, the header, the bytes.

A kept stream may have died unnoticed: what is asked on it first then fails as `StaleStream`, and a fresh one may work.
"""

import asyncio
from collections.abc import Callable

from weft.errors import DeadlineExceeded, PeerError, WireError
from weft.ids import Digest, short
from weft.net.blobs.bulk import Bulk, read_record
from weft.net.messages import BlobHeader, BlobRequest, RangeRequest
from weft.net.transport.frame import FRAME_S, encode_frame
from weft.wire import Buffer, encode

# The slowest uplink that rounds wait for, 1 Mbit/s, over 31 members that each fetch a payload's part and a result:
# 1e6 / 62 = 16 kbit/s for a stream. A slice then takes 262 s, and who takes none in 292 s is given up.
SLOWEST_STREAM_BPS = 16e3
STALL_S = 15.0  # no byte for so long means that the holder is gone


class StaleStream(PeerError):
    """A kept stream had died before it was used again; a fresh one may work."""


async def send(bulk: Bulk, data: Buffer) -> None:
    """Send bytes, metered.

    Raises:
        DeadlineExceeded: the other side takes them too slowly.
        PeerError: the stream broke.
    """
    limit_s = FRAME_S + 8 * len(data) / SLOWEST_STREAM_BPS
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            await bulk.stream.send(data)
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded(f"{short(bulk.peer)} took no slice of a blob within {limit_s:.0f} s") from None
    bulk.meter.sent(len(data))


async def ask(bulk: Bulk, request: BlobRequest | RangeRequest, stall_s: float) -> BlobHeader:
    """Send a request and return the header that answers it."""
    try:
        await send(bulk, encode_frame(encode(request)))
        return await header(bulk, request.digest, stall_s)
    except (DeadlineExceeded, WireError):
        raise
    except PeerError as error:
        if bulk.is_fresh:
            raise
        raise StaleStream(str(error)) from None


async def header(bulk: Bulk, digest: Digest, stall_s: float) -> BlobHeader:
    """Return the next header."""
    found: BlobHeader | None = await read_record(bulk, BlobHeader, stall_s, f"header of blob {short(digest)}")
    if found is None:
        raise PeerError(f"{short(bulk.peer)} closed the bulk stream before blob {short(digest)}")
    return found


async def fill(
    bulk: Bulk, piece: memoryview, stall_s: float, on_bytes: Callable[[int], None] = lambda _num: None
) -> None:
    """Fill `piece` with the next bytes; tell of each few of them."""
    filled = 0
    while filled < len(piece):
        limit = asyncio.timeout(stall_s)
        try:
            async with limit:
                num_bytes = await bulk.reader.recv_into(piece[filled:])
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded(f"{short(bulk.peer)} sent nothing of a blob for {stall_s:g} s") from None
        if num_bytes == 0:
            raise WireError(f"{short(bulk.peer)} ended the stream in the middle of a blob")
        filled += num_bytes
        on_bytes(num_bytes)
