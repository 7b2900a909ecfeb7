"""Who is alive, among hundreds of members with few links each: SWIM's decisions, without effects.

    step(state, input, now) -> (state, outputs)

    every second      ping one of the peers to which a link is kept, each once in a shuffled lap
    1.5 s no byte     ask three others to reach it
    2 s no byte       accuse it: suspected here, and the accusation goes round
    6 to 12 s         and no refutation: gone, here; everybody decides that by its own clock, on what it was told
    a link is reset   redialled at once; where that fails, others are asked at once

Any byte is an answer: whoever is heard is not pinged again. A claim goes round as a broadcast, with each ping, each
answer, and by itself where nothing else is said. Members are compared with one partner every quarter of a minute
(anti-entropy), so what was lost on a broken link arrives all the same. Who finds itself accused refutes
(net/membership/members.py).

A peer that stands still, or misses answers, is less sure of itself: `strain` makes it wait longer and ping less (local
health, Dadgar, Phillips, Currey, "Lifeguard", 2018, section IV-A). After an own stall nobody is judged for a while.

Where all links are kept (`is_active` false) nobody is pinged and net/membership/full_mesh.py says who is alive; claims
are believed, refuted, and passed on to those who keep few links.

After Das, Gupta, Motivala, "SWIM: Scalable Weakly-consistent Infection-style Process Group Membership Protocol", 2002.
There, whom to ping is drawn among all members; here among those linked, since a ping over a new connection costs more
than all the rest. Which links a peer keeps, it decides alone:

    up to 32 peers     all links: everybody watches everybody
    more               4 on a ring: two successors and two predecessors in the order of the peers' hashes
                       4 far ones: chosen by a hash with this process's own secret, so that nobody can make a key that
                       is chosen; as many others, in the mean, choose this peer

The ring alone connects all peers, and gives each the same four watchers wherever all know the same peers: when some of
them die, the next ones take their place. The far links make all paths short: with 1,000 peers a peer keeps about twelve
links, and what it says reaches everybody in about four steps. A newcomer displaces a far link with probability 3 / n,
and ring links of its four neighbours only.

Which of both regimes a peer is in, it decides by the number of peers it knows, with hysteresis, and follows those it is
linked to: so two peers differ for seconds, not for good.
"""

import heapq
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, assert_never

import msgspec
from blake3 import blake3

from weft.ids import PeerId
from weft.net.membership import broadcasts, full_mesh
from weft.net.membership import members as rolls
from weft.net.membership.members import Accused, Claim, Correct, Departed, Effect, Lives, Members, Proof, Renew, Spread
from weft.net.messages import MAX_NEWS


class Tie(msgspec.Struct, frozen=True):
    """How the other side of a link uses it."""

    watches_all: bool
    is_kept: bool


class Probe(msgspec.Struct, frozen=True):
    sent_at: float
    asked_at: float | None = None


class IndirectProbe(msgspec.Struct, frozen=True):
    """To reach a peer for others."""

    since: float
    askers: tuple[PeerId, ...]


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing in it is ever changed in place."""

    members: Members
    secret: bytes  # 32 bytes that nobody else knows
    is_active: bool = False
    log: broadcasts.Log = broadcasts.Log()
    links: dict[PeerId, Tie | None] = {}  # None: it has not said yet
    kept: tuple[PeerId, ...] = ()  # of few links
    probes: dict[PeerId, Probe] = {}
    indirect: dict[PeerId, IndirectProbe] = {}
    lap: tuple[PeerId, ...] = ()  # still to be pinged
    num_laps: int = 0
    strain: int = 0
    num_news: int = 0  # since members were last compared
    is_unlinked: bool = True  # the links have to be chosen among all present: one of those kept is there no more
    come: tuple[PeerId, ...] = ()  # since the links were chosen
    probe_at: float = 0.0
    spread_at: float = 0.0
    compare_at: float = 0.0
    relink_at: float = 0.0
    revive_at: float = 30.0
    sweep_at: float = 0.0
    renew_at: float = rolls.RENEW_S
    ticked_at: float | None = None
    judges_from: float = 0.0


# --- inputs, besides Tick, Heard, LinkLost and RedialFailed ---


class Linked(msgspec.Struct, frozen=True):
    peer: PeerId


class Tied(msgspec.Struct, frozen=True):
    peer: PeerId
    tie: Tie


class Told(msgspec.Struct, frozen=True):
    """Claims whose signatures hold came from `sender`, or from this process itself (None)."""

    sender: PeerId | None
    claims: tuple[Claim, ...]
    is_compared: bool = False  # found by anti-entropy: to the others it is no news


class Pinged(msgspec.Struct, frozen=True):
    peer: PeerId


class HelpAsked(msgspec.Struct, frozen=True):
    """`peer` asks whether `target` can be reached."""

    peer: PeerId
    target: PeerId


class Helped(msgspec.Struct, frozen=True):
    """`peer` has heard `target` since it was asked."""

    peer: PeerId
    target: PeerId


class Silent(msgspec.Struct, frozen=True):
    """Whoever watches all has not heard `peer` for too long."""

    peer: PeerId


class Watch(msgspec.Struct, frozen=True):
    """From now on few links are kept, or all. `present`: who is alive or suspected so far; `gone`: who is gone."""

    is_active: bool
    present: frozenset[PeerId] = frozenset()
    gone: frozenset[PeerId] = frozenset()


Shared = full_mesh.Tick | full_mesh.Heard | full_mesh.LinkLost | full_mesh.RedialFailed  # inputs of both machines
Input = Shared | Linked | Tied | Told | Pinged | HelpAsked | Helped | Silent | Watch


# --- outputs, besides those about members ---


class Ping(msgspec.Struct, frozen=True):
    peer: PeerId
    news: tuple[Proof, ...]


class Answer(msgspec.Struct, frozen=True):
    """`peer` has pinged."""

    peer: PeerId
    news: tuple[Proof, ...]


class Tell(msgspec.Struct, frozen=True):
    peer: PeerId
    news: tuple[Proof, ...]


class AskHelp(msgspec.Struct, frozen=True):
    peer: PeerId
    target: PeerId


class Help(msgspec.Struct, frozen=True):
    """Tell `peer` that `target` was heard."""

    peer: PeerId
    target: PeerId


class SignLife(msgspec.Struct, frozen=True):
    """Sign that this process lives, and say so by `Told`."""

    incarnation: int


class SignAccusation(msgspec.Struct, frozen=True):
    life: Lives


class Compare(msgspec.Struct, frozen=True):
    peer: PeerId


class Revive(msgspec.Struct, frozen=True):
    """Try whether `peer`, which is gone, can be reached again; None: anybody who was known once and is forgotten."""

    peer: PeerId | None


class Keep(msgspec.Struct, frozen=True):
    peers: tuple[PeerId, ...]


Change = full_mesh.Change | full_mesh.Forgotten | full_mesh.Full
Message = Ping | Answer | Tell | AskHelp | Help | Compare  # to a peer
Output = Message | SignLife | SignAccusation | Revive | Keep | full_mesh.Stalled | full_mesh.Redial | Change
Outputs = tuple[Output, ...]


PERIOD_S = 1.0  # between two pings
PING_S = 1.5  # for an answer: twice 0.3 s of jitter, and a packet lost either way
HELP_S = 2.0  # for others to reach it
NUM_HELPERS = 3
MAX_STRAIN = 8  # as in the paper
SPREAD_S = 0.2  # between two broadcasts to one partner with nothing else to say: they travel together
COMPARE_S = 15.0
HUNGRY_S = 1.0  # between two comparisons while each brings many news: a newcomer learns hundreds of names
REVIVE_S = 30.0  # between two dials of somebody gone: a network that was cut in two grows together again
REVIVE_ALONE_S = 5.0  # where nobody is left
RELINK_S = 1.0  # between two choices of links
SWEEP_S = 10.0
MAX_INDIRECT = 64


def step(state: State, event: Input, now: float) -> tuple[State, Outputs]:
    """Return the state after `event` at `now` (seconds, never going back) and what is to be done."""
    match event:
        case full_mesh.Tick():
            return _tick(state, now)
        case full_mesh.Heard(peer=peer, at=at):
            return _hear(state, peer, at, now)
        case Told(sender=sender, claims=claims, is_compared=is_compared):
            return _told(state, sender, claims, is_compared, now)
        case Pinged(peer=peer):
            state, news = _news(state, peer)
            return state, (Answer(peer, news),)
        case Linked(peer=peer):
            return _linked(state, peer)
        case Tied(peer=peer, tie=tie):
            return _set(state, links={**state.links, peer: tie}) if peer in state.links else state, ()
        case full_mesh.LinkLost(peer=peer):
            return _link_lost(state, peer, now)
        case full_mesh.RedialFailed(peer=peer):
            return _redial_failed(state, peer, now)
        case HelpAsked(peer=peer, target=target):
            return _help_asked(state, peer, target, now)
        case Helped(target=target):
            return _hear(state, target, now, now)
        case Silent(peer=peer):
            return _accuse(state, peer, now)
        case Watch():
            return _watch(state, event, now)
        case _:
            assert_never(event)


def awaited(state: State) -> tuple[PeerId, ...]:
    """Return of whom the next tick wants to know when they were heard."""
    return (*state.probes, *(peer for peer in state.indirect if peer not in state.probes), *state.members.suspected)


def next_due(state: State, now: float) -> float:
    """Return when the next tick has something to do, at most `TICK_S` from the last."""
    due = [(now if state.ticked_at is None else state.ticked_at) + full_mesh.TICK_S]
    if state.is_active:
        due.append(state.probe_at)
        scale = 1 + state.strain
        for probe in state.probes.values():
            end = probe.sent_at + PING_S * scale if probe.asked_at is None else probe.asked_at + HELP_S * scale
            due.append(max(end, state.judges_from))
    if any(broadcasts.pending(state.log, peer) for peer in partners(state)):
        due.append(state.spread_at)
    return max(now, min(due))


def partners(state: State) -> list[PeerId]:
    """Return with whom broadcasts are shared: one of both keeps the link, and one of both keeps few."""
    found = []
    for peer, tie in state.links.items():
        if tie is None or (tie.watches_all and not state.is_active):
            continue
        if tie.is_kept or not state.is_active or peer in state.kept:
            found.append(peer)
    return found


# --- time ---


def _tick(state: State, now: float) -> tuple[State, Outputs]:
    outputs: list[Output] = []
    stall_s = full_mesh.own_stall(state.ticked_at, now)
    if stall_s:
        outputs.append(full_mesh.Stalled(stall_s))
        state = _set(
            state,
            members=rolls.forgive(state.members, stall_s, now),
            probes={},
            judges_from=now + min(stall_s, full_mesh.LISTEN_S),
            strain=min(MAX_STRAIN, state.strain + 1),
        )
    state = _set(state, ticked_at=now)
    parts = [_age, *((_judge, _probe, _relink, _compare, _revive) if state.is_active else ()), _spread]
    for part in parts:
        state, done = part(state, now)
        outputs.extend(done)
    return state, tuple(outputs)


def _age(state: State, now: float) -> tuple[State, Outputs]:
    """Bury whose time is up, forget the old, renew what this peer says of itself."""
    outputs: Outputs = ()
    if state.members.suspected and now >= state.judges_from:
        state, outputs = _carry_out(state, *rolls.bury(state.members, now), None, now)
    if now >= state.sweep_at:
        state, more = _carry_out(state, *rolls.sweep(state.members, now), None, now)
        indirect = {target: probing for target, probing in state.indirect.items() if now - probing.since < 4 * HELP_S}
        state = _set(state, log=broadcasts.prune(state.log, now), indirect=indirect, sweep_at=now + SWEEP_S)
        outputs += more
    if now >= state.renew_at:
        raised = msgspec.structs.replace(state.members, incarnation=state.members.incarnation + 1)
        state = _set(state, members=raised, renew_at=now + rolls.RENEW_S)
        outputs += (SignLife(raised.incarnation),)
    return state, outputs


def _judge(state: State, now: float) -> tuple[State, Outputs]:
    """Ask others where a ping was not answered, and accuse where they did not help."""
    outputs: Outputs = ()
    if now < state.judges_from:
        return state, ()
    scale = 1 + state.strain
    for peer, probe in state.probes.items():
        if peer not in state.members.entries or peer in state.members.buried:
            state = _set(state, probes=_less(state.probes, peer))
        elif probe.asked_at is None and now - probe.sent_at >= PING_S * scale:
            state, asked = _ask(state, peer, now)
            outputs += asked
        elif probe.asked_at is not None and now - probe.asked_at >= HELP_S * scale:
            strain = min(MAX_STRAIN, state.strain + 1)
            state = _set(state, probes=_less(state.probes, peer), strain=strain)
            state, accused = _accuse(state, peer, now)
            outputs += accused
    return state, outputs


def _probe(state: State, now: float) -> tuple[State, Outputs]:
    if now < state.probe_at:
        return state, ()
    state = _set(state, probe_at=now + PERIOD_S * (1 + state.strain))
    if not state.lap:
        key = blake3(state.num_laps.to_bytes(8, "big"), key=state.secret).digest()
        lap = tuple(sorted(state.kept, key=lambda peer: blake3(peer.encode(), key=key).digest(8)))
        state = _set(state, lap=lap, num_laps=state.num_laps + 1)
    while state.lap:
        peer = state.lap[0]
        state = _set(state, lap=state.lap[1:])
        if peer in state.kept and peer not in state.probes and peer not in state.members.buried:
            return _ping(state, peer, now)
    return state, ()


def _relink(state: State, now: float) -> tuple[State, Outputs]:
    if not (state.is_unlinked or state.come) or now < state.relink_at:
        return state, ()
    members = state.members
    others = members.entries if state.is_unlinked else dict.fromkeys((*state.kept, *state.come))  # `kept` says why
    present = [peer for peer in others if peer in members.entries and peer not in members.buried]
    chosen = kept(members.me, present, state.secret)
    state = _set(state, is_unlinked=False, come=(), relink_at=now + RELINK_S)
    if chosen == state.kept:
        return state, ()
    probes = {peer: probe for peer, probe in state.probes.items() if peer in chosen}
    return _set(state, kept=chosen, probes=probes), (Keep(chosen),)


def _compare(state: State, now: float) -> tuple[State, Outputs]:
    is_hungry = state.num_news >= MAX_NEWS
    if now < state.compare_at and not (is_hungry and now >= state.compare_at - COMPARE_S + HUNGRY_S):
        return state, ()
    linked = [peer for peer in state.kept if state.links.get(peer) is not None]
    if not linked:
        return state, ()
    return _set(state, compare_at=now + COMPARE_S, num_news=0), (Compare(linked[_draw(state, now) % len(linked)]),)


def _revive(state: State, now: float) -> tuple[State, Outputs]:
    """Dial somebody who is gone: its machine may have slept, or a network have been cut."""
    is_alone = not state.kept
    if now < state.revive_at and not (is_alone and now >= state.revive_at - REVIVE_S + REVIVE_ALONE_S):
        return state, ()
    gone = sorted(peer for peer in state.members.buried if state.members.entries[peer].status == "gone")
    chosen = gone[_draw(state, now) % len(gone)] if gone else None
    return _set(state, revive_at=now + REVIVE_S), (Revive(chosen),)


def _spread(state: State, now: float) -> tuple[State, Outputs]:
    if now < state.spread_at:
        return state, ()
    outputs: Outputs = ()
    circle = partners(state)
    turn = _draw(state, now) % max(1, len(circle))  # what is told to few is told to others each time
    for peer in circle[turn:] + circle[:turn]:
        if broadcasts.pending(state.log, peer):
            state, news = _news(state, peer)
            outputs += (Tell(peer, news),) if news else ()
    return (_set(state, spread_at=now + SPREAD_S) if outputs else state), outputs


# --- what happens ---


def _hear(state: State, peer: PeerId, at: float, now: float) -> tuple[State, Outputs]:
    outputs: Outputs = ()
    probe, probing = state.probes.get(peer), state.indirect.get(peer)
    if probe is not None and at >= probe.sent_at:
        state = _set(state, probes=_less(state.probes, peer), strain=max(0, state.strain - 1))
    if probing is not None and at >= probing.since:
        state = _set(state, indirect=_less(state.indirect, peer))
        outputs += tuple(Help(asker, peer) for asker in probing.askers)
    if peer in state.members.suspected:
        state, recovered = _carry_out(state, *rolls.recover(state.members, peer, at, now), None, now)
        outputs += recovered
    return state, outputs


def _told(
    state: State, sender: PeerId | None, claims: Iterable[Claim], is_compared: bool, now: float
) -> tuple[State, Outputs]:
    outputs: Outputs = ()
    num_news = 0
    effects: tuple[Effect, ...]
    for claim in claims:
        if sender is None and isinstance(claim, Lives) and claim.peer == state.members.me:  # it has just been signed
            members, effects = msgspec.structs.replace(state.members, own=claim), (Spread(claim),)
            aside = frozenset(state.links).difference(partners(state))  # who accused it may be among them
            outputs += tuple(Tell(peer, (claim.proof,)) for peer in state.links if peer in aside)
        else:
            members, effects = rolls.believe(state.members, claim, sender, now)
        if is_compared and sender is not None and isinstance(claim, Lives) and claim.peer in state.members.buried:
            outputs += _contest(state, sender, claim)
        if is_compared and claim.peer not in state.members.entries:
            effects = tuple(effect for effect in effects if not isinstance(effect, Spread))  # old news elsewhere
            num_news += 1
        state, done = _carry_out(state, members, effects, sender, now)
        outputs += done
        is_suspect = isinstance(claim, Accused) and claim.peer in state.members.suspected
        if is_suspect and state.is_active and claim.peer in state.kept and claim.peer not in state.probes:
            state, done = _ping(state, claim.peer, now)  # to hear it, or to accuse it as well
            outputs += done
    return _set(state, num_news=state.num_news + num_news), outputs


def _contest(state: State, sender: PeerId, claim: Lives) -> Outputs:
    """Show who believes a peer alive why it is gone here: if it lives, it hears of that and refutes."""
    entry = state.members.entries[claim.peer]
    return (Tell(sender, rolls.proofs(entry)),) if claim.incarnation <= entry.life.incarnation else ()


def _linked(state: State, peer: PeerId) -> tuple[State, Outputs]:
    links = {**state.links, peer: None}
    state = _set(state, links=links, log=broadcasts.meet(state.log, peer))
    entry = state.members.entries.get(peer)
    is_accused = entry is not None and entry.against and entry.status in ("suspected", "gone")
    return state, (Tell(peer, rolls.proofs(entry)),) if entry is not None and is_accused else ()


def _link_lost(state: State, peer: PeerId, now: float) -> tuple[State, Outputs]:
    state = _set(state, links=_less(state.links, peer), log=broadcasts.leave(state.log, peer))
    entry = state.members.entries.get(peer)
    is_watched = state.is_active and peer in state.kept and entry is not None and entry.status in ("alive", "suspected")
    if not is_watched:
        return state, ()
    probes = {**state.probes, peer: state.probes.get(peer, Probe(now))}
    return _set(state, probes=probes), (full_mesh.Redial(peer),)


def _redial_failed(state: State, peer: PeerId, now: float) -> tuple[State, Outputs]:
    probe = state.probes.get(peer)
    if probe is None or probe.asked_at is not None or now < state.judges_from:
        return state, ()
    return _ask(state, peer, now)


def _help_asked(state: State, asker: PeerId, target: PeerId, now: float) -> tuple[State, Outputs]:
    probing = state.indirect.get(target, IndirectProbe(now, ()))
    if target not in state.members.entries or (target not in state.indirect and len(state.indirect) >= MAX_INDIRECT):
        return state, ()
    askers = tuple(dict.fromkeys((*probing.askers, asker)))[-NUM_HELPERS * 4 :]
    state = _set(state, indirect={**state.indirect, target: IndirectProbe(probing.since, askers)})
    if target in state.links:
        state, news = _news(state, target)
        return state, (Ping(target, news),)
    return state, (full_mesh.Redial(target),)


def _watch(state: State, event: Watch, now: float) -> tuple[State, Outputs]:
    members = state.members
    for peer, entry in members.entries.items():
        if peer in event.present and entry.status in ("suspected", "gone"):
            members = rolls.put(members, peer, msgspec.structs.replace(entry, status="alive", since=now, against=()))
        elif peer in event.gone and entry.status in ("alive", "suspected"):
            members = rolls.put(members, peer, msgspec.structs.replace(entry, status="gone", since=now))
    fresh = _set(
        state, members=members, is_active=event.is_active, kept=(), probes={}, lap=(), is_unlinked=True, come=()
    )
    return _set(fresh, relink_at=now, probe_at=now + PERIOD_S, compare_at=now + HUNGRY_S), ()


# --- small things ---


def _ping(state: State, peer: PeerId, now: float) -> tuple[State, Outputs]:
    state = _set(state, probes={**state.probes, peer: Probe(now)})
    if peer not in state.links:
        return state, (full_mesh.Redial(peer),)
    state, news = _news(state, peer)
    return state, (Ping(peer, news),)


def _ask(state: State, peer: PeerId, now: float) -> tuple[State, Outputs]:
    """Ask some partners, others each time, to reach `peer`."""
    state = _set(state, probes={**state.probes, peer: Probe(state.probes[peer].sent_at, now)})
    key = blake3(str(now).encode(), key=state.secret).digest()
    others = [other for other in partners(state) if other != peer]
    chosen = sorted(others, key=lambda other: blake3(other.encode(), key=key).digest(8))[:NUM_HELPERS]
    return state, tuple(AskHelp(helper, peer) for helper in chosen)


def _accuse(state: State, peer: PeerId, now: float) -> tuple[State, Outputs]:
    entry = state.members.entries.get(peer)
    if entry is None or entry.status not in ("alive", "suspected") or now < state.judges_from:
        return state, ()
    if any(accused.accuser == state.members.me for accused in entry.against):
        return state, ()
    return state, (SignAccusation(entry.life),)


def _carry_out(
    state: State, members: Members, effects: tuple[Effect, ...], sender: PeerId | None, now: float
) -> tuple[State, Outputs]:
    outputs: Outputs = ()
    log, num_news, strain = state.log, state.num_news, state.strain
    is_unlinked, come = state.is_unlinked, state.come
    for effect in effects:
        match effect:
            case Spread(claim=claim, is_urgent=is_urgent):
                log = broadcasts.add(log, _about(claim), claim.proof, sender, now, is_urgent=is_urgent)
                num_news += 1
            case Renew(incarnation=incarnation, is_refutation=is_refutation):
                strain = min(MAX_STRAIN, strain + is_refutation)
                outputs += (SignLife(incarnation),)
            case Correct(peer=peer, claim=claim):
                outputs += (Tell(peer, (claim.proof,)),)
            case _:
                is_unlinked = is_unlinked or (
                    isinstance(effect, full_mesh.Gone | full_mesh.Left) and effect.peer in state.kept
                )
                if isinstance(effect, full_mesh.New | full_mesh.Recovered) and not is_unlinked:
                    come += (effect.peer,)
                outputs += (effect,)
    state = _set(state, members=members, log=log, num_news=num_news, strain=strain, is_unlinked=is_unlinked, come=come)
    return state, outputs


def _about(claim: Claim) -> broadcasts.Key:
    match claim:
        case Lives(peer=peer):
            return ("life", peer)
        case Accused(peer=peer, accuser=accuser):
            return ("accusation", peer, accuser)
        case Departed(peer=peer):
            return ("goodbye", peer)


def _news(state: State, partner: PeerId) -> tuple[State, tuple[Proof, ...]]:
    log, news = broadcasts.take(state.log, partner, MAX_NEWS, state.members.num_present)
    return _set(state, log=log), news


def _draw(state: State, now: float) -> int:
    """Return a number that nobody else can foresee, the same in each replay."""
    return int.from_bytes(blake3(str(now).encode(), key=state.secret).digest(8), "big")


def _less(table: dict[PeerId, Any], peer: PeerId) -> dict[PeerId, Any]:
    return {other: value for other, value in table.items() if other != peer}


_set = msgspec.structs.replace


MAX_ALL = 32  # peers, this one included: 31 x 31 heartbeats every 2 s; with more the links are bounded
MIN_BOUNDED = 24  # fewer than that, and it is all links again
SETTLE_S = 30.0  # a newcomer learns whom there is, and a dip in numbers passes

NUM_RING = 2  # to either side
NUM_FAR = 4

_RING = "weft 2026 ring v1"


def kept(me: PeerId, others: Iterable[PeerId], secret: bytes) -> tuple[PeerId, ...]:
    """Return whom to keep links to among `others`, in ascending order.

    Each is chosen as one of the first in some order of them all. So as others come it is enough to choose among those
    kept and those that came; as one that was not kept goes, nothing changes.

    Args:
        secret: 32 bytes that nobody else knows.
    """
    crowd = [peer for peer in others if peer != me]
    here = _place(me)
    ring = sorted(crowd, key=lambda peer: (_place(peer) - here) % (1 << 64))
    near = [*ring[:NUM_RING], *ring[-NUM_RING:]]
    far = heapq.nsmallest(NUM_FAR, crowd, key=lambda peer: blake3(peer.encode(), key=secret).digest(8))
    return tuple(sorted({*near, *far}))


def watches_all(is_all: bool, num_known: int, settled_s: float, is_told_bounded: bool) -> bool:
    """Return whether to keep all links from now on.

    Args:
        is_all: whether they are kept so far.
        num_known: peers alive or suspected, this one included.
        settled_s: since when this process runs, and knows so few or many; the lesser of both.
        is_told_bounded: whether somebody linked keeps few links.
    """
    if not is_all:
        return num_known < MIN_BOUNDED and settled_s >= SETTLE_S
    follows = is_told_bounded and (num_known >= MIN_BOUNDED or settled_s < SETTLE_S)
    return num_known <= MAX_ALL and not follows


@lru_cache(maxsize=4096)  # a pure function, asked for each peer at each change
def _place(peer: PeerId) -> int:
    return int.from_bytes(blake3(peer.encode(), derive_key_context=_RING).digest(8), "big")
