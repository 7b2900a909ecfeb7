"""A stage as a peer sees it that does not hold it: its members' states, fetched chunk by chunk.

    heads     what each member holds
    pin       some of them, the furthest first, keep one state for a while; what most of them offer is believed
    pin_at    the same, after a round of the first stage that is still to come
    beat      how many rounds of the first stage are in a state: stages count their own rounds, and may skip some
    pull      the vectors of it that are wanted, from all who offer that state at once

It asks what newcomers ask (`weft.peer.state.state_client`), and takes no part in the stage. What comes has the digest
that it is named by, and goes where the caller says as it comes: no vector is held here.

Failure:
- a member vanishes or lies: the others deliver the rest; nobody is left: PeerError, and what has come has been given.
- a member offers vectors of other lengths than the run's: WireError, before any of it is fetched.
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence

import torch

from weft.clock import Clock
from weft.errors import PeerError, WireError
from weft.events import Emit
from weft.ids import Digest, PeerId
from weft.net.channel import Channel
from weft.net.node import Node
from weft.peer.messages import StateOffer
from weft.peer.state.state_client import CALL_S, MAX_DONORS, Offered, Put, StateClient, most_offered
from weft.progress import Meter
from weft.run.staged import StagedConfig, channel_of
from weft.stages.messages import BeatAnswer, BeatRequest, PinAt, PinnedAnswer
from weft.sync.merge.method import OUTER, Method
from weft.sync.records.messages import Manifest
from weft.tasks import Compute
from weft.wire import digest_of


class StageReader:
    """
    Args:
        node: linked to members, or about to be.
        run: of the stage.
        since: a number that this process uses once for this stage.
    """

    def __init__(self, node: Node, run: StagedConfig, since: int, compute: Compute, clock: Clock) -> None:
        self.run = run
        assert run.stage is not None, "the whole run has no members of its own"
        self._called = run.called(run.stage)
        self._channel = Channel(node, channel_of(run.stage), run.run, since)
        self._client = StateClient(self._channel, compute, clock)
        self._compute = compute
        self._clock = clock

    async def heads(self, members: Sequence[PeerId]) -> dict[PeerId, Manifest]:
        """Return which states members hold, of those that say."""
        answers = await self._client.ask(members)
        heads = {peer: answer.head for peer, answer in answers.items() if isinstance(answer, StateOffer)}
        return {peer: head for peer, head in heads.items() if head is not None and head.run == self.run.run}

    async def pin(self, members: Sequence[PeerId]) -> Offered:
        """Have some members keep the newest state that any of them holds, or the one they have come to by then.

        Raises:
            PeerError: nobody offers one.
        """
        heads = await self.heads(members)
        order = sorted(heads, key=lambda peer: (-heads[peer].committed_tokens, -heads[peer].round, peer))[:MAX_DONORS]
        if not order:
            raise PeerError(f"no member of {self._called} says which state it holds")
        return await self._offered(order, digest_of(heads[order[0]]))

    async def pin_at(self, members: Sequence[PeerId], beat: int, deadline_s: float) -> Offered | None:
        """Have some keep the state after a coming round of the first stage; None: it went by, or did not come."""
        asked = sorted(members)[:MAX_DONORS]
        answers = await asyncio.gather(*(self._pinned(peer, beat, deadline_s) for peer in asked))
        found = [(peer, manifest) for peer, manifest in zip(asked, answers, strict=True) if manifest is not None]
        if not found:
            return None
        wanted, _ = Counter(manifest for _, manifest in found).most_common(1)[0]
        return await self._offered([peer for peer, manifest in found if manifest == wanted], wanted)

    async def _pinned(self, peer: PeerId, beat: int, deadline_s: float) -> Digest | None:
        answer = await self._channel.ask(peer, PinAt(beat=beat), PinnedAnswer, deadline_s=deadline_s)
        return None if answer is None or answer.manifest is None else Digest(answer.manifest)

    async def _offered(self, order: Sequence[PeerId], wanted: Digest) -> Offered:
        """Return what most of these members offer, asked for a state.

        Raises:
            PeerError: nobody offers one.
        """
        answers = (await self._client.offers(order, wanted)).values()
        if offers := [each for each in answers if isinstance(each, Offered)]:
            return most_offered(offers)
        raise PeerError(f"nobody offers a state of {self._called}: {'; '.join(map(str, answers))}")

    async def beat(self, members: Sequence[PeerId], manifest: Digest | None = None) -> int | None:
        """Return how many rounds of the first stage are in a state, or in the newest; None: no member knows.

        Args:
            manifest: that the state belongs to.
        """
        request, found = BeatRequest(manifest=manifest), list[int]()
        for peer in members:
            answer = await self._channel.ask(peer, request, BeatAnswer, deadline_s=CALL_S)
            if answer is not None and answer.beat is not None:
                found.append(answer.beat)
                if manifest is not None:
                    break
        return max(found, default=None)

    async def pull(self, offered: Offered, names: Collection[str], put: Put, emit: Emit) -> int:
        """Fetch vectors of an offered state; return how many bytes came.

        Args:
            put: given each piece, where states are merged; pieces come in any order.
        """
        index = await self._client.index(offered.index, offered.donors)
        if index.shape != await self._compute.serve(lambda: shape(self.run)):
            raise WireError(f"the offered state of {self._called} has other vectors than the run's model")
        total = sum(places[0].nbytes for places in index.places(names).values())
        with Meter(f"fetching {self._called}", "B", emit, self._clock, total) as meter:
            delivered = await self._client.pull(index, offered.donors, put, names, meter.add)
        return sum(delivered.values())


def shape(run: StagedConfig) -> dict[str, int]:
    """Return the names and lengths of the vectors that the members of a stage's run share."""
    method = Method(run.method, run.optimizer, run.vector.tensors)
    with torch.device("meta"):  # lengths without memory
        state = method.init(run.num_parameters)
    return {OUTER: run.num_parameters, **{name: vector.numel() for name, vector in state.items()}}
