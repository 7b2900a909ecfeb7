"""Whose word counts when an owner says that it cannot have somebody's contribution, or cannot decode it.

    owner B: "C has not delivered"     C may have failed, or B lies: one word against another

The leader believes itself. Of others it takes two witnesses to leave a contribution out, its own too: two owners, or
one and membership, which says that C is away; and on their word fewer than half of those that announced are left out.
Whoever stands alone with its word merges nothing more, and what it says it lacks is merged by others. So one liar keeps
nobody out; and whatever the others say, each of them ends few plans: in the end the leader owns all parts itself.

It does not know why a contribution cannot be had.
"""

from collections import Counter
from collections.abc import Set

from weft.ids import PeerId
from weft.sync.round.machine import State, replace

WITNESSES = 2


def judged(state: State, owner: PeerId, missing: Set[PeerId]) -> State:
    """Return the leader's state once an owner says that it lacks contributions which are planned."""
    words = {**state.lacking, owner: state.lacking.get(owner, frozenset()) | missing}
    mine = words.pop(state.me, frozenset())
    away = state.suspected | state.gone | state.farewells.keys()
    num_words = Counter(peer for lacking in words.values() for peer in lacking)
    believed = {peer for peer, num in num_words.items() if num + (peer in away) >= WITNESSES}
    unusable = state.unusable | mine
    if 2 * len(unusable | believed) < len(state.ready):
        unusable |= believed
    lacking = {peer: alone for peer, word in words.items() if (alone := word - unusable)}
    return replace(state, unusable=unusable, lacking=lacking)
