"""What the peers of a pipeline say to each other about a micro-batch.

sender                           member of the next stage
  Forward ──────────────────────►          activations are ready: take them
  ◄─────────────────────── IsTaken          or not: it has as much as it may have
  (blob) ◄──────────────────────►          the activations
  ◄───────────────────── Computed          a note: the forward pass is done, and they are on their way to the next
  ◄───────────────────── Backward          the gradient of what was sent is ready: accept it
  (blob) ◄──────────────────────►          the gradient
  Verdict ──────────────────────►          it is accepted; or another attempt's was
  ◄────────────────────── GivenUp          instead of all this: a note that it cannot be computed here

Where members audit each other, what comes back says what it was made of, signed, and its sender tells the others of
that stage (`PassageTold`, a note).

Whoever begins a micro-batch sends it to the first stage so, too, tokens alone, and gets nothing but a loss back. What
is asked twice is answered twice, alike. Every bound is here, with its reason.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from weft.net.membership.full_mesh import MAX_MEMBERS
from weft.net.messages import HexDigest, HexPeer
from weft.wire import Record, Signed

MAX_MICRO_BATCH = 1 << 10  # samples: their activations are sent in one piece

MAX_TOKENS_NBYTES = 768 << 10  # of a micro-batch, four bytes a token: they fit a call's body
MAX_STAGES = 1024  # more layers than any model has

Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
Stage = Annotated[int, Meta(ge=0, lt=MAX_STAGES)]
Word = Literal["accepted", "refused", "unknown"]


class OfAttempt(Record, frozen=True, kw_only=True):
    stage: Stage
    """Of the member that it is sent to, and which answers it."""
    origin: HexPeer
    number: Number
    attempt: Number


class Forward(OfAttempt, frozen=True, kw_only=True, tag="Forward"):
    """A call: compute this."""

    num_samples: Annotated[int, Meta(ge=1, le=MAX_TOKENS_NBYTES // 8)]
    tokens: Annotated[bytes, Meta(max_length=MAX_TOKENS_NBYTES)]
    """[num_samples, seq_len + 1] ids, each of four bytes, the lowest first: what to predict, and of what. In a run of
    conversations their highest bits say where those begin, and what is trained on."""
    activations: HexDigest | None
    """None: to the first stage."""
    round: Number = 0
    step: Number = 0  # within it: the step that this is of
    is_measured: bool = False  # held-out: nothing but the loss is asked for, and nothing is counted
    may_wait: bool = True  # False: where others wait for the member, too, let it not take this: another may be free


class IsTaken(Record, frozen=True, kw_only=True, tag="IsTaken"):
    is_taken: bool


class Computed(OfAttempt, frozen=True, kw_only=True, tag="Computed"):
    """A note: its receipt, for the sender's account of how fast the member is."""


class GivenUp(OfAttempt, frozen=True, kw_only=True, tag="GivenUp"):
    """A note: the member could not compute it, and forgets it: another may."""


class Backward(OfAttempt, frozen=True, kw_only=True, tag="Backward"):
    """A call: here is the gradient of what you sent."""

    gradient: HexDigest | None
    """None: what was sent is tokens."""
    loss: float
    """Mean over the micro-batch, in nats per token."""
    passage: Signed | UnsetType = UNSET
    """What its author says that it has computed; unset: nobody audits it."""
    after: Signed | UnsetType = UNSET
    """The same of the member of the next stage; unset likewise, and where there is none."""


class PassageTold(Record, frozen=True, kw_only=True, tag="PassageTold"):
    """A note of who has sent a micro-batch, to the other members of the stage that has computed it."""

    stage: Stage
    passage: Signed


class Passing(Record, frozen=True, kw_only=True, tag="Passing"):
    """A note of a member of the first stage to everybody: how far it is with what it begins."""

    round: Number
    step: Number
    is_done: bool
    origins: Annotated[tuple[HexPeer, ...], Meta(max_length=MAX_MEMBERS)]


class Verdict(Record, frozen=True, kw_only=True, tag="Verdict"):
    word: Word
    """unknown: the sender has no memory of it, as after a restart."""
