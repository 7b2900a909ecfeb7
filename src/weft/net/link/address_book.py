"""Where peers may be reached: what they announce, what others say, what worked.

An address needs no trust: the dial refuses any other key behind it. So the book only keeps entries few and the
useful ones first. What a linked peer says of itself is `announce`d, what others say is `hear`d: hearsay displaces
nothing but older hearsay, and who reads the book passes on only what was announced. So news travels one hop from
its source and then rests, whatever two peers say about a third.

A ticket names a peer by the first digits of its key. Where such a one listens is kept apart until it has answered, and
its whole key is known.

A full book forgets the oldest contact to which no link stands, those known by hearsay only before the others.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from weft.ids import PeerId, is_named, is_start
from weft.net.messages import MAX_ADDRESSES, MAX_TOLD_CONTACTS, Contact

OnContact = Callable[[Contact], None]
Directory = Callable[[PeerId], Contact | None]

MAX_CONTACTS = 4 * MAX_TOLD_CONTACTS  # a member that invents contacts fills this and no more


@dataclass
class _Entry:
    name: str = ""
    kept: tuple[str, ...] = ()  # given by this machine's user, or has worked
    announced: tuple[str, ...] = ()  # by the peer itself
    heard: tuple[str, ...] = ()  # from others, since it last announced any; the newest replace the older

    @property
    def is_hearsay(self) -> bool:
        return not (self.kept or self.announced)


class AddressBook:
    """Contacts by peer, those longest unheard of first.

    Args:
        schemes: names of the transports this machine has, best first.
        is_linked: says whether a link to a peer stands.
    """

    def __init__(self, me: PeerId, schemes: Sequence[str], is_linked: Callable[[PeerId], bool]) -> None:
        self.own: tuple[str, ...] = ()  # addresses of this peer itself, once it listens
        self._me = me
        self._rank = {scheme: rank for rank, scheme in enumerate(schemes)}
        self._is_linked = is_linked
        self._entries: dict[PeerId, _Entry] = {}
        self._starts: dict[PeerId, _Entry] = {}  # by the first digits of a key: no peers, yet
        self._directory: Directory = lambda _peer: None
        self._on_news: list[OnContact] = []
        self._on_announced: list[OnContact] = []
        self._on_forgotten: list[Callable[[PeerId], None]] = []

    def listen_at(self, addresses: tuple[str, ...]) -> None:
        """Add to the addresses of this peer itself."""
        self.own += addresses

    def on_news(self, callback: OnContact) -> None:
        """Call `callback(contact)` at once for each contact that tells something new, from whomever."""
        self._on_news.append(callback)

    def on_announced(self, callback: OnContact) -> None:
        """Call `callback(contact)` at once for each contact by which a peer itself tells something new."""
        self._on_announced.append(callback)

    def on_forgotten(self, callback: Callable[[PeerId], None]) -> None:
        """Call `callback(peer)` at once for each peer that made room for another."""
        self._on_forgotten.append(callback)

    def consult(self, directory: Directory) -> None:
        """Ask `directory`, too, about a peer: what it says is as good as what the peer announces."""
        self._directory = directory

    def whole(self, name: PeerId) -> PeerId:
        """Return the peer that `name` is: of those known the one whose key begins so, or else `name` itself."""
        return next((peer for peer in self._entries if is_named(peer, name)), name) if is_start(name) else name

    def keep(self, peer: PeerId, addresses: Iterable[str], name: str = "") -> None:
        """Remember addresses that no announcement will displace."""
        if (entry := self._entry(self.whole(peer), is_refreshed=True)) is not None:
            entry.name = name or entry.name
            entry.kept = tuple(dict.fromkeys((*addresses, *entry.kept)))[:MAX_ADDRESSES]

    def announce(self, contact: Contact) -> None:
        """Take what a peer says of itself."""
        entry = self._entry(contact.peer, is_refreshed=True)
        if entry is None or not contact.addresses:
            return
        is_news = contact.addresses != (entry.announced or entry.heard)
        entry.announced, entry.heard, entry.name = contact.addresses, (), contact.name or entry.name
        if is_news:
            for callback in [*self._on_announced, *self._on_news]:
                callback(contact)

    def hear(self, contacts: Iterable[Contact]) -> None:
        """Take what somebody says of other peers; of linked ones it is older than what those say themselves."""
        for contact in contacts:
            if not contact.addresses or self._is_linked(contact.peer):
                continue
            entry = self._entry(contact.peer)
            if entry is None or contact.addresses in (entry.announced, entry.heard):
                continue
            entry.heard, entry.name = contact.addresses, entry.name or contact.name
            for callback in list(self._on_news):
                callback(contact)

    def routes(self, peer: PeerId) -> tuple[str, ...]:
        """Return the addresses to dial: the best transport's first, within it those that have worked."""
        entry = self._known(peer) or _Entry()
        listed = self._directory(peer)
        known = dict.fromkeys((*entry.kept, *entry.announced, *(listed.addresses if listed else ()), *entry.heard))
        usable = [address for address in known if _scheme(address) in self._rank]
        return tuple(sorted(usable, key=lambda address: self._rank[_scheme(address)]))

    def contact(self, peer: PeerId) -> Contact:
        entry = self._known(peer)
        if entry is None:
            return self._directory(peer) or Contact(peer=peer, name="", addresses=())
        addresses = tuple(dict.fromkeys((*entry.announced, *entry.kept, *entry.heard)))[:MAX_ADDRESSES]
        return Contact(peer=peer, name=entry.name, addresses=addresses)

    def peers(self) -> tuple[PeerId, ...]:
        return tuple(self._entries)

    def is_hearsay(self, peer: PeerId) -> bool:
        """Return whether `peer` never spoke for itself here, and no address of it was given or has worked."""
        return self._entries.get(peer, _Entry()).is_hearsay

    def _known(self, peer: PeerId) -> _Entry | None:
        return self._entries.get(peer) or self._starts.get(peer)

    def _entry(self, peer: PeerId, is_refreshed: bool = False) -> _Entry | None:
        """Return what is known of `peer`, in a full book at the cost of another; None for this peer itself."""
        if peer == self._me:
            return None
        if is_start(peer):
            return self._starts.setdefault(peer, _Entry())
        entry = self._entries.get(peer)
        if entry is None:
            if len(self._entries) >= MAX_CONTACTS:
                self._make_room()
            entry = self._entries[peer] = _Entry()
        elif is_refreshed:
            self._entries[peer] = self._entries.pop(peer)
        return entry

    def _make_room(self) -> None:
        unlinked = [peer for peer in self._entries if not self._is_linked(peer)]
        hearsay = [peer for peer in unlinked if self._entries[peer].is_hearsay]
        # All may be linked: what this side dials has no bound of its own.
        victim = (hearsay or unlinked or list(self._entries))[0]
        del self._entries[victim]
        for callback in list(self._on_forgotten):
            callback(victim)


def _scheme(address: str) -> str:
    return address.partition("://")[0]
