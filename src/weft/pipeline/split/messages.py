"""What the members of a team say to each other while they compute a layer.

member                           another
  HandedOver ───────────────────►          bytes that it expects are ready: take them
  (blob) ◄──────────────────────►          so it does, once it asks for them
  ◄───────────────────── HasTaken
  TeamLeft ─────────────────────►          a note: do not wait for me

Every bound is here, with its reason. This file knows no behaviour.
"""

from typing import Annotated

from msgspec import Meta

from weft.net.messages import HexDigest, Reason
from weft.wire import Record

MAX_HANDED_NBYTES = 1 << 40  # far above any activations; what is taken is of exactly the length that was expected
MAX_NUMBER = 1 << 32  # handings over of one team, which has a few per layer
MAX_WAITING = 32  # of one peer, said before they were asked for: half of the calls it may have open here


class HandedOver(Record, frozen=True, kw_only=True, tag="HandedOver"):
    """A call."""

    team: HexDigest
    number: Annotated[int, Meta(ge=0, lt=MAX_NUMBER)]
    """Counts what each member gives to each: all count alike."""
    digest: HexDigest
    nbytes: Annotated[int, Meta(ge=0, le=MAX_HANDED_NBYTES)]


class HasTaken(Record, frozen=True, kw_only=True, tag="HasTaken"):
    pass


class TeamLeft(Record, frozen=True, kw_only=True, tag="TeamLeft"):
    """A note: the sender computes no more with this team."""

    team: HexDigest
    reason: Reason
