"""Who may be a peer of a run: three rules and the proof that travels.

    ByTicket  whoever knows the secret inside the run's tickets
    ByKeys    the listed keys
    Anyone    every key

Both ends of a connection check each other. The secret never travels: what travels is BLAKE3, keyed with it,
over the run and both keys in order. The transport has verified those keys, so a proof overheard by one peer is
worth nothing in another's hands, nor when shown to another peer.

A run that admits anyone trusts every key equally; see docs/threat_model.md.
"""

import hmac
from typing import Annotated, assert_never

from blake3 import blake3
from msgspec import Meta

from weft.config import Config
from weft.ids import PeerId, RunId, short
from weft.net.messages import HexPeer
from weft.rng import fresh_secret

SECRET_NBYTES = 16  # 128 bits: not to be guessed


class ByTicket(Config, frozen=True, kw_only=True, tag_field="admit", tag="ticket"):
    secret: Annotated[bytes, Meta(min_length=SECRET_NBYTES, max_length=64)]

    def __repr__(self) -> str:
        return "ByTicket(secret=<hidden>)"


class ByKeys(Config, frozen=True, kw_only=True, tag_field="admit", tag="keys"):
    allowed: tuple[HexPeer, ...]


class Anyone(Config, frozen=True, kw_only=True, tag_field="admit", tag="open"):
    pass


Admission = ByTicket | ByKeys | Anyone


def new_secret() -> bytes:
    return fresh_secret(SECRET_NBYTES)


def prove(admission: Admission, run: RunId, prover: PeerId, verifier: PeerId) -> bytes:
    """Return what `prover` shows `verifier`: 32 bytes, or none where the rule needs no proof."""
    if not isinstance(admission, ByTicket):
        return b""
    key = blake3(admission.secret, derive_key_context="weft 2026 admission secret v1").digest()
    return blake3(f"{run} {prover} {verifier}".encode(), key=key).digest()


def objection(admission: Admission, run: RunId, prover: PeerId, verifier: PeerId, proof: bytes) -> str | None:
    """Return why `prover` may not be a peer, in words for its user, or None when it may."""
    match admission:
        case ByTicket():
            if hmac.compare_digest(proof, prove(admission, run, prover, verifier)):
                return None
            if not proof:
                return "this run admits by ticket and no secret was shown; ask a member for one: weft ticket"
            return "the ticket's secret is not this run's; ask a member for a fresh one: weft ticket"
        case ByKeys():
            if prover in admission.allowed:
                return None
            return f"key {short(prover)} is not on this run's list; ask its maker to add {prover}"
        case Anyone():
            return None
        case _:
            assert_never(admission)
