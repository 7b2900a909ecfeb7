"""What shows that a run has counted somebody's work, to who has never been in it; `weft.sync.proof` checks it.

opening     the run's first manifest: it names the first members
links       certificates of rounds that changed who is a member, and of the newest: each is signed by a majority of
            those that the one before names
header      of the round in question, which the newest manifest's history holds
counted     what that round counts of the peer, which the header's work holds
"""

from typing import Annotated

from msgspec import Meta

from weft.ledger.header import HEADER_NBYTES
from weft.ledger.tree import Path
from weft.net.messages import HexRun
from weft.sync.records.messages import Certificate, Counted, GroupRecord, Manifest
from weft.wire import Record

MAX_LINKS = 1 << 16
MAX_PROOF_NBYTES = 1 << 30


class Link(Record, frozen=True, kw_only=True):
    """A round whose members are shown to have decided it, or with no votes the first of a branch."""

    certificate: Certificate
    before: Manifest | None = None  # the round before, where exactly half has voted, with who led that


class WorkProof(Record, frozen=True, kw_only=True):
    run: HexRun
    opening: Manifest
    links: Annotated[tuple[Link, ...], Meta(min_length=1, max_length=MAX_LINKS)]  # ascending; the newest last
    header: Annotated[bytes, Meta(min_length=HEADER_NBYTES, max_length=HEADER_NBYTES)]
    place: Path | None  # of the header among all before the newest; None: it is the newest's
    counted: Counted
    work: Path
    group: GroupRecord | None = None  # through which a peer without a vote was counted


def is_link_needed(manifest: Manifest) -> bool:
    """Return whether who follows a run's members needs this round: it changed them, or began a branch."""
    return bool(manifest.joined or manifest.left or is_opening(manifest))


def is_opening(manifest: Manifest) -> bool:
    """Return whether it begins a run or a branch: nobody votes for that."""
    return not manifest.parts
