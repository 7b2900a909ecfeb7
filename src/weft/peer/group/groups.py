"""How this peer takes part: as an elector, for its leaves too where it has any, or as a leaf of another's group.

groups.turn          where it announces: its rounds, or its aggregator
groups.is_outside    neither: it has to ask its way in
groups.leased(...)   what it trains on
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from weft.ids import PeerId, Round
from weft.peer.companion import Unmeasured
from weft.peer.context import Context
from weft.peer.group.aggregator import Aggregator, GroupBroadcast
from weft.peer.group.leaf import Leaf
from weft.peer.group.records import GroupRecords
from weft.peer.round.driver import RoundDriver
from weft.sync.records.messages import Manifest
from weft.sync.round.machine import Status
from weft.tasks import Tasks

Turn = RoundDriver | Leaf  # where this peer announces


class Groups:
    """
    Args:
        speed: returns the tokens per second of this peer's training.
    """

    def __init__(
        self,
        context: Context,
        rounds: RoundDriver,
        records: GroupRecords,
        evaluator: Unmeasured,
        speed: Callable[[], float],
        tasks: Tasks,
    ) -> None:
        self._me = context.node.peer
        self._rounds = rounds
        self._records = records
        self.leaf = Leaf(context, rounds, records, speed)
        broadcast = GroupBroadcast(context, rounds, records, self.leaf, tasks)
        self.aggregator = Aggregator(context, rounds, records, broadcast, speed, tasks)
        rounds.inbox.on_record(records.keep)
        evaluator.on_heard(self.aggregator.pass_evaluation_on)

    @property
    def turn(self) -> Turn:
        return self._rounds if self._rounds.is_member else self.leaf

    def through(self, turn: Turn) -> Turn | Aggregator:
        """Return what brings a payload there: where this peer has leaves, theirs go with it."""
        return self.aggregator if turn is self._rounds and self.aggregator.is_in_use else turn

    @property
    def is_outside(self) -> bool:
        return not self._rounds.is_member and self.leaf.aggregator is None

    @property
    def links_electorate(self) -> bool:
        """Whether this peer keeps links to all electors: as one of them, or where they have room for it."""
        base = self._rounds.chain.base
        return self._me in base.electorate or (self.is_outside and len(base.electorate) < base.charter.electors)

    def pins(self) -> tuple[PeerId, ...]:
        """Return to whom links are kept, however many peers there are: electors to electors, leaves to aggregators."""
        if self.links_electorate:
            return self._rounds.chain.base.electorate
        return () if self.leaf.aggregator is None else (self.leaf.aggregator,)

    def notice(self, peer: PeerId, status: Status) -> None:
        self._rounds.notice(peer, status)
        self.aggregator.notice(peer, is_away=status in ("gone", "suspected"))

    def give_up(self) -> None:
        """Take no part in a round that the others have long left behind."""
        self.leaf.give_up()
        self._rounds.give_up()

    def leased(self, manifest: Manifest) -> NDArray[np.int64]:
        """Return the positions that this peer trains on after `manifest`."""
        return self._records.leased(manifest, self._rounds.chain.charter_in(Round(manifest.round + 1)))
