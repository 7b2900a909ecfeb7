"""What is remembered of a decided round for ever: 136 bytes, whatever its manifest has.

round       little-endian, 8 bytes
manifest    its digest
previous    that of the one before
work        the root over what it counts
past        the root over the headers of all rounds before
"""

from dataclasses import dataclass

from weft.errors import WireError
from weft.ids import Digest, Round
from weft.ledger.tree import HASH_NBYTES

ROUND_NBYTES = 8
HEADER_NBYTES = ROUND_NBYTES + 4 * HASH_NBYTES


@dataclass(frozen=True)
class Header:
    round: Round
    manifest: Digest
    previous: Digest
    work: Digest
    past: Digest

    def pack(self) -> bytes:
        """Return its bytes: a leaf of the tree over past rounds."""
        digests = (self.manifest, self.previous, self.work, self.past)
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
    return Header(round, *digests)
