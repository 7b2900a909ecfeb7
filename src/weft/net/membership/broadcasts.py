"""What is passed on, to whom, how often: the gossip of membership, as pure functions on a bounded log.

    log = add(log, broadcast, source, now)
    log, broadcasts = take(log, partner, most, num_peers)

Each broadcast goes at most once to each partner, never back to where it came from, and at most `LAMBDA` * log2(n + 1)
times in all (Das, Gupta, Motivala, "SWIM", 2002, section 4.1). A stream loses nothing while it stands, so once over
each link is enough, and partners are fewer than that bound unless somebody has far more links than meant. What a broken
link lost, anti-entropy brings (net/membership/members.py). What is not urgent goes to `FEW` only, so that it is
heard five times by each and not once over every link. A newer broadcast about the same thing takes the place of the
older.
"""

import math
from itertools import takewhile
from typing import Any

import msgspec

from weft.ids import PeerId

LAMBDA = 3
FEW = 5  # 1 - e^(-5): 99 % hear it at once, the others when they compare
MAX_BROADCASTS = 1024  # the oldest make room: who floods displaces what all others heard long ago
STALE_S = 30.0  # by then it has gone round many times
Key = tuple[str, ...]  # what a broadcast is about


class Item(msgspec.Struct, frozen=True):
    number: int
    broadcast: Any
    source: PeerId | None
    since: float
    is_urgent: bool
    num_given: int = 0


class Log(msgspec.Struct, frozen=True, kw_only=True):
    items: dict[Key, Item] = {}  # oldest first, numbers ascending; never changed in place
    given: dict[PeerId, int] = {}  # the last number that each partner has had
    next_number: int = 1


def add(log: Log, key: Key, broadcast: Any, source: PeerId | None, now: float, *, is_urgent: bool = True) -> Log:
    """Return the log with `broadcast`, to be passed on to all partners but `source`, or to `FEW` of them."""
    items = dict(log.items)
    items.pop(key, None)
    while len(items) >= MAX_BROADCASTS:
        del items[next(iter(items))]
    items[key] = Item(log.next_number, broadcast, source, now, is_urgent)
    return msgspec.structs.replace(log, items=items, next_number=log.next_number + 1)


def pending(log: Log, partner: PeerId) -> bool:
    """Return whether there is something `partner` has not had."""
    given = log.given.get(partner, 0)
    if given + 1 >= log.next_number:
        return False
    fresh = takewhile(lambda item: item.number > given, reversed(log.items.values()))  # numbers ascend
    return any(item.source != partner for item in fresh)


def take(log: Log, partner: PeerId, most: int, num_peers: int) -> tuple[Log, tuple[Any, ...]]:
    """Return up to `most` broadcasts for `partner`, oldest first, and the log that knows that it has had them."""
    given = log.given.get(partner, 0)
    if given + 1 >= log.next_number:
        return log, ()
    fresh = list(takewhile(lambda each: each[1].number > given, reversed(log.items.items())))  # numbers ascend
    chosen = [(key, item) for key, item in reversed(fresh) if item.source != partner]
    last = log.next_number - 1 if len(chosen) <= most else chosen[most - 1][1].number
    items, limit = dict(log.items), LAMBDA * math.ceil(math.log2(num_peers + 1))
    for key, item in chosen[:most]:
        if item.num_given + 1 >= (limit if item.is_urgent else FEW):
            del items[key]
        else:
            items[key] = msgspec.structs.replace(item, num_given=item.num_given + 1)
    log = msgspec.structs.replace(log, items=items, given={**log.given, partner: last})
    return log, tuple(item.broadcast for _, item in chosen[:most])


def meet(log: Log, partner: PeerId) -> Log:
    """Return the log as a link to `partner` comes up: what happened before it learns by comparing."""
    return msgspec.structs.replace(log, given={**log.given, partner: log.next_number - 1})


def leave(log: Log, partner: PeerId) -> Log:
    """Return the log without what it knows of `partner`."""
    return msgspec.structs.replace(log, given={peer: number for peer, number in log.given.items() if peer != partner})


def prune(log: Log, now: float) -> Log:
    """Return the log without what is old."""
    if all(now - item.since < STALE_S for item in log.items.values()):
        return log
    fresh = {key: item for key, item in log.items.items() if now - item.since < STALE_S}
    return msgspec.structs.replace(log, items=fresh)
