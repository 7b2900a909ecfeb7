"""A method is five choices: how often to synchronise, what to send, in which bytes, among whom, and how to apply it.

    row           every  send      codec         among  apply             replicated          private
    ddp           1      gradient  bf16          all    inner optimizer   outer, moments      -
    powersgd      1      gradient  low rank      all    inner optimizer   outer, moments, L R error
    fedavg        H      delta     bf16          all o  SGD, rate 1       outer               inner optimizer
    diloco        H      delta     int8          all    SGD-Nesterov      outer, momentum     inner optimizer
    streaming     H *    delta     e3m0          all    SGD-Nesterov      outer, momentum     inner optimizer
    async-diloco  H      delta     int8          all +  delayed Nesterov  outer, momentum     inner optimizer
    cocktail      1 *    delta     random-k of   all    SGD               outer               inner optimizer
                                   top-k, int4
    sparseloco    H      delta     top-k         all    SGD               outer               inner optimizer, error
    demo          1      gradient  top-k of DCT  all    sign SGD          outer               error: the momentum

    * inner steps go on while a round is decided; streaming: of each fragment, one after the other, and a share of the
      local parameters stays; cocktail: what was not sent stays in them
    o or a sample, drawn anew for each round
    + whoever is ready: a round waits for nobody

A run file names a preset or spells the choices out (`type = "custom"`). Before a run starts, `spell_out` turns either
into `Choices`, which RunConfig holds (all in `choices`): what depends on the number of peers is decided once, for all.

`Method` is what a peer computes between rounds: tensors in, tensors out.

FedAvg: McMahan et al., 1602.05629, algorithm 1. DiLoCo: Douillard et al., 2311.08105, algorithm 1; streaming: Douillard
et al., 2501.18512, algorithm 2; asynchronous: Liu et al., 2401.09135, algorithm 3. SparseLoCo: Sarfi et al.,
2508.15706, algorithm 1. DeMo: Peng et al., 2411.19870, algorithm 1. CocktailSGD: Wang
et al., ICML 2023, algorithm 1.
"""

from typing import final

import torch
from jaxtyping import Float32
from torch import Tensor

from weft.codec import bounds
from weft.sync.merge import basis as bases
from weft.sync.merge import outer as optimizers
from weft.sync.merge.basis import Scope, Shapes
from weft.sync.merge.outer import State, StepContext
from weft.sync.merge.sharded import SpreadVector
from weft.sync.method.choices import (
    Choices,
    InnerConfig,
    MixConfig,
    MuonConfig,
    OptimizerConfig,
    PairNesterovConfig,
    check,
)

OUTER = "outer"  # the name of the parameters among the replicated vectors
_NOTHING: State = {}


@final
class Method:
    """The five choices as operations on flat vectors. It holds no state of a run.

    Args:
        choices: where members exchange, those of the rounds that make the mean count: `gossip` has the others.
        inner: the run's inner optimizer.
        shapes: of the tensors that lie in a vector, in order.
    """

    def __init__(self, choices: Choices, inner: OptimizerConfig, shapes: Shapes = ()) -> None:
        check(choices, inner)
        self.choices = choices = choices.of_mean()
        self.basis = bases.build(choices.basis, shapes)
        self._of_basis = frozenset(self.basis.init())
        apply = inner if isinstance(choices.apply, InnerConfig) else choices.apply
        assert not isinstance(apply, InnerConfig | MuonConfig | MixConfig | PairNesterovConfig)
        self._apply = apply
        self._optimizer = optimizers.build(apply)

    @property
    def replicated(self) -> tuple[str, ...]:
        """Names of the flat vectors that are equal on all members after a commit."""
        return (OUTER, *self.init(0))

    def init(self, num: int) -> State:
        """Return the state of the outer optimizer and of the basis before the first round: replicated."""
        return {**self._optimizer.init(num), **self.basis.init()}

    def delta(
        self,
        outer: Float32[Tensor, " num"],
        local_or_gradient: Float32[Tensor, " num"],
        into: Float32[Tensor, " num"] | None = None,
    ) -> Float32[Tensor, " num"]:
        """Return what this peer's training comes to, on the device it is given.

        Args:
            outer: the parameters after the last commit this peer applied.
            local_or_gradient: the parameters after the inner steps where deltas are sent (carry included: see
                `rebase`); the mean gradient where gradients are.
            into: memory that may be written to, the local parameters' own, too; None: new memory.

        Returns:
            outer - local; or the gradient itself, not copied.
        """
        if self.choices.send == "gradient":
            return local_or_gradient
        if into is None and outer.device.type == local_or_gradient.device.type == "cpu":
            into = bounds.empty(outer.numel())
        return torch.sub(outer, local_or_gradient, out=into)

    def num_sent(self, num: int) -> int:
        return self.basis.num_sent(num)

    def contribution(
        self,
        outer: Float32[Tensor, " num"],
        local_or_gradient: Float32[Tensor, " num"],
        state: State = _NOTHING,
        round: int = 0,
    ) -> Float32[Tensor, " num_sent"]:
        """Return what this peer brings to a round: its `delta`, in the basis in which it is encoded and merged.

        Args:
            state: replicated, of that basis.
        """
        return self.basis.forward(self.delta(outer, local_or_gradient), state, round)

    def apply(
        self, outer: Float32[Tensor, " num"], state: State, merged: Float32[Tensor, " num_sent"], context: StepContext
    ) -> None:
        """Make the outer step on `outer` and `state`, in place; `merged` is the decoded result of a round."""
        own = {name: vector for name, vector in state.items() if name not in self._of_basis}
        descent = self.basis.inverse(merged, state, context.round)
        if isinstance(outer, SpreadVector):
            outer.step(self._apply, own, descent, context)
        else:
            self._optimizer.apply(outer, own, descent, context)
        self.basis.advance(merged, state, context.round)

    def rebase(
        self, local: Float32[Tensor, " num"], outer: Float32[Tensor, " num"], carry: Float32[Tensor, " num"] | None
    ) -> None:
        """Set `local` to where training goes on after an outer step: local = outer - carry.

        Args:
            carry: the delta no manifest has counted yet; None where all was counted, or where gradients are sent
                (a carried gradient is no displacement: it is added to the next one).
        """
        local.copy_(outer)
        if carry is not None:
            if self.choices.send == "gradient":
                raise ValueError("a carried gradient does not move the parameters; add it to the next gradient")
            local.sub_(carry)


def most_sent(choices: Choices, shapes: Shapes, num: int) -> int:
    """Return how many numbers a round encodes at most of a vector of `num`, in which tensors of these shapes lie."""
    return Scope(bases.build(choices.basis, shapes).num_sent(num), choices.fragments).most_sent
