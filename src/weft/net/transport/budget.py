"""What of its open files, and of its memory, one process gives to connections, and whose come first.

    the process's own files     the newest `spare` of those that it may open are never a connection's: logs,
                                checkpoints, shards
    connections it makes        half of `spare` is theirs before it is lost to those that others make
    members                     control connections up to `links`, bulk streams up to `streams`
    newcomers                   who has proven no key yet, or is not admitted yet: up to `newcomers`

The system gives each new file the lowest number that is free. So a number tells how many are open at least, and none of
this needs to know how many files the process has opened beside.

`Streams` holds the bulk streams of all members. When one more than the bound comes, one of whoever holds most makes
room, one that rests before one that moves bytes.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from weft.ids import PeerId

K = TypeVar("K", bound=Hashable)

# Of an elector of the largest run: 63 leaves, 31 electors, 8 of the overlay, as many that others keep or twice that, 16
# idle ones (net/membership/membership.py). What is left is for newcomers, who ask one elector after another for a
# place.
MAX_LINKS = 192
# Bulk streams over all members, 0.2 MB each with what OpenSSL and the system hold: 31 members that exchange at once
# need half of them.
MAX_STREAMS = 512
MAX_NEWCOMERS = 4096  # as machine files may ask for
SPARE_PART, LEAST_SPARE, MOST_SPARE = 4, 16, 128  # own files that a process may still want to open


@dataclass(frozen=True)
class Budget:
    """How many connections of which kind a process may hold.

    Args:
        files: numbers of open files that connections may have; None: the system sets no bound.
    """

    files: int | None = None
    spare: int = MOST_SPARE
    newcomers: int = MAX_NEWCOMERS
    links: int = MAX_LINKS
    streams: int = MAX_STREAMS

    def is_taken(self, number: int, *, is_ours: bool) -> bool:
        """Return whether a connection whose file has this number takes what is kept for others.

        Args:
            is_ours: this process has made it.
        """
        return self.files is not None and number >= self.files - (self.spare // 2 if is_ours else self.spare)


def budget_of(files: int | None) -> Budget:
    """Return what a process may hold that may open so many files; None: any number."""
    if files is None:
        return Budget()
    spare = min(max(files // SPARE_PART, LEAST_SPARE), MOST_SPARE)
    left = max(files - 2 * spare, 8)  # as much again is what it has open already
    newcomers = max(left // 4, 4)
    links = min(max((left - newcomers) // 2, 4), MAX_LINKS)
    return replace(
        Budget(files=files, spare=spare),
        newcomers=newcomers,
        links=links,
        streams=min(max(left - newcomers - links, 4), MAX_STREAMS),
    )


class Streams(Generic[K]):
    """Who holds which streams, oldest first, and which of them rest.

    Args:
        most: over all.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[PeerId, dict[K, bool]] = {}  # each stream, and whether it rests
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def of(self, peer: PeerId) -> tuple[K, ...]:
        return tuple(self._held.get(peer, ()))

    def enter(self, peer: PeerId, stream: K, *, rests: bool = False) -> bool:
        """Take up a stream; return whether there is room. Where there is none, close what `victim` returns first."""
        if self._num >= self._most:
            return False
        self._held.setdefault(peer, {})[stream] = rests
        self._num += 1
        return True

    def leave(self, peer: PeerId, stream: K) -> None:
        held = self._held.get(peer, {})
        if held.pop(stream, None) is not None:
            self._num -= 1
            if not held:
                del self._held[peer]

    def rest(self, peer: PeerId, stream: K, rests: bool) -> None:
        """Note that a stream waits for its next request from now on, or does so no more."""
        held = self._held.get(peer, {})
        if stream in held:
            del held[stream]  # who has rested longest stands first
            held[stream] = rests

    def victim(self, newcomer: PeerId) -> tuple[PeerId, K] | None:
        """Return the stream that makes room for one of `newcomer`, or None: it holds as many as anybody."""
        by_most = sorted(self._held, key=lambda peer: -len(self._held[peer]))
        for peer in by_most:
            if (stream := next((each for each, rests in self._held[peer].items() if rests), None)) is not None:
                return peer, stream
        if by_most and len(self._held[by_most[0]]) > len(self._held.get(newcomer, ())) + 1:
            return by_most[0], next(iter(self._held[by_most[0]]))
        return None
