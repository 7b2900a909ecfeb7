"""What shows that a run has counted somebody's work, to who has never been in it; `weft.sync.proof` checks it.

opening       the run's first manifest, signed by who began the run: it names the first members
milestones    certificates of rounds that changed who is a member, and of the newest: each is signed by a majority of
              those that the one before names
header        of the round in question, which is among the past rounds that the last milestone names
counted       what that round counts of the peer, which the header's work holds
before        the manifest of the round before, which the header names: it says what was leased to whom
"""

from typing import Annotated

from msgspec import Meta

from weft.ledger.header import HEADER_NBYTES
from weft.ledger.tree import Path
from weft.net.messages import HexRun
from weft.sync.records.messages import Certificate, Counted, GroupRecord, Manifest
from weft.wire import Record, Signed

MAX_MILESTONES = 1 << 16
MAX_PROOF_NBYTES = 1 << 28


class Milestone(Record, frozen=True, kw_only=True):
    """A round with the votes for it; or, with none, the first of a branch."""

    certificate: Certificate


class WorkProof(Record, frozen=True, kw_only=True):
    run: HexRun
    opening: Signed
    milestones: Annotated[tuple[Milestone, ...], Meta(min_length=1, max_length=MAX_MILESTONES)]  # ascending
    header: Annotated[bytes, Meta(min_length=HEADER_NBYTES, max_length=HEADER_NBYTES)]
    place: Path | None  # of the header among all before the last milestone; None: it is that one's
    counted: Counted
    work: Path
    group: GroupRecord | None = None  # of the peers whose mean it is, where it is a group's
    before: Manifest | None = None  # None: the prover does not have it


def is_opening(manifest: Manifest) -> bool:
    """Return whether it begins a run or a branch: nobody votes for that."""
    return not manifest.parts


def changes_members(manifest: Manifest) -> bool:
    """Return whether who follows a run's members needs this round."""
    return bool(manifest.joined or manifest.left) or is_opening(manifest)
