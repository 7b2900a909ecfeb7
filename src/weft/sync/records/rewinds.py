"""Going back to the parameters after an earlier round: when a run may, and what that makes of what was counted since.

    decided in round s, to round r     the parameters after s are those after r; the outer optimizer is new
    dropped                            what rounds r + 1 to s have moved, though they stay decided and counted
    on                                 with round s + 1; numbers of rounds, tokens, leases and members are as they were

It is for audited runs, where peers keep on disk what their last leases began at. The charter names each time, so all
members know what of the rounds before is in the parameters:

    false work that was counted in a dropped round is gone with it, and not taken out
    a dropped round that has taken out an older one has not
    a branch that has gone back to before it began brings nothing to the one that goes on: what it has come to holds
    less than both had

A round that was dropped is no round to go back to. The last one, s, is: what holds after it is what held after r. So
the same votes never make a run go back twice.
"""

from collections.abc import Sequence

from msgspec import UNSET
from msgspec.structs import replace

from weft.errors import WireError
from weft.ids import Digest, PeerId, Round
from weft.sync.records import quarantine
from weft.sync.records.acts import Act, Rewind, RewindBallot
from weft.sync.records.ancestry import Fork
from weft.sync.records.charter import MAX_REWOUND, Charter, Rewound
from weft.sync.records.messages import Manifest
from weft.wire import Signed, decode

Target = tuple[Round, Digest, Digest]  # a round, its manifest and the state after it: what votes count together for
WITHIN = 16  # rounds: what leases began at is kept for some more (`weft.peer.audit.trace`)


def why_not(charter: Charter, round: Round, rewind: Rewind) -> str:
    """Return why a manifest of this round may not go back so; empty: it may, if the round is as it is said to be."""
    if charter.audits is UNSET:
        return "nobody keeps earlier parameters in a run that does not audit"
    if not round - WITHIN <= rewind.round < round - 1:
        return f"a run goes back to one of the last {WITHIN} rounds, and not to the last of all"
    if len(charter.rewound or ()) == MAX_REWOUND:
        return f"this run has gone back {MAX_REWOUND} times, which is the most"
    if any(each.to <= rewind.round < each.at for each in charter.rewound or ()):
        return f"the run has gone back behind round {rewind.round} already"
    return ""


def after(charter: Charter, round: Round, rewind: Rewind) -> Charter:
    """Return the charter once a manifest of this round goes back."""
    rewound = (*(charter.rewound or ()), Rewound(at=round, to=rewind.round))
    return without_dropped(replace(charter, rewound=rewound))


def without_dropped(charter: Charter) -> Charter:
    """Return the charter without what the last time of going back has made of false works."""
    works, last = charter.false_works, (charter.rewound or (None,))[-1]
    if works is UNSET or last is None:
        return charter
    kept = tuple(
        replace(each, taken_out=UNSET) if each.taken_out is not UNSET and each.taken_out > last.to else each
        for each in works
        if not last.to < each.round <= last.at
    )
    return replace(charter, false_works=kept or UNSET)


def is_dropped(charter: Charter, round: Round) -> bool:
    """Return whether what a round has moved is in the parameters no more."""
    return any(each.to < round <= each.at for each in charter.rewound or ())


def is_behind(charter: Charter, fork: Fork) -> bool:
    """Return whether a branch that began at `fork` has gone back to before that."""
    return any(each.to + 1 < fork.round <= each.at for each in charter.rewound or ())


def voters(charter: Charter, electorate: Sequence[PeerId]) -> tuple[PeerId, ...]:
    """Return of whom more than half bring a run back: of the settled members, for to go back moves parameters, too.

    Where there is only one, of all members: one alone brings nobody back.
    """
    settled = quarantine.settled(charter, electorate)
    return tuple(peer for peer in electorate if peer in settled or len(settled) < quarantine.MIN_JUDGES)


def target(rewind: Rewind) -> Target:
    return rewind.round, Digest(rewind.manifest), Digest(rewind.state)


def read(letter: Signed) -> Rewind | None:
    """Return what an act or a ballot wants, as it reads; None: it wants something else."""
    try:
        if letter.kind == RewindBallot.__name__:
            ballot: RewindBallot = decode(letter.body, RewindBallot)
            return ballot.rewind
        act: Act | None = decode(letter.body, Act) if letter.kind == Act.__name__ else None
    except WireError:
        return None
    return act.deed if act is not None and isinstance(act.deed, Rewind) else None


def decided(manifest: Manifest) -> Rewind | None:
    """Return how the run goes back with a manifest whose acts take effect; None: it does not."""
    found = (read(warrant.letters[0]) for warrant in manifest.acts if warrant.shown is UNSET)
    return next((each for each in found if each is not None), None)
