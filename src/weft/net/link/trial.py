"""One address of a member, tried: what came of it, in words that a person reads.

    TLS over TCP to 192.168.1.2:7077, no answer within 8 s
    iroh over UDP to 203.0.113.7:7077 and 203.0.113.7:7078, no answer within 5 s
    through ed4928c6, it passes nothing on

Where no address led to a member: who was tried, by which ways, what that means, what to do.

    nobody answered. Tried attic (ed4928c6): TLS over TCP to 192.168.1.2:7077, no answer within 8 s; iroh over UDP ...
    All these addresses are private: ... Let one member be reachable from outside ...

`weft doctor -` and a join that failed both say it. Names and reasons come from others: nothing of them steers a
terminal, and a key is shown by its first letters.
"""

import errno
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qsl, urlsplit

from weft.ids import PeerId, name_of, several, short
from weft.net.messages import Contact
from weft.net.transport.address import direct_places, host_of, hosts_of, is_loopback, is_private
from weft.wire import printable

Outcome = Literal["admitted", "refused", "full", "other run", "no peer", "silent", "no way"]
# full: a member answers, and has no room for another link now.
# no peer: something answers, and it is not this member. silent: packets are swallowed. no way: told at once that
# nothing is there, or this machine has no such transport.

MAX_PLACES = 3  # of one member and one transport, that are worth reading
_MAX_SAID = 120
_CLOSED = (errno.ECONNREFUSED,)
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL)
TURNED_AWAY = "turned the connection away"
_WAYS = {"tls": "TLS over TCP to", "iroh": "iroh over UDP to", "via": "through"}


@dataclass(frozen=True, kw_only=True)
class Trial:
    contact: Contact
    address: str
    outcome: Outcome
    said: str = ""  # what went wrong, in the words of whoever said it
    opened_s: float | None = None  # until a stream stood, its key proven
    greeted_s: float | None = None  # from then on until the member let this peer in

    @property
    def transport(self) -> str:
        return self.address.partition("://")[0]

    @property
    def is_closed(self) -> bool:
        """Return whether a machine answered that nothing listens there."""
        return _code(self.said) in _CLOSED

    @property
    def has_no_route(self) -> bool:
        return _code(self.said) in _NO_ROUTE

    @property
    def hosts(self) -> list[str]:
        return hosts_of(self.address)


def failed(contact: Contact, address: str, said: str) -> Trial:
    """Return the trial of an address whose dial failed with the words `said`."""
    return Trial(contact=contact, address=address, outcome=_why_closed(said), said=said)


def called(name: str, peer: PeerId) -> str:
    """Return a peer's name, and the part of its key by which a person tells it from another of that name."""
    return name_of(peer, printable(name), is_shared=True)


def way(transport: str) -> str:
    """Return how a transport gets there: what stands before a place."""
    return _WAYS.get(transport, f"{printable(transport)} to")


def places(address: str) -> list[str]:
    """Return what an address says of where: `host:port`, of a relayed one the relay's short key."""
    rest = address.partition("://")[2]
    if address.startswith("iroh"):
        return [printable(place) for place in direct_places(address)]
    return [short(PeerId(printable(rest))) if address.startswith("via") else printable(rest)]


def listed(found: list[str], most: int = MAX_PLACES) -> str:
    """Return a few of the words: "a, b and c", or "a, b, c and 4 more"."""
    shown = found if len(found) <= most else [*found[:most], f"{len(found) - most} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def why(trial: Trial) -> str:
    """Return why a trial failed, without the address and in plain words."""
    if trial.outcome == "silent":
        limit = re.search(r"within [\d.]+ s", trial.said)
        return f"no answer {limit[0]}" if limit else "no answer"
    if trial.is_closed:
        return "nothing listens there"
    if trial.has_no_route:
        return "no route there from this machine"
    said = trial.said.removeprefix(trial.address).removeprefix(trial.address[:200]).lstrip(": ")
    said = said.replace(trial.contact.peer, short(trial.contact.peer))
    said = re.sub(r"^cannot reach \w+ over iroh: |\[Errno -?\d+\] ", "", said)
    return printable(said[:_MAX_SAID]) or trial.outcome


def told(trials: list[Trial]) -> str:
    """Return what came of the addresses of one member: each way once, with its places.

    A member names its loopback address, too, for others on its machine: it is worth reading only if there is no other.
    """
    found: dict[tuple[str, str], dict[str, None]] = {}
    for trial in trials:
        found.setdefault((way(trial.transport), why(trial)), {}).update(dict.fromkeys(places(trial.address)))
    away = {place for where in found.values() for place in where if not is_loopback(host_of(place))}
    worth = {key: [place for place in where if place in away or not away] for key, where in found.items()}
    return "; ".join(f"{by} {listed(where)}, {said}" for (by, said), where in worth.items() if where)


def _why_closed(said: str) -> Outcome:
    """Return what kind of failure a dial's words tell of."""
    if TURNED_AWAY in said:
        return "full"
    if "did not answer" in said or "no answer" in said or "timed out" in said:
        return "silent"
    if "answers there" in said or "not a weft peer" in said:
        return "no peer"
    return "no way"


def _code(said: str) -> int | None:
    """Return the number of the system's error that the words name."""
    found = re.search(r"\[Errno (\d+)\]", said)
    return int(found[1]) if found else None


MAX_MEMBERS = 3  # that are worth reading
FRESH = "ask a member for a fresh ticket, which `weft ticket` prints there"
STALE = "a ticket goes stale when all members that it names have left, or none of them runs at its old address"
OPEN_ONE = (
    "make one member reachable from outside; all others then go through it. Forward a port of its router to its --port "
    'and name that in its machine file, [tls] advertise = ["public.address:port"], or start a member on a machine with '
    "a public address; then take a ticket from that member"
)
OWN_RELAY = "a relay server of your own, named on both sides ([iroh] relays), may be another way"
DOCTOR = "`weft doctor -` tries each way and checks this machine"
_TAKEN_OVER = (
    "something answers there that is not the member of this ticket",
    f"{FRESH}: the address may belong to another machine now, or a proxy or portal is in between",
)


def verdict(trials: Sequence[Trial]) -> tuple[str, str]:
    """Return what trials of which none led into the run come to, and what to do."""
    if not trials:
        return "the ticket has no address that this machine's transports can dial", (
            f"{FRESH}, and check which transports the machine file turns on"
        )
    if any(trial.outcome == "full" for trial in trials):
        return (
            "a member answers, and has no room for another link now",
            "try again in a minute, or with the ticket of another member",
        )
    outside = [trial for trial in trials if any(not is_private(host) for host in trial.hosts)]
    if not outside:
        return _TAKEN_OVER if any(trial.outcome == "no peer" for trial in trials) else _at_home(trials)
    if all(trial.has_no_route for trial in outside):
        return (
            "this machine has no route to any of these addresses: it is offline, or has no IPv6",
            "connect it to a network that leads there; if only a proxy leads out, name it: proxy in [tls]",
        )
    if all(trial.outcome == "silent" or trial.has_no_route for trial in outside):
        return (
            "none of these addresses answers: a router or a firewall, there or here, drops what is sent, or all "
            "members named are off",
            f"check that one of them runs, and {OPEN_ONE}. Check that this network lets connections out to it: some "
            f"allow only port 443, some only a proxy (proxy in [tls]). {_relay(trials)}. If all have left, {FRESH}",
        )
    if any(trial.outcome == "no peer" for trial in outside):
        return _TAKEN_OVER
    return (
        "the machines answer, but no member listens at these ports: it has ended, or listens elsewhere now",
        f"{FRESH}: {STALE}",
    )


def one(name: str, peer: PeerId, trials: Sequence[Trial]) -> str:
    """Return what became of one member."""
    if not trials:
        return f"{called(name, peer)} has no address that this peer's transports can dial"
    return f"{called(name, peer)} was not reached: {told(list(trials))}"


def nobody(trials: Sequence[Trial], others: Sequence[str] = ()) -> str:
    """Return why no member was reached, and what to do.

    Args:
        others: what became of members that no address stands for, each in a sentence.
    """
    by_member: dict[PeerId, list[Trial]] = {}
    for trial in trials:
        by_member.setdefault(trial.contact.peer, []).append(trial)
    tried = [f"{called(each[0].contact.name, peer)}: {told(each)}" for peer, each in by_member.items()]
    more = len(tried) - MAX_MEMBERS
    text, fix = verdict(trials)
    said = [
        "nobody let this peer in" if any(trial.outcome == "full" for trial in trials) else "nobody answered",
        *([f"Tried {'. '.join(tried[:MAX_MEMBERS])}"] if tried else []),
        *([f"And {several(more, 'more member')}"] if more > 0 else []),
        *others[:MAX_MEMBERS],
        *([_capital(text)] if tried or not others else []),
        _capital(fix),
        DOCTOR,
    ]
    return ". ".join(sentence.rstrip(".") for sentence in said) + "."


def _at_home(trials: Sequence[Trial]) -> tuple[str, str]:
    """Return the verdict on addresses none of which means anything outside of one house."""
    away = [trial for trial in trials if not all(is_loopback(host) for host in trial.hosts)]
    if not away:
        return (
            "these addresses lead only to this machine, and no member listens here",
            f"{FRESH}: {STALE}. A member started with --host 127.0.0.1 lets in nobody from another machine",
        )
    text = "all these addresses are private: they work only in the member's own network"
    if any(trial.is_closed for trial in away):
        return (
            f"{text}, and the machines that have them in this network do not listen",
            f"if the member is in this same network, {FRESH}: {STALE}. If it is in another, {OPEN_ONE}",
        )
    return f"{text}, and its router lets nobody in", f"{OPEN_ONE}. {_relay(trials)}"


def _relay(trials: Sequence[Trial]) -> str:
    """Return what a relay server can do: the one that a member names, if it names one."""
    options = [option for trial in trials for option in parse_qsl(urlsplit(trial.address).query)]
    named = list(dict.fromkeys(printable(value) for name, value in options if name == "relay"))
    if not named:
        return _capital(OWN_RELAY)
    return f"The member names the relay server {listed(named)}: it may help if this machine's [iroh] relays name it"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
