"""Groups: peers that find no room among the electors contribute through one of them.

    groups.turn          where this peer announces: its rounds, or its aggregator (`Leaf`)
    groups.is_outside    neither: it has to ask its way in
    groups.leased(...)   what it trains on

An elector collects what its leaves offer, where it has any, and brings the mean of all (`Aggregator`):

    Offer       fetched at once, added to the mean as it arrives, whole or not at all
    own work    added when it is done; then the living are waited for, as long as measured rounds say: until more than
                half have brought theirs, and a grace from then on
    the mean    announced as this peer's contribution, with the record of whom it counts
    commit      told to the leaves, once its results can be had from here (`GroupBroadcast`)

Which leaves this peer serves is soft: a list in memory. A leaf asks to be put on it, and an offer puts its leaf on it,
too. Leaves are held to what was leased to them, as electors are.

What was decided goes through the group, and no peer sends it more than twice:

    aggregator ── HandOn ──► every leaf             the certificate's digest, and from whom to fetch it
    leaf ── fetch ──► parent, or the aggregator     the certificate, the group's record, then the results

The parents make a tree under the aggregator. All leaves ask at once, and who is asked for what it is itself about to
get lets the asker wait (`Node.expect`), so parts of results run down the tree one behind the other.

Failure:
- a leaf does not deliver, or delivers no payload: the mean is made without it, and it keeps its carry.
- most do not, as they have another aggregator by now: they are not waited for without end.
- this peer dies: its leaves ask another elector. What it announced may be counted: all who heard it have the record.
- it is paused: it lets its leaves go.
- a parent dies, or does not get it either: the aggregator delivers.
- the aggregator dies when it has told: what is below who has it gets it from there; others find the decision like
  anybody who is behind (`Entrance.catch_up`).
- a parent delivers something else: it has another digest, and was never fetched.
"""

import asyncio
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from statistics import median

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from weft.errors import DeadlineExceeded, NetError, PayloadError, PeerError, Refused, WireError
from weft.events import PayloadRejected
from weft.ids import Digest, PeerId, Round, Tokens, short
from weft.keys import verify
from weft.net.blobs.blobs import StillComing
from weft.peer import messages
from weft.peer.companion import Unmeasured
from weft.peer.context import Context
from weft.peer.group.leaf import Leaf
from weft.peer.group.records import MAX_NBYTES, GroupRecords
from weft.peer.messages import Decision, HandOn
from weft.peer.round.driver import RoundDriver
from weft.peer.round.payloads import Payloads
from weft.sync.merge.reduce import EncodedPart, GroupMean
from weft.sync.records.charter import Charter
from weft.sync.records.messages import MAX_GROUP, Base, Certificate, GroupRecord, Manifest, Stake, claims_in
from weft.sync.records.weights import weight
from weft.sync.round.groups import Offer, is_grace_due, may_close, parents, record_of, slices, tokens_of
from weft.sync.round.machine import NUM_REMEMBERED, Status, deadline_s
from weft.sync.round.shares import shares
from weft.tasks import Tasks
from weft.wire import MAX_RECORD_NBYTES, Buffer, decode, digest, encode, unseal

NUM_KEPT = 2  # rounds whose certificates are served
SOURCE_S = 8.0  # for a parent to deliver what is small: it may wait for its own, some links further up


class GroupBroadcast:
    """Of one peer, as an aggregator and as a leaf."""

    def __init__(self, context: Context, rounds: RoundDriver, records: GroupRecords, leaf: Leaf, tasks: Tasks) -> None:
        self._node = context.node
        self._rounds = rounds
        self._records = records
        self._leaf = leaf
        self._tasks = tasks
        self._kept: dict[Digest, bytes] = {}
        self._taking: Digest | None = None
        context.node.on_note(HandOn, self._on_hand_on)
        context.node.serve_blobs(lambda _peer, wanted: self._kept.get(wanted))

    async def tell(self, certificate: Certificate, leaves: Sequence[PeerId]) -> None:
        """Aggregator: tell leaves of a decision, once its results can be had from here.

        Args:
            leaves: those first that should hand it on.
        """
        with suppress(PeerError):
            await self._rounds.parts.results(certificate.manifest)
        name = self._keep(encode(certificate))
        for leaf, parent in parents(self._node.peer, leaves).items():
            self._node.post(leaf, HandOn(round=certificate.manifest.round, certificate=name, source=parent))

    async def _on_hand_on(self, peer: PeerId, note: HandOn) -> None:
        is_new = note.round == self._rounds.chain.base.round and note.certificate != self._taking
        if peer == self._leaf.aggregator and is_new:
            self._taking = note.certificate
            self._tasks.spawn(self._take(peer, note))

    async def _take(self, aggregator: PeerId, note: HandOn) -> None:
        """Leaf: fetch what was decided, and go on from it."""
        with self._node.expect(note.certificate):
            parent, data = await self._from((note.source, aggregator), note.certificate, MAX_RECORD_NBYTES)
            if data is not None:
                self._keep(data)
        if data is None:
            return  # others tell that they are further, and the chain is fetched
        try:
            certificate = decode(data, Certificate)
        except WireError:
            return
        claim = claims_in(certificate.manifest).get(aggregator)
        if claim is not None and self._records.known(claim.record) is None:
            with self._node.expect(claim.record):
                _, record = await self._from((parent, aggregator), claim.record, MAX_NBYTES)
                if record is not None:
                    self._records.read(record)
        self._leaf.take_from(parent)
        self._rounds.hear(aggregator, Decision(certificate=certificate))

    async def _from(self, holders: Sequence[PeerId], wanted: Digest, most: int) -> tuple[PeerId, bytes | None]:
        """Return who delivered a blob, and the blob."""
        for holder in dict.fromkeys(holders):
            with suppress(PeerError, NetError, Refused, TimeoutError):
                async with asyncio.timeout(SOURCE_S):
                    while True:
                        with suppress(StillComing):
                            return holder, await self._node.fetch_small(holder, wanted, most)
        return holders[-1], None

    def _keep(self, certificate: bytes) -> Digest:
        name = digest(certificate)
        self._kept[name] = certificate
        while len(self._kept) > NUM_KEPT:
            del self._kept[next(iter(self._kept))]
        return name


PARALLEL = 4  # payloads on their way at a time: each is whole in memory
MAX_SILENT = 3  # rounds in which a leaf brings nothing: it has another aggregator, or none
SLOW = 4  # times slower than the median: such a leaf hands nothing on
NEW_QUOTAS = 4  # of a leaf whose leases this peer has not seen: what it may carry


def why_none(charter: Charter) -> str:
    """Return why members take no leaves in a run; empty: they do."""
    if charter.settings.method.graph is not None:
        return "members exchange with neighbours, and have no groups"
    if charter.audits is not UNSET or charter.passages is not UNSET:
        return "members audit each other, and work that comes through another cannot be audited"
    return ""


class Collection:
    """What an aggregator has of one round.

    Args:
        expected: who was leased something for it.
        num_own: tokens of this peer's own lease.
    """

    def __init__(self, base: Base, expected: set[PeerId], num_own: int) -> None:
        self.base = base
        self.expected = expected
        self.num_own = num_own
        self.offers: dict[PeerId, Offer] = {}
        self.brought: set[PeerId] = set()  # whose payload is in the mean, or can never be
        self.passing: set[PeerId] = set()
        self.mean: GroupMean | None = None
        self.stakes: list[Stake] = []  # as added to it
        self.claims: dict[PeerId, int] = {}  # tokens of leaves that are added, or about to be
        self.payloads: list[Digest] = []
        self.own_at: float | None = None  # since when this peer's own payload is in the mean, or can never be
        self.has_grace = False  # who is missing has only a grace left
        self.is_grace_over = False
        self.is_closed = False
        self.half_at: float | None = None  # since when more than half have brought theirs
        self.last_at = 0.0

    def note_offer(self, peer: PeerId, offer: Offer, at: float) -> None:
        self.offers[peer], self.last_at = offer, at

    def add(self, stake: Stake, name: Digest, payload: Sequence[Buffer], payloads: Payloads) -> None:
        """On the thread that merges: one after the other."""
        if self.is_closed:
            return
        if self.mean is None:
            self.mean = payloads.group_mean(self.base)
        self.mean.add(weight(self.base.charter, stake.tokens), payload)
        self.stakes.append(stake)
        self.payloads.append(name)

    def note_brought(self, peer: PeerId, at: float, *, is_own: bool) -> None:
        self.brought.add(peer)
        self.last_at, self.own_at = at, at if is_own else self.own_at

    def is_half_there(self, expected: Set[PeerId], at: float) -> bool:
        """Return, once, that more than half have brought theirs."""
        if self.half_at is not None or not is_grace_due(expected, self.brought):
            return False
        self.half_at = at
        return True

    def begin_grace(self) -> bool:
        """Return whether it begins now."""
        had_begun, self.has_grace = self.has_grace, True
        return not had_begun

    def end_grace(self) -> None:
        self.is_grace_over = True

    def finish(self, me: PeerId, payloads: Payloads) -> tuple[EncodedPart, ...]:
        """Add no more, and return the mean."""
        mean, self.mean, self.is_closed = self.mean, None, True
        # As others count them, by the claim: the aggregator, and whoever brought something through it.
        num_merged = 1 + sum(stake.tokens > 0 for stake in self.stakes if stake.peer != me)
        return () if mean is None else mean.result(payloads.group_codec(self.base, num_merged))


class Aggregator:
    """
    Args:
        speed: returns the tokens per second of this peer's own training.
    """

    def __init__(
        self,
        context: Context,
        rounds: RoundDriver,
        records: GroupRecords,
        broadcast: GroupBroadcast,
        speed: Callable[[], float],
        tasks: Tasks,
    ) -> None:
        self.leaves: dict[PeerId, float] = {}  # and how fast each trains
        self._node = context.node
        self._clock = context.clock
        self._compute = context.compute
        self._emit = context.emit
        self._rounds = rounds
        self._records = records
        self._broadcast = broadcast
        self._speed = speed
        self._tasks = tasks
        self._allowed: dict[PeerId, int] = {}  # tokens that a leaf may claim
        # For how many rounds leaves have brought nothing of what was leased to them.
        self._silent: dict[PeerId, int] = {}
        self._halves_s: list[float] = []  # from this peer's own work until more than half had brought theirs
        self._graces_s: list[float] = []  # from then until the last one
        self._early: dict[PeerId, messages.OfferNote] = {}  # of the round after this one
        self._gate = asyncio.Semaphore(PARALLEL)
        self._timers: list[asyncio.TimerHandle] = []
        self._now = Collection(rounds.chain.base, set(), 0)
        rounds.on_decided(self._decided)
        context.node.serve(messages.SponsorPlease, self._consider)
        context.node.on_note(messages.OfferNote, self._on_offer)
        context.node.on_note(messages.WardPass, self._on_pass)

    # --- what the peer does ---

    @property
    def is_in_use(self) -> bool:
        """Whether this peer has leaves, or something of a round in which it had."""
        return bool(self.leaves or self._early or self._now.offers or self._now.brought)

    def announce(self, tokens: Tokens, parts: Sequence[EncodedPart]) -> tuple[Digest, ...] | None:
        """Bring this peer's payload to the present round, with those of its leaves, if it has any."""
        self._look()
        if not self.leaves and not self._now.stakes:
            return self._rounds.announce(tokens, parts)
        self._tasks.spawn(self._add_own(self._now, tokens, parts))
        return tuple(part.digest for part in parts)

    def pass_on(self) -> None:
        """Bring nothing to the present round: this peer is paused, and its leaves find another aggregator."""
        self.release()
        self._rounds.pass_on()

    def release(self) -> None:
        for leaf in self.leaves:
            self._node.post(leaf, messages.Release(branch=self._rounds.chain.base.branch))
        for leaf in list(self.leaves):
            self._forget(leaf)

    def pass_evaluation_on(self, evaluation: messages.Evaluation) -> None:
        for leaf in self.leaves:
            self._node.post(leaf, evaluation)

    # --- leaves come ---

    async def _consider(self, peer: PeerId, please: messages.SponsorPlease) -> messages.SponsorAnswer:
        base = self._rounds.chain.base
        if not self._rounds.is_member or please.branch != base.branch:
            return messages.SponsorAnswer(is_taken=False, reason="it has no vote in this branch")
        if reason := why_none(base.charter):
            return messages.SponsorAnswer(is_taken=False, reason=reason)
        if not self._take(peer):
            return messages.SponsorAnswer(is_taken=False, reason="there is no room")
        self._look()
        self._now.expected.discard(peer)  # it obeyed nobody until now: what was leased to it is not under way
        self._check(self._now)
        return messages.SponsorAnswer(is_taken=True)

    def _take(self, peer: PeerId) -> bool:
        base = self._rounds.chain.base
        is_other = peer in base.electorate or peer in base.charter.banned or not self._rounds.is_member
        if why_none(base.charter) or is_other or (peer not in self.leaves and len(self.leaves) >= MAX_GROUP - 1):
            return False
        self.leaves.setdefault(peer, 0.0)
        settings = base.charter.settings
        self._allowed.setdefault(peer, NEW_QUOTAS * settings.quota_tokens)
        return True

    async def _on_offer(self, peer: PeerId, note: messages.OfferNote) -> None:
        offer = unseal(note.signed, Offer, verify)
        if note.signed.signer != peer:
            raise WireError(f"{short(peer)} passed on an offer of {short(note.signed.signer)}")
        self._look()
        base = self._now.base
        if (offer.run, offer.branch, offer.sponsor) != (base.run, base.branch, self._node.peer):
            return
        if offer.round == base.round + 1 and len(self._early) < MAX_GROUP:
            self._early[peer] = note
        if offer.round == base.round and peer not in self._now.offers and self._take(peer):
            self._now.note_offer(peer, offer, self._clock.now())
            self.leaves[peer] = offer.tokens_per_s
            self._silent.pop(peer, None)
            self._tasks.spawn(self._bring(self._now, peer, offer))

    async def _on_pass(self, peer: PeerId, note: messages.WardPass) -> None:
        self._look()
        if (note.branch, note.round) == (self._now.base.branch, self._now.base.round):
            self._now.passing.add(peer)
            self._check(self._now)

    # --- one round ---

    def _look(self) -> None:
        """Begin anew where the round is another one."""
        base = self._rounds.chain.base
        if self._now.base is base:
            return
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        claim = claims_in(self._rounds.chain.head).get(self._node.peer)
        record = None if claim is None else self._records.known(claim.record)
        leased = () if record is None else (stake.peer for stake in record.stakes if stake.samples)
        own = self._records.leased(self._rounds.chain.head, base.charter)
        self._now = Collection(base, {*leased, self._node.peer}, len(own) * base.charter.settings.seq_len)
        early, self._early = self._early, {}
        for peer, note in early.items():
            self._tasks.spawn(self._on_offer(peer, note))

    async def _bring(self, now: Collection, peer: PeerId, offer: Offer) -> None:
        tokens = min(offer.tokens, self._allowed.get(peer, 0))
        try:
            async with self._gate:
                if now is not self._now or now.is_closed:
                    return
                payload = await self._rounds.parts.whole(peer, offer.payload)
                if now is self._now and not now.is_closed and self._may_claim(now, tokens):
                    now.claims[peer] = tokens
                    stake = Stake(peer=peer, tokens=Tokens(tokens), samples=0)
                    await self._compute.serve(lambda: now.add(stake, offer.payload, payload, self._rounds.parts))
        except (PayloadError, DeadlineExceeded) as error:
            self._emit(PayloadRejected(round=now.base.round, member=peer, reason=str(error)))
        except PeerError:
            now.offers.pop(peer, None)  # said again, it is fetched again
            return
        self._note_brought(now, peer)

    def _may_claim(self, now: Collection, tokens: int) -> bool:
        """Return whether others will believe so many tokens of leaves more: else the leaf brings them to the next.

        Who comes from an aggregator that was just left brings what nobody knows to be missing until a round is decided.
        """
        return 0 < tokens <= self._rounds.inbox.allowance() - sum(now.claims.values()) - now.num_own

    async def _add_own(self, now: Collection, tokens: Tokens, parts: Sequence[EncodedPart]) -> None:
        me, payload = self._node.peer, tuple(part.encoded for part in parts)
        try:
            stake = Stake(peer=me, tokens=tokens, samples=0)
            await self._compute.serve(lambda: now.add(stake, Digest(""), payload, self._rounds.parts))
        except PayloadError as error:  # another codec since it was encoded: it waits for the next round
            self._emit(PayloadRejected(round=now.base.round, member=me, reason=str(error)))
        self._call_later(deadline_s(self._halves_s), self._begin_grace, now)
        self._note_brought(now, me)

    def _note_brought(self, now: Collection, peer: PeerId) -> None:
        now.note_brought(peer, self._clock.now(), is_own=peer == self._node.peer)
        self._check(now)

    def _check(self, now: Collection) -> None:
        """Bring the mean, if it is time to."""
        if now is not self._now or now.is_closed:
            return
        expected = now.expected & {self._node.peer, *self.leaves}
        if now.is_half_there(expected, self._clock.now()):
            self._begin_grace(now)
        statuses = self._rounds.quorum.statuses
        away = {peer for peer in expected if statuses.get(peer) in ("gone", "suspected")} | now.passing
        under_way = now.offers.keys() - now.brought  # not long any more
        if now.own_at is not None and may_close(expected | under_way, now.brought, away, now.is_grace_over):
            self._tasks.spawn(self._close(now))

    def notice(self, peer: PeerId, is_away: bool) -> None:
        """Take up what membership says of a peer."""
        if is_away and self._rounds.quorum.statuses.get(peer) == "gone":
            self._forget(peer)
        self._check(self._now)

    def _begin_grace(self, now: Collection) -> None:
        if now is not self._now or not now.begin_grace():
            return
        grace_s = deadline_s(self._graces_s)
        self._call_later(grace_s / 2, self._hurry, now)
        self._call_later(grace_s, self._end_grace, now)

    def _call_later(self, delay_s: float, act: Callable[[Collection], None], now: Collection) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(delay_s, act, now))

    def _hurry(self, now: Collection) -> None:
        for leaf in sorted(now.expected & self.leaves.keys() - now.offers.keys()):
            self._node.post(leaf, messages.Hurry(branch=now.base.branch, round=now.base.round))

    def _end_grace(self, now: Collection) -> None:
        now.end_grace()
        self._check(now)

    async def _close(self, now: Collection) -> None:
        if now.is_closed:
            return
        finish = lambda: now.finish(self._node.peer, self._rounds.parts)  # noqa: E731
        parts, tokens = await self._compute.serve(finish), sum(stake.tokens for stake in now.stakes)
        if tokens and now is self._now and now.base is self._rounds.chain.base and self._rounds.is_member:
            record = self._record(now)
            self._records.keep(record)
            self._rounds.announce(Tokens(tokens), parts, group=record)

    def _record(self, now: Collection) -> GroupRecord:
        """Return whom the mean counts, and what each peer of the group is to be leased next."""
        me, base = self._node.peer, now.base
        leaves = {peer: speed for peer, speed in self.leaves.items() if peer not in now.passing | self._silent.keys()}
        speeds = {**self._rounds.speeds, **{peer: speed for peer, speed in leaves.items() if speed > 0}}
        if (own := self._speed()) > 0:
            speeds[me] = own
        wanted = shares(base.charter, {*base.electorate, *leaves}, speeds)
        samples = {peer: wanted[peer] for peer in (me, *sorted(leaves))}
        stakes = [Stake(peer=each.peer, tokens=each.tokens, samples=samples.pop(each.peer, 0)) for each in now.stakes]
        stakes += [Stake(peer=peer, tokens=Tokens(0), samples=num) for peer, num in samples.items()]
        return record_of(base, me, stakes[:MAX_GROUP], now.payloads)

    # --- a round is decided ---

    def _decided(self, certificate: Certificate) -> None:
        """Take up a decision, and tell the leaves of it. Who of them is an elector from now on is no leaf any more."""
        manifest, me = certificate.manifest, self._node.peer
        now = self._now
        if now.half_at is not None:
            self._graces_s = [*self._graces_s, max(0.0, now.last_at - now.half_at)][-NUM_REMEMBERED:]
            if now.own_at is not None:
                self._halves_s = [*self._halves_s, max(0.0, now.half_at - now.own_at)][-NUM_REMEMBERED:]
        self._note_silence(now)
        claim = claims_in(manifest).get(me)
        record = None if claim is None else self._records.known(claim.record)
        if self.leaves:
            self._tasks.spawn(self._broadcast.tell(certificate, self._in_order()))
        if record is not None:
            self._allow(manifest, record)
        for peer in self.leaves.keys() & manifest.members:
            self._forget(peer)
        if me not in manifest.members:
            self.release()

    def _note_silence(self, now: Collection) -> None:
        """Give no work to leaves that brought nothing of theirs, until they do; they may have another aggregator."""
        for peer in sorted(now.expected & self.leaves.keys()):
            if peer in now.offers or peer in now.passing:
                self._silent.pop(peer, None)
            else:
                self._silent.setdefault(peer, 0)
        for peer in list(self._silent):
            self._silent[peer] += 1
            if self._silent[peer] >= MAX_SILENT:
                self._forget(peer)

    def _forget(self, peer: PeerId) -> None:
        for known in (self.leaves, self._allowed, self._silent):
            known.pop(peer, None)

    def _allow(self, manifest: Manifest, record: GroupRecord) -> None:
        charter = self._rounds.chain.charter
        num = sum(lease.num_windows for lease in manifest.leases if lease.peer == self._node.peer)
        cut = slices(num, record, charter)
        for leaf in self.leaves:
            if tokens_of(record, leaf):
                self._allowed[leaf] = 0
            self._allowed[leaf] = self._allowed.get(leaf, 0) + len(cut.get(leaf, ())) * charter.settings.seq_len

    def _in_order(self) -> tuple[PeerId, ...]:
        """Return the leaves, those last that nobody should have to wait for: the silent, the suspected and the slow."""
        rates, statuses = self._rounds.parts.rates.known(), self._rounds.quorum.statuses
        measured = [rates[peer] for peer in self.leaves if peer in rates]
        least = median(measured) / SLOW if measured else 0.0

        def is_last(peer: PeerId) -> bool:
            is_away = peer in self._silent or statuses.get(peer) in ("gone", "suspected")
            return is_away or rates.get(peer, least) < least

        return tuple(sorted(self.leaves, key=is_last))


Turn = RoundDriver | Leaf  # where this peer announces


class Groups:
    """How this peer takes part: as an elector, or as a leaf.

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
