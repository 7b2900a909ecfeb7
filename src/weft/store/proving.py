"""Makes proofs of what a run has counted, of the rounds that this machine records."""

from dataclasses import dataclass

from weft.errors import DataError
from weft.ids import PeerId, Round, RunId, short
from weft.ledger.header import HEADER_NBYTES
from weft.ledger.tree import Tree
from weft.store.rounds import RoundsFile, is_history
from weft.sync.records.messages import Counted, GroupRecord, Manifest
from weft.sync.records.proof import Link, WorkProof, is_opening
from weft.wire import digest_of, encode


@dataclass(frozen=True)
class Place:
    """Where a peer's work is counted: its own, or through the peer that brings its group's mean."""

    counted: Counted
    index: int
    group: GroupRecord | None


def counted_in(manifest: Manifest, groups: tuple[GroupRecord, ...], peer: PeerId) -> Place | None:
    """Return where a round counts a peer's work; None: it does not, or nobody here knows the list of its group."""
    for index, counted in enumerate(manifest.contributions):
        claim = counted.group
        group = None if claim is None else next((each for each in groups if digest_of(each) == claim.record), None)
        stakes = () if group is None else group.stakes
        if any(stake.peer == peer and stake.tokens for stake in stakes) or (counted.peer == peer and claim is None):
            return Place(counted, index, group)
    return None


def prove(file: RoundsFile, run: RunId, round: Round, peer: PeerId) -> WorkProof:
    """Return what shows that the run has counted a peer's work in a round.

    Raises:
        DataError: says what is not here.
    """
    newest_round = file.newest()
    manifest, links = file.manifest(round), file.links()
    if newest_round is None or round > newest_round:
        raise DataError(f"round {round} is not here: the newest is {newest_round}.")
    if manifest is None:
        raise DataError(f"this machine was not there in round {round}. Ask for the proof on one that was.")
    place = counted_in(manifest, file.groups(round), peer)
    if place is None:
        raise DataError(f"round {round} counts nothing of {short(peer)}.")
    opening = links[0].certificate.manifest if links else None
    if opening is None or not is_opening(opening) or opening.round:
        raise DataError("this machine does not know yet how the run began. Let its peer run on: it asks others.")
    newest = _newest(links[1:], round)
    tree = file.tree()
    if not is_history(newest, tree):
        raise DataError("this machine does not know all rounds before yet. Let its peer run on: it asks others.")
    is_newest = newest.round == round
    return WorkProof(
        run=run,
        opening=opening,
        links=tuple(each for each in links[1:] if each.certificate.manifest.round <= newest.round),
        header=file.headers(round, 1)[:HEADER_NBYTES],
        place=None if is_newest else tree.path(round, newest.round),
        counted=place.counted,
        work=Tree(map(encode, manifest.contributions)).path(place.index),
        group=place.group,
    )


def _newest(links: list[Link], round: Round) -> Manifest:
    """Return the first manifest of links that has the round in its history, or is it."""
    for link in links:
        if link.certificate.manifest.round >= round:
            return link.certificate.manifest
    raise DataError(f"no votes for round {round} or a later one are here. Let its peer run on, and try again.")
