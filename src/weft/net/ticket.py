"""The string that lets a machine join: which run, whom to ask, and the secret that admits.

    weft1 <base32 of: 2 bytes length | canonical TicketBody | 64 bytes signature | 4 bytes checksum>

The issuer signs the body, so `weft join` can say who issued it. Length and checksum tell a ticket that was cut
short from one that was mistyped. Base32 in lower case survives chat programs, shells and a person reading it
aloud; white space inside is ignored.

A ticket is a secret: it is shown to the person who asked for it and kept in no log; `repr` hides it.
"""

import base64
import re
from collections.abc import Iterable
from typing import Annotated

from blake3 import blake3
from msgspec import Meta

from weft.errors import TicketError, TicketMismatch, WireError
from weft.ids import PeerId, RunId, short
from weft.keys import verify
from weft.net.admission import SECRET_NBYTES, Admission, Anyone, ByTicket
from weft.net.messages import Addresses, Contact, Name
from weft.wire import Record, Signed, Signer, decode, seal, unseal

VERSION = 1
MAX_CHARS = 16_384  # a paste that is longer is something else
MAX_CONTACTS = 8  # a few to ask; the rest is learnt from whoever answers
_CHECKSUM_NBYTES = 4
_SIGNATURE_NBYTES = 64
_Raw32 = Annotated[bytes, Meta(min_length=32, max_length=32)]


class _Contact(Record, frozen=True, kw_only=True, array_like=True):
    peer: _Raw32
    name: Name
    addresses: Addresses


class TicketBody(Record, frozen=True, kw_only=True, array_like=True):
    """What is signed. Keys are raw bytes and fields unnamed, because a person copies this."""

    run: _Raw32
    issuer: _Raw32
    secret: Annotated[bytes, Meta(min_length=SECRET_NBYTES, max_length=64)] | None
    contacts: Annotated[tuple[_Contact, ...], Meta(min_length=1, max_length=MAX_CONTACTS)]


class Ticket(Record, frozen=True, kw_only=True):
    run: RunId
    issuer: PeerId
    contacts: tuple[Contact, ...]  # at least one, best first
    secret: bytes | None = None  # None: the run admits by key, or anyone

    def admission(self) -> Admission:
        """Return the rule its holder starts with; the run's own rule follows from its RunConfig."""
        return Anyone() if self.secret is None else ByTicket(secret=self.secret)

    def __repr__(self) -> str:
        secret = "none" if self.secret is None else "<hidden>"
        who = f"issuer={short(self.issuer)}, contacts={len(self.contacts)}"
        return f"Ticket(run={short(self.run)}, {who}, secret={secret})"


def issue(signer: Signer, run: RunId, contacts: Iterable[Contact], secret: bytes | None) -> str:
    """Return a fresh ticket in its string form, signed by `signer`.

    Args:
        contacts: members to ask, best first; the first eight with addresses are taken, fewer if they are very long.

    Raises:
        TicketError: none of `contacts` has an address.
    """
    reachable = [contact for contact in contacts if contact.addresses][:MAX_CONTACTS]
    if not reachable:
        raise TicketError("no ticket can be made: no member has an address that others could dial")
    compact = [_Contact(peer=bytes.fromhex(c.peer), name=c.name, addresses=c.addresses) for c in reachable]
    issuer = bytes.fromhex(signer.peer)
    text = _spell(signer, TicketBody(run=bytes.fromhex(run), issuer=issuer, secret=secret, contacts=tuple(compact)))
    if len(text) > MAX_CHARS:  # one contact always fits
        return issue(signer, run, reachable[:-1], secret)
    return text


def _spell(signer: Signer, body: TicketBody) -> str:
    signed = seal(signer, body)
    content = signed.body + signed.signature
    framed = len(content).to_bytes(2, "big") + content
    framed += _checksum(framed)
    return f"weft{VERSION}" + base64.b32encode(framed).decode().rstrip("=").lower()


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
    # Greedy digits are right: base32 has digits too, but the first letter of a content below 16 KiB is one of a to h.
    match = re.fullmatch(r"weft(\d{1,4})(\S*)", "".join(text.split()).lower(), re.ASCII)
    if match is None:
        raise TicketError("this is not a ticket: a ticket is one word of letters and digits that begins with weft1")
    version, letters = int(match[1]), match[2]
    if version != VERSION:
        raise TicketMismatch(
            f"this ticket has format {version} and this weft reads format {VERSION}. "
            + ("Upgrade: pip install -U weft" if version > VERSION else "Ask a member for a fresh one: weft ticket")
        )
    body = _open(_unframe(letters))
    return Ticket(
        run=RunId(body.run.hex()),
        issuer=PeerId(body.issuer.hex()),
        contacts=tuple(Contact(peer=PeerId(c.peer.hex()), name=c.name, addresses=c.addresses) for c in body.contacts),
        secret=body.secret,
    )


def _unframe(letters: str) -> bytes:
    strange = re.search(r"[^a-z2-7]", letters)
    if strange is not None:
        raise TicketError(f"this ticket is mistyped: no ticket has the character {strange[0]!a}. Copy it again.")
    # 1, 3 or 6 letters beyond the last group of 8 are half a byte too many: the ticket was cut there.
    whole = letters[: len(letters) - (len(letters) % 8 in (1, 3, 6))]
    framed = base64.b32decode(whole.upper() + "=" * (-len(whole) % 8))
    total = 2 + int.from_bytes(framed[:2], "big") + _CHECKSUM_NBYTES
    if len(framed) < total:
        wanted = -(-total * 8 // 5)
        raise TicketError(f"this ticket is cut short: {len(letters)} of {wanted} letters after weft1. Copy it all.")
    if len(framed) > total:
        raise TicketError(
            f"{len(framed) - total} bytes that do not belong to this ticket follow it: copy only the ticket"
        )
    if _checksum(framed[:-_CHECKSUM_NBYTES]) != framed[-_CHECKSUM_NBYTES:]:
        raise TicketError("this ticket is mistyped or cut short: its checksum does not match. Copy it again.")
    return framed[2:-_CHECKSUM_NBYTES]


def _open(content: bytes) -> TicketBody:
    body, signature = content[:-_SIGNATURE_NBYTES], content[-_SIGNATURE_NBYTES:]
    try:
        issuer = PeerId(decode(body, TicketBody).issuer.hex())
        return unseal(
            Signed(kind=TicketBody.__name__, body=body, signer=issuer, signature=signature), TicketBody, verify
        )
    except WireError as error:
        raise TicketError(f"this ticket is forged or made by a broken weft: {error}") from None


def _checksum(data: bytes) -> bytes:
    return blake3(data, derive_key_context="weft 2026 ticket checksum v1").digest(_CHECKSUM_NBYTES)
