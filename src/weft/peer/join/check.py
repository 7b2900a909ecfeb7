"""What a newcomer to an audited run looks at before it brings anything: some leases of the last rounds, made again.

    told        the manifests of the last rounds, each named by the one after, up to the one whose state this peer has
    drawn       some of the leases that they count, by this machine's own chance
    shown       what these began and ended with, by who trained on them (`weft.peer.audit.leases.starts`)
    replayed    as of an archive (`weft.peer.audit.leases.replays`)

An event says what came of each. In exact numbers a difference ends this peer: it says whose work it was. Elsewhere it
is a warning, and may be this machine's: an event says how far it came from the members' work, where that is farther
than honest machines usually come. Where it came near to nobody's, this peer ends: it would be struck out.

It is no member yet, so nobody waits for it meanwhile. Who comes back while it still is one brings its work at once.
What the parameters were that a lease of before began at is not known here: that is for audits of members.

Failure:
- who did a work is gone, shows it no more, or lets this peer wait: another is drawn. Nobody is left, or they have been
  waited for too long: an event says how many were looked at.
- this peer is paused: it goes on afterwards.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from msgspec import UNSET

from weft import rng
from weft.config import alike
from weft.errors import DataError, NetError, PeerError, Refused, WireError
from weft.events import Notice, WorkAudited, WorkDoubted
from weft.ids import Digest, PeerId, Round, several, short
from weft.keys import verify
from weft.net.multi_source import Blob, pull, small_from
from weft.peer.audit.heads import Head
from weft.peer.audit.leases.replays import Case, NotHere, Replayed, Replays, Shown
from weft.peer.audit.outcome import unlike_told
from weft.peer.audit.steps import LOCAL, Away
from weft.peer.context import Context
from weft.peer.messages import MAX_CERTIFICATES, ChainAnswer, ChainRequest, WorkAnswer, WorkRequest
from weft.peer.round.works import MAX_NBYTES
from weft.peer.state.replica import Replica
from weft.run.amend import first_charter
from weft.run.config import RunConfig
from weft.run.trust import AuditedTrust
from weft.sync.merge.method import OUTER
from weft.sync.records.charter import Charter
from weft.sync.records.index import MAX_INDEX_NBYTES, StateIndex, VectorIndex
from weft.sync.records.messages import Counted, Manifest
from weft.sync.records.work import Work
from weft.tasks import to_the_end
from weft.training.trainer import Trainer
from weft.verify.calibration import Apart, Calibration
from weft.verify.judge import threshold
from weft.wire import Buffer, Signed, decode, digest_of, unseal

LAST = MAX_CERTIFICATES  # rounds: as many as one answer tells, and less than for which peers keep what they began with
PATIENCE_S = 120.0  # with those who are asked
CALL_S = 20.0
SLOW_NBYTES_PER_S = 256 << 10  # whoever delivers slower than that on average is not waited for
SHOWN_NBYTES = 6 * 4  # of a lease, for a parameter, at most: two states and what codecs had left
MAX_VECTORS = 4  # of a state


@dataclass(frozen=True)
class _Drawn:
    """A counted work of one lease."""

    counted: Counted
    by: Manifest  # that counts it
    head: Manifest  # after which it was leased
    charter: Charter

    @property
    def peer(self) -> PeerId:
        return PeerId(self.counted.peer)

    @property
    def name(self) -> Digest:
        return Digest(self.counted.work or "")


@dataclass(frozen=True)
class _Begun:
    """What is shown of one.

    Args:
        begin: the state that it began with; blobs: of that and the others.
    """

    work: Work
    shown: Shown
    begin: StateIndex
    blobs: dict[Digest, Buffer]


class EntryCheck:
    """Of one peer.

    Args:
        awake: waits until this peer is not paused.
        should_break_off: asked between training steps.
    """

    def __init__(
        self,
        context: Context,
        trainer: Trainer,
        replica: Replica,
        awake: Callable[[], Awaitable[None]],
        should_break_off: Callable[[], bool],
    ) -> None:
        self._context = context
        self._node = context.node
        self._trainer = trainer
        self._replica = replica
        self._awake = awake
        self._should_break_off = should_break_off

    async def run(self, head: Manifest) -> None:
        """Make some leases of others again, if this peer comes to a run that goes on.

        Raises:
            PeerError: in exact numbers, one of them is not what its peer says: this run is not to be joined.
        """
        wanted = self._context.settings.check
        if not wanted or not head.round or self._node.peer in head.members:
            return
        drawn, num, began, calibration = await self._drawn(head), 0, self._context.clock.now(), Calibration()
        for each in drawn:
            if num == wanted or self._context.clock.now() - began > PATIENCE_S:
                break
            try:
                found = await self._looked(each)
            except (PeerError, NetError, Refused, DataError, TimeoutError):
                continue  # another is drawn
            if found is not None:
                num += 1
                began = self._context.clock.now()
                self._tell(each, found)
                self._note(calibration, each.peer, found)
        self._calibrated(calibration)
        if drawn and num < wanted:
            text = f"of others' last training this peer could make {several(num, 'lease')} again, of {wanted} that it"
            self._context.emit(Notice(text=f"{text} would: members show no more of it now"))

    def _tell(self, drawn: _Drawn, found: Replayed) -> None:
        """
        Raises:
            PeerError: in exact numbers, it differs.
        """
        told = WorkAudited(
            round=drawn.by.round, member=drawn.peer, work=drawn.name, num_steps=found.num_steps, distance=found.distance
        )
        if found.outcome != "differs":
            self._context.emit(told)
            return
        self._context.emit(WorkDoubted(**alike(WorkDoubted, told), outcome="differs", why=found.why))
        if self._trust.is_exact:
            raise PeerError(
                f"round {drawn.by.round} of this run counts what {drawn.peer} has not done: {found.why}. This machine "
                "has made these training steps again, and does not join. Tell the run's members; --check 0 joins "
                "without a look."
            )

    def _note(self, calibration: Calibration, peer: PeerId, found: Replayed) -> None:
        """Note how near this machine came to a lease, where that is a matter of rounding."""
        is_measured = found.outcome != "differs" or 0.0 < found.distance < inf
        if not self._trust.is_exact and is_measured:
            held = found.held or threshold(self._trust.numerics, max(found.num_steps, 1))
            calibration.note(peer, Apart(found.distance, held))

    def _calibrated(self, calibration: Calibration) -> None:
        """Say so where this machine came less near than honest machines usually do.

        Raises:
            PeerError: it came near to no lease of any member.
        """
        unlike = calibration.unlike
        if unlike is None:
            return
        self._context.emit(unlike_told(unlike))
        if calibration.is_apart_from_all:
            raise PeerError(
                f"this machine has made training steps of {unlike.num_members} members again, and each time it came to "
                f"something else, up to {unlike.farthest.share:.3g} times as far from theirs as is held for honest. "
                "Either all of that is false, or this machine computes otherwise than theirs do: they would find its "
                "own work false, and ban its key. So it does not join. Train on such a device and with such a version "
                "of torch as they have; --check 0 joins without a look."
            )

    @property
    def _trust(self) -> AuditedTrust:
        trust = self._replica.run.trust
        assert isinstance(trust, AuditedTrust)
        return trust

    # --- what there is ---

    async def _drawn(self, head: Manifest) -> list[_Drawn]:
        """Return leases of the last rounds in the order of this machine's own chance, of those who are linked."""
        charters = {digest_of(each): each for each in (self._replica.charter, first_charter(self._replica.run))}
        found = [each for each in _leases(await self._told(head), charters) if self._node.is_linked(each.peer)]
        luck = rng.stream(int.from_bytes(rng.fresh_secret(8), "little"), "entry check")
        return [found[at] for at in luck.permutation(len(found))]

    async def _told(self, head: Manifest) -> list[Manifest]:
        """Return the manifests of the last rounds, in order, up to `head`; none: nobody tells them."""
        for peer in sorted(self._node.peers):
            found = list[Manifest]()
            after = max(head.round - LAST - 1, 0)
            while after < head.round:
                request = ChainRequest(branch=head.branch, after=Round(after))
                answer = await self._node.ask(peer, request, ChainAnswer, deadline_s=CALL_S)
                if answer is None or not answer.certificates:
                    break
                found += [each.manifest for each in answer.certificates]
                after = found[-1].round
            if (row := _up_to(head, found)) is not None:
                return row
        return []

    async def _looked(self, drawn: _Drawn) -> Replayed | None:
        """Return what came of a lease; None: its work is of several, or it cannot be told here.

        Raises:
            PeerError, NetError, Refused, TimeoutError: it is not shown.
            DataError: what is shown was not signed.
        """
        async with asyncio.timeout(PATIENCE_S + SHOWN_NBYTES * self._replica.outer.numel() / SLOW_NBYTES_PER_S):
            begun = await self._begun(drawn)
        found = None if begun is None else await self._replayed(drawn, begun)
        return None if found is None or found.outcome == "unknown" else found

    async def _begun(self, drawn: _Drawn) -> _Begun | None:
        """Fetch what a lease began and ended with, of who trained on it; errors as of `_looked`."""
        peer, blobs = drawn.peer, dict[Digest, Buffer]()
        holders = list(dict.fromkeys((peer, *sorted(self._node.peers))))
        data = await small_from(self._node, holders, drawn.name, MAX_NBYTES)
        work = _opened(decode(data, Signed), drawn)
        if len(work.segments) > 1 or work.segments[0].head != digest_of(drawn.head):
            return None
        answer = await self._node.call(peer, WorkRequest(work=drawn.name), WorkAnswer, deadline_s=CALL_S)
        if not answer.is_here or not len(answer.begins) == len(answer.ends) == 1:
            raise PeerError(f"{short(peer)} does not show what its work began with: {answer.reason}")
        begin = await self._fetched(peer, Digest(answer.begins[0].state), blobs, None)
        names = set[str]() if self._trust.is_exact else {LOCAL}
        await self._fetched(peer, Digest(answer.ends[0].state), blobs, names)
        if work.error is not None:
            await self._fetched(peer, Digest(work.error), blobs, None)
        return _Begun(work, Shown(answer.begins, answer.ends), begin, blobs)

    async def _replayed(self, drawn: _Drawn, begun: _Begun) -> Replayed:
        def blob(name: Digest) -> Buffer:
            if name not in begun.blobs:
                raise NotHere(f"nobody has shown {short(name)}")
            return begun.blobs[name]

        def between() -> None:
            if self._should_break_off():
                raise Away

        run, trust = self._replica.run, self._trust
        assert isinstance(run, RunConfig)
        nowhere = VectorIndex(name=OUTER, num=0, chunks=())  # what the run's parameters were is not known here
        head = Head(manifest=drawn.head, charter=drawn.charter, outer=nowhere)
        replays = Replays(self._trainer, run, trust.numerics, blob, between)

        def replay() -> Replayed:
            outer = replays.vectors(begun.begin, {LOCAL})[LOCAL]
            ((found,), _) = replays.check(Case(begun.work, [head], [outer], begun.shown), [0])
            return found

        while True:
            await self._awake()
            try:
                async with self._context.learner_lock:
                    return await to_the_end(self._context.compute.train(replay))  # the trainer is to be saved
            except Away:
                await asyncio.sleep(0)

    async def _fetched(
        self, peer: PeerId, name: Digest, blobs: dict[Digest, Buffer], names: set[str] | None
    ) -> StateIndex:
        """Fetch the list of a state, and the chunks of some of its vectors.

        Args:
            names: of the vectors; None: all.
        """
        blobs[name] = await self._node.fetch_small(peer, name, MAX_INDEX_NBYTES)
        index: StateIndex = decode(blobs[name], StateIndex, max_nbytes=MAX_INDEX_NBYTES)
        most = 2 * self._replica.outer.numel()
        if len(index.vectors) > MAX_VECTORS or any(each.num > most for each in index.vectors):
            raise PeerError(f"what {short(peer)} shows is larger than any state of this run")

        async def keep(blob: Blob, data: Buffer) -> None:
            blobs[blob.digest] = data

        places = index.places(names).items()
        missing = [Blob(digest=each, nbytes=at[0].nbytes) for each, at in places if each not in blobs]
        await pull(self._node, missing, [peer], keep, self._context.clock)
        return index


def _up_to(head: Manifest, found: list[Manifest]) -> list[Manifest] | None:
    """Return manifests of the last rounds, if each is named by the one after, up to `head`."""
    row = [each for each in found if each.round <= head.round]
    if not row or row[-1] != head:
        return None
    for before, after in pairwise(row):
        if after.previous != digest_of(before):
            return None
    return row


def _leases(rounds: list[Manifest], charters: dict[Digest, Charter]) -> Iterator[_Drawn]:
    """Yield the works that rounds count, whose leases the round before has given."""
    for head, by in pairwise(rounds):
        charter = charters.get(Digest(head.charter))
        for counted in by.contributions if charter is not None else ():
            if counted.work is not UNSET and charter is not None:
                yield _Drawn(counted, by, head, charter)


def _opened(signed: Signed, drawn: _Drawn) -> Work:
    """
    Raises:
        WireError: it is not the work that the round counts.
    """
    work: Work = unseal(signed, Work, verify)
    is_it = digest_of(signed) == drawn.name and work.payload == drawn.counted.payload
    if not is_it or not work.peer == signed.signer == drawn.counted.peer:
        raise WireError("it is not the work that the round counts")
    return work
