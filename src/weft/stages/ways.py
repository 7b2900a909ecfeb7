"""The ways of one peer to the stages: a sender to each that it sends to, kept up with who computes there.

It does not know what is sent.
"""

from weft.pipeline.routing import Near, Route
from weft.pipeline.sender import Sender
from weft.stages.step.membership import Grounds
from weft.stages.step.teams import leaders
from weft.stages.table import Roll


class Ways:
    def __init__(self, grounds: Grounds, roll: Roll) -> None:
        self._node = grounds.node
        self._lane = grounds.lane
        self._desk = grounds.desk
        self._clock = grounds.clock
        self._split = grounds.run.pipeline.split
        self._roll = roll
        self._routes: dict[int, Route] = {}

    def sender(self, stage: int) -> Sender:
        """Return what sends to a stage: one for all that do."""
        senders = self._desk.senders
        if stage not in senders:
            route = self._routes[stage] = Route(self._node.peer)
            senders[stage] = Sender(self._lane, stage, route, self._clock)
            self.look()
        return senders[stage]

    def look(self) -> None:
        """Take up who computes which stage now."""
        for stage, route in self._routes.items():
            ready = self._roll.ready(stage)
            if self._split is not None:
                leading = leaders(ready, self._split.members)
                ready = {peer: each for peer, each in ready.items() if peer in leading}
            linked = {self._node.peer, *self._node.peers}
            route.seen({peer: Near(rtt_s=0.0, began=each.since) for peer, each in ready.items() if peer in linked})

    async def aclose(self) -> None:
        for sender in self._desk.senders.values():
            await sender.aclose()
