"""What one peer sends and receives of a method's payloads and results, per round: the mean over a run's rounds.

It does not know messages and heartbeats, nor who is late.
"""

from weft import cost
from weft.codec.build import build
from weft.cost import Traffic
from weft.sync.basis import Shapes
from weft.sync.choices import Choices, GraphConfig
from weft.sync.gossip import num_sent
from weft.sync.graph import mixing
from weft.sync.method import most_sent


def round_traffic(choices: Choices, shapes: Shapes, num: int, num_peers: int) -> Traffic:
    """Return the bytes of a mean round, of one among `num_peers` that own equal parts.

    Args:
        shapes: of the tensors that lie in the vector of `num` parameters, in order.
    """
    if (graph := choices.graph) is not None:
        return _gossiped(choices, graph, num, num_peers)
    sent = most_sent(choices, shapes, num)
    payload, reply = build(choices.codec), build(choices.reply)
    if choices.is_merged_by_all:
        return cost.exchange_traffic(sent, num_peers, payload)
    return cost.reduce_traffic(sent, cost.part_size(sent, num_peers), num_peers, payload, reply)


def _gossiped(choices: Choices, graph: GraphConfig, num: int, num_peers: int) -> Traffic:
    codec = build(choices.of_mean().codec)
    mean = cost.reduce_traffic(num, cost.part_size(num, num_peers), num_peers, codec, codec)
    num_neighbours = max(map(len, mixing(graph.graph, num_peers, graph.degree)))
    each = num_neighbours * build(choices.codec).nbytes(num_sent(choices, num))
    ways = (
        ((graph.mean_every - 1) * each + way) // graph.mean_every for way in (mean.sent_nbytes, mean.received_nbytes)
    )
    return Traffic(*ways)
