"""What of a run an observer can check for itself: that a majority signed what was decided.

    observer                                 a linked member, another each time
      StateRequest, CharterRequest ────────►   once: where the run stands
      ChainRequest ────────────────────────►   every two seconds
      ◄────────────────────────── ChainAnswer  certificates: manifests, and the votes on them

Each certificate is held against the electorate that the one before named, as members do it, and told as `RoundProven`.
Where it begins, most of those asked are believed, for nothing there is to check it by.

Failure:
- a member answers nothing, forgets, or tells what no majority signed: the next one is asked.
- nobody knows how it goes on (the members are on another branch, or it was out of touch for too long): it begins anew.

It does not know what peers say of rounds in words (`observer`).
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from weft.clock import Clock
from weft.errors import NetError, PeerError, Refused
from weft.events import Event, Notice, RoundProven
from weft.ids import BranchId, Digest, PeerId, Round, short
from weft.net.node import Node
from weft.peer.bulletin import WINDOW_S
from weft.peer.chain import Chain, signers
from weft.peer.messages import ChainAnswer, ChainRequest, CharterAnswer, CharterRequest, StateOffer, StateRequest
from weft.sync.messages import Certificate, Manifest
from weft.wire import digest_of

CALL_S = 10.0
MAX_ASKED = 8  # where the run stands
STALE_S = 60.0  # without a proof, though members answer: the branch may be another
MAX_KEPT = 4096  # proven rounds that claims are held against


class Proving:
    """Of one run.

    Args:
        tell: takes `RoundProven`, and what is wrong.
    """

    def __init__(self, node: Node, clock: Clock, tell: Callable[[Event], None]) -> None:
        self._node = node
        self._clock = clock
        self._tell = tell
        self._chain: Chain | None = None
        self._proven_at = 0.0
        self._proven: dict[tuple[BranchId, Round], Digest] = {}
        self._claims: dict[tuple[BranchId, Round], dict[PeerId, Digest]] = {}  # of rounds that are not proven yet
        self._liars: set[PeerId] = set()

    async def watch(self) -> None:
        """Check what is decided until this is cancelled."""
        turn = 0
        while True:
            peers = sorted(self._node.peers)
            if peers:
                await self.look(peers[turn % len(peers) :] + peers[: turn % len(peers)])
                turn += 1
            await asyncio.sleep(WINDOW_S)

    async def look(self, peers: Sequence[PeerId]) -> None:
        """Ask peers in order until one has told something new."""
        now = self._clock.now()
        if self._chain is None or now - self._proven_at > STALE_S:
            self._chain, self._proven_at = await self._begin(peers[:MAX_ASKED]), now
        if self._chain is None:
            return
        for peer in peers:
            request = ChainRequest(branch=self._chain.head.branch, after=self._chain.head.round)
            with suppress(PeerError, NetError, Refused):
                answer = await self._node.call(peer, request, ChainAnswer, deadline_s=CALL_S)
                if answer.certificates and self._take(peer, self._chain, answer.certificates):
                    return

    def claimed(self, peer: PeerId, branch: BranchId, round: Round, manifest: Digest) -> None:
        """Hold against the proofs what a peer says was decided."""
        known = self._proven.get((branch, round))
        if known is not None:
            self._compare(peer, round, manifest, known)
        elif self._chain is not None and branch == self._chain.head.branch and round > self._chain.head.round:
            self._claims.setdefault((branch, round), {})[peer] = manifest
            if len(self._claims) > MAX_KEPT:
                del self._claims[next(iter(self._claims))]

    def _compare(self, peer: PeerId, round: Round, said: Digest, proven: Digest) -> None:
        if said != proven and peer not in self._liars:
            self._liars.add(peer)
            text = f"{short(peer)} says that round {round} came to what no majority signed: it lies, or its machine is"
            self._tell(Notice(text=f"{text} broken"))

    def _take(self, peer: PeerId, chain: Chain, certificates: Sequence[Certificate]) -> bool:
        """Return whether one of these goes on from what is known."""
        num = 0
        for certificate in certificates:
            electorate = chain.base.electorate
            if not chain.proven(certificate):
                text = f"{short(peer)} tells of round {certificate.manifest.round} what no majority signed"
                self._tell(Notice(text=text))
                break
            chain.append(certificate)
            self._keep(certificate.manifest, len(signers(certificate, electorate)), len(electorate))
            num += 1
        self._proven_at = self._clock.now() if num else self._proven_at
        return num > 0

    def _keep(self, manifest: Manifest, num_signed: int, num_electors: int) -> None:
        name, where = digest_of(manifest), (manifest.branch, manifest.round)
        self._proven[where] = name
        if len(self._proven) > MAX_KEPT:
            del self._proven[next(iter(self._proven))]
        for peer, said in self._claims.pop(where, {}).items():
            self._compare(peer, manifest.round, said, name)
        proven = RoundProven(
            branch=manifest.branch,
            round=manifest.round,
            manifest=name,
            committed_tokens=manifest.committed_tokens,
            num_signed=num_signed,
            num_electors=num_electors,
        )
        self._tell(proven)

    async def _begin(self, peers: Sequence[PeerId]) -> Chain | None:
        """Return a chain that begins where most of these peers stand; None: it cannot be told just now."""
        stands = [each for each in await asyncio.gather(*map(self._standing, peers)) if each is not None]
        if not stands:
            return None
        counts = Counter(digest_of(head) for head, _ in stands)
        head, charter = max(stands, key=lambda each: (counts[digest_of(each[0])], each[0].round))
        return Chain(head, charter.charter)

    async def _standing(self, peer: PeerId) -> tuple[Manifest, CharterAnswer] | None:
        with suppress(PeerError, NetError, Refused):
            request = StateRequest(run=self._node.run)
            offer, charter = await asyncio.gather(
                self._node.call(peer, request, StateOffer, deadline_s=CALL_S),
                self._node.call(peer, CharterRequest(run=self._node.run), CharterAnswer, deadline_s=CALL_S),
            )
            if offer.head is not None and offer.head.charter == digest_of(charter.charter):
                return offer.head, charter
        return None
