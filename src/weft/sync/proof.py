"""Checks what shows that a run has counted somebody's work.

    prover  ──WorkProof, a file──►  anybody:  shown(proof)  ──►  who, round, lease, tokens, payload

It follows the members: who began the run has signed whom it began with, and each milestone is signed by a majority of
the members before it. Which key began the run is for its reader to know. A majority of former members can sign another
history from where they were members on, as in any such chain.

A round that half of its members decided, which is enough with the one that breaks ties, and a branch, which goes on by
the word of the members that it names, are by the word of few: of all that is named from there on, earlier rounds
included, nothing else is shown. Who stays where others have said goodbye is all members.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from msgspec import UNSET

from weft.data.assign import Lease
from weft.errors import WireError
from weft.ids import BranchId, Digest, PeerId, Round, RunId, Tokens, short
from weft.keys import verify
from weft.ledger.header import Header, unpack
from weft.ledger.tree import Path, is_leaf, is_tops, root_of_tops
from weft.sync.governance import said, signers
from weft.sync.records.messages import Goodbye, GroupRecord, Manifest, header_of
from weft.sync.records.proof import Milestone, WorkProof, is_opening
from weft.wire import Signed, Verify, digest_of, encode, unseal


@dataclass(frozen=True)
class Followed:
    """Where a row of milestones leads.

    Args:
        founder: who began the run.
        last: the manifest of the last milestone.
        by_few: of rounds on the way that no majority has signed, by whose word they are.
    """

    founder: PeerId
    last: Manifest
    by_few: dict[Round, tuple[PeerId, ...]]


@dataclass(frozen=True)
class Shown:
    """What a proof shows.

    Args:
        brought_by: whose contribution it was: the peer's own, or of an aggregator.
        tokens: of each peer that was counted: of one, or of a group.
        leases: what the round before had leased to each of those peers; None: that is not shown. Where it came late,
            what is counted may be of an earlier one.
        is_legacy: it is what another branch had counted, and no work of who brought it.
        last: the round of the last milestone.
        members: who had a vote after it.
        by_few: as of `Followed`.
    """

    run: RunId
    round: Round
    brought_by: PeerId
    tokens: dict[PeerId, Tokens]
    leases: tuple[Lease, ...] | None
    payload: Digest
    is_legacy: bool
    founder: PeerId
    last: Round
    members: tuple[PeerId, ...]
    by_few: dict[Round, tuple[PeerId, ...]]


def shown(proof: WorkProof) -> Shown:
    """Return what a proof shows, once all in it is checked.

    Raises:
        WireError: says what does not hold.
    """
    found = followed(RunId(proof.run), proof.opening, proof.milestones)
    header, counted = unpack(proof.header), proof.counted
    if is_opening(found.last) or not _is_among_past(found.last, header, proof.place):
        raise WireError(f"round {header.round} is not among the rounds that round {found.last.round} names")
    if not is_leaf(header.work, encode(counted), proof.work):
        raise WireError(f"round {header.round} does not count this work of {short(PeerId(counted.peer))}")
    tokens = _tokens(proof)
    return Shown(
        run=RunId(proof.run),
        round=header.round,
        brought_by=PeerId(counted.peer),
        tokens=tokens,
        leases=None if proof.before is None else _leases(proof.before, header, tokens),
        payload=Digest(counted.payload),
        is_legacy=counted.legacy is not None,
        founder=found.founder,
        last=found.last.round,
        members=found.last.members,
        by_few=found.by_few,
    )


def opened(run: RunId, opening: Signed, verify: Verify = verify) -> Manifest:
    """Return a run's first manifest, once who began the run has signed it.

    Raises:
        WireError: it is no such manifest, or signed by somebody else.
    """
    manifest = unseal(opening, Manifest, verify)
    is_first = manifest.run == run and manifest.branch == BranchId(run) and not manifest.round and is_opening(manifest)
    if not is_first or manifest.leader != opening.signer or opening.signer not in manifest.members:
        raise WireError("it does not begin with the run's first round, signed by who began it")
    return manifest


def followed(run: RunId, opening: Signed, milestones: Sequence[Milestone], verify: Verify = verify) -> Followed:
    """Return where milestones lead, once each is signed by the members before it.

    Raises:
        WireError: says which is not.
    """
    last = opened(run, opening, verify)
    by_few = dict[Round, tuple[PeerId, ...]]()
    for milestone in milestones:
        manifest = milestone.certificate.manifest
        if manifest.run != run or manifest.round <= last.round:
            raise WireError(f"round {manifest.round} does not follow round {last.round} of the run")
        if electorate_of(manifest) != set(last.members):
            raise WireError(f"between rounds {last.round} and {manifest.round} others became members")
        if is_opening(manifest):
            if manifest.joined or not manifest.members:
                raise WireError(f"the branch that begins in round {manifest.round} has members that were none before")
            by_few[manifest.round] = manifest.members
        elif manifest.branch != last.branch or (votes := _votes(milestone, verify)).num_missing:
            raise WireError(f"round {manifest.round} is not signed by a majority of the members before it")
        elif not votes.is_majority:
            by_few[manifest.round] = tuple(sorted(votes.signers))
        last = manifest
    return Followed(PeerId(opening.signer), last, by_few)


def electorate_of(manifest: Manifest) -> set[PeerId]:
    """Return who voted for a manifest, or could."""
    return set(manifest.members) - set(manifest.joined) | set(manifest.left)


@dataclass(frozen=True)
class _Votes:
    signers: set[PeerId]
    num: int  # of the electorate, less who has said goodbye

    @property
    def is_majority(self) -> bool:
        return 2 * len(self.signers) > self.num

    @property
    def num_missing(self) -> int:
        """Return how many more would be half."""
        return max(0, -(-self.num // 2) - len(self.signers))


def _votes(milestone: Milestone, verify: Verify) -> _Votes:
    certificate = milestone.certificate
    manifest, members = certificate.manifest, electorate_of(certificate.manifest)
    goodbyes = said(manifest, members, certificate.farewells, Goodbye, verify)
    staying = members - {peer for peer, goodbye in goodbyes if goodbye.promised <= certificate.attempt}
    return _Votes(signers(certificate, staying, verify), len(staying))


def is_signed(milestone: Milestone, verify: Verify = verify) -> bool:
    """Return whether a majority of its members has decided a round."""
    return _votes(milestone, verify).is_majority


def _is_among_past(last: Manifest, header: Header, place: Path | None) -> bool:
    entry = last.entry
    if entry is UNSET or not is_tops(last.round, entry.past):
        return False
    if place is None:
        return header == header_of(last, entry)
    is_there = place.index == header.round and place.count == last.round
    return is_there and is_leaf(root_of_tops(last.round, entry.past), header.pack(), place)


def _leases(before: Manifest, header: Header, peers: Collection[PeerId]) -> tuple[Lease, ...]:
    if digest_of(before) != header.previous:
        raise WireError(f"round {header.round} does not follow on the round that is shown as the one before")
    return tuple(lease for lease in before.leases if lease.peer in peers)


def _tokens(proof: WorkProof) -> dict[PeerId, Tokens]:
    counted, claim, group = proof.counted, proof.counted.group, proof.group
    if claim is None:
        return {PeerId(counted.peer): counted.tokens}
    if group is None or digest_of(group) != claim.record:
        raise WireError("it is the work of a group, and the list of its peers is not the one that was counted")
    return tokens_in(group)


def tokens_in(group: GroupRecord) -> dict[PeerId, Tokens]:
    """Return with how many tokens each peer of a group is counted."""
    return {stake.peer: stake.tokens for stake in group.stakes if stake.tokens}
