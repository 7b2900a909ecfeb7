"""What is kept of a round for ever: packed, and read again."""

import pytest

from weft.errors import WireError
from weft.ids import Digest, Round
from weft.ledger.header import HEADER_NBYTES, Header, unpack


def test_a_header_is_read_as_it_was_packed() -> None:
    one, two, three, four = (Digest(f"{number:02x}" * 32) for number in range(1, 5))
    header = Header(Round(300), one, two, three, four)
    data = header.pack()
    assert len(data) == HEADER_NBYTES == 136
    assert data[:8] == b"\x2c\x01\0\0\0\0\0\0"
    assert unpack(data) == header


@pytest.mark.parametrize("change", [b"", b"\0" * 135, b"\0" * 137])
def test_another_length_is_no_header(change: bytes) -> None:
    with pytest.raises(WireError, match="136 bytes"):
        unpack(change)
