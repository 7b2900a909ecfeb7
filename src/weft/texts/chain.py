"""What stands for the tokens of a text up to a place, so that two peers can tell whether they have read the same.

    chain[0] = BLAKE3(key)      chain[i + 1] = BLAKE3(key, chain[i], token i)

Only who reads tokens has the key: the peer that asks, and the first stage's member. Those of the stages between see
digests alone. The key comes of a salt and of the weights, so pages of keys and values are named by it, too: two texts
that begin alike under one salt have the same digests.
"""

from collections.abc import Iterable, Sequence

from blake3 import blake3

from weft.engine.scheduling.pages import PAGE

DIGEST_NBYTES = 16
KEY_NBYTES = 32
_KEY = "weft 2026 chain of tokens v1"

Chain = tuple[bytes | None, ...]
"""Of a text's first 0, 1, 2, ... tokens; None: of a place within pages that another text filled."""


def key_of(salt: bytes, round: int) -> bytes:
    """Return the key of all texts that may share pages.

    Args:
        salt: who may share them.
        round: whose weights compute them.
    """
    return blake3(round.to_bytes(8, "little") + salt, derive_key_context=_KEY).digest(KEY_NBYTES)


def chain_of(key: bytes, tokens: Iterable[int], before: bytes | None = None) -> tuple[bytes, ...]:
    """Return the digest before the first of `tokens`, and that after each.

    Args:
        before: None: these tokens are a text's first.
    """
    found = [blake3(b"", key=key).digest(DIGEST_NBYTES) if before is None else before]
    for token in tokens:
        found.append(blake3(found[-1] + token.to_bytes(4, "little"), key=key).digest(DIGEST_NBYTES))
    return tuple(found)


def places(num: int) -> tuple[int, ...]:
    """Return the places of a text of `num` tokens by which peers find out how far they agree, ascending.

    Those are where pages end, for they may be there of another text; and where it ends, 1 before that, 2, 4, ...
    """
    near = {num - (1 << power) for power in range(num.bit_length())}
    return tuple(sorted({0, num, *range(0, num, PAGE), *(place for place in near if place > num - PAGE)}))


def joined(chain: Sequence[bytes]) -> bytes:
    return b"".join(chain)


def split(chain: bytes) -> tuple[bytes, ...]:
    return tuple(chain[at : at + DIGEST_NBYTES] for at in range(0, len(chain), DIGEST_NBYTES))
