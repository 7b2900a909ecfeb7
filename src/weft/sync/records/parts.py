"""Where the parts of a vector lie that members merge for each other, one each."""

from collections.abc import Sequence

from weft.codec.config import MAX_BLOCK

ALIGNMENT = MAX_BLOCK  # elements; every codec's block divides it, so a part's encoding does not depend on the cut


def cut(num: int, uplinks: Sequence[int]) -> tuple[range, ...]:
    """Return one part of [0, num) per entry of `uplinks`, sized in proportion to it.

    Args:
        num: elements of the vector.
        uplinks: integers >= 0 in any unit; 0 owns an empty part. Where all are 0, all own alike.

    Returns:
        ranges that cover [0, num) in order without overlap; borders are multiples of `ALIGNMENT`, so each part is
        within one `ALIGNMENT` of its share. Integer arithmetic: equal on all machines.
    """
    if not uplinks or min(uplinks) < 0:
        raise ValueError(f"cannot cut among uplinks {list(uplinks)}: need one or more, none negative")
    shares = list(uplinks) if any(uplinks) else [1] * len(uplinks)
    total, num_blocks = sum(shares), -(-num // ALIGNMENT)
    parts, start, cumulative = [], 0, 0
    for share in shares:
        cumulative += share
        stop = min(num_blocks * cumulative // total * ALIGNMENT, num)
        parts.append(range(start, stop))
        start = stop
    return tuple(parts)
