"""What members of a stage have found of what others compute, until a manifest deals with it: pure.

kept       of each member and each that it accuses the newest letter
warrants   what more than half of the electorate has found of one, for the next manifest
still      what can come to something after a round
"""

from collections.abc import Iterator, Mapping

from weft.ids import PeerId
from weft.sync.governance import Void
from weft.sync.records import acts
from weft.sync.records.messages import Base
from weft.sync.records.passages import Convicted, convicted, why_void
from weft.wire import Signed, claimed

Cast = Mapping[PeerId, Mapping[PeerId, Signed]]  # by who is accused, and by who accuses


def kept(cast: Cast, base: Base, letter: Signed) -> Cast:
    """Return the letters with one more; the very same where that one, or a newer one, is there.

    Raises:
        Void: it comes to nothing.
    """
    if (why := why_void(base.charter, base.body, letter)) is not None:
        raise Void(why)
    peer, before = accused(letter), cast.get(accused(letter), {})
    known = before.get(letter.signer)
    if known is not None and round_of(known) >= round_of(letter):
        return cast
    return {**cast, peer: {**before, letter.signer: letter}}


def still(cast: Cast, base: Base) -> Cast:
    """Return the letters that can come to something in the round of `base`."""
    left = {
        peer: {by: each for by, each in mine.items() if why_void(base.charter, base.body, each) is None}
        for peer, mine in cast.items()
    }
    return {peer: mine for peer, mine in left.items() if mine}


def warrants(cast: Cast, base: Base) -> list[acts.Warrant]:
    """Return what more than half of the electorate has found."""
    found = list[acts.Warrant]()
    for peer in sorted(cast):
        votes = tuple(cast[peer][voter] for voter in sorted(cast[peer]) if voter in base.electorate)
        if votes and isinstance(convicted(base.charter, base.body, votes), Convicted):
            found.append(acts.Warrant(letters=votes))
    return found


def letters(cast: Cast) -> Iterator[Signed]:
    for each in cast.values():
        yield from each.values()


def accused(letter: Signed) -> PeerId:
    return PeerId(claimed(letter, acts.FalsePassage).peer)


def round_of(letter: Signed) -> int:
    return int(claimed(letter, acts.FalsePassage).round)
