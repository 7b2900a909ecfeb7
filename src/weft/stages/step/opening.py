"""Who holds which stage when a run begins, and what its section starts from."""

import asyncio
from collections.abc import Sequence

from torch import Tensor

from weft.errors import PeerError
from weft.events import Notice
from weft.ids import PeerId
from weft.launch.fetch import fetch_initial
from weft.run.genesis import initial
from weft.stages.messages import StageBegin
from weft.stages.step.membership import Grounds

LOOK_S = 3.0  # until it is asked again for first weights that nobody delivers


def assigned(peers: Sequence[PeerId], num_stages: int) -> StageBegin:
    """Return who holds what at first: peers take stages in turn, from the first on; of few, each takes several."""
    num = max(len(peers), num_stages)
    return StageBegin(
        peers=tuple(peers[number % len(peers)] for number in range(num)),
        stages=tuple(number % num_stages for number in range(num)),
    )


def num_first(num_peers: int, num_stages: int) -> int:
    """Return how many members the first stage has at first: who begins all samples."""
    return -(-num_peers // num_stages)


async def first_weights(grounds: Grounds, stage: int) -> Tensor:
    """Return what a piece starts from: made of the seed, or fetched, from whoever has it, however long that takes."""
    node, run, home = grounds.node, grounds.run.of_stage(stage), grounds.home
    while True:
        try:
            await fetch_initial(node, node.peers, run, home)
        except PeerError as error:
            text = f"nobody delivers the first weights of {grounds.run.called(stage)} yet: {error}"
            grounds.emit(Notice(text=text))
            await asyncio.sleep(LOOK_S)
            continue
        outer = await grounds.compute.serve(lambda: initial(run, home))
        assert outer is not None, "they have been fetched"
        return outer
