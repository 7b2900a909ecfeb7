"""Tickets of format 1, which are read and no longer made: as docs/formats.md describes them."""

import base64
from collections.abc import Iterable

import msgspec
from blake3 import blake3

from weft import wire
from weft.ids import RunId
from weft.net.messages import Contact
from weft.net.ticket import TicketBody
from weft.wire import Signer


def body_of(signer: Signer, run: RunId, contacts: Iterable[Contact], secret: bytes | None) -> TicketBody:
    named = tuple((bytes.fromhex(each.peer), each.name, each.addresses) for each in contacts)
    return msgspec.convert((bytes.fromhex(run), bytes.fromhex(signer.peer), secret, named), TicketBody)


def signed_ticket(signer: Signer, run: RunId, contacts: Iterable[Contact], secret: bytes | None) -> str:
    body = body_of(signer, run, contacts, secret)
    content = wire.encode(body) + wire.seal(signer, body).signature
    framed = len(content).to_bytes(2, "big") + content
    framed += blake3(framed, derive_key_context="weft 2026 ticket checksum v1").digest(4)
    return "weft1" + base64.b32encode(framed).decode().rstrip("=").lower()
