"""Who is known and on what evidence: presences, accusations and goodbyes of a large swarm, as pure functions.

    members, effects = believe(members, claim, sender, now)

    (unknown) ──Lives──► ALIVE ──Accused, at its incarnation──► SUSPECTED ──timeout──► GONE
                           ▲                                        │                    │
                           └──── Lives, at a higher incarnation ────┴────────────────────┘
                           └──── Lives, of another instance ◄── LEFT ◄── Departed, from anywhere

A peer alone can say that it lives, under its signature, and raises its incarnation each time it has to; what names a
lower one is old. An accusation says that its author could not reach a peer. It holds against the incarnation that it
names and no other, so the accused refutes it by a higher one; who does not in time is gone. The more accuse, the
shorter the time (Dadgar, Phillips, Currey, "Lifeguard", 2018, section IV-B): one accuser may be the one who is cut off.
A goodbye is final for the process that said it. A process that starts again learns from others how far its predecessor
had counted, by what that had signed, and goes on above it. So the incarnation of a peer never falls, and nobody but the
peer raises it.

Presences expire when they are not renewed: time is measured by the receiver since it first saw that incarnation.

Signatures have been checked before a claim comes here.

Those present stand in buckets as well, by which two members compare what they know: going through a thousand peers with
each claim would cost a swarm that grows the square of its size. A bucket holds the peers whose keys begin alike. Its
sum covers them with their incarnations; equal sums are taken for equal buckets. Whoever makes keys whose sums cancel
hides those keys, and nobody else's. So what two members know differently is found with few bytes (anti-entropy):

    one side                      the other
      sums of its buckets ─────────►
      ◄─────────── what it lacks altogether; lists of the buckets that differ
      what is newer here, and its own lists of those ─────────►
      ◄─────────── what is newer there
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from weft.ids import PeerId, short
from weft.net.membership.full_mesh import (
    FORGET_S,
    Change,
    Forgotten,
    Full,
    Gone,
    Left,
    New,
    Recovered,
    Status,
    Suspected,
)
from weft.net.messages import MAX_LISTED, NUM_BUCKETS, Listed

MAX_KNOWN = 2048  # peers; one too many waits until somebody is gone
MAX_DEPARTED = 4096  # goodbyes remembered, so that older news of the same processes is not believed
MAX_INCARNATION = 1 << 53
NUM_ACCUSERS = 3  # remembered and passed on; more prove nothing new
MOST_SUSPICION_S = 12.0  # with one accuser
LEAST_SUSPICION_S = 6.0  # with three: an accusation and its refutation each pass some five links
LATE_S = 1.0  # what comes so soon after an accusation may have been under way before it
RENEW_S = 6 * 3600.0  # each renewal passes every link: with 1,000 peers that is some 100 B/s of each
EXPIRES_S = 24 * 3600.0
_MASK = (1 << 64) - 1


class Bucket(msgspec.Struct, frozen=True):
    """Never changed in place."""

    peers: dict[PeerId, None] = {}
    sum: int = 0  # of their summands, modulo 2^64


Buckets = tuple[Bucket, ...]
EMPTY: Buckets = (Bucket(),) * NUM_BUCKETS

Proof = Any  # the signed record behind a claim, for others; nothing here looks into it


class Lives(msgspec.Struct, frozen=True):
    peer: PeerId
    instance: bytes
    incarnation: int
    proof: Proof


class Accused(msgspec.Struct, frozen=True):
    peer: PeerId
    instance: bytes
    incarnation: int
    accuser: PeerId
    proof: Proof


class Departed(msgspec.Struct, frozen=True):
    peer: PeerId
    instance: bytes
    proof: Proof


Claim = Lives | Accused | Departed


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What is believed of one peer."""

    status: Status
    since: float  # when it got that status
    life: Lives
    told_at: float  # when that incarnation was first seen
    against: tuple[Accused, ...] = ()  # of that incarnation
    goodbye: Departed | None = None


class Members(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing in it is ever changed in place."""

    me: PeerId
    instance: bytes
    incarnation: int = 0  # of this process
    own: Lives | None = None  # what it last signed
    entries: dict[PeerId, Entry] = {}
    suspected: dict[PeerId, None] = {}  # those of that status: few, and looked at often
    buried: dict[PeerId, None] = {}  # gone or left
    departed: dict[PeerId, bytes] = {}  # instances that said goodbye
    buckets: Buckets = EMPTY  # the others that are present

    @property
    def num_present(self) -> int:
        """Return how many are alive or suspected, this peer included."""
        return 1 + len(self.entries) - len(self.buried)


# --- effects ---


class Spread(msgspec.Struct, frozen=True):
    """Pass a claim on: it was news here."""

    claim: Claim
    is_urgent: bool = True  # that somebody is there, or still is, is not: whoever missed it learns by comparing


class Renew(msgspec.Struct, frozen=True):
    """Sign that this peer lives, at `incarnation`, and spread it."""

    incarnation: int
    is_refutation: bool = False


class Correct(msgspec.Struct, frozen=True):
    """Show `peer` what it is known by here: its own claim is older."""

    peer: PeerId
    claim: Claim


Effect = Spread | Renew | Correct | Change | Forgotten | Full


def believe(members: Members, claim: Claim, sender: PeerId | None, now: float) -> tuple[Members, tuple[Effect, ...]]:
    """Take up a claim whose signature holds; return what is believed then and what is to be done.

    Args:
        sender: who passed it on; None: this process itself.
    """
    if claim.peer == members.me:
        return _of_myself(members, claim)
    match claim:
        case Lives():
            return _lives(members, claim, sender, now)
        case Accused():
            return _accused(members, claim, now)
        case Departed():
            return _departed(members, claim, now)


def recover(members: Members, peer: PeerId, at: float, now: float) -> tuple[Members, tuple[Effect, ...]]:
    """Take up that a byte of `peer` came at `at`: whoever hears a suspect does not suspect it, unless told again."""
    entry = members.entries.get(peer)
    if entry is None or entry.status != "suspected" or at < entry.since + LATE_S:
        return members, ()
    alive = msgspec.structs.replace(entry, status="alive", since=now, against=())
    return put(members, peer, alive), (Recovered(peer),)


def bury(members: Members, now: float) -> tuple[Members, tuple[Effect, ...]]:
    """Give up those who have not refuted in time."""
    effects: list[Effect] = []
    for peer in list(members.suspected):
        entry = members.entries[peer]
        if now - entry.since >= suspicion_s(len(entry.against)):
            members = put(members, peer, msgspec.structs.replace(entry, status="gone", since=now))
            effects.append(Gone(peer, now - entry.since))
    return members, tuple(effects)


def sweep(members: Members, now: float) -> tuple[Members, tuple[Effect, ...]]:
    """Forget those long gone, and presences that nobody renews."""
    effects: list[Effect] = []
    for peer in members.buried:
        if now - members.entries[peer].since >= FORGET_S:
            members = _without(members, peer)
            effects.append(Forgotten(peer))
    for peer in [peer for peer, entry in members.entries.items() if now - entry.told_at >= EXPIRES_S]:
        is_present = peer not in members.buried
        members = _without(members, peer)
        effects += [*((Gone(peer, EXPIRES_S),) if is_present else ()), Forgotten(peer)]
    return members, tuple(effects)


def forgive(members: Members, stall_s: float, now: float) -> Members:
    """Return the members as if the time that this process stood still had not been."""
    for peer in members.suspected:
        entry = members.entries[peer]
        members = put(members, peer, msgspec.structs.replace(entry, since=min(now, entry.since + stall_s)))
    return members


def suspicion_s(num_accusers: int) -> float:
    """Return how long an accused peer has time to refute."""
    # max(Min, Max - (Max - Min) * log(C + 1) / log(K + 1)), C further accusers of at most K
    further = max(num_accusers, 1) - 1
    share = math.log(further + 1) / math.log(NUM_ACCUSERS)
    return max(LEAST_SUSPICION_S, MOST_SUSPICION_S - (MOST_SUSPICION_S - LEAST_SUSPICION_S) * share)


def proofs(entry: Entry) -> tuple[Proof, ...]:
    """Return what shows others what is believed of a peer."""
    if entry.goodbye is not None:
        return (entry.life.proof, entry.goodbye.proof)
    return (entry.life.proof, *(accused.proof for accused in entry.against))


def put(members: Members, peer: PeerId, entry: Entry) -> Members:
    """Return the members with another belief about `peer`."""
    suspected, buried = members.suspected, members.buried
    if (entry.status == "suspected") != (peer in suspected):
        suspected = _flip(suspected, peer)
    if (entry.status in ("gone", "left")) != (peer in buried):
        buried = _flip(buried, peer)
    buckets = moved(members.buckets, peer, _presence(members.entries.get(peer)), _presence(entry))
    entries = {**members.entries, peer: entry}
    return msgspec.structs.replace(members, entries=entries, suspected=suspected, buried=buried, buckets=buckets)


# --- claims ---


def _of_myself(members: Members, claim: Claim) -> tuple[Members, tuple[Effect, ...]]:
    """Raise this peer's incarnation above what is said of it, or of the process that had its key before."""
    if isinstance(claim, Departed):  # of an earlier process, which is not this one's business
        return members, ()
    is_known = isinstance(claim, Lives) and claim.instance == members.instance
    is_old = claim.incarnation < members.incarnation or (
        isinstance(claim, Accused) and claim.instance != members.instance
    )
    if is_known or is_old or claim.incarnation >= MAX_INCARNATION:
        return members, ()
    if isinstance(claim, Accused) and claim.incarnation > members.incarnation:
        return members, ()  # nobody can have seen that
    raised = msgspec.structs.replace(members, incarnation=claim.incarnation + 1)
    return raised, (Renew(raised.incarnation, is_refutation=isinstance(claim, Accused)),)


def _lives(members: Members, claim: Lives, sender: PeerId | None, now: float) -> tuple[Members, tuple[Effect, ...]]:
    peer, known = claim.peer, members.entries.get(claim.peer)
    if members.departed.get(peer) == claim.instance:
        return members, ()
    if known is not None and claim.incarnation <= known.life.incarnation:
        is_outdated = sender == peer and claim.instance != known.life.instance
        return members, (Correct(peer, known.life),) if is_outdated else ()
    effects: list[Effect] = []
    if known is None and len(members.entries) >= MAX_KNOWN:
        if not members.buried:
            return members, (Full(peer),)
        longest = min(members.buried, key=lambda buried: (members.entries[buried].since, buried))
        members = _without(members, longest)
        effects.append(Forgotten(longest))
    if known is None or known.status == "left":
        effects.append(New(peer))
    elif known.status != "alive":
        effects.append(Recovered(peer))
    is_as_before = known is not None and known.status == "alive"
    since = known.since if known is not None and is_as_before else now
    entry = Entry(status="alive", since=since, life=claim, told_at=now)
    return put(members, peer, entry), (*effects, Spread(claim, is_urgent=known is not None and not is_as_before))


def _accused(members: Members, claim: Accused, now: float) -> tuple[Members, tuple[Effect, ...]]:
    peer, known, is_mine = claim.peer, members.entries.get(claim.peer), claim.accuser == members.me
    if known is None or known.status not in ("alive", "suspected"):
        return members, ()
    if (claim.instance, claim.incarnation) != (known.life.instance, known.life.incarnation):
        return members, ()
    if claim.accuser in (each.accuser for each in known.against) or len(known.against) >= NUM_ACCUSERS:
        return members, ()
    against = (*known.against, claim)
    if known.status == "suspected":
        return put(members, peer, msgspec.structs.replace(known, against=against)), (Spread(claim),)
    suspected = msgspec.structs.replace(known, status="suspected", since=now, against=against)
    reason = "it answers neither this peer nor others" if is_mine else f"{short(claim.accuser)} cannot reach it"
    return put(members, peer, suspected), (Suspected(peer, 0.0, reason), Spread(claim))


def _departed(members: Members, claim: Departed, now: float) -> tuple[Members, tuple[Effect, ...]]:
    peer, known = claim.peer, members.entries.get(claim.peer)
    has_left = known is not None and known.status == "left" and known.life.instance == claim.instance
    if has_left or members.departed.get(peer) == claim.instance:
        return members, ()
    departed = {other: instance for other, instance in members.departed.items() if other != peer}
    while len(departed) >= MAX_DEPARTED:
        del departed[next(iter(departed))]
    members = msgspec.structs.replace(members, departed={**departed, peer: claim.instance})
    if known is None or known.life.instance != claim.instance:
        return members, ()
    left = Entry(status="left", since=now, life=known.life, told_at=known.told_at, goodbye=claim)
    return put(members, peer, left), (Left(peer), Spread(claim))


def _without(members: Members, peer: PeerId) -> Members:
    return msgspec.structs.replace(
        members,
        entries={other: entry for other, entry in members.entries.items() if other != peer},
        suspected={other: None for other in members.suspected if other != peer},
        buried={other: None for other in members.buried if other != peer},
        buckets=moved(members.buckets, peer, _presence(members.entries[peer]), None),
    )


def _presence(entry: Entry | None) -> int | None:
    """Return at which incarnation a peer is present; None: it is not."""
    return entry.life.incarnation if entry is not None and entry.status in ("alive", "suspected") else None


def _flip(index: dict[PeerId, None], peer: PeerId) -> dict[PeerId, None]:
    if peer in index:
        return {other: None for other in index if other != peer}
    return {**index, peer: None}


# --- buckets ---


def bucket(peer: PeerId) -> int:
    return int(peer[:2], 16) % NUM_BUCKETS


def moved(buckets: Buckets, peer: PeerId, before: int | None, after: int | None) -> Buckets:
    """Return the buckets as `peer` goes over from one incarnation to another; None: it is not present."""
    if before == after:
        return buckets
    place = bucket(peer)
    known = buckets[place]
    peers = known.peers
    if before is None:
        peers = {**peers, peer: None}
    elif after is None:
        peers = {other: None for other in peers if other != peer}
    total = added(added(known.sum, peer, after), peer, before, sign=-1)
    return (*buckets[:place], Bucket(peers, total), *buckets[place + 1 :])


def added(total: int, peer: PeerId, incarnation: int | None, sign: int = 1) -> int:
    """Return `total` and what `peer` adds to its bucket's sum."""
    return total if incarnation is None else (total + sign * _mixed(int(peer[2:18], 16), incarnation)) & _MASK


def _mixed(peer: int, incarnation: int) -> int:
    word = (peer + incarnation * 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 & _MASK
    return (word ^ word >> 29) * 0x94D049BB133111EB & _MASK


MAX_GIVEN = 256  # claims in answer to one comparison: a newcomer asks again a second later, and somebody else


def sums(members: Members) -> bytes:
    """Return the sums of the buckets here."""
    totals = [each.sum for each in members.buckets]
    if members.own is not None:
        place = bucket(members.me)
        totals[place] = added(totals[place], members.me, members.own.incarnation)
    return b"".join(total.to_bytes(8, "big") for total in totals)


def differing(members: Members, theirs: bytes) -> tuple[list[int], list[int]]:
    """Return the buckets that the other side has nothing in, and the others that differ."""
    mine = sums(members)
    empty: list[int] = []
    others: list[int] = []
    for index in range(NUM_BUCKETS):
        here, there = mine[8 * index : 8 * index + 8], theirs[8 * index : 8 * index + 8]
        if here != there:
            (others if any(there) else empty).append(index)
    return empty, others


def listing(members: Members, buckets: Iterable[int]) -> tuple[tuple[int, ...], tuple[Listed, ...]]:
    """Return as many of `buckets` as fit into one message, and who is present in them."""
    chosen: list[int] = []
    listed: list[Listed] = []
    for index in buckets:
        here = [Listed(peer=life.peer, incarnation=life.incarnation) for life, _ in _present(members, index)]
        if len(listed) + len(here) > MAX_LISTED:
            break
        chosen.append(index)
        listed += here
    return tuple(chosen), tuple(listed)


def everything(members: Members, buckets: Iterable[int]) -> list[Proof]:
    """Return what to tell somebody who knows nobody in `buckets`."""
    return [proof for index in buckets for each in _present(members, index) for proof in _proofs(*each)][:MAX_GIVEN]


def newer(members: Members, buckets: Iterable[int], listed: Iterable[Listed]) -> list[Proof]:
    """Return what is newer here than what somebody lists: later presences, and why those it lists are not present."""
    theirs = {each.peer: each.incarnation for each in listed}
    found: list[Proof] = []
    for index in buckets:
        for life, against in _present(members, index):
            if theirs.get(life.peer, -1) < life.incarnation:
                found += _proofs(life, against)
    for peer, incarnation in theirs.items():
        if peer in members.buried and members.entries[peer].life.incarnation >= incarnation:
            found += proofs(members.entries[peer])
    return found[:MAX_GIVEN]


def is_behind(members: Members, listed: Iterable[Listed]) -> bool:
    """Return whether somebody lists what is newer than what is known here."""
    for each in listed:
        entry = members.entries.get(each.peer)
        if each.peer != members.me and (entry is None or entry.life.incarnation < each.incarnation):
            return True
    return False


def _present(members: Members, index: int) -> Iterator[tuple[Lives, tuple[Accused, ...]]]:
    """Yield who of a bucket is alive or suspected, this peer included, and what is said against each."""
    if members.own is not None and bucket(members.me) == index:
        yield members.own, ()
    for peer in members.buckets[index].peers:
        yield members.entries[peer].life, members.entries[peer].against


def _proofs(life: Lives, against: tuple[Accused, ...]) -> list[Proof]:
    return [life.proof, *(accused.proof for accused in against)]
