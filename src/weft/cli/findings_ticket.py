"""What `weft doctor TICKET` finds: which address of the ticket leads where, how fast, and what to do where none does.

`judge_ways` and the others are pure: from what was tried to what a person reads. `examine_ticket` tries it.
"""

import ipaddress
from collections.abc import Sequence
from typing import assert_never
from urllib.parse import parse_qsl, urlsplit

from weft.cli import figures
from weft.cli.finding import Fact, Finding
from weft.cli.loop import run_loop
from weft.clock import SystemClock
from weft.errors import WeftError
from weft.ids import short
from weft.keys import Identity
from weft.net.address import reachable_hosts
from weft.net.gauge import Sighting, Speed, measure, sight
from weft.net.handshake import Passport
from weft.net.heartbeat import say_goodbye
from weft.net.iroh import IrohTransport
from weft.net.node import Node
from weft.net.probe import Probe, probe_all
from weft.net.ticket import Ticket
from weft.net.tls import TlsTransport
from weft.net.transport import Lane, Stream, Transport
from weft.peer.machine import PeerConfig
from weft.wire import printable

_CLOCK_OFF_S = 60.0  # where logs of two machines are hard to read side by side
_SLOW_BPS = 1e6  # the slowest uplink that rounds are made for


def examine_ticket(ticket: Ticket, settings: PeerConfig) -> tuple[list[Finding], type[WeftError] | None]:
    """Try the ways a ticket names.

    Returns:
        what was found, and the kind of failure where no way leads into the run.
    """
    return run_loop(_examine(ticket, settings))


async def _examine(ticket: Ticket, settings: PeerConfig) -> tuple[list[Finding], type[WeftError] | None]:
    clock, identity = SystemClock(), Identity.generate()
    findings: list[Finding] = []
    started: dict[str, Transport] = {}
    for transport in _transports(identity, settings):
        try:
            await transport.start(_nobody)
            started[transport.name] = transport
        except WeftError as error:
            findings.append(Finding("path", "note", f"{transport.name} cannot be used here: {error}"))
    try:
        probes = await probe_all(ticket, identity, started, clock)
    finally:
        for transport in started.values():
            await transport.aclose()
    findings += [describe(probe) for probe in probes]
    verdict, failure = judge_ways(probes)
    findings += verdict
    if failure is None:
        findings += await _measure(ticket, settings, [each for each in probes if each.outcome == "admitted"])
    return findings, failure


async def _measure(ticket: Ticket, settings: PeerConfig, open_ways: Sequence[Probe]) -> list[Finding]:
    """Ask each member that lets this machine in for its clock and what it sees; move bytes to and from the first."""
    clock, identity = SystemClock(), Identity.generate()
    passport = Passport(identity=identity, run=ticket.run, name="doctor", admission=ticket.admission())
    findings: list[Finding] = []
    sightings: list[Sighting] = []
    async with Node(passport, _transports(identity, settings), clock, lambda _: None) as node:
        members = list(dict.fromkeys(probe.contact for probe in open_ways))
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
                findings.append(Finding("speed", "note", f"{who} could not be measured: {error or 'no end in time'}"))
        await say_goodbye(node, "was only looking")
    return [*findings, judge_place(sightings, reachable_hosts("::"))]


def _transports(identity: Identity, settings: PeerConfig) -> list[Transport]:
    made: list[Transport] = []
    for name in settings.transports:
        match name:
            case "tls":
                made.append(TlsTransport(identity, settings.tls))
            case "iroh":
                made.append(IrohTransport(identity, settings.iroh))
            case "via":  # what a ticket names leads straight to its members
                pass
            case _:
                assert_never(name)
    return made


def called(name: str, peer: str) -> str:
    return f"{printable(name)} ({short(peer)})" if name else short(peer)


def describe(probe: Probe) -> Finding:
    """Return the line of one address."""
    where = _place(probe.address)
    who = called(probe.contact.name, probe.contact.peer)
    facts: dict[str, Fact] = {
        "peer": probe.contact.peer,
        "transport": probe.transport,
        "address": probe.address,
        "outcome": probe.outcome,
        "opened_s": probe.opened_s,
        "greeted_s": probe.greeted_s,
    }
    if probe.opened_s is None or probe.outcome != "admitted":
        text = f"{probe.transport:<5} {where} {who}: {probe.outcome}. {printable(probe.said)}"
        return Finding("path", "note", text, facts=facts)
    greeted_ms = 1000 * (probe.greeted_s or 0.0)
    took = f"opened in {1000 * probe.opened_s:.0f} ms, let in {greeted_ms:.0f} ms later"
    return Finding("path", "ok", f"{probe.transport:<5} {where} {who}: {took}", facts=facts)


def judge_ways(probes: Sequence[Probe]) -> tuple[list[Finding], type[WeftError] | None]:
    """Return what the probes mean together, what to do, and why there is no way into the run, if there is none."""
    from weft.errors import GenesisMismatch, Refused, Unreachable

    outcomes = {probe.outcome for probe in probes}
    if "admitted" in outcomes:
        return _what_is_missing(probes), None
    if "refused" in outcomes:
        said = next(probe.said for probe in probes if probe.outcome == "refused")
        fix = (
            "ask a member for a fresh ticket, which `weft ticket` prints there; a run by key must list yours: weft keys"
        )
        return [
            Finding("ways", "block", f"members are reached and let this machine not in: {printable(said)}", fix)
        ], Refused
    if "other run" in outcomes:
        fix = "ask for a ticket of the run that is trained there now: weft ticket"
        return [Finding("ways", "block", "the members on this ticket train another run", fix)], GenesisMismatch
    return [_no_way(probes)], Unreachable


def _what_is_missing(probes: Sequence[Probe]) -> list[Finding]:
    open_by = {probe.transport for probe in probes if probe.outcome == "admitted"}
    tried = {probe.transport for probe in probes}
    if "tls" in tried - open_by:
        text = "TCP does not get through and iroh (UDP) does: a run works, slower where the line is fast"
        return [Finding("ways", "note", text, "where a router or firewall is yours: let TCP out to the ports above")]
    if "iroh" in tried - open_by:
        text = "UDP does not get through, and TCP does. Members behind routers of their own are reached through others"
        fix = "nothing has to be done; a member that others can dial (--port, forwarded) spares the others the detour"
        return [Finding("ways", "note", text, fix)]
    return [Finding("ways", "ok", "there is a way into the run")]


def _no_way(probes: Sequence[Probe]) -> Finding:
    hosts = [host for probe in probes for host in hosts_of(probe.address)]
    outside = [host for host in hosts if not _is_private(host)]
    if not probes:
        text, fix = "the ticket has no address", "ask a member for a fresh ticket: weft ticket"
    elif not outside:
        text = "all addresses on the ticket are private: they lead somewhere in the member's own network only"
        fix = (
            "a ticket for the outside needs one member that can be reached from there: forward a port of its router "
            'to --port and name it in its machine file, [tls] advertise = ["public.address:port"]; or one member on a '
            "machine with a public address, which all others can join and go through"
        )
    elif all(probe.outcome == "silent" for probe in probes):
        text = "nothing answers at any address: a firewall or a router between swallows what is sent, or all are off"
        fix = (
            "see that the member runs; that its firewall and its router let its port in; and that this "
            "network lets connections out to it: some pass port 443 only, some a proxy only (proxy in [tls])"
        )
    elif any(probe.outcome == "no peer" for probe in probes):
        text = "something answers there that is not the member of this ticket"
        fix = "ask a member for a fresh ticket: addresses change hands. Or a proxy or portal stands in between"
    else:
        text = "the machines are there, and no member listens at these ports: it has ended, or listens elsewhere now"
        fix = "ask a member for a fresh ticket; one that starts on a fixed --port keeps its tickets good"
    return Finding("ways", "block", text, fix)


def judge_clock(who: str, sighting: Sighting) -> Finding:
    """Return how this machine's clock stands to a member's."""
    ahead_s, ms = sighting.ahead_s, 1000 * sighting.round_trip_s
    facts: dict[str, Fact] = {"ahead_s": ahead_s, "round_trip_s": sighting.round_trip_s}
    if abs(ahead_s) < _CLOCK_OFF_S:
        return Finding("clocks", "ok", f"{who}: {ahead_s:+.2f} s from this one's; round trip {ms:.0f} ms", facts=facts)
    text = f"{who} has a clock {ahead_s:+.0f} s from this one's: nothing in a run depends on it, times in logs do"
    return Finding("clocks", "note", text, "set the clock of whichever is wrong: timedatectl set-ntp true", facts)


def judge_speed(who: str, transport: str, speed: Speed) -> Finding:
    """Return how fast bytes pass."""
    text = (
        f"{who}: up {speed.up_bps / 1e6:.3g} Mbit/s, down {speed.down_bps / 1e6:.3g} Mbit/s over {transport} "
        f"({figures.nbytes(speed.nbytes)} each way, one stream)"
    )
    facts: dict[str, Fact] = {"transport": transport, "up_bps": speed.up_bps, "down_bps": speed.down_bps}
    if min(speed.up_bps, speed.down_bps) < _SLOW_BPS:
        fix = "rounds are made for 1 Mbit/s and more: another line, or a smaller model"
        return Finding("speed", "note", text, fix, facts)
    return Finding("speed", "ok", text, facts=facts)


def judge_place(sightings: Sequence[Sighting], own: Sequence[str]) -> Finding:
    """Return from what members see whether an address translation stands between."""
    sources = sorted({each.seen.source for each in sightings if each.seen.source})
    if not sources:
        return Finding("place", "note", "no member says where it sees this machine")
    shown = ", ".join(map(printable, sources))
    facts: dict[str, Fact] = {"seen_at": sources, "own": sorted(own), "is_translated": not set(sources) <= set(own)}
    if set(sources) <= set(own):
        text = f"members see this machine at {shown}, which is its own: no translation between"
        return Finding("place", "ok", text, facts=facts)
    kind = (
        "a router translates its addresses (NAT)"
        if len(sources) == 1
        else "several exits, as of a provider's NAT or a VPN"
    )
    text = f"members see this machine at {shown}, which is not its own: {kind}"
    fix = (
        "to be reached from outside: forward a port of the router to --port and name it, [tls] advertise. Where the "
        f"router itself does not show {shown} as its outside address, the provider translates once more, and no port "
        "can be forwarded. Without one this machine dials out, and reaches others like it through members that both "
        "reach: as good for rounds, slower for states"
    )
    return Finding("place", "note", text, fix, facts)


def hosts_of(address: str) -> list[str]:
    """Return the hosts that an address leads to."""
    parts = urlsplit(address)
    if parts.scheme == "iroh":
        found = [value for name, value in parse_qsl(parts.query) if name == "addr"]
        return [value.rpartition(":")[0].strip("[]") for value in found]
    return [parts.hostname] if parts.hostname else []


def _place(address: str) -> str:
    if address.startswith("iroh"):
        return ", ".join(value for name, value in parse_qsl(urlsplit(address).query) if name == "addr")
    return printable(address.partition("://")[2])


def _is_private(host: str) -> bool:
    try:
        found = ipaddress.ip_address(host)
    except ValueError:  # a name
        return False
    shared = found.version == 4 and found in ipaddress.ip_network("100.64.0.0/10")
    return (
        found.is_loopback
        or found.is_link_local
        or shared
        or any(found in net for net in _HOMES if net.version == found.version)
    )


_HOMES = [ipaddress.ip_network(net) for net in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")]


async def _nobody(stream: Stream, _lane: Lane) -> None:
    await stream.close()
