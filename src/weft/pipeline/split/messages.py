"""What the members of a team say to each other while they compute a layer.

member                           another
  HandedOver ───────────────────►          bytes that it expects are ready: take them
  (blob) ◄──────────────────────►          so it does, once it asks for them
  ◄───────────────────── HasTaken
  TeamLeft ─────────────────────►          a note: do not wait for me

who leads                        member
  Help ─────────────────────────►          compute this micro-batch with me
  ◄──────────────────────── Helps          yes, once I am at that step; no
  ... forward, in a team ...
  GoBack ───────────────────────►          and back, in another one
  ◄──────────────────────── Helps
  Counted ──────────────────────►          a note: it counts, so keep its part of the gradient
  SumRequest ───────────────────►          what is your part, of these?
  ◄───────────────────── SumAnswer         bytes of this digest

Every bound is here, with its reason.
"""

from typing import Annotated

from msgspec import Meta

from weft.ids import Digest
from weft.net.messages import HexDigest, HexPeer, Reason
from weft.pipeline.messages import MAX_MICRO_BATCH, Number, Stage
from weft.pipeline.split.cut import MAX_TEAM, MIN_TEAM
from weft.wire import Record, digest

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


MAX_COUNTED = 1 << 13  # micro-batches of a step: their names fit a call


class Help(Record, frozen=True, kw_only=True, tag="Help"):
    """A call."""

    stage: Stage
    name: HexDigest  # of the micro-batch on its way: no other has it
    members: Annotated[tuple[HexPeer, ...], Meta(min_length=MIN_TEAM, max_length=MAX_TEAM)]
    round: Number
    step: Number
    num_samples: Annotated[int, Meta(ge=1, le=MAX_MICRO_BATCH)]

    @property
    def there(self) -> Digest:
        """Return the name of the team on the way forward."""
        return digest(f"{self.name} there".encode())

    @property
    def back(self) -> Digest:
        return digest(f"{self.name} back".encode())


class Helps(Record, frozen=True, kw_only=True, tag="Helps"):
    does: bool


class GoBack(Record, frozen=True, kw_only=True, tag="GoBack"):
    """A call: the gradient of its output has come."""

    stage: Stage
    name: HexDigest


class Counted(Record, frozen=True, kw_only=True, tag="Counted"):
    """A note."""

    stage: Stage
    name: HexDigest


class SumRequest(Record, frozen=True, kw_only=True, tag="SumRequest"):
    """A call: the gradients of exactly these, together."""

    stage: Stage
    names: Annotated[tuple[HexDigest, ...], Meta(max_length=MAX_COUNTED)]


class SumAnswer(Record, frozen=True, kw_only=True, tag="SumAnswer"):
    digest: HexDigest | None  # of fp32 numbers, as many as the section has; None: it has not all of them
