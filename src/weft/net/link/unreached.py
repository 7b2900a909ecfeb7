"""What a person reads when no address led to a member: who was tried, by which ways, what that means, what to do.

    nobody answered. Tried attic (ed4928c6): TLS over TCP to 192.168.1.2:7077, no answer within 8 s; iroh over UDP ...
    All these addresses are private: ... Let one member be reachable from outside ...

`verdict` is also what `weft doctor TICKET` says. Everything here is pure.

It does not know whether a router, a firewall or a member that is off keeps silent: nobody can tell these from outside;
nor whether a relay server helps, which was not tried yet (docs/network.md).
"""

from collections.abc import Sequence
from urllib.parse import parse_qsl, urlsplit

from weft.ids import PeerId
from weft.net.link.trial import Trial, called, listed, told
from weft.net.transport.address import is_loopback, is_private
from weft.wire import printable

MAX_MEMBERS = 3  # that are worth reading
FRESH = "ask a member for a fresh ticket, which `weft ticket` prints there"
STALE = "a ticket goes stale when all whom it names have left, or have started again without a fixed --port"
OPEN_ONE = (
    "let one member be reachable from outside; all others then go through it. Forward a port of its router to its "
    '--port and name it in its machine file, [tls] advertise = ["public.address:port"], or start one on a machine with '
    "a public address; then take a ticket of that one"
)
OWN_RELAY = "a relay server of one's own, named on both sides ([iroh] relays), may be another way"
DOCTOR = "`weft doctor TICKET` tries every way by itself and examines this machine"


def verdict(trials: Sequence[Trial]) -> tuple[str, str]:
    """Return what trials of which none led into the run come to, and what to do."""
    if not trials:
        return "there is no address that the transports of this machine can dial", (
            f"{FRESH}, and see which transports the machine file switches on"
        )
    outside = [trial for trial in trials if any(not is_private(host) for host in trial.hosts)]
    if not outside:
        return _at_home(trials)
    if all(trial.has_no_route for trial in outside):
        return (
            "this machine has no route to any of these addresses: it is offline, or has none of that family (IPv6)",
            "connect it to a network that leads there; where only a proxy leads out, name it: proxy in [tls]",
        )
    if all(trial.outcome == "silent" or trial.has_no_route for trial in outside):
        return (
            "nothing answers at any of these addresses: a router or a firewall, there or here, swallows what is sent, "
            "or all members named are off",
            f"see that one of them runs, and {OPEN_ONE}. See that this network lets connections out to it: some pass "
            f"port 443 only, some a proxy only (proxy in [tls]). {_relay(trials)}. If all have left, {FRESH}",
        )
    if any(trial.outcome == "no peer" for trial in outside):
        return (
            "something answers there that is not the member of this ticket",
            f"{FRESH}: addresses change hands. Or a proxy or portal stands in between",
        )
    return (
        "the machines are there, and no member listens at these ports: it has ended, or listens elsewhere now",
        f"{FRESH}: {STALE}",
    )


def one(name: str, peer: PeerId, trials: Sequence[Trial]) -> str:
    """Return what became of one member."""
    if not trials:
        return f"no address of {called(name, peer)} is known that this peer's transports can dial"
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
        "nobody answered",
        *([f"Tried {'. '.join(tried[:MAX_MEMBERS])}"] if tried else []),
        *([f"And {more} more member{'s' if more > 1 else ''}"] if more > 0 else []),
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
            "these addresses lead to this very machine alone, and no member listens here",
            f"{FRESH}: {STALE}. One that was started with --host 127.0.0.1 takes nobody from another machine",
        )
    text = "all these addresses are private: they lead somewhere in the member's own network only"
    if any(trial.is_closed for trial in away):
        return (
            f"{text}, and the machines that have them here do not listen",
            f"if the member is in this same network, {FRESH}: {STALE}. If it is in another, {OPEN_ONE}",
        )
    return f"{text}, and its router lets nobody in", f"{OPEN_ONE}. {_relay(trials)}"


def _relay(trials: Sequence[Trial]) -> str:
    """Return what a relay server can do: the one that a member names, if it names one."""
    options = [option for trial in trials for option in parse_qsl(urlsplit(trial.address).query)]
    named = list(dict.fromkeys(printable(value) for name, value in options if name == "relay"))
    if not named:
        return _capital(OWN_RELAY)
    return f"The member names the relay server {listed(named)}: it may help where this machine's [iroh] relays name it"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
