"""What rank 0 tells all ranks to do, itself included. They do the same things in the same order.

Vectors have numbers, which rank 0 gives out. These records stay inside a site, whose ranks trust each other.
"""

import msgspec

from weft.inference.sample import Sampling
from weft.run.config import RunConfig
from weft.sync.method.choices import AdamWConfig, DelayedNesterovConfig, InnerSgdConfig, NesterovConfig, SgdConfig


class _Order(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The base of all of them."""


# --- vectors ---


class Size(_Order, frozen=True, kw_only=True):
    """All vectors have so many numbers from now on."""

    num: int


class Compute(_Order, frozen=True, kw_only=True):
    """Plain arithmetic, each rank on its strip.

    Args:
        operation: of torch, one of `worker.OPERATIONS`.
        vectors: its first arguments; the others are numbers.
        into: the vector that holds the result: new, or the first.
    """

    operation: str
    vectors: tuple[int, ...]
    numbers: tuple[float, ...] = ()
    alpha: float | None = None
    into: int


class Fresh(_Order, frozen=True, kw_only=True):
    """A new vector, of zeros."""

    vector: int


class _Piece(_Order, frozen=True, kw_only=True):
    start: int
    stop: int


class Read(_Piece, frozen=True, kw_only=True):
    """Send what is held of a piece to rank 0."""

    vector: int


class Write(_Piece, frozen=True, kw_only=True):
    """Take what is held of a piece from rank 0."""

    vector: int


class Digests(_Order, frozen=True, kw_only=True):
    """Answer the digests of the strip's chunks."""

    vector: int


class SquareSums(_Order, frozen=True, kw_only=True):
    """Answer the sums of squares of the strip's chunks."""

    vector: int


class OuterStep(_Order, frozen=True, kw_only=True):
    """Make an outer step, each rank on its strip.

    Args:
        by: what makes it; one of two kinds, whose names are alike.
        shorten: the factor that `merged` is multiplied with before.
    """

    by: SgdConfig | NesterovConfig | DelayedNesterovConfig | None = None
    by_inner: AdamWConfig | InnerSgdConfig | None = None
    outer: int
    state: dict[str, int]
    merged: int
    shorten: float
    number: int
    round: int
    lr: float
    num_decayed: int


# --- the model ---


class Begin(_Order, frozen=True, kw_only=True):
    """Take the device: build the model, whose parameters are then `local`."""

    run: RunConfig
    local: int


class Leave(_Order, frozen=True, kw_only=True):
    """Leave the device; model and optimizer are gone."""


class _Batch(_Order, frozen=True, kw_only=True):
    num_samples: int
    seq_len: int
    micro_batch: int
    has_positions: bool  # rows of whole texts


class Gradient(_Batch, frozen=True, kw_only=True):
    """Compute the mean gradient over a batch, which rank 0 shares; answer its loss and norm, on rank 0."""


class Pull(_Order, frozen=True, kw_only=True):
    """Add the gradient of mu / 2 |x - center|^2; answer the norm, on rank 0."""

    strength: float


class Move(_Order, frozen=True, kw_only=True):
    """Multiply the gradient, and make an inner step with it."""

    shorten: float
    learning_rate: float


class TakeGradient(_Order, frozen=True, kw_only=True):
    """Multiply the gradient, and write it to a vector."""

    shorten: float
    into: int


class DropGradient(_Order, frozen=True, kw_only=True):
    """Forget the gradient."""


class Local(_Order, frozen=True, kw_only=True):
    """Write the model's parameters to a vector."""

    into: int


class SetLocal(_Order, frozen=True, kw_only=True):
    """Set the model's parameters."""

    vector: int


class SetAnchor(_Order, frozen=True, kw_only=True):
    """Set what inner steps are pulled to."""

    vector: int


class ReadMoment(_Piece, frozen=True, kw_only=True):
    """Send what is held of a piece of one of the inner optimizer's vectors to rank 0."""

    name: str


class Moments(_Order, frozen=True, kw_only=True):
    """Write the inner optimizer's vectors."""

    into: dict[str, int]


class SetMoments(_Order, frozen=True, kw_only=True):
    """Set the inner optimizer's vectors, after so many steps."""

    vectors: dict[str, int]
    num_steps: int


class Wear(_Order, frozen=True, kw_only=True):
    """Compute with other parameters from now on; the model's are kept beside."""

    vector: int


class Unwear(_Order, frozen=True, kw_only=True):
    """Compute with the model's own parameters again."""


class Loss(_Batch, frozen=True, kw_only=True):
    """Answer the summed loss over a batch, which rank 0 shares, on rank 0."""


class Generate(_Order, frozen=True, kw_only=True):
    """Let the model write on; answer the tokens, on rank 0."""

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    within_s: float  # of rank 0's clock; infinite: as long as it takes


# --- the site ---


class Still(_Order, frozen=True, kw_only=True):
    """Nothing: rank 0 is there."""


class Close(_Order, frozen=True, kw_only=True):
    """The end."""


VectorOrder = Size | Compute | Fresh | Read | Write | Digests | SquareSums | OuterStep
StepOrder = Gradient | Pull | Move | TakeGradient | DropGradient
StateOrder = Local | SetLocal | SetAnchor | ReadMoment | Moments | SetMoments
ModelOrder = StepOrder | StateOrder | Wear | Unwear | Loss | Generate
Order = VectorOrder | Begin | Leave | ModelOrder | Still | Close


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What is told at a time: an order, and which vectors nobody wants any more."""

    order: Order
    dropped: tuple[int, ...] = ()
