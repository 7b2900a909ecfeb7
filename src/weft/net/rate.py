"""A bound on how many bytes pass in a second, shared by all who ask.

Who wants to move bytes takes them first and waits for its turn, in the order of asking: so streams that take pieces
of one size share evenly. After a rest, a moment's worth passes at once.

It does not know what the bytes are.
"""

import asyncio

BURST_S = 0.25  # of the rate, that passes at once after a rest: enough for a burst of control frames


class Rate:
    """Passes `max_bps` bits per second, over all who ask."""

    def __init__(self, max_bps: float) -> None:
        self._max_bps = max_bps
        self._paid_until = float("-inf")

    async def take(self, num_bytes: int) -> None:
        """Wait until `num_bytes` may pass. Who gives up waiting has used them all the same."""
        now = asyncio.get_running_loop().time()
        self._paid_until = max(self._paid_until, now - BURST_S) + 8 * num_bytes / self._max_bps
        if self._paid_until > now:
            await asyncio.sleep(self._paid_until - now)
