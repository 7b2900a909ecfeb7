"""The records of a round: what members say to each other, and the manifest they agree on.

One round on one branch, in order of appearance (leader of attempt 0 on the left):

    member  -> all      Ready      I finished my inner steps; here are the digests of my payload's parts
    leader  -> all      Collect    these contributions count; these members own the parts
    owner   -> all      Merged     part i is merged; its result has this digest
    member  -> leader   Holding    I hold every result byte
    leader  -> all      Propose    the manifest                              \\
    member  -> leader   Accept     accepted, and on my disk                   } single-decree consensus
    leader  -> all      Committed  a quorum accepted: make the outer step    /

A later leader first sends Prepare and hears Promise (with what was accepted). Refuse tells a leader that a
later attempt exists. Stuck tells it that a contribution cannot be had. Goodbye is a member's last word.

Each travels in a signed `RoundNote` that names branch and round.
"""

from weft.data.assign import Lease
from weft.ids import Attempt, BranchId, Digest, PeerId, Round, RunId, Tokens
from weft.wire import Record, Signed, digest_of

MAX_MEMBERS = 64  # one group; larger runs need two levels


class Contribution(Record, frozen=True, kw_only=True):
    """What one peer brings to a round."""

    peer: PeerId
    tokens: Tokens  # trained since it was last counted: its weight in the mean
    parts: tuple[Digest, ...]  # of the encoded bytes of each part


class PartResult(Record, frozen=True, kw_only=True):
    owner: PeerId
    result: Digest  # of the encoded merged part


class Manifest(Record, frozen=True, kw_only=True):
    """What a round counted, and what holds for the next. Manifests form a chain; its head is the state's identity."""

    run: RunId
    branch: BranchId
    round: Round
    attempt: Attempt  # the attempt it was first proposed in
    leader: PeerId  # who proposed it: the keeper, whose half of an electorate counts as a majority
    previous: Digest  # of the manifest before, or of the record that opened the branch
    contributions: tuple[Contribution, ...]  # ascending by peer: the order of the merge
    parts: tuple[PartResult, ...]
    members: tuple[PeerId, ...]  # ascending: the electorate of the next round
    joined: tuple[PeerId, ...]
    left: tuple[PeerId, ...]
    leases: tuple[Lease, ...]  # who trains on which samples in the next round
    cursor: int  # first sample that no lease covers yet
    committed_tokens: Tokens  # counted on this branch since the run began, this round included


class Base(Record, frozen=True, kw_only=True):
    """What all members of a round know before it starts; a function of the manifest before."""

    run: RunId
    branch: BranchId
    round: Round
    previous: Digest
    electorate: tuple[PeerId, ...]  # ascending
    keeper: PeerId | None  # the leader recorded in the manifest before
    num_parts: int
    cursor: int
    quota: int  # samples leased to each member per round
    committed_tokens: Tokens


class RoundMessage(Record, frozen=True, kw_only=True, tag=True, tag_field="type"):
    """Base of what members say within a round; `RoundNote` says which round."""


class Ready(RoundMessage, frozen=True, kw_only=True):
    tokens: Tokens
    parts: tuple[Digest, ...]


class Collect(RoundMessage, frozen=True, kw_only=True):
    attempt: Attempt
    revision: int  # a leader may plan anew until it proposes
    contributions: tuple[Contribution, ...]
    owners: tuple[PeerId, ...]  # of each part


class Stuck(RoundMessage, frozen=True, kw_only=True):
    attempt: Attempt
    revision: int
    part: int
    missing: tuple[PeerId, ...]  # whose contribution to the part cannot be fetched or decoded


class Merged(RoundMessage, frozen=True, kw_only=True):
    attempt: Attempt
    revision: int
    part: int
    result: Digest


class Holding(RoundMessage, frozen=True, kw_only=True):
    attempt: Attempt
    revision: int
    results: tuple[Digest, ...]


class Prepare(RoundMessage, frozen=True, kw_only=True):
    attempt: Attempt


class Vote(Record, frozen=True, kw_only=True):
    """A manifest, and the attempt in which it was accepted."""

    attempt: Attempt
    manifest: Manifest


class Promise(RoundMessage, frozen=True, kw_only=True):
    attempt: Attempt
    accepted: Vote | None


class Propose(RoundMessage, frozen=True, kw_only=True):
    attempt: Attempt
    manifest: Manifest


class Accept(RoundMessage, frozen=True, kw_only=True):
    attempt: Attempt
    manifest: Digest


class Refuse(RoundMessage, frozen=True, kw_only=True):
    promised: Attempt


class Committed(RoundMessage, frozen=True, kw_only=True):
    attempt: Attempt
    manifest: Manifest


class Goodbye(RoundMessage, frozen=True, kw_only=True):
    """A member's final acceptor state: it will never promise or accept again."""

    promised: Attempt
    accepted: Vote | None


AnyRoundMessage = (
    Ready | Collect | Stuck | Merged | Holding | Prepare | Promise | Propose | Accept | Refuse | Committed | Goodbye
)


class RoundNote(Record, frozen=True, kw_only=True):
    """A message with its place: what is signed and sent."""

    branch: BranchId
    round: Round
    message: AnyRoundMessage


class Certificate(Record, frozen=True, kw_only=True):
    """A committed manifest with the signed votes (notes of Accept) and farewells (of Goodbye) that make it so.

    Who checks it takes the base from the manifest before, which it holds.
    """

    attempt: Attempt
    manifest: Manifest
    votes: tuple[Signed, ...]
    farewells: tuple[Signed, ...]


def next_base(manifest: Manifest, quota: int) -> Base:
    """Return the base of the round after `manifest`."""
    return Base(
        run=manifest.run,
        branch=manifest.branch,
        round=Round(manifest.round + 1),
        previous=digest_of(manifest),
        electorate=manifest.members,
        keeper=manifest.leader,
        num_parts=len(manifest.members),
        cursor=manifest.cursor,
        quota=quota,
        committed_tokens=manifest.committed_tokens,
    )
