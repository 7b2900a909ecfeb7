"""Links of a memory network as a test sets them."""

from weft.ids import PeerId
from weft.net.transport.memory import MemoryNetwork


def set_link(
    network: MemoryNetwork,
    a: PeerId,
    b: PeerId,
    *,
    delay_s: float = 0.0,
    bandwidth_bps: float | None = None,
    jitter_s: float = 0.0,
    loss: float = 0.0,
) -> None:
    """Change the link between `a` and `b` in both directions, for what is sent from now on.

    Args:
        jitter_s: what is sent is late by up to so much.
        loss: share of the packets, 0 to 1, that have to be sent again.
    """
    for one_way in (network.link(a, b), network.link(b, a)):
        own = one_way.own
        own.bandwidth_bps, own.delay_s, own.jitter_s, own.loss = bandwidth_bps, delay_s, jitter_s, loss
