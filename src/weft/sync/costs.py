"""What a member holds of a method: `cost.peer_memory`, given what the choices say.

A round of a fragment merges less than is counted here, but its member copies what was trained while it was decided:
both come to about the same (benchmarks/reports/memory.md).
"""

from typing import assert_never

from weft.codec.build import build
from weft.cost import training as cost
from weft.sync.merge import basis as bases
from weft.sync.merge.basis import Shapes
from weft.sync.method.choices import (
    AdamWConfig,
    Choices,
    DelayedNesterovConfig,
    ExtensionOuterConfig,
    GraphConfig,
    InnerSgdConfig,
    MuonConfig,
    NesterovConfig,
    OptimizerConfig,
    SignSgdConfig,
)
from weft.sync.method.graph import mixing


def peer_memory(
    choices: Choices,
    optimizer: OptimizerConfig | None,
    shapes: Shapes,
    num: int,
    num_electors: int,
    *,
    num_rounds: int,
    activations: int,
) -> cost.Memory:
    """Return the memory of an elector by component, of equal parts.

    Args:
        optimizer: of inner steps; None: it is somebody else's, who holds its moments.
        shapes: of the tensors that lie in the vector of `num` parameters, in order.
        num_rounds: that it lives for.
        activations: `cost.activation_nbytes`.
    """
    mean = choices.of_mean()
    num_sent = bases.build(mean.basis, shapes).num_sent(num)
    return cost.peer_memory(
        num,
        num_sent if choices.is_merged_by_all else cost.part_size(num_sent, num_electors),
        num_electors,
        build(mean.codec),
        build(mean.reply),
        sends_delta=choices.send != "gradient",
        num_sent=num_sent,
        num_moments=0 if isinstance(choices.apply, SignSgdConfig) else _num_moments(optimizer),
        num_momenta=_num_momenta(choices),
        num_errors=choices.num_errors,
        num_copies=_num_copies(choices.graph, choices.send, num_electors),
        is_in_basis=mean.basis != "flat",
        has_senders_mean=mean.merge == "senders_mean",
        has_reply_errors=mean.reply_feedback is not None,
        num_rounds=num_rounds,
        activations=activations,
    )


def _num_moments(optimizer: OptimizerConfig | None) -> int:
    match optimizer:
        case AdamWConfig() | MuonConfig():
            return 2
        case InnerSgdConfig(momentum=momentum):
            return int(momentum > 0)
        case None:
            return 0
    assert_never(optimizer)


def _num_momenta(choices: Choices) -> int:
    match choices.apply:
        case NesterovConfig() | ExtensionOuterConfig():  # of the latter nobody knows
            return 1
        case DelayedNesterovConfig():
            return 2
    return 0


def _num_copies(graph: GraphConfig | None, send: str, num_members: int) -> int:
    """Return the vectors that who exchanges with neighbours holds, its own and theirs, while it meets them."""
    if graph is None:
        return 0
    num_neighbours = max(map(len, mixing(graph.graph, num_members, graph.degree)))
    match send:
        case "difference":  # copies of each and of itself, before and after
            return 2 * (1 + num_neighbours) + 4
        case "delta+weights":  # slow parameters and momentum before and after; two of its own, of the mean, of another
            return 4 + 2 * 3
    return 4  # what it has sent, and another; their difference, and where it goes
