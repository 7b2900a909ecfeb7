"""False works that are taken out of the model again: which, in which round, and once.

    struck out     verdicts name what round r has counted of the work: into the charter        `with_false`
    due            until `WITHIN` rounds after r, in rounds of the same fragment, by the same method
    planned        a leader that knows what that round was made of names it
    decided        the manifest says so, and the charter does from then on                     `with_taken_out`

Then the mean of that later round is less by what the work has moved in r (`weft.sync.merge.counter`), and the outer
step undoes it, where outer steps are linear in the mean.

A charter is of one branch, so is what it says of false works. A work that another branch has counted is not due in this
one, and a branch that is given up brings no other what it has taken out of rounds that both have (`is_mixed`).
"""

from collections.abc import Iterable, Sequence, Set

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from weft.ids import PeerId, Round
from weft.sync.method.choices import Choices, DelayedNesterovConfig, NesterovConfig, SgdConfig
from weft.sync.records.acts import Weighed
from weft.sync.records.ancestry import Fork, History, Stretch
from weft.sync.records.charter import MAX_BANNED, Charter, FalseWork
from weft.sync.records.messages import MAX_COUNTERS, Base
from weft.sync.records.rewinds import is_behind, is_dropped
from weft.wire import digest_of

WITHIN = 16  # rounds: for so long payloads are kept (`weft.peer.audit.kept`)

LINEAR = SgdConfig | NesterovConfig | DelayedNesterovConfig


def why_none(method: Choices) -> str:
    """Return why nothing can be taken out of rounds that are computed so; empty: it can."""
    if method.is_merged_by_all:
        return "all merge for themselves, and nobody keeps what was brought"
    if method.merge != "peers_mean":
        return f"rounds are merged by {method.rule_name}, in which nobody has a part of its own"
    if method.sends_gradient or not isinstance(method.apply, LINEAR):
        return "the outer step is not linear in the mean"
    return "members exchange with neighbours" if method.graph is not None else ""


def with_false(charter: Charter, peer: PeerId, round: Round, weighed: Weighed) -> Charter:
    """Return the charter once a key is struck out for a work that this round has counted."""
    if is_dropped(charter, round):
        return charter
    found = FalseWork(peer=peer, round=round, weighed=weighed)
    known = charter.false_works or ()
    others = [each for each in known if (each.peer, each.round) != (peer, round) or each.taken_out is not UNSET]
    return replace(charter, false_works=(*others, found)[-MAX_BANNED:])


def of(charter: Charter, peer: PeerId) -> FalseWork | None:
    """Return the work that a key was struck out for and that is not taken out; None: there is none.

    Of several the newest: they go one after another. There are several where more works of a key were found false, or
    where a run went back to before some were taken out.
    """
    works = (each for each in charter.false_works or () if each.taken_out is UNSET and each.peer == peer)
    return max(works, key=lambda each: each.round, default=None)


def due(base: Base) -> tuple[FalseWork, ...]:
    """Return what the round of `base` may take out, ascending by peer."""
    works = (of(base.charter, peer) for peer in sorted({PeerId(each.peer) for each in base.charter.false_works or ()}))
    return tuple(each for each in works if each is not None and is_due(base, each))


def is_due(base: Base, work: FalseWork) -> bool:
    method, apart = base.charter.settings.method, base.round - work.round
    if work.taken_out is not UNSET or apart > WITHIN or apart % method.fragments or base.is_gossip:
        return False
    own = History(base.branch, base.charter.forks, base.round, ())
    at = Stretch(branch=work.weighed.branch, start=work.round, stop=Round(work.round + 1))
    return own.holds(at) and work.weighed.method == digest_of(method) and not why_none(method)


def planned(base: Base, known: Iterable[PeerId], unusable: Set[PeerId]) -> tuple[PeerId, ...] | UnsetType:
    """Return whose false works a leader plans to take out of those that it knows; unset: nobody's.

    Args:
        unusable: whose work cannot be had.
    """
    able = {each.peer for each in due(base)} & set(known) - unusable
    return tuple(sorted(able))[:MAX_COUNTERS] or UNSET


def are_due(base: Base, peers: Sequence[PeerId]) -> bool:
    """Return whether the round may take out the false works of these: ascending, each once."""
    return list(peers) == sorted(set(peers)) and set(peers) <= {each.peer for each in due(base)}


def with_taken_out(base: Base, charter: Charter, peers: Sequence[PeerId]) -> Charter | None:
    """Return the charter once the round of `base` has taken out the false works of these; None: it may not.

    Args:
        charter: after the round's acts.
    """
    if not are_due(base, peers):
        return None
    out = [each for each in due(base) if each.peer in peers]
    after = tuple(replace(each, taken_out=base.round) if each in out else each for each in charter.false_works or ())
    return replace(charter, false_works=after)


def is_mixed(charter: Charter, fork: Fork) -> bool:
    """Return whether a branch that began at `fork` has taken out what was counted before, which it shares with others,
    or has gone back to before that.

    What it has come to holds that, too: were it counted elsewhere, the work would be taken out there a second time.
    """
    works = charter.false_works or ()
    taken_out = any(each.taken_out is not UNSET and each.round < fork.round <= each.taken_out for each in works)
    return taken_out or is_behind(charter, fork)
