"""The string that lets a machine join: which run, whom to ask, and the secret that admits.

    weft2 <base32 of: length | secret | run, 32 bytes | members and where they listen | 4 bytes checksum>

It names up to three members (`transport.compact`), each by its key or the first 15 bytes of it: the dial refuses any
other. What else there is to know comes from whoever answers. In `MAX_LETTERS` letters, which chat programs, shells and
a person reading aloud carry whole, there is room for about three addresses; where one must be longer, so is the
ticket. Length and checksum tell a ticket that was cut short from one that was mistyped. White space inside is ignored.

    weft1 <base32 of: 2 bytes length | canonical TicketBody | 64 bytes signature | 4 bytes checksum>

is how tickets were: up to eight members with all their addresses, signed by the one that issued it. They are read, and
made no more.

A ticket is a secret: it is shown to the person who asked for it and kept in no log; `repr` hides it.
"""

import base64
import re
from collections.abc import Callable, Iterable
from typing import Annotated

from blake3 import blake3
from msgspec import Meta

from weft.errors import TicketError, TicketMismatch, WireError
from weft.ids import PeerId, RunId, several, short
from weft.keys import verify
from weft.net.admission import SECRET_NBYTES, Admission, Anyone, ByTicket
from weft.net.messages import Addresses, Contact, Name
from weft.net.transport.compact import is_from_outside, pack, relay_of, unpack
from weft.wire import Record, Signed, decode, unseal

VERSION = 2
MAX_LETTERS = 200  # of a ticket, unless an address that it needs is very long
_FEWEST_LETTERS = 52  # the name of the run alone
MAX_NBYTES = (MAX_LETTERS - len("weft2")) * 5 // 8  # in as many letters of base32
MAX_CHARS = 16_384  # a paste that is longer is something else
MAX_CONTACTS = 8  # on a ticket of format 1
_PREFIX = f"weft{VERSION}"
_CHECKSUM_NBYTES = 4
_SIGNATURE_NBYTES = 64
_RUN_NBYTES = 32
_MAX_SECRET_NBYTES = 64
_LONG = 0x80  # in the first byte of a length: it has two bytes
_Raw32 = Annotated[bytes, Meta(min_length=32, max_length=32)]


class _Contact(Record, frozen=True, kw_only=True, array_like=True):
    peer: _Raw32
    name: Name
    addresses: Addresses


class TicketBody(Record, frozen=True, kw_only=True, array_like=True):
    """What is signed in a ticket of format 1. Keys are raw bytes and fields unnamed, because a person copies this."""

    run: _Raw32
    issuer: _Raw32
    secret: Annotated[bytes, Meta(min_length=SECRET_NBYTES, max_length=_MAX_SECRET_NBYTES)] | None
    contacts: Annotated[tuple[_Contact, ...], Meta(min_length=1, max_length=MAX_CONTACTS)]


class Ticket(Record, frozen=True, kw_only=True):
    run: RunId
    contacts: tuple[Contact, ...]  # at least one, best first; keys may be the first digits only (`ids.is_start`)
    secret: bytes | None = None  # None: the run admits by key, or anyone
    issuer: PeerId | None = None  # who signed a ticket of format 1

    def admission(self) -> Admission:
        """Return the rule its holder starts with; the run's own rule follows from its RunConfig."""
        return Anyone() if self.secret is None else ByTicket(secret=self.secret)

    def __repr__(self) -> str:
        secret = "none" if self.secret is None else "<hidden>"
        return f"Ticket(run={short(self.run)}, contacts={len(self.contacts)}, secret={secret})"


def issue(run: RunId, contacts: Iterable[Contact], secret: bytes | None) -> str:
    """Return a fresh ticket in its string form.

    Args:
        contacts: members to ask, best first; of those that have an address as many are named as there is room for.

    Raises:
        TicketError: none of `contacts` has an address.
    """
    members = [contact for contact in contacts if contact.addresses]
    if not members:
        raise TicketError("no ticket can be made: no member has an address that others could dial")
    secret = secret or b""
    content = bytes([len(secret)]) + secret + bytes.fromhex(run)
    content += pack(members, MAX_NBYTES - 1 - len(content) - _CHECKSUM_NBYTES)
    size = len(content)
    framed = (bytes([size]) if size < _LONG else (_LONG << 8 | size).to_bytes(2, "big")) + content
    return _PREFIX + spell(framed + _checksum(framed, VERSION))


def best_first(contacts: Iterable[Contact], me: PeerId, standing: Callable[[PeerId], int | None]) -> list[Contact]:
    """Return members in the order in which a ticket made here names them.

    Who can be reached from outside comes before others, then an anchor, which stays, and then this peer itself.

    Args:
        standing: of another, as `Membership.standing` has it; who takes no part is left out.
    """

    ranked: list[tuple[bool, int, bool, int, Contact]] = []
    for number, member in enumerate(contacts):
        is_me = member.peer == me
        if (rank := 1 if is_me else standing(member.peer)) is not None:
            ranked.append((not is_from_outside(member.addresses), rank, not is_me, number, member))
    return [member for *_, member in sorted(ranked)]


def why_long(text: str) -> str | None:
    """Return why a ticket has more than `MAX_LETTERS` letters, in words; None where it has not."""
    if len(text) <= MAX_LETTERS:
        return None
    addresses = [each for contact in read(text).contacts for each in contact.addresses]
    what = f"the relay {relay}" if (relay := relay_of(addresses)) else "a long address"
    return f"this ticket has {len(text)} letters, more than the usual {MAX_LETTERS}, because it names {what}"


def spell(framed: bytes) -> str:
    """Return bytes as letters and digits, in lower case."""
    return base64.b32encode(framed).decode().rstrip("=").lower()


def read(text: str) -> Ticket:
    """Return the ticket that `text` spells.

    Raises:
        TicketError: too long, no ticket, cut short, mistyped, or not signed by its issuer.
        TicketMismatch: of another version.
    """
    if len(text) > MAX_CHARS:
        raise TicketError(
            f"this is {len(text)} characters long; a ticket has at most {MAX_CHARS}. Paste the ticket only."
        )
    # Greedy digits are right: base32 has digits too, but the first letter of a content below 16 KiB is none.
    match = re.fullmatch(r"weft(\d{1,4})(\S*)", "".join(text.split()).lower(), re.ASCII)
    if match is None:
        raise TicketError(
            f"this is not a ticket: a ticket is one word of letters and digits that begins with {_PREFIX}"
        )
    version, letters = int(match[1]), match[2]
    if not 1 <= version <= VERSION:
        raise TicketMismatch(
            f"this ticket has format {version} and this weft reads formats 1 to {VERSION}. "
            + ("Upgrade: pip install -U weft" if version > VERSION else "Ask a member for a fresh one: weft ticket")
        )
    content = _unframe(letters, version)
    return _read_signed(content) if version == 1 else _read_short(content)


def _unframe(letters: str, version: int) -> bytes:
    strange = re.search(r"[^a-z2-7]", letters)
    if strange is not None:
        raise TicketError(f"this ticket is mistyped: no ticket has the character {strange[0]!a}. Copy it again.")
    # 1, 3 or 6 letters beyond the last group of 8 are half a byte too many: the ticket was cut there.
    whole = letters[: len(letters) - (len(letters) % 8 in (1, 3, 6))]
    framed = base64.b32decode(whole.upper() + "=" * (-len(whole) % 8))
    begin, size = _size(framed, version)
    total = begin + size + _CHECKSUM_NBYTES
    if len(framed) < total:
        wanted = -(-total * 8 // 5)
        if wanted < _FEWEST_LETTERS:  # not even its length is whole
            raise TicketError(
                f"this ticket is cut short: it has {several(len(letters), 'letter')} after weft{version}, and none has "
                "so few. Copy it all."
            )
        raise TicketError(
            f"this ticket is cut short: {len(letters)} of {wanted} letters after weft{version}. Copy it all."
        )
    if len(framed) > total:
        raise TicketError("more follows this ticket than belongs to it: copy only the ticket")
    if _checksum(framed[:-_CHECKSUM_NBYTES], version) != framed[-_CHECKSUM_NBYTES:]:
        raise TicketError("this ticket is mistyped or cut short: its checksum does not match. Copy it again.")
    return framed[begin:-_CHECKSUM_NBYTES]


def _size(framed: bytes, version: int) -> tuple[int, int]:
    """Return how many bytes the length takes, and the content."""
    if version == 1:
        return 2, int.from_bytes(framed[:2], "big")
    if framed[:1] < bytes([_LONG]):
        return 1, int.from_bytes(framed[:1], "big")
    return 2, int.from_bytes(framed[:2], "big") - (_LONG << 8)


def _read_short(content: bytes) -> Ticket:
    num = content[0] if content else 0
    secret, run, members = content[1 : 1 + num], content[1 + num :][:_RUN_NBYTES], content[1 + num + _RUN_NBYTES :]
    try:
        if len(run) < _RUN_NBYTES or (num and not SECRET_NBYTES <= num <= _MAX_SECRET_NBYTES):
            raise ValueError("what it holds is too short")
        contacts = unpack(members)
        if not contacts:
            raise ValueError("it names no member")
    except ValueError as error:
        raise TicketError(f"this ticket is forged or made by a broken weft: {error}") from None
    return Ticket(run=RunId(run.hex()), contacts=contacts, secret=secret or None)


def _checksum(data: bytes, version: int) -> bytes:
    return blake3(data, derive_key_context=f"weft 2026 ticket checksum v{version}").digest(_CHECKSUM_NBYTES)


# --- format 1 ---


def _read_signed(content: bytes) -> Ticket:
    body = _open(content)
    return Ticket(
        run=RunId(body.run.hex()),
        issuer=PeerId(body.issuer.hex()),
        contacts=tuple(Contact(peer=PeerId(c.peer.hex()), name=c.name, addresses=c.addresses) for c in body.contacts),
        secret=body.secret,
    )


def _open(content: bytes) -> TicketBody:
    body, signature = content[:-_SIGNATURE_NBYTES], content[-_SIGNATURE_NBYTES:]
    try:
        issuer = PeerId(decode(body, TicketBody).issuer.hex())
        return unseal(
            Signed(kind=TicketBody.__name__, body=body, signer=issuer, signature=signature), TicketBody, verify
        )
    except WireError as error:
        raise TicketError(f"this ticket is forged or made by a broken weft: {error}") from None
