"""Who rests in a round, because others were drawn, trains in their place once all of those are away.

Otherwise nobody would bring anything, and the round would never end. Of those that rest and are here, in order, each
takes the lease of one that is away, as long as there are any. Two that see it differently may train on the same
samples; no more tokens are counted than were leased.
"""

import asyncio
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from weft.ids import PeerId
from weft.peer.group.records import lease_of
from weft.peer.round.driver import RoundDriver
from weft.sync.records.messages import Base, Manifest

LOOK_S = 1.0


def in_place_of(base: Base, me: PeerId, present: Collection[PeerId]) -> PeerId | None:
    """Return in whose place `me` is to train; None: in nobody's.

    Args:
        present: of the electorate, who is not away.
    """
    to_train = [peer for peer in base.electorate if peer not in base.resting]
    here = [peer for peer in base.resting if peer in present or peer == me]
    if me not in here or any(peer in present for peer in to_train):
        return None
    return dict(zip(here, to_train, strict=False)).get(me)


def leased_instead(rounds: RoundDriver, me: PeerId, head: Manifest) -> NDArray[np.int64]:
    """Return the positions of whoever is away that this peer is to train on: mostly none."""
    base = rounds.chain.base
    other = in_place_of(base, me, rounds.quorum.present()) if rounds.chain.head == head else None
    return lease_of(head.leases if other else (), other)


async def needed(rounds: RoundDriver, me: PeerId) -> None:
    """Return once this peer is to train in another's place."""
    await asyncio.sleep(LOOK_S)
    while in_place_of(rounds.chain.base, me, rounds.quorum.present()) is None:  # noqa: ASYNC110  # statuses tell nobody
        await asyncio.sleep(LOOK_S)
