"""Who of a peer's stages goes elsewhere: a move to a weaker stage, or one of several that others compute, too.

    rebalance    now and then: is this the peer that should go to a weaker stage? (`pipeline.place`)
    let_go       of several stages one that another peer holds alone

It does not know how a stage is held.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress

from weft.errors import NetError, PeerError, Refused
from weft.pipeline.placement import moves
from weft.stages.messages import LeaveAnswer, MayLeave
from weft.stages.step.member import Member
from weft.stages.step.membership import Grounds
from weft.stages.table import Roll

MOVED_S = 120.0  # for which who has moved stays
ASK_S = 5.0
MOVES = "goes to another stage"


class Moving:
    """Of one peer.

    Args:
        members: the stages that it holds, kept up by whoever holds them.
        hold: holds one from now on, for a reason.
    """

    def __init__(
        self, grounds: Grounds, roll: Roll, members: Mapping[int, Member], hold: Callable[[int, str], None]
    ) -> None:
        self._clock = grounds.clock
        self._me = grounds.node.peer
        self._roll = roll
        self._members = members
        self._hold = hold
        self._moved_at: float | None = None

    async def rebalance(self) -> None:
        """Move, if this is the peer that should."""
        now, roll = self._clock.now(), self._roll
        if roll.empty() or len(self._members) != 1 or (self._moved_at is not None and now - self._moved_at < MOVED_S):
            return
        unready = {peer for peer, news in roll.peers.items() if [each.state for each in news.held] != ["ready"]}
        for move in moves(roll.rates(), staying=unready, costs=roll.costs):
            member = self._members.get(move.source)
            if move.peer == self._me and member is not None and await self._may_leave(member):
                self._moved_at = now
                await self._move(member, move.target)

    def let_go(self) -> None:
        """Of several stages, let one go that another peer computes, too."""
        if len(self._members) < 2 or any(member.is_leaving for member in self._members.values()):
            return
        for stage in sorted(self._members):
            others = [peer for peer in self._roll.ready(stage) if peer != self._me]
            if any(len(self._roll.peers[peer].held) == 1 for peer in others):
                self._members[stage].stop(MOVES)
                return

    async def _move(self, member: Member, target: int) -> None:
        member.stop(MOVES)
        await member.has_ended.wait()  # it says its goodbye, and saves
        self._hold(target, f"it gains more than stage {member.stage + 1} loses")

    async def _may_leave(self, member: Member) -> bool:
        """Whether another member of the stage stays: asked of each, so that no two leave a stage of two at once."""
        member.is_leaving = True
        for peer in sorted(self._roll.ready(member.stage)):
            if peer != self._me:
                with suppress(PeerError, NetError, Refused):
                    answer = await member.channel.call(peer, MayLeave(), LeaveAnswer, deadline_s=ASK_S)
                    if answer.does_stay:
                        return True
        member.is_leaving = False
        return False
