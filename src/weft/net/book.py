"""Where peers may be reached: what they announce, what others say, what worked.

An address needs no trust: the dial refuses any other key behind it. So the book only keeps entries few and the
useful ones first.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from weft.ids import PeerId
from weft.net.messages import MAX_ADDRESSES, MAX_MEMBERS, Contact

OnContact = Callable[[Contact], None]

MAX_CONTACTS = 4 * MAX_MEMBERS  # a member that invents contacts fills this and no more


@dataclass
class _Entry:
    name: str = ""
    announced: tuple[str, ...] = ()  # by the peer itself or a third party; the newest replaces the older
    kept: tuple[str, ...] = ()  # given by this machine's user, or has worked


class AddressBook:
    """Contacts by peer.

    Args:
        schemes: names of the transports this machine has, best first.
    """

    def __init__(self, me: PeerId, schemes: Sequence[str]) -> None:
        self._me = me
        self._rank = {scheme: rank for rank, scheme in enumerate(schemes)}
        self._entries: dict[PeerId, _Entry] = {}
        self._callbacks: list[OnContact] = []

    def on_news(self, callback: OnContact) -> None:
        """Call `callback(contact)` at once for each contact that tells something new."""
        self._callbacks.append(callback)

    def keep(self, peer: PeerId, addresses: Iterable[str], name: str = "") -> None:
        """Remember addresses that no announcement will displace."""
        if (entry := self._entry(peer)) is not None:
            entry.name = name or entry.name
            entry.kept = tuple(dict.fromkeys((*addresses, *entry.kept)))[:MAX_ADDRESSES]

    def learn(self, contacts: Iterable[Contact]) -> None:
        """Take the newest addresses of peers, as they or others announce them."""
        for contact in contacts:
            entry = self._entry(contact.peer)
            if entry is None or not contact.addresses or entry.announced == contact.addresses:
                continue
            entry.announced, entry.name = contact.addresses, contact.name or entry.name
            for callback in list(self._callbacks):
                callback(contact)

    def routes(self, peer: PeerId) -> tuple[str, ...]:
        """Return the addresses to dial: the best transport's first, within it those that have worked."""
        entry = self._entries.get(peer, _Entry())
        usable = [a for a in dict.fromkeys((*entry.kept, *entry.announced)) if _scheme(a) in self._rank]
        return tuple(sorted(usable, key=lambda address: self._rank[_scheme(address)]))

    def contact(self, peer: PeerId) -> Contact:
        entry = self._entries.get(peer, _Entry())
        addresses = tuple(dict.fromkeys((*entry.announced, *entry.kept)))[:MAX_ADDRESSES]
        return Contact(peer=peer, name=entry.name, addresses=addresses)

    def peers(self) -> tuple[PeerId, ...]:
        return tuple(self._entries)

    def _entry(self, peer: PeerId) -> _Entry | None:
        if peer == self._me or (peer not in self._entries and len(self._entries) >= MAX_CONTACTS):
            return None
        return self._entries.setdefault(peer, _Entry())


def _scheme(address: str) -> str:
    return address.partition("://")[0]
