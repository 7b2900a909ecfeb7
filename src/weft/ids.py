"""Names for the plain values that cross borders, and how people read keys and counts.

A digest, a peer and a run are lower-case hexadecimal strings: they sort like their bytes, read well in a
log, and need no escaping in any format. The other names keep units apart in signatures.
"""

import re
from collections.abc import Callable
from typing import NewType

PeerId = NewType("PeerId", str)  # hex of the 32-byte Ed25519 public key
Digest = NewType("Digest", str)  # hex of a 32-byte BLAKE3 hash
RunId = NewType("RunId", str)  # digest of the run's RunConfig: its genesis
BranchId = NewType("BranchId", str)  # digest of the record that opened the branch; the main branch is the RunId
Round = NewType("Round", int)  # counts commits on a branch, from 0
Attempt = NewType("Attempt", int)  # counts leaders tried within one round, from 0
Step = NewType("Step", int)  # inner optimizer steps of one peer, from 0
Tokens = NewType("Tokens", int)


START_NBYTES = 15  # of a key, on a ticket: nobody makes another key that begins so, which takes 2^120 tries


def start_of(peer: PeerId) -> PeerId:
    """Return the first digits of a key, by which a ticket names a peer."""
    return PeerId(peer[: 2 * START_NBYTES])


def is_start(name: PeerId) -> bool:
    """Return whether a peer is named by the first digits of its key, and no more of it is known."""
    return len(name) == 2 * START_NBYTES


def is_named(peer: PeerId, name: PeerId) -> bool:
    """Return whether `name` is the key `peer`, or its first digits as `start_of` has them."""
    return peer == name or (is_start(name) and peer.startswith(name))


def short(name: str) -> str:
    """Return the first 8 characters: enough to tell peers and digests apart when a person reads them."""
    return name[:8]


def name_of(peer: PeerId, name: str, *, is_shared: bool = False) -> str:
    """Return what a person calls a peer: its name, with a part of its key where others have that name, too."""
    if not name:
        return short(peer)
    return f"{name} ({short(peer)})" if is_shared else name


_PART = re.compile(r"(?<![\w(])[0-9a-f]{8}(?!\w)")  # in brackets it stands behind a name


def with_names(text: str, name: Callable[[str], str | None]) -> str:
    """Return a text in which each part of a key, as `short` has it, is the peer's name.

    Args:
        name: what the peer of this part is called; None: it is no peer's, or nobody knows.
    """
    return _PART.sub(lambda found: name(found[0]) or found[0], text)


_CONSONANT_Y = tuple(f"{letter}y" for letter in "bcdfghjklmnpqrstvwxz")


def several(num: int | str, one: str) -> str:
    """Return a number of things.

    Args:
        num: or the number as it is to be written: "1.5".
        one: what one of them is called, the noun last: "training step".
    """
    written = num if isinstance(num, str) else f"{num:,}"
    return f"{written} {one if written == '1' else _many(one)}"


def _many(one: str) -> str:
    if one.endswith(_CONSONANT_Y):
        return f"{one[:-1]}ies"
    return f"{one}es" if one.endswith(("s", "x", "ch", "sh")) else f"{one}s"
