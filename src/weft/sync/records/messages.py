"""The records of a round: what members say to each other, and the manifest they agree on.

One round on one branch, in order of appearance (leader of attempt 0 on the left):

    member  -> all      Ready      I finished my inner steps; here are the digests of my payload's parts
                        Pass       I am paused: I bring nothing, and nobody should wait for me; I vote as ever
    leader  -> all      Collect    these contributions count; these members own the parts
    owner   -> all      Merged     part i is merged; its result has this digest
    member  -> leader   Holding    I hold every result byte
    leader  -> all      Propose    the manifest                              \\
    member  -> leader   Accept     accepted, and on my disk                   } single-decree consensus
    leader  -> all      Committed  a quorum accepted: make the outer step    /

A later leader first sends Prepare and hears Promise (with what was accepted). Refuse tells a leader that its
sender is in a later attempt. Stuck tells it that a contribution cannot be had. Goodbye is a member's last word.

Each travels in a signed `RoundNote` that names branch and round. Every number and every list is bounded where it is
read: what is counted up from it must still fit into a record.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from weft.data.assign import Lease
from weft.ids import Attempt, BranchId, Digest, PeerId, Round, RunId, Tokens
from weft.ledger.header import Header
from weft.ledger.tree import HASH_NBYTES, MAX_DEPTH, Tree, is_tops, root_of_tops, with_leaf
from weft.net.membership.full_mesh import MAX_MEMBERS
from weft.net.messages import HexBranch, HexDigest, HexPeer, HexRun
from weft.sync.records.acts import MAX_ACTS, Warrant
from weft.sync.records.ancestry import Legacy
from weft.sync.records.charter import Body, Charter
from weft.sync.records.tuning import Tuned
from weft.wire import Record, Signed, digest, digest_of, encode

# Counted up by one at a time, these are not reached; sums of them stay within the 64 bits of a record's integer.
MAX_COUNT = 1 << 53
MAX_TOTAL = 1 << 62  # samples or tokens of a whole run
MAX_GROUP = 64  # peers, the aggregator included: it fetches a payload of each in a round
KEY_NBYTES = 32  # of a peer's public key
MAX_UNCOUNTED = 3 * MAX_MEMBERS  # leases remembered that were not counted: who stays away longer has its newest kept
MAX_LEASES = MAX_UNCOUNTED + 2 * MAX_MEMBERS  # each ends what one of those holds, or what a member is to be leased
MAX_UPLINK = 16  # of the fastest members: who sends slower owns a smaller part
MAX_COUNTERS = 4  # works that one round takes out again; the next takes the next
MAX_ROUTED = 64  # quotas that a round counts where what members train on is routed to them

_Attempt = Annotated[Attempt, Meta(ge=0, le=MAX_COUNT)]
_Round = Annotated[Round, Meta(ge=0, le=MAX_COUNT)]
_Revision = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
_Tokens = Annotated[Tokens, Meta(ge=0, le=MAX_TOTAL)]
_Samples = Annotated[int, Meta(ge=0, le=MAX_TOTAL)]
_Cursor = Annotated[int, Meta(ge=0, le=MAX_TOTAL)]
_Part = Annotated[int, Meta(ge=0, lt=MAX_MEMBERS)]  # each member owns one
_Peers = Annotated[tuple[HexPeer, ...], Meta(max_length=MAX_MEMBERS)]
_Uplink = Annotated[int, Meta(ge=0, le=MAX_UPLINK)]
_Countered = Annotated[tuple[HexPeer, ...], Meta(min_length=1, max_length=MAX_COUNTERS)]  # ascending
_Digests = Annotated[tuple[HexDigest, ...], Meta(max_length=MAX_MEMBERS)]  # one per part


@dataclass(frozen=True)
class Stake:
    """What one peer of a group brought to a round, and is to train on in the next."""

    peer: PeerId
    tokens: Tokens  # in the group's mean; 0: not counted
    samples: int  # of the aggregator's next lease; 0: none


class GroupRecord(Record, frozen=True, kw_only=True):
    """What an aggregator counted of its group in a round. The manifest that counts the aggregator names its digest.

    The stakes lie in columns, with the peers' bare keys: all electors hear each record in each round.
    """

    run: HexRun
    branch: HexBranch
    round: _Round
    sponsor: HexPeer  # the aggregator
    payloads: HexDigest  # of those that were counted, in the order of the stakes: what the mean was made of
    peers: Annotated[bytes, Meta(min_length=KEY_NBYTES, max_length=KEY_NBYTES * MAX_GROUP)]  # as added to the mean
    tokens: Annotated[tuple[_Tokens, ...], Meta(max_length=MAX_GROUP)]
    samples: Annotated[tuple[_Samples, ...], Meta(max_length=MAX_GROUP)]

    def __post_init__(self) -> None:
        if not len(self.peers) == KEY_NBYTES * len(self.tokens) == KEY_NBYTES * len(self.samples):
            raise ValueError("a record's columns are of different lengths")

    @property
    def stakes(self) -> tuple[Stake, ...]:
        """Return the columns' rows, as they were added to the mean; the uncounted last."""
        keys = range(0, len(self.peers), KEY_NBYTES)
        peers = (PeerId(self.peers[start : start + KEY_NBYTES].hex()) for start in keys)
        return tuple(map(Stake, peers, self.tokens, self.samples))


class GroupClaim(Record, frozen=True, kw_only=True):
    """What a manifest holds of a group: the rest is in the record."""

    record: HexDigest
    weight: _Tokens  # of its mean: the tokens, each peer's cut to the quota
    num_counted: Annotated[int, Meta(ge=0, lt=MAX_GROUP)]  # peers beside the aggregator
    num_leased: Annotated[int, Meta(ge=1, le=MAX_GROUP)]  # peers that are to train on its next lease, itself included
    samples: _Samples  # of that lease, as it asks for it


class Brought(Record, frozen=True, kw_only=True):
    """What one peer brings to a round, but for the payload."""

    peer: HexPeer
    tokens: _Tokens  # trained since it was last counted: its weight in the mean
    group: GroupClaim | None = None  # for which it brings the mean
    legacy: Legacy | None = None  # what is brought is not the peer's own, but what a branch had counted
    work: HexDigest | UnsetType = UNSET  # of the signed `Work` that says how it came about, where others may audit that

    @property
    def num_peers(self) -> int:
        """Return how many peers' work it is, that of a group's aggregator included, which may be none."""
        return 1 if self.group is None else 1 + self.group.num_counted


class Contribution(Brought, frozen=True, kw_only=True):
    """As a plan counts it: whoever merges fetches by these digests."""

    parts: _Digests  # of the encoded bytes of each part


class Counted(Brought, frozen=True, kw_only=True):
    """As a manifest counts it, which travels further and is kept longer: with one digest for all parts."""

    payload: HexDigest  # of the digests of the parts, one after the other


class PartResult(Record, frozen=True, kw_only=True):
    owner: HexPeer
    result: HexDigest  # of the encoded merged part
    uplink: _Uplink = MAX_UPLINK  # the part's share of the vector, of the sum over all parts


class Entry(Record, frozen=True, kw_only=True):
    """What a manifest names where the run's rounds are recorded."""

    work: HexDigest  # the root over what it counts, each in its canonical bytes
    past: Annotated[bytes, Meta(max_length=MAX_DEPTH * HASH_NBYTES)]  # tops over the headers of all rounds before


class HeldWork(Record, frozen=True, kw_only=True):
    """What a member in quarantine has brought, for others to look at before it counts."""

    peer: HexPeer
    work: HexDigest  # of its signed `Work`


class Manifest(Record, frozen=True, kw_only=True):
    """What a round counted, and what holds for the next. Manifests form a chain; its head is the state's identity."""

    run: HexRun
    branch: HexBranch
    round: _Round
    attempt: _Attempt  # the attempt it was first proposed in
    leader: HexPeer  # who proposed it: the tie-breaker of the next round
    previous: HexDigest  # of the manifest before, or of the record that opened the branch
    contributions: Annotated[tuple[Counted, ...], Meta(max_length=MAX_MEMBERS)]  # ascending by peer: as merged
    awaited: _Peers = ()  # ascending: members that were late; their leases count in the mean's divisor
    parts: Annotated[tuple[PartResult, ...], Meta(max_length=MAX_MEMBERS)]
    members: _Peers  # ascending: the electorate of the next round
    uplinks: Annotated[tuple[_Uplink, ...], Meta(max_length=MAX_MEMBERS)]  # of the members: sizes of the next parts
    joined: _Peers
    left: _Peers
    leases: Annotated[tuple[Lease, ...], Meta(max_length=MAX_LEASES)]  # who trains on which samples in the next round
    cursor: _Cursor  # first sample that no lease covers yet
    committed_tokens: _Tokens  # counted on this branch since the run began, this round included
    acts: Annotated[tuple[Warrant, ...], Meta(max_length=MAX_ACTS)]  # that take effect after it, in this order
    charter: HexDigest  # of what holds for the next round
    uncounted: Annotated[tuple[Lease, ...], Meta(max_length=MAX_UNCOUNTED)] = ()  # of earlier leases, ascending
    leased_again: _Tokens = Tokens(0)  # of leases that were given a second time since the run began
    tuned: Tuned | None = None  # how often members synchronise from now on, and in which bytes
    is_gossip: bool = False  # neighbours took each other's payloads, and nothing was merged for all
    entry: Entry | UnsetType = UNSET  # unset: the run's rounds are not recorded
    counters: _Countered | UnsetType = UNSET  # whose false work is taken out again; unset: nobody's
    held: Annotated[tuple[HeldWork, ...], Meta(min_length=1, max_length=MAX_MEMBERS)] | UnsetType = (
        UNSET  # ascending by peer
    )

    @property
    def has_result(self) -> bool:
        """Whether the outer parameters move with it."""
        return bool(self.contributions) and not self.is_gossip


class Base(Record, frozen=True, kw_only=True):
    """What all members of a round know before it starts; a function of the manifest before."""

    run: RunId
    branch: BranchId
    round: Round
    previous: Digest
    electorate: tuple[PeerId, ...]  # ascending
    newcomers: tuple[PeerId, ...] = ()  # those of them that the manifest before counted in
    resting: tuple[PeerId, ...] = ()  # those that it leased nothing to
    keeper: PeerId | None  # the tie-breaker: who led the round before; the half with it counts as a majority
    uplinks: tuple[int, ...]  # of each part: sizes
    cursor: int
    quota: int  # samples leased to each member per round, at most
    committed_tokens: Tokens
    charter: Charter  # by which the round is computed
    uncounted: tuple[Lease, ...] = ()  # leases of this round and before, of members that no manifest has counted since
    leased_again: Tokens = Tokens(0)
    has_new_members: bool = False  # others than the round before
    past: bytes | UnsetType = UNSET  # as in the next entry; unset: none, or nothing is recorded

    @property
    def body(self) -> Body:
        return Body(self.run, self.round, self.electorate, self.cursor)

    @property
    def num_parts(self) -> int:
        return len(self.uplinks)

    @property
    def unclaimed(self) -> Tokens:
        """The tokens that were leased, and that no manifest has counted: no round can count more.

        Where what members train on is routed to them, each may have had all that others were leased: no bound is known.
        """
        if self.charter.is_routed:
            return Tokens(MAX_ROUTED * self.charter.settings.quota_tokens)
        return Tokens(max(0, self.charter.leased_tokens(self.cursor) + self.leased_again - self.committed_tokens))

    @property
    def is_gossip(self) -> bool:
        """Whether members exchange whole payloads with their neighbours in this round (`sync.round.neighbours`)."""
        choices = self.charter.settings.method
        graph = choices.graph
        if graph is None or self.round % graph.mean_every == 0:
            return False
        if self.charter.has_ended or (choices.send == "difference" and self.has_new_members):
            return False
        return self.committed_tokens + self.unclaimed < self.charter.settings.tokens


class RoundMessage(Record, frozen=True, kw_only=True, tag=True, tag_field="type"):
    """Base of what members say within a round; `RoundNote` says which round."""


class LegacyProof(Record, frozen=True, kw_only=True):
    """What shows how much a legacy counts: the head of the branch that was given up, and what held after it."""

    certificate: "Certificate"  # without votes, where its holder has forgotten them
    charter: Charter


class Ready(RoundMessage, frozen=True, kw_only=True):
    tokens: _Tokens
    parts: _Digests
    group: GroupRecord | None = None  # whole, so that all who count the aggregator know whom they count
    legacy: Legacy | None = None  # what the payload holds, where it is not what the sender has trained
    proof: LegacyProof | None = None
    work: Signed | UnsetType = UNSET  # whole, so that all who count its sender can audit it


class Pass(RoundMessage, frozen=True, kw_only=True):
    """Its sender is paused. What it announces all the same counts like anybody's."""


class Collect(RoundMessage, frozen=True, kw_only=True):
    attempt: _Attempt
    revision: _Revision  # a leader may plan anew until it proposes
    contributions: Annotated[tuple[Contribution, ...], Meta(max_length=MAX_MEMBERS)]
    owners: _Peers  # of each part
    awaited: _Peers = ()  # ascending: who is late, and brings later what it was leased for this round
    counters: _Countered | UnsetType = UNSET  # whose false work is taken out again; unset: nobody's


class Stuck(RoundMessage, frozen=True, kw_only=True):
    attempt: _Attempt
    revision: _Revision
    part: _Part
    missing: _Peers  # whose contribution to the part cannot be fetched or decoded


class Merged(RoundMessage, frozen=True, kw_only=True):
    attempt: _Attempt
    revision: _Revision
    part: _Part
    result: HexDigest
    plan: HexDigest | UnsetType = UNSET  # that it was merged by; unset: nobody's work is audited
    head: HexDigest | UnsetType = UNSET  # of the manifest before: what weighs how much follows from it; unset likewise


class Holding(RoundMessage, frozen=True, kw_only=True):
    attempt: _Attempt
    revision: _Revision
    results: _Digests


class Prepare(RoundMessage, frozen=True, kw_only=True):
    attempt: _Attempt


class Vote(Record, frozen=True, kw_only=True):
    """A manifest, and the attempt in which it was accepted."""

    attempt: _Attempt
    manifest: Manifest


class Promise(RoundMessage, frozen=True, kw_only=True):
    attempt: _Attempt
    accepted: Vote | None


class Propose(RoundMessage, frozen=True, kw_only=True):
    attempt: _Attempt
    manifest: Manifest


class Accept(RoundMessage, frozen=True, kw_only=True):
    attempt: _Attempt
    manifest: HexDigest
    state: HexDigest | UnsetType = UNSET  # the name of what its sender has before the round, where rounds are recorded


class Refuse(RoundMessage, frozen=True, kw_only=True):
    attempt: _Attempt  # the one whose leader is answered
    promised: _Attempt  # the one that the sender is in


class Committed(RoundMessage, frozen=True, kw_only=True):
    attempt: _Attempt
    manifest: Manifest


class Goodbye(RoundMessage, frozen=True, kw_only=True):
    """A member's final acceptor state: it will never promise or accept again."""

    promised: _Attempt
    accepted: Vote | None


AnyRoundMessage = (
    Ready
    | Pass
    | Collect
    | Stuck
    | Merged
    | Holding
    | Prepare
    | Promise
    | Propose
    | Accept
    | Refuse
    | Committed
    | Goodbye
)


class RoundNote(Record, frozen=True, kw_only=True):
    """A message with its place: what is signed and sent."""

    branch: HexBranch
    round: _Round
    message: AnyRoundMessage


class Certificate(Record, frozen=True, kw_only=True):
    """A committed manifest with the signed votes (notes of Accept) and farewells (of Goodbye) that make it so.

    Who checks it takes the base from the manifest before, which it holds.
    """

    attempt: _Attempt
    manifest: Manifest
    votes: Annotated[tuple[Signed, ...], Meta(max_length=MAX_MEMBERS)]
    farewells: Annotated[tuple[Signed, ...], Meta(max_length=MAX_MEMBERS)]


def payload_of(parts: Iterable[Digest]) -> Digest:
    """Return what a manifest calls a payload of these parts."""
    return digest(list_of(parts))


def list_of(parts: Iterable[Digest]) -> bytes:
    """Return the digests of a payload's parts, one after the other."""
    return "".join(parts).encode()


def parts_in(listed: bytes) -> tuple[Digest, ...]:
    """Return the digests that `list_of` was given."""
    text, size = listed.decode(), 2 * HASH_NBYTES
    return tuple(Digest(text[start : start + size]) for start in range(0, len(text), size))


def counted(contribution: Contribution) -> Counted:
    """Return what a manifest holds of what its plan counts."""
    return Counted(
        peer=contribution.peer,
        tokens=contribution.tokens,
        payload=payload_of(contribution.parts),
        group=contribution.group,
        legacy=contribution.legacy,
        work=contribution.work,
    )


def claims_in(counting: Manifest | Collect) -> dict[PeerId, GroupClaim]:
    """Return the groups that a manifest or a plan counts, by their aggregators."""
    return {each.peer: each.group for each in counting.contributions if each.group is not None}


def counted_through(manifest: Manifest) -> int:
    """Return how many peers a manifest counts through others."""
    return sum(claim.num_counted for claim in claims_in(manifest).values())


def next_base(manifest: Manifest, charter: Charter) -> Base:
    """Return the base of the round after `manifest`, which names the digest of `charter`.

    What is leased to a group is not leased again when its aggregator dies: its leaves bring what they have trained.
    """
    groups = {each.peer for each in manifest.contributions if each.group is not None and each.group.num_leased > 1}
    leased = {lease.peer for lease in manifest.leases}
    at_work = charter.settings.method.wait == "ready"  # who is leased nothing has its last lease still
    return Base(
        run=manifest.run,
        branch=manifest.branch,
        round=Round(manifest.round + 1),
        previous=digest_of(manifest),
        electorate=manifest.members,
        newcomers=manifest.joined,
        resting=() if at_work else tuple(peer for peer in manifest.members if peer not in leased),
        keeper=manifest.leader,
        uplinks=manifest.uplinks,
        cursor=manifest.cursor,
        quota=charter.settings.quota,
        committed_tokens=manifest.committed_tokens,
        charter=charter,
        uncounted=(*manifest.uncounted, *(lease for lease in manifest.leases if lease.peer not in groups)),
        leased_again=manifest.leased_again,
        has_new_members=bool(manifest.joined or manifest.left),
        past=UNSET if manifest.entry is UNSET else past_after(manifest, manifest.entry),
    )


def has_right_entry(manifest: Manifest, charter: Charter) -> bool:
    """Return whether a manifest, of whoever gave it, has an entry where the run's rounds have one, on which a next can
    follow."""
    if manifest.entry is UNSET or not charter.is_recorded:
        return manifest.entry is UNSET and not charter.is_recorded
    return is_tops(manifest.round, manifest.entry.past)


def work_of(contributions: Iterable[Counted]) -> Digest:
    """Return the root over what a manifest counts."""
    return Tree(map(encode, contributions)).root()


def entry_of(base: Base, contributions: Sequence[Counted]) -> Entry | UnsetType:
    """Return what the manifest of a round names where the run's rounds are recorded."""
    return Entry(work=work_of(contributions), past=base.past or b"") if base.charter.is_recorded else UNSET


def header_of(manifest: Manifest, entry: Entry) -> Header:
    return Header(
        round=manifest.round,
        manifest=digest_of(manifest),
        previous=Digest(manifest.previous),
        work=Digest(entry.work),
        past=root_of_tops(manifest.round, entry.past),
    )


def past_after(manifest: Manifest, entry: Entry) -> bytes:
    """Return the tops over the headers of all rounds up to this one; there is one of each, from the run's first."""
    return with_leaf(entry.past, manifest.round, header_of(manifest, entry).pack())


def counted_of(manifest: Manifest, peer: PeerId) -> Counted | None:
    """Return what `manifest` counts of what `peer` brought: its own work, its group's mean, or a legacy."""
    return next((each for each in manifest.contributions if each.peer == peer), None)


def own_work(manifest: Manifest, peer: PeerId) -> Counted | None:
    """Return the same, unless it is a legacy, which leaves what the peer carries as it is."""
    found = counted_of(manifest, peer)
    return None if found is None or found.legacy is not None else found


def works_in(manifest: Manifest) -> list[tuple[PeerId, Digest]]:
    """Return the works that a manifest names, and whose they are: those that it counts, and those that wait."""
    counted = [(PeerId(each.peer), Digest(each.work)) for each in manifest.contributions if each.work]
    return counted + [(PeerId(each.peer), Digest(each.work)) for each in manifest.held or ()]


def manifest_in(message: AnyRoundMessage) -> Manifest | None:
    """Return the manifest that its reader may have to accept, or to propose in its turn."""
    match message:
        case Propose(manifest=manifest):
            return manifest
        case Promise(accepted=vote) | Goodbye(accepted=vote):
            return None if vote is None else vote.manifest
        case _:
            return None
