"""What is kept of a round for ever: packed, and read again."""

import pytest

from weft.errors import WireError
from weft.ids import Digest, Round
from weft.ledger.header import HEADER_NBYTES, Header, unpack


def header(state: Digest | None) -> Header:
    one, two, three, four = (Digest(f"{number:02x}" * 32) for number in range(1, 5))
    return Header(Round(300), one, two, three, state, four)


@pytest.mark.parametrize("state", [Digest("ff" * 32), None])
def test_a_header_is_read_as_it_was_packed(state: Digest | None) -> None:
    data = header(state).pack()
    assert len(data) == HEADER_NBYTES == 168
    assert data[:8] == b"\x2c\x01\0\0\0\0\0\0"
    assert unpack(data) == header(state)


@pytest.mark.parametrize("change", [b"", b"\0" * 167, b"\0" * 169])
def test_another_length_is_no_header(change: bytes) -> None:
    with pytest.raises(WireError, match="168 bytes"):
        unpack(change)
