"""Named, seeded streams of random numbers. The only file that makes generators.

`stream(seed, "data", round, peer)` gives the same numbers on every machine: the name is hashed to a Philox
key, and Philox output is integer arithmetic. Floats drawn through numpy's own methods may use libm; the
shared path draws raw integers only (`integers64`).
"""

import secrets
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from weft.ids import Digest

if TYPE_CHECKING:
    from torch import Tensor


def stream(seed: int, *name: str | int) -> np.random.Generator:
    """Return the generator that belongs to `seed` and `name`; distinct names give independent streams."""
    label = _label((seed, *name))
    key = int.from_bytes(blake3(label, derive_key_context="weft 2026 rng stream v1").digest(16), "little")
    return np.random.Generator(np.random.Philox(key=key))


def integers64(generator: np.random.Generator, count: int) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """Return `count` uniform 64-bit words, bit-identical on every machine."""
    words: np.ndarray[tuple[int], np.dtype[np.uint64]] = generator.bit_generator.random_raw(count)
    return words


def draw_kept(mask: "Tensor", word: int, share: float) -> None:
    """Make each element of `mask` true with a probability, by what `word` names: alike on devices of one kind.

    Args:
        word: of 64 bits.
    """
    import torch  # not of the ground floor

    mask.bernoulli_(share, generator=torch.Generator(mask.device).manual_seed(word))


def draw_normal(numbers: "Tensor", word: int) -> None:
    """Draw each element of `numbers` from the normal distribution, by what `word` names: alike on devices of one kind.

    Args:
        word: of 64 bits.
    """
    import torch  # not of the ground floor

    numbers.normal_(generator=torch.Generator(numbers.device).manual_seed(word))


def fresh_secret(num_bytes: int = 32) -> bytes:
    """Return unpredictable bytes from the operating system: keys, nonces and ticket secrets."""
    return secrets.token_bytes(num_bytes)


def order_key(*parts: str | int) -> Digest:
    """Return the hash that fixes an order among names nobody may choose: leaders, ties."""
    return Digest(blake3(_label(parts), derive_key_context="weft 2026 order v1").hexdigest())


def _label(parts: tuple[str | int, ...]) -> bytes:
    """Return bytes that no other name has: repr tells ("a", 1) from ("a1",), for these two types only."""
    for part in parts:
        if type(part) not in (str, int):  # a numpy integer or a bool prints otherwise, and would name another stream
            raise TypeError(f"a stream is named by str and int, not by {part!r} of type {type(part).__name__}")
    return repr(parts).encode()
