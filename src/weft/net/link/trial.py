"""One address of a member, tried: what came of it, in words that a person reads.

    TLS over TCP to 192.168.1.2:7077, no answer within 8 s
    iroh over UDP to 203.0.113.7:7077 and 203.0.113.7:7078, no answer within 5 s
    through ed4928c6, it passes nothing on

What this says, `weft doctor TICKET` and a join that failed both say. Names and reasons come from others: nothing of
them steers a terminal, and a key is shown by its first letters.

It does not know what several trials mean together (`unreached`).
"""

import errno
import re
from dataclasses import dataclass
from typing import Literal

from weft.ids import PeerId, short
from weft.net.messages import Contact
from weft.net.transport.address import direct_places, host_of, hosts_of, is_loopback
from weft.wire import printable

Outcome = Literal["admitted", "refused", "other run", "no peer", "silent", "no way"]
# no peer: something answers, and it is not this member. silent: packets are swallowed. no way: told at once that
# nothing is there, or this machine has no such transport.

MAX_PLACES = 3  # of one member and one transport, that are worth reading
_MAX_SAID = 120
_CLOSED = (errno.ECONNREFUSED,)
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL)
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
        """Return whether this machine knows no way to where the address lies."""
        return _code(self.said) in _NO_ROUTE

    @property
    def hosts(self) -> list[str]:
        return hosts_of(self.address)


def failed(contact: Contact, address: str, said: str) -> Trial:
    """Return the trial of an address whose dial failed with the words `said`."""
    return Trial(contact=contact, address=address, outcome=_why_closed(said), said=said)


def called(name: str, peer: PeerId) -> str:
    return f"{printable(name)} ({short(peer)})" if name else short(peer)


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
    if "did not answer" in said or "no answer" in said or "timed out" in said:
        return "silent"
    if "answers there" in said or "no weft peer" in said:
        return "no peer"
    return "no way"


def _code(said: str) -> int | None:
    """Return the number of the system's error that the words name."""
    found = re.search(r"\[Errno (\d+)\]", said)
    return int(found[1]) if found else None
