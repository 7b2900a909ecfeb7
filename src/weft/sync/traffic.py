"""What one peer sends and receives of a method's payloads and results: the mean over a run's peers and rounds.

It does not know messages and heartbeats, nor who is late.
"""

from weft.codec.build import build
from weft.codec.codec import Codec
from weft.cost import training as cost
from weft.cost.training import Traffic
from weft.sync.merge.basis import Shapes
from weft.sync.merge.gossip import num_sent
from weft.sync.merge.method import most_sent
from weft.sync.method.choices import Choices, GraphConfig
from weft.sync.method.graph import mixing
from weft.sync.round.leases import num_drawn


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
    each = num_neighbours * build(choices.codec).nbytes(num_sent(choices, num))
    ways = (
        ((graph.mean_every - 1) * each + way) // graph.mean_every for way in (mean.sent_nbytes, mean.received_nbytes)
    )
    return Traffic(*ways)
