"""Runs the round machine of `sync.round` on a node: signs, sends, writes, fetches, merges, times.

    rounds = Rounds(node, chain, ...)
    rounds.begin()                          # the round after the chain's head
    rounds.announce(tokens, parts)          # this peer's encoded payload
    manifest = await rounds.decided.get()   # each commit, in order, whoever contributed

Decisions are the machine's; this file carries them out in the order given. What must survive a crash is on disk before
anything that depends on it is sent. Payload parts and results are blobs under their digests.

Failure:
- a contributor that cannot deliver, or delivers what is no payload: the owner says so and the leader plans without it.
- an owner that vanishes before its result is out: the leader gives the part to another.
- a leader that vanishes: the next attempt's leader takes over when the progress timer runs out, or at once when
  membership says so.
- this peer crashes: it resumes from `Durable`, or joins anew.

It does not know what a payload means to training, nor when a run ends.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, assert_never

from weft.clock import Clock
from weft.data import write_atomically
from weft.errors import NetError, PayloadError, PeerError, Refused, WireError
from weft.events import AttemptStarted, Emit, PayloadRejected
from weft.ids import Digest, PeerId, Round, Tokens, short
from weft.keys import Identity, verify
from weft.net.node import Node
from weft.net.tasks import Tasks
from weft.peer.chain import Chain
from weft.peer.compute import Compute
from weft.peer.messages import Decision, Letter
from weft.sync import round as machine
from weft.sync.deadline import deadline_s
from weft.sync.machine import (
    Broadcast,
    Commit,
    Fetch,
    Input,
    Leave,
    Merge,
    MergeDone,
    MergeFailed,
    Noticed,
    Output,
    Persist,
    Received,
    ResultHeld,
    Send,
    SetTimer,
    State,
    TimedOut,
    Timer,
    Trained,
)
from weft.sync.messages import (
    Accept,
    AnyRoundMessage,
    Certificate,
    Collect,
    Committed,
    Goodbye,
    Manifest,
    Ready,
    RoundNote,
)
from weft.sync.method import Method
from weft.sync.reduce import MergedPart, Merger, cut
from weft.sync.rules import Durable, is_quorum, leader
from weft.wire import Buffer, Signed, digest, digest_of, encode, seal, unseal

Status = Literal["alive", "suspected", "gone", "joining"]


class Rounds:
    """The present round of one branch, as one of its members.

    Args:
        num: elements of the vector that is synchronised.
        durable_path: where the machine's promises are kept.
    """

    def __init__(
        self,
        node: Node,
        identity: Identity,
        chain: Chain,
        method: Method,
        num: int,
        *,
        compute: Compute,
        clock: Clock,
        emit: Emit,
        durable_path: Path,
    ) -> None:
        self.chain = chain
        self.decided: asyncio.Queue[Manifest] = asyncio.Queue()
        self._node = node
        self._identity = identity
        self._method = method
        self._num = num
        self._compute = compute
        self._clock = clock
        self._emit = emit
        self._durable_path = durable_path
        self._state: State | None = None  # None: not a member of the round
        self._payload: dict[Digest, Buffer] = {}
        self._votes: dict[PeerId, Signed] = {}  # signed Accepts, to prove a commit
        self._farewells: dict[PeerId, Signed] = {}
        self._statuses: dict[PeerId, Status] = {}
        self._timers: dict[tuple[Timer, int], asyncio.TimerHandle] = {}
        self._announced_at = 0.0
        self._ready_at: list[float] = []
        self._graces_s: list[float] = []
        self._latencies_s: list[float] = []
        self._tasks = Tasks()
        self._early: list[tuple[PeerId, RoundNote]] = []  # of the round after this one
        node.serve_blobs(self._lookup)

    # --- what the peer does ---

    @property
    def is_member(self) -> bool:
        return self._state is not None

    @property
    def parts(self) -> tuple[range, ...]:
        """Return how the vector is cut in the present round."""
        return cut(self._num, [1] * self.chain.base.num_parts)

    def begin(self, durable: Durable | None = None) -> None:
        """Enter the round after the chain's head, where this peer is in its electorate.

        Args:
            durable: what was on disk of this very round, after a restart.
        """
        self._stop_timers()
        base = self.chain.base
        self._state = None
        self._votes, self._farewells, self._ready_at = {}, {}, []
        if self._node.peer not in base.electorate:
            return
        outputs: tuple[Output, ...] = ()
        if durable is not None and durable.base == base and not durable.has_left:
            self._state, outputs = machine.resume(self._node.peer, durable)
        else:
            self._state = machine.begin(self._node.peer, base)
        self._carry_out(outputs)
        for peer, status in self._statuses.items():
            if status != "alive":
                self._feed(Noticed(peer=peer, status=status))
        early, self._early = self._early, []
        for sender, note in early:
            self._read(sender, note)

    def announce(self, tokens: Tokens, parts: Sequence[Buffer]) -> tuple[Digest, ...]:
        """Offer this peer's payload to the present round; return its parts' digests."""
        digests = tuple(digest(part) for part in parts)
        self._payload = dict(zip(digests, parts, strict=True))
        self._announced_at = self._clock.now()
        self._feed(Trained(tokens=tokens, parts=digests))
        return digests

    def notice(self, peer: PeerId, status: Status) -> None:
        """Take up what membership says of a peer, for this round and the next."""
        if status == "joining" and peer in self.chain.base.electorate:
            return
        self._statuses[peer] = status
        self._feed(Noticed(peer=peer, status=status))

    def leave(self) -> None:
        """Say the final word of this round's member."""
        self._feed(Leave())

    def present(self) -> tuple[PeerId, ...]:
        """Return the electorate less those that are gone or have left, ascending."""
        away = {peer for peer, status in self._statuses.items() if status == "gone"}
        if self._state is not None:
            away |= self._state.farewells.keys()
        return tuple(peer for peer in self.chain.base.electorate if peer not in away)

    def has_majority(self) -> bool:
        """Return whether those not gone could commit."""
        return self._state is None or is_quorum(self.chain.base, self.present(), self._state.farewells)

    def follow(self, certificate: Certificate) -> bool:
        """Take over a decision that was made elsewhere; return whether it follows on the head."""
        if certificate.manifest.round != self.chain.base.round or not self.chain.proven(certificate):
            return False
        self._decide(certificate)
        return True

    def restart(self, head: Manifest) -> None:
        """Go on from another head: a newcomer's, or a branch's first."""
        self.chain.head = head
        self._early = []
        self.begin()

    async def results(self, manifest: Manifest) -> tuple[Buffer, ...]:
        """Return the results of a committed round, fetched from whoever holds them.

        Raises:
            PeerError: nobody that can be reached has one of them any more.
        """
        parts = cut(self._num, [1] * len(manifest.parts))
        holders = [part.owner for part in manifest.parts] + list(manifest.members)
        return tuple([await self._result(part.result, len(parts[i]), holders) for i, part in enumerate(manifest.parts)])

    async def aclose(self) -> None:
        self._stop_timers()
        await self._tasks.aclose()

    # --- what others say ---

    def on_letter(self, peer: PeerId, letter: Letter) -> None:
        """Take up what a member says of this round, or keep what it says of the next.

        Raises:
            WireError: the letter is not what its sender signed.
        """
        note = unseal(letter.signed, RoundNote, verify)
        if letter.signed.signer != peer:
            raise WireError(f"{short(peer)} passed on a letter of {short(letter.signed.signer)}")
        base = self.chain.base
        if note.branch != base.branch:
            return
        if note.round < base.round:
            self._tell_decision(peer, note.round)
        elif note.round == base.round + 1:
            self._early = [*self._early[-4 * len(base.electorate) :], (peer, note)]
        elif note.round == base.round:
            self._keep_evidence(letter.signed, note.message)
            self._read(peer, note)

    def on_decision(self, decision: Decision) -> None:
        """Take over a decision, if it follows on the head and its proof holds."""
        if decision.certificate.manifest.branch == self.chain.base.branch:
            self.follow(decision.certificate)

    def _read(self, sender: PeerId, note: RoundNote) -> None:
        message = note.message
        if isinstance(message, Committed):  # only a certificate is believed
            return
        if isinstance(message, Ready):
            self._ready_at.append(self._clock.now())
        self._feed(Received(sender=sender, message=message))

    def _keep_evidence(self, signed: Signed, message: AnyRoundMessage) -> None:
        if isinstance(message, Accept):
            self._votes[signed.signer] = signed
        elif isinstance(message, Goodbye):
            self._farewells[signed.signer] = signed

    def _tell_decision(self, peer: PeerId, round: Round) -> None:
        known = self.chain.after(Round(round - 1), 1)
        if known:
            self._node.post(peer, Decision(certificate=known[0]))

    # --- what the machine wants done ---

    def _feed(self, event: Input) -> None:
        if self._state is None:
            return
        before = self._state
        self._state, outputs = machine.step(before, event)
        if self._state.attempt != before.attempt:
            self._emit(
                AttemptStarted(
                    branch=before.base.branch,
                    round=before.base.round,
                    attempt=self._state.attempt,
                    leader=leader(before.base, self._state.attempt),
                    reason=type(event).__name__,
                )
            )
        self._carry_out(outputs)

    def _carry_out(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            match output:
                case Persist(durable=durable):
                    write_atomically(self._durable_path, [encode(durable)])
                case Send(to=to, message=message):
                    self._send((to,), message)
                case Broadcast(message=message):
                    self._send(self.chain.base.electorate, message)
                case Merge(plan=plan, part=part):
                    self._tasks.spawn(self._merge(plan, part))
                case Fetch(plan=plan, part=part, result=result):
                    self._tasks.spawn(self._fetch(plan, part, result))
                case SetTimer(timer=timer, attempt=attempt):
                    self._set_timer(timer, attempt)
                case Commit(attempt=attempt, manifest=manifest):
                    self._decide(self._certify(Committed(attempt=attempt, manifest=manifest)))
                    return  # the round is over; nothing stands behind a commit
                case _:
                    assert_never(output)

    def _send(self, to: Iterable[PeerId], message: AnyRoundMessage) -> None:
        letter: Letter | Decision
        if isinstance(message, Committed):
            letter = Decision(certificate=self._certify(message))
        else:
            letter = Letter(signed=self._seal(message))
        for peer in to:
            if peer != self._node.peer:
                self._node.post(peer, letter)

    def _seal(self, message: AnyRoundMessage) -> Signed:
        base = self.chain.base
        return seal(self._identity, RoundNote(branch=base.branch, round=base.round, message=message))

    def _certify(self, committed: Committed) -> Certificate:
        mine = self._seal(Accept(attempt=committed.attempt, manifest=digest_of(committed.manifest)))
        votes = {**self._votes, self._node.peer: mine}
        return Certificate(
            attempt=committed.attempt,
            manifest=committed.manifest,
            votes=tuple(votes[peer] for peer in sorted(votes)),
            farewells=tuple(self._farewells[peer] for peer in sorted(self._farewells)),
        )

    def _decide(self, certificate: Certificate) -> None:
        """A round is over: the next begins at once, whatever this peer is computing."""
        manifest = certificate.manifest
        now = self._clock.now()
        if self._announced_at:
            self._latencies_s.append(now - self._announced_at)
        if len(self._ready_at) > 1:
            self._graces_s.append(self._ready_at[-1] - self._ready_at[0])
        self._announced_at = 0.0
        self.chain.append(certificate)
        for peer in (*manifest.joined, *manifest.left):
            self._statuses.pop(peer, None)
        self.decided.put_nowait(manifest)
        self._tasks.spawn(self._prefetch(manifest))
        self.begin()

    # --- bytes ---

    def _lookup(self, _peer: PeerId, wanted: Digest) -> Buffer | None:
        return self._payload.get(wanted) or self.chain.result(wanted)

    async def _merge(self, plan: Collect, part: int) -> None:
        """Collect the contributions to a part, merge them in ascending peer order, and serve the result."""
        num = len(self.parts[part])
        nbytes = self._method.codec.nbytes(num)
        fetched = await asyncio.gather(
            *(self._payload_part(each.peer, each.parts[part], nbytes) for each in plan.contributions)
        )
        missing = [each.peer for each, data in zip(plan.contributions, fetched, strict=True) if data is None]
        merger = Merger(num, self._method.codec, self._method.reply_codec)
        for each, data in zip(plan.contributions, fetched, strict=True):
            if data is None or missing:
                continue
            try:
                await self._compute.serve(lambda each=each, data=data: merger.add(each.tokens, data))  # type: ignore[misc]
            except PayloadError as error:
                missing.append(each.peer)
                self._emit(PayloadRejected(round=self.chain.base.round, member=each.peer, reason=str(error)))
        if missing:
            self._feed(MergeFailed(plan=plan, part=part, missing=tuple(missing)))
            return
        merged: MergedPart = await self._compute.serve(merger.result)
        self.chain.keep(merged.digest, merged.encoded)
        self._feed(MergeDone(plan=plan, part=part, result=merged.digest))

    async def _payload_part(self, peer: PeerId, wanted: Digest, nbytes: int) -> Buffer | None:
        mine = self._payload.get(wanted)
        if mine is not None:
            return mine
        with suppress(PeerError, NetError, Refused):
            return await self._node.fetch_any([peer], wanted, nbytes)
        return None

    async def _fetch(self, plan: Collect, part: int, result: Digest) -> None:
        owners = [plan.owners[part], *(each.peer for each in plan.contributions)]
        with suppress(PeerError):
            await self._result(result, len(self.parts[part]), owners)
            self._feed(ResultHeld(plan=plan, part=part))

    async def _prefetch(self, manifest: Manifest) -> None:
        with suppress(PeerError):
            await self.results(manifest)

    async def _result(self, wanted: Digest, num: int, holders: Sequence[PeerId]) -> Buffer:
        known = self.chain.result(wanted)
        if known is not None:
            return known
        nbytes = self._method.reply_codec.nbytes(num)
        others = [peer for peer in dict.fromkeys(holders) if peer != self._node.peer]
        data = await self._node.fetch_any(others, wanted, nbytes)
        self.chain.keep(wanted, data)
        return data

    # --- time ---

    def _set_timer(self, timer: Timer, attempt: int) -> None:
        if (timer, attempt) in self._timers:
            return
        delay_s = deadline_s(self._graces_s)
        if timer == "progress":
            delay_s = (delay_s + deadline_s(self._latencies_s)) * 2 ** min(attempt, 5)
        loop = asyncio.get_running_loop()
        expire: Callable[[], None] = lambda: self._expire(timer, attempt)  # noqa: E731
        self._timers[timer, attempt] = loop.call_later(delay_s, expire)

    def _expire(self, timer: Timer, attempt: int) -> None:
        self._timers.pop((timer, attempt), None)
        self._feed(TimedOut(timer=timer, attempt=attempt))  # type: ignore[arg-type]

    def _stop_timers(self) -> None:
        for handle in self._timers.values():
            handle.cancel()
        self._timers.clear()
