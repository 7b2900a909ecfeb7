"""Checks what shows that a run has counted somebody's work.

    prover  ──WorkProof, a file──►  anybody:  shown(proof)  ──►  who, round, tokens, payload

It tells what majorities of members have signed, from the first members on; who those were is for its reader to know.
"""

from dataclasses import dataclass

from msgspec import UNSET

from weft.errors import WireError
from weft.ids import Digest, PeerId, Round, RunId, Tokens, short
from weft.ledger.header import Header, unpack
from weft.ledger.tree import Path, is_leaf, root_of_tops
from weft.sync.governance import said, signers
from weft.sync.records.messages import Goodbye, Manifest, header_of
from weft.sync.records.proof import Link, WorkProof, is_opening
from weft.sync.round.rules import is_majority
from weft.wire import Verify, digest_of, encode


@dataclass(frozen=True)
class Shown:
    """What a proof shows.

    Args:
        tokens: of each peer that was counted: one, or a group.
        founder: who led the run's first manifest.
        members: who had a vote after the newest round of the proof.
        split_at: where the run had split, rounds in which one part went on by its own word.
    """

    run: RunId
    round: Round
    newest: Round
    peer: PeerId
    tokens: dict[PeerId, Tokens]
    payload: Digest
    founder: PeerId
    members: tuple[PeerId, ...]
    split_at: tuple[Round, ...]


def shown(proof: WorkProof) -> Shown:
    """Return what a proof shows, once all in it is checked.

    Raises:
        WireError: says what does not hold.
    """
    newest, split_at = followed(proof.run, proof.opening, proof.links)
    header, at = unpack(proof.header), proof.work
    if not _is_in_history(newest, header, proof.place):
        raise WireError(f"round {header.round} is not in the history that round {newest.round} names")
    if not is_leaf(header.work, encode(proof.counted), at):
        raise WireError(f"round {header.round} does not count this work of {short(PeerId(proof.counted.peer))}")
    return Shown(
        run=RunId(proof.run),
        round=header.round,
        newest=newest.round,
        peer=PeerId(proof.counted.peer),
        tokens=_tokens(proof),
        payload=Digest(proof.counted.payload),
        founder=PeerId(proof.opening.leader),
        members=newest.members,
        split_at=split_at,
    )


def followed(
    run: str, opening: Manifest, links: tuple[Link, ...], verify: Verify | None = None
) -> tuple[Manifest, tuple[Round, ...]]:
    """Return the last manifest of a row of links, and where branches began, once each is signed by the members before.

    Raises:
        WireError: says which is not.
    """
    if opening.run != run or opening.round or not is_opening(opening):
        raise WireError("it does not begin with the run's first round")
    last, split_at = opening, list[Round]()
    for link in links:
        manifest = link.certificate.manifest
        if manifest.run != run or manifest.round <= last.round:
            raise WireError(f"round {manifest.round} does not follow round {last.round} of the run")
        if set(manifest.members) - set(manifest.joined) | set(manifest.left) != set(last.members):
            raise WireError(
                f"between rounds {last.round} and {manifest.round} others became members: a link is left out"
            )
        if is_opening(manifest):
            if not set(manifest.members) <= set(last.members):
                raise WireError(f"the branch that begins in round {manifest.round} has other members than were there")
            split_at.append(manifest.round)
        elif manifest.branch != last.branch or not _is_signed(link, last.members, verify):
            raise WireError(f"round {manifest.round} is not signed by a majority of the members before it")
        last = manifest
    return last, tuple(split_at)


def _is_signed(link: Link, members: tuple[PeerId, ...], verify: Verify | None) -> bool:
    certificate, manifest, before = link.certificate, link.certificate.manifest, link.before
    keeper = before.leader if before is not None and digest_of(before) == manifest.previous else None
    given = {} if verify is None else {"verify": verify}
    goodbyes = said(manifest, members, certificate.farewells, Goodbye, **given)
    left = {peer for peer, goodbye in goodbyes if goodbye.promised <= certificate.attempt}
    return is_majority(members, keeper, signers(certificate, members, **given), left)


def _is_in_history(newest: Manifest, header: Header, place: Path | None) -> bool:
    if newest.entry is UNSET:
        return False
    if place is None:
        return header == header_of(newest, newest.entry)
    history = root_of_tops(newest.round, newest.entry.history)
    return place.index == header.round and place.count == newest.round and is_leaf(history, header.pack(), place)


def _tokens(proof: WorkProof) -> dict[PeerId, Tokens]:
    counted, claim, group = proof.counted, proof.counted.group, proof.group
    if claim is None:
        return {PeerId(counted.peer): counted.tokens}
    if group is None:
        return {PeerId(counted.peer): counted.tokens}
    if digest_of(group) != claim.record:
        raise WireError("the list of a group's peers is not the one that was counted")
    return {stake.peer: stake.tokens for stake in group.stakes if stake.tokens}
