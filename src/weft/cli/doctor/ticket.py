"""What `weft doctor -` finds: which address of the ticket leads where, how fast, and what to do where none does.

`judge_ways` and the others are pure: from what was tried to what a person reads. `examine_ticket` tries it.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING

from weft.cli.doctor.findings import Fact, Finding
from weft.cli.process import run_loop
from weft.clock import Clock, SystemClock
from weft.dashboard import figures
from weft.errors import GenesisMismatch, Refused, Unreachable, WeftError
from weft.keys import Identity
from weft.launch.session import make_transports
from weft.net.link.handshake import Passport
from weft.net.link.trial import FRESH, Trial, called, listed, places, told, verdict, way
from weft.net.membership.membership import say_goodbye
from weft.net.node import Node
from weft.net.probe import probe_all
from weft.net.speed_test import Sighting, Speed, measure, sight
from weft.net.ticket import Ticket
from weft.net.transport.address import reachable_hosts
from weft.net.transport.base import Lane, Stream, Transport
from weft.run.machine import PeerConfig
from weft.wire import printable

if TYPE_CHECKING:
    from weft.cli.doctor.fit import Asking, Look

_CLOCK_OFF_S = 60.0  # where logs of two machines are hard to read side by side
_SLOW_BPS = 1e6  # the slowest uplink that rounds are made for


Examined = tuple[list[Finding], type[WeftError] | None, "Look | None"]


def examine_ticket(ticket: Ticket, settings: PeerConfig, *, has_torch: bool) -> Examined:
    """Try the ways a ticket names; where torch can be loaded, ask members for their run.

    Returns:
        what was found, the kind of failure where no way leads into the run, and what members told of it.
    """
    return run_loop(_examine(ticket, settings, has_torch))


async def _examine(ticket: Ticket, settings: PeerConfig, has_torch: bool) -> Examined:
    clock, identity = SystemClock(), Identity.generate()
    findings: list[Finding] = []
    started: dict[str, Transport] = {}
    for transport in make_transports(identity, settings):
        try:
            await transport.start(_nobody)
            started[transport.name] = transport
        except WeftError as error:
            findings.append(Finding("path", "note", f"{transport.name} cannot be used here: {error}"))
    try:
        trials = await probe_all(ticket, identity, started, clock)
    finally:
        for each in started.values():
            await each.aclose()
    findings += [describe(trial) for trial in trials]
    verdict, failure = judge_ways(trials)
    findings += verdict
    if failure is not None:
        return findings, failure, None
    admitted = [each for each in trials if each.outcome == "admitted"]
    more, look = await _measure(ticket, settings, admitted, has_torch)
    return findings + more, failure, look


async def _measure(
    ticket: Ticket, settings: PeerConfig, open_ways: Sequence[Trial], has_torch: bool
) -> tuple[list[Finding], "Look | None"]:
    """Ask each member that lets this machine in for its clock, what it sees and the run; move bytes to and from the
    first."""
    clock, identity = SystemClock(), Identity.generate()
    passport = Passport(identity=identity, run=ticket.run, name="doctor", admission=ticket.admission())
    findings: list[Finding] = []
    sightings: list[Sighting] = []
    speed: Speed | None = None
    look: Look | None = None
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(
            Node(passport, make_transports(identity, settings), clock, lambda _: None, is_listed=False)
        )
        asking = await stack.enter_async_context(_asking(node, clock)) if has_torch else None
        members = list(dict.fromkeys(trial.contact for trial in open_ways))
        for index, contact in enumerate(members):
            who = called(contact.name, contact.peer)
            node.remember(contact.peer, [way.address for way in open_ways if way.contact == contact])
            try:
                await node.connect(contact.peer)
                sightings.append(await sight(node, contact.peer, clock))
                findings.append(judge_clock(who, sightings[-1]))
                if index == 0:
                    speed = await measure(node, contact.peer, clock)
                    findings.append(judge_speed(who, node.link_name(contact.peer), speed))
            except (WeftError, TimeoutError) as error:
                findings.append(Finding("speed", "note", f"{who} could not be measured: {error or 'it took too long'}"))
        findings.append(judge_place(sightings, reachable_hosts("::")))
        if asking is not None:
            try:
                look = await asking(ticket, settings, speed, sightings[0].round_trip_s if sightings else 0.0)
            except WeftError as error:
                findings.append(Finding("fit", "note", f"members did not say what the run takes: {error}"))
        await say_goodbye(node, "was only looking")
    return findings, look


def _asking(node: Node, clock: Clock) -> "AbstractAsyncContextManager[Asking]":
    """Return what listens to members from now on, and asks them for their run."""
    from weft.cli.doctor.fit import asking  # which loads torch

    return asking(node, clock)


def describe(trial: Trial) -> Finding:
    """Return the line of one address."""
    who = called(trial.contact.name, trial.contact.peer)
    facts: dict[str, Fact] = {
        "peer": trial.contact.peer,
        "transport": trial.transport,
        "address": trial.address,
        "outcome": trial.outcome,
        "opened_s": trial.opened_s,
        "greeted_s": trial.greeted_s,
    }
    if trial.opened_s is None or trial.outcome != "admitted":
        return Finding("path", "note", f"{who}: {told([trial])}", facts=facts)
    greeted_ms = 1000 * (trial.greeted_s or 0.0)
    took = f"connected in {1000 * trial.opened_s:.0f} ms, admitted {greeted_ms:.0f} ms later"
    where = f"{way(trial.transport)} {listed(places(trial.address))}"
    return Finding("path", "ok", f"{who}: {where}, {took}", facts=facts)


def judge_ways(trials: Sequence[Trial]) -> tuple[list[Finding], type[WeftError] | None]:
    """Return what the trials mean together, what to do, and why there is no way into the run, if there is none."""
    outcomes = {trial.outcome for trial in trials}
    if "admitted" in outcomes:
        return _what_is_missing(trials), None
    if "refused" in outcomes:
        said = next(trial.said for trial in trials if trial.outcome == "refused")
        fix = f"{FRESH}; if the run admits by key, it must list yours: weft keys"
        return [
            Finding("ways", "block", f"members answer, and do not admit this machine: {printable(said)}", fix)
        ], Refused
    if "other run" in outcomes:
        fix = "ask for a ticket of the run that they train now: weft ticket"
        return [Finding("ways", "block", "the members on this ticket train another run", fix)], GenesisMismatch
    text, fix = verdict(trials)
    return [Finding("ways", "block", text, fix)], Unreachable


def _what_is_missing(trials: Sequence[Trial]) -> list[Finding]:
    open_by = {trial.transport for trial in trials if trial.outcome == "admitted"}
    tried = {trial.transport for trial in trials}
    if "tls" in tried - open_by:
        text = "TCP does not get through, but iroh (UDP) does: a run works, but slower than a fast line could"
        return [Finding("ways", "note", text, "if the router or firewall is yours, let TCP out to the ports above")]
    if "iroh" in tried - open_by:
        text = "UDP does not get through, but TCP does. Members behind routers are reached through other members"
        fix = "nothing to do; if you forward a port of the router to --port, others connect to this machine directly"
        return [Finding("ways", "note", text, fix)]
    return [Finding("ways", "ok", "there is a way into the run")]


def judge_clock(who: str, sighting: Sighting) -> Finding:
    """Return how this machine's clock stands to a member's."""
    ahead_s, ms = sighting.ahead_s, 1000 * sighting.round_trip_s
    facts: dict[str, Fact] = {"ahead_s": ahead_s, "round_trip_s": sighting.round_trip_s}
    if abs(ahead_s) < _CLOCK_OFF_S:
        return Finding(
            "clocks", "ok", f"{who}: its clock is {ahead_s:+.2f} s from this one's; round trip {ms:.0f} ms", facts=facts
        )
    text = f"the clock of {who} is {ahead_s:+.0f} s from this one's: training does not depend on it, times in logs do"
    return Finding("clocks", "note", text, "set the clock that is wrong: timedatectl set-ntp true", facts)


def judge_speed(who: str, transport: str, speed: Speed) -> Finding:
    """Return how fast bytes pass."""
    text = (
        f"{who}: up {_mbit(speed.up_bps)}, down {_mbit(speed.down_bps)} over {transport} "
        f"({figures.nbytes(speed.nbytes)} each way, one stream)"
    )
    facts: dict[str, Fact] = {"transport": transport, "up_bps": speed.up_bps, "down_bps": speed.down_bps}
    if min(speed.up_bps, speed.down_bps) < _SLOW_BPS:
        fix = "rounds need 1 Mbit/s or more: use a faster line, or a smaller model"
        return Finding("speed", "note", text, fix, facts)
    return Finding("speed", "ok", text, facts=facts)


def _mbit(bps: float) -> str:
    return f"{bps / 1e6:{',.0f' if bps >= 1e8 else '.3g'}} Mbit/s"


def judge_place(sightings: Sequence[Sighting], own: Sequence[str]) -> Finding:
    """Return from what members see whether an address translation stands between."""
    sources = sorted({each.seen.source for each in sightings if each.seen.source})
    if not sources:
        return Finding("place", "note", "no member says at which address it sees this machine")
    shown = ", ".join(map(printable, sources))
    facts: dict[str, Fact] = {"seen_at": sources, "own": sorted(own), "is_translated": not set(sources) <= set(own)}
    if set(sources) <= set(own):
        text = f"members see this machine at {shown}, which is its own: no router translates it"
        return Finding("place", "ok", text, facts=facts)
    kind = (
        "a router translates its addresses (NAT)"
        if len(sources) == 1
        else "it has several public addresses, as behind a provider's NAT or a VPN"
    )
    text = f"members see this machine at {shown}, which is not its own: {kind}"
    fix = (
        "to be reachable from outside, forward a port of the router to --port and name it in [tls] advertise. If the "
        f"router itself does not show {shown} as its outside address, the provider translates again, and no port can "
        "be forwarded. Without a port this machine dials out, and reaches others like it through members that both "
        "can reach: as good for rounds, slower for fetching the run's state"
    )
    return Finding("place", "note", text, fix, facts)


async def _nobody(stream: Stream, _lane: Lane) -> None:
    await stream.close()
