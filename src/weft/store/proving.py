"""Makes proofs of what a run has counted, of the rounds that this machine records."""

from dataclasses import dataclass

from weft.errors import DataError
from weft.ids import PeerId, Round, RunId, short
from weft.ledger.tree import Tree
from weft.store.rounds import MAX_MANIFESTS, RoundsFile, is_past
from weft.sync.proof import is_signed, tokens_in
from weft.sync.records.messages import Counted, GroupRecord, Manifest
from weft.sync.records.proof import WorkProof, is_opening
from weft.wire import digest_of, encode

WAIT = "Let its peer run on: it asks others."


@dataclass(frozen=True)
class Place:
    """Where a round counts a peer's work: its own, or through the aggregator of its group."""

    counted: Counted
    index: int
    group: GroupRecord | None


def counted_in(manifest: Manifest, groups: tuple[GroupRecord, ...], peer: PeerId) -> Place | None:
    """Return where a round counts a peer's work; None: it does not, or nobody here knows the list of its group."""
    lists = {digest_of(each): each for each in groups}
    for index, counted in enumerate(manifest.contributions):
        if counted.group is None and counted.peer == peer:
            return Place(counted, index, None)
        group = None if counted.group is None else lists.get(counted.group.record)
        if group is not None and peer in tokens_in(group):
            return Place(counted, index, group)
    return None


def prove(file: RoundsFile, run: RunId, round: Round, peer: PeerId) -> WorkProof:
    """Return what shows that the run has counted a peer's work in a round.

    Raises:
        DataError: says what is not here.
    """
    manifest, newest = file.manifest(round), file.newest()
    if newest is None or round > newest:
        raise DataError(f"round {round} is not here: the newest is {newest}.")
    if manifest is None:
        raise DataError(
            f"of round {round} the header alone is here: this machine was not there, or that is more than "
            f"{MAX_MANIFESTS:,} rounds ago. Make the proof where it is whole, as in a copy of an older rounds.db."
        )
    place = counted_in(manifest, file.groups(round), peer)
    if place is None:
        raise DataError(f"round {round} counts nothing of {short(peer)}, as far as this machine knows.")
    if (opening := file.opening()) is None:
        raise DataError(f"this machine does not know yet how the run began. {WAIT}")
    milestones = file.milestones()
    later = [each for each in milestones if each.certificate.manifest.round >= round]
    decided = [each for each in later if not is_opening(each.certificate.manifest)]
    if not decided:
        raise DataError(f"no votes for round {round} or a later one are here. {WAIT}")
    last = next(filter(is_signed, decided), decided[0]).certificate.manifest
    if not is_past(last, tree := file.tree()):
        raise DataError(f"this machine does not know all rounds before yet. {WAIT}")
    return WorkProof(
        run=run,
        opening=opening,
        milestones=tuple(each for each in milestones if 0 < each.certificate.manifest.round <= last.round),
        header=file.headers(round, 1),
        place=None if last.round == round else tree.path(round, last.round),
        counted=place.counted,
        work=Tree(map(encode, manifest.contributions)).path(place.index),
        group=place.group,
        before=file.manifest(round - 1),
    )
