"""A stage as a peer sees it that does not hold it: its members' states, fetched chunk by chunk.

    heads     what each member holds
    pin       some of them, the furthest first, keep one state for a while; what most of them offer is believed
    pin_at    the same, of a beat that is still to come
    beat      how many rounds of the first stage are in a state: stages count their own rounds, and may skip some
    pull      the vectors of it that are wanted, from all who offer that state at once

It asks what newcomers ask (`weft.peer.join.state_server` answers), and takes no part in the stage. What comes has the
digest that it is named by, and goes where the caller says as it comes: no vector is held here.

Failure:
- a member vanishes or lies: the others deliver the rest; nobody is left: PeerError, and what has come has been given.
- a member offers vectors of other lengths than the run's: WireError, before any of it is fetched.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from weft.clock import Clock
from weft.errors import NetError, PeerError, Refused, WireError
from weft.events import Emit
from weft.executor import Compute
from weft.ids import Digest, PeerId, short
from weft.net.blobs.blobs import first_of
from weft.net.channel import Channel
from weft.net.multi_source import Blob, pull
from weft.net.node import Node
from weft.peer.join.offers import MAX_DONORS, Offered, most_offered, opened
from weft.peer.messages import StateOffer, StateRequest
from weft.progress import Meter
from weft.run.staged import StagedConfig, channel_of
from weft.stages.messages import BeatAnswer, BeatRequest, PinAt, PinnedAnswer
from weft.store.index import CHUNK_NBYTES, StateIndex
from weft.store.partial import MAX_OFFER_NBYTES
from weft.sync.merge.method import OUTER, Method
from weft.sync.records.messages import Manifest
from weft.wire import Buffer, decode, digest_of

CALL_S = 10.0
OFFER_S = 60.0  # for a member to copy its state and name the chunks

Put = Callable[[str, int, Buffer], None]  # numbers of a vector, from this one on


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
        self._compute = compute
        self._clock = clock

    async def heads(self, members: Sequence[PeerId]) -> dict[PeerId, Manifest]:
        """Return which states members hold, of those that say."""
        asked = list(members)
        found = await asyncio.gather(*(self._offer(peer, None) for peer in asked))
        return {
            peer: offer.head
            for peer, offer in zip(asked, found, strict=True)
            if isinstance(offer, StateOffer) and offer.head is not None and offer.head.run == self.run.run
        }

    async def pin(self, members: Sequence[PeerId]) -> Offered:
        """Have some members keep the newest state that any of them holds, or the one they have come to by then.

        Raises:
            PeerError: nobody offers one.
        """
        heads = await self.heads(members)
        order = sorted(heads, key=lambda peer: (-heads[peer].committed_tokens, -heads[peer].round, peer))[:MAX_DONORS]
        if not order:
            raise PeerError(f"no member of {self._called} says what state it holds")
        return await self._offered(order, digest_of(heads[order[0]]))

    async def pin_at(self, members: Sequence[PeerId], beat: int, deadline_s: float) -> Offered | None:
        """Have some members keep the state after a beat that is still to come; None: it went by, or did not come."""
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
        answers = await asyncio.gather(*(self._offer(peer, wanted) for peer in order))
        offers: list[tuple[PeerId, Offered]] = []
        failures = []
        for peer, answer in zip(order, answers, strict=True):
            found = opened(answer, self.run.run) if isinstance(answer, StateOffer) else answer
            if isinstance(found, Offered):
                offers.append((peer, found))
            else:
                failures.append(f"{short(peer)} {found}")
        if not offers:
            raise PeerError(f"nobody offers a state of {self._called}: {'; '.join(failures)}")
        return most_offered(offers)

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
        index = await self._index(offered)
        places: dict[Digest, list[tuple[str, int]]] = {}
        blobs: dict[Digest, Blob] = {}
        for vector in index.vectors:
            for number, chunk in enumerate(vector.chunks if vector.name in names else ()):
                start = number * CHUNK_NBYTES
                blobs[Digest(chunk)] = Blob(digest=Digest(chunk), nbytes=min(CHUNK_NBYTES, vector.nbytes - start))
                places.setdefault(Digest(chunk), []).append((vector.name, start // 4))

        async def keep(blob: Blob, data: Buffer) -> None:
            def put_all() -> None:
                for name, start in places[blob.digest]:
                    put(name, start, data)

            await self._compute.serve(put_all)
            meter.add(len(data))

        total = sum(blob.nbytes for blob in blobs.values())
        with Meter(f"fetching {self._called}", "B", emit, self._clock, total) as meter:
            delivered = await pull(self._channel, list(blobs.values()), offered.donors, keep, self._clock)
        return sum(delivered.values())

    async def _offer(self, peer: PeerId, wanted: Digest | None) -> StateOffer | str:
        request = StateRequest(run=self.run.run, wanted=wanted)
        try:
            return await self._channel.call(peer, request, StateOffer, deadline_s=CALL_S if wanted is None else OFFER_S)
        except (PeerError, NetError, Refused) as error:
            return str(error)

    async def _index(self, offered: Offered) -> StateIndex:
        async def ask(donor: PeerId) -> StateIndex:
            data = await self._channel.fetch_small(donor, offered.index, MAX_OFFER_NBYTES)
            index: StateIndex = decode(data, StateIndex, max_nbytes=MAX_OFFER_NBYTES)
            return index

        index = await first_of(offered.donors, ask, "the index of its state")
        if {each.name: each.num for each in index.vectors} != dict(await self._compute.serve(lambda: shape(self.run))):
            raise WireError(f"the offered state of {self._called} has other vectors than the run's model")
        return index


def shape(run: StagedConfig) -> Mapping[str, int]:
    """Return the names and lengths of the vectors that the members of a stage's run share."""
    method = Method(run.method, run.optimizer, run.vector.tensors)
    with torch.device("meta"):  # lengths without memory
        state = method.init(run.num_parameters)
    return {OUTER: run.num_parameters, **{name: vector.numel() for name, vector in state.items()}}
