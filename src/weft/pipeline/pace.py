"""How fast a peer is, as those see it that send it work: a moving average of seconds per unit of work, without bias.

    m <- (1 - a) m + a x,  k <- k + 1,  mean = m / (1 - (1 - a)^k)

as Adam's moments are made unbiased (Kingma and Ba, 1412.6980, section 3): after one measurement the mean is that one.
"""

ALPHA = 0.1  # of the newest measurement, as SWARM's (2301.11913)


class Pace:
    """Of one peer."""

    def __init__(self, alpha: float = ALPHA) -> None:
        self._alpha = alpha
        self._sum = 0.0
        self._weight = 0.0  # 1 - (1 - a)^k

    @property
    def is_known(self) -> bool:
        return self._weight > 0.0

    @property
    def mean(self) -> float:
        """Return seconds per unit. Something must have been measured."""
        return self._sum / self._weight

    def measured(self, seconds_per_unit: float) -> None:
        """Take one more measurement up."""
        self._sum += self._alpha * (seconds_per_unit - self._sum)
        self._weight += self._alpha * (1.0 - self._weight)
