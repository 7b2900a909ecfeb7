"""Flat vectors that lie in several processes, each of which holds a strip: what is asked of one beside arithmetic.

    a site of three     |-- process 0 --|-- process 1 --|-- process 2 --|

One process tells the others what is to be computed. It sees the vector as a tensor on no device, with which plain
arithmetic works as with any other; what has to be bytes comes to it piece by piece.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor
from torch._ops import OpOverload

from weft.codec import bounds
from weft.ids import Digest
from weft.sync.merge.outer import State, StepContext
from weft.sync.method.choices import OuterConfig


class Readable(Tensor):
    """One that can be read, and no more."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__} of {self.numel()} numbers"

    @abstractmethod
    def read(self, where: range, into: Float32[Tensor, " piece"] | None = None) -> Float32[Tensor, " piece"]:
        """Return a piece, in this process' memory: `into` it, where that is given."""

    @classmethod
    def refused(cls, what: str) -> NotImplementedError:
        return NotImplementedError(f"{what} is not possible with a {cls.__name__}, which lies in several processes")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub has another
        cls, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do what torch asks of such tensors: here, nothing."""
        raise cls.refused(str(func.overloadpacket.__name__))


class SpreadVector(Readable):
    @abstractmethod
    def like(self, vector: Float32[Tensor, " num"]) -> "SpreadVector":
        """Return a copy of `vector`, which is as long, spread like this one."""

    @abstractmethod
    def write(self, where: range, piece: Float32[Tensor, " piece"]) -> None:
        """Set a piece."""

    @abstractmethod
    def room(self, nbytes: int) -> memoryview:
        """Return writable memory of this process for `nbytes` bytes: not much may be held in it beside a strip."""

    @abstractmethod
    def chunk_digests(self) -> tuple[Digest, ...]:
        """Return the digest of each chunk of a state: no chunk lies in two processes."""

    @abstractmethod
    def step(self, config: OuterConfig, state: State, merged: Tensor, context: StepContext) -> None:
        """Make the step of an outer optimizer on this vector and `state`, in place, each process on its strip."""


def alike(vector: Float32[Tensor, " num"], model: Tensor) -> Float32[Tensor, " num"]:
    """Return `vector` where `model` is: itself, unless it has to be spread."""
    if isinstance(model, SpreadVector) and not isinstance(vector, SpreadVector):
        return model.like(vector)
    return vector


def gathered(vector: Float32[Tensor, " num"], empty: Callable[[int], Tensor] = bounds.empty) -> Float32[Tensor, " num"]:
    """Return a copy of `vector` in this process' memory.

    Args:
        empty: gives memory for so many numbers, where the vector does not say itself where copies of it lie.
    """
    if not isinstance(vector, SpreadVector):
        return empty(vector.numel()).copy_(vector)
    copy = torch.frombuffer(vector.room(vector.nbytes), dtype=torch.float32)
    return vector.read(range(vector.numel()), copy)


def empty_like(vector: Float32[Tensor, " num"]) -> Float32[Tensor, " num"]:
    """Return a vector where `vector` is, holding anything."""
    return torch.empty_like(vector) if isinstance(vector, SpreadVector) else bounds.empty(vector.numel())
