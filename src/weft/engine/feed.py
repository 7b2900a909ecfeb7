"""Feed-forward networks of a step's layers: one, or several of which a router chooses for each row."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear, silu

from weft.engine.numbers import MATRICES, Kind, Matrix
from weft.errors import ConfigError

Rows = Float[Tensor, "rows width"]


class Feed(Protocol):
    nbytes: int

    def __call__(self, x: Rows) -> Rows:
        """Return what is added to the residual stream, of what its norm makes of it."""
        ...


class Dense:
    def __init__(self, gate_up: Matrix, down: Matrix) -> None:
        self._gate_up, self._down = gate_up, down
        self.nbytes = gate_up.nbytes + down.nbytes

    def __call__(self, x: Rows) -> Rows:
        gate, up = self._gate_up(x).chunk(2, dim=1)
        return self._down(silu(gate) * up)


class Routed:
    """The networks that the router holds likeliest compute a row, each for its share of what they have together.

    A router is small, and which networks it chooses decides everything: it is held in fp32, whatever they are held in.

    Args:
        top: how many compute a row.
    """

    def __init__(self, router: Float[Tensor, "networks width"], networks: Sequence[Dense], top: int) -> None:
        self._router, self._networks, self._top = router.float(), networks, top
        self.nbytes = self._router.nbytes + sum(each.nbytes for each in networks)

    def __call__(self, x: Rows) -> Rows:
        shares, chosen = linear(x, self._router).softmax(-1).topk(self._top, dim=-1)
        shares = shares / shares.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for number, network in enumerate(self._networks):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                y.index_add_(0, rows, network(x[rows]) * shares[rows, place, None])
        return y


def feed_of(tensors: Mapping[str, Tensor], layer: str, kind: Kind, top: int) -> Feed:
    """Return the network of a layer, of its tensors by name.

    Args:
        layer: with which its tensors' names begin.
        top: how many of several compute a row.

    Raises:
        ConfigError: exact numbers, and a router: softmax has other last bits on other machines.
    """

    def dense(name: str) -> Dense:
        make = MATRICES[kind]
        return Dense(make(tensors[f"{name}.gate_up.weight"]), make(tensors[f"{name}.down.weight"]))

    router = tensors.get(f"{layer}.ffn.router.weight")
    if router is None:
        return dense(f"{layer}.ffn")
    if kind == "exact":
        raise ConfigError("a mixture has no exact numbers: its router's are not. Choose int8 or bf16.")
    return Routed(router, [dense(f"{layer}.ffn.experts.{number}") for number in range(len(router))], top)
