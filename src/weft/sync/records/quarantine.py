"""The works of newcomers, which count once others have looked at them: what the chain says of each, and what follows.

    joined      a member that a manifest counts in is in quarantine; who was there from the first manifest on is not
    held        a manifest names what it has brought, and counts nothing of it: it moves no parameter
    cleared     more than half of the settled members have found nothing wrong with it: a warrant says so
    counted     a later manifest counts it, by the rule for what came too late: the same bytes, offered again
    settled     so many were counted: what it brings from then on counts at once

All of that is in the charter, so all members and the leader have it from the chain. What is brought in place of what is
held is held anew. Silence clears nothing: who shows auditors nothing is counted nothing.

Who is in quarantine can move the parameters in no other way, either: it owns no part of a result, brings nothing that a
branch had counted, is waited for by no mean, and leads a round only where no settled member does.

Nor does it judge others: of what a member brings the settled members are the judges (`judges`). Else a crowd that joins
and looks at nothing would keep them from being a majority, and one that lies would be one.

Who leaves and comes again is a newcomer, for whatever reason. Where all settled members leave at once, somebody has to
go on: then all who stay are settled.
"""

from collections.abc import Iterable, Sequence, Set

from msgspec import UNSET
from msgspec.structs import replace

from weft.ids import Digest, PeerId, Round
from weft.sync.records.charter import Charter, Quarantined
from weft.sync.records.messages import Base, Brought, Counted, HeldWork, Manifest

MIN_JUDGES = 2  # settled members beside the one that is judged
STILL = 16  # rounds: who shows auditors nothing cannot keep parts as they are for ever


def of(charter: Charter, peer: PeerId) -> Quarantined | None:
    """Return what holds of a member in quarantine; None: it is in none."""
    return next((each for each in charter.quarantined or () if each.peer == peer), None)


def members(charter: Charter) -> tuple[PeerId, ...]:
    """Return who is in quarantine, ascending."""
    return tuple(PeerId(each.peer) for each in charter.quarantined or ())


def settled(charter: Charter, electorate: Iterable[PeerId]) -> set[PeerId]:
    """Return who of an electorate is in none."""
    return set(electorate) - set(members(charter))


def judges(charter: Charter, electorate: Iterable[PeerId], peer: PeerId) -> tuple[PeerId, ...]:
    """Return of whom more than half have to agree that a member has brought something false, or shows nothing:
    ascending, that member among them if it is one of these.

    Where beside it there is only one settled member, or none, all members are: one alone strikes nobody out.
    """
    everybody = sorted(electorate)
    found = settled(charter, everybody)
    return tuple(sorted(found)) if len(found - {peer}) >= MIN_JUDGES else tuple(everybody)


def awaits(charter: Charter, peer: PeerId, round: Round, work: Digest) -> bool:
    """Return whether a work that this round's manifest names waits for others to look at it."""
    found = of(charter, peer)
    return found is not None and (found.round, found.work) == (round, work) and not found.is_cleared


def has_held(charter: Charter, peer: PeerId) -> bool:
    """Return whether something waits that a member has brought."""
    found = of(charter, peer)
    return found is not None and found.work is not UNSET


def is_cut_as_before(charter: Charter, round: Round) -> bool:
    """Return whether parts are to stay as large as they are, because something waits that has not waited for long: with
    other parts it would be other bytes."""
    return any(each.round is not UNSET and round - each.round < STILL for each in charter.quarantined or ())


def clear(charter: Charter, peer: PeerId) -> Charter:
    """Return the charter once what a member has brought may count."""
    return replace(
        charter,
        quarantined=tuple(
            replace(each, is_cleared=True) if each.peer == peer else each for each in charter.quarantined or ()
        ),
    )


def may_count(charter: Charter, brought: Brought) -> bool:
    """Return whether a round may count what a member brings."""
    found = of(charter, PeerId(brought.peer))
    if found is None:
        return True
    return brought.legacy is None and bool(found.is_cleared) and brought.work == found.work


def may_be_held(charter: Charter, brought: Brought) -> bool:
    """Return whether a manifest may name what a member in quarantine brings: it has not named that yet."""
    found = of(charter, PeerId(brought.peer))
    return found is not None and brought.legacy is None and brought.work not in (UNSET, found.work)


def is_lifted(base: Base, left: Set[PeerId]) -> bool:
    """Return whether a round counts what all bring, because no settled member stays.

    Args:
        left: who leaves with its manifest.
    """
    return settled(base.charter, base.electorate) <= left


def is_put_out(base: Base, me: PeerId, manifest: Manifest) -> bool:
    """Return whether a manifest says that this settled member leaves, and all others like it: it is here, and knows
    better."""
    found = settled(base.charter, base.electorate)
    return bool(base.charter.quarantined) and me in found and found <= set(manifest.left)


def is_kept(base: Base, manifest: Manifest) -> bool:
    """Return whether a manifest counts nothing of who is in quarantine but what was cleared, gives it no part of a
    result, and holds what it may hold."""
    new = set(members(base.charter))
    held = manifest.held or ()
    peers = [each.peer for each in held]
    counted = {each.peer for each in manifest.contributions}
    names = {each.peer: each.work for each in base.charter.quarantined or ()}
    if peers != sorted(set(peers) & new & set(manifest.members) - counted):
        return False
    if any(names[each.peer] == each.work for each in held):
        return False
    if is_lifted(base, set(manifest.left)):
        return True
    return all(may_count(base.charter, each) for each in manifest.contributions) and not (
        new & {part.owner for part in manifest.parts}
    )


def after(
    charter: Charter,
    round: Round,
    electorate: Sequence[PeerId],
    joined: Iterable[PeerId],
    counted: Iterable[Counted] = (),
    held: Iterable[HeldWork] = (),
) -> Charter:
    """Return the charter after a manifest.

    Args:
        charter: once the manifest's acts have taken effect.
        electorate: after the manifest; joined: those whom it counts in.
    """
    if not charter.audits or not charter.audits.quarantine:
        return charter
    now = {each.peer: each for each in charter.quarantined or ()}
    for each in counted:
        if each.peer in now and each.legacy is None:
            left = now[each.peer].left - 1
            if left:
                now[each.peer] = Quarantined(peer=each.peer, left=left)
            else:
                del now[each.peer]
    for one in held:
        if one.peer in now:  # else no member accepts the manifest
            now[one.peer] = Quarantined(peer=one.peer, left=now[one.peer].left, work=one.work, round=round)
    now |= {peer: Quarantined(peer=peer, left=charter.audits.quarantine) for peer in joined}
    if set(electorate) <= now.keys():
        now = {}
    found = tuple(now[peer] for peer in sorted(set(electorate) & now.keys()))
    return charter if found == (charter.quarantined or ()) else replace(charter, quarantined=found or UNSET)
