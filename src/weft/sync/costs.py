"""What a member holds of a method: `cost.training.peer_memory`, given what the choices say.

A round of a fragment merges less than is counted here, but its member copies what was trained while it was decided:
both come to about the same (benchmarks/reports/memory.md).
"""

from typing import assert_never

from weft.codec.build import build
from weft.codec.codec import Codec
from weft.cost import audits
from weft.cost import training as cost
from weft.cost.training import Traffic
from weft.model.config import ModelConfig
from weft.sync.merge.method import Shapes, build_basis, most_sent
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
    Rule,
    SignSgdConfig,
)
from weft.sync.method.graph import mixing
from weft.sync.round.shares import num_drawn
from weft.verify.evidence.operations import program_for
from weft.verify.evidence.program.evaluate import room_nbytes
from weft.verify.evidence.shown import Unproven
from weft.verify.suspicion import TIMES


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
        activations: `cost.training.activation_nbytes`.
    """
    mean = choices.of_mean()
    num_sent = build_basis(mean.basis, shapes).num_sent(num)
    return cost.peer_memory(
        num,
        num_sent if choices.is_merged_by_all else cost.part_size(num_sent, num_electors),
        num_electors,
        build(mean.codec),
        build(mean.reply),
        sends_delta=not choices.sends_gradient,
        num_sent=num_sent,
        num_moments=0 if isinstance(choices.apply, SignSgdConfig) else num_moments(optimizer),
        num_momenta=_num_momenta(choices),
        num_errors=choices.num_errors,
        num_copies=_num_copies(choices.graph, choices.send, num_electors),
        is_in_basis=mean.basis != "flat",
        rule_nbytes=_rule_nbytes(mean.merge, num_electors),
        has_reply_errors=mean.reply_feedback is not None,
        num_rounds=num_rounds,
        activations=activations,
    )


def audit_memory_nbytes(
    choices: Choices,
    optimizer: OptimizerConfig,
    shapes: Shapes,
    num: int,
    num_members: int,
    *,
    rate: float,
    has_gradient: bool,
) -> int:
    """Return the bytes that a member whose steps are audited holds for that, at most, on the host.

    Args:
        shapes, num: as of `peer_memory`.
        rate: of audits. `has_gradient`: as of `weft.cost.audits.Holds`.
    """
    return audits.Holds(
        num_parameters=num,
        num_moments=num_moments(optimizer),
        has_error=choices.feedback is not None,
        payload_nbytes=build(choices.codec).nbytes(most_sent(choices, shapes, num)),
        has_gradient=has_gradient,
        num_audits=audits.most_audits(rate, TIMES, num_members),
    ).nbytes


def evidence_nbytes(model: ModelConfig, method: Choices, samples: int, tokens: int, micro_batch: int) -> int:
    """Return the bytes that are to be free where somebody looks for what shows a gradient in exact numbers to be false;
    0: of such steps nothing shows it.

    Args:
        samples, tokens, micro_batch: as of `weft.verify.evidence.operations.program_for`.
    """
    try:
        return room_nbytes(program_for(model, method, samples, tokens, micro_batch))
    except Unproven:
        return 0


def _rule_nbytes(rule: Rule, num_electors: int) -> int:
    """Return the bytes of an element that are held beside its sum: the weight of who sent it; or all contributions."""
    match rule:
        case "peers_mean":
            return 0
        case "senders_mean":
            return 8
    return 4 * num_electors + 4  # all contributions, and how one differs from the middle


def num_moments(optimizer: OptimizerConfig | None) -> int:
    """Return the vectors that an optimizer of inner steps has; None: it is somebody else's."""
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


def round_traffic(choices: Choices, shapes: Shapes, num: int, num_peers: int) -> Traffic:
    """Return the bytes of one among `num_peers`, owners of equal parts, while each could make `every` inner steps.

    That is one round. Where rounds wait for nobody each closes one member's steps alone, so it is as many as there are
    peers: of all of these everybody takes the result. Where members are drawn, only who is drawn brings a payload.

    Args:
        shapes: of the tensors that lie in the vector of `num` parameters, in order.
    """
    if (graph := choices.graph) is not None:
        return _gossiped(choices, graph, num, num_peers)
    sent = most_sent(choices, shapes, num)
    payload, reply = build(choices.codec), build(choices.reply)
    num_rounds, num_bring = (num_peers, 1) if choices.wait == "ready" else (1, num_drawn(choices.among, num_peers))
    if choices.is_merged_by_all:
        brought, result = cost.exchange_traffic(sent, num_peers, payload), Traffic(0, 0)
    else:
        brought, result = _halves(sent, num_peers, payload, reply)
    return _share(brought, num_rounds * num_bring, num_peers) + result.times(num_rounds)


def _halves(num: int, num_peers: int, payload: Codec, reply: Codec) -> tuple[Traffic, Traffic]:
    """Return both halves of a reduce, the mean over peers: parts are equal up to a block of them."""
    owned = [cost.part_size(num, num_peers, index) for index in range(num_peers)]
    brought = sum((cost.contribute_traffic(num, each, num_peers, payload) for each in owned), start=Traffic(0, 0))
    result = sum((cost.result_traffic(num, each, num_peers, reply) for each in owned), start=Traffic(0, 0))
    return _share(brought, 1, num_peers), _share(result, 1, num_peers)


def _share(traffic: Traffic, numerator: int, denominator: int) -> Traffic:
    ways = (traffic.sent_nbytes, traffic.received_nbytes)
    return Traffic(*(way * numerator // denominator for way in ways))


def _gossiped(choices: Choices, graph: GraphConfig, num: int, num_peers: int) -> Traffic:
    codec = build(choices.of_mean().codec)
    brought, result = _halves(num, num_peers, codec, codec)
    mean = brought + result
    num_neighbours = max(map(len, mixing(graph.graph, num_peers, graph.degree)))
    each = num_neighbours * build(choices.codec).nbytes(choices.num_gossiped(num))
    ways = (
        ((graph.mean_every - 1) * each + way) // graph.mean_every for way in (mean.sent_nbytes, mean.received_nbytes)
    )
    return Traffic(*ways)
