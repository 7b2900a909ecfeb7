"""Which numbers of the vector a round synchronises: all of them, or one fragment after the other.

    fragments = 3   |0|1|2|0|1|2|0|1|2|...|     round t: the pieces of fragment t mod 3, one after the other

Each fragment has pieces from all over the vector, so from all depths of the model, and all fragments are about as
large. Streaming DiLoCo (Douillard et al., 2501.18512, section 3.1) deals out whole layers in the same strides; where
a layer ends makes no difference to what is computed.
"""

import torch
from torch import Tensor

from weft.errors import ConfigError

PIECES = 8  # of each fragment
_GRAIN = 64  # pieces are a multiple of so many numbers


class Scope:
    """
    Args:
        num: numbers of the vector.

    Raises:
        ConfigError: a fragment would be empty.
    """

    def __init__(self, num: int, fragments: int = 1) -> None:
        self.num = num
        self.fragments = fragments
        size = -(-num // (fragments * PIECES * _GRAIN)) * _GRAIN
        pieces = [slice(start, min(start + size, num)) for start in range(0, num, size or 1)]
        self._pieces = (
            [pieces[number::fragments] for number in range(fragments)] if fragments > 1 else [[slice(0, num)]]
        )
        if num and not all(self._pieces):
            raise ConfigError(
                f"method: fragments: a vector of {num:,} numbers has no {fragments} fragments; set fewer, or train a "
                "larger model."
            )

    def fragment(self, round: int) -> int:
        """Return the number of the fragment that a round synchronises."""
        return round % self.fragments

    def num_sent(self, round: int) -> int:
        """Return how many numbers that has."""
        return sum(piece.stop - piece.start for piece in self._pieces[self.fragment(round)])

    @property
    def most_sent(self) -> int:
        """The same, of the largest."""
        return max(self.num_sent(number) for number in range(self.fragments))

    def take(self, vector: Tensor, round: int) -> Tensor:
        """Return the numbers of `vector` that a round synchronises: a view where it is all of them."""
        if self.fragments == 1:
            return vector
        return torch.cat([vector[piece] for piece in self._pieces[self.fragment(round)]])

    def put(self, vector: Tensor, round: int, numbers: Tensor) -> None:
        """Write what `take` returned, changed, back into `vector`."""
        if self.fragments == 1:
            if numbers is not vector and not numbers.data_ptr() == vector.data_ptr() != 0:  # 0: it lies elsewhere
                vector.copy_(numbers)
            return
        start = 0
        for piece in self._pieces[self.fragment(round)]:
            stop = start + piece.stop - piece.start
            vector[piece] = numbers[start:stop]
            start = stop
