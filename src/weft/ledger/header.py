"""What is remembered of a decided round for ever: 168 bytes, whatever its manifest has.

round       little-endian, 8 bytes
manifest    its digest
previous    that of the one before
work        the root over what it counts
state       of the replicated vectors before it; zeros where its leader had none
past        the root over the headers of all rounds before
"""

from dataclasses import dataclass

from weft.errors import WireError
from weft.ids import Digest, Round
from weft.ledger.tree import HASH_NBYTES

ROUND_NBYTES = 8
HEADER_NBYTES = ROUND_NBYTES + 5 * HASH_NBYTES
_NO_STATE = Digest("0" * 2 * HASH_NBYTES)


@dataclass(frozen=True)
class Header:
    round: Round
    manifest: Digest
    previous: Digest
    work: Digest
    state: Digest | None
    past: Digest

    def pack(self) -> bytes:
        """Return its bytes: a leaf of the tree over past rounds."""
        digests = (self.manifest, self.previous, self.work, self.state or _NO_STATE, self.past)
        return self.round.to_bytes(ROUND_NBYTES, "little") + bytes.fromhex("".join(digests))


def unpack(data: bytes) -> Header:
    """
    Raises:
        WireError: a header has another length.
    """
    if len(data) != HEADER_NBYTES:
        raise WireError(f"a header has {HEADER_NBYTES} bytes, and these are {len(data)}")
    round = Round(int.from_bytes(data[:ROUND_NBYTES], "little"))
    digests = [Digest(data[at : at + HASH_NBYTES].hex()) for at in range(ROUND_NBYTES, HEADER_NBYTES, HASH_NBYTES)]
    manifest, previous, work, state, past = digests
    return Header(round, manifest, previous, work, None if state == _NO_STATE else state, past)
