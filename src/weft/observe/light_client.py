"""What of a run an observer can check for itself: that a majority signed what was decided.

    observer                                 a linked member, another each time
      StateRequest, CharterRequest ────────►   once: where the run stands
      ChainRequest ────────────────────────►   every two seconds
      ◄────────────────────────── ChainAnswer  certificates: manifests, and the votes on them

Each certificate is held against the electorate that the one before named, as members do it, and told as `RoundProven`.
Where it begins there is nothing to check it by: the head is believed that more than half of those asked stand at, or
one round beyond. With one link that is one member's word.

Failure:
- a member answers nothing, or forgot: the next one is asked.
- one tells what no majority signed: it is named, and not asked for a minute.
- nobody knows how it goes on (the members are on another branch, or it was out of touch for too long): after a minute
  it begins anew, once more than half agree where.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from weft.clock import Clock
from weft.errors import NetError, PeerError, Refused
from weft.events import Event, Notice, RoundProven
from weft.ids import BranchId, Digest, PeerId, Round, RunId, short
from weft.net.node import Node
from weft.observe.telemetry import WINDOW_S
from weft.peer.chain import Chain
from weft.peer.messages import ChainAnswer, ChainRequest, CharterAnswer, CharterRequest, StateOffer, StateRequest
from weft.sync.records.charter import Charter
from weft.sync.records.messages import Certificate, Manifest, has_right_entry
from weft.wire import digest_of

CALL_S = 10.0
MAX_ASKED = 8  # where the run stands
STALE_S = 60.0  # without a proof, while somebody answers that it knows of no such round: the branch may be another
DEAF_S = 60.0  # to who told what no majority signed
MAX_KEPT = 4096  # proven rounds that claims are held against
MAX_AHEAD = 64  # rounds after the last proven one, of which claims are kept

Position = tuple[Manifest, Charter]


class LightClient:
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
        self._deaf_until: dict[PeerId, float] = {}

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
        heard = [peer for peer in peers if self._deaf_until.get(peer, now) <= now]
        if self._chain is None:
            await self._begin(heard)
        if self._chain is None or not await self._is_lost(heard, self._chain):
            return
        if now - self._proven_at > STALE_S:
            await self._begin(heard)

    async def _is_lost(self, peers: Sequence[PeerId], chain: Chain) -> bool:
        """Ask how it goes on; return whether somebody answered, and nobody that this is how."""
        is_lost = False
        request = ChainRequest(branch=chain.head.branch, after=chain.head.round)
        for peer in peers:
            with suppress(PeerError, NetError, Refused):
                answer = await self._node.call(peer, request, ChainAnswer, deadline_s=CALL_S)
                if answer.certificates and self._take(peer, chain, answer.certificates):
                    return False
                is_lost = is_lost or answer.certificates is None or len(answer.certificates) > 0
        return is_lost

    def claimed(self, peer: PeerId, branch: BranchId, round: Round, manifest: Digest) -> None:
        """Hold against the proofs what a peer says was decided."""
        known, chain = self._proven.get((branch, round)), self._chain
        if known is not None:
            self._compare(peer, round, manifest, known)
        elif chain is not None and branch == chain.head.branch and 0 < round - chain.head.round <= MAX_AHEAD:
            self._claims.setdefault((branch, round), {})[peer] = manifest

    def _compare(self, peer: PeerId, round: Round, said: Digest, proven: Digest) -> None:
        if said != proven and peer not in self._liars:
            self._liars.add(peer)
            text = f"{short(peer)} tells a result of round {round} that no majority signed: it lies, or its machine is"
            self._tell(Notice(text=f"{text} broken"))

    def _take(self, peer: PeerId, chain: Chain, certificates: Sequence[Certificate]) -> bool:
        """Return whether one of these goes on from what is known."""
        num = 0
        for certificate in certificates:
            num_electors, signers = len(chain.base.electorate), chain.proof(certificate)
            if signers is None:
                text = f"{short(peer)} tells a result of round {certificate.manifest.round} that no majority signed"
                self._tell(Notice(text=text))
                self._deaf_until[peer] = self._clock.now() + DEAF_S
                break
            chain.append(certificate)
            self._keep(certificate.manifest, len(signers), num_electors)
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

    async def _begin(self, peers: Sequence[PeerId]) -> None:
        """Go on from where most of these peers stand, if that can be told just now."""
        answers = await asyncio.gather(*map(self._position, peers[:MAX_ASKED]))
        found = most_told([each for each in answers if each is not None])
        if found is not None:
            self._chain, self._proven_at = Chain(*found), self._clock.now()
            self._claims.clear()

    async def _position(self, peer: PeerId) -> Position | None:
        run = self._node.run
        with suppress(PeerError, NetError, Refused):
            offer, answer = await asyncio.gather(
                self._node.call(peer, StateRequest(run=run), StateOffer, deadline_s=CALL_S),
                self._node.call(peer, CharterRequest(run=run), CharterAnswer, deadline_s=CALL_S),
            )
            if offer.head is not None and is_beginning(offer.head, answer.charter, run):
                return offer.head, answer.charter
        return None


def is_beginning(head: Manifest, charter: Charter, run: RunId) -> bool:
    """Return whether what follows in a run could be checked from here."""
    is_of_run = head.run == run and head.charter == digest_of(charter) and has_right_entry(head, charter)
    return is_of_run and len(head.uplinks) == len(head.members) > 0


def most_told(positions: Sequence[Position]) -> Position | None:
    """Return where more than half stand, or did one round ago; of several the latest."""
    for head, charter in sorted(positions, key=lambda each: -each[0].round):
        name = digest_of(head)
        num_there = sum(name in (digest_of(other), other.previous) for other, _ in positions)
        if 2 * num_there > len(positions):
            return head, charter
    return None
