"""What a member computes who exchanges with neighbours: its own parameters, and what it keeps beside them.

There are no replicas. A member's parameters are told by their distance to the outer ones, d_i = outer - x_i: these are
the mean over all that a round made last, and the same everywhere. In a gossip round

    weights        sends d_i;  d_i' = d_i + g sum_j w_ij (d_j - d_i)                    adapt, then combine
    difference     sends q_i = Q(d_i - e_i);  e_j += q_j of all;  d_i' = d_i + g sum_j w_ij (e_j - e_i)
    delta+weights  sends D_i = s_i - x_i and s_i;  m = a m - b mean D - c (s_i - mean s);  s_i' = x_i' = s_i + m

where d_j, e_j, D_j and s_j are what all decode, the sender too, so that the mean over members stays what it was, and
inner steps come first. e_j is a copy of member j that its neighbours hold: as far as j has told. s_i are the slow
parameters, from which inner steps start; mean D = D_i + sum_j w_ij (D_j - D_i), with a partner the mean of both.

A round that makes the mean is one where everybody is everybody's neighbour: each brings where it would go on alone, and
goes on from the mean of these.

D-PSGD: Lian et al., 1705.09056, with the order of Chen and Sayed, "Diffusion adaptation strategies", 2012. CHOCO-SGD:
Koloskova et al., 1902.00340, algorithm 2. NoLoCo: Kolehmainen et al., 2506.10911, section 3. Means now and then: Chen
et al., 2105.09080.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, final

import torch
from jaxtyping import Float32
from torch import Tensor

from weft.ids import PeerId
from weft.sync.merge.outer import State
from weft.sync.method.choices import Choices, MixConfig, PairNesterovConfig

SLOW, MOMENTUM, COPY = "slow", "pair_momentum", "copy"  # names in a state; of a neighbour's copy, with its name


@dataclass(frozen=True)
class Neighbour:
    """What one of them has sent.

    Args:
        weight: w_ij; 0 where nothing is taken from it.
        sent: as all decode it. It may be overwritten when the next one is asked for.
    """

    peer: PeerId
    weight: float
    sent: Float32[Tensor, " num_sent"]


class Gossip(Protocol):
    """The arithmetic of one way to gossip. It holds no state, and changes none that it is given."""

    def anew(self, outer: Float32[Tensor, " num"], state: State, is_counted: bool) -> State:
        """Return what a member keeps once a mean over all is made.

        Args:
            outer: that mean, or the parameters that a run begins with, or a member that knows no round.
            state: as `mixed` left it where the member is counted in the mean; else as it was.
        """
        ...

    def payload(
        self, outer: Float32[Tensor, " num"], local: Float32[Tensor, " num"], state: State
    ) -> Float32[Tensor, " num_sent"]:
        """Return what a member sends to its neighbours, in new memory."""
        ...

    def mixed(
        self,
        local: Float32[Tensor, " num"],
        state: State,
        mine: Float32[Tensor, " num_sent"] | None,
        theirs: Iterable[Neighbour],
    ) -> tuple[Float32[Tensor, " num"], State]:
        """Return the parameters to go on from after a gossip round, and what is kept.

        Args:
            mine: what this member has sent, as all decode it; None: it was not counted, and its parameters stay.
            theirs: what was counted of its neighbours: of nobody, where it goes on alone.
        """
        ...


def build(choices: Choices) -> Gossip | None:
    """Return the arithmetic of a method that gossips; None: it has replicas."""
    match choices.apply:
        case MixConfig(step=step):
            return Difference(step) if choices.send == "difference" else Weights(step)
        case PairNesterovConfig():
            return PairNesterov(choices.apply)
        case _:
            return None


@final
class Weights:
    """D-PSGD."""

    def __init__(self, step: float) -> None:
        self._step = step

    def anew(self, outer: Tensor, state: State, is_counted: bool) -> State:  # noqa: ARG002  # the protocol's signature
        return {}

    def payload(self, outer: Tensor, local: Tensor, state: State) -> Tensor:  # noqa: ARG002  # the same
        return outer - local

    def mixed(
        self, local: Tensor, state: State, mine: Tensor | None, theirs: Iterable[Neighbour]
    ) -> tuple[Tensor, State]:
        if mine is None:
            return local, state
        away = torch.zeros_like(local)
        for each in theirs:
            away.add_(each.sent - mine, alpha=each.weight)
        return local - self._step * away, state


@final
class Difference:
    """CHOCO-SGD."""

    def __init__(self, step: float) -> None:
        self._step = step

    def anew(self, outer: Tensor, state: State, is_counted: bool) -> State:  # noqa: ARG002  # the protocol's signature
        return {}  # every copy is the mean

    def payload(self, outer: Tensor, local: Tensor, state: State) -> Tensor:
        distance = outer - local
        return distance.sub_(state[COPY]) if COPY in state else distance

    def mixed(
        self, local: Tensor, state: State, mine: Tensor | None, theirs: Iterable[Neighbour]
    ) -> tuple[Tensor, State]:
        after = dict(state)
        if mine is not None:
            after[COPY] = _sum(state.get(COPY), mine)
        away = torch.zeros_like(local)
        for each in theirs:
            name = f"{COPY} {each.peer}"
            after[name] = _sum(state.get(name), each.sent)
            if mine is not None:
                away.add_(after[name] - after[COPY], alpha=each.weight)
        return (local if mine is None else local - self._step * away), after


@final
class PairNesterov:
    """NoLoCo."""

    def __init__(self, config: PairNesterovConfig) -> None:
        self._config = config

    def anew(self, outer: Tensor, state: State, is_counted: bool) -> State:
        if state and not is_counted:
            return state
        momentum = state.get(MOMENTUM)
        return {SLOW: outer.clone(), MOMENTUM: torch.zeros_like(outer) if momentum is None else momentum}

    def payload(self, outer: Tensor, local: Tensor, state: State) -> Tensor:
        return torch.cat([state[SLOW] - local, outer - state[SLOW]])

    def mixed(
        self, local: Tensor, state: State, mine: Tensor | None, theirs: Iterable[Neighbour]
    ) -> tuple[Tensor, State]:
        if mine is None:
            return local, state
        config, num, mean = self._config, local.numel(), mine.clone()
        for each in theirs:
            mean.add_(each.sent - mine, alpha=each.weight)
        # s_i - mean s = (outer - mean s) - (outer - s_i): of what is sent, the latter half
        momentum = config.momentum * state[MOMENTUM] - config.lr * mean[:num] - config.pull * (mean[num:] - mine[num:])
        slow = state[SLOW] + momentum
        return slow, {SLOW: slow, MOMENTUM: momentum}


def _sum(copy: Tensor | None, sent: Tensor) -> Tensor:
    return sent.clone() if copy is None else copy + sent
