"""How large a part of the vector each member owns: in proportion to its uplink.

    level_i = 16                                       where the uplink is at least half of the fastest, or not known
              16 rate_i / rate_max, as a power of two  else, down to 4
              0                                        below; for newcomers, who may still be fetching; for who is
                                                       reached through others

An owner sends its merged part to everybody, so who sends slower must own less, or all wait for it. Who sends eight
times slower owns nothing: its uplink is busy with its own payload.

Levels are coarse, and one that was given stays as long as the measured one is within a factor of four: leaders take
turns and measure for themselves, and a payload whose upload takes several rounds must be cut alike in all of them.
"""

from collections.abc import Iterable, Mapping, Set

from weft.ids import PeerId
from weft.sync.merge.basis import Scope
from weft.sync.merge.reduce import cut
from weft.sync.records.messages import MAX_UPLINK, Base, Manifest

LEAST = 4
STAYS = 4  # a level this many times higher or lower is a change of the line, not of who measured it


def uplinks(base: Base, members: Iterable[PeerId], idle: Set[PeerId], rates: Mapping[PeerId, float]) -> tuple[int, ...]:
    """Return the level of each of `members`, in their order.

    Args:
        idle: who is to own nothing: newcomers, and who is reached through others.
        rates: of members, in bytes per second, positive, as far as they were measured.
    """
    members = tuple(members)
    fastest = max((rates[peer] for peer in members if peer in rates), default=0.0)
    settled = zip(base.electorate, base.uplinks, strict=False)
    before = {peer: level for peer, level in settled if peer not in base.newcomers}
    levels = {peer: _level(rates[peer] / fastest) for peer in members if peer in rates}
    return tuple(0 if peer in idle else _next(before.get(peer), levels.get(peer)) for peer in members)


def parts_of(manifest: Manifest, scope: Scope) -> tuple[range, ...]:
    """Return where the parts lie whose results a manifest names, of what its round has synchronised."""
    if manifest.is_gossip:
        return (range(0),) * len(manifest.parts)
    return cut(scope.num_sent(manifest.round), [part.uplink for part in manifest.parts])


def _level(ratio: float) -> int:
    level = MAX_UPLINK
    while level > LEAST and ratio * MAX_UPLINK <= level / 2:
        level //= 2
    return level if ratio * MAX_UPLINK > level / 2 else 0


def _next(before: int | None, level: int | None) -> int:
    if level is None:
        return MAX_UPLINK if before is None else before
    if before is None:
        return level
    is_alike = max(level, 1) < STAYS * max(before, 1) and max(before, 1) < STAYS * max(level, 1)
    return before if is_alike else level
