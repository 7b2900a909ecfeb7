"""Who may be a peer of a run: three rules. Their proof is of the handshake (net/link/handshake.py).

    ByTicket  whoever knows the secret inside the run's tickets
    ByKeys    the listed keys
    Anyone    every key

A run that admits anyone trusts every key equally; see docs/threat_model.md.
"""

from typing import Annotated

from msgspec import Meta

from weft.config import Config
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


def secret_of(admission: Admission) -> bytes | None:
    """Return what this run's tickets hold; None where it admits by key, or anyone."""
    return admission.secret if isinstance(admission, ByTicket) else None
